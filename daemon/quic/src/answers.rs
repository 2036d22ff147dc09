//! Whether the peer of a connection answers: how many packets have arrived, and since when packets have been without an answer.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::Duration,
};

use tokio::time::Instant;

/// How many packets without an answer show that an answer is due. A single packet may be an acknowledgement, which gets none.
const DUE: u64 = 2;

/// Which packets of a connection have arrived and are authentic, and whether packets that left since then lack an answer. Clones follow
/// the same connection.
#[derive(Clone, Debug)]
pub struct Answers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The time of the transport's events begins here.
    origin: Instant,
    arrived: AtomicU64,
    /// How many packets have left since the last one arrived.
    unanswered: AtomicU64,
    /// When an answer became due, in nanoseconds after `origin`; without meaning while fewer than [`DUE`] packets are unanswered.
    due_ns: AtomicU64,
}

impl Answers {
    /// Begins without packets. `now` is the present time of the transport's events.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        let present = Instant::now();
        let origin = present.checked_sub(now).unwrap_or(present);
        let count = AtomicU64::default;
        Self(Arc::new(Inner { origin, arrived: count(), unanswered: count(), due_ns: count() }))
    }

    /// Returns how many packets have arrived.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.0.arrived.load(Relaxed)
    }

    /// Returns since when an answer has been due: when the second of the packets left after which nothing arrived. `None` if at most one
    /// such packet left.
    #[must_use]
    pub fn due_since(&self) -> Option<Instant> {
        // The time belongs to this count, not to an earlier one.
        let is_due = self.0.unanswered.load(Acquire) >= DUE;
        is_due.then(|| self.0.origin + Duration::from_nanos(self.0.due_ns.load(Relaxed)))
    }

    /// Counts a packet that has arrived.
    pub(crate) fn on_arrival(&self) {
        // Only the connection writes.
        self.0.arrived.store(self.arrived().wrapping_add(1), Relaxed);
        self.0.unanswered.store(0, Relaxed);
    }

    /// Counts a packet that left at a time of the transport's events.
    pub(crate) fn on_departure(&self, now: impl FnOnce() -> Duration) {
        let unanswered = self.0.unanswered.load(Relaxed).saturating_add(1);
        if unanswered == DUE {
            // A `u64` has room for 584 years.
            self.0.due_ns.store(now().as_nanos() as u64, Relaxed);
        }
        self.0.unanswered.store(unanswered, Release);
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self::new(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_due_from_the_second_packet_on_after_which_nothing_arrives() {
        let begun = Duration::from_secs(5);
        let answers = Answers::new(begun);
        let at = |ms| begun + Duration::from_millis(ms);
        let send = |ms| answers.on_departure(|| at(ms));
        assert_eq!((answers.arrived(), answers.due_since()), (0, None));
        send(0);
        assert_eq!(answers.due_since(), None, "it may be an acknowledgement");
        send(20);
        let due = answers.due_since().unwrap();
        send(40);
        assert_eq!(answers.due_since(), Some(due), "the second packet decides");
        let age = Instant::now().saturating_duration_since(due);
        assert!(due > Instant::now() || age < Duration::from_secs(60), "{age:?}: times are those of this process");
        answers.on_arrival();
        assert_eq!((answers.arrived(), answers.due_since()), (1, None));
        send(100);
        send(130);
        assert_eq!(answers.due_since(), Some(due + Duration::from_millis(110)));
    }
}
