//! How early the bytes of streams are bound to an order, by being handed to the transport: the low mark.

use std::time::Duration;

/// How much may be handed over and not yet sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// As little as keeps the transport busy, so that urgent bytes wait behind few others: what leaves in a
    /// millisecond, but at least some packets.
    Late {
        /// At least this many packets. `None` means 4 on paths below 10 Mbit/s, and 12 on faster ones, which is a burst
        /// of the transport's pacer and a little more.
        floor_packets: Option<u32>,
    },
    /// Everything at once: the transport's own round robin decides, as without a dispatcher.
    Early,
}

impl Default for Binding {
    fn default() -> Self {
        Self::Late { floor_packets: None }
    }
}

impl Binding {
    const HORIZON: Duration = Duration::from_millis(1);
    const SLOW_BYTES_PER_SEC: f64 = 10e6 / 8.0;
    /// The largest low mark of a late binding.
    pub(super) const MOST_BYTES: u64 = 512 * 1024;
    /// How [`Binding::Early`] is written as a number.
    const EARLY: u32 = u32::MAX;

    /// Returns it as a number: the floor in packets, 0 if that adapts to the path, or `EARLY`.
    pub(super) fn to_number(self) -> u32 {
        match self {
            Self::Late { floor_packets } => floor_packets.unwrap_or(0).min(Self::EARLY - 1),
            Self::Early => Self::EARLY,
        }
    }

    pub(super) fn from_number(number: u32) -> Self {
        match number {
            Self::EARLY => Self::Early,
            floor => Self::Late { floor_packets: (floor > 0).then_some(floor) },
        }
    }

    /// Returns the low mark of a path: more bytes are handed over only while fewer than this are handed over and not
    /// yet sent.
    #[must_use]
    pub fn low_mark(self, congestion_window: u32, smoothed_rtt: Duration, packet_bytes: u64) -> u64 {
        let Self::Late { floor_packets } = self else { return u64::MAX };
        // The pacer sends a little faster than a window per round trip, so that the window is the limit and not the
        // pacer.
        let bytes_per_sec = 1.25 * f64::from(congestion_window) / smoothed_rtt.as_secs_f64().max(1e-6);
        let floor = floor_packets.unwrap_or(if bytes_per_sec < Self::SLOW_BYTES_PER_SEC { 4 } else { 12 });
        let wanted = (bytes_per_sec * Self::HORIZON.as_secs_f64()) as u64;
        wanted.min(Self::MOST_BYTES).max(u64::from(floor.max(1)) * packet_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_low_mark_is_a_millisecond_and_a_few_packets_at_least() {
        let rtt = Duration::from_millis(100);
        let mark = |window| Binding::default().low_mark(window, rtt, 1_350);
        // 5 Mbit/s: four packets. 20 Mbit/s: twelve. 1.25 times 400 Mbit/s: a millisecond. More than any: the bound.
        assert_eq!(mark(62_500), 4 * 1_350);
        assert_eq!(mark(250_000), 12 * 1_350);
        assert_eq!(mark(5_000_000), 62_500);
        assert_eq!(mark(u32::MAX), Binding::MOST_BYTES.min(53_687_091));
        let fixed = Binding::Late { floor_packets: Some(2) };
        assert_eq!(fixed.low_mark(62_500, rtt, 1_350), 2 * 1_350);
        assert_eq!(Binding::Early.low_mark(62_500, rtt, 1_350), u64::MAX);
    }
}
