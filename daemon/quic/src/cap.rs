//! Rates that traffic of a class or of a user shares, and the departures that are reserved under them.

use std::sync::Arc;

use parking_lot::Mutex;
use sched::pace::Pace;

/// How many bytes of a stream count as one packet, for classes with a limit in packets per second.
pub(crate) const STREAM_BYTES_PER_PACKET: u64 = 1_200;

/// A limit that all traffic of a class or of a user shares, in bytes or packets per second or both ([`Pace`]). Departures
/// are reserved in the order of turns, so waiting for one costs no other stream or tunnel its turn.
#[derive(Debug)]
pub struct Cap {
    paces: Mutex<Paces>,
    turn_bytes: u64,
}

#[derive(Debug)]
struct Paces {
    bytes: Option<Pace>,
    /// Counts one "byte" per packet.
    packets: Option<Pace>,
}

impl Cap {
    /// How many nanoseconds' worth of traffic may leave at once after a silence.
    const BURST_NS: u64 = 10_000_000;

    /// The part of a second's traffic that a stream sends in a turn: 100 µs.
    const TURNS_PER_SEC: u64 = 10_000;

    /// Returns a cap that nothing has used yet; `None` if there is no limit.
    #[must_use]
    pub fn new(bytes_per_sec: Option<u64>, packets_per_sec: Option<u64>) -> Option<Self> {
        let pace = |per_sec: Option<u64>| per_sec.map(|per_sec| Pace::new(per_sec, Self::BURST_NS));
        let paces = Paces { bytes: pace(bytes_per_sec), packets: pace(packets_per_sec) };
        let in_packets = packets_per_sec.map(|per_sec| per_sec.saturating_mul(STREAM_BYTES_PER_PACKET));
        let bytes_per_sec = [bytes_per_sec, in_packets].into_iter().flatten().min()?;
        // Whole packets, because each turn counts as whole ones.
        let packets = (bytes_per_sec / Self::TURNS_PER_SEC / STREAM_BYTES_PER_PACKET).max(1);
        let turn_bytes = packets * STREAM_BYTES_PER_PACKET;
        Some(Self { paces: Mutex::new(paces), turn_bytes })
    }

    /// Returns how many bytes of a stream may leave in one turn. A tunnel reserves a departure for one payload at a time, so next to long
    /// turns of streams it would get a small part of the rate.
    #[must_use]
    pub const fn turn_bytes(&self) -> u64 {
        self.turn_bytes
    }

    /// Reserves a departure for `bytes` and `packets`, and returns when it is due: `now_ns` or later.
    pub fn reserve(&self, now_ns: u64, bytes: u64, packets: u64) -> u64 {
        let mut paces = self.paces.lock();
        let Paces { bytes: by_bytes, packets: by_packets } = &mut *paces;
        let ready_ns = |pace: &Option<Pace>| pace.map_or(now_ns, |pace| pace.ready_at(now_ns));
        let at_ns = ready_ns(by_bytes).max(ready_ns(by_packets));
        for (pace, sent) in [(by_bytes, bytes), (by_packets, packets)] {
            if let Some(pace) = pace {
                pace.sent(at_ns, sent);
            }
        }
        at_ns
    }

    /// Reserves a departure as [`reserve`](Self::reserve) does, and returns when it is due, and what gives it back if it is dropped before.
    pub fn hold(self: &Arc<Self>, now_ns: u64, bytes: u64, packets: u64) -> (u64, Reservation) {
        (self.reserve(now_ns, bytes, packets), Reservation { cap: self.clone(), bytes, packets })
    }

    /// Gives back the reservation for `bytes` in `packets` that will not leave.
    fn give_back(&self, bytes: u64, packets: u64) {
        let mut paces = self.paces.lock();
        let Paces { bytes: by_bytes, packets: by_packets } = &mut *paces;
        for (pace, unsent) in [(by_bytes, bytes), (by_packets, packets)] {
            if let Some(pace) = pace {
                pace.give_back(unsent);
            }
        }
    }
}

/// Bytes and packets for which a class or a user has reserved a departure. Dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    cap: Arc<Cap>,
    bytes: u64,
    packets: u64,
}

impl Reservation {
    /// Notes that the departure has come, so that nothing is given back any more.
    pub fn spend(mut self) {
        (self.bytes, self.packets) = (0, 0);
    }

    /// Whether this cap made it.
    #[must_use]
    pub fn is_of(&self, cap: &Arc<Cap>) -> bool {
        Arc::ptr_eq(&self.cap, cap)
    }

    /// Gives back the reservation for unsent bytes and packets, and charges sent bytes and packets without a reservation: an upper layer
    /// may queue more before the departure.
    pub(crate) fn settle(mut self, now_ns: u64, bytes: u64, packets: u64) {
        if bytes > self.bytes || packets > self.packets {
            self.cap.reserve(now_ns, bytes.saturating_sub(self.bytes), packets.saturating_sub(self.packets));
        }
        self.bytes = self.bytes.saturating_sub(bytes);
        self.packets = self.packets.saturating_sub(packets);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 || self.packets > 0 {
            self.cap.give_back(self.bytes, self.packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_holds_to_the_slower_of_bytes_and_packets() {
        const MS: u64 = 1_000_000;
        // Beyond the 10 ms that may leave at once, 1,000 bytes take 1 ms, and a packet takes 10 ms.
        let cap = Cap::new(Some(1_000_000), Some(100)).unwrap();
        let departures: Vec<_> = (0..4).map(|_| cap.reserve(100 * MS, 0, 1) / MS).collect();
        assert_eq!(departures, [100, 100, 110, 120], "empty ones");
        let departures: Vec<_> = (0..3).map(|_| cap.reserve(500 * MS, 30_000, 1) / MS).collect();
        assert_eq!(departures, [500, 520, 550], "long ones");
        assert!(Cap::new(None, None).is_none());
    }

    #[test]
    fn a_turn_of_a_stream_is_of_whole_packets_and_holds_to_the_slower_of_bytes_and_packets() {
        let turn = |bytes, packets| Cap::new(bytes, packets).unwrap().turn_bytes();
        assert_eq!([1_000, 12_500_000, 125_000_000].map(|bytes| turn(Some(bytes), None)), [1_200, 1_200, 12_000]);
        assert_eq!([1, 15_000, 25_000].map(|packets| turn(None, Some(packets))), [1_200, 1_200, 2_400]);
        assert_eq!(turn(Some(125_000_000), Some(25_000)), 2_400);
        assert_eq!(turn(Some(u64::MAX), Some(u64::MAX)) % 1_200, 0);
    }
}
