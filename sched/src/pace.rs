//! When the next packet may leave: rates enforced by departure times, without a token bucket's timer.

/// A rate cap by earliest departure time ("Carousel", SIGCOMM 2017): each packet delays the departure of the next by
/// its own transmission time at the rate.
///
/// An idle sender gains at most one burst: as many bytes as the rate carries in `burst_ns` may then leave at once.
/// Over any time `t`, at most `rate · (t + burst)` plus one packet leaves, because the last packet only has to begin
/// within `t`.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    bytes_per_sec: u64,
    burst_ns: u64,
    next_ns: u64,
}

const NS_PER_SEC: u64 = 1_000_000_000;

impl Pace {
    /// Creates a cap that allows a first burst at once. A rate of 0 counts as one byte per second.
    #[must_use]
    pub const fn new(bytes_per_sec: u64, burst_ns: u64) -> Self {
        let mut pace = Self { bytes_per_sec: 0, burst_ns, next_ns: 0 };
        pace.set(bytes_per_sec, burst_ns);
        pace
    }

    /// Changes the rate and the burst for later packets; departures already promised stay.
    pub const fn set(&mut self, bytes_per_sec: u64, burst_ns: u64) {
        self.bytes_per_sec = if bytes_per_sec == 0 { 1 } else { bytes_per_sec };
        self.burst_ns = burst_ns;
    }

    /// Returns when the next packet may leave: `now_ns`, or later.
    #[must_use]
    pub fn ready_at(&self, now_ns: u64) -> u64 {
        self.next_ns.max(now_ns)
    }

    /// Notes that `bytes` left, or were given [this departure time](Self::ready_at), at `now_ns`. Fractions of a
    /// nanosecond round up, so that the rate is never exceeded.
    pub fn sent(&mut self, now_ns: u64, bytes: u64) {
        let departure_ns = self.next_ns.max(now_ns.saturating_sub(self.burst_ns));
        self.next_ns = departure_ns.saturating_add(self.length_ns(bytes));
    }

    /// Returns how long `bytes` take at the rate, in nanoseconds; fractions round up.
    #[must_use]
    pub const fn length_ns(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(NS_PER_SEC).div_ceil(self.bytes_per_sec)
    }

    /// Notes that `bytes` that were given a departure time will not leave: later packets may leave that much earlier, so the
    /// average rate holds. Departures already promised stay, so packets may then leave together with these. Fractions of a
    /// nanosecond round down, so that no more is gained than was spent.
    pub fn give_back(&mut self, bytes: u64) {
        let length_ns = bytes.saturating_mul(NS_PER_SEC) / self.bytes_per_sec;
        self.next_ns = self.next_ns.saturating_sub(length_ns);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn packets_of_a_busy_sender_leave_at_the_rate() {
        let mut pace = Pace::new(1_200_000, 0);
        let mut departures = Vec::new();
        for _ in 0..4 {
            departures.push(pace.ready_at(5 * MS));
            pace.sent(5 * MS, 1_200);
        }
        assert_eq!(departures, [5 * MS, 6 * MS, 7 * MS, 8 * MS]);
    }

    #[test]
    fn an_idle_sender_gains_one_burst_and_no_more() {
        let mut pace = Pace::new(1_200_000, 3 * MS);
        for now_ns in [0, 1_000 * MS] {
            let at_once = std::iter::repeat_with(|| {
                let ready = pace.ready_at(now_ns) == now_ns;
                pace.sent(now_ns, 1_200);
                ready
            })
            .take_while(|ready| *ready);
            assert!(at_once.count() <= 4, "three milliseconds' worth, and one that begins");
        }
    }

    #[test]
    fn a_new_rate_keeps_the_departures_already_promised() {
        let mut pace = Pace::new(1_200_000, 0);
        pace.sent(0, 1_200);
        pace.set(2_400_000, 0);
        assert_eq!(pace.ready_at(0), MS);
        pace.sent(MS, 1_200);
        assert_eq!(pace.ready_at(MS), MS + MS / 2);
    }

    #[test]
    fn departures_that_are_given_back_are_promised_again() {
        let mut pace = Pace::new(1_200_000, 0);
        pace.sent(0, 1_200);
        pace.sent(0, 12_000);
        assert_eq!(pace.ready_at(0), 11 * MS);
        pace.give_back(12_000);
        assert_eq!(pace.ready_at(0), MS);
        pace.give_back(u64::MAX);
        assert_eq!(pace.ready_at(MS / 2), MS / 2);
    }

    #[test]
    fn extremes_neither_panic_nor_wrap() {
        let mut pace = Pace::new(0, u64::MAX);
        pace.sent(u64::MAX, u64::MAX);
        pace.sent(0, u64::MAX);
        assert!(pace.ready_at(0) > NS_PER_SEC);
        pace.set(u64::MAX, 0);
        pace.sent(u64::MAX, 1);
        assert_eq!(pace.ready_at(0), u64::MAX);
    }

    proptest! {
        #[test]
        fn no_stretch_of_time_carries_more_than_rate_and_burst_allow(
            bytes_per_sec in 1_000..10_000_000_000u64, burst_ns in 0..10 * MS,
            packets in prop::collection::vec((0..2 * MS, 1..65_536u64), 1..200),
        ) {
            let mut pace = Pace::new(bytes_per_sec, burst_ns);
            let (mut now_ns, mut sent) = (1_000 * MS, Vec::new());
            for (gap_ns, bytes) in packets {
                now_ns = pace.ready_at(now_ns + gap_ns);
                pace.sent(now_ns, bytes);
                sent.push((now_ns, bytes));
            }
            for first in 0..sent.len() {
                let mut bytes = 0;
                for (last_ns, more) in &sent[first..] {
                    let time_ns = u128::from(last_ns - sent[first].0 + burst_ns);
                    let allowed = time_ns * u128::from(bytes_per_sec) / u128::from(NS_PER_SEC);
                    prop_assert!(bytes <= allowed, "before the last packet, {bytes} of {allowed} bytes");
                    bytes += u128::from(*more);
                }
            }
        }
    }
}
