use proptest::prelude::*;

use super::*;
use crate::route::{curve::Cost, request::ModelSet};

const MS: u64 = 1_000_000;

fn curve() -> Curve {
    Curve::new(Cost {
        host_ns: 4e6,
        gpu_ns: 16e6,
        gpu_per_sequence_ns: 2e6,
        prefill_ns: 10e6,
        prefill_per_token_ns: 1e5,
        sharing: 0.5,
    })
}

fn replica(load: EngineLoad) -> Replica {
    Replica { model: 0, group: 0, usable: true, most_running: 4, load, curve: curve() }
}

fn request(slo: Slo) -> RoutedRequest {
    RoutedRequest {
        class: 0,
        prompt_tokens: 100,
        expected_tokens: 101,
        max_tokens: 0,
        slo,
        weight: 1.0,
        allowed: ModelSet::ALL,
    }
}

#[test]
fn an_idle_engine_answers_after_the_prompt_and_one_step_for_each_further_token() {
    let prediction =
        Prediction::of(&request(Slo::unlimited()), &replica(EngineLoad::default()), 0, &ClientPath::default());
    let expected = Prediction { first_ns: 20 * MS, per_token_ns: 22 * MS, finish_ns: 2_220 * MS, is_known: true };
    assert_eq!(prediction, expected);
}

#[test]
fn an_engine_reads_only_the_part_of_the_prompt_that_is_not_in_its_cache() {
    let first = |load, cached| {
        let (request, path) = (request(Slo::unlimited()), ClientPath::default());
        Prediction::of(&request, &replica(load), cached, &path).first_ns
    };
    assert_eq!(first(EngineLoad::default(), 60), 14 * MS, "40 tokens of 0.1 ms");
    assert_eq!(first(EngineLoad::default(), 100), 10_100_000, "the last token is always read");
    assert_eq!(first(EngineLoad::default(), 1_000), 10_100_000);
    let waiting = EngineLoad { waiting: 2, ..EngineLoad::default() };
    assert_eq!(first(waiting, 60), (2 * 20 + 14) * MS, "waiting prompts are in no cache");
    assert_eq!(request(Slo::unlimited()).unread_tokens(0), 100);
    assert_eq!(RoutedRequest { prompt_tokens: 0, ..request(Slo::unlimited()) }.unread_tokens(5), 0);
}

#[test]
fn a_full_batch_makes_a_request_wait_until_one_has_finished() {
    let load = EngineLoad { running: 4, outstanding_tokens: 400, ..EngineLoad::default() };
    let prediction = Prediction::of(&request(Slo::unlimited()), &replica(load), 0, &ClientPath::default());
    // One of four has to finish; each has 100 tokens left, of 28 ms.
    assert_eq!(prediction.first_ns, (700 + 20) * MS);
    assert_eq!(prediction.per_token_ns, 28 * MS);
}

#[test]
fn an_engine_that_refuses_requests_begins_with_them_only_once_it_takes_them_again() {
    let predict = |load| Prediction::of(&request(Slo::unlimited()), &replica(load), 0, &ClientPath::default());
    let full = EngineLoad { running: 4, outstanding_tokens: 400, ..EngineLoad::default() };
    for load in [EngineLoad::default(), full] {
        let (open, closed) = (predict(load), predict(EngineLoad { closed_ns: 5_000 * MS, ..load }));
        assert_eq!((closed.first_ns, closed.finish_ns), (open.first_ns + 5_000 * MS, open.finish_ns + 5_000 * MS));
        assert_eq!(closed.per_token_ns, open.per_token_ns);
    }
}

#[test]
fn the_way_back_adds_half_a_round_trip_and_the_queue() {
    let path = ClientPath {
        smoothed_rtt_ns: 100 * MS,
        backlog_bytes: 5_000,
        bytes_per_sec: 100_000,
        share_bytes_per_sec: 0,
        bytes_per_token: 4,
    };
    assert_eq!(path.return_ns(), 100 * MS);
    let prediction = Prediction::of(&request(Slo::unlimited()), &replica(EngineLoad::default()), 0, &path);
    assert_eq!(prediction.finish_ns, 2_320 * MS);
    let slow = ClientPath { bytes_per_sec: 100, backlog_bytes: 0, ..path };
    let prediction = Prediction::of(&request(Slo::unlimited()), &replica(EngineLoad::default()), 0, &slow);
    assert_eq!(prediction.finish_ns, (4_040 + 50) * MS, "the path is slower than the engine");
    let shared = ClientPath { share_bytes_per_sec: 100, ..path };
    let prediction = Prediction::of(&request(Slo::unlimited()), &replica(EngineLoad::default()), 0, &shared);
    assert_eq!(prediction.finish_ns, (4_040 + 100) * MS, "the answer's share of the path is slower than the engine");
    assert_eq!(shared.return_ns(), path.return_ns(), "the queue ahead leaves at the path's whole rate");
}

#[test]
fn the_tightest_limit_decides() {
    let prediction = Prediction { first_ns: 50, per_token_ns: 30, finish_ns: 900, is_known: true };
    let slo = Slo { first_token_ns: 100, per_token_ns: 40, budget_ns: 1_000 };
    assert!((prediction.tightness(&slo) - 0.9).abs() < 1e-12);
    assert!((prediction.tightness(&Slo { first_token_ns: 25, ..slo }) - 2.0).abs() < 1e-12);
    assert!((prediction.tightness(&Slo { per_token_ns: 20, ..slo }) - 1.5).abs() < 1e-12);
    assert_eq!(prediction.tightness(&Slo::unlimited()), 0.0);
    assert_eq!(prediction.tightness(&Slo::within(0)), f64::INFINITY);
}

#[test]
fn engines_of_a_group_see_what_the_others_use() {
    let busy = EngineLoad { running: 8, ..EngineLoad::default() };
    let mut replicas = [replica(busy), replica(EngineLoad::default()), Replica { group: 1, ..replica(busy) }];
    share_groups(&mut replicas);
    let others = replicas.map(|replica| replica.load.others_utilisation);
    assert!(others[0] == 0.0 && others[2] == 0.0);
    assert!((others[1] - 32.0 / 36.0).abs() < 1e-9);
}

fn any_load() -> impl Strategy<Value = EngineLoad> {
    let numbers = (any::<u32>(), 0..50u32, any::<u64>(), any::<f64>(), any::<u64>());
    numbers.prop_map(|(running, waiting, tokens, others, closed_ns)| EngineLoad {
        running,
        waiting,
        outstanding_tokens: tokens,
        others_utilisation: others,
        closed_ns,
        updated_ns: 0,
    })
}

proptest! {
    #[test]
    fn more_load_never_makes_an_answer_earlier(
        running in 0..100u32, waiting in 0..100u32, tokens in 0..100_000u64, others in 0.0..3.0f64,
        more_running in 0..50u32, more_waiting in 0..50u32, more_tokens in 0..1_000u64, more_others in 0.0..1.0f64,
        closed_ns in 0..1u64 << 40, more_closed_ns in 0..1u64 << 40,
    ) {
        let load = EngineLoad {
            running, waiting, outstanding_tokens: tokens, others_utilisation: others, closed_ns, updated_ns: 0,
        };
        let (request, path) = (request(Slo::unlimited()), ClientPath::default());
        let before = Prediction::of(&request, &replica(load), 0, &path);
        for heavier in [
            EngineLoad { running: running + more_running, ..load },
            EngineLoad { waiting: waiting + more_waiting, ..load },
            EngineLoad { outstanding_tokens: tokens + more_tokens, ..load },
            EngineLoad { others_utilisation: others + more_others, ..load },
            EngineLoad { closed_ns: closed_ns + more_closed_ns, ..load },
        ] {
            let after = Prediction::of(&request, &replica(heavier), 0, &path);
            prop_assert!(after.finish_ns >= before.finish_ns && after.first_ns >= before.first_ns);
        }
    }

    #[test]
    fn no_state_gives_a_tightness_that_is_no_number(
        load in any_load(), most_running in any::<u32>(), numbers in any::<[u64; 7]>(), tokens in any::<[u32; 4]>(),
    ) {
        let slo = Slo { first_token_ns: numbers[0], per_token_ns: numbers[1], budget_ns: numbers[2] };
        let request = RoutedRequest {
            prompt_tokens: tokens[0], expected_tokens: tokens[1], max_tokens: tokens[2], ..request(slo)
        };
        let path = ClientPath {
            smoothed_rtt_ns: numbers[3], backlog_bytes: numbers[4], bytes_per_sec: numbers[5],
            share_bytes_per_sec: numbers[6], bytes_per_token: tokens[3],
        };
        let prediction = Prediction::of(&request, &Replica { most_running, ..replica(load) }, 0, &path);
        prop_assert!(prediction.tightness(&slo) >= 0.0);
        prop_assert!(prediction.finish_ns >= prediction.first_ns);
    }
}
