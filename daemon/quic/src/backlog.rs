//! The payloads of one tunnel that wait for their turn, and when each of them arrived.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use sched::{
    class::DropRule,
    codel::{Codel, CodelVerdict},
    stream::Expiry,
};

use super::class::Terms;
use crate::segments::Segments;

/// Room for this many arrival times is kept when the queue becomes empty.
const KEPT: usize = 256;

/// Payloads of one tunnel that were dropped inside its connection.
#[derive(Debug, Default)]
pub struct Losses {
    /// On arrival: the reader fell behind.
    pub receive_queue: AtomicU64,
    /// Before leaving as datagrams: a bound was reached.
    pub send_queue: AtomicU64,
    /// Before leaving, in either form: they were late, or had waited too long for their class.
    pub stale: AtomicU64,
    /// Before leaving as datagrams: no packet of the path can carry them.
    pub too_big: AtomicU64,
    /// Before leaving in capsules: a bound was reached.
    pub capsules: AtomicU64,
}

/// A bounded queue of payloads with their arrival times. It counts payloads dropped by the rule of its class, in the class and
/// in the tunnel's losses; the caller counts payloads dropped by a bound.
#[derive(Debug)]
pub struct Backlog {
    payloads: Segments,
    arrivals_ns: VecDeque<u64>,
    codel: Option<Box<Codel>>,
    /// Whether the oldest payload was already found worth sending.
    judged: bool,
    losses: Arc<Losses>,
}

impl Backlog {
    /// Returns an empty queue for at most `limit_bytes` of payload of the tunnel with these `losses`.
    #[must_use]
    pub fn new(limit_bytes: usize, losses: Arc<Losses>) -> Self {
        let payloads = Segments::new(limit_bytes);
        Self { payloads, arrivals_ns: VecDeque::new(), codel: None, judged: false, losses }
    }

    /// Appends a copy of `payload`; returns how many payloads were dropped: the oldest ones to make room, or `payload` itself
    /// if it is larger than the bound.
    pub fn push(&mut self, payload: &[u8], now_ns: u64) -> usize {
        if !self.payloads.holds(payload.len()) {
            return 1;
        }
        let dropped = self.payloads.push(payload);
        self.arrivals_ns.push_back(now_ns);
        for _ in 0..dropped {
            self.arrivals_ns.pop_front();
            self.judged = false;
        }
        dropped
    }

    /// Drops and counts payloads that are no longer worth sending, and returns the oldest of the others with its arrival.
    pub fn front(&mut self, now_ns: u64, terms: &Terms, expiry: Expiry) -> Option<(&[u8], u64)> {
        while !self.judged {
            let arrival_ns = *self.arrivals_ns.front()?;
            let counters = &terms.class.counters;
            let sojourn_ns = now_ns.saturating_sub(arrival_ns);
            let expired = expiry == Expiry::Hard && terms.deadline_ns.is_some_and(|deadline| sojourn_ns > deadline);
            if expired {
                counters.dropped_expired.inc();
            } else if self.waited_too_long(now_ns, sojourn_ns, terms.class.drop_rule()) {
                counters.dropped_sojourn.inc();
            } else {
                self.judged = true;
                break;
            }
            self.losses.stale.fetch_add(1, Relaxed);
            self.pop();
        }
        self.judged_front()
    }

    /// Returns the oldest payload with its arrival, without applying the drop rule: for a caller that has just called
    /// [`front`](Self::front).
    #[must_use]
    pub fn judged_front(&self) -> Option<(&[u8], u64)> {
        Some((self.payloads.front()?, *self.arrivals_ns.front()?))
    }

    fn waited_too_long(&mut self, now_ns: u64, sojourn_ns: u64, rule: DropRule) -> bool {
        match rule {
            DropRule::Oldest => false,
            DropRule::Sojourn(limit) => u128::from(sojourn_ns) > limit.as_nanos(),
            DropRule::CoDel { target, interval } => {
                let [target_ns, interval_ns] = [target, interval].map(|span| span.as_nanos() as u64);
                let codel = self.codel.get_or_insert_with(|| Box::new(Codel::new(target_ns, interval_ns)));
                let behind_bytes = self.payloads.bytes() - self.payloads.front().map_or(0, <[u8]>::len);
                codel.on_dequeue(now_ns, sojourn_ns, behind_bytes) == CodelVerdict::Drop
            }
        }
    }

    /// Removes the oldest payload; returns whether there was one.
    pub fn pop(&mut self) -> bool {
        self.judged = false;
        self.arrivals_ns.pop_front();
        if self.arrivals_ns.is_empty() && self.arrivals_ns.capacity() > KEPT {
            self.arrivals_ns = VecDeque::new();
        }
        self.payloads.pop()
    }

    /// Returns when the oldest payload arrived.
    #[must_use]
    pub fn oldest_ns(&self) -> Option<u64> {
        self.arrivals_ns.front().copied()
    }

    /// How many payloads wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.payloads.len()
    }

    /// How many bytes of payload wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.payloads.bytes()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sched::class::ClassSettings;

    use crate::class::Class;

    use super::*;

    #[test]
    fn codel_counts_only_what_is_left_behind_a_payload_so_it_never_drops_the_last() {
        const MS: u64 = 1_000_000;
        let drop = DropRule::CoDel { target: Duration::from_millis(5), interval: Duration::from_millis(100) };
        let class = Arc::new(Class::of(ClassSettings { drop, ..ClassSettings::named("x") }));
        let terms = class.terms(None);
        for (len, waiting, drops) in [(800, 2, false), (9_000, 1, false), (800, 3, true)] {
            let losses = Arc::<Losses>::default();
            let mut backlog = Backlog::new(1 << 20, losses.clone());
            for now_ns in (100..1_000).step_by(10).map(|now_ms| now_ms * MS) {
                // Each payload waits for 50 ms.
                while backlog.len() < waiting {
                    assert_eq!(backlog.push(&vec![0; len], now_ns - 50 * MS), 0);
                }
                assert!(backlog.front(now_ns, &terms, Expiry::Soft).is_some());
                backlog.pop();
            }
            assert_eq!(losses.stale.load(Relaxed) > 0, drops, "{waiting} payloads of {len} bytes");
        }
    }
}
