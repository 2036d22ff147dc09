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
mod candidate;
pub mod estimate;
pub mod precedence;
pub mod slow;
pub mod split;
mod stream;
#[cfg(test)]
mod tests;

use self::split::ByteRange;
pub use self::{
    candidate::CandidatePath,
    stream::{Placed, StreamProfile},
};

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
