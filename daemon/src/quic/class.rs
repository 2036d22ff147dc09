//! What a class means where its bytes move: the terms a tunnel or stream is served on, the class's rate cap, and what
//! became of its traffic.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::{
    counter::Counter,
    histogram::{Histogram, exponential_buckets},
};
use sched::{pace::Pace, stream::Service};

/// A class as the data path sees it; all tunnels and streams of the class share it, over all connections.
#[derive(Debug)]
pub struct Class {
    /// Which payloads are dropped besides those that exceed a bound.
    pub drop: DropRule,
    /// The rate at which the class may send to its clients.
    pub cap: Option<Cap>,
    /// What became of the class's traffic.
    pub counters: ClassCounters,
}

/// Which payloads of a queue are not worth sending any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DropRule {
    /// None: the oldest make room where a bound is reached.
    #[default]
    Oldest,
    /// Those that waited longer than this.
    Sojourn {
        /// The longest that a payload may wait.
        limit_ns: u64,
    },
    /// As CoDel decides (RFC 8289).
    CoDel {
        /// The wait that is acceptable for as long as it takes.
        target_ns: u64,
        /// How long it may be exceeded.
        interval_ns: u64,
    },
}

impl Default for Class {
    /// No rule and no cap.
    fn default() -> Self {
        Self { drop: DropRule::default(), cap: None, counters: ClassCounters::default() }
    }
}

/// The terms on which one tunnel or stream is served: its class, and where its own signals moved it.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// What it is to the scheduler. The deadline in here is ignored; it comes from `deadline_ns`.
    pub service: Service,
    /// Within which time from its first byte a stream, or from its arrival a payload of a tunnel, should have left.
    pub deadline_ns: Option<u64>,
    /// The class.
    pub class: Arc<Class>,
}

impl Terms {
    /// The terms of no particular class, served as `service` says.
    #[must_use]
    pub fn of(service: Service) -> Self {
        Self { service, ..Self::default() }
    }

    /// What something is to the scheduler whose deadline counts from `since_ns`.
    #[must_use]
    pub fn service_since(&self, since_ns: u64) -> Service {
        Service { deadline_ns: self.deadline_ns.map(|deadline| since_ns.saturating_add(deadline)), ..self.service }
    }
}

/// A rate that all of a class share ([`Pace`]). Departures are reserved in the order in which turns come, so that
/// waiting for one costs no turn of anybody else.
#[derive(Debug)]
pub struct Cap(Mutex<Pace>);

impl Cap {
    /// How much time's worth of bytes may leave at once after a silence.
    const BURST_NS: u64 = 10_000_000;

    /// Returns a cap that nothing has used yet.
    #[must_use]
    pub fn new(bytes_per_sec: u64) -> Self {
        Self(Mutex::new(Pace::new(bytes_per_sec, Self::BURST_NS)))
    }

    /// Reserves the departure of `bytes` and returns when it is due: `now_ns` or later.
    pub fn reserve(&self, now_ns: u64, bytes: u64) -> u64 {
        let mut pace = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at_ns = pace.ready_at(now_ns);
        pace.sent(at_ns.max(now_ns), bytes);
        at_ns.max(now_ns)
    }
}

/// What became of a class's traffic towards clients.
#[derive(Debug)]
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
    /// How long payloads waited for their turn, in seconds.
    pub sojourn: Histogram,
}

impl ClassCounters {
    /// Notes a payload that leaves after having waited.
    pub fn note_sent(&self, sojourn_ns: u64, deadline_ns: Option<u64>) {
        self.sent_payloads.inc();
        self.sojourn.observe(sojourn_ns as f64 * 1e-9);
        if deadline_ns.is_some_and(|deadline_ns| sojourn_ns > deadline_ns) {
            self.late_payloads.inc();
        }
    }
}

impl Default for ClassCounters {
    fn default() -> Self {
        Self {
            sent_bytes: Counter::default(),
            sent_payloads: Counter::default(),
            dropped_queue: Counter::default(),
            dropped_expired: Counter::default(),
            dropped_sojourn: Counter::default(),
            expired_streams: Counter::default(),
            late_payloads: Counter::default(),
            // 50 µs to 1.6 s.
            sojourn: Histogram::new(exponential_buckets(50e-6, 2.0, 16)),
        }
    }
}
