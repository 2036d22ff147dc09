use proptest::prelude::*;

use super::{
    estimate::{fair_ns, finish_ns, fstream_ns},
    precedence::Precedence,
    split::{LEAST_BYTES, split},
    *,
};
use crate::stream::{Discipline, DisciplineClock, Level, Low, Service, Streams};

const MS: u64 = 1_000_000;
const MBIT: u64 = 125_000;

/// The two streams of the paper.
const A: StreamProfile = StreamProfile {
    bytes: 26_000,
    weight: 255,
    precedence: Precedence::SHARED,
    is_urgent: true,
    is_idempotent: true,
    is_divisible: false,
};
const B: StreamProfile = StreamProfile {
    bytes: 900_000,
    weight: 8,
    precedence: Precedence::SHARED,
    is_urgent: false,
    is_idempotent: true,
    is_divisible: false,
};

fn path(mbit: u64, rtt_ms: u64) -> CandidatePath {
    let rtt_ns = rtt_ms * MS;
    CandidatePath {
        smoothed_rtt_ns: rtt_ns,
        min_rtt_ns: rtt_ns,
        bytes_per_sec: mbit * MBIT,
        ..CandidatePath::default()
    }
}

fn of(level: Level) -> Precedence {
    Precedence { level, ..Precedence::SHARED }
}

fn placed(placement: Placement, second: CandidatePath) -> [usize; 2] {
    let choices = place_all(placement, &[A, B], &mut [path(1, 1), second], 0);
    [choices[0].path(), choices[1].path()]
}

fn arbitrary_paths() -> impl Strategy<Value = Vec<CandidatePath>> {
    let placed = (0..10_000_000_u64, 0..256_u32).prop_map(|(bytes, weight)| Placed::by_weight(bytes, weight));
    let path = (1..400 * MS, 1..200 * MBIT, 0..1_000_000_u64, prop::collection::vec(placed, 0..4)).prop_map(
        |(smoothed_rtt_ns, bytes_per_sec, backlog_bytes, placed)| CandidatePath {
            smoothed_rtt_ns,
            min_rtt_ns: smoothed_rtt_ns,
            bytes_per_sec,
            backlog_bytes,
            window_bytes: 0,
            lead_ns: smoothed_rtt_ns / 2,
            placed,
            cost_ns: 0,
        },
    );
    prop::collection::vec(path, 1..5)
}

fn arbitrary_request() -> impl Strategy<Value = StreamProfile> {
    (1..20_000_000_u64, 1..256_u32, any::<[bool; 3]>()).prop_map(
        |(bytes, weight, [is_urgent, is_idempotent, is_divisible])| StreamProfile {
            bytes,
            weight,
            precedence: Precedence::SHARED,
            is_urgent,
            is_idempotent,
            is_divisible,
        },
    )
}

#[test]
fn equations_1_and_2_give_the_papers_numbers() {
    let mut shared = path(1, 1);
    assert!((fstream_ns(&shared, A.bytes, A.weight) / 1e6 - 208.5).abs() < 0.01);
    assert!((fstream_ns(&shared, B.bytes, B.weight) / 1e6 - 7_200.5).abs() < 0.01);
    shared.placed.push(B.part(B.bytes));
    assert!((fstream_ns(&shared, A.bytes, A.weight) / 1e6 - 215.03).abs() < 0.01, "263 / 255 of 208 ms, and 0.5");
}

#[test]
fn fstream_leaves_b_on_the_slow_path_until_the_other_is_33_times_as_fast() {
    assert_eq!(placed(Placement::FStream, path(30, 1)), [1, 0]);
    assert_eq!(placed(Placement::FStream, path(33, 1)), [1, 1]);
}

#[test]
fn the_high_level_does_not_wait_for_the_low_one_which_waits_for_all_of_it() {
    // At 1 Mbit/s, 125 kB take a second.
    let mut busy = path(1, 0);
    busy.placed.push(Placed::by_weight(125_000, 255));
    let end_s =
        |path: &CandidatePath, level| finish_ns(path, Placed { bytes: 12_500, weight: 1, precedence: of(level) }) / 1e9;
    assert!((end_s(&busy, Level::High) - 0.1).abs() < 1e-9);
    assert!((end_s(&busy, Level::Low) - 1.1).abs() < 1e-9, "it has 1 of 256 parts");
    busy.placed.push(Placed { bytes: 25_000, weight: 1, precedence: of(Level::High) });
    assert!((end_s(&busy, Level::High) - 0.2).abs() < 1e-9, "equals share, until it has ended");
    assert!((end_s(&busy, Level::Low) - 1.3).abs() < 1e-9);
    busy.backlog_bytes = 12_500;
    assert!((end_s(&busy, Level::High) - 0.3).abs() < 1e-9, "packets in flight are not overtaken");
}

#[test]
fn levels_decide_which_path_is_free_for_a_stream() {
    let stream = |level, bytes| StreamProfile { bytes, precedence: of(level), is_divisible: false, ..B };
    let (high, low) = (stream(Level::High, 100_000), stream(Level::Low, 100_000));
    let at = |placement, request: &StreamProfile, paths: &[CandidatePath]| {
        place(placement, request, paths, 0).unwrap().path()
    };
    // The fast path carries much of the low level.
    let mut paths = [path(4, 10), path(2, 10)];
    paths[0].placed.push(Placed::by_weight(10_000_000, 80));
    for placement in [Placement::Paced, Placement::Redundant] {
        assert_eq!([at(placement, &high, &paths), at(placement, &low, &paths)], [0, 1]);
    }
    // On the high level, it delays both.
    paths[0].placed[0].precedence = of(Level::High);
    assert_eq!([at(Placement::Paced, &high, &paths), at(Placement::Paced, &low, &paths)], [1, 1]);
}

/// A stream of this urgency, by RFC 9218: `u=0` has the highest priority.
fn urgent(urgency: u8, is_incremental: bool) -> Precedence {
    Precedence { level: Level::Low, priority: 7 - urgency, is_incremental }
}

#[test]
fn a_stream_waits_for_more_urgent_ones_and_for_those_that_do_not_share_and_shares_with_the_rest() {
    // At 1 Mbit/s, 125 kB take a second.
    let end_s = |placed: &[Precedence], precedence| {
        let mut path = path(1, 0);
        path.placed = placed.iter().map(|it| Placed { bytes: 125_000, weight: 1, precedence: *it }).collect();
        let own = Placed { bytes: 12_500, weight: 1, precedence };
        (finish_ns(&path, own) / 1e7).round() / 100.0
    };
    let (whole, shared) = (urgent(3, false), urgent(3, true));
    assert_eq!([end_s(&[whole], whole), end_s(&[whole], shared)], [1.1, 1.1], "answers that are sent to their end");
    assert_eq!([end_s(&[shared], whole), end_s(&[shared], shared)], [0.1, 0.2], "answers that share");
    assert_eq!([end_s(&[urgent(2, true)], whole), end_s(&[urgent(2, false)], shared)], [1.1, 1.1], "more urgent ones");
    assert_eq!([end_s(&[urgent(4, true)], whole), end_s(&[urgent(4, false)], shared)], [0.1, 0.1], "less urgent ones");
    assert_eq!(end_s(&[whole, shared, urgent(2, true), urgent(4, false)], shared), 2.2, "each counts on its own");
}

#[test]
fn a_request_avoids_the_path_of_an_answer_that_does_not_share_and_joins_one_that_does() {
    let chosen = |earlier, request| {
        let mut paths = [path(3, 10), path(1, 10)];
        paths[0].placed.push(Placed { bytes: 1_000_000, weight: 1, precedence: earlier });
        let request = StreamProfile { bytes: 100_000, weight: 1, precedence: request, ..B };
        place(Placement::Paced, &request, &paths, 0).unwrap().path()
    };
    let (whole, shared) = (urgent(3, false), urgent(3, true));
    assert_eq!([chosen(whole, whole), chosen(whole, shared)], [1, 1]);
    assert_eq!([chosen(shared, whole), chosen(shared, shared)], [0, 0]);
    // So do its ranges: all of it on the path where it need not wait.
    let ranges = |earlier| {
        let mut paths = [path(1, 10), path(1, 10)];
        paths[0].placed.push(Placed { bytes: 800_000, weight: 1, precedence: earlier });
        let request = StreamProfile { bytes: 400_000, weight: 1, precedence: shared, is_divisible: true, ..B };
        split(&request, &paths).iter().map(|range| (range.path, range.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(ranges(whole), [(1, 400_000)]);
    // 133 KB beside as many of the other stream, while the other path carries 267 KB.
    assert_eq!(
        ranges(shared).iter().map(|(path, bytes)| (*path, bytes / 1_000)).collect::<Vec<_>>(),
        [(0, 133), (1, 266)]
    );
}

#[test]
fn requests_that_are_sent_first_choose_first() {
    let stream = |weight, precedence| StreamProfile { weight, precedence, ..B };
    let requests = [
        stream(9, urgent(3, true)),
        stream(1, urgent(3, false)),
        stream(1, urgent(2, true)),
        stream(1, Precedence { level: Level::High, ..urgent(7, true) }),
    ];
    let in_order = |placement| {
        let mut paths = [path(1, 1)];
        let choices = place_all(placement, &requests, &mut paths, 0);
        assert_eq!(choices.len(), requests.len());
        let placed = &paths[0].placed;
        let of = |it: &Placed| requests.iter().position(|of| (of.weight, of.precedence) == (it.weight, it.precedence));
        placed.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(in_order(Placement::Paced), [3, 2, 1, 0]);
    assert_eq!(in_order(Placement::FStream), [0, 1, 2, 3], "by weight alone");
}

/// Returns the turns of two streams with five turns each. The second begins when the first has had one.
fn turns(discipline: Discipline, [earlier, later]: [Service; 2]) -> Vec<u32> {
    let (mut streams, mut clock) = (Streams::new(), DisciplineClock::new(discipline, 1));
    let mut left = [5; 2];
    for (stream, service) in [earlier, later].into_iter().enumerate() {
        streams.insert(&mut clock, stream as u32, service);
    }
    streams.wake(&mut clock, 0);
    let mut turns = Vec::new();
    while let Some((stream, _)) = streams.turn() {
        left[stream as usize] -= 1;
        turns.push(stream);
        if turns.len() == 1 {
            streams.wake(&mut clock, 1);
        }
        streams.end_turn(&mut clock, stream, 1_000, left[stream as usize] > 0);
    }
    turns
}

#[test]
fn paced_counts_that_a_has_ended_long_before_b() {
    assert_eq!(placed(Placement::Paced, path(1, 1)), [0, 1], "A takes the first of two equal paths, B the free one");
    assert_eq!(placed(Placement::Paced, path(2, 1)), [1, 1], "both on 2 Mbit/s take 3.7 s, B on 1 Mbit/s 7.2");
}

#[test]
fn a_stream_with_less_weight_chooses_later_however_early_it_came() {
    let choices = place_all(Placement::FStream, &[B, A], &mut [path(1, 1), path(1, 1)], 0);
    assert_eq!(choices, [PathChoice::One(1), PathChoice::One(0)]);
}

#[test]
fn the_lowest_rtt_is_chosen_while_its_window_has_room() {
    let mut paths = [path(10, 100), path(10, 10)];
    let place = |paths: &[CandidatePath]| place(Placement::LowestRtt, &B, paths, 0).map(|choice| choice.path());
    assert_eq!(place(&paths), Some(1));
    paths[1].backlog_bytes = 12_500;
    assert_eq!(place(&paths), Some(0), "10 ms at 10 Mbit/s are in flight");
    paths[0].backlog_bytes = 125_000;
    assert_eq!(place(&paths), Some(1), "none has room");
}

#[test]
fn sa_ecf_waits_for_the_fast_path_where_that_ends_earlier() {
    let place = |slow_mbit| {
        let mut paths = [path(10, 10), path(slow_mbit, 100)];
        paths[0].backlog_bytes = 20_000;
        super::place(Placement::SaEcf, &B, &paths, 0).map(|choice| choice.path())
    };
    assert_eq!(place(1), Some(0));
    assert_eq!(place(100), Some(1));
}

#[test]
fn round_robin_goes_by_the_count_alone() {
    let paths = [path(1, 1), path(100, 1), path(1, 400)];
    let chosen = (0..5).map(|turn| place(Placement::RoundRobin, &A, &paths, turn).map(|choice| choice.path()));
    assert_eq!(chosen.collect::<Vec<_>>(), [Some(0), Some(1), Some(2), Some(0), Some(1)]);
}

#[test]
fn only_small_urgent_requests_that_may_arrive_twice_are_copied() {
    let paths = [path(1, 400), path(1, 20), path(1, 10)];
    let small = StreamProfile { bytes: 1_000, ..A };
    let place = |request| place(Placement::Redundant, &request, &paths, 0);
    assert_eq!(place(small), Some(PathChoice::Copies([2, 1])));
    assert_eq!(place(A), Some(PathChoice::One(2)), "it is too large");
    assert_eq!(place(StreamProfile { is_urgent: false, ..small }), Some(PathChoice::One(2)));
    assert_eq!(place(StreamProfile { is_idempotent: false, ..small }), Some(PathChoice::One(2)));
    assert_eq!(
        super::place(Placement::Redundant, &small, &paths[..1], 0),
        Some(PathChoice::One(0)),
        "there is one path"
    );
}

#[test]
fn ranges_use_both_paths_where_one_stream_could_not() {
    let request = StreamProfile { is_divisible: true, ..B };
    let choice = place(Placement::Paced, &request, &[path(1, 1), path(1, 1)], 0);
    let Some(PathChoice::Ranges(ranges)) = choice else { panic!("{choice:?}") };
    assert!(ranges.iter().all(|range| range.bytes == 450_000), "{ranges:?}");
    assert_eq!(place(Placement::Paced, &request, &[path(100, 1), path(1, 400)], 0), Some(PathChoice::One(0)));
    let choice = place(Placement::Paced, &request, &[path(10, 1), path(1, 1)], 0);
    assert!(matches!(choice, Some(PathChoice::Ranges(_))), "it ends an eleventh earlier: {choice:?}");
    assert!(split(&request, &[path(20, 1), path(1, 1)]).len() == 2, "it would end a 21st earlier");
    assert_eq!(place(Placement::Paced, &request, &[path(20, 1), path(1, 1)], 0), Some(PathChoice::One(0)));
}

#[test]
fn a_window_that_has_to_grow_is_counted() {
    // 10 Mbit/s and 20 ms beside 50 Mbit/s and 100 ms, on which 150 KB take three windows, of 42, 84 and 24 KB.
    let far = CandidatePath { window_bytes: 42_000, lead_ns: 50 * MS, ..path(50, 100) };
    let near = CandidatePath { window_bytes: 42_000, lead_ns: 10 * MS, ..path(10, 20) };
    let script = StreamProfile { bytes: 150_000, ..A };
    assert!((finish_ns(&near, Placed::by_weight(script.bytes, 1)) / 1e6 - 140.0).abs() < 0.01);
    assert!((finish_ns(&far, Placed::by_weight(script.bytes, 1)) / 1e6 - (124.0 + 93.28 + 86.56)).abs() < 0.01);
    assert_eq!(place(Placement::Paced, &script, &[near.clone(), far.clone()], 0), Some(PathChoice::One(0)));
    // With a window that fills it, or an unknown window, the faster path is the better one.
    for window_bytes in [625_000, 0] {
        let grown = CandidatePath { window_bytes, ..far.clone() };
        assert_eq!(place(Placement::Paced, &script, &[near.clone(), grown], 0), Some(PathChoice::One(1)));
    }
    // A queue before the path lengthens its round trips but does not make it idle.
    let queued = CandidatePath { smoothed_rtt_ns: 900 * MS, window_bytes: 625_000, ..far };
    assert!((finish_ns(&queued, Placed::by_weight(3_000_000, 1)) / 1e6 - (50.0 + 480.0 + 450.0)).abs() < 0.01);
}

#[test]
fn a_costly_path_is_taken_only_for_what_it_gains() {
    let costly = |mbit| CandidatePath { cost_ns: 1_000 * MS, ..path(mbit, 1) };
    for (placement, request) in [(Placement::Paced, A), (Placement::FStream, A)] {
        assert_eq!(place(placement, &request, &[path(1, 1), costly(100)], 0), Some(PathChoice::One(0)));
        assert_eq!(place(placement, &B, &[path(1, 1), costly(100)], 0), Some(PathChoice::One(1)));
    }
    assert_eq!(place(Placement::LowestRtt, &A, &[path(1, 900), costly(100)], 0), Some(PathChoice::One(0)));
}

#[test]
fn without_paths_there_is_no_choice() {
    assert!(Placement::ALL.iter().all(|placement| place(*placement, &A, &[], 3).is_none()));
    assert!(place_all(Placement::Paced, &[A], &mut [], 0).is_empty());
}

#[test]
fn names_differ() {
    let names: std::collections::BTreeSet<_> = Placement::ALL.iter().map(|placement| placement.name()).collect();
    assert_eq!(names.len(), Placement::ALL.len());
}

/// When streams that share a rate by weight end, in nanoseconds: computed step by step, from one end to the
/// next.
fn shared_ends(path: &CandidatePath, streams: &[Placed]) -> Vec<f64> {
    let rate = path.bytes_per_sec as f64 / 1e9;
    let mut left: Vec<_> = streams.iter().map(|stream| stream.bytes as f64).collect();
    let mut ends = vec![None; streams.len()];
    let mut now = path.lead_ns as f64 + path.backlog_bytes as f64 / rate;
    while ends.iter().any(Option::is_none) {
        let open: Vec<_> = (0..streams.len()).filter(|at| ends[*at].is_none()).collect();
        let weight = |at: usize| f64::from(streams[at].weight.max(1));
        let sum: f64 = open.iter().map(|at| weight(*at)).sum();
        let time = |at: usize| left[at] * sum / (weight(at) * rate);
        let next = *open.iter().min_by(|a, b| time(**a).total_cmp(&time(**b))).unwrap();
        let step = time(next);
        open.iter().for_each(|at| left[*at] -= weight(*at) / sum * rate * step);
        now += step;
        ends[next] = Some(now);
    }
    ends.into_iter().flatten().collect()
}

proptest! {
    #[test]
    fn the_precedence_of_two_streams_is_the_order_in_which_their_discipline_sends_them(
        discipline in prop::sample::select(vec![
            Discipline::Rr, Discipline::Fcfs, Discipline::Abs, Discipline::Wfq, Discipline::Ml { low: Low::Rr },
            Discipline::Ml { low: Low::Fcfs }, Discipline::Ml { low: Low::Wfq },
        ]),
        services in prop::array::uniform2((any::<bool>(), 0..3_u8, any::<bool>())),
    ) {
        let services = services.map(|(is_high, priority, incremental)| {
            let level = if is_high { Level::High } else { Level::Low };
            Service { level, priority, incremental, ..Service::default() }
        });
        let has_deadlines = matches!(discipline, Discipline::Ml { .. }) && services.iter().all(|it| it.level == Level::High);
        // Deadlines are unknown to placements.
        prop_assume!(!has_deadlines);
        let [earlier, later] = services.map(|Service { level, priority, incremental, .. }| {
            Precedence { level, priority, is_incremental: incremental }.under(discipline)
        });
        let sent = turns(discipline, services);
        let expected = match earlier.before(&later) {
            precedence::EarlierStream::GoesFirst => [0, 0, 0, 0, 0, 1, 1, 1, 1, 1].as_slice(),
            precedence::EarlierStream::Waits => &[0, 1, 1, 1, 1, 1, 0, 0, 0, 0],
            precedence::EarlierStream::Shares => &[0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
        };
        // Of two that share, either may go first.
        let swapped: Vec<_> = sent.chunks(2).flat_map(|pair| pair.iter().rev().copied()).collect();
        prop_assert!(sent == expected || swapped == expected, "{sent:?} instead of {expected:?}");
    }

    #[test]
    fn a_finish_is_that_of_streams_that_share_by_weight(paths in arbitrary_paths(), request in arbitrary_request()) {
        for path in &paths {
            let mut streams = path.placed.clone();
            streams.push(Placed::by_weight(request.bytes, request.weight));
            let ends = shared_ends(path, &streams);
            let expected = ends.last().unwrap() + path.smoothed_rtt_ns as f64 / 2.0;
            let finish = finish_ns(path, request.part(request.bytes));
            prop_assert!((finish / expected - 1.0).abs() < 1e-6, "{finish} instead of {expected}");
        }
    }

    #[test]
    fn a_smaller_window_and_more_bytes_are_never_earlier(
        paths in arbitrary_paths(), request in arbitrary_request(), windows in [1..2_000_000_u64, 1..2_000_000_u64],
        more in 0..1_000_000_u64,
    ) {
        for path in &paths {
            let end = |window_bytes: u64, bytes| {
                finish_ns(&CandidatePath { window_bytes, ..path.clone() }, request.part(bytes))
            };
            let [small, large] = [windows[0].min(windows[1]), windows[0].max(windows[1])];
            let known = end(large, request.bytes);
            prop_assert!(known >= end(0, request.bytes) && known <= end(small, request.bytes) * (1.0 + 1e-9));
            prop_assert!(known <= end(large, request.bytes + more) * (1.0 + 1e-9));
        }
    }

    #[test]
    fn fstream_is_as_late_as_streams_that_never_end_make_it(paths in arbitrary_paths(), request in arbitrary_request()) {
        for mut path in paths {
            (path.backlog_bytes, path.lead_ns) = (0, 0);
            let estimated = fstream_ns(&path, request.bytes, request.weight);
            prop_assert!(estimated >= finish_ns(&path, request.part(request.bytes)) * (1.0 - 1e-9));
            path.placed.iter_mut().for_each(|placed| placed.bytes = u64::MAX);
            let endless = finish_ns(&path, request.part(request.bytes));
            prop_assert!((estimated / endless - 1.0).abs() < 1e-9, "{estimated}, {endless}");
        }
    }

    #[test]
    fn equal_weights_are_fair(paths in arbitrary_paths(), bytes in 1..10_000_000_u64) {
        for mut path in paths {
            path.placed.iter_mut().for_each(|placed| placed.weight = 7);
            prop_assert!((fair_ns(&path, bytes) / finish_ns(&path, Placed::by_weight(bytes, 7)) - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn paced_and_fstream_choose_the_least_of_their_estimates(
        mut paths in arbitrary_paths(), costs in prop::collection::vec(0..500 * MS, 5), request in arbitrary_request(),
    ) {
        paths.iter_mut().zip(costs).for_each(|(path, cost_ns)| path.cost_ns = cost_ns);
        let request = StreamProfile { is_divisible: false, ..request };
        for placement in [Placement::Paced, Placement::FStream] {
            let estimate = |path: &CandidatePath| match placement {
                Placement::Paced => finish_ns(path, request.part(request.bytes)),
                _ => fstream_ns(path, request.bytes, request.weight),
            };
            let time = |path: &CandidatePath| estimate(path) + path.cost_ns as f64;
            let chosen = place(placement, &request, &paths, 0).unwrap().path();
            prop_assert!(paths.iter().all(|path| time(&paths[chosen]) <= time(path)));
        }
    }

    #[test]
    fn every_placement_chooses_paths_that_exist(
        paths in arbitrary_paths(), request in arbitrary_request(), turn in any::<u64>(),
    ) {
        for placement in Placement::ALL {
            match place(placement, &request, &paths, turn).unwrap() {
                PathChoice::One(path) => prop_assert!(path < paths.len()),
                PathChoice::Copies([a, b]) => prop_assert!(a != b && a.max(b) < paths.len()),
                PathChoice::Ranges(ranges) => prop_assert!(ranges.iter().all(|range| range.path < paths.len())),
            }
        }
    }

    #[test]
    fn ranges_are_the_whole_request_and_end_together(paths in arbitrary_paths(), request in arbitrary_request()) {
        let ranges = split(&request, &paths);
        let mut offset = 0;
        for range in &ranges {
            prop_assert_eq!(range.offset, offset);
            prop_assert!(ranges.len() == 1 || range.bytes >= LEAST_BYTES);
            offset += range.bytes;
        }
        prop_assert_eq!(offset, request.bytes);
        let end = |range: &split::ByteRange| finish_ns(&paths[range.path], request.part(range.bytes));
        let alone = paths.iter().map(|path| finish_ns(path, request.part(request.bytes))).fold(f64::INFINITY, f64::min);
        let [first, last] = [f64::min, f64::max].map(|of| ranges.iter().map(end).reduce(of).unwrap());
        // A byte more or less, at the slowest rate, on either side.
        let byte = 4.0 * ranges.iter().map(|range| 1e9 / paths[range.path].bytes_per_sec as f64 * 2_000.0).sum::<f64>();
        prop_assert!(last - first <= byte, "{first} to {last}");
        prop_assert!(last <= alone + byte, "{last} is later than {alone} on one path");
    }

    #[test]
    fn extremes_neither_panic_nor_wrap(
        bytes in prop::sample::select(vec![0, 1, u64::MAX]), rate in prop::sample::select(vec![0, 1, u64::MAX]),
        rtt in prop::sample::select(vec![0, u64::MAX]), weight in prop::sample::select(vec![0, u32::MAX]),
    ) {
        let placed = vec![Placed::by_weight(bytes, weight); 2];
        let path = CandidatePath { smoothed_rtt_ns: rtt, min_rtt_ns: 0, bytes_per_sec: rate, backlog_bytes: bytes, window_bytes: bytes, lead_ns: rtt, placed, cost_ns: rtt };
        let request = StreamProfile { bytes, weight, precedence: Precedence::SHARED, is_urgent: true, is_idempotent: true, is_divisible: true };
        for placement in Placement::ALL {
            prop_assert!(place(placement, &request, &[path.clone(), path.clone()], u64::MAX).is_some());
        }
    }
}
