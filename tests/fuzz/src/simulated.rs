//! A relay and its clients over the simulated network, in virtual time: the product's QUIC providers, HTTP/3, queues and
//! tunnels, with an echo instead of a target.
//!
//! All randomness has a seed, except that of TLS and of connection IDs, whose bytes affect nothing here.

use std::{
    convert::Infallible,
    future::poll_fn,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::{
    connection_id::Issuer,
    limits::AdmissionLimits,
    strangers::{AdmissionVerdict, ClientStanding, ConnectionPlaces},
};
use anyhow::{Context as _, Result, anyhow};
use futures::stream::{FuturesUnordered, StreamExt as _};
use lab::simulation::{CLOCK, TARGET, TEMPLATE, identity, send_back, target, within};
use masque::{
    h3::{Code, Part, ResponseHead, Role},
    proxy_status::ProxyName,
    request::{self, TunnelProtocol},
    template::Template,
};
use parking_lot::Mutex;
use quic::{
    datagrams::{DatagramCounters, Datagrams, QueueLimits, Schedule},
    endpoint::{Admission, Transport},
    events::{ConnectionState, EndpointSubscriber, HandshakeCounters},
    h3::{self, HttpConnection, MessageLimits, Request},
    tls::{self, ServerTls},
};
use s2n_quic::{
    Client, Server,
    provider::{
        io::testing::{Io, spawn},
        packet_interceptor::PacketInterceptor,
    },
};
use s2n_quic_core::random;

/// The same time-outs as the relay's, for the head of a request and for an answer to be accepted.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes that may wait per tunnel.
pub const QUEUE_BYTES: usize = 1 << 20;

/// The relay's identity and the clients' trust in it: created once, for all sessions.
static TLS: LazyLock<(ServerTls, s2n_quic_rustls::Client)> = LazyLock::new(|| {
    let made = identity(SERVER_NAME).and_then(|(server, trust)| Ok((server, tls::client(trust, None)?)));
    made.unwrap_or_else(|error| panic!("{error:#}"))
});

/// The relay's name.
pub const SERVER_NAME: &str = "relay.example";

/// A xorshift generator, the same in every run.
struct Numbers(u64);

impl random::Generator for Numbers {
    fn public_random_fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            *byte = (self.0 >> 32) as u8;
        }
    }

    fn private_random_fill(&mut self, bytes: &mut [u8]) {
        self.public_random_fill(bytes);
    }
}

/// A provider of these numbers.
struct Seed(u64);

impl s2n_quic::provider::random::Provider for Seed {
    type Generator = Numbers;
    type Error = Infallible;

    fn start(self) -> Result<Numbers, Infallible> {
        Ok(Numbers(self.0))
    }
}

fn datagrams(counters: &Arc<DatagramCounters>) -> Datagrams {
    Datagrams {
        limits: QueueLimits { flow_bytes: QUEUE_BYTES, connection_bytes: QUEUE_BYTES },
        counters: counters.clone(),
        max_frame_bytes: u64::from(u16::MAX),
        schedules: Schedule { clock: CLOCK, ..Schedule::default() }.into(),
    }
}

/// A client endpoint whose packets pass through `interceptor`.
pub fn client(io: Io, transport: &Transport, seed: u64, interceptor: impl PacketInterceptor) -> Result<Client> {
    let datagrams = datagrams(&Arc::default());
    let events = EndpointSubscriber::default();
    let builder = Client::builder()
        .with_io(io)
        .map_err(|error| anyhow!("{error}"))?
        .with_tls(TLS.1.clone())?
        .with_datagram(datagrams)?
        .with_limits(transport.limits(Role::Client)?)?
        .with_random(Seed(seed))?
        .with_packet_interceptor(interceptor)?
        .with_event(events)?;
    builder.with_congestion_controller(transport.controllers())?.start().context("a client endpoint")
}

/// The relay's resources, as far as they are visible from outside.
#[derive(Default)]
pub struct Books {
    /// Counters of datagrams, and the number of streams.
    pub datagrams: Arc<DatagramCounters>,
    /// Counters of handshakes.
    pub handshakes: Arc<HandshakeCounters>,
    places: Arc<ConnectionPlaces>,
    connections: AtomicUsize,
    requests: AtomicUsize,
    /// Every connection so far, and whether it has ended.
    standings: Mutex<Vec<(ClientStanding, Arc<AtomicBool>)>>,
}

impl Books {
    /// Whether the relay buffers more than it may for a stranger that is still connected.
    pub fn is_exceeded(&self) -> bool {
        let standings = self.standings.lock();
        standings.iter().any(|(standing, ended)| {
            let bound_bytes = u64::from(standing.terms().held_bytes);
            !standing.is_known() && standing.held_bytes() > bound_bytes && !ended.load(Relaxed)
        })
    }

    /// The resources that remain of ended connections, or `None`.
    pub fn rest(&self) -> Option<String> {
        let (connections, requests) = (self.connections.load(Relaxed), self.requests.load(Relaxed));
        let streams = self.datagrams.streams.get();
        let handshakes = &self.handshakes;
        let unfinished = handshakes.started.get() - handshakes.completed.get() - handshakes.failed.get();
        // With a limit of one connection, there is room only if none is left.
        let limits = AdmissionLimits { connections: 1, ..AdmissionLimits::default() };
        self.places.set_limits(limits);
        let is_full = self.places.judge(IpAddr::from([192, 0, 2, 200]), true) != AdmissionVerdict::Admit;
        let is_empty = (connections, requests, streams, unfinished, is_full) == (0, 0, 0, 0, false);
        let rest = || {
            format!(
                "{connections} connections, {requests} requests, {streams} streams, {unfinished} handshakes, {self:?}"
            )
        };
        (!is_empty).then(rest)
    }
}

impl std::fmt::Debug for Books {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {:?}", self.places, self.handshakes, self.datagrams)
    }
}

/// An item that is counted for as long as it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn among(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Relaxed);
        Self(all)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Starts a relay and returns its address.
pub fn relay(io: Io, transport: &Transport, books: &Arc<Books>) -> Result<SocketAddr> {
    let issuer = Issuer::ephemeral()?;
    let (places, handshakes) = (books.places.clone(), books.handshakes.clone());
    let admission = Admission { places: places.clone(), handshakes: handshakes.clone(), ..Admission::default() };
    let datagrams = datagrams(&books.datagrams);
    let events = EndpointSubscriber { handshakes, places: Some(places.clone()), ..EndpointSubscriber::default() };
    // In the same way as `endpoint::serve`.
    let builder = Server::builder()
        .with_io(io)
        .map_err(|error| anyhow!("{error}"))?
        .with_tls(TLS.0.clone())?
        .with_datagram(datagrams)?
        .with_limits(transport.limits(Role::Server)?)?
        .with_endpoint_limits(admission)?
        .with_connection_id(issuer.connection_ids()?)?
        .with_stateless_reset_token(issuer.reset_tokens())?
        .with_address_token(issuer.address_tokens().honoured_by(places))?
        .with_random(Seed(0x9298))?
        .with_event(events)?;
    let mut server =
        builder.with_congestion_controller(transport.controllers())?.start().context("a server endpoint")?;
    let address = server.local_addr()?;
    let books = books.clone();
    spawn(async move {
        while let Some(connection) = server.accept().await {
            let books = books.clone();
            spawn(async move {
                let _counted = Counted::among(&books.connections);
                serve_connection(connection, &books).await;
            });
        }
    });
    Ok(address)
}

async fn serve_connection(connection: s2n_quic::Connection, books: &Arc<Books>) {
    let handle = connection.handle();
    let standing = handle.query_event_context(|state: &ConnectionState| state.standing.clone());
    let Ok(standing) = standing else { return };
    let ended = Arc::<AtomicBool>::default();
    books.standings.lock().push((standing.clone(), ended.clone()));
    let mut serving = pin!(serve_requests(connection, books));
    if within(standing.terms().time, serving.as_mut()).await.is_none() {
        if !standing.is_known() {
            h3::close(&handle, Code::NoError);
        }
        serving.await;
    }
    ended.store(true, Relaxed);
}

async fn serve_requests(connection: s2n_quic::Connection, books: &Arc<Books>) {
    let Ok(mut connection) = HttpConnection::start(connection, Role::Server, MessageLimits::default()).await else {
        return;
    };
    let (client, mut requests) = (connection.client(), FuturesUnordered::new());
    while let Ok(request) = connection.next().await {
        let (client, books) = (client.clone(), books.clone());
        requests.push(spawn(async move {
            let _counted = Counted::among(&books.requests);
            serve_request(client, request).await;
        }));
    }
    // Tunnels learn from their streams that the connection is gone.
    while requests.next().await.is_some() {}
}

async fn serve_request(client: h3::Client, mut request: Request) {
    let waiting = request.waiting.take();
    let judged = judge(&mut request).await;
    drop(waiting);
    if let Err((status, code)) = judged {
        client.standing().note_refusal();
        return turn_away(&client, request, status, code).await;
    }
    client.standing().admit();
    let Ok(next_hop) = TARGET.parse() else { return };
    let accepted = request::accepted(TunnelProtocol::Udp, next_hop, &ProxyName::default());
    if request.send.respond(&accepted).await.is_ok() {
        _ = send_back(request, &client, QUEUE_BYTES, |_| {}).await;
    }
}

/// Admits requests for the target. For other requests, returns the status, if any, and the code with which they end.
async fn judge(request: &mut Request) -> Result<(), (Option<u16>, Code)> {
    let head = match within(HEAD_TIMEOUT, request.recv.part()).await {
        Some(Ok(Some(Part::Request(head)))) => head,
        Some(Err(h3::Error::Protocol(error))) => return Err((error.answer(), error.code())),
        Some(_) => return Err((None, Code::RequestIncomplete)),
        None => return Err((None, Code::RequestRejected)),
    };
    let templates = Template::parse(TEMPLATE).ok();
    match request::parse(&head, templates.as_slice()) {
        Ok(asked) if *asked.target() == target() => Ok(()),
        Ok(_) => Err((Some(403), Code::NoError)),
        Err(refusal) => Err((Some(refusal.status()), Code::MessageError)),
    }
}

/// Ends a request as `relay` does.
async fn turn_away(client: &h3::Client, request: Request, status: Option<u16>, code: Code) {
    let Request { stream_id, recv, mut send, flow, .. } = request;
    let answered = match status {
        Some(status) => send.respond(&ResponseHead { status, fields: Vec::new() }).await.is_ok(),
        None => false,
    };
    drop(flow);
    recv.stop(code);
    client.forget(stream_id);
    if answered {
        if code == Code::NoError {
            send.finish();
        }
        let taken = within(ANSWER_TIMEOUT, poll_fn(|cx| send.poll_acknowledged(cx))).await;
        if code == Code::NoError && taken.is_some() {
            return;
        }
    }
    send.reset(if code == Code::NoError { Code::RequestCancelled } else { code });
}
