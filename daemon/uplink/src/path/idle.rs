//! Corrects what the transport measures on a connection that carries little: round trips that include the delay of acknowledgements, and a
//! window that an outage has left small.
//!
//! The acknowledgement of a packet that nothing follows waits for `max_ack_delay`, and says for how long. The transport may subtract that time
//! from a round trip only if the rest is no shorter than the shortest one (RFC 9002 §5.3). On a connection that carries only pings, about
//! half of the rests are, so the smoothed round trip of a near relay is up to `max_ack_delay` too long. Persistent congestion resets even the
//! shortest round trip, to one that may include the delay (§5.2).

use std::time::Duration;

use pacing::path::PathState;
use tokio::time::Instant;

/// How long a relay holds back an acknowledgement at most, unless it asks for another time (RFC 9000 §18.2, `max_ack_delay`).
const ACK_DELAY: Duration = Duration::from_millis(25);

/// The window of a new connection, in bytes (RFC 9002 §7.2): ten packets of the size that each path carries.
const INITIAL_WINDOW_BYTES: u64 = 12_000;

/// How long a loss counts: as long as a measured rate.
const WINDOW: Duration = Duration::from_secs(10);

/// Returns a round trip of a connection without the time for which the relay may have held back acknowledgements. It is no shorter than the
/// shortest one since the connection began, and at most [`ACK_DELAY`] shorter than the given one, so a path that has become slower is still
/// seen.
pub(super) fn without_ack_delay(rtt: Duration, of: &PathState) -> Duration {
    rtt.saturating_sub(ACK_DELAY).max(of.lifetime_min_rtt.unwrap_or(rtt)).min(rtt)
}

/// The latest loss of a path, which tells whether losses keep its windows small.
#[derive(Debug, Default)]
pub(super) struct LatestLoss {
    lost_packets: u64,
    at: Option<Instant>,
}

impl LatestLoss {
    /// Notes how many packets were lost in total. A lower count than before is no loss: a connection has ended.
    pub(super) fn note(&mut self, now: Instant, lost_packets: u64) {
        if lost_packets > self.lost_packets {
            self.at = Some(now);
        }
        self.lost_packets = lost_packets;
    }

    /// Returns the bytes that a connection has in flight once it has to send much: its congestion window, and after ten seconds without a loss
    /// at least the initial one. A window that losses made smaller does not grow while it is not used (RFC 9002 §7.8).
    pub(super) fn window_bytes(&self, now: Instant, of: &PathState) -> u64 {
        let is_recent = self.at.is_some_and(|at| now.saturating_duration_since(at) <= WINDOW);
        if is_recent { of.window_bytes } else { of.window_bytes.max(INITIAL_WINDOW_BYTES) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_round_trip_loses_the_delay_of_acknowledgements_but_stays_above_the_shortest_one() {
        let of = |lifetime_min_rtt| PathState { lifetime_min_rtt, ..PathState::default() };
        let seen =
            |rtt, shortest: Option<u32>| without_ack_delay(rtt * MS, &of(shortest.map(|shortest| shortest * MS)));
        assert_eq!([3, 20, 27, 60].map(|rtt| seen(rtt, Some(3))), [3, 3, 3, 35].map(|rtt| rtt * MS));
        assert_eq!(seen(225, Some(20)), 200 * MS, "it has become slower");
        assert_eq!(seen(10, None), 10 * MS, "only the handshake is known");
        assert_eq!(seen(10, Some(333)), 10 * MS);
    }

    #[test]
    fn a_window_that_an_outage_made_small_counts_as_the_initial_one_ten_seconds_after_the_last_loss() {
        let (mut loss, start) = (LatestLoss::default(), Instant::now());
        let of = |window_bytes| PathState { window_bytes, ..PathState::default() };
        assert_eq!(loss.window_bytes(start, &of(2_400)), INITIAL_WINDOW_BYTES);
        loss.note(start, 5);
        loss.note(start + WINDOW, 5);
        assert_eq!([2_400, 90_000].map(|window| loss.window_bytes(start + WINDOW, &of(window))), [2_400, 90_000]);
        assert_eq!(loss.window_bytes(start + WINDOW + MS, &of(2_400)), INITIAL_WINDOW_BYTES);
        loss.note(start + WINDOW + MS, 6);
        assert_eq!(loss.window_bytes(start + WINDOW + MS, &of(2_400)), 2_400, "a path that loses packets");
        loss.note(start + 3 * WINDOW, 0);
        assert_eq!(loss.window_bytes(start + 3 * WINDOW, &of(2_400)), INITIAL_WINDOW_BYTES, "a new connection");
    }
}
