//! When each packet of a connection leaves, and which packets leave as one message. Pure: time is an argument.
//!
//! The transport hands packets over up to [`HORIZON_NS`] ahead of their departure, so that a late timer leaves no gap.
//! The sender (the kernel's `fq`, or our own queue) holds them until then. The transport's RTT samples count from the
//! hand-over and are too large by that lead: by 1 to 2 ms, never by more than the horizon.

use std::time::Duration;

use sched::pace::Pace;

/// How far ahead of its departure a packet is handed over, at most.
pub const HORIZON_NS: u64 = 2_000_000;

/// Spaces the packets of one connection at the rate that its congestion controller asks for.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    /// Paths with a shorter smoothed RTT get no pacing.
    min_rtt: Duration,
    /// `None` before the first window of packets is sent: no rate is known yet.
    pace: Option<Pace>,
    /// Whether the last packet was spaced.
    active: bool,
}

impl Pacer {
    /// Creates a pacer without a rate. It does not pace paths with a smoothed RTT below `min_rtt`, because a timer can take longer than
    /// such a path. s2n-quic's limit is 2 ms (`MINIMUM_PACING_RTT`).
    #[must_use]
    pub fn new(min_rtt: Duration) -> Self {
        Self { min_rtt, pace: None, active: false }
    }

    /// Sets the rate of packets from now on.
    pub fn set_rate(&mut self, bytes_per_sec: u64) {
        match &mut self.pace {
            Some(pace) => pace.set(bytes_per_sec, 0),
            None => self.pace = Some(Pace::new(bytes_per_sec, 0)),
        }
    }

    /// Returns a packet's departure: never before `now_ns`, and never before that of an earlier packet. Returns `None`
    /// for packets that may simply follow the packets before them: packets that are not congestion controlled (`bytes`
    /// is 0), all packets while there is no rate, and all packets on paths with an RTT below `min_rtt`.
    pub fn depart(&mut self, now_ns: u64, bytes: usize, smoothed_rtt: Duration) -> Option<u64> {
        self.active = smoothed_rtt >= self.min_rtt;
        let pace = self.pace.as_mut().filter(|_| self.active && bytes > 0)?;
        let departure_ns = pace.ready_at(now_ns);
        pace.sent(now_ns, bytes as u64);
        Some(departure_ns)
    }

    /// Returns when the next packet departs; `None` if it need not wait.
    #[must_use]
    pub fn next_departure_ns(&self) -> Option<u64> {
        self.pace.filter(|_| self.active).map(|pace| pace.ready_at(0))
    }
}

/// Packets that leave as one message, back to back, which the kernel or the device splits (UDP_SEGMENT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The departure of the first packet, and so of all.
    pub departure_ns: Option<u64>,
    /// The size of every packet; the last may be smaller.
    pub segment_bytes: usize,
    /// The total size.
    pub bytes: usize,
    /// The number of packets.
    pub packets: usize,
}

/// The limits of a [`Group`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// How much before its own departure a packet may leave in order to share a group. At 0, packets with departures
    /// share none.
    pub quantum_ns: u64,
    /// How many packets a group may have.
    pub packets: usize,
}

/// Most bytes of UDP payload in one message, which leaves room for headers below 2^16.
const GROUP_BYTES: usize = 65_000;

impl Group {
    /// Creates a group of one packet.
    #[must_use]
    pub fn new(bytes: usize, departure_ns: Option<u64>) -> Self {
        Self { departure_ns, segment_bytes: bytes, bytes, packets: 1 }
    }

    /// Adds a packet if it may leave together with the packets before it; returns whether it was added.
    #[must_use]
    pub fn join(&mut self, bytes: usize, departure_ns: Option<u64>, limits: GroupLimits) -> bool {
        let timely = match (self.departure_ns, departure_ns) {
            (None, None) => true,
            (Some(first_ns), Some(ns)) => (first_ns..first_ns.saturating_add(limits.quantum_ns)).contains(&ns),
            _ => false,
        };
        // A packet that is smaller than the others ends the message.
        let open = self.bytes == self.segment_bytes * self.packets && bytes <= self.segment_bytes;
        let fits = self.packets < limits.packets && self.bytes + bytes <= GROUP_BYTES;
        let joins = timely && open && fits;
        if joins {
            self.bytes += bytes;
            self.packets += 1;
        }
        joins
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const RTT: Duration = Duration::from_millis(40);
    const MIN_RTT: Duration = Duration::from_millis(2);
    const LIMITS: GroupLimits = GroupLimits { quantum_ns: 250_000, packets: 64 };

    #[test]
    fn packets_leave_at_the_rate_and_an_idle_connection_gains_no_burst() {
        let mut pacer = Pacer::new(MIN_RTT);
        pacer.set_rate(1_200_000);
        let departures: Vec<_> = [(5, 1_200), (5, 600), (5, 1_200), (90, 1_200), (90, 1_200)]
            .map(|(now_ms, bytes)| pacer.depart(now_ms * MS, bytes, RTT))
            .into();
        assert_eq!(departures, [5_000, 6_000, 6_500, 90_000, 91_000].map(|us| Some(us * 1_000)));
        assert_eq!(pacer.next_departure_ns(), Some(92 * MS));
    }

    #[test]
    fn pure_acknowledgements_take_no_turn() {
        let mut pacer = Pacer::new(MIN_RTT);
        pacer.set_rate(1_200_000);
        assert_eq!(pacer.depart(MS, 1_200, RTT), Some(MS));
        assert_eq!(pacer.depart(MS, 0, RTT), None);
        assert_eq!(pacer.depart(MS, 1_200, RTT), Some(2 * MS));
    }

    #[test]
    fn nothing_waits_without_a_rate_or_on_a_short_path() {
        let mut pacer = Pacer::new(MIN_RTT);
        assert_eq!(pacer.depart(MS, 1_200, RTT), None);
        assert_eq!(pacer.next_departure_ns(), None);
        pacer.set_rate(12_000);
        assert!(pacer.depart(MS, 1_200, RTT).is_some() && pacer.next_departure_ns().is_some());
        assert_eq!(pacer.depart(MS, 1_200, MIN_RTT - Duration::from_micros(1)), None);
        assert_eq!(pacer.next_departure_ns(), None, "a rate of long ago holds nothing back");
    }

    #[test]
    fn a_least_round_trip_of_zero_paces_every_path() {
        let mut pacer = Pacer::new(Duration::ZERO);
        pacer.set_rate(1_200_000);
        let departures = [(); 2].map(|()| pacer.depart(MS, 1_200, Duration::from_nanos(1)));
        assert_eq!(departures, [Some(MS), Some(2 * MS)]);
    }

    #[test]
    fn a_group_lasts_no_longer_than_the_quantum() {
        // At 90 Mbit/s a packet takes 131 µs.
        let mut group = Group::new(1_472, Some(MS));
        let joined = [131, 262].map(|us| group.join(1_472, Some(MS + us * 1_000), LIMITS));
        assert_eq!(joined, [true, false]);
        assert_eq!(group, Group { departure_ns: Some(MS), segment_bytes: 1_472, bytes: 2_944, packets: 2 });
    }

    #[test]
    fn sizes_that_the_kernel_would_not_take_apart_again_stay_apart() {
        for (bytes, departure_ns, joins) in
            [(1_200, None, true), (1_201, None, false), (40, None, true), (40, Some(MS), false)]
        {
            assert_eq!(Group::new(1_200, None).join(bytes, departure_ns, LIMITS), joins, "{bytes} {departure_ns:?}");
        }
        let mut group = Group::new(1_200, None);
        assert!(group.join(40, None, LIMITS));
        assert!(!group.join(40, None, LIMITS), "a small packet is the last");
        let mut whole = Group::new(16_250, None);
        assert_eq!([true; 4].map(|_| whole.join(16_250, None, LIMITS)), [true, true, true, false]);
    }

    proptest! {
        #[test]
        fn departures_are_never_early_and_never_go_back(
            packets in prop::collection::vec((0..3 * MS, 0..1_500usize, 0..50u64, 1_000..1_000_000_000u64), 1..300),
        ) {
            let (mut pacer, mut now_ns, mut last_ns) = (Pacer::new(MIN_RTT), 0, 0);
            for (gap_ns, bytes, rtt_ms, bytes_per_sec) in packets {
                now_ns += gap_ns;
                pacer.set_rate(bytes_per_sec);
                let departure_ns = pacer.depart(now_ns, bytes, Duration::from_millis(rtt_ms));
                prop_assert_eq!(departure_ns.is_some(), bytes > 0 && rtt_ms >= 2);
                if let Some(ns) = departure_ns {
                    prop_assert!(ns >= now_ns && ns >= last_ns);
                    last_ns = ns;
                }
            }
        }

        #[test]
        fn groups_carry_every_byte_once_and_no_packet_a_quantum_early(
            packets in prop::collection::vec((0..200_000u64, 1..1_500usize, any::<bool>()), 1..400),
            quantum_ns in 0..MS, limit in 1..64usize,
        ) {
            let limits = GroupLimits { quantum_ns, packets: limit };
            let (mut groups, mut ns, mut total) = (Vec::<Group>::new(), 0, 0);
            for (gap_ns, bytes, timed) in packets {
                ns += gap_ns;
                total += bytes;
                let departure_ns = timed.then_some(ns);
                if !groups.last_mut().is_some_and(|group| group.join(bytes, departure_ns, limits)) {
                    groups.push(Group::new(bytes, departure_ns));
                    continue;
                }
                let group = groups.last().unwrap();
                prop_assert_eq!(group.departure_ns.is_some(), timed);
                prop_assert!(group.departure_ns.is_none_or(|first_ns| first_ns <= ns && ns - first_ns < quantum_ns));
                prop_assert!(group.packets <= limit && group.bytes <= GROUP_BYTES);
                prop_assert_eq!(group.bytes.div_ceil(group.segment_bytes), group.packets);
            }
            prop_assert_eq!(groups.iter().map(|group| group.bytes).sum::<usize>(), total);
        }
    }
}
