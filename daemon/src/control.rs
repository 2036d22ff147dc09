//! What can be asked of paced while it runs, and by whom. Doors are adapters over one [`Control`]; they hold no logic.
//!
//! | module | what it holds |
//! |---|---|
//! | [`caller`] | the caller of a control method, and what the caller may do |
//! | [`grpc`] | the door for gRPC, on a Unix socket and over TCP |
//! | [`dbus`] | the door for D-Bus |
//! | [`events`] | what happens, for listeners |
//! | [`doors`] | how the doors open that the configuration names |

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use config::{Config, forward::Forward, policy, proxy::Proxy};
use edge::roster::{self, Roster};
use pacing::{
    class_key::ClassKey,
    io::recorder::Recording,
    qlog::sequence::{Names, Sequence},
};
use quic::class::{ClassCounters, Role};
use relay::{Relay, tunnels::Tunnel};
use role::table::Table;
use tokio::{
    sync::{Semaphore, broadcast, mpsc, oneshot},
    task::spawn_blocking,
    time::sleep,
};

pub use self::{
    caller::{Bearers, Caller, Peer, Writers},
    events::{ACCESS, Event, Events, Happening},
};
use crate::{
    certificates::Certificate,
    parts::Parts,
    policy::{Accepted, InForce, Policies, Refusal, Revision, Submission},
};

pub mod caller;
pub mod dbus;
pub mod doors;
pub mod events;
pub mod grpc;

/// What is worth knowing of the configuration in force and of this machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// When it started.
    pub started: SystemTime,
    /// Where the relay listens.
    pub listeners: Vec<String>,
    /// What the edge forwards.
    pub forwards: Vec<String>,
    /// How many threads move packets.
    pub workers: u8,
    /// What the kernel and the rights of this process alone allow.
    pub own_features: bpf::Capabilities,
    /// The certificates that it shows.
    pub certificates: Vec<Certificate>,
}

impl Facts {
    /// Takes from a configuration what is worth knowing, and looks what the kernel allows.
    #[must_use]
    pub fn new(config: &Config, certificates: &[Certificate]) -> Self {
        let (started, own_features, certificates) = (SystemTime::now(), bpf::probe(), certificates.to_vec());
        Self { started, listeners: Vec::new(), forwards: Vec::new(), workers: 1, own_features, certificates }
            .after(config)
    }

    /// The same by another configuration.
    fn after(&self, config: &Config) -> Self {
        let listeners = config.relay.iter().flat_map(|relay| &relay.listeners);
        let forward = |forward: &Forward| {
            let Forward { listen, protocol, target, uplink, .. } = forward;
            format!("{listen} ({}) to {target} through {}", protocol.as_str().to_uppercase(), uplink.through())
        };
        let proxy = |proxy: &Proxy| format!("{} (proxy) through {}", proxy.listen, proxy.uplink.through());
        Self {
            listeners: listeners.map(|listener| listener.address.to_string()).collect(),
            forwards: config.forwards.iter().map(forward).chain(config.proxies.iter().map(proxy)).collect(),
            workers: config.relay.as_ref().map_or(1, |relay| relay.workers),
            ..self.clone()
        }
    }
}

/// Asks the daemon to read its configuration again.
#[derive(Debug)]
pub struct Reload {
    /// The name of the caller that asks.
    pub author: String,
    /// Where the outcome goes.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// How often a policy on trial is looked at.
const STEP: Duration = Duration::from_secs(1);

/// The longest message that answers carry, in bytes: what is wrong with a text has no bound.
const MESSAGE_BYTES: usize = 4096;

/// Why something asked for was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They may not.
    #[error(
        "{caller:?} may not change anything; root may, and who is named in `writers` of [control], or of \
             [control.tcp] by certificate"
    )]
    Denied {
        /// The name of the caller that asked.
        caller: String,
    },
    /// The policy was refused.
    #[error(transparent)]
    Policy(#[from] Refusal),
    /// There is no such thing.
    #[error("there is no {what} {name}; `pacectl` lists what there is")]
    Unknown {
        /// "tunnel", "connection" or "class".
        what: &'static str,
        /// Its ID or name.
        name: String,
    },
    /// The configuration was refused.
    #[error("{0}")]
    Reload(String),
    /// Too many want something at once.
    #[error("too many requests about policies at once; try again")]
    Busy,
    /// Departures, or events of a connection, are recorded for somebody else.
    #[error("the recording limit is reached; try again in a minute")]
    Recorded,
    /// A tunnel cannot be given a class by itself.
    #[error(
        "tunnel {tunnel} is one of the edge, whose class is that of its [[forward]] or [[proxy]]: change `class` there"
    )]
    OfEdge {
        /// Its ID.
        tunnel: u64,
    },
    /// The daemon ends.
    #[error("paced is ending")]
    Ending,
}

impl Error {
    /// The error as text of bounded length.
    #[must_use]
    pub fn message(&self) -> String {
        let mut message = self.to_string();
        if message.len() > MESSAGE_BYTES {
            let end = (0..=MESSAGE_BYTES).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
            message.truncate(end);
            message.push_str("\n…");
        }
        message
    }
}

/// What became of the traffic of a class in one role, since the start.
#[derive(Clone, Debug)]
pub struct ClassStats {
    /// The class.
    pub class: String,
    /// The role, as metrics name it.
    pub role: Role,
    /// Counters of what left for peers, and of what did not.
    pub counters: ClassCounters,
    /// Packets of the class, in both roles, that were handed to the kernel late.
    pub late_packets: u64,
    /// Tunnels that are open.
    pub tunnels: u64,
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// What is on it.
    pub rows: Vec<Arc<T>>,
    /// Where the next one begins, if there is one.
    pub next: Option<u64>,
}

/// Which tunnels are meant.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this class.
    pub class: Option<String>,
    /// Of this user.
    pub user: Option<String>,
    /// Over this connection.
    pub connection: Option<u64>,
}

/// Everything that can be asked.
pub struct Control {
    policies: Arc<Policies>,
    relay: Option<Arc<Relay>>,
    parts: Arc<Parts>,
    facts: ArcSwap<Facts>,
    reloads: mpsc::Sender<Reload>,
    events: broadcast::Sender<Event>,
    /// Places for calls that work with policies.
    places: Semaphore,
}

/// How many calls work with policies at once.
const PLACES: usize = 128;

/// How long a caller can record departures, or events of a connection, at most.
const LONGEST_RECORDING: Duration = Duration::from_secs(60);

/// Rows of one page at most.
pub const PAGE: usize = 1000;

impl Control {
    /// Returns the control plane of a daemon, which reads its configuration again when it is asked by `reloads`.
    #[must_use]
    pub fn new(
        policies: Arc<Policies>,
        relay: Option<Arc<Relay>>,
        parts: Arc<Parts>,
        facts: Facts,
        reloads: mpsc::Sender<Reload>,
    ) -> Arc<Self> {
        Arc::new(Self {
            policies,
            relay,
            parts,
            facts: ArcSwap::from_pointee(facts),
            reloads,
            events: broadcast::channel(events::QUEUE).0,
            places: Semaphore::new(PLACES),
        })
    }

    /// Tells of all policies as they come into force; never returns.
    pub async fn follow_policies(&self) {
        let mut policies = self.policies.watch();
        let mut last = policies.borrow_and_update().revision.number;
        while policies.changed().await.is_ok() {
            let revision = policies.borrow_and_update().revision.clone();
            let Revision { number, author, origin, .. } = &*revision;
            let told = std::mem::replace(&mut last, *number);
            if told != *number {
                self.tell("policy", format!("revision {number} is in force ({origin}, by {author})"));
            }
        }
    }

    fn tell(&self, kind: &'static str, message: String) {
        // Nobody may be listening.
        _ = self.events.send(Event { time: SystemTime::now(), kind, message });
    }

    /// Tells what happens from now on, of these kinds, or of all if there are none.
    #[must_use]
    pub fn events(&self, kinds: Vec<String>) -> Events {
        Events::new(self.events.subscribe(), &self.parts.access, kinds)
    }

    /// What is in force.
    #[must_use]
    pub fn in_force(&self) -> InForce {
        self.policies.in_force()
    }

    /// The revision of a number.
    ///
    /// # Errors
    /// There is none any more, or never was.
    pub async fn revision(&self, number: u64) -> Result<Arc<Revision>, Error> {
        self.work(move |policies| policies.revision(number)).await
    }

    /// The revisions that can be gone back to, and the one in force, oldest first.
    ///
    /// # Errors
    /// The daemon ends.
    pub async fn revisions(&self) -> Result<Vec<Arc<Revision>>, Error> {
        self.work(|policies| Ok(policies.revisions())).await
    }

    /// What is worth knowing of the configuration in force and of this machine.
    #[must_use]
    pub fn facts(&self) -> Arc<Facts> {
        self.facts.load_full()
    }

    /// Takes note of another configuration, and of the certificates that it shows.
    pub fn reloaded(&self, config: &Config, certificates: &[Certificate]) {
        let facts = self.facts().after(config);
        self.facts.store(Arc::new(Facts { certificates: certificates.to_vec(), ..facts }));
    }

    /// What the kernel and the rights of paced's processes allow.
    #[must_use]
    pub fn features(&self) -> bpf::Capabilities {
        self.parts.kernel.in_force.features(&self.facts().own_features)
    }

    /// The parts of the daemon.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Sets the policy.
    ///
    /// # Errors
    /// The caller may not, or it is refused.
    pub async fn set_policy(self: &Arc<Self>, caller: &Caller, submission: Submission) -> Result<Accepted, Error> {
        let author = caller.to_write()?;
        let is_trial = submission.confirm_within.is_some() && !submission.dry_run;
        let submission = Submission { author, ..submission };
        let accepted = self.work(move |policies| policies.submit(submission)).await?;
        if is_trial {
            self.expire_later(&accepted);
        }
        Ok(accepted)
    }

    fn expire_later(self: &Arc<Self>, accepted: &Accepted) {
        let Some(by) = accepted.confirm_by else { return };
        let (policies, number) = (self.policies.clone(), accepted.revision.number);
        tokio::spawn(async move {
            let mut is_over = false;
            while !is_over && policies.in_force().confirm_by == Some(by) {
                // In steps, because the machine's clock may be set; and what refuses the former policy may not always.
                sleep(by.duration_since(SystemTime::now()).unwrap_or(STEP).min(STEP)).await;
                let policies = policies.clone();
                is_over = spawn_blocking(move || policies.expire(number)).await.unwrap_or(true);
            }
        });
    }

    /// Confirms the policy on trial.
    ///
    /// # Errors
    /// The caller may not, or there is none.
    pub async fn confirm_policy(&self, caller: &Caller, number: u64, save: bool) -> Result<Arc<Revision>, Error> {
        let author = caller.to_write()?;
        let revision = self.work(move |policies| policies.confirm(number, save)).await?;
        self.tell("policy", format!("revision {number} was confirmed by {author}"));
        Ok(revision)
    }

    /// Goes back to a former policy.
    ///
    /// # Errors
    /// The caller may not, or there is none.
    pub async fn roll_back(&self, caller: &Caller, to: Option<u64>, save: bool) -> Result<Accepted, Error> {
        let author = caller.to_write()?;
        self.work(move |policies| policies.roll_back(to, &author, save)).await
    }

    /// Forgets the saved policy; returns whether there was one.
    ///
    /// # Errors
    /// The caller may not, or the state folder does not allow it.
    pub async fn forget_saved(&self, caller: &Caller) -> Result<bool, Error> {
        caller.to_write()?;
        self.work(Policies::forget_saved).await
    }

    /// Does something with the policies on a thread that may wait: for the disk, the kernel, or another writer. So many may
    /// be at it at once; of each, the text of a policy may be in memory.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Policies) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Error> {
        let _place = self.places.try_acquire().map_err(|_| Error::Busy)?;
        let policies = self.policies.clone();
        let done = spawn_blocking(move || work(&policies)).await;
        Ok(done.map_err(|_| Error::Ending)??)
    }

    /// Makes the daemon read the configuration again; returns the revision in force.
    ///
    /// # Errors
    /// The caller may not, or it is refused.
    pub async fn reload(&self, caller: &Caller) -> Result<u64, Error> {
        let author = caller.to_write()?;
        let (done, outcome) = oneshot::channel();
        self.reloads.send(Reload { author: author.clone(), done }).await.map_err(|_| Error::Ending)?;
        let outcome = outcome.await.map_err(|_| Error::Ending)?;
        self.tell(
            "reload",
            match &outcome {
                Ok(()) => format!("the configuration was read again, for {author}"),
                Err(_) => format!("the configuration was refused, for {author}"),
            },
        );
        outcome.map_err(Error::Reload)?;
        Ok(self.policies.current().number)
    }

    /// Lists tunnels behind an ID.
    #[must_use]
    pub fn tunnels(&self, filter: &Filter, after: u64, limit: usize) -> Page<Tunnel> {
        let is_wanted = |tunnel: &Tunnel| {
            filter.connection.is_none_or(|id| tunnel.caller.id == id)
                && filter.user.as_deref().is_none_or(|user| tunnel.asked.user.as_deref() == Some(user))
                && filter.class.as_deref().is_none_or(|class| tunnel.class().policy().name == class)
        };
        page(self.relay.as_ref().map(|relay| &relay.tunnels), after, limit, is_wanted, |tunnel| tunnel.id)
    }

    /// Lists connections behind an ID.
    #[must_use]
    pub fn connections(&self, after: u64, limit: usize) -> Page<relay::Caller> {
        page(self.relay.as_ref().map(|relay| &relay.connections), after, limit, |_| true, |caller| caller.id)
    }

    /// What the edge role has open.
    #[must_use]
    pub fn edge(&self) -> &Roster {
        &self.parts.edge.roster
    }

    /// Lists the edge's tunnels behind an ID, `limit` at most.
    #[must_use]
    pub fn edge_tunnels(&self, filter: &Filter, after: u64, limit: usize) -> Vec<Arc<roster::Tunnel>> {
        let is_wanted = |tunnel: &roster::Tunnel| {
            filter.user.is_none()
                && filter.connection.is_none_or(|id| tunnel.connection == id)
                && filter.class.as_deref().is_none_or(|class| tunnel.class().policy().name == class)
        };
        self.edge().tunnels.page(after, limit, is_wanted)
    }

    fn tunnel(&self, id: u64) -> Result<Arc<Tunnel>, Error> {
        let found = self.relay.as_ref().and_then(|relay| relay.tunnels.get(id));
        found.ok_or_else(|| Error::Unknown { what: "tunnel", name: id.to_string() })
    }

    /// Ends a tunnel.
    ///
    /// # Errors
    /// The caller may not, or there is none.
    pub fn close_tunnel(&self, caller: &Caller, id: u64) -> Result<(), Error> {
        let author = caller.to_write()?;
        match self.edge().tunnels.get(id) {
            Some(tunnel) => tunnel.close(),
            None => self.tunnel(id)?.close(),
        }
        tracing::info!(tunnel = id, author, "tunnel closed by operator");
        self.tell("tunnel", format!("tunnel {id} was closed by {author}"));
        Ok(())
    }

    /// Gives a tunnel a class whatever the rules say; `None` has rules decide again.
    ///
    /// # Errors
    /// The caller may not, or there is no such tunnel or class.
    pub fn set_tunnel_class(&self, caller: &Caller, id: u64, class: Option<String>) -> Result<Arc<Tunnel>, Error> {
        let author = caller.to_write()?;
        if self.edge().tunnels.get(id).is_some() {
            return Err(Error::OfEdge { tunnel: id });
        }
        let tunnel = self.tunnel(id)?;
        let Some(relay) = &self.relay else { return Err(Error::Ending) };
        let classes = relay.classes();
        if let Some(class) = &class
            && classes.get(class).is_none()
        {
            return Err(Error::Unknown { what: "class", name: class.clone() });
        }
        tunnel.set_pin(class, &classes);
        let class = tunnel.class().policy().name.clone();
        tracing::info!(tunnel = id, class, author, "class of a tunnel set by operator");
        self.tell("tunnel", format!("tunnel {id} was given the class {class} by {author}"));
        Ok(tunnel)
    }

    /// How many connections and tunnels there are.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let of = |relay: &Arc<Relay>| (relay.connections.len() as u64, relay.tunnels.len() as u64);
        let (connections, tunnels) = self.relay.as_ref().map(of).unwrap_or_default();
        (connections + self.edge().connections(0).len() as u64, tunnels + self.edge().tunnels.len() as u64)
    }

    /// What became of each class's traffic.
    #[must_use]
    pub fn classes(&self) -> Vec<ClassStats> {
        let mut tunnels = HashMap::<(Role, String), u64>::new();
        for tunnel in self.relay.iter().flat_map(|relay| relay.tunnels.all()) {
            *tunnels.entry((Role::Relay, tunnel.class().policy().name.clone())).or_default() += 1;
        }
        for tunnel in self.edge().tunnels.all() {
            *tunnels.entry((Role::Edge, tunnel.class().policy().name.clone())).or_default() += 1;
        }
        let roles =
            [self.relay.is_some().then_some(Role::Relay), (!self.facts().forwards.is_empty()).then_some(Role::Edge)];
        let policy = self.policies.current();
        let classes = policy.policy.classes.iter();
        let of = |(role, class): (Role, &policy::Class)| ClassStats {
            class: class.name.clone(),
            role,
            counters: self.parts.classes.of(role, &class.name),
            late_packets: self.parts.io.departures.late_packets(&class.name),
            tunnels: tunnels.get(&(role, class.name.clone())).copied().unwrap_or(0),
        };
        roles.into_iter().flatten().flat_map(|role| classes.clone().map(move |class| (role, class))).map(of).collect()
    }

    /// Records departures of packets for `span`, or a minute if that is less.
    ///
    /// # Errors
    /// The caller may not, or they are being recorded for somebody else.
    pub fn record_departures(&self, caller: &Caller, span: Duration) -> Result<Recording, Error> {
        let author = caller.to_write()?;
        let recording = self.parts.io.recorder.record(span.min(LONGEST_RECORDING)).ok_or(Error::Recorded)?;
        tracing::info!(author, "recording departures");
        Ok(recording)
    }

    /// Records what happens on a connection for `span`, or a minute if that is less.
    ///
    /// # Errors
    /// The caller may not, there is no such connection, or it is recorded for somebody else, or too many others are.
    pub fn record_qlog(&self, caller: &Caller, connection: u64, span: Duration) -> Result<Sequence, Error> {
        let author = caller.to_write()?;
        let found = self.relay.as_ref().and_then(|relay| relay.connections.get(connection));
        let found = found.ok_or_else(|| Error::Unknown { what: "connection", name: connection.to_string() })?;
        let tracing = self.parts.io.traces.begin(&found.tap, span.min(LONGEST_RECORDING)).ok_or(Error::Recorded)?;
        tracing::info!(connection, author, "recording a connection");
        Ok(Sequence::new(tracing, connection))
    }

    /// What the records of a connection call by numbers.
    #[must_use]
    pub fn qlog_names(&self, connection: u64) -> Names {
        let of = Filter { connection: Some(connection), ..Filter::default() };
        let tunnels = self.tunnels(&of, 0, PAGE).rows;
        let tunnels = tunnels.iter().map(|tunnel| (tunnel.stream_id, tunnel.id)).collect();
        Names { classes: self.class_names(), tunnels }
    }

    /// The names of all classes, by what records call them.
    #[must_use]
    pub fn class_names(&self) -> HashMap<ClassKey, String> {
        let policy = self.policies.current();
        policy.policy.classes.iter().map(|class| (ClassKey::of(&class.name), class.name.clone())).collect()
    }

    /// How many packets left late.
    #[must_use]
    pub fn late_packets(&self) -> u64 {
        self.parts.io.late.get()
    }
}

fn page<T>(
    table: Option<&Table<T>>,
    after: u64,
    limit: usize,
    is_wanted: impl Fn(&T) -> bool,
    id: impl Fn(&T) -> u64,
) -> Page<T> {
    let limit = if limit == 0 { PAGE } else { limit.min(PAGE) };
    // One more, to know whether that was all.
    let mut rows = table.map(|table| table.page(after, limit + 1, is_wanted)).unwrap_or_default();
    let is_last = rows.len() <= limit;
    rows.truncate(limit);
    Page { next: if is_last { None } else { rows.last().map(|row| id(row)) }, rows }
}
