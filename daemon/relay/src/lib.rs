//! The relay role: connections of clients in, tunnels to targets out.
//!
//! ```text
//! Server::accept → serve_connection → Connection::next → serve_request → admit → UdpPump | TcpPump
//! ```
//!
//! One task per connection and one per request, all on the thread of their endpoint. The pumps of tunnels wait on
//! both sides at once and own no buffer while nothing moves.

pub mod access;
pub mod accounts;
pub mod auth;
mod connect;
mod counters;
pub mod holder;
pub mod host_addresses;
pub mod ledger;
mod month;
mod request;
pub mod resolve;
pub mod tunnels;
mod udp;
pub mod udp_target;
pub mod usage;

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize},
    },
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use config::{
    quota::Quota,
    relay::{Auth, Limits},
};
use masque::{
    h3::{Code, Part, ResponseHead, Role},
    proxy_status::ProxyName,
    request::{Protocol, Refusal, accepted},
    template::Template,
};
use pacing::{path::PathStats, qlog::Tap};
use parking_lot::RwLock;
use quic::{
    class::{Class, Classes, Membership, Since},
    events::{ConnectionState, Strays},
    h3::{self, Error, MessageLimits, Request},
    schedule::{Schedule, Schedules},
    strangers::{Places, Standing},
};
use role::{gate::Gate, limits::Gauge, seldom::Seldom, table::Table, tcp::TcpPump, tunnel::UdpTunnel};
use s2n_quic::{Server, connection::Connection};
use socket2::SockRef;
use tokio::{net::TcpStream, sync::watch, task::JoinSet, time::timeout};

pub use self::counters::RelayMetrics;
use self::{
    accounts::Accounts,
    request::{Admitted, Attempt, Target, mark},
    tunnels::Tunnel,
    udp::UdpPump,
};
use crate::{
    access::{
        AccessLog,
        record::{self, Refused},
    },
    auth::Users,
    host_addresses::HostAddresses,
    resolve::Resolver,
};

/// How long a client may take to send the head of a request it has begun.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client may take to take the answer to a request that was refused. Without credit for it, it never would.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a tunnel whose end is set looks at the clock.
const EXPIRY_LOOK: Duration = Duration::from_secs(60);

/// What the configuration says about requests. Replaced as a whole; each request is judged by one version.
pub struct Rules {
    /// The name in `Proxy-Status`.
    pub name: ProxyName,
    /// Templates that are served.
    pub templates: Vec<Template>,
    /// The users that may ask.
    pub users: Users,
    /// Which targets may be reached.
    pub targets: config::targets::TargetRules,
    /// How much of everything there may be.
    pub limits: Limits,
    /// Which addresses of this host targets see.
    source_addresses: Vec<IpAddr>,
    /// What users may use, by name.
    quotas: BTreeMap<String, Quota>,
    /// What clients have to show at each listener.
    auth: HashMap<SocketAddr, Auth>,
}

impl Rules {
    /// Takes over a configuration.
    #[must_use]
    pub fn new(relay: &config::relay::Relay) -> Self {
        Self {
            name: ProxyName::new(&relay.proxy_status_name).unwrap_or_default(),
            templates: relay.templates.clone(),
            users: Users::new(&relay.tokens, &relay.certificates, relay.limits.tunnels_per_user),
            targets: relay.targets.clone(),
            limits: relay.limits.clone(),
            source_addresses: relay.source_addresses.clone(),
            quotas: relay.quotas().into_iter().map(|(name, quota)| (name.to_owned(), quota)).collect(),
            auth: relay.listeners.iter().map(|listener| (listener.address, listener.auth)).collect(),
        }
    }

    /// What a client has to show at the listener of this address, as configured.
    #[must_use]
    pub fn auth(&self, listener: SocketAddr) -> Auth {
        self.auth.get(&listener).copied().unwrap_or_default()
    }
}

/// What a relay works with that lives outside of it.
pub struct Resources {
    /// Resolves the names of targets.
    pub resolver: Resolver,
    /// The addresses of this host, which tunnels may not lead to.
    pub host_addresses: HostAddresses,
    /// Where it counts.
    pub metrics: Arc<RelayMetrics>,
    /// Where it says what came of tunnels and requests.
    pub access: Arc<AccessLog>,
    /// The last IDs of connections and of tunnels, which others may count as well.
    pub ids: [Arc<AtomicU64>; 2],
    /// Called with the address of each client that has completed a handshake.
    pub proven: Box<dyn Fn(IpAddr) + Send + Sync>,
}

/// What all connections of the relay share.
pub struct Relay {
    rules: RwLock<Arc<Rules>>,
    /// Which class of traffic a tunnel is of.
    classes: ArcSwap<Classes>,
    /// How connections order what they send.
    schedules: Schedules,
    /// The connections that are open.
    pub connections: Table<Caller>,
    /// The tunnels that are open.
    pub tunnels: Table<Tunnel>,
    resources: Resources,
    /// What users have, and have used.
    pub accounts: Arc<Accounts>,
    /// How many tunnels have taken one of the source addresses.
    sources_taken: AtomicUsize,
    /// Says that no more sockets can be had.
    exhausted: Seldom,
    places: Arc<Places>,
    phase: watch::Sender<Phase>,
}

/// Where the relay is in its life; it only moves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Connections and requests are accepted.
    Serving,
    /// Nothing new is accepted; what is open goes on.
    Draining,
    /// Everything is closed.
    Closing,
}

/// The client at the other end of a connection.
pub struct Caller {
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// Its address when it connected, if that is known.
    pub address: Option<SocketAddr>,
    /// When it connected.
    pub since: SystemTime,
    /// The address of the listener, as configured.
    pub listener: SocketAddr,
    /// Where what happens on it can be listened to.
    pub tap: Tap,
    /// What is known of its path.
    pub path: PathStats,
    user: OnceLock<Arc<str>>,
    /// What is known about it.
    pub standing: Standing,
    /// Its verified certificate, if it showed one.
    certificate: Option<Vec<u8>>,
    tunnels: Gauge,
}

impl Caller {
    /// The user of its first request that showed credentials, if there was one.
    #[must_use]
    pub fn user(&self) -> Option<&Arc<str>> {
        self.user.get()
    }

    /// How many tunnels it has.
    #[must_use]
    pub fn tunnels(&self) -> usize {
        self.tunnels.count()
    }
}

impl Relay {
    /// Creates a relay that serves nobody yet.
    #[must_use]
    pub fn new(rules: Rules, classes: Arc<Classes>, resources: Resources) -> Arc<Self> {
        let accounts = Arc::<Accounts>::default();
        accounts.set_quotas(&rules.quotas);
        let (refused, hits) = (resources.metrics.handshakes.refused.clone(), resources.metrics.clone());
        let [connection_ids, tunnel_ids] = resources.ids.clone();
        let places = Places::new(rules.limits.clone(), refused, Box::new(move |limit| hits.limit_hit(limit)));
        Arc::new(Self {
            rules: RwLock::new(Arc::new(rules)),
            schedules: Schedule::from(&*classes).into(),
            classes: ArcSwap::new(classes),
            connections: Table::counting(connection_ids),
            tunnels: Table::counting(tunnel_ids),
            resources,
            accounts,
            sources_taken: AtomicUsize::new(0),
            exhausted: Seldom::default(),
            places: Arc::new(places),
            phase: watch::Sender::new(Phase::Serving),
        })
    }

    /// The places that connections take, at all endpoints.
    #[must_use]
    pub fn places(&self) -> &Arc<Places> {
        &self.places
    }

    /// The classes of the policy in force.
    #[must_use]
    pub fn classes(&self) -> Arc<Classes> {
        self.classes.load_full()
    }

    /// How connections order what they send.
    #[must_use]
    pub fn schedules(&self) -> &Schedules {
        &self.schedules
    }

    /// Puts the classes and the schedule of another policy in force, for what is open as well.
    pub fn replace_classes(&self, classes: Arc<Classes>) {
        self.schedules.set(Schedule::from(&*classes));
        self.classes.store(classes.clone());
        self.tunnels.all().iter().for_each(|tunnel| tunnel.follow(&classes));
    }

    /// Puts `rules` in force for requests to come; tunnels that are open keep what they have, but are held to the quotas
    /// of their users.
    pub fn replace_rules(&self, rules: Rules) {
        self.accounts.set_quotas(&rules.quotas);
        self.places.set_limits(rules.limits.clone());
        *self.rules.write() = Arc::new(rules);
    }

    fn rules(&self) -> Arc<Rules> {
        self.rules.read().clone()
    }

    /// Moves on to `phase`; [`Relay::serve`] returns when no connection is left.
    pub fn end(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Serves the connections of one endpoint until [`Relay::end`] is called and they have ended.
    pub async fn serve(self: Arc<Self>, mut server: Server, listener: SocketAddr) {
        let mut connections = JoinSet::new();
        let mut phase = self.phase.subscribe();
        loop {
            tokio::select! {
                accepted = server.accept() => {
                    let Some(connection) = accepted else { break };
                    connections.spawn(self.clone().serve_connection(connection, listener));
                }
                Some(_) = connections.join_next() => {}
                _ = phase.wait_for(|phase| *phase >= Phase::Draining) => break,
            }
        }
        // The endpoint lives on: dropping it would end the connections that drain.
        while connections.join_next().await.is_some() {}
    }

    async fn serve_connection(self: Arc<Self>, connection: Connection, listener: SocketAddr) {
        let known = |state: &ConnectionState| {
            let ConnectionState { peer_certificate, tap, path, strays, standing, .. } = state;
            (peer_certificate.clone(), tap.clone(), path.clone(), strays.clone(), standing.clone())
        };
        // The query fails only if the connection has ended already.
        let Ok((certificate, tap, path, strays, standing)) = connection.query_event_context(known) else { return };
        let (address, since, tunnels) = (connection.remote_addr().ok(), SystemTime::now(), Gauge::default());
        address.iter().for_each(|address| (self.resources.proven)(address.ip()));
        let user = OnceLock::new();
        let caller = self.connections.insert(|id| Caller {
            id,
            address,
            since,
            listener,
            tap,
            path,
            user,
            standing,
            certificate,
            tunnels,
        });
        let limits = MessageLimits { field_section_bytes: u64::from(self.rules().limits.field_section_bytes) };
        self.resources.metrics.connections.inc();
        let handle = connection.handle();
        let mut serving = pin!(self.clone().serve_requests(connection, caller.clone(), limits, strays));
        let ended = match timeout(caller.standing.terms().time, &mut serving).await {
            Ok(ended) => ended,
            Err(_) => {
                if !caller.standing.is_known() {
                    self.resources.metrics.limit_hit("stranger_seconds");
                    h3::close(&handle, Code::NoError);
                }
                serving.await
            }
        };
        self.resources.metrics.connections.dec();
        self.connections.remove(caller.id);
        tracing::debug!(reason = %ended, "connection ended");
    }

    async fn serve_requests(
        self: Arc<Self>,
        connection: Connection,
        caller: Arc<Caller>,
        limits: MessageLimits,
        strays: Strays,
    ) -> Error {
        let mut connection = match h3::Connection::start(connection, Role::Server, limits).await {
            Ok(connection) => connection,
            Err(error) => return error,
        };
        let mut requests = JoinSet::new();
        let client = connection.client();
        let ended = tokio::select! {
            ended = self.accept_requests(&mut connection, &caller, &mut requests) => ended,
            () = strays.lost() => {
                // The close does not reach the client, but from now on its packets are answered with a reset.
                self.resources.metrics.limit_hit("addresses_per_connection");
                client.close(Code::NoError);
                Error::Closed
            }
        };
        // The tunnels learn from their streams that the connection is gone.
        while requests.join_next().await.is_some() {}
        ended
    }

    /// Starts a task for each request until the connection ends, by the client or because the relay does.
    async fn accept_requests(
        self: &Arc<Self>,
        connection: &mut h3::Connection,
        caller: &Arc<Caller>,
        requests: &mut JoinSet<()>,
    ) -> Error {
        let client = connection.client();
        let mut phase = self.phase.subscribe();
        loop {
            let now = *phase.borrow_and_update();
            if now == Phase::Closing || (now == Phase::Draining && requests.is_empty()) {
                client.close(Code::NoError);
                return Error::Closed;
            }
            if now == Phase::Draining {
                connection.go_away();
            }
            tokio::select! {
                request = connection.next() => match request {
                    Ok(request) => {
                        let serving = serve_request(self.clone(), caller.clone(), client.clone(), request);
                        requests.spawn(serving);
                    }
                    Err(error) => return error,
                },
                Some(_) = requests.join_next() => {}
                _ = phase.changed() => {}
            }
        }
    }
}

async fn serve_request(relay: Arc<Relay>, caller: Arc<Caller>, client: h3::Client, mut request: Request) {
    let rules = relay.rules();
    let waiting = request.waiting.take();
    // In a box, so that what admission needs is not kept for as long as the tunnel lives.
    let admitted = match Box::pin(admit(&relay, &rules, &caller, &mut request)).await {
        Ok(admitted) => admitted,
        Err(rejected) => {
            drop(waiting);
            caller.standing.note_refusal();
            return turn_away(&client, request, rejected).await;
        }
    };
    drop(waiting);
    let Admitted { target, asked, places, mut terms, expires } = admitted;
    let limits = rules.limits.clone();
    let protocol = match target {
        Target::Udp(_) => Protocol::Udp,
        Target::Tcp(_) => {
            terms.since = Since::Burst;
            Protocol::Tcp
        }
    };
    request.set_terms(&terms);
    if let Err(error) = request.send.respond(&accepted(protocol, asked.next_hop, &rules.name)).await {
        tracing::debug!(%error, "client left before its tunnel was open");
        return;
    }
    drop(rules);
    let (metrics, membership) = (relay.resources.metrics.clone(), Membership::new(terms.class));
    let usage = asked.user.as_ref().map(|user| metrics.users.of(user));
    metrics.opened(protocol, usage.as_deref());
    let (end, member) = ((caller, client.clone()), (membership.clone(), usage.clone()));
    let stream = (request.stream_id, request.flow.view());
    let tunnel = relay.tunnels.insert(|id| Tunnel::new(id, end, asked, stream, member));
    // Another policy may have come since the tunnel was admitted; from here on, new policies find the tunnel.
    tunnel.follow(&relay.classes());
    let account = places.seat.account.clone();
    let (next_hop, protocol_asked) = (tunnel.asked.next_hop, tunnel.asked.protocol);
    let gate = Gate::new(membership, account.clone(), next_hop.ip().to_canonical().is_ipv4(), protocol_asked);
    let traffic = tunnel.traffic.clone();
    let pump = async {
        match target {
            Target::Udp(target) => {
                let queue_bytes = limits.queue_bytes_per_tunnel as usize;
                let udp = UdpTunnel::new(request, client.datagrams_allowed(), queue_bytes);
                let (idle, metrics) = (limits.tunnel_idle, metrics.clone());
                UdpPump::new(udp, target, gate, traffic, queue_bytes, idle, metrics).run(&client).await
            }
            Target::Tcp(target) => {
                let on_class = |socket: &TcpStream, before: &Class, class: &Arc<Class>| {
                    mark(&SockRef::from(socket), Some(before), class, &metrics);
                };
                TcpPump::new(request, target, gate, traffic).run(limits.tunnel_idle, on_class).await.label()
            }
        }
    };
    let end = tokio::select! {
        biased;
        end = pump => end,
        () = tunnel.closed() => "operator",
        () = account.used_up() => "quota",
        () = expiry(expires) => "expired",
    };
    relay.tunnels.remove(tunnel.id);
    if protocol == Protocol::Tcp {
        let (up_bytes, down_bytes) = tunnel.traffic.bytes();
        metrics.add_tcp(up_bytes, down_bytes);
    }
    metrics.closed(protocol, end, usage.as_deref());
    let access = &relay.resources.access;
    if access.is_wanted() {
        let (request, ended) = tunnel.ended(end);
        access.ended(request, ended);
    }
    drop(places);
}

/// Completes at a moment; without one, never.
async fn expiry(at: Option<SystemTime>) {
    let Some(at) = at else { return std::future::pending().await };
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        // The clock may be set meanwhile.
        tokio::time::sleep(left.min(EXPIRY_LOOK)).await;
    }
}

/// Ends the stream of a request that is not served. It is over soon, whether or not the client takes the answer.
async fn turn_away(client: &h3::Client, request: Request, rejected: Rejected) {
    let Request { stream_id, recv, mut send, flow, .. } = request;
    drop(flow);
    let (code, answered) = match rejected {
        Rejected::Answered(code) => (code, true),
        Rejected::Unanswered(code) => (code, false),
    };
    recv.stop(code);
    client.forget(stream_id);
    if answered {
        if code == Code::NoError {
            send.finish();
        }
        // A reset may overtake what was not acknowledged, or discard it at the client.
        let taken = timeout(ANSWER_TIMEOUT, poll_fn(|cx| send.poll_acknowledged(cx))).await;
        if code == Code::NoError && taken.is_ok() {
            return;
        }
    }
    send.reset(if code == Code::NoError { Code::RequestCancelled } else { code });
}

/// How a request that is not served was dealt with; the stream is still to be ended with the code. If the code is no
/// error, the stream ends normally.
enum Rejected {
    /// By a response.
    Answered(Code),
    /// Not at all: there was nobody to answer, or nothing to say.
    Unanswered(Code),
}

/// Reads the head of a request and decides about it; answers it if the decision is no.
async fn admit(relay: &Relay, rules: &Rules, caller: &Caller, request: &mut Request) -> Result<Admitted, Rejected> {
    let head = match timeout(HEAD_TIMEOUT, request.recv.part()).await {
        Ok(Ok(Some(Part::Request(head)))) => head,
        Ok(Err(Error::Protocol(error))) => {
            let too_large = error.code() == Code::ExcessiveLoad;
            let reason = if too_large { "field_section_too_large" } else { "malformed" };
            note_refusal(relay, caller, Attempt::default(), Refused { status: error.answer(), error: None, reason });
            let Some(status) = error.answer() else { return Err(Rejected::Unanswered(error.code())) };
            tracing::debug!(%error, "malformed request");
            return Err(answer(request, &ResponseHead { status, fields: Vec::new() }, error.code()).await);
        }
        Ok(_) => return Err(Rejected::Unanswered(Code::RequestIncomplete)),
        Err(_) => {
            let refused = Refused { status: None, error: None, reason: "head_timeout" };
            note_refusal(relay, caller, Attempt::default(), refused);
            return Err(Rejected::Unanswered(Code::RequestRejected));
        }
    };
    let mut attempt = Attempt::default();
    match request::admit(relay, rules, caller, &head, request.signal, &mut attempt).await {
        Ok(admitted) => Ok(admitted),
        Err(refusal) => {
            let (status, error) = (Some(refusal.status()), Some(refusal.error_type().name()));
            note_refusal(relay, caller, attempt, Refused { status, error, reason: refusal.label() });
            tracing::debug!(%refusal, "request refused");
            let code = match refusal {
                Refusal::Malformed(_) | Refusal::Target(_) => Code::MessageError,
                _ => Code::NoError,
            };
            Err(answer(request, &refusal.response(&rules.name), code).await)
        }
    }
}

/// Counts a request that was refused, and records it.
fn note_refusal(relay: &Relay, caller: &Caller, Attempt { user, target }: Attempt, refused: Refused) {
    let Resources { metrics, access, .. } = &relay.resources;
    metrics.refused(refused.reason);
    if let Some(user) = &user {
        metrics.users.of(user).refused.inc();
    }
    if access.is_wanted() {
        let (protocol, target) = target.unzip();
        let Caller { id: connection, listener, address: client, .. } = *caller;
        access.refused(record::Request { connection, listener, client, user, protocol, target }, refused);
    }
}

async fn answer(request: &mut Request, head: &ResponseHead, code: Code) -> Rejected {
    match request.send.respond(head).await {
        Ok(()) => Rejected::Answered(code),
        Err(_) => Rejected::Unanswered(code),
    }
}
