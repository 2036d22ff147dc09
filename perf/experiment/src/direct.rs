//! Requests as streams of one QUIC connection, echoed by the server; over any IO provider.
//!
//! A request's first byte is the index of its class; from it, the server schedules the echo as the client does the
//! request. Deadlines count from the start of a request at the client, and from its arrival at the server.

use std::{net::SocketAddr, pin::pin, sync::Arc, task::Poll, time::Duration};

use admission::connection_id::Issuer;
use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use futures::{
    StreamExt as _,
    future::{Either, poll_fn, select, try_join},
    stream::FuturesUnordered,
};
use masque::h3::Role;
use plan::{self, Class, Plan, Scheduler};
use quic::{
    class::Terms,
    clock::Clock,
    datagrams::{Datagrams, QueueLimits, Schedule},
    dispatch::{self, Binding, Dispatcher},
    endpoint::{self, Admission, Congestion, Io, Pacing, Sockets, Transport},
    events::EndpointSubscriber,
    tls::{self, Identity, ServerTls, Trust},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use s2n_quic::{
    Client, Connection, Server,
    client::Connect,
    connection::Handle,
    provider::{
        congestion_controller::{self, Bbr, Cubic},
        event::{Subscriber, disabled::Subscriber as Disabled},
        io,
    },
    stream::{BidirectionalStream, Error as StreamError},
};

use super::{Request, Run, unpaced::Unpaced};

/// The size of IP packets: Ethernet's MTU.
pub const MTU: u16 = 1_500;

/// The fraction of a full packet's Ethernet frame that is UDP payload.
const PAYLOAD_SHARE: f64 = (1_500.0 - 28.0) / (1_500.0 + 14.0);

/// The name in the server's certificate.
const SERVER_NAME: &str = "server.example";

/// The configuration of the two endpoints of a run.
pub struct Ends {
    transport: Transport,
    schedule: Schedule,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Ends {
    /// Prepares the endpoints for a scheduler; `seed` is for disciplines that use a lottery.
    ///
    /// # Errors
    /// If the scheduler is not a scheduler of QUIC, or the system gives no randomness.
    pub fn new(plan: &Plan, scheduler: Scheduler, clock: Clock, seed: u64) -> Result<Self> {
        let (discipline, binding) = scheduler.of_streams().context("not a scheduler of QUIC")?;
        let made = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
        let congestion = match plan.congestion {
            plan::Congestion::Cubic => Congestion::Cubic,
            plan::Congestion::Bbr => Congestion::Bbr,
            plan::Congestion::FixedMbit(mbit) => {
                Congestion::Fixed { bytes_per_sec: (mbit * 1e6 / 8.0 * PAYLOAD_SHARE) as u64 }
            }
        };
        let mut pacing = Pacing::default();
        pacing.quantum = plan.quantum_us.map_or(pacing.quantum, Duration::from_micros);
        pacing.min_rtt = plan.min_paced_rtt_us.map_or(pacing.min_rtt, Duration::from_micros);
        if matches!(scheduler, Scheduler::ActiveWait | Scheduler::PassiveWait) {
            // Unexamined devices count as keeping departures, and then no packet would wait in the process.
            pacing.devices.unknown().set_keeps_departures(false);
        }
        if scheduler == Scheduler::PassiveWait {
            pacing.quantum = Duration::from_millis(1);
        }
        let defaults = Transport::default();
        // One-way transfers should be limited only by the path.
        let ample = |bytes: u64| if plan.workload.one_way { 8 << 20 } else { bytes };
        Ok(Self {
            transport: Transport {
                stream_window_bytes: ample(defaults.stream_window_bytes),
                stream_buffer_bytes: ample(defaults.stream_buffer_bytes.into()) as u32,
                initial_mtu: MTU,
                max_mtu: MTU,
                congestion,
                // When the kernel loses a packet of a batch, it loses the whole batch.
                gso: plan.workload.one_way && scheduler != Scheduler::ActiveWait,
                stream_batch: if binding == Binding::Early { 1 } else { 255 },
                io: match scheduler {
                    Scheduler::Paced | Scheduler::ActiveWait | Scheduler::PassiveWait => Io::Paced(pacing),
                    _ => Io::Stock,
                },
                ..defaults
            },
            schedule: Schedule { discipline, binding, clock, seed, ..Schedule::default() },
            certificate: made.cert.der().clone(),
            key: PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes())?,
        })
    }

    /// Starts the server's endpoint.
    ///
    /// # Errors
    /// When the address is taken.
    pub fn server<I: io::Provider>(&self, io: I) -> Result<Server> {
        let identity = Identity {
            chain: vec![self.certificate.clone()],
            key: self.key.clone_key(),
            client_authorities: None,
            revoked: Vec::new(),
        };
        endpoint::serve_over(
            io,
            &self.transport,
            ServerTls::new(identity.prepare()?),
            self.datagrams(),
            Admission::default(),
            &Issuer::ephemeral()?,
        )
    }

    /// Starts the client's endpoint.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn client<I: io::Provider>(&self, io: I) -> Result<Client> {
        let tls = tls::client(Trust::Pinned(tls::fingerprint(&self.certificate)), None)?;
        endpoint::connect_over(io, &self.transport, tls, self.datagrams())
    }

    /// Starts the client's endpoint as plain s2n-quic, without our providers.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn plain_client<I: io::Provider>(&self, io: I) -> Result<Client> {
        let tls = tls::client(Trust::Pinned(tls::fingerprint(&self.certificate)), None)?;
        let builder = Client::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(tls)?
            .with_limits(self.transport.limits(Role::Client)?)?;
        Ok(match self.transport.congestion {
            Congestion::Bbr => builder.with_congestion_controller(Bbr::default())?.start()?,
            _ => builder.with_congestion_controller(Cubic::default())?.start()?,
        })
    }

    /// Returns sockets at an address.
    ///
    /// # Errors
    /// When no IO provider can be made of them.
    pub fn sockets(&self, address: SocketAddr) -> Result<Sockets> {
        self.transport.sockets(address)
    }

    /// Starts the client's endpoint, with a subscriber to the transport's events.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn observed_client<I: io::Provider>(&self, io: I, observer: impl Subscriber) -> Result<Client> {
        self.client_with(io, observer, self.transport.controllers())
    }

    /// Starts the client's endpoint without pacing: packets leave as soon as the congestion window allows.
    ///
    /// # Errors
    /// When no socket can be opened.
    pub fn unpaced_client<I: io::Provider>(&self, io: I) -> Result<Client> {
        self.client_with(io, Disabled, Unpaced(self.transport.controllers()))
    }

    fn client_with<I: io::Provider>(
        &self,
        io: I,
        observer: impl Subscriber,
        congestion: impl congestion_controller::Provider,
    ) -> Result<Client> {
        let tls = tls::client(Trust::Pinned(tls::fingerprint(&self.certificate)), None)?;
        let builder = Client::builder()
            .with_io(io)
            .map_err(|error| anyhow!("{error}"))?
            .with_tls(tls)?
            .with_datagram(self.datagrams())?
            .with_limits(self.transport.limits(Role::Client)?)?
            .with_event((EndpointSubscriber::default(), observer))?
            .with_congestion_controller(congestion)
            .map_err(|error| anyhow!("{error}"))?;
        Ok(builder.start()?)
    }

    /// The experiment sends no datagrams.
    fn datagrams(&self) -> Datagrams {
        let limits = QueueLimits { flow_bytes: 0, connection_bytes: 0 };
        Datagrams { limits, counters: Arc::default(), max_frame_bytes: 0, schedules: self.schedule.clone().into() }
    }
}

/// Makes requests over one connection until all have ended, or the plan's limit has passed. Returns their outcome.
///
/// # Errors
/// When there is no connection, or a request fails for another reason than its deadline.
pub async fn request(
    client: Client,
    server: SocketAddr,
    plan: &Plan,
    requests: &[Request],
    clock: Clock,
) -> Result<Run> {
    let mut handle = connect(&client, server).await?;
    let (dispatcher, driver) = Dispatcher::of(&mut handle)?;
    let began_ns = (clock.now_ns)();
    let bodies: Vec<_> = plan.classes.iter().enumerate().map(|(index, class)| body(index, class)).collect();
    let mut latencies = vec![None; requests.len()];
    {
        let exchange = |(index, request): (usize, &Request)| {
            let (class, start_ns) = (&plan.classes[request.class], began_ns + request.start_ns);
            let (handle, dispatcher, body) = (handle.clone(), &dispatcher, bodies[request.class].clone());
            async move { (index, exchange(handle, dispatcher, terms(class), body, start_ns, clock).await) }
        };
        let mut pending: FuturesUnordered<_> = requests.iter().enumerate().map(exchange).collect();
        let all = async {
            while let Some((index, latency)) = pending.next().await {
                latencies[index] = latency?;
            }
            Ok::<_, anyhow::Error>(())
        };
        let limit = (clock.sleep_until)(began_ns + plan.workload.limit_s * 1_000_000_000);
        let driven = select(Box::pin(all), Box::pin(driver.run()));
        if let Either::Left((Either::Left((ended, _)), _)) = select(driven, limit).await {
            ended?;
        }
    }
    let total = elapsed(clock, began_ns);
    handle.close(0_u8.into());
    Ok(Run::new(plan, requests, &latencies, total))
}

/// Connects to the server.
pub(super) async fn connect(client: &Client, server: SocketAddr) -> Result<Handle> {
    let connect = Connect::new(server).with_server_name(SERVER_NAME);
    Ok(client.connect(connect).await.context("no connection to the server")?.handle())
}

/// Returns the scheduling terms of a class.
pub(super) fn terms(class: &Class) -> Terms {
    let deadline_ns = class.deadline_ms.map(|ms| ms * 1_000_000);
    Terms::of(class.service(), deadline_ns)
}

/// How many bytes of a body are queued at once.
const CHUNK_BYTES: usize = 16 * 1024;

fn body(index: usize, class: &Class) -> Bytes {
    let mut body = vec![0; class.bytes];
    // A plan has at most 256 classes, and a body has at least one byte.
    body[0] = index as u8;
    body.into()
}

/// Makes one request and returns how long it took. Returns `None` if its deadline ended it, at the client or at the
/// server.
async fn exchange(
    mut handle: Handle,
    dispatcher: &Dispatcher,
    terms: Terms,
    mut body: Bytes,
    start_ns: u64,
    clock: Clock,
) -> Result<Option<Duration>> {
    (clock.sleep_until)(start_ns).await;
    let bytes = body.len();
    let (mut receive, send) = handle.open_bidirectional_stream().await.context("no stream")?.split();
    let mut send = dispatcher.attach(send, terms);
    let sending = async {
        while !body.is_empty() {
            send.send(body.split_to(body.len().min(CHUNK_BYTES))).await?;
        }
        send.finish();
        Ok(())
    };
    let receiving = async {
        let mut received = 0;
        while let Some(chunk) = receive.receive().await? {
            received += chunk.len();
        }
        Ok::<_, dispatch::StreamWriteError>(received)
    };
    match try_join(sending, receiving).await {
        Ok(((), received)) if received == bytes => Ok(Some(elapsed(clock, start_ns))),
        Ok(((), received)) => bail!("{received} of {bytes} bytes came back"),
        Err(
            dispatch::StreamWriteError::Expired | dispatch::StreamWriteError::Stream(StreamError::StreamReset { .. }),
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn elapsed(clock: Clock, since_ns: u64) -> Duration {
    Duration::from_nanos((clock.now_ns)().saturating_sub(since_ns))
}

/// Serves until the endpoint ends.
pub async fn serve(mut server: Server, plan: Arc<Plan>) {
    let mut connections = FuturesUnordered::new();
    while let Some(connection) = beside(server.accept(), &mut connections).await {
        connections.push(echo_all(connection, &plan));
    }
}

/// Serves a connection until it ends.
async fn echo_all(connection: Connection, plan: &Plan) {
    let (mut handle, mut acceptor) = connection.split();
    let Ok((dispatcher, driver)) = Dispatcher::of(&mut handle) else { return };
    let mut echoes = FuturesUnordered::new();
    let all = async {
        while let Ok(Some(stream)) = beside(acceptor.accept_bidirectional_stream(), &mut echoes).await {
            echoes.push(echo(stream, &dispatcher, plan));
        }
    };
    select(pin!(all), pin!(driver.run())).await;
}

/// Waits for `next` while it also drives the others.
pub(super) async fn beside<T, F: Future>(next: impl Future<Output = T>, others: &mut FuturesUnordered<F>) -> T {
    let mut next = pin!(next);
    poll_fn(|cx| {
        while let Poll::Ready(Some(_)) = others.poll_next_unpin(cx) {}
        next.as_mut().poll(cx)
    })
    .await
}

/// Echoes a request's bytes. If the echo ends early, so does the stream, and the client sees that.
async fn echo(stream: BidirectionalStream, dispatcher: &Dispatcher, plan: &Plan) -> Result<()> {
    let (mut receive, send) = stream.split();
    let mut send = dispatcher.attach(send, Terms::default());
    let Some(first) = receive.receive().await? else { return Ok(()) };
    let class = first.first().and_then(|index| plan.classes.get(usize::from(*index))).context("no such class")?;
    send.set_terms(terms(class));
    send.send(first).await?;
    while let Some(chunk) = receive.receive().await? {
        send.send(chunk).await?;
    }
    send.finish();
    Ok(())
}
