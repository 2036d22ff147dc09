//! Classes in the data path: the terms on which a tunnel or stream is served, the class's rates, and the counters of its
//! traffic.

use std::{collections::HashSet, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use masque::priority::{Priority, of_urgency, urgency_of};
use pacing::{class_key::ClassKey, io::distribution::Distribution};
use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use sched::{
    class::{ClassSettings, DEFAULT, DropRule},
    stream::Service,
};

use super::cap::{Cap, UserRate};

#[cfg(test)]
mod tests;

/// The end of a connection at which a class is applied; it decides which rate applies in which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyRole {
    /// Its peers are clients, and it has targets.
    Relay,
    /// Its peer is a relay; it has no targets.
    Edge,
}

impl PolicyRole {
    /// Returns its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Edge => "edge",
        }
    }
}

/// Classes of different names, as one role applies them. All connections share them.
#[derive(Debug)]
pub struct ClassSet(Vec<Arc<Class>>);

impl ClassSet {
    /// Creates classes; `marks` returns the marks that a class's packets carry for the kernel. The class [`DEFAULT`] comes first,
    /// and exists even if `classes` does not name it. A class whose name existed before continues its counters.
    #[must_use]
    pub fn new(
        mut classes: Vec<ClassSettings>,
        role: PolicyRole,
        metrics: &ClassMetrics,
        marks: impl Fn(&str) -> ClassMarks,
    ) -> Self {
        match classes.iter().position(|class| class.name == DEFAULT) {
            Some(place) => classes[..=place].rotate_right(1),
            None => classes.insert(0, ClassSettings::named(DEFAULT)),
        }
        let class = |class: ClassSettings| {
            let (counters, marks) = (metrics.of(role, &class.name), marks(&class.name));
            Arc::new(Class::new(class, role, counters, marks))
        };
        Self(classes.into_iter().map(class).collect())
    }

    /// Returns the class of a name, or the default class if there is none of that name.
    #[must_use]
    pub fn named(&self, name: Option<&str>) -> &Arc<Class> {
        name.and_then(|name| self.get(name)).unwrap_or_else(|| self.at(0))
    }

    /// Returns the class of a name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<Class>> {
        self.0.iter().find(|class| class.policy.name == name)
    }

    /// Returns the class at a place, from 0, or the default class if there is none.
    #[must_use]
    pub fn at(&self, place: usize) -> &Arc<Class> {
        self.0.get(place).unwrap_or(&self.0[0])
    }
}

/// The marks (SO_MARK) by which the kernel's programs recognise a class's traffic; `None` if the programs use no mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassMarks {
    /// The mark of QUIC packets that carry payloads of the class.
    pub to_peers: Option<u32>,
    /// The mark of sockets to targets.
    pub to_targets: Option<u32>,
}

/// A class as the data path sees it; all tunnels and streams of the class share it, over all connections.
#[derive(Debug)]
pub struct Class {
    policy: ClassSettings,
    /// Its key in records of packets.
    pub key: ClassKey,
    /// The rate toward the other end of QUIC connections. Departures that wait belong to it, and give back to it what does not
    /// leave.
    pub to_peers: Option<Arc<Cap>>,
    /// The rate toward targets. Loads that wait give their reservation back to it if their tunnel ends.
    pub to_targets: Option<Arc<Cap>>,
    /// Its marks.
    pub marks: ClassMarks,
    /// The counters of its traffic.
    pub counters: ClassCounters,
}

impl Class {
    fn new(policy: ClassSettings, role: PolicyRole, counters: ClassCounters, marks: ClassMarks) -> Self {
        let up = Cap::new(policy.rate_up, policy.packets_up).map(Arc::new);
        let (to_peers, to_targets) = match role {
            PolicyRole::Relay => (Cap::new(policy.rate_down, policy.packets_down).map(Arc::new), up),
            PolicyRole::Edge => (up, None),
        };
        Self { to_peers, to_targets, marks, counters, key: ClassKey::of(&policy.name), policy }
    }

    /// Returns the class's settings in the policy.
    #[must_use]
    pub fn policy(&self) -> &ClassSettings {
        &self.policy
    }

    /// Returns the rule for dropping payloads. It applies in addition to the bounds.
    #[must_use]
    pub fn drop_rule(&self) -> DropRule {
        self.policy.drop
    }

    /// Returns the scheduler's view of a stream of this class that is opened, or moved by `signal`, at `now_ns`.
    ///
    /// A signal counts within the class's bounds: an urgency outside `priorities` becomes the nearest bound, a deadline
    /// shorter than `shortest_deadline` becomes that. The class supplies what the signal omits, and always the level.
    #[must_use]
    pub fn service(&self, signal: Option<&Priority>, now_ns: u64) -> Service {
        let (lowest, highest) = self.policy.priorities.clone().into_inner();
        let asked = signal.and_then(|signal| signal.urgency).map(|urgency| of_urgency(urgency).clamp(lowest, highest));
        Service {
            level: self.policy.level,
            priority: asked.unwrap_or(self.policy.priority),
            weight: self.policy.weight,
            deadline_ns: self.deadline_ns(signal).map(|deadline_ns| now_ns.saturating_add(deadline_ns)),
            incremental: signal.and_then(|signal| signal.incremental).unwrap_or_default(),
        }
    }

    /// Returns the time in which the bytes of a stream of this class are useful after `signal`: for tunnels, whose
    /// deadline counts from the arrival of each payload.
    #[must_use]
    pub fn deadline_ns(&self, signal: Option<&Priority>) -> Option<u64> {
        let asked = signal.and_then(|signal| signal.deadline_ms).map(Duration::from_millis);
        let granted = asked.zip(self.policy.shortest_deadline).map(|(asked, shortest)| asked.max(shortest));
        let deadline = granted.or(self.policy.deadline)?;
        Some(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns the priority signal that an edge sends to a relay with its streams of this class. The relay ranks the data that it sends
    /// back by this signal. The signal claims no higher priority than the class has, except that classes below 31 signal `u=7`.
    #[must_use]
    pub fn signal(&self) -> Priority {
        let deadline_ms = self.policy.deadline.map(|deadline| u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX));
        Priority { urgency: Some(urgency_of(self.policy.priority)), incremental: None, deadline_ms }
    }

    /// Returns the terms of a stream or tunnel of this class that asks for `signal`, as far as the class allows that.
    #[must_use]
    pub fn terms(self: &Arc<Self>, signal: Option<&Priority>) -> Terms {
        Terms {
            service: self.service(signal, 0),
            deadline_ns: self.deadline_ns(signal),
            since: Since::default(),
            signal: signal.copied(),
            user: None,
            class: self.clone(),
        }
    }
}

impl Default for Class {
    /// A class without rules.
    fn default() -> Self {
        Self::new(ClassSettings::named(DEFAULT), PolicyRole::Relay, ClassCounters::default(), ClassMarks::default())
    }
}

/// The terms on which one tunnel or stream is served: its class, as changed by its own signals.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// Its service for the scheduler. The deadline in it is ignored; `deadline_ns` replaces that.
    pub service: Service,
    /// The deadline: of a stream, counted from its beginning; of a tunnel's payload, from its arrival.
    pub deadline_ns: Option<u64>,
    /// When a stream begins.
    pub since: Since,
    /// The priority that was requested.
    pub signal: Option<Priority>,
    /// The rate of the user toward the other end of QUIC connections, if it may have one. It stays whatever the class is.
    pub user: Option<Arc<UserRate>>,
    /// The class.
    pub class: Arc<Class>,
}

/// When the deadline of a stream of bytes begins to count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Since {
    /// At its first byte: the stream is one message, and its last byte is due within that time.
    #[default]
    First,
    /// At the first byte after an idle time: the stream is a long-lived connection, and each burst is a message.
    Burst,
}

impl Terms {
    /// Returns terms of a class without rules.
    #[must_use]
    pub fn of(service: Service, deadline_ns: Option<u64>) -> Self {
        Self { service, deadline_ns, ..Self::default() }
    }

    /// Returns these terms with another deadline: for a whole stream, counted from its first byte; for a datagram, from its
    /// queueing.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline_ns: Some(u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX)), ..self }
    }

    /// Returns these terms with another priority, from 0 to 255; the highest goes first, under
    /// [`Discipline::Abs`](sched::stream::Discipline::Abs).
    #[must_use]
    pub fn with_priority(self, priority: u8) -> Self {
        Self { service: Service { priority, ..self.service }, ..self }
    }

    /// Returns these terms with another weight: the share in relation to the weights of others, by
    /// [`Discipline::is_by_share`](sched::stream::Discipline::is_by_share). 0 counts as 1.
    #[must_use]
    pub fn with_weight(self, weight: u16) -> Self {
        Self { service: Service { weight, ..self.service }, ..self }
    }

    /// Returns the service of a stream or flow whose deadline counts from `since_ns`.
    #[must_use]
    pub fn service_since(&self, since_ns: u64) -> Service {
        Service { deadline_ns: self.deadline_ns.map(|deadline| since_ns.saturating_add(deadline)), ..self.service }
    }

    /// Returns the terms that result if `signal` replaces the previous signal.
    #[must_use]
    pub fn moved(&self, signal: &Priority) -> Self {
        Self { since: self.since, user: self.user.clone(), ..self.class.terms(Some(signal)) }
    }

    /// Returns these terms for a stream or flow that was served on the terms `before`. The signal in `before`, if any, stays: it came
    /// after the request's head, which chose these terms (RFC 9218 §7).
    #[must_use]
    pub fn after(&self, before: &Self) -> Self {
        before.signal.map_or_else(|| self.clone(), |signal| self.moved(&signal))
    }

    /// Returns the terms that result from a move to another class.
    #[must_use]
    pub fn reclassed(&self, class: &Arc<Class>) -> Self {
        Self { since: self.since, user: self.user.clone(), ..class.terms(self.signal.as_ref()) }
    }

    /// Returns the limit of the user, if there is one.
    #[must_use]
    pub fn user_cap(&self) -> Option<Arc<Cap>> {
        self.user.as_ref()?.cap()
    }
}

/// The class that its owner belongs to, which may change during the owner's life. Clones are the same membership.
#[derive(Clone, Debug, Default)]
pub struct Membership(Arc<ArcSwap<Class>>);

impl Membership {
    /// Returns a new member of a class.
    #[must_use]
    pub fn new(class: Arc<Class>) -> Self {
        Self(Arc::new(ArcSwap::new(class)))
    }

    /// Returns the current class.
    #[must_use]
    pub fn get(&self) -> Arc<Class> {
        self.0.load_full()
    }

    /// Moves the owner to another class.
    pub fn set(&self, class: Arc<Class>) {
        self.0.store(class);
    }

    /// Whether another clone exists.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Updates `known` to the current class and returns the previous one. Returns `None`, at almost no cost, if `known` is
    /// still current.
    pub fn update(&self, known: &mut Arc<Class>) -> Option<Arc<Class>> {
        let now = self.0.load();
        (!Arc::ptr_eq(&now, known)).then(|| std::mem::replace(known, now.clone()))
    }
}

/// Counters of a class's traffic toward the other end of QUIC connections.
#[derive(Clone, Debug)]
pub struct ClassCounters {
    /// Bytes of streams handed to the transport, and of payloads written into packets.
    pub sent_bytes: Counter,
    /// Payloads written into packets or capsules.
    pub sent_payloads: Counter,
    /// Payloads dropped because a bound was reached.
    pub dropped_queue: Counter,
    /// Payloads dropped because their deadline passed.
    pub dropped_expired: Counter,
    /// Payloads dropped because they had waited too long for the class's rule.
    pub dropped_sojourn: Counter,
    /// Streams reset because their deadline passed.
    pub expired_streams: Counter,
    /// Payloads that left after their deadline.
    pub late_payloads: Counter,
    /// How long payloads waited for their turn, in nanoseconds; updated without a lock, because every payload counts.
    pub sojourn: Sojourn,
}

impl ClassCounters {
    /// Counts a payload that leaves after it waited.
    pub fn note_sent(&self, sojourn_ns: u64, deadline_ns: Option<u64>) {
        self.sent_payloads.inc();
        self.sojourn.add(sojourn_ns, 1);
        if deadline_ns.is_some_and(|deadline_ns| sojourn_ns > deadline_ns) {
            self.late_payloads.inc();
        }
    }
}

impl Default for ClassCounters {
    fn default() -> Self {
        ClassMetrics::default().of(PolicyRole::Relay, DEFAULT)
    }
}

/// Upper bounds of the buckets of waiting times: 50 µs, then twice the previous one each, up to 1.6 s.
const SOJOURN_BOUNDS_NS: [u64; 16] = {
    let mut bounds = [50_000; 16];
    let mut bucket = 1;
    while bucket < bounds.len() {
        bounds[bucket] = 2 * bounds[bucket - 1];
        bucket += 1;
    }
    bounds
};

/// How long payloads of a class waited.
pub type Sojourn = Distribution<{ SOJOURN_BOUNDS_NS.len() }>;

type Labels<const N: usize> = [(&'static str, String); N];

/// Why payloads are dropped, as a label of metrics.
const DROPS: [&str; 3] = ["queue_full", "expired", "sojourn"];

/// The counters of all classes, by name and role.
#[derive(Clone, Debug)]
pub struct ClassMetrics {
    /// The label sets in the families.
    known: Arc<Mutex<HashSet<Labels<2>>>>,
    sent_bytes: Family<Labels<2>, Counter>,
    sent_payloads: Family<Labels<2>, Counter>,
    dropped: Family<Labels<3>, Counter>,
    expired_streams: Family<Labels<2>, Counter>,
    late_payloads: Family<Labels<2>, Counter>,
    sojourn: Family<Labels<2>, Sojourn>,
}

impl Default for ClassMetrics {
    fn default() -> Self {
        Self {
            known: Arc::default(),
            sent_bytes: Family::default(),
            sent_payloads: Family::default(),
            dropped: Family::default(),
            expired_streams: Family::default(),
            late_payloads: Family::default(),
            sojourn: Family::new_with_constructor(|| Distribution::new(SOJOURN_BOUNDS_NS, 1e9)),
        }
    }
}

impl ClassMetrics {
    /// Registers all families.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("class_bytes", "Bytes sent to peers, by class", self.sent_bytes.clone());
        registry.register("class_payloads", "UDP payloads sent to peers, by class", self.sent_payloads.clone());
        let help = "UDP payloads dropped before they were sent to peers, by class and reason";
        registry.register("class_dropped_payloads", help, self.dropped.clone());
        let help = "Streams reset because their deadline passed, by class";
        registry.register("class_expired_streams", help, self.expired_streams.clone());
        let help = "UDP payloads sent to peers after their deadline, by class";
        registry.register("class_late_payloads", help, self.late_payloads.clone());
        let help = "How long UDP payloads waited for their turn, by class";
        registry.register("class_sojourn_seconds", help, self.sojourn.clone());
    }

    /// Removes the counters of classes whose names `exists` does not know, so that they do not accumulate over many policies.
    pub fn retain(&self, exists: impl Fn(&str) -> bool) {
        let mut known = self.known.lock();
        known.retain(|labels| {
            let [(_, class), _] = labels;
            let is_kept = exists(class);
            if !is_kept {
                for family in [&self.sent_bytes, &self.sent_payloads, &self.expired_streams, &self.late_payloads] {
                    family.remove(labels);
                }
                self.sojourn.remove(labels);
                for reason in DROPS {
                    let [class, role] = labels.clone();
                    self.dropped.remove(&[class, role, ("reason", reason.to_owned())]);
                }
            }
            is_kept
        });
    }

    /// Returns the counters of one class.
    #[must_use]
    pub fn of(&self, role: PolicyRole, class: &str) -> ClassCounters {
        let role = role.as_str();
        let labels = || [("class", class.to_owned()), ("role", role.to_owned())];
        self.known.lock().insert(labels());
        let dropped = |reason: &str| {
            let [class, role] = labels();
            self.dropped.get_or_create(&[class, role, ("reason", reason.to_owned())]).clone()
        };
        ClassCounters {
            sent_bytes: self.sent_bytes.get_or_create(&labels()).clone(),
            sent_payloads: self.sent_payloads.get_or_create(&labels()).clone(),
            dropped_queue: dropped(DROPS[0]),
            dropped_expired: dropped(DROPS[1]),
            dropped_sojourn: dropped(DROPS[2]),
            expired_streams: self.expired_streams.get_or_create(&labels()).clone(),
            late_payloads: self.late_payloads.get_or_create(&labels()).clone(),
            sojourn: self.sojourn.get_or_create(&labels()).clone(),
        }
    }
}
