//! Forwards over loopback, to a relay that behaves as each test needs: it echoes, refuses or shuts
//! down.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::connection_id::Issuer;
use config::{
    forward::{Forward, TunnelMode},
    targets,
    uplink::{self, TrustSource},
};
use masque::{
    h3::{Code, Part, ResponseHead, Role},
    proxy_status::ProxyName,
    request::{Refusal, TunnelProtocol, accepted, is_ping},
    target::Target,
    template::Template,
    tunnel::Form,
};
use quic::{
    class::Membership,
    datagrams::{Datagrams, QueueLimits, Schedules},
    endpoint::{self, Admission, Transport},
    h3::{self, HttpConnection, MessageLimits, Request},
    segments::Segments,
    tls::{self, Identity, ServerTls},
};
use relay_client::{access::Access, endpoint::Endpoint, error::ConnectError};
use role::tunnel::UdpTunnel;
use tokio::{
    net::UdpSocket,
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    LocalAddressCounters,
    connect::RelayAccess,
    local::{self, Local},
    path::Path,
    roster::LocalEntrance,
    uplink::{Uplink, UplinkResources},
};

mod crowded;
mod denied;
mod introduced;
mod renewed;
mod replaced;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Returns two paths to a relay, `a` and `b`.
pub(crate) fn paths_to(relay: &TestRelay) -> Vec<Path> {
    ["a", "b"].map(|name| Path { name: name.to_owned(), ..Path::plain(vec![relay.endpoint()]) }).into()
}

const QUEUE_BYTES: usize = 256 * 1024;

/// What the relay of a test does with requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Does {
    Echo,
    /// Does not answer requests for tunnels.
    SayNothing,
    Refuse,
    /// Resets requests for tunnels instead of answering them.
    Reset,
    /// Says that the client's quota is used up.
    SayUsedUp,
    /// Refuses the credentials of clients that introduce themselves.
    KnowNone,
    /// Refuses the credentials of clients that ask for a tunnel.
    KnowNoneLater,
    /// Accepts with a response that announces content.
    Misanswer,
    /// Echoes once, then closes the connection.
    EchoOnce,
    /// Echoes the payloads of the first tunnel once another one has a payload, and those of all others at once.
    EchoLate,
    /// Echoes, in up to this many tunnels of all connections at once.
    EchoIn(usize),
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    /// Requests for tunnels.
    requests: AtomicUsize,
    /// Requests that ask for nothing.
    introductions: AtomicUsize,
    /// Payloads that came in datagrams, and in capsules.
    datagrams: AtomicUsize,
    capsules: AtomicUsize,
    finished: AtomicUsize,
    /// The code with which a client reset its last request.
    reset: AtomicU64,
    /// How often this side has closed all connections.
    closings: watch::Sender<u32>,
    /// Notified of a payload in any tunnel but the first.
    later: Notify,
    /// Open tunnels now, and their maximum so far.
    open: AtomicUsize,
    most: AtomicUsize,
}

pub(crate) struct TestRelay {
    address: SocketAddr,
    fingerprint: [u8; 32],
    seen: Arc<Seen>,
    server: JoinHandle<()>,
    /// Whether connections are admitted.
    open: Arc<AtomicBool>,
}

impl Drop for TestRelay {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl TestRelay {
    pub(crate) fn start(does: Does, allows_datagrams: bool) -> Self {
        Self::with(does, allows_datagrams, Transport::default())
    }

    fn with(does: Does, allows_datagrams: bool, transport: Transport) -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = rustls_pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into();
        let chain = vec![made.cert.der().clone()];
        let fingerprint = tls::fingerprint(&chain[0]);
        let identity = Identity { chain, key, client_authorities: None, revoked: Vec::new() };
        let datagrams = Datagrams {
            limits: QueueLimits { flow_bytes: QUEUE_BYTES, connection_bytes: 4 * QUEUE_BYTES },
            counters: Arc::default(),
            max_frame_bytes: if allows_datagrams { 65_535 } else { 0 },
            schedules: Schedules::default(),
        };
        let io = transport.sockets((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let tls = ServerTls::new(identity.prepare().unwrap());
        let admission = Admission::default();
        let open = admission.open.clone();
        let mut server =
            endpoint::serve(io, &transport, tls, datagrams, admission, &Issuer::ephemeral().unwrap()).unwrap();
        let (address, seen) = (server.local_addr().unwrap(), Arc::new(Seen::default()));
        let counting = seen.clone();
        let server = tokio::spawn(async move {
            while let Some(connection) = server.accept().await {
                counting.connections.fetch_add(1, Relaxed);
                let connection =
                    HttpConnection::start(connection, Role::Server, MessageLimits::default()).await.unwrap();
                // This relay admits all clients as users.
                connection.client().standing().admit();
                tokio::spawn(serve(connection, does, counting.clone()));
            }
        });
        Self { address, fingerprint, seen, server, open }
    }

    /// Admits no further connections, and closes the open ones.
    fn shut(&self) {
        self.open.store(false, Relaxed);
        self.seen.closings.send_modify(|closings| *closings += 1);
    }

    /// Returns the endpoint of clients.
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint_over(Transport::default())
    }

    /// Returns the endpoint of clients with this transport.
    pub(crate) fn endpoint_over(&self, transport: Transport) -> Endpoint {
        Endpoint::new(self.access(), transport, Arc::default(), Schedules::default()).unwrap()
    }

    /// Returns the number of requests for tunnels.
    pub(crate) fn requests(&self) -> usize {
        self.seen.requests.load(Relaxed)
    }

    /// Returns the number of payloads that have arrived.
    pub(crate) fn payloads(&self) -> usize {
        self.seen.datagrams.load(Relaxed) + self.seen.capsules.load(Relaxed)
    }

    /// Returns the number of open tunnels.
    pub(crate) fn open(&self) -> usize {
        self.seen.open.load(Relaxed)
    }

    pub(crate) fn access(&self) -> Access {
        Access {
            template: Template::default_at(&self.address.to_string()).unwrap(),
            trust: TrustSource::Pinned(self.fingerprint),
            token: None,
            identity: None,
        }
    }
}

async fn serve(mut connection: HttpConnection, does: Does, seen: Arc<Seen>) {
    let client = connection.client();
    let mut closings = seen.closings.subscribe();
    loop {
        tokio::select! {
            request = connection.next() => {
                let Ok(request) = request else { return };
                tokio::spawn(answer(request, client.clone(), does, seen.clone()));
            }
            _ = closings.changed() => client.close(Code::NoError),
        }
    }
}

async fn answer(mut request: Request, client: h3::Client, does: Does, seen: Arc<Seen>) {
    let Ok(Some(Part::Request(head))) = request.recv.part().await else { panic!("no request") };
    let proxy = ProxyName::default();
    if is_ping(&head) {
        seen.introductions.fetch_add(1, Relaxed);
        let status = if does == Does::KnowNone { 407 } else { 204 };
        request.send.respond(&ResponseHead { status, fields: Vec::new() }).await.unwrap();
        return request.send.finish();
    }
    let is_first = seen.requests.fetch_add(1, Relaxed) == 0;
    if does == Does::SayNothing {
        return std::future::pending().await;
    }
    if does == Does::Reset {
        return request.reset(Code::InternalError);
    }
    if does == Does::Misanswer {
        request.send.respond(&ResponseHead { status: 205, fields: Vec::new() }).await.unwrap();
        if let Some(code) = request.recv.part().await.err().and_then(|error| error.reset_code()) {
            seen.reset.store(code, Relaxed);
        }
        return;
    }
    let refusal = match does {
        Does::Refuse => Some(Refusal::PortProhibited),
        Does::KnowNoneLater => Some(Refusal::CredentialsExpired),
        Does::SayUsedUp => Some(Refusal::QuotaUsedUp { retry_after_s: 3_600 }),
        _ => None,
    };
    if let Some(refusal) = refusal {
        request.send.respond(&refusal.response(&proxy)).await.unwrap();
        return request.send.finish();
    }
    let most = if let Does::EchoIn(most) = does { most } else { usize::MAX };
    let Ok(before) = seen.open.fetch_update(Relaxed, Relaxed, |open| (open < most).then_some(open + 1)) else {
        request.send.respond(&Refusal::TunnelLimitReached.response(&proxy)).await.unwrap();
        return request.send.finish();
    };
    seen.most.fetch_max(before + 1, Relaxed);
    echo(request, client, (does, is_first), &seen).await;
    seen.open.fetch_sub(1, Relaxed);
}

async fn echo(mut request: Request, client: h3::Client, (does, is_first): (Does, bool), seen: &Seen) {
    let proxy = ProxyName::default();
    let next_hop = (Ipv4Addr::LOCALHOST, 9).into();
    request.send.respond(&accepted(TunnelProtocol::Udp, next_hop, &proxy)).await.unwrap();
    client.wait_for_settings().await.unwrap();
    let mut tunnel = UdpTunnel::new(request, client.datagrams_allowed(), QUEUE_BYTES);
    let mut payloads = Segments::new(QUEUE_BYTES);
    loop {
        let received = std::future::poll_fn(|cx| tunnel.poll_recv(cx, &mut payloads));
        match received.await {
            Ok(true) => {}
            Ok(false) => {
                seen.finished.fetch_add(1, Relaxed);
                return tunnel.finish();
            }
            Err(_) => return,
        }
        let counter = if tunnel.form() == Form::Datagram { &seen.datagrams } else { &seen.capsules };
        counter.fetch_add(payloads.len(), Relaxed);
        match (does, is_first) {
            (Does::EchoLate, true) => seen.later.notified().await,
            (Does::EchoLate, false) => seen.later.notify_one(),
            _ => {}
        }
        {
            let mut batch = tunnel.batch(None);
            payloads.iter().for_each(|payload| batch.push(payload));
        }
        payloads.clear();
        if does == Does::EchoOnce {
            // Long enough for the echo to leave.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return client.close(Code::NoError);
        }
    }
}

/// Returns the access of a local address to a relay that is never reached.
pub(crate) fn unreached() -> RelayAccess {
    let access = Access {
        template: Template::default_at("127.0.0.1:9").unwrap(),
        trust: TrustSource::Pinned([0; 32]),
        token: None,
        identity: None,
    };
    access_to(Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap())
}

/// Returns the access of a local address to the relay of this endpoint, whose uplink does not run yet.
pub(crate) fn access_to(endpoint: Endpoint) -> RelayAccess {
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let counters = Arc::default();
    let (membership, entrance, told) =
        (Membership::default(), LocalEntrance::counted_by(&counters), Default::default());
    RelayAccess { uplink, membership, is_chosen: false, idle: PATIENCE, entrance, counters, told }
}

/// A forward to a relay, and an application that uses it.
struct Edge {
    address: SocketAddr,
    counters: Arc<LocalAddressCounters>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Edge {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Edge {
    async fn start(relay: &TestRelay, mode: TunnelMode, idle: Duration) -> Self {
        Self::with(relay, mode, (idle, idle)).await
    }

    async fn with(relay: &TestRelay, mode: TunnelMode, idle: (Duration, Duration)) -> Self {
        Self::of(&[relay], mode, idle, (Duration::from_millis(10), Duration::from_secs(60))).await
    }

    async fn of(
        relays: &[&TestRelay],
        mode: TunnelMode,
        (idle, idle_answered): (Duration, Duration),
        backoff: (Duration, Duration),
    ) -> Self {
        let accesses: Vec<_> = relays.iter().map(|relay| relay.access()).collect();
        let access = accesses[0].clone();
        let forward = Forward {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            protocol: targets::Protocol::Udp,
            uplink: uplink::UplinkSettings {
                relays: accesses.iter().map(|access| access.template.clone()).collect(),
                token_file: None,
                client: None,
                trust: access.trust.clone(),
                via: None,
                schedule: None,
                backoff,
            },
            target: Target::from_authority("192.0.2.1:9").unwrap(),
            mode,
            class: None,
            idle,
            idle_answered,
            max_connections: 1,
        };
        let counters = Arc::new(LocalAddressCounters::default());
        let endpoint =
            |access| Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
        let uplink =
            Uplink::new(accesses.into_iter().map(endpoint).collect(), None, backoff, UplinkResources::default());
        let moved = watch::Sender::default();
        let moves = moved.subscribe();
        let socket = local::bind(forward.listen).unwrap();
        let entrance = LocalEntrance::counted_by(&counters);
        let local = Local::new(socket, &forward, Membership::default(), uplink.clone(), entrance).unwrap();
        let address = local.address().unwrap();
        let tasks = vec![
            tokio::spawn(async move { uplink.run(moves).await }),
            tokio::spawn(async move { local.run().await.unwrap() }),
        ];
        Self { address, counters, tasks }
    }

    async fn application(&self) -> UdpSocket {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket
    }
}

async fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_536];
    let len = timeout(PATIENCE, socket.recv(&mut buffer)).await.expect("nothing came back").unwrap();
    buffer.truncate(len);
    buffer
}

pub(crate) async fn eventually(mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waiting).await.expect("it never happened");
}

#[tokio::test]
async fn payloads_wait_for_the_connection_and_come_back_in_order_to_their_senders() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let (one, two) = (edge.application().await, edge.application().await);
    for payload in [&b"first"[..], b"", &[7; 1_200]] {
        one.send(payload).await.unwrap();
    }
    two.send(b"mine").await.unwrap();
    for expected in [&b"first"[..], b"", &[7; 1_200]] {
        assert_eq!(receive(&one).await, expected);
    }
    assert_eq!(receive(&two).await, b"mine");
    assert_eq!(relay.seen.connections.load(Relaxed), 1, "senders share a connection");
    assert_eq!(relay.seen.requests.load(Relaxed), 2, "each sender has a tunnel");
    assert_eq!(relay.seen.capsules.load(Relaxed), 0);
    assert_eq!((edge.counters.packets_up.get(), edge.counters.packets_down.get()), (4, 4));
}

#[tokio::test]
async fn stream_mode_uses_no_datagrams_and_carries_what_they_cannot() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Stream, PATIENCE).await;
    let application = edge.application().await;
    application.send(&[1; 9_000]).await.unwrap();
    assert_eq!(receive(&application).await, [1; 9_000]);
    assert_eq!((relay.seen.datagrams.load(Relaxed), relay.seen.capsules.load(Relaxed)), (0, 1));
}

#[tokio::test]
async fn a_relay_without_datagrams_is_used_by_streams_unless_that_is_forbidden() {
    let relay = TestRelay::start(Does::Echo, false);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let application = edge.application().await;
    application.send(b"payload").await.unwrap();
    assert_eq!(receive(&application).await, b"payload");

    let edge = Edge::start(&relay, TunnelMode::Datagram, PATIENCE).await;
    edge.application().await.send(b"payload").await.unwrap();
    eventually(|| edge.counters.tunnels_refused.get() == 1).await;
    assert_eq!(edge.counters.tunnels_opened.get(), 0);
}

#[tokio::test]
async fn refusals_are_repeated_no_faster_than_the_back_off() {
    let relay = TestRelay::start(Does::Refuse, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let (application, begun) = (edge.application().await, Instant::now());
    while relay.seen.requests.load(Relaxed) < 5 {
        application.send(b"payload").await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Waits of 10, 20, 40 and 80 milliseconds; at least half of each is kept.
    assert!(begun.elapsed() >= Duration::from_millis(75));
    assert_eq!(relay.seen.connections.load(Relaxed), 1, "a refusal does not end the connection");
}

#[tokio::test]
async fn a_lost_connection_is_made_again_for_the_next_payload() {
    let relay = TestRelay::start(Does::EchoOnce, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let application = edge.application().await;
    let mut buffer = [0; 1];
    for round in 1..=3 {
        // Payloads that are sent before the edge has noticed are lost.
        while buffer != [round] {
            application.send(&[round]).await.unwrap();
            _ = timeout(Duration::from_millis(100), application.recv(&mut buffer)).await;
        }
    }
    assert!(relay.seen.connections.load(Relaxed) >= 3, "each of them echoes once");
}

#[tokio::test]
async fn the_tunnel_of_a_silent_sender_is_closed_properly() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, Duration::from_millis(200)).await;
    let application = edge.application().await;
    application.send(b"payload").await.unwrap();
    receive(&application).await;
    eventually(|| relay.seen.finished.load(Relaxed) == 1).await;
    application.send(b"again").await.unwrap();
    assert_eq!(receive(&application).await, b"again");
    assert_eq!(relay.seen.requests.load(Relaxed), 2);
}

#[tokio::test]
async fn an_unknown_certificate_is_reported_with_what_it_takes_to_pin_it() {
    let relay = TestRelay::start(Does::Echo, true);
    let access = Access { trust: TrustSource::Pinned([0; 32]), ..relay.access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    match endpoint.connect().await.err() {
        Some(ConnectError::Untrusted { fingerprint, .. }) => assert_eq!(fingerprint, relay.fingerprint),
        other => panic!("{other:?}"),
    }
    let access = Access { trust: TrustSource::Pinned(relay.fingerprint), ..relay.access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    assert!(endpoint.connect().await.is_ok());
}

/// Asks one question from each of `questions` new ports, and gets an answer to each.
async fn ask(edge: &Edge, questions: u16) {
    for question in 0..questions {
        let application = edge.application().await;
        application.send(&question.to_be_bytes()).await.unwrap();
        assert_eq!(receive(&application).await, question.to_be_bytes());
    }
}

/// Sends payloads from one new port until one comes back.
async fn ask_until_answered(edge: &Edge) -> UdpSocket {
    let application = edge.application().await;
    let asking = async {
        let mut buffer = [0; 64];
        loop {
            application.send(b"anybody?").await.unwrap();
            if timeout(Duration::from_millis(100), application.recv(&mut buffer)).await.is_ok() {
                return;
            }
        }
    };
    timeout(PATIENCE, asking).await.expect("no relay answers");
    application
}

#[tokio::test]
async fn the_next_relay_takes_over_and_the_preferred_one_gets_new_senders_again_once_it_lasts() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let backoff = (Duration::from_millis(10), Duration::from_millis(300));
    let edge = Edge::of(&[&relays[0], &relays[1]], TunnelMode::Auto, (PATIENCE, PATIENCE), backoff).await;
    let requests = || relays.each_ref().map(|relay| relay.seen.requests.load(Relaxed));
    ask(&edge, 2).await;
    assert_eq!(requests(), [2, 0], "the first works");
    relays[0].shut();
    let moved = ask_until_answered(&edge).await;
    assert!(requests()[1] > 0, "the second has taken over");

    relays[0].open.store(true, Relaxed);
    let asking = async {
        while requests()[0] == 2 {
            drop(ask_until_answered(&edge).await);
        }
    };
    timeout(PATIENCE, asking).await.expect("the first is not used again");
    while moved.try_recv(&mut [0; 64]).is_ok() {}
    let (connections, asked) = (relays[1].seen.connections.load(Relaxed), requests()[1]);
    moved.send(b"still there?").await.unwrap();
    assert_eq!(receive(&moved).await, b"still there?");
    assert_eq!((relays[1].seen.connections.load(Relaxed), requests()[1]), (connections, asked), "open tunnels stay");
}

#[tokio::test]
async fn the_next_relay_is_tried_while_the_first_says_nothing() {
    let (mut silent, relay) = (TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true));
    let hole = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    silent.address = hole.local_addr().unwrap();
    let backoff = (Duration::from_millis(10), Duration::from_secs(60));
    let edge = Edge::of(&[&silent, &relay], TunnelMode::Auto, (PATIENCE, PATIENCE), backoff).await;
    ask(&edge, 3).await;
    assert_eq!(relay.seen.requests.load(Relaxed), 3);
}
