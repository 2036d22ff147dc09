//! Whether a stream that was placed earlier should move to another path. A path carries nothing at first if it comes back, or if its
//! connection is made after the others.
//!
//! A move costs a request and a round trip, and estimates vary. So a move has to gain more than a placement, which costs nothing.

use super::{CandidatePath, Placement, StreamProfile, estimate, fair_ns, place, rtt_ns};

/// How much earlier the stream has to end, in nanoseconds.
const LEAST_GAIN_NS: f64 = 20e6;

/// How much earlier it has to end, as a share of the time that it takes on its current path.
const LEAST_SHARE: f64 = 0.25;

/// Returns the path that a stream should move to from its `present` one: the path that [`place`] would choose for it now, if that gains
/// enough. The streams of the current path may include this one.
///
/// Under `lowest-rtt`, a stream gains by a shorter round trip, so a full window keeps streams away but makes none leave. `sa-ecf` chooses a
/// path with a longer round trip if the window of the fastest path is full; there, the stream gains by its earlier end. Round-robin
/// compares no paths, so under it nothing moves.
#[must_use]
pub fn better(placement: Placement, request: &StreamProfile, paths: &[CandidatePath], present: usize) -> Option<usize> {
    // A stream that has begun is neither copied nor divided.
    let request = &StreamProfile { is_idempotent: false, is_divisible: false, ..*request };
    let mut paths = paths.to_vec();
    leave(paths.get_mut(present)?, request);
    let best = place(placement, request, &paths, 0)?.path();
    let (from, to) = (paths.get(present)?, paths.get(best)?);
    let time: &dyn Fn(&CandidatePath) -> f64 = match placement {
        Placement::Paced | Placement::Redundant => &|path| estimate::request_ns(path, request, request.bytes),
        Placement::FStream => &|path| estimate::fstream_ns(path, request.bytes, request.weight) + path.cost_ns as f64,
        Placement::SaEcf if rtt_ns(to) > rtt_ns(from) => &|path| fair_ns(path, request),
        Placement::LowestRtt | Placement::SaEcf => &rtt_ns,
        Placement::RoundRobin => return None,
    };
    let now = time(from);
    (best != present && time(to) + LEAST_GAIN_NS.max(LEAST_SHARE * now) < now).then_some(best)
}

/// Removes the stream itself from its path: of the streams of its kind there, the one whose size is nearest to its own. A stream that has
/// nothing to send is not there.
fn leave(path: &mut CandidatePath, request: &StreamProfile) {
    if request.bytes == 0 {
        return;
    }
    let alike = path.placed.iter().enumerate().filter(|(_, it)| **it == request.part(it.bytes));
    if let Some((own, _)) = alike.min_by_key(|(_, it)| it.bytes.abs_diff(request.bytes)) {
        path.placed.swap_remove(own);
    }
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
    fn a_full_window_keeps_streams_away_and_only_an_earlier_end_makes_them_leave_it() {
        use Placement::{LowestRtt, Paced, SaEcf};
        let moves = |placement, paths: &[CandidatePath]| better(placement, &REQUEST, paths, 1);
        // Two windows of streams are before the better path, whose round trip is shorter.
        let [full, far] = [path(20, 0, 20), path(400, 0, 1)];
        assert!(!full.has_window() && far.has_window());
        assert_eq!(
            [LowestRtt, SaEcf, Paced].map(|placement| moves(placement, &[full.clone(), far.clone()])),
            [None; 3]
        );
        let short = path(20, 0, 1);
        assert!(!short.has_window());
        let paths = [short, far];
        assert_eq!(moves(LowestRtt, &paths), None);
        assert_eq!(moves(SaEcf, &paths), Some(0), "it ends there earlier, though it has to wait");
        let both = [path(20, 0, 20), path(400, 0, 50)];
        assert_eq!(moves(LowestRtt, &both), Some(0), "no path has room");
        let leaving = [path(60, 0, 0), path(20, 0, 20)];
        assert_eq!([LowestRtt, SaEcf, Paced].map(|placement| moves(placement, &leaving)), [None, Some(0), Some(0)]);
    }

    #[test]
    fn a_stream_that_leaves_takes_its_own_bytes_with_it() {
        let mut present = path(20, 200, 0);
        present.placed = [1_000_000, 90_000, 5_000].map(|bytes| Placed::by_weight(bytes, 1)).into();
        leave(&mut present, &REQUEST);
        assert_eq!(present.placed.iter().map(|it| it.bytes).sum::<u64>(), 1_005_000);
        let other = StreamProfile { weight: 2, ..REQUEST };
        leave(&mut present, &other);
        leave(&mut present, &StreamProfile { bytes: 0, ..REQUEST });
        assert_eq!(present.placed.len(), 2, "none of them is of its kind, or has nothing to send");
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
