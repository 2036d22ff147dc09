//! A relay for unit tests of its clients, on a loopback address. It behaves as each test needs: it echoes, refuses or shuts down. What
//! fails here panics, and so fails the test.

#![expect(clippy::unwrap_used, clippy::panic, reason = "called by tests, and fails them")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::connection_id::Issuer;
use config::uplink::TrustSource;
use masque::{
    h3::{Code, Part, ResponseHead, Role},
    proxy_status::ProxyName,
    request::{Refusal, TunnelProtocol, accepted, is_ping},
    template::Template,
    tunnel::Form,
};
use quic::{
    datagrams::{Datagrams, QueueLimits, Schedules},
    endpoint::{self, Admission, Transport},
    h3::{self, HttpConnection, MessageLimits, Request},
    segments::Segments,
    tls::{self, Identity, ServerTls},
};
use relay_client::{access::Access, endpoint::Endpoint};
use role::tunnel::UdpTunnel;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

/// How long something that should happen soon may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

const QUEUE_BYTES: usize = 256 * 1024;

/// What the relay of a test does with requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Sends each payload back to its sender.
    Echo,
    /// Does not answer requests for tunnels.
    SayNothing,
    /// Refuses all targets, because of their port.
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

/// What the relay of a test has seen.
#[derive(Default)]
pub struct Seen {
    /// Connections that were admitted.
    pub connections: AtomicUsize,
    /// Requests for tunnels.
    pub requests: AtomicUsize,
    /// Requests that ask for nothing.
    pub introductions: AtomicUsize,
    /// Payloads that came in datagrams.
    pub datagrams: AtomicUsize,
    /// Payloads that came in capsules.
    pub capsules: AtomicUsize,
    /// Tunnels that clients have ended.
    pub finished: AtomicUsize,
    /// The code with which a client reset its last request.
    pub reset: AtomicU64,
    /// Open tunnels now.
    pub open: AtomicUsize,
    /// The maximum of open tunnels so far.
    pub most: AtomicUsize,
    /// How often this side has closed all connections.
    closings: watch::Sender<u32>,
    /// Notified of a payload in any tunnel but the first.
    later: Notify,
}

/// The relay of a test, until it is dropped.
pub struct TestRelay {
    /// Its address.
    pub address: SocketAddr,
    /// The SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
    /// What it has seen.
    pub seen: Arc<Seen>,
    /// Whether connections are admitted.
    pub open: Arc<AtomicBool>,
    server: JoinHandle<()>,
}

impl Drop for TestRelay {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl TestRelay {
    /// Starts a relay on a port that the system chooses.
    #[must_use]
    pub fn start(does: Does, allows_datagrams: bool) -> Self {
        Self::with(does, allows_datagrams, Transport::default())
    }

    /// Like [`start`](Self::start), with this transport.
    #[must_use]
    pub fn with(does: Does, allows_datagrams: bool, transport: Transport) -> Self {
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
                let begun = HttpConnection::start(connection, Role::Server, MessageLimits::default()).await;
                // A client may leave while it connects, as an edge does whose local address is replaced.
                let Ok(connection) = begun else { continue };
                // This relay admits all clients as users.
                connection.client().standing().admit();
                tokio::spawn(serve(connection, does, counting.clone()));
            }
        });
        Self { address, fingerprint, seen, open, server }
    }

    /// Admits no further connections, and closes the open ones.
    pub fn shut(&self) {
        self.open.store(false, Relaxed);
        self.seen.closings.send_modify(|closings| *closings += 1);
    }

    /// Returns the endpoint of clients.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint_over(Transport::default())
    }

    /// Returns the endpoint of clients with this transport.
    #[must_use]
    pub fn endpoint_over(&self, transport: Transport) -> Endpoint {
        Endpoint::new(self.access(), transport, Arc::default(), Schedules::default()).unwrap()
    }

    /// Returns the number of requests for tunnels.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.seen.requests.load(Relaxed)
    }

    /// Returns the number of payloads that have arrived.
    #[must_use]
    pub fn payloads(&self) -> usize {
        self.seen.datagrams.load(Relaxed) + self.seen.capsules.load(Relaxed)
    }

    /// Returns the number of open tunnels.
    #[must_use]
    pub fn open(&self) -> usize {
        self.seen.open.load(Relaxed)
    }

    /// Returns the settings of clients, without credentials.
    #[must_use]
    pub fn access(&self) -> Access {
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
            sleep(Duration::from_millis(100)).await;
            return client.close(Code::NoError);
        }
    }
}

/// Waits until `holds` returns `true`; panics if that takes longer than [`PATIENCE`].
pub async fn eventually(mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waiting).await.expect("it never happened");
}
