//! Packets that wait for their departure here, because the device they leave by does not keep it. Pure.
//!
//! Only what waits is copied. Where `fq` is in force nothing comes here.

use std::collections::BTreeMap;

/// A queue by departure, bounded in bytes.
#[derive(Debug)]
pub struct Hold<T> {
    /// By departure, and among equal ones by arrival.
    waiting: BTreeMap<(u64, u64), (usize, T)>,
    arrivals: u64,
    bytes: usize,
    capacity_bytes: usize,
}

impl<T> Hold<T> {
    /// Creates an empty queue for so many bytes.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        Self { waiting: BTreeMap::new(), arrivals: 0, bytes: 0, capacity_bytes }
    }

    /// Makes a message of so many bytes wait.
    pub fn push(&mut self, departure_ns: u64, bytes: usize, message: T) {
        self.waiting.insert((departure_ns, self.arrivals), (bytes, message));
        self.arrivals += 1;
        self.bytes += bytes;
    }

    /// Takes the next message that is due at `now_ns`, in the order of departures. If more bytes wait than there is
    /// room for, the earliest are due ahead of their time: early costs less than lost.
    pub fn pop(&mut self, now_ns: u64) -> Option<T> {
        let first = self.waiting.first_entry()?;
        if first.key().0 > now_ns && self.bytes <= self.capacity_bytes {
            return None;
        }
        let (bytes, message) = first.remove();
        self.bytes -= bytes;
        Some(message)
    }

    /// When the next message is due; `None` if none waits.
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
                let mut last = (0, 0);
                while let Some(message) = hold.pop(now_ns) {
                    prop_assert!(message.0 <= now_ns && message > last);
                    (last, left) = (message, left + 1);
                }
                prop_assert!(hold.next_ns().is_none_or(|ns| ns > now_ns));
            }
            left += std::iter::from_fn(|| hold.pop(u64::MAX)).count();
            prop_assert_eq!((left, hold.bytes), (steps.len(), 0));
        }
    }
}
