//! Closed forms for streams over ideal paths: no jitter, no loss, windows that only slow start limits.

use plan::paths::PathsPlan;
use sched::path::{CandidatePath, Placed, estimate};

use super::stream::Stream;

/// A stream, or a part of one, on a path.
pub(super) struct Share {
    /// The stream of the plan.
    pub(super) of: usize,
    pub(super) path: usize,
    pub(super) bytes: u64,
    pub(super) weight: u32,
}

/// Returns when streams end that stay on their paths and share them by weight, in milliseconds: generalized processor sharing
/// with the pauses of slow start.
pub(super) fn pinned_ms(paths: &[CandidatePath], shares: &[Share], plan: &PathsPlan) -> Vec<f64> {
    let end = |share: &Share, at: usize| {
        let mut path = paths[share.path].clone();
        let others = shares.iter().enumerate().filter(|(other, it)| *other != at && it.path == share.path);
        path.placed.extend(others.map(|(_, it)| Placed::by_weight(it.bytes, it.weight)));
        estimate::finish_ns(&path, Placed::by_weight(share.bytes, share.weight)) / 1e6
    };
    let ends: Vec<_> = shares.iter().enumerate().map(|(at, share)| (share.of, end(share, at))).collect();
    let of = |stream| ends.iter().filter(|(of, _)| *of == stream).map(|(_, end)| *end).fold(0.0, f64::max);
    (0..plan.streams.len()).map(of).collect()
}

/// Returns when streams end that share all paths as if these were one, with the shortest delay: no packet scheduler is faster.
pub(super) fn pooled_ms(paths: &[CandidatePath], streams: &[Stream], by_priority: bool, plan: &PathsPlan) -> Vec<f64> {
    let all = CandidatePath {
        smoothed_rtt_ns: paths.iter().map(|path| path.smoothed_rtt_ns).min().unwrap_or_default(),
        lead_ns: paths.first().map(|path| path.lead_ns).unwrap_or_default(),
        bytes_per_sec: paths.iter().map(|path| path.bytes_per_sec).sum(),
        ..CandidatePath::default()
    };
    let placed = |stream: &Stream| {
        let weight = if by_priority { stream.weight } else { 1 };
        Placed::by_weight(stream.packets as u64 * plan.links.payload_bytes, weight)
    };
    let end = |at: usize| {
        let mut all = all.clone();
        let others = streams.iter().enumerate().filter(|(other, _)| *other != at);
        all.placed.extend(others.map(|(_, stream)| placed(stream)));
        estimate::finish_ns(&all, placed(&streams[at])) / 1e6
    };
    (0..streams.len()).map(end).collect()
}
