//! Requests as streams of one QUIC connection, echoed by the server; over any IO provider.
//!
//! A request's first byte is the index of its class; with it, the server schedules the echo as the client does the
//! request. Deadlines count from the start of a request at the client, and from its arrival at the server.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, atomic::AtomicBool},
    task::Poll,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures::{
    Future, FutureExt as _, StreamExt as _,
    future::{poll_fn, try_join},
    stream::FuturesUnordered,
};
use paced::quic::{
    datagrams::{Datagrams, QueueLimits, Schedule},
    endpoint::{self, Admission, Congestion, Transport},
    tls::{self, Identity, ServerTls, Trust},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use s2n_quic::{
    Client, Connection, Server, client::Connect, connection::Handle, provider::io, stream::BidirectionalStream,
};

use super::{Request, Run, Sample};
use crate::{
    load::Figure,
    plan::{self, Plan, Scheduler},
};

/// Size of IP packets: Ethernet's.
pub const MTU: u16 = 1_500;

/// The name in the server's certificate.
const SERVER_NAME: &str = "server.example";

/// What makes the two endpoints of a run.
pub struct Ends {
    transport: Transport,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Ends {
    /// Makes ready for a scheduler; `seed` is for disciplines that draw lots.
    ///
    /// # Errors
    /// The scheduler is none of QUIC's, or the system gives no randomness.
    pub fn new(plan: &Plan, scheduler: Scheduler, _time: Time, _seed: u64) -> Result<Self> {
        ensure!(scheduler == Scheduler::Plain, "there is no {} for streams of QUIC yet", scheduler.name());
        let made = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
        let congestion = match plan.congestion {
            plan::Congestion::Cubic => Congestion::Cubic,
            plan::Congestion::Bbr => Congestion::Bbr,
        };
        Ok(Self {
            transport: Transport { initial_mtu: MTU, max_mtu: MTU, congestion, ..Transport::default() },
            certificate: made.cert.der().clone(),
            key: PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes())?,
        })
    }

    /// Starts the server's end.
    ///
    /// # Errors
    /// The address is taken.
    pub fn server<I: io::Provider>(&self, io: I) -> Result<Server> {
        let identity =
            Identity { chain: vec![self.certificate.clone()], key: self.key.clone_key(), client_authorities: None };
        let admission = Admission {
            max_connections: 10,
            max_handshakes: 10,
            open: Arc::new(AtomicBool::new(true)),
            handshakes: Arc::default(),
            ports: Default::default(),
        };
        endpoint::serve(io, &self.transport, ServerTls::new(identity.prepare()?), self.datagrams(), admission)
    }

    /// Starts the client's end.
    ///
    /// # Errors
    /// No socket can be had.
    pub fn client<I: io::Provider>(&self, io: I) -> Result<Client> {
        let tls = tls::client(Trust::Pinned(tls::fingerprint(&self.certificate)), None)?;
        endpoint::connect(io, &self.transport, tls, self.datagrams())
    }

    /// No datagrams are sent.
    fn datagrams(&self) -> Datagrams {
        let limits = QueueLimits { flow_bytes: 0, connection_bytes: 0 };
        Datagrams { limits, counters: Arc::default(), max_frame_bytes: 0, schedule: Schedule::default() }
    }
}

/// Makes requests over one connection until all have ended, or the plan's limit has. Returns what became of them.
///
/// # Errors
/// There is no connection, or a request fails.
pub async fn request(client: Client, server: SocketAddr, plan: &Plan, requests: &[Request], time: Time) -> Result<Run> {
    let connect = Connect::new(server).with_server_name(SERVER_NAME);
    let connection = client.connect(connect).await.context("no connection to the server")?;
    let handle = connection.handle();
    let began_ns = (time.now_ns)();
    let bodies: Vec<_> = plan.classes.iter().enumerate().map(|(index, class)| body(index, class)).collect();
    let mut pending: FuturesUnordered<_> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| {
            let start_ns = began_ns + request.start_ns;
            one(handle.clone(), bodies[request.class].clone(), start_ns, time).map(move |latency| (index, latency))
        })
        .collect();
    let mut limit = (time.sleep_until)(began_ns + plan.workload.limit_s * 1_000_000_000);
    let mut samples: Vec<_> =
        requests.iter().map(|request| Sample { class: request.class, latency_ns: None }).collect();
    let mut echoed_bytes = 0;
    while let Some((index, latency)) = poll_fn(|cx| match limit.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => pending.poll_next_unpin(cx),
    })
    .await
    {
        samples[index].latency_ns = latency?;
        echoed_bytes += samples[index].latency_ns.map_or(0, |_| plan.classes[samples[index].class].bytes);
    }
    let total_ns = (time.now_ns)() - began_ns;
    handle.close(0_u8.into());
    let goodput_mbit = echoed_bytes as f64 * 8e3 / total_ns as f64;
    Ok(Run { samples, total_ns, figures: vec![Figure { metric: "goodput_mbit", value: goodput_mbit, unit: "Mbit/s" }] })
}

fn body(index: usize, class: &plan::Class) -> Bytes {
    let mut body = vec![0; class.bytes];
    // A plan has at most 256 classes.
    body[0] = index as u8;
    body.into()
}

/// Makes one request and returns how long it took.
async fn one(mut handle: Handle, body: Bytes, start_ns: u64, time: Time) -> Result<Option<u64>> {
    (time.sleep_until)(start_ns).await;
    let bytes = body.len();
    let (mut receive, mut send) = handle.open_bidirectional_stream().await.context("no stream")?.split();
    let sending = async {
        send.send(body).await?;
        Ok::<_, anyhow::Error>(send.finish()?)
    };
    let receiving = async {
        let mut received = 0;
        while let Some(chunk) = receive.receive().await? {
            received += chunk.len();
        }
        ensure!(received == bytes, "{received} bytes came back of {bytes}");
        Ok(())
    };
    try_join(sending, receiving).await?;
    Ok(Some((time.now_ns)() - start_ns))
}

/// Serves until the endpoint ends.
pub async fn serve(mut server: Server, plan: Arc<Plan>, time: Time) {
    let mut connections = FuturesUnordered::new();
    while let Some(connection) = both(server.accept(), &mut connections).await {
        connections.push(echo_all(connection, &plan, time));
    }
}

async fn echo_all(connection: Connection, plan: &Plan, time: Time) {
    let (_, mut acceptor) = connection.split();
    let mut echoes = FuturesUnordered::new();
    while let Ok(Some(stream)) = both(acceptor.accept_bidirectional_stream(), &mut echoes).await {
        echoes.push(echo(stream, plan, time));
    }
}

/// What comes of `next`; `others` go on meanwhile.
async fn both<T, F: Future>(next: impl Future<Output = T>, others: &mut FuturesUnordered<F>) -> T {
    let mut next = pin!(next);
    poll_fn(|cx| {
        while let Poll::Ready(Some(_)) = others.poll_next_unpin(cx) {}
        next.as_mut().poll(cx)
    })
    .await
}

/// Sends a stream's bytes back. What ends it early is seen by the client.
async fn echo(stream: BidirectionalStream, _plan: &Plan, _time: Time) -> Result<()> {
    let (mut receive, mut send) = stream.split();
    while let Some(chunk) = receive.receive().await? {
        send.send(chunk).await?;
    }
    Ok(send.finish()?)
}

/// A source of time.
#[derive(Clone, Copy)]
pub struct Time {
    /// Nanoseconds since some moment.
    pub now_ns: fn() -> u64,
    /// Ends when that has reached a value.
    pub sleep_until: fn(u64) -> Sleep,
}

/// Ends at a moment.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;
