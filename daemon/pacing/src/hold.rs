//! Messages that wait in this process for their departure, because their device does not keep departures. Pure.
//!
//! Only messages that wait are copied. No message for a device with `fq` comes here.

use std::collections::BTreeMap;

/// The quantum of messages that wait here: waking for each costs more than `fq` does.
pub const HOLD_QUANTUM_NS: u64 = 1_000_000;

/// Bytes that may wait here for their departure. At the horizon of 2 ms this is 16 Gbit/s.
pub const HOLD_BYTES: usize = 4 << 20;

/// A queue ordered by departure, bounded in bytes.
#[derive(Debug)]
pub struct Hold<T> {
    /// Ordered by departure, then by arrival.
    waiting: BTreeMap<(u64, u64), (usize, T)>,
    arrivals: u64,
    bytes: usize,
    capacity_bytes: usize,
}

impl<T> Hold<T> {
    /// Creates an empty queue with room for `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        Self { waiting: BTreeMap::new(), arrivals: 0, bytes: 0, capacity_bytes }
    }

    /// Adds a message of `bytes` bytes.
    pub fn push(&mut self, departure_ns: u64, bytes: usize, message: T) {
        self.waiting.insert((departure_ns, self.arrivals), (bytes, message));
        self.arrivals += 1;
        self.bytes += bytes;
    }

    /// Takes the earliest message if it is due at `now_ns`. While more bytes wait than there is room for, takes it
    /// ahead of its departure: leaving early costs less than being lost.
    pub fn pop(&mut self, now_ns: u64) -> Option<T> {
        let first = self.waiting.first_entry()?;
        if first.key().0 > now_ns && self.bytes <= self.capacity_bytes {
            return None;
        }
        let (bytes, message) = first.remove();
        self.bytes -= bytes;
        Some(message)
    }

    /// Returns when the next message is due; `None` if none waits.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((departure_ns, _), _)| *departure_ns)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_leave_by_departure_and_equal_ones_in_the_order_of_arrival() {
        let mut hold = Hold::new(100);
        for (departure_ns, name) in [(30, 'c'), (10, 'a'), (30, 'd'), (20, 'b')] {
            hold.push(departure_ns, 1, name);
        }
        assert_eq!((hold.pop(9), hold.next_ns()), (None, Some(10)));
        assert_eq!([20, 20, 20].map(|now_ns| hold.pop(now_ns)), [Some('a'), Some('b'), None]);
        assert_eq!([30, 30, 30].map(|now_ns| hold.pop(now_ns)), [Some('c'), Some('d'), None]);
        assert_eq!(hold.next_ns(), None);
    }

    #[test]
    fn a_queue_that_is_too_full_gives_its_earliest_early_and_loses_nothing() {
        let mut hold = Hold::new(100);
        for (departure_ns, name) in [(30, 'c'), (10, 'a'), (20, 'b')] {
            hold.push(departure_ns, 60, name);
        }
        assert_eq!([0; 3].map(|now_ns| hold.pop(now_ns)), [Some('a'), Some('b'), None]);
        assert_eq!(hold.pop(30), Some('c'));
    }

    proptest! {
        #[test]
        fn everything_leaves_once_in_order_and_nothing_early(
            steps in prop::collection::vec((0..100u64, 0..1_000u64), 1..300),
        ) {
            let (mut hold, mut now_ns, mut left) = (Hold::new(usize::MAX), 0, 0);
            for (index, (gap_ns, ahead_ns)) in steps.iter().enumerate() {
                now_ns += gap_ns;
                hold.push(now_ns + ahead_ns, 1, (now_ns + ahead_ns, index));
                let mut last = None;
                while let Some(message) = hold.pop(now_ns) {
                    prop_assert!(message.0 <= now_ns && last < Some(message));
                    (last, left) = (Some(message), left + 1);
                }
                prop_assert!(hold.next_ns().is_none_or(|ns| ns > now_ns));
            }
            left += std::iter::from_fn(|| hold.pop(u64::MAX)).count();
            prop_assert_eq!((left, hold.bytes), (steps.len(), 0));
        }
    }
}
