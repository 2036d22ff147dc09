use proptest::prelude::*;

use super::*;

const EDF: Discipline = Discipline::Edf { expiry: Expiry::Soft };
const EDF_HARD: Discipline = Discipline::Edf { expiry: Expiry::Hard };
const QUANTUM: u64 = 1200;

/// A set of streams with its own clock.
struct Bench {
    clock: DisciplineClock,
    streams: Streams,
}

impl Bench {
    /// Streams 0, 1, … of these services, woken in this order.
    fn new(discipline: Discipline, services: &[Service]) -> Self {
        let mut bench = Self { clock: DisciplineClock::new(discipline, 7), streams: Streams::new() };
        for (stream, service) in (0..).zip(services) {
            bench.insert(stream, *service);
            bench.wake(stream);
        }
        bench
    }

    fn insert(&mut self, stream: u32, service: Service) {
        self.streams.insert(&mut self.clock, stream, service);
    }

    fn remove(&mut self, stream: u32) -> bool {
        self.streams.remove(&mut self.clock, stream)
    }

    fn wake(&mut self, stream: u32) {
        self.streams.wake(&mut self.clock, stream);
    }

    fn set(&mut self, stream: u32, service: Service) {
        self.streams.set(&mut self.clock, stream, service);
    }

    fn next(&self) -> Option<u32> {
        self.streams.turn().map(|(stream, _)| stream)
    }

    fn end_turn(&mut self, stream: u32, bytes: u64, more: bool) {
        self.streams.end_turn(&mut self.clock, stream, bytes, more);
    }

    /// Gives `count` turns of a quantum to streams that never run dry.
    fn turns(&mut self, count: usize) -> Vec<u32> {
        let turn = |_| {
            let stream = self.next().expect("no stream runs dry");
            self.end_turn(stream, QUANTUM, true);
            stream
        };
        (0..count).map(turn).collect()
    }

    /// Serves until no stream has anything left: stream `n` wants `wanted[n]` turns.
    fn serve(&mut self, wanted: &[usize]) -> Vec<u32> {
        let mut left = wanted.to_vec();
        let mut turns = Vec::new();
        while let Some(stream) = self.next() {
            turns.push(stream);
            left[stream as usize] -= 1;
            self.end_turn(stream, QUANTUM, left[stream as usize] > 0);
        }
        turns
    }
}

fn plain() -> Service {
    Service::default()
}

fn deadline(deadline_ns: u64) -> Service {
    Service { deadline_ns: Some(deadline_ns), ..plain() }
}

fn priority(priority: u8) -> Service {
    Service { priority, ..plain() }
}

fn incremental(service: Service) -> Service {
    Service { incremental: true, ..service }
}

fn weight(weight: u16) -> Service {
    Service { weight, ..plain() }
}

fn high(service: Service) -> Service {
    Service { level: Level::High, ..service }
}

#[test]
fn each_discipline_serves_in_its_own_order() {
    let ml = |low| Discipline::Ml { low };
    let levels = [deadline(9_000), high(deadline(8_000)), deadline(1_000), high(deadline(4_000)), high(plain())];
    let table: &[(&str, Discipline, &[Service], &[u32])] = &[
        ("round robin takes turns", Discipline::Rr, &[plain(); 3], &[0, 1, 2, 0, 1, 2]),
        ("the first to come is served to its end", Discipline::Fcfs, &[plain(); 3], &[0, 0, 1, 1, 2, 2]),
        (
            "incremental streams share even then",
            Discipline::Fcfs,
            &[incremental(plain()), incremental(plain())],
            &[0, 1, 0, 1],
        ),
        (
            "the earliest deadline goes first, none goes last",
            EDF,
            &[plain(), deadline(3_000), deadline(1_000), plain(), deadline(2_000)],
            &[2, 2, 4, 4, 1, 1, 0, 0, 3, 3],
        ),
        (
            "the highest priority goes first, equal ones as they came",
            Discipline::Abs,
            &[priority(1), priority(255), priority(0), priority(255)],
            &[1, 1, 3, 3, 0, 0, 2, 2],
        ),
        (
            "incremental streams share with their equals only",
            Discipline::Abs,
            &[incremental(priority(1)), incremental(priority(9)), incremental(priority(9)), priority(0)],
            &[1, 2, 1, 2, 0, 0, 3, 3],
        ),
        ("a high level by deadline, then a low one in turns", ml(Low::Rr), &levels, &[3, 3, 1, 1, 4, 4, 0, 2, 0, 2]),
        ("… or as they came", ml(Low::Fcfs), &levels, &[3, 3, 1, 1, 4, 4, 0, 0, 2, 2]),
        ("… or by deadline", ml(Low::Edf), &levels, &[3, 3, 1, 1, 4, 4, 2, 2, 0, 0]),
        ("… or by weight", ml(Low::Wfq), &levels, &[3, 3, 1, 1, 4, 4, 0, 2, 0, 2]),
    ];
    for (rule, discipline, services, turns) in table {
        assert_eq!(Bench::new(*discipline, services).serve(&vec![2; services.len()]), *turns, "{rule}");
    }
}

#[test]
fn a_stream_that_wakes_again_is_a_new_arrival() {
    for (discipline, expected) in [(Discipline::Fcfs, [1, 0]), (Discipline::Abs, [1, 0]), (EDF, [1, 0])] {
        let mut bench = Bench::new(discipline, &[plain(), plain()]);
        bench.end_turn(0, QUANTUM, false);
        bench.wake(0);
        assert_eq!(bench.serve(&[1, 1]), expected, "{discipline:?}");
    }
}

#[test]
fn waking_a_waiting_stream_does_not_cost_it_its_place() {
    for discipline in [Discipline::Rr, Discipline::Fcfs, EDF, Discipline::Abs, Discipline::Wfq, Discipline::Lottery] {
        let mut bench = Bench::new(discipline, &[plain(), plain()]);
        let turn = bench.streams.turn();
        bench.wake(turn.expect("two streams wait").0);
        assert_eq!((bench.streams.turn(), bench.streams.len()), (turn, 2), "{discipline:?}");
    }
}

#[test]
fn a_stream_removed_during_its_turn_stays_away() {
    let mut bench = Bench::new(Discipline::Rr, &[plain()]);
    assert_eq!(bench.next(), Some(0));
    assert!(bench.remove(0));
    bench.end_turn(0, QUANTUM, true);
    bench.wake(0);
    assert!(bench.streams.is_empty());
    assert_eq!(bench.streams.service(0), None);
    assert!(!bench.remove(0));
}

#[test]
fn a_name_given_to_another_stream_starts_afresh() {
    let mut bench = Bench::new(Discipline::Wfq, &[plain(), plain()]);
    bench.end_turn(0, 1 << 40, false);
    bench.insert(0, weight(2));
    assert!(!bench.streams.contains(0));
    bench.wake(0);
    assert_eq!(bench.turns(3), [1, 0, 0], "its predecessor's bytes are not charged to it");
}

#[test]
fn memory_of_streams_that_are_gone_is_given_back() {
    let mut bench = Bench::new(Discipline::Wfq, &[plain(); 10_000]);
    for stream in 0..9_999 {
        bench.remove(stream);
    }
    assert_eq!(bench.next(), Some(9_999), "the last keeps its place");
    bench.remove(9_999);
    assert!(bench.streams.known.capacity() <= KEPT);
}

#[test]
fn only_hard_expiry_gives_up_a_stream_whose_deadline_has_passed() {
    for (discipline, expired) in [(EDF_HARD, Some(1)), (EDF, None), (Discipline::Ml { low: Low::Edf }, None)] {
        let bench = Bench::new(discipline, &[deadline(2_000), deadline(1_000)]);
        assert_eq!(bench.streams.expired(&bench.clock, 1_000), None, "{discipline:?}");
        assert_eq!(bench.streams.expired(&bench.clock, 1_001), expired, "{discipline:?}");
    }
    let undated = Bench::new(EDF_HARD, &[plain()]);
    assert_eq!(undated.streams.expired(&undated.clock, u64::MAX), None);
}

#[test]
fn a_change_of_service_moves_a_waiting_stream_at_once() {
    let mut edf = Bench::new(EDF, &[deadline(1_000), deadline(2_000)]);
    edf.set(1, deadline(500));
    assert_eq!(edf.serve(&[1, 1]), [1, 0]);

    let mut abs = Bench::new(Discipline::Abs, &[priority(1), priority(5), priority(5)]);
    abs.set(0, priority(5));
    assert_eq!(abs.serve(&[1, 1, 1]), [0, 1, 2], "its arrival still counts");

    let mut ml = Bench::new(Discipline::Ml { low: Low::Wfq }, &[plain(), plain()]);
    ml.set(1, high(plain()));
    assert_eq!(ml.turns(2), [1, 1]);
    ml.set(1, plain());
    assert_eq!(ml.turns(4), [0, 1, 0, 1], "what it had above is not charged below");
}

#[test]
fn a_change_that_does_not_concern_the_discipline_costs_no_place() {
    let mut bench = Bench::new(Discipline::Rr, &[plain(), plain()]);
    bench.set(0, high(deadline(1)));
    assert_eq!(bench.serve(&[1, 1]), [0, 1]);
}

#[test]
fn a_changed_weight_counts_from_the_next_turn() {
    let mut bench = Bench::new(Discipline::Wfq, &[weight(1), weight(1)]);
    bench.turns(100);
    bench.set(0, weight(3));
    let turns = bench.turns(400);
    assert!((299..=301).contains(&turns.iter().filter(|stream| **stream == 0).count()));
}

#[test]
fn a_stream_that_slept_is_owed_nothing() {
    let mut bench = Bench::new(Discipline::Wfq, &[plain(), plain()]);
    bench.end_turn(1, QUANTUM, false);
    bench.turns(1_000);
    bench.wake(1);
    assert_eq!(bench.turns(5), [1, 0, 1, 0, 1]);
}

#[test]
fn a_debt_ends_when_no_stream_waits_in_any_set() {
    // A turn of the first stream lasts as long as a thousand turns of the second.
    let services = [weight(1), weight(1_000)];
    for (other_waits, expected) in [(false, [0, 1]), (true, [1, 1])] {
        let mut bench = Bench::new(Discipline::Wfq, &services);
        bench.streams.sleep(&mut bench.clock, 1);
        let mut other = Streams::new();
        other.insert(&mut bench.clock, 0, plain());
        other.wake(&mut bench.clock, 0);
        if !other_waits {
            other.remove(&mut bench.clock, 0);
        }
        bench.end_turn(0, QUANTUM, false);
        bench.wake(0);
        bench.wake(1);
        assert_eq!(bench.turns(2), expected, "another set waits: {other_waits}");
    }
}

#[test]
fn a_stream_that_begins_to_share_begins_where_an_earlier_time_of_sharing_ended() {
    let mut ml = Bench::new(Discipline::Ml { low: Low::Wfq }, &[plain(), high(weight(1_000))]);
    ml.end_turn(0, QUANTUM, false);
    ml.end_turn(1, QUANTUM, true);
    ml.set(1, weight(1_000));
    ml.wake(0);
    assert_eq!(ml.turns(2), [1, 0], "both begin at the end of the first turn");
}

#[test]
fn ranks_order_two_sets_on_one_clock() {
    let mut clock = DisciplineClock::new(Discipline::Fcfs, 0);
    let (mut a, mut b) = (Streams::new(), Streams::new());
    for streams in [&mut a, &mut b] {
        streams.insert(&mut clock, 0, plain());
        streams.wake(&mut clock, 0);
    }
    let rank = |streams: &Streams| streams.turn().map(|(_, rank)| rank);
    assert!(rank(&a) < rank(&b));
}

#[test]
fn extreme_bytes_and_weights_neither_overflow_nor_starve() {
    for discipline in [Discipline::Wfq, Discipline::Lottery] {
        let mut bench = Bench::new(discipline, &[weight(0), weight(u16::MAX), weight(1)]);
        for _ in 0..10 {
            let stream = bench.next().expect("all wait");
            bench.end_turn(stream, u64::MAX, true);
        }
        assert_eq!(bench.streams.len(), 3);
    }
    let mut ended = Bench::new(Discipline::Wfq, &[weight(1), weight(1)]);
    for stream in [0, 1] {
        ended.end_turn(stream, u64::MAX, true);
    }
    assert_eq!(ended.turns(4), [0, 1, 0, 1], "at the end of virtual time streams take turns");
}

/// The probability that a fair lottery strays further than this from the expected share is one in a million.
const DEVIATIONS: f64 = 4.9;

#[test]
fn lottery_turns_follow_the_weights_within_their_confidence_interval() {
    const TURNS: usize = 200_000;
    for weights in [vec![1, 2, 3, 4], vec![1, 1], vec![255, 1, 64], vec![u16::MAX, u16::MAX / 2]] {
        let services: Vec<_> = weights.iter().map(|share| weight(*share)).collect();
        let turns = Bench::new(Discipline::Lottery, &services).turns(TURNS);
        let all: f64 = weights.iter().map(|share| f64::from(*share)).sum();
        for (stream, share) in (0..).zip(&weights) {
            let had = turns.iter().filter(|turn| **turn == stream).count() as f64;
            let expected = f64::from(*share) / all;
            let deviation = (TURNS as f64 * expected * (1.0 - expected)).sqrt();
            assert!((had - TURNS as f64 * expected).abs() < DEVIATIONS * deviation, "{weights:?}: {stream} had {had}");
        }
    }
}

#[test]
fn a_lottery_does_not_remember_who_had_the_last_turn() {
    const TURNS: usize = 200_000;
    let turns = Bench::new(Discipline::Lottery, &[weight(1), weight(1)]).turns(TURNS);
    let repeats = turns.windows(2).filter(|pair| pair[0] == pair[1]).count() as f64;
    let expected = (TURNS - 1) as f64 / 2.0;
    assert!((repeats - expected).abs() < DEVIATIONS * (expected / 2.0).sqrt(), "{repeats}");
}

#[test]
fn equal_seeds_draw_equal_lots() {
    let lots = |seed| {
        let mut bench = Bench::new(Discipline::Lottery, &[]);
        bench.clock = DisciplineClock::new(Discipline::Lottery, seed);
        for stream in 0..4 {
            bench.insert(stream, plain());
            bench.wake(stream);
        }
        bench.turns(100)
    };
    assert_eq!(lots(1), lots(1));
    assert_ne!(lots(1), lots(2));
}

proptest! {
    #[test]
    fn in_round_robin_no_stream_is_more_than_one_turn_ahead_of_another_that_waits(
        wanted in prop::collection::vec(1..20usize, 1..20),
    ) {
        let turns = Bench::new(Discipline::Rr, &vec![plain(); wanted.len()]).serve(&wanted);
        prop_assert_eq!(turns.len(), wanted.iter().sum::<usize>());
        let mut had = vec![0; wanted.len()];
        for stream in turns {
            let stream = stream as usize;
            let waiting = wanted.iter().zip(&had).filter(|(wanted, had)| had < wanted).map(|(_, had)| *had);
            prop_assert_eq!(Some(had[stream]), waiting.min());
            had[stream] += 1;
        }
    }

    /// The bound of start-time fair queueing (SIGCOMM 1996, theorem 1), for turns of any size.
    #[test]
    fn fair_queueing_keeps_waiting_streams_within_a_quantum_of_each_other(
        weights in prop::collection::vec(1..=300u16, 2..12),
        sizes in prop::collection::vec(1..=QUANTUM, 1..600),
    ) {
        let services: Vec<_> = weights.iter().map(|share| weight(*share)).collect();
        let mut bench = Bench::new(Discipline::Wfq, &services);
        let mut sent = vec![0.0; weights.len()];
        for bytes in sizes {
            let stream = bench.next().expect("all wait");
            bench.end_turn(stream, bytes, true);
            sent[stream as usize] += bytes as f64 / f64::from(weights[stream as usize]);
            for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let quantum = |stream: usize| QUANTUM as f64 / f64::from(weights[stream]);
                prop_assert!((sent[a] - sent[b]).abs() <= quantum(a) + quantum(b) + 1.0);
            }
        }
    }

    /// Compared with an ideal server that serves all streams at once, each at its share.
    #[test]
    fn fair_queueing_is_never_a_quantum_ahead_of_the_fair_share_nor_behind_by_more_than_the_weight_explains(
        weights in prop::collection::vec(1..=300u16, 2..12), turns in 1..600usize,
    ) {
        let services: Vec<_> = weights.iter().map(|share| weight(*share)).collect();
        let turns = Bench::new(Discipline::Wfq, &services).turns(turns);
        let all: f64 = weights.iter().map(|share| f64::from(*share)).sum();
        for (stream, share) in (0..).zip(weights.iter().map(|share| f64::from(*share))) {
            let had = turns.iter().filter(|turn| **turn == stream).count() as f64;
            let ahead = had - turns.len() as f64 * share / all;
            let heavier_than_average = share * weights.len() as f64 / all;
            prop_assert!(ahead <= 1.01 && ahead >= -1.01 * heavier_than_average.max(1.0), "{stream}: {ahead}");
        }
    }

    #[test]
    fn no_waiting_stream_starves_where_service_is_shared(
        low in prop_oneof![Just(Low::Rr), Just(Low::Wfq)],
        weights in prop::collection::vec(1..=50u16, 2..10),
    ) {
        let services: Vec<_> = weights.iter().map(|share| weight(*share)).collect();
        for discipline in [Discipline::Rr, Discipline::Wfq, Discipline::Ml { low }] {
            // Each stream must have had a turn by the time the heaviest could have had 50 for it.
            let turns = Bench::new(discipline, &services).turns(51 * weights.len());
            for stream in 0..weights.len() as u32 {
                prop_assert!(turns.contains(&stream), "{discipline:?}");
            }
        }
    }

    #[test]
    fn the_smallest_waiting_rank_always_leaves_first(
        discipline in prop_oneof![
            Just(Discipline::Fcfs), Just(EDF), Just(Discipline::Abs), Just(Discipline::Wfq), Just(Discipline::Lottery),
            Just(Discipline::Ml { low: Low::Edf }), Just(Discipline::Ml { low: Low::Wfq }),
        ],
        steps in prop::collection::vec((0..5u8, 0..12u32, any::<u8>()), 1..200),
    ) {
        let mut bench = Bench::new(discipline, &[]);
        for (step, stream, value) in steps {
            let service = Service {
                level: if value % 2 == 0 { Level::High } else { Level::Low },
                priority: value % 8,
                weight: u16::from(value % 5),
                deadline_ns: (value % 3 > 0).then_some(u64::from(value) * 1_000),
                incremental: value % 7 == 0,
            };
            match step {
                0 => { bench.insert(stream, service); bench.wake(stream); }
                1 => { bench.set(stream, service); }
                2 => { bench.remove(stream); }
                3 => { bench.streams.sleep(&mut bench.clock, stream); }
                _ => if let Some(turn) = bench.next() {
                    bench.end_turn(turn, u64::from(value), value % 4 > 0);
                },
            }
            let waiting = (0..12).filter(|stream| bench.streams.contains(*stream));
            let waiting: Vec<_> =
                waiting.map(|stream| bench.streams.known[stream as usize].expect("it waits")).collect();
            let ranks = waiting.iter().map(|stream| stream.rank(&bench.clock));
            prop_assert_eq!(bench.streams.turn().map(|(_, rank)| rank), ranks.min());
            let sharing = waiting.iter().filter(|stream| discipline.is_by_share(&stream.service)).count();
            prop_assert_eq!(bench.clock.sharing, sharing);
        }
    }
}

#[test]
fn another_discipline_orders_those_that_wait_and_ties_keep_their_order() {
    let mut streams = Streams::new();
    let mut clock = DisciplineClock::new(Discipline::Fcfs, 1);
    for (stream, priority) in [(0, 1), (1, 9), (2, 1), (3, 9), (4, 5)] {
        streams.insert(&mut clock, stream, Service { priority, ..Service::default() });
        if stream != 4 {
            streams.wake(&mut clock, stream);
        }
    }
    let mut abs = DisciplineClock::new(Discipline::Abs, 1);
    streams.reorder(&mut abs);
    streams.wake(&mut abs, 4);
    let order: Vec<_> = std::iter::from_fn(|| {
        let (stream, _) = streams.turn()?;
        streams.end_turn(&mut abs, stream, 1, false);
        Some(stream)
    })
    .collect();
    assert_eq!(order, [1, 3, 4, 0, 2]);
    // Charges under one clock do not count under another.
    let mut wfq = DisciplineClock::new(Discipline::Wfq, 1);
    streams.reorder(&mut wfq);
    for stream in 0..2 {
        streams.wake(&mut wfq, stream);
    }
    assert_eq!(streams.turn().unwrap().0, 0);
}

#[test]
fn a_stream_that_sleeps_without_a_turn_keeps_its_charges_and_moves_no_other() {
    let (mut clock, mut streams) = (DisciplineClock::new(Discipline::Wfq, 0), Streams::new());
    for stream in [0, 1] {
        streams.insert(&mut clock, stream, plain());
        streams.wake(&mut clock, stream);
    }
    streams.end_turn(&mut clock, 0, 1_000, true);
    streams.end_turn(&mut clock, 1, 10, true);
    streams.sleep(&mut clock, 0);
    assert!(!streams.contains(0));
    streams.insert(&mut clock, 2, plain());
    streams.wake(&mut clock, 2);
    assert_eq!(streams.turn().map(|(stream, _)| stream), Some(2), "its turn is not after the end of the sleeper's");
    streams.wake(&mut clock, 0);
    streams.end_turn(&mut clock, 2, 100, true);
    assert_eq!(streams.turn().map(|(stream, _)| stream), Some(1));
}
