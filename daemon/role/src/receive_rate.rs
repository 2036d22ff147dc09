//! The rate at which the tunnels of a user receive from their targets.

use parking_lot::Mutex;
use quic::cap::Cap;

/// The time between two turns of tunnels that wait to receive for the first time, so that many of them cost little.
const TURN_NS: u64 = 1_000_000;

/// The rate at which the tunnels of a user receive from their targets. What a tunnel receives has already arrived, so it is charged
/// afterwards: the tunnel receives again when that is due.
///
/// Tunnels that have not received anything wait as if they were one tunnel. Otherwise each new tunnel would receive beyond the rate once.
#[derive(Debug)]
pub struct ReceiveRate {
    cap: Cap,
    first: Mutex<FirstTurns>,
}

#[derive(Debug, Default)]
struct FirstTurns {
    /// When the latest reception by a tunnel that had received nothing before is due.
    due_ns: u64,
    /// The latest turn of a tunnel that waits.
    last_ns: u64,
}

impl ReceiveRate {
    /// Returns a rate that nothing has used yet; `None` if there is no limit.
    #[must_use]
    pub fn new(bytes_per_sec: Option<u64>, packets_per_sec: Option<u64>) -> Option<Self> {
        Cap::new(bytes_per_sec, packets_per_sec).map(|cap| Self { cap, first: Mutex::default() })
    }

    /// Charges a reception that has happened, and returns when it is due.
    pub fn charge(&self, now_ns: u64, bytes: u64, packets: u64) -> u64 {
        self.cap.reserve(now_ns, bytes, packets)
    }

    /// As [`charge`](Self::charge), for a tunnel that had not received anything before.
    pub fn charge_first(&self, now_ns: u64, bytes: u64, packets: u64) -> u64 {
        let mut first = self.first.lock();
        let due_ns = self.charge(now_ns, bytes, packets);
        first.due_ns = first.due_ns.max(due_ns);
        due_ns
    }

    /// Returns until when a tunnel that has not received anything has to wait before it asks again; `None` if it may receive now.
    pub fn first_turn(&self, now_ns: u64) -> Option<u64> {
        let mut first = self.first.lock();
        (first.due_ns > now_ns).then(|| {
            first.last_ns = first.due_ns.max(first.last_ns.saturating_add(TURN_NS));
            first.last_ns
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn tunnels_that_have_not_received_anything_share_the_turn_of_one() {
        let rate = ReceiveRate::new(Some(1_000_000), None).unwrap();
        assert_eq!(rate.first_turn(100 * MS), None);
        // The burst of 10 ms, and 20 ms more.
        assert_eq!(rate.charge_first(100 * MS, 30_000, 1), 100 * MS);
        assert_eq!(rate.first_turn(100 * MS), None, "one reception is due at once");
        assert_eq!(rate.charge_first(100 * MS, 30_000, 1), 120 * MS);
        assert_eq!([(); 3].map(|()| rate.first_turn(100 * MS)), [120, 121, 122].map(|at_ms| Some(at_ms * MS)));
        assert_eq!(rate.first_turn(120 * MS), None);
        assert_eq!(rate.charge_first(120 * MS, 30_000, 1), 150 * MS);
        assert_eq!([121, 122].map(|now_ms| rate.first_turn(now_ms * MS)), [150, 151].map(|at_ms| Some(at_ms * MS)));
        assert!(ReceiveRate::new(None, None).is_none());
    }
}
