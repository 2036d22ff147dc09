//! The payloads of one tunnel that wait for their turn, when each of them arrived, and which are dropped because they are late.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use prometheus_client::metrics::counter::Counter;
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
    /// Before leaving, in either form: the tunnel ended first.
    pub unsent: AtomicU64,
    /// After arriving: the tunnel ended before they went on.
    pub unread: AtomicU64,
    /// The unsent and unread payloads of all tunnels.
    of_all: [Counter; 2],
}

impl Losses {
    /// Returns the losses of a tunnel, whose unsent and unread payloads count among those of all tunnels, too.
    pub(crate) fn among(unsent: &Counter, unread: &Counter) -> Self {
        Self { of_all: [unsent.clone(), unread.clone()], ..Self::default() }
    }

    /// Counts payloads that ended with their tunnel before they left.
    fn note_unsent(&self, payloads: usize) {
        self.unsent.fetch_add(payloads as u64, Relaxed);
        self.of_all[0].inc_by(payloads as u64);
    }

    /// Counts payloads that had arrived, and ended with their tunnel.
    pub fn note_unread(&self, payloads: usize) {
        if payloads > 0 {
            self.unread.fetch_add(payloads as u64, Relaxed);
            self.of_all[1].inc_by(payloads as u64);
        }
    }
}

/// A bounded queue of payloads with their arrival times. It counts payloads dropped by the rule of its class, in the class and
/// in the tunnel's losses; the caller counts payloads dropped by a bound. Payloads that wait when it is dropped count as unsent.
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
    /// Returns an empty queue for the payloads of the tunnel with these `losses`, up to a charge of `limit_bytes` (see
    /// [`Segments::charged_bytes`]).
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
        for _ in 0..dropped {
            self.arrivals_ns.pop_front();
            self.judged = false;
        }
        self.arrivals_ns.push_back(now_ns);
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

    /// Makes [`front`](Self::front) apply the drop rule to the oldest payload again, because it has waited since.
    pub fn judge_again(&mut self) {
        self.judged = false;
    }

    fn waited_too_long(&mut self, now_ns: u64, sojourn_ns: u64, rule: DropRule) -> bool {
        // The class may have changed, and with it the rule.
        let codel = self.codel.take();
        match rule {
            DropRule::Oldest => false,
            DropRule::Sojourn(limit) => u128::from(sojourn_ns) > limit.as_nanos(),
            DropRule::CoDel { target, interval } => {
                let [target_ns, interval_ns] = [target, interval].map(|span| span.as_nanos() as u64);
                let codel = codel.filter(|codel| codel.is_for(target_ns, interval_ns));
                let codel = self.codel.insert(codel.unwrap_or_else(|| Box::new(Codel::new(target_ns, interval_ns))));
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

    /// What the waiting payloads count for where a bound is checked (see [`Segments::charged_bytes`]).
    #[must_use]
    pub fn charged_bytes(&self) -> usize {
        self.payloads.charged_bytes()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        if !self.is_empty() {
            self.losses.note_unsent(self.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sched::class::ClassSettings;

    use super::*;
    use crate::class::Class;

    #[test]
    fn at_its_bound_a_queue_needs_no_more_memory_for_times_than_below_it() {
        let mut backlog = Backlog::new(256 * Segments::PAYLOAD_OVERHEAD_BYTES, Arc::default());
        let dropped: usize = (0..1_000).map(|now_ns| backlog.push(b"", now_ns)).sum();
        assert_eq!((dropped, backlog.len(), backlog.oldest_ns()), (744, 256, Some(744)));
        assert_eq!(backlog.arrivals_ns.capacity(), 256);
    }

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
    #[test]
    fn a_tunnel_of_a_class_whose_codel_changes_is_judged_by_the_new_numbers() {
        const MS: u64 = 1_000_000;
        let codel = |target_ms, interval_ms| DropRule::CoDel {
            target: Duration::from_millis(target_ms),
            interval: Duration::from_millis(interval_ms),
        };
        let terms = |drop| Arc::new(Class::of(ClassSettings { drop, ..ClassSettings::named("x") })).terms(None);
        let losses = Arc::<Losses>::default();
        let mut backlog = Backlog::new(1 << 20, losses.clone());
        let mut dropped_from = |begin_ms: u64, terms: &Terms| {
            let before = losses.stale.load(Relaxed);
            for now_ns in (begin_ms..begin_ms + 1_000).step_by(10).map(|now_ms| now_ms * MS) {
                while backlog.len() < 4 {
                    backlog.push(&[0; 800], now_ns - 50 * MS);
                }
                assert!(backlog.front(now_ns, terms, Expiry::Soft).is_some());
                backlog.pop();
            }
            losses.stale.load(Relaxed) > before
        };
        assert!(dropped_from(1_000, &terms(codel(5, 100))));
        assert!(!dropped_from(2_000, &terms(codel(500, 1_000))));
        assert!(dropped_from(3_000, &terms(codel(5, 100))));
    }
}
