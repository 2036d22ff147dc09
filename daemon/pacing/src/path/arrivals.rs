//! What the packet numbers of arrivals say about losses on the way to us.
//!
//! A gap in the numbers is not always a loss, because senders leave out numbers on purpose. To notice acknowledgements of packets that
//! were never sent (RFC 9000 §21.4), s2n-quic leaves out a single number, and does so again as soon as the packet behind it has been
//! acknowledged: up to once in a round trip, however few packets that is. After a timeout, each of up to two probes leaves out a
//! number, too (RFC 9002 §6.2.4). So a gap means a loss if it is wider than one number, or if another gap came much less than a
//! round trip before it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::count::{add, take};

/// By how much arrivals may come closer together, in microseconds, because this process had to wait for a CPU.
const STALL_US: u64 = 5_000;

/// The distance between the numbers that the two probes after a timeout leave out.
const PROBES_DISTANCE: u64 = 2;

/// Arrivals on one connection. One thread writes; others may read.
#[derive(Debug, Default)]
pub(super) struct PacketArrivals {
    pub(super) arrived: AtomicU64,
    /// Numbers that have not arrived although a larger one has.
    pub(super) missing: AtomicU64,
    /// The missing numbers that the sender may have left out.
    pub(super) skipped: AtomicU64,
    /// One more than the largest number that has arrived.
    next: AtomicU64,
    /// One more than the last number that the sender may have left out, and when the packet after it arrived; zero if there is
    /// none.
    last_skipped: AtomicU64,
    last_skipped_us: AtomicU64,
}

impl PacketArrivals {
    /// Counts an arrival by its number, on a path with this shortest round trip; 0 if it is unknown. Returns whether packets before it
    /// were lost or are late: the sender did not leave out all of their numbers.
    pub(super) fn note(&self, number: u64, now_us: u64, shortest_us: u64) -> bool {
        add(&self.arrived, 1);
        let next = self.next.load(Relaxed);
        if number < next {
            take(&self.missing);
            // It was late, and not left out.
            if self.last_skipped.load(Relaxed) == number + 1 {
                take(&self.skipped);
                self.last_skipped.store(0, Relaxed);
            }
            return false;
        }
        self.next.store(number + 1, Relaxed);
        let width = number - next;
        add(&self.missing, width);
        if width != 1 {
            return width > 1;
        }
        let (last, last_us) = (self.last_skipped.load(Relaxed), self.last_skipped_us.load(Relaxed));
        // Half, because the shortest round trip that we have seen need not be the shortest that the sender has.
        let apart_us = shortest_us.saturating_sub(STALL_US) / 2;
        let is_second_probe = last > 0 && next + 1 == last + PROBES_DISTANCE;
        if last > 0 && !is_second_probe && now_us < last_us.saturating_add(apart_us) {
            return true;
        }
        add(&self.skipped, 1);
        if !is_second_probe {
            self.last_skipped.store(next + 1, Relaxed);
            self.last_skipped_us.store(now_us, Relaxed);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 1,000,000 packets, `per_rtt` in each round trip of `rtt_us`, show that packets were lost. `lost` says by its number
    /// which packet is lost. With `skips`, the sender leaves out a number in each round trip.
    fn losses_seen((rtt_us, per_rtt): (u64, u64), skips: bool, mut lost: impl FnMut(u64) -> bool) -> usize {
        let arrivals = PacketArrivals::default();
        let seen = (0..1_000_000_u64).filter(|packet| {
            let number = packet + if skips { packet / per_rtt } else { 0 };
            !lost(*packet) && arrivals.note(number, packet * rtt_us / per_rtt, rtt_us)
        });
        seen.count()
    }

    /// Returns a random choice of one packet in `of`.
    fn one_in(of: u64) -> impl FnMut(u64) -> bool {
        let mut state = 1_u64;
        move |_| {
            // Knuth's linear congruential generator (MMIX).
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33).is_multiple_of(of)
        }
    }

    #[test]
    fn a_sender_that_leaves_out_a_number_in_each_round_trip_loses_nothing() {
        for path in [(10_000, 1), (100, 2), (10_000, 2), (10_000, 8), (40_000, 33), (200_000, 2_000)] {
            assert_eq!(losses_seen(path, true, |_| false), 0, "{path:?}");
        }
    }

    #[test]
    fn arrivals_that_come_closer_together_because_we_were_busy_are_no_loss() {
        let arrivals = PacketArrivals::default();
        // One number of three is left out in each round trip of 6 ms, and the arrivals of every other one are read 5 ms late.
        for round in 0..1_000 {
            let now_us = round * 6_000 + round % 2 * 5_000;
            assert!(
                !arrivals.note(3 * round, now_us, 6_000) && !arrivals.note(3 * round + 1, now_us, 6_000),
                "{round}"
            );
        }
    }

    #[test]
    fn the_probes_after_a_timeout_are_no_loss() {
        let arrivals = PacketArrivals::default();
        let seen = [0, 1, 3, 5, 6, 7].map(|number| arrivals.note(number, 1_000 * number, 100_000));
        assert_eq!((seen, arrivals.skipped.load(Relaxed)), ([false; 6], 2));
        assert!(arrivals.note(9, 9_000, 100_000), "there are no three probes at once");
    }

    #[test]
    fn random_losses_are_seen_the_better_the_more_packets_a_round_trip_has() {
        // `masque::choice` takes the stream if one packet in 1,000 begins a round trip with a loss.
        for (path, seen, unseen) in
            [((10_000, 1), 25, 50), ((10_000, 8), 25, 50), ((40_000, 33), 80, 200), ((40_000, 330), 250, 600)]
        {
            let share = |of| losses_seen(path, false, one_in(of));
            assert!(share(seen) >= 1_000 && share(unseen) < 1_000, "{path:?}: {}, {}", share(seen), share(unseen));
            assert!(losses_seen(path, true, one_in(seen)) >= 1_000, "{path:?} with numbers left out");
        }
    }

    #[test]
    fn every_burst_of_losses_is_seen_with_and_without_numbers_left_out() {
        for skips in [false, true] {
            // Numbers are left out elsewhere.
            let seen = losses_seen((10_000, 8), skips, |packet| matches!(packet % 1_000, 505 | 506));
            assert_eq!(seen, 1_000, "{skips}");
        }
    }

    #[test]
    fn packets_that_are_late_are_neither_lost_nor_left_out() {
        let arrivals = PacketArrivals::default();
        for pair in 0..1_000 {
            assert!(!arrivals.note(2 * pair + 1, 20_000 * pair, 10_000));
            assert!(!arrivals.note(2 * pair, 20_000 * pair + 100, 10_000));
        }
        let counts = [&arrivals.arrived, &arrivals.missing, &arrivals.skipped].map(|count| count.load(Relaxed));
        assert_eq!(counts, [2_000, 0, 0]);
    }
}
