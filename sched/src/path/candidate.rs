//! A path that a stream may take: its round trip, its rate, its window, and the streams that it already carries.

use super::stream::Placed;

/// The known properties of a path, in the direction of most bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CandidatePath {
    /// The smoothed round trip (RFC 9002 §5.3), in nanoseconds.
    pub smoothed_rtt_ns: u64,
    /// The shortest round trip, in nanoseconds; 0 if it is not known.
    pub min_rtt_ns: u64,
    /// How fast it delivers, in bytes per second; 0 counts as 1.
    pub bytes_per_sec: u64,
    /// Bytes ahead of every placed stream: in flight, or of no stream in `placed`.
    pub backlog_bytes: u64,
    /// How many bytes the sender may have in flight there: its congestion window. A path that carries more than that in a
    /// round trip idles for the rest of it, until slow start has doubled the window often enough. 0 means unknown, and
    /// counts as large enough.
    pub window_bytes: u64,
    /// How long it takes until a stream can begin there: the one-way time of the request, if the placing end requests and
    /// the other end sends. FStream's equations do not count this time, because FStream's placing end sends.
    pub lead_ns: u64,
    /// The streams on it that have not yet ended.
    pub placed: Vec<Placed>,
    /// The time that a stream must gain, in nanoseconds, before it takes this path rather than one that costs nothing.
    pub cost_ns: u64,
}

impl CandidatePath {
    /// Returns the round trip of the path without queues, in nanoseconds: the shortest one, or the smoothed one if the
    /// shortest is unknown.
    #[must_use]
    pub const fn shortest_rtt_ns(&self) -> u64 {
        if self.min_rtt_ns > 0 { self.min_rtt_ns } else { self.smoothed_rtt_ns }
    }

    /// Whether its window has room: the bytes waiting and in flight are fewer than it delivers in a smoothed round trip,
    /// which is the window that a sender needs to use it fully.
    #[must_use]
    pub fn has_window(&self) -> bool {
        let window = u128::from(self.bytes_per_sec) * u128::from(self.smoothed_rtt_ns) / NS_PER_SEC;
        let waiting = self.placed.iter().map(|placed| u128::from(placed.bytes)).sum::<u128>();
        // One packet always fits.
        waiting + u128::from(self.backlog_bytes) < window.max(PACKET_BYTES)
    }
}

/// The smallest window, so that one packet always fits.
const PACKET_BYTES: u128 = 1_200;

const NS_PER_SEC: u128 = 1_000_000_000;
