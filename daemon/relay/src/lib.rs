//! The relay role: connections from clients in, tunnels to targets out.
//!
//! ```text
//! Server::accept → serve_connection → HttpConnection::next → serve_request → admit → UdpPump | TcpPump
//! ```
//!
//! There is one task per connection and one per request, all on the thread of their endpoint. The pumps of tunnels wait on
//! both sides at once and own no buffer while they are idle.

pub mod accounts;
pub mod auth;
mod clients;
mod connect;
mod continuable;
mod counters;
pub mod host_addresses;
pub mod ledger;
mod limit_hits;
mod request;
pub mod resolve;
mod serve;
pub mod tunnels;
pub mod udp;
pub mod udp_target;
pub mod usage;

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize},
    },
};

use admission::strangers::ConnectionPlaces;
use arc_swap::ArcSwap;
use config::{
    quota::Quota,
    relay::{Auth, ListenerSettings, RelayLimits},
};
use masque::{proxy_status::ProxyName, template::Template};
use parking_lot::{Mutex, RwLock};
use quic::schedule::Schedules;
use role::{access::AccessLog, admitted::admission_limits, classes::Classes, seldom::Seldom, table::Table};
use serving::{gateway::Gateway, in_force::GatewayInForce};
use tokio::sync::watch;

use self::{accounts::Accounts, continuable::Continuable, limit_hits::LimitHits, tunnels::RelayTunnel, usage::Usages};
pub use self::{clients::RelayClient, counters::RelayMetrics};
use crate::{auth::Users, host_addresses::HostAddresses, resolve::Resolver};

/// The configured rules for requests. Replaced as a whole; each request is decided by one version.
pub struct Rules {
    /// The name in `Proxy-Status`.
    pub name: ProxyName,
    /// The templates served.
    pub templates: Vec<Template>,
    /// The permitted users.
    pub users: Users,
    /// The permitted targets.
    pub targets: config::targets::TargetRules,
    /// The limits of the relay.
    pub limits: RelayLimits,
    /// The source addresses that targets see.
    source_addresses: Vec<IpAddr>,
    /// The quotas of users, by name.
    quotas: BTreeMap<String, Quota>,
    /// The credentials that clients need at each listener.
    auth: HashMap<SocketAddr, Auth>,
    /// The names of the schedules of listeners that have one.
    schedules: HashMap<SocketAddr, String>,
}

impl Rules {
    /// Creates the rules of a configuration.
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

    /// Returns the credentials that a client needs at the listener with this address, as configured.
    #[must_use]
    pub fn auth(&self, listener: SocketAddr) -> Auth {
        self.auth.get(&listener).copied().unwrap_or_default()
    }
}

/// The resources of a relay that live outside it.
pub struct Resources {
    /// Resolves the names of targets.
    pub resolver: Resolver,
    /// The addresses of this host, to which tunnels must not lead.
    pub host_addresses: HostAddresses,
    /// The metrics.
    pub metrics: Arc<RelayMetrics>,
    /// The usage of each user.
    pub usages: Arc<Usages>,
    /// The log of tunnels and requests.
    pub access: Arc<AccessLog>,
    /// The last used IDs of connections and of tunnels; other roles may share these counters.
    pub ids: [Arc<AtomicU64>; 2],
    /// Called with the address of each client that has completed a handshake.
    pub proven: Box<dyn Fn(IpAddr) + Send + Sync>,
    /// What answers requests that ask for no tunnel.
    pub gateway: Arc<GatewayInForce>,
}

/// The state shared by all connections of the relay.
pub struct Relay {
    rules: RwLock<Arc<Rules>>,
    /// The classes of traffic.
    classes: ArcSwap<Classes>,
    /// How connections of each listener order their output until their user is known. Locked while schedules are assigned,
    /// so that the final schedules follow the policy and the rules in force.
    schedules: Mutex<HashMap<SocketAddr, Schedules>>,
    /// The open connections.
    pub connections: Table<RelayClient>,
    /// The open tunnels.
    pub tunnels: Table<RelayTunnel>,
    /// The tunnels that requests on other connections may continue.
    continuable: Arc<Continuable>,
    resources: Resources,
    /// The accounts of users.
    pub accounts: Arc<Accounts>,
    /// How many tunnels have taken a source address so far.
    sources_taken: AtomicUsize,
    /// The log throttle for the lack of sockets.
    exhausted: Seldom,
    /// The log throttle for other failures of sockets.
    broken: Seldom,
    places: Arc<ConnectionPlaces>,
    /// Notes limits that were reached.
    limit_hits: Arc<LimitHits>,
    phase: watch::Sender<Phase>,
}

/// The phase of the relay's life; it only advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Connections and requests are accepted.
    Serving,
    /// Nothing new is accepted; open connections continue.
    Draining,
    /// Everything is closed.
    Closing,
}

impl Relay {
    /// Creates a relay that serves no endpoint yet.
    #[must_use]
    pub fn new(rules: Rules, classes: Arc<Classes>, resources: Resources) -> Arc<Self> {
        let accounts = Arc::<Accounts>::default();
        accounts.set_quotas(&rules.quotas);
        let (refused, limit_hits) =
            (resources.metrics.handshakes.refused.clone(), Arc::new(LimitHits::new(resources.metrics.clone())));
        let (hits, [connection_ids, tunnel_ids]) = (limit_hits.clone(), resources.ids.clone());
        let places =
            ConnectionPlaces::new(admission_limits(&rules.limits), refused, Box::new(move |limit| hits.note(limit)));
        Arc::new(Self {
            rules: RwLock::new(Arc::new(rules)),
            schedules: Mutex::default(),
            classes: ArcSwap::new(classes),
            connections: Table::counting(connection_ids),
            tunnels: Table::counting(tunnel_ids),
            continuable: Arc::default(),
            resources,
            accounts,
            sources_taken: AtomicUsize::new(0),
            exhausted: Seldom::default(),
            broken: Seldom::default(),
            places: Arc::new(places),
            limit_hits,
            phase: watch::Sender::new(Phase::Serving),
        })
    }

    /// Returns the places that connections take, at all endpoints.
    #[must_use]
    pub fn places(&self) -> &Arc<ConnectionPlaces> {
        &self.places
    }

    /// Returns the classes of the policy in force.
    #[must_use]
    pub fn classes(&self) -> Arc<Classes> {
        self.classes.load_full()
    }

    /// Returns how connections of the listener with this address, as configured, order their output until their user is
    /// known.
    #[must_use]
    pub fn schedules(&self, listener: SocketAddr) -> Schedules {
        let mut schedules = self.schedules.lock();
        let first = || self.classes().schedule(self.schedule_name(None, listener).as_deref()).into();
        schedules.entry(listener).or_insert_with(first).clone()
    }

    /// Returns the name of a connection's schedule: from a rule for its user or, without a rule, from its listener; `None` for the default
    /// schedule.
    #[must_use]
    pub fn schedule_of(&self, client: &RelayClient) -> Option<String> {
        self.schedule_name(client.user().map(|user| &**user), client.listener)
    }

    fn schedule_name(&self, user: Option<&str>, listener: SocketAddr) -> Option<String> {
        let (classes, rules) = (self.classes(), self.rules());
        let listeners_own = rules.schedules.get(&listener).map(String::as_str);
        classes.policy().schedule_of(user, listener, listeners_own).map(str::to_owned)
    }

    /// Applies the user's schedule to a connection whose user has become known.
    fn schedule(&self, client: &RelayClient) {
        let _schedules = self.schedules.lock();
        client.hub.set_schedule(&self.classes().schedule(self.schedule_of(client).as_deref()));
    }

    /// Applies to all connections the schedules given by the policy and the rules in force.
    fn schedule_all(&self) {
        let listeners = self.schedules.lock();
        let classes = self.classes();
        for (listener, schedules) in &*listeners {
            schedules.set(classes.schedule(self.schedule_name(None, *listener).as_deref()));
        }
        // All other connections use the schedules of their listeners.
        for client in self.connections.all().iter().filter(|client| client.user().is_some()) {
            client.hub.set_schedule(&classes.schedule(self.schedule_of(client).as_deref()));
        }
    }

    /// Puts the classes and the schedules of another policy in force, for open connections and tunnels as well.
    pub fn replace_classes(&self, classes: Arc<Classes>) {
        self.classes.store(classes.clone());
        self.schedule_all();
        self.tunnels.all().iter().for_each(|tunnel| tunnel.follow(&classes));
    }

    /// Assigns a class to a tunnel, and to the tunnels that continue it or that it continues, overriding the rules as long as a class of
    /// this name exists; `None` applies the rules again.
    pub fn pin(&self, tunnel: &RelayTunnel, class: Option<String>) {
        tunnel.set_pin(class);
        let classes = self.classes();
        self.tunnels.page(0, usize::MAX, |other| other.has_pin_of(tunnel)).iter().for_each(|of| of.follow(&classes));
    }

    /// Returns the gateway that answers requests that are not for a tunnel.
    #[must_use]
    pub fn gateway(&self) -> Option<Arc<Gateway>> {
        self.resources.gateway.gateway()
    }

    /// Puts `rules` in force for new requests. Open tunnels keep their grants, but the quotas of their users apply, and
    /// connections use the schedules of their listeners.
    pub fn replace_rules(&self, rules: Rules) {
        if self.accounts.set_quotas(&rules.quotas) {
            self.tunnels.all().iter().for_each(|tunnel| tunnel.follow_rate());
        }
        self.places.set_limits(admission_limits(&rules.limits));
        *self.rules.write() = Arc::new(rules);
        self.schedule_all();
    }

    fn rules(&self) -> Arc<Rules> {
        self.rules.read().clone()
    }

    /// Advances to `phase`; [`Relay::serve`] returns when no connection is left.
    pub fn end(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }
}
