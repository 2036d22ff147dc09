//! Limits on packets about which nothing is known.

use std::time::Duration;

use crate::intf::{RawLimit, RawLimits};

/// A rate limit by GCRA (ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The interval between packets in the long run.
    pub interval: Duration,
    /// How many packets pass at once after a pause, in addition to the first.
    pub burst: u32,
}

impl RateLimit {
    /// A limit of `packets` per second, at least one, with a burst.
    #[must_use]
    pub const fn per_second(packets: u32, burst: u32) -> Self {
        let packets = if packets == 0 { 1 } else { packets };
        Self { interval: Duration::from_nanos(1_000_000_000 / packets as u64), burst }
    }
}

/// The limits on packets about which nothing, or little, is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardLimits {
    /// Packets that begin a connection, from one /24 (IPv4) or /56 (IPv6); and as many from one IPv4 address or /64
    /// that shows an address token, or from which a handshake was completed.
    pub prefix: RateLimit,
    /// The same from all sources, for each lane: strangers, packets with a token, packets under an ID of ours, and
    /// packets from known addresses.
    pub total: RateLimit,
    /// Packets that begin a connection under one ID of ours.
    pub id: RateLimit,
    /// Packets for connections that may have been forgotten.
    pub resets: RateLimit,
    /// Fragments to the addresses of listeners.
    pub fragments: RateLimit,
}

impl Default for GuardLimits {
    /// A handshake costs some milliseconds of a core: hence 100 packets per second from one prefix, 2,000 in all, and
    /// 100 that may be answered with a reset. A client needs two or three under an ID of ours, and a few more if
    /// packets are lost.
    fn default() -> Self {
        Self {
            prefix: RateLimit::per_second(100, 100),
            total: RateLimit::per_second(2_000, 1_000),
            id: RateLimit::per_second(1, 15),
            resets: RateLimit::per_second(100, 100),
            fragments: RateLimit::per_second(1_000, 1_000),
        }
    }
}

impl From<RateLimit> for RawLimit {
    fn from(limit: RateLimit) -> Self {
        // Bounded so that the sum of a clock and a limit never wraps: the clock counts from the start of the machine.
        const LONGEST_NS: u64 = 1 << 62;
        let interval_ns = u64::try_from(limit.interval.as_nanos()).unwrap_or(LONGEST_NS).min(LONGEST_NS);
        Self { interval_ns, burst_ns: interval_ns.saturating_mul(limit.burst.into()).min(LONGEST_NS) }
    }
}

impl From<GuardLimits> for RawLimits {
    fn from(limits: GuardLimits) -> Self {
        let GuardLimits { prefix, total, id, resets, fragments } = limits;
        Self {
            prefix: prefix.into(),
            total: total.into(),
            id: id.into(),
            resets: resets.into(),
            fragments: fragments.into(),
        }
    }
}
