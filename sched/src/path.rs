//! Over which path a stream goes: placement of whole streams on the paths between two hosts.
//!
//! A path is a connection of its own (a bundle of connections, not multipath QUIC), and a stream stays on the path that it
//! was placed on. [`place`] is a pure function of the request, of the known state of each path, and of a running count. Its
//! estimates are in [`estimate`]; [`slow`] decides when tunnels leave a slow path, and [`back`] whether they go back to a
//! better one; [`split`] divides a request that can be fetched in ranges.
//!
//! `fstream` is the rule of "FStream: Flexible Stream Scheduling and Prioritizing in Multipath-QUIC" (equations 1 and 2).
//! `lowest-rtt` and `sa-ecf` apply the rules of the packet schedulers of these names to whole streams, since a bundle of
//! connections can do no more; packet schedulers of multipath QUIC may do better or worse.

pub mod back;
pub mod estimate;
pub mod precedence;
pub mod slow;
pub mod split;
#[cfg(test)]
mod tests;

use self::{precedence::Precedence, split::ByteRange};

/// How a path is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The path on which the stream is estimated to end first, counting the bytes that streams there still have to send
    /// ([`estimate::finish_ns`]); a large request that can be divided is spread over several paths ([`split::split`]) if
    /// that [gains](split::gains) enough.
    #[default]
    Paced,
    /// The path with the least time by FStream's equations 1 and 2 ([`estimate::fstream_ns`]).
    FStream,
    /// The path with the lowest smoothed RTT that has room in its window; if none has, the path with the lowest RTT.
    LowestRtt,
    /// The path with the lowest RTT, unless its window is full and the stream is estimated to end earlier on the best path
    /// with room ([`estimate::fair_ns`]).
    SaEcf,
    /// Each path in turn.
    RoundRobin,
    /// A copy on each of the two paths with the earliest estimated ends, if the request is urgent, may arrive twice, and
    /// has at most [`COPIED_BYTES`]. Every other request is placed as under `Paced`.
    Redundant,
}

impl Placement {
    /// All placements, the default first.
    pub const ALL: [Self; 6] =
        [Self::Paced, Self::FStream, Self::LowestRtt, Self::SaEcf, Self::RoundRobin, Self::Redundant];

    /// Its name in configurations and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Paced => "paced",
            Self::FStream => "fstream",
            Self::LowestRtt => "lowest-rtt",
            Self::SaEcf => "sa-ecf",
            Self::RoundRobin => "round-robin",
            Self::Redundant => "redundant",
        }
    }
}

/// The largest request, in bytes, that is sent over two paths: a few packets, so that copies cost a path little.
pub const COPIED_BYTES: u64 = 16 * 1024;

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

/// The known properties of a stream on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The bytes that it still has to send.
    pub bytes: u64,
    /// Its weight among the streams with which it shares the path (HTTP/2's priority in FStream); 0 counts as 1.
    pub weight: u32,
    /// Its place in the order of the path, as far as the path's discipline ranks by it ([`Precedence::under`]).
    pub precedence: Precedence,
}

impl Placed {
    /// Returns a stream on a path whose streams share it by weight.
    #[must_use]
    pub const fn by_weight(bytes: u64, weight: u32) -> Self {
        Self { bytes, weight, precedence: Precedence::SHARED }
    }
}

/// A stream to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamProfile {
    /// How many bytes it has to send.
    pub bytes: u64,
    /// Its weight among the streams with which it shares a path; 0 counts as 1.
    pub weight: u32,
    /// Its place in the order of a path, as in [`Placed`].
    pub precedence: Precedence,
    /// Whether its class is urgent.
    pub is_urgent: bool,
    /// Whether it may arrive twice (idempotent, RFC 9110 §9.2.2).
    pub is_idempotent: bool,
    /// Whether it can be fetched in ranges (RFC 9110 §14).
    pub is_divisible: bool,
}

/// Where a request goes. Paths are named by their index in the list given to [`place`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathChoice {
    /// Over one path.
    One(usize),
    /// A copy over each of two paths, the better one first.
    Copies([usize; 2]),
    /// Parts over several paths (at least two), in the order of the paths. Together they make up the whole request.
    Ranges(Vec<ByteRange>),
}

impl PathChoice {
    /// Returns the path of the request, the better path of its copies, or the path of its largest range.
    #[must_use]
    pub fn path(&self) -> usize {
        match self {
            Self::One(path) | Self::Copies([path, _]) => *path,
            Self::Ranges(ranges) => ranges.iter().max_by_key(|range| range.bytes).map_or(0, |range| range.path),
        }
    }
}

impl StreamProfile {
    /// Returns `bytes` of it as a stream on a path.
    #[must_use]
    pub const fn part(&self, bytes: u64) -> Placed {
        Placed { bytes, weight: self.weight, precedence: self.precedence }
    }
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

/// Chooses where a request goes. Returns `None` if there is no path. `turn` counts the requests before this one; only
/// round-robin uses it. Of equal paths the first is chosen.
#[must_use]
pub fn place(placement: Placement, request: &StreamProfile, paths: &[CandidatePath], turn: u64) -> Option<PathChoice> {
    let finish = |path: &CandidatePath| estimate::request_ns(path, request, request.bytes);
    let one = |key: &dyn Fn(&CandidatePath) -> f64| least(paths, key).map(PathChoice::One);
    match placement {
        Placement::FStream => {
            one(&|path| estimate::fstream_ns(path, request.bytes, request.weight) + path.cost_ns as f64)
        }
        Placement::LowestRtt => one(&|path| if path.has_window() { rtt_ns(path) } else { f64::INFINITY })
            .filter(|choice| paths.get(choice.path()).is_some_and(CandidatePath::has_window))
            .or_else(|| one(&rtt_ns)),
        Placement::SaEcf => sa_ecf(request, paths).map(PathChoice::One),
        Placement::RoundRobin => {
            let paths = u64::try_from(paths.len()).ok().filter(|paths| *paths > 0)?;
            usize::try_from(turn % paths).ok().map(PathChoice::One)
        }
        Placement::Redundant if request.is_urgent && request.is_idempotent && request.bytes <= COPIED_BYTES => {
            let best = least(paths, &finish)?;
            let others = paths.iter().enumerate().filter(|(place, _)| *place != best);
            let second = others.min_by(|(_, a), (_, b)| finish(a).total_cmp(&finish(b)));
            Some(second.map_or(PathChoice::One(best), |(second, _)| PathChoice::Copies([best, second])))
        }
        Placement::Paced | Placement::Redundant => {
            let ranges = if request.is_divisible { split::split(request, paths) } else { Vec::new() };
            if split::gains(request, paths, &ranges) { Some(PathChoice::Ranges(ranges)) } else { one(&finish) }
        }
    }
}

/// Places requests that arrive together, and adds each placement to `paths`. The request that a path would send first chooses first;
/// under FStream, the request of the highest weight (PRCP-1). Equal requests choose in their order. Returns the choices in the order of
/// the requests; empty if there are no paths.
#[must_use]
pub fn place_all(
    placement: Placement,
    requests: &[StreamProfile],
    paths: &mut [CandidatePath],
    turn: u64,
) -> Vec<PathChoice> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(choosing_rank(placement, &requests[*at])));
    let mut choices = vec![None; requests.len()];
    for (turn, at) in (turn..).zip(order) {
        let request = &requests[at];
        let Some(choice) = place(placement, request, paths, turn) else { return Vec::new() };
        let mut add = |path: usize, bytes| paths[path].placed.push(request.part(bytes));
        match &choice {
            PathChoice::One(path) => add(*path, request.bytes),
            PathChoice::Copies(copies) => copies.iter().for_each(|path| add(*path, request.bytes)),
            PathChoice::Ranges(ranges) => ranges.iter().for_each(|range| add(range.path, range.bytes)),
        }
        choices[at] = Some(choice);
    }
    choices.into_iter().flatten().collect()
}

/// Ranks requests that arrive together: the highest chooses first.
fn choosing_rank(placement: Placement, request: &StreamProfile) -> (Option<(bool, u8, bool)>, u32) {
    ((placement != Placement::FStream).then(|| request.precedence.rank()), request.weight)
}

fn rtt_ns(path: &CandidatePath) -> f64 {
    path.smoothed_rtt_ns.saturating_add(path.cost_ns) as f64
}

fn least(paths: &[CandidatePath], key: &dyn Fn(&CandidatePath) -> f64) -> Option<usize> {
    let keys = paths.iter().map(key).enumerate();
    keys.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(place, _)| place)
}

fn sa_ecf(request: &StreamProfile, paths: &[CandidatePath]) -> Option<usize> {
    let fastest = least(paths, &rtt_ns)?;
    if paths[fastest].has_window() {
        return Some(fastest);
    }
    let free = paths.iter().enumerate().filter(|(_, path)| path.has_window());
    let Some((free, _)) = free.min_by(|(_, a), (_, b)| rtt_ns(a).total_cmp(&rtt_ns(b))) else { return Some(fastest) };
    Some(if fair_ns(&paths[free], request) < fair_ns(&paths[fastest], request) { free } else { fastest })
}

/// When the request would end with equal shares for all streams, plus the cost of the path.
fn fair_ns(path: &CandidatePath, request: &StreamProfile) -> f64 {
    estimate::fair_ns(path, request.bytes) + path.cost_ns as f64
}
