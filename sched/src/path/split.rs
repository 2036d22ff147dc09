//! A large request spread over several paths, by ranges (RFC 9110 §14).

use super::{candidate::CandidatePath, estimate, stream::StreamProfile};

/// The least gain of several paths over one, as a fraction of the time on one path. Estimate errors and losses cost about
/// as much.
///
/// Chosen by simulation, from values between 0 and 0.15 (perf/README.md, "How much ranges have to gain"). Above this value, gains
/// are lost everywhere. Below it, pages take longer over some paths, and so do single streams where rates are known to 30 % only.
pub const LEAST_GAIN: f64 = 0.08;

/// A range of fewer bytes is not worth a request of its own.
pub const LEAST_BYTES: u64 = 32 * 1024;

/// A part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// The index of its path.
    pub path: usize,
    /// Where it begins in the request.
    pub offset: u64,
    /// How long it is, in bytes.
    pub bytes: u64,
}

/// Divides a request so that all parts end at the same time, over all paths that gain from it: a path that would begin only
/// when the others are done gets nothing. Parts of less than [`LEAST_BYTES`] go to other paths. Empty without paths.
#[must_use]
pub fn split(request: &StreamProfile, paths: &[CandidatePath]) -> Vec<ByteRange> {
    let mut used: Vec<usize> = (0..paths.len()).collect();
    loop {
        let parts = parts(request, paths, &used);
        let small = parts.iter().enumerate().filter(|(_, bytes)| **bytes < LEAST_BYTES);
        match small.min_by_key(|(_, bytes)| **bytes) {
            Some((at, _)) if used.len() > 1 => _ = used.remove(at),
            _ => return ranges(&used, &parts),
        }
    }
}

/// Whether the division ends early enough, compared with the request on the best path alone, to be worth it.
#[must_use]
pub fn gains(request: &StreamProfile, paths: &[CandidatePath], ranges: &[ByteRange]) -> bool {
    let end = |path: &CandidatePath, bytes| estimate::request_ns(path, request, bytes);
    let alone = paths.iter().map(|path| end(path, request.bytes)).fold(f64::INFINITY, f64::min);
    let parts = ranges.iter().filter_map(|range| Some(end(paths.get(range.path)?, range.bytes)));
    ranges.len() > 1 && parts.fold(0.0, f64::max) <= (1.0 - LEAST_GAIN) * alone
}

/// How much each path carries if all end at the same time.
fn parts(request: &StreamProfile, paths: &[CandidatePath], used: &[usize]) -> Vec<u64> {
    let used: Vec<&CandidatePath> = used.iter().filter_map(|place| paths.get(*place)).collect();
    // By bisection: more time never carries less.
    let alone = used.iter().map(|path| estimate::request_ns(path, request, request.bytes));
    let (mut early, mut late) = (0.0, alone.fold(f64::INFINITY, f64::min));
    for _ in 0..100 {
        let middle = early + (late - early) / 2.0;
        let carried: f64 = used.iter().map(|path| carried_by(path, request, middle)).sum();
        if carried < request.bytes as f64 { early = middle } else { late = middle }
    }
    let mut parts: Vec<u64> = used.iter().map(|path| carried_by(path, request, late) as u64).collect();
    // The largest part absorbs the rounding error, in either direction.
    let total: u128 = parts.iter().map(|bytes| u128::from(*bytes)).sum();
    if let Some(largest) = parts.iter_mut().max() {
        let whole = (u128::from(*largest) + u128::from(request.bytes)).saturating_sub(total);
        *largest = u64::try_from(whole).unwrap_or(request.bytes);
    }
    parts
}

/// How many bytes of the request, at most all, a path delivers within `time_ns`: the inverse of
/// [`finish_ns`](estimate::finish_ns), by bisection, because streams on the path end meanwhile.
fn carried_by(path: &CandidatePath, request: &StreamProfile, time_ns: f64) -> f64 {
    let fits = |bytes: u64| estimate::request_ns(path, request, bytes) <= time_ns;
    if fits(request.bytes) {
        return request.bytes as f64;
    }
    let (mut fitting, mut over) = (0, request.bytes);
    while over - fitting > 1 {
        let middle = fitting + (over - fitting) / 2;
        if fits(middle) { fitting = middle } else { over = middle }
    }
    fitting as f64
}

fn ranges(used: &[usize], parts: &[u64]) -> Vec<ByteRange> {
    let mut offset = 0;
    let with_offset = used.iter().zip(parts).map(|(path, bytes)| {
        let range = ByteRange { path: *path, offset, bytes: *bytes };
        offset += bytes;
        range
    });
    with_offset.filter(|range| range.bytes > 0).collect()
}
