//! The relay role: connections of clients in, tunnels to targets out.
//!
//! ```text
//! Server::accept → serve_connection → HttpConnection::next → serve_request → admit → UdpPump | TcpPump
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
mod request;
pub mod resolve;
mod serve;
pub mod tunnels;
mod udp;
pub mod udp_target;
pub mod usage;

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize},
    },
    time::SystemTime,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use config::{
    quota::Quota,
    relay::{Auth, ListenerSettings, RelayLimits},
};
use masque::{proxy_status::ProxyName, template::Template};
use pacing::{path::PathStats, qlog::Tap};
use parking_lot::{Mutex, RwLock};
use quic::{
    class::Classes,
    datagrams::Hub,
    schedule::{Schedule, Schedules},
    strangers::{ClientStanding, ConnectionPlaces},
};
use role::{limits::Gauge, seldom::Seldom, table::Table};
use serving::gateway::Gateway;
use tokio::sync::watch;

pub use self::counters::RelayMetrics;
use self::{accounts::Accounts, tunnels::RelayTunnel};
use crate::{access::AccessLog, auth::Users, host_addresses::HostAddresses, resolve::Resolver};

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
    pub limits: RelayLimits,
    /// Which addresses of this host targets see.
    source_addresses: Vec<IpAddr>,
    /// What users may use, by name.
    quotas: BTreeMap<String, Quota>,
    /// What clients have to show at each listener.
    auth: HashMap<SocketAddr, Auth>,
    /// The names of the schedules of listeners that name one.
    schedules: HashMap<SocketAddr, String>,
}

impl Rules {
    /// Takes over a configuration.
    #[must_use]
    pub fn new(relay: &config::relay::RelaySettings) -> Self {
        let schedule = |listener: &ListenerSettings| Some((listener.address, listener.schedule.clone()?));
        Self {
            name: ProxyName::new(&relay.proxy_status_name).unwrap_or_default(),
            templates: relay.templates.clone(),
            users: Users::new(&relay.tokens, &relay.certificates, relay.limits.tunnels_per_user),
            targets: relay.targets.clone(),
            limits: relay.limits.clone(),
            source_addresses: relay.source_addresses.clone(),
            quotas: relay.quotas().into_iter().map(|(name, quota)| (name.to_owned(), quota)).collect(),
            auth: relay.listeners.iter().map(|listener| (listener.address, listener.auth)).collect(),
            schedules: relay.listeners.iter().filter_map(schedule).collect(),
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
    /// What answers requests that ask for no tunnel, if anything does.
    gateway: ArcSwapOption<Gateway>,
    /// Which class of traffic a tunnel is of.
    classes: ArcSwap<Classes>,
    /// How connections of each listener order what they send, until their user is known. Locked while schedules are given
    /// out, so that the last are those of the policy and the rules in force.
    schedules: Mutex<HashMap<SocketAddr, Schedules>>,
    /// The connections that are open.
    pub connections: Table<RelayClient>,
    /// The tunnels that are open.
    pub tunnels: Table<RelayTunnel>,
    resources: Resources,
    /// What users have, and have used.
    pub accounts: Arc<Accounts>,
    /// How many tunnels have taken one of the source addresses.
    sources_taken: AtomicUsize,
    /// Says that no more sockets can be had.
    exhausted: Seldom,
    places: Arc<ConnectionPlaces>,
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
pub struct RelayClient {
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
    /// What orders what leaves on it.
    pub hub: Arc<Hub>,
    user: OnceLock<Arc<str>>,
    /// What is known about it.
    pub standing: ClientStanding,
    /// Its verified certificate, if it showed one.
    certificate: Option<Vec<u8>>,
    tunnels: Gauge,
}

impl RelayClient {
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
        let places = ConnectionPlaces::new(rules.limits.clone(), refused, Box::new(move |limit| hits.limit_hit(limit)));
        Arc::new(Self {
            rules: RwLock::new(Arc::new(rules)),
            gateway: ArcSwapOption::default(),
            schedules: Mutex::default(),
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
    pub fn places(&self) -> &Arc<ConnectionPlaces> {
        &self.places
    }

    /// The classes of the policy in force.
    #[must_use]
    pub fn classes(&self) -> Arc<Classes> {
        self.classes.load_full()
    }

    /// How connections of the listener at this address, as configured, order what they send until their user is known.
    #[must_use]
    pub fn schedules(&self, listener: SocketAddr) -> Schedules {
        let mut schedules = self.schedules.lock();
        let first = || Schedule::named(&self.classes(), self.schedule_name(None, listener).as_deref()).into();
        schedules.entry(listener).or_insert_with(first).clone()
    }

    /// The name of the schedule that a connection goes by: the one that a rule gives its user or, without one, the one that
    /// its listener names; `None` if it is the schedule for all.
    #[must_use]
    pub fn schedule_of(&self, client: &RelayClient) -> Option<String> {
        self.schedule_name(client.user().map(|user| &**user), client.listener)
    }

    fn schedule_name(&self, user: Option<&str>, listener: SocketAddr) -> Option<String> {
        let (classes, rules) = (self.classes(), self.rules());
        let listeners_own = rules.schedules.get(&listener).map(String::as_str);
        classes.policy().schedule_of(user, listener, listeners_own).map(str::to_owned)
    }

    /// Makes a connection whose user has become known go by the schedule of that user.
    fn schedule(&self, client: &RelayClient) {
        let _schedules = self.schedules.lock();
        client.hub.set_schedule(&Schedule::named(&self.classes(), self.schedule_of(client).as_deref()));
    }

    /// Makes all connections go by the schedules that are theirs by the policy and the rules in force.
    fn schedule_all(&self) {
        let listeners = self.schedules.lock();
        let classes = self.classes();
        for (listener, schedules) in &*listeners {
            schedules.set(Schedule::named(&classes, self.schedule_name(None, *listener).as_deref()));
        }
        // Of the others, those of their listeners are right.
        for client in self.connections.all().iter().filter(|client| client.user().is_some()) {
            client.hub.set_schedule(&Schedule::named(&classes, self.schedule_of(client).as_deref()));
        }
    }

    /// Puts the classes and the schedules of another policy in force, for what is open as well.
    pub fn replace_classes(&self, classes: Arc<Classes>) {
        self.classes.store(classes.clone());
        self.schedule_all();
        self.gateway.load().iter().for_each(|gateway| gateway.follow(&classes));
        self.tunnels.all().iter().for_each(|tunnel| tunnel.follow(&classes));
    }

    /// What answers requests that ask for no tunnel.
    #[must_use]
    pub fn gateway(&self) -> Option<Arc<Gateway>> {
        self.gateway.load_full()
    }

    /// Has another gateway answer new requests; the old one finishes the requests that it has begun.
    pub fn replace_gateway(&self, gateway: Option<Arc<Gateway>>) {
        self.gateway.store(gateway);
    }

    /// Puts `rules` in force for requests to come; tunnels that are open keep what they have, but are held to the quotas
    /// of their users, and connections go by the schedules of their listeners.
    pub fn replace_rules(&self, rules: Rules) {
        self.accounts.set_quotas(&rules.quotas);
        self.places.set_limits(rules.limits.clone());
        *self.rules.write() = Arc::new(rules);
        self.schedule_all();
    }

    fn rules(&self) -> Arc<Rules> {
        self.rules.read().clone()
    }

    /// Moves on to `phase`; [`Relay::serve`] returns when no connection is left.
    pub fn end(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }
}
