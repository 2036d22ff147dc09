//! Whether a stream that was placed earlier is worth a move to another path: a path that is back, or a connection that is made after
//! others, carries nothing until then.
//!
//! A move costs a request and a round trip, and estimates vary. So a move has to gain more than a placement, which costs nothing.

use super::{CandidatePath, Placement, StreamProfile, estimate, rtt_ns};

/// How much earlier the stream has to end, in nanoseconds.
const LEAST_GAIN_NS: f64 = 20e6;

/// How much earlier it has to end, as a share of the time that it takes on its present path.
const LEAST_SHARE: f64 = 0.25;

/// Returns the path that a stream should move to from its `present` one, if that gains enough. The streams of the present path may include
/// this one. Round-robin compares no paths, so under it nothing moves.
#[must_use]
pub fn better(placement: Placement, request: &StreamProfile, paths: &[CandidatePath], present: usize) -> Option<usize> {
    let time: &dyn Fn(&CandidatePath) -> f64 = match placement {
        Placement::Paced | Placement::Redundant => &|path| estimate::request_ns(path, request, request.bytes),
        Placement::FStream => &|path| estimate::fstream_ns(path, request.bytes, request.weight) + path.cost_ns as f64,
        Placement::LowestRtt | Placement::SaEcf => &rtt_ns,
        Placement::RoundRobin => return None,
    };
    let without_own = without(paths.get(present)?, request);
    let now = time(&without_own);
    let others = paths.iter().enumerate().filter(|(place, _)| *place != present);
    let (best, then) = others.map(|(place, path)| (place, time(path))).min_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (then + LEAST_GAIN_NS.max(LEAST_SHARE * now) < now).then_some(best)
}

/// Returns the path without the stream itself, if a stream of the same kind is on it.
fn without(path: &CandidatePath, request: &StreamProfile) -> CandidatePath {
    let mut path = path.clone();
    let is_alike = |it: &super::Placed| (it.weight, it.precedence) == (request.weight, request.precedence);
    if let Some(own) = path.placed.iter().position(is_alike) {
        path.placed.swap_remove(own);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::{Placed, precedence::Precedence};

    const REQUEST: StreamProfile = StreamProfile {
        bytes: 100_000,
        weight: 1,
        precedence: Precedence::SHARED,
        is_urgent: false,
        is_idempotent: false,
        is_divisible: false,
    };

    fn path(rtt_ms: u64, cost_ms: u64, streams: usize) -> CandidatePath {
        CandidatePath {
            smoothed_rtt_ns: rtt_ms * 1_000_000,
            bytes_per_sec: 1_000_000,
            cost_ns: cost_ms * 1_000_000,
            placed: vec![Placed::by_weight(100_000, 1); streams],
            ..CandidatePath::default()
        }
    }

    #[test]
    fn a_stream_moves_if_the_gain_exceeds_the_cost_of_the_path_and_what_a_move_needs() {
        use Placement::{FStream, LowestRtt, Paced, Redundant, SaEcf};
        for placement in [Paced, Redundant, FStream, LowestRtt, SaEcf] {
            let moves = |paths: &[CandidatePath]| better(placement, &REQUEST, paths, 1);
            assert_eq!(moves(&[path(20, 0, 0), path(20, 200, 1)]), Some(0), "{placement:?}: it costs less");
            assert_eq!(moves(&[path(20, 200, 0), path(20, 0, 1)]), None, "{placement:?}: it costs more");
            assert_eq!(moves(&[path(20, 0, 0), path(20, 0, 1)]), None, "{placement:?}: it would gain nothing");
            assert_eq!(moves(&[path(20, 0, 0), path(30, 0, 1)]), None, "{placement:?}: it would gain little");
            assert_eq!(moves(&[path(20, 0, 0), path(400, 0, 1)]), Some(0), "{placement:?}: it is faster");
            assert_eq!(moves(&[path(20, 0, 0), path(20, 0, 1), path(20, 0, 0)]), None, "{placement:?}");
            assert_eq!(moves(&[path(20, 0, 1)]), None, "{placement:?}: there is no such path");
        }
        assert_eq!(better(Placement::RoundRobin, &REQUEST, &[path(20, 0, 0), path(20, 200, 1)], 1), None);
    }

    #[test]
    fn streams_move_until_the_load_is_about_even_and_not_back() {
        let mut paths = [path(20, 0, 0), path(20, 0, 10)];
        let mut moves = 0;
        while let Some(to) = better(Placement::Paced, &REQUEST, &paths, 1) {
            moves += 1;
            assert!(to == 0 && moves < 10);
            let stream = paths[1].placed.pop().unwrap();
            paths[0].placed.push(stream);
        }
        assert!((3..=5).contains(&moves), "{moves}");
        assert_eq!(better(Placement::Paced, &REQUEST, &paths, 0), None);
    }
}
