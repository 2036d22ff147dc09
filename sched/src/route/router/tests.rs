use proptest::prelude::*;

use super::*;
use crate::{
    random::Random,
    route::{
        curve::{Cost, Curve},
        features::Features,
        mlp::Mlp,
        policy::{Dqn, Measure, Thresholds},
        request::{ModelSet, Slo},
        state::{ClientPath, EngineLoad, Replica},
    },
};

const MS: u64 = 1_000_000;
const SEC: u64 = 1_000 * MS;

/// Large, middle, small: 36, 14 and 8 ms for a token on an idle engine.
fn models() -> Vec<Model> {
    [(1, [1.0, 1.0]), (2, [0.8, 0.95]), (3, [0.5, 0.8])]
        .map(|(id, rewards)| Model { id, rewards: rewards.to_vec() })
        .into()
}

fn replica(model: usize, running: u32) -> Replica {
    let (gpu_ms, more_ms) = [(32.0, 4.0), (13.0, 1.0), (7.7, 0.3)][model];
    let cost = Cost { gpu_ns: gpu_ms * 1e6, gpu_per_sequence_ns: more_ms * 1e6, ..Cost::default() };
    let load = EngineLoad { running, outstanding_tokens: 100 * u64::from(running), ..EngineLoad::default() };
    Replica { model, group: 0, usable: true, most_running: 64, load, curve: Curve::new(cost) }
}

/// 100 tokens within 4 s: 40 ms each.
fn request() -> RoutedRequest {
    RoutedRequest {
        class: 0,
        prompt_tokens: 0,
        expected_tokens: 100,
        max_tokens: 0,
        slo: Slo::within(4 * SEC),
        weight: 1.0,
        allowed: ModelSet::ALL,
    }
}

fn route(router: &mut Router, request: &RoutedRequest, replicas: &[Replica]) -> Option<(usize, usize, Reason)> {
    let choice =
        router.route(request, &State { replicas, admitted: &[], cached: &[], path: ClientPath::default() }, 0)?;
    Some((choice.model, choice.replica, choice.reason))
}

fn once(policy: RoutingPolicy, replicas: &[Replica]) -> Option<(usize, usize, Reason)> {
    route(&mut Router::new(models(), policy), &request(), replicas)
}

fn dqn(seed: u64, features: Features) -> Dqn {
    let sizes = [features.len(3, 2), 8, 3];
    Dqn::new(Mlp::random(&sizes, &mut Random::new(seed)), features, &models(), 2)
}

/// The same engine, with its load noted at `updated_ns`.
fn as_of(replica: Replica, updated_ns: u64) -> Replica {
    Replica { load: EngineLoad { updated_ns, ..replica.load }, ..replica }
}

#[test]
fn the_rule_takes_the_largest_model_that_is_in_time_with_the_margin() {
    let idle = [replica(0, 0), replica(1, 0), replica(2, 0)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.1 }, &idle), Some((0, 0, Reason::InTime)));
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.2 }, &idle), Some((1, 1, Reason::InTime)));
    let busy = [replica(0, 5), replica(1, 30), replica(2, 0)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.1 }, &busy), Some((2, 2, Reason::InTime)));
}

#[test]
fn the_rule_takes_what_is_in_time_without_the_margin_or_else_the_cheapest() {
    let little = [replica(0, 0), replica(0, 1), replica(1, 60)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.2 }, &little), Some((0, 0, Reason::NoneInTime)));
    let full = [replica(0, 40), replica(1, 64), replica(2, 200)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.1 }, &full), Some((2, 2, Reason::NoneInTime)));
}

#[test]
fn the_rule_takes_the_replica_that_is_predicted_earliest() {
    let replicas = [replica(0, 3), replica(0, 1), replica(0, 0), replica(1, 0)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.0 }, &replicas), Some((0, 2, Reason::InTime)));
}

#[test]
fn a_cached_prompt_is_worth_a_longer_queue_for_as_long_as_reading_it_would_take_longer() {
    let request = RoutedRequest { prompt_tokens: 4_000, slo: Slo::within(20 * SEC), ..request() };
    let reading = |replica: Replica| Replica {
        curve: Curve::new(Cost { prefill_per_token_ns: 5e5, ..replica.curve.cost() }),
        ..replica
    };
    // The whole prompt takes 2 s. Each request in the batch adds 4 ms to each of 100 tokens.
    let chosen = |running, cached: &[u32]| {
        let replicas = [reading(replica(0, running)), reading(replica(0, 0))];
        let state = State { replicas: &replicas, admitted: &[], cached, path: ClientPath::default() };
        let choice = Router::new(models(), RoutingPolicy::Rule { margin: 1.0 }).route(&request, &state, 0);
        choice.map(|choice| choice.replica)
    };
    assert_eq!(chosen(4, &[3_900]), Some(0), "0.05 s and 99 × 52 ms, against 2 s and 99 × 36 ms");
    assert_eq!(chosen(5, &[3_900]), Some(1), "0.05 s and 99 × 56 ms");
    assert_eq!(chosen(4, &[3_000]), Some(1), "0.5 s and 99 × 52 ms");
    assert_eq!(chosen(1, &[]), Some(1));
    assert_eq!(chosen(4, &[3_900, 3_900]), Some(1), "both have it");
}

#[test]
fn the_engine_with_the_fewest_requests_is_chosen_if_costs_are_unknown() {
    let unknown = |running| Replica { curve: Curve::new(Cost::default()), ..replica(0, running) };
    let replicas = [unknown(3), unknown(1), unknown(1), replica(1, 0)];
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.0 }, &replicas), Some((0, 1, Reason::InTime)));
}

#[test]
fn a_choice_that_another_engine_serves_is_about_that_engine_and_counts_from_the_choice() {
    let replicas = [replica(0, 0), replica(0, 5), replica(1, 0)];
    let state = State { replicas: &replicas, admitted: &[], cached: &[], path: ClientPath::default() };
    let mut router = Router::new(models(), RoutingPolicy::Rule { margin: 1.0 });
    let chosen = router.route(&request(), &state, 0).unwrap();
    assert_eq!((chosen.model, chosen.replica, chosen.in_time), (0, 0, true));
    let moved = router.moved(chosen, (1, 0), &request(), &state);
    assert_eq!((moved.model, moved.replica, moved.reason, moved.in_time), (0, 1, Reason::InTime, false));
    // 100 tokens with 6 in a batch: the first costs nothing here, and the others 32 + 6 × 4 ms each.
    assert_eq!(moved.predicted_ns, 99 * 56 * MS);
    let late = router.moved(chosen, (0, SEC), &request(), &state);
    assert_eq!(
        (late.predicted_ns, late.in_time),
        (chosen.predicted_ns + SEC, false),
        "3,564 ms of 4 s, a second later"
    );
    assert_eq!(router.moved(chosen, (3, 0), &request(), &state), chosen, "there is no such engine");
}

#[test]
fn a_margin_that_is_none_counts_as_1() {
    let idle = [replica(0, 0), replica(1, 0)];
    for margin in [f64::NAN, 0.0, -1.0, 1.0] {
        assert_eq!(once(RoutingPolicy::Rule { margin }, &idle), Some((0, 0, Reason::InTime)));
    }
}

#[test]
fn a_request_for_one_model_gets_no_other() {
    let only = RoutedRequest { allowed: ModelSet::NONE.with(0), ..request() };
    let replicas = [replica(1, 0), replica(0, 60)];
    for policy in [
        RoutingPolicy::Rule { margin: 1.1 },
        RoutingPolicy::Fixed(1),
        RoutingPolicy::Dqn(dqn(1, Features::Predictions)),
    ] {
        let mut router = Router::new(models(), policy);
        assert_eq!(route(&mut router, &only, &replicas), Some((0, 1, Reason::Only)));
    }
    for policy in [RoutingPolicy::RoundRobin, RoutingPolicy::LeastLoaded] {
        let mut router = Router::new(models(), policy);
        assert_eq!(route(&mut router, &only, &replicas).map(|choice| choice.0), Some(0));
    }
    let mut router = Router::new(models(), RoutingPolicy::Fixed(1));
    let none = RoutedRequest { allowed: ModelSet::NONE, ..request() };
    assert_eq!(route(&mut router, &none, &replicas), None);
    assert_eq!(router.counters().refused, 1);
}

#[test]
fn unusable_replicas_and_unknown_models_get_nothing() {
    let mut replicas = [replica(0, 0), replica(1, 0), replica(2, 0)];
    replicas[0].usable = false;
    replicas[2].model = 7;
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.0 }, &replicas), Some((1, 1, Reason::Only)));
    assert_eq!(once(RoutingPolicy::Rule { margin: 1.0 }, &[]), None);
}

#[test]
fn a_fixed_model_that_is_not_there_is_replaced_by_the_rule() {
    let replicas = [replica(0, 5), replica(1, 0)];
    let unavailable = Reason::Fallback(FallbackCause::Unavailable);
    assert_eq!(once(RoutingPolicy::Fixed(2), &replicas), Some((1, 1, unavailable)));
    assert_eq!(once(RoutingPolicy::Fixed(99), &replicas), Some((1, 1, unavailable)));
}

#[test]
fn turns_go_round_all_replicas() {
    let mut router = Router::new(models(), RoutingPolicy::RoundRobin);
    let mut replicas = [replica(0, 0), replica(1, 0), replica(1, 0), replica(2, 0)];
    replicas[1].usable = false;
    let order: Vec<_> =
        (0..5).filter_map(|_| route(&mut router, &request(), &replicas)).map(|choice| choice.1).collect();
    assert_eq!(order, [0, 2, 3, 0, 2]);
}

#[test]
fn the_least_loaded_replica_is_the_one_with_the_fewest_requests() {
    assert_eq!(once(RoutingPolicy::LeastLoaded, &[replica(0, 2), replica(1, 1)]), Some((1, 1, Reason::LeastLoaded)));
    let even = [replica(2, 1), replica(1, 1), replica(1, 1)];
    assert_eq!(once(RoutingPolicy::LeastLoaded, &even), Some((1, 1, Reason::LeastLoaded)));
}

#[test]
fn the_guard_prefers_what_is_in_time_to_what_the_policy_wants() {
    let replicas = [replica(0, 9), replica(1, 0), replica(2, 0)];
    let mut router = Router::new(models(), RoutingPolicy::Fixed(0));
    assert_eq!(route(&mut router, &request(), &replicas), Some((1, 1, Reason::Guard)));
    assert_eq!(router.counters().guarded, 1);
    let mut free = Router::new(models(), RoutingPolicy::Fixed(0)).unguarded();
    assert_eq!(route(&mut free, &request(), &replicas), Some((0, 0, Reason::Fixed)));
    // If no model is in time, the guard has nothing better.
    let full = [replica(0, 9), replica(1, 60), replica(2, 200)];
    assert_eq!(route(&mut router, &request(), &full), Some((0, 0, Reason::Fixed)));
}

#[test]
fn no_policy_chooses_an_engine_that_refuses_requests_while_another_takes_them() {
    let closed = |replica: Replica| Replica { load: EngineLoad { closed_ns: 60 * SEC, ..replica.load }, ..replica };
    // Without the closings, each policy would choose the first engine or the last.
    let replicas = [closed(replica(0, 0)), replica(1, 1), closed(replica(2, 0))];
    let thresholds = |measure, overload| {
        RoutingPolicy::Thresholds(Thresholds { overload, ..Thresholds::uniform(measure, 3, 2, 1.0) })
    };
    for policy in [
        RoutingPolicy::RoundRobin,
        RoutingPolicy::LeastLoaded,
        RoutingPolicy::Rule { margin: 1.0 },
        RoutingPolicy::Considerate { doubt: 1.25 },
        thresholds(Measure::Predicted, 4.0),
        thresholds(Measure::Fill, 4.0),
        thresholds(Measure::Fill, -1.0),
    ] {
        for slo in [request().slo, Slo::within(1)] {
            let mut router = Router::new(models(), policy.clone());
            let request = RoutedRequest { slo, ..request() };
            for _ in 0..3 {
                assert_eq!(route(&mut router, &request, &replicas).map(|(model, ..)| model), Some(1), "{policy:?}");
            }
            assert!(route(&mut router, &request, &replicas.map(closed)).is_some(), "it waits: {policy:?}");
        }
    }
}

#[test]
fn thresholds_are_by_model_and_class_and_fall_with_pressure() {
    let idle = [replica(0, 0), replica(1, 0), replica(2, 0)];
    let mut thresholds = Thresholds::uniform(Measure::Predicted, 3, 2, 0.95);
    assert_eq!(once(RoutingPolicy::Thresholds(thresholds.clone()), &idle), Some((0, 0, Reason::Threshold)));
    // The large model's limit for class 0.
    thresholds.limits[0] = 0.5;
    assert_eq!(once(RoutingPolicy::Thresholds(thresholds.clone()), &idle), Some((1, 1, Reason::Threshold)));
    let mut router = Router::new(models(), RoutingPolicy::Thresholds(thresholds.clone()));
    let of_class = |class| RoutedRequest { class, ..request() };
    assert_eq!(route(&mut router, &of_class(1), &idle), Some((0, 0, Reason::Threshold)));
    assert_eq!(route(&mut router, &of_class(9), &idle), Some((0, 0, Reason::Threshold)), "as the last class");
    thresholds.slopes[0] = 2.0;
    let mut router = Router::new(models(), RoutingPolicy::Thresholds(thresholds));
    let chosen = [0, 100 * SEC].map(|now_ns| {
        let state = State {
            replicas: &idle.map(|idle| as_of(idle, now_ns)),
            admitted: &[],
            cached: &[],
            path: ClientPath::default(),
        };
        router.route(&of_class(1), &state, now_ns).map(|choice| choice.model)
    });
    assert_eq!(chosen, [Some(1), Some(0)], "one request per second at first, then one in 16");
}

#[test]
fn too_many_requests_go_to_the_cheapest_model() {
    let last = |prefill_ns: f64, per_sec: u64| {
        let mut replicas = [replica(0, 0), replica(1, 0), replica(2, 0)];
        replicas[2].curve = Curve::new(Cost { prefill_ns, ..replicas[2].curve.cost() });
        let thresholds = Thresholds { overload: 1.0, ..Thresholds::uniform(Measure::Predicted, 3, 2, 0.95) };
        let mut router = Router::new(models(), RoutingPolicy::Thresholds(thresholds));
        let choices = (0..100).map(|at| {
            let now_ns = at * SEC / per_sec;
            let replicas = replicas.map(|replica| as_of(replica, now_ns));
            router.route(
                &request(),
                &State { replicas: &replicas, admitted: &[], cached: &[], path: ClientPath::default() },
                now_ns,
            )
        });
        choices.last().flatten().map(|choice| choice.reason)
    };
    // The small model's steps take 26.9 ms with 64 sequences, its largest batch: 23.8 requests per second.
    assert_eq!(last(0.0, 23), Some(Reason::Threshold));
    assert_eq!(last(0.0, 25), Some(Reason::Overload));
    // A prompt that takes as long as the steps halves that rate.
    assert_eq!(last(42e6, 11), Some(Reason::Threshold));
    assert_eq!(last(42e6, 13), Some(Reason::Overload));
}

#[test]
fn a_policy_for_other_models_is_not_asked() {
    let idle = [replica(0, 0), replica(1, 0), replica(2, 0)];
    let fits = RoutingPolicy::Dqn(dqn(1, Features::Predictions));
    assert_eq!(once(fits.clone(), &idle).map(|choice| choice.2), Some(Reason::Value));
    let mut others = models();
    others[1].id = 9;
    let mut router = Router::new(others, fits);
    // With the default margin, the large model's 36 ms are too much.
    let fallback = Some((1, 1, Reason::Fallback(FallbackCause::Fingerprint)));
    assert_eq!(route(&mut router, &request(), &idle), fallback);
    let thresholds = Thresholds::uniform(Measure::Predicted, 2, 2, 1.0);
    assert_eq!(once(RoutingPolicy::Thresholds(thresholds), &idle), fallback);
    let narrow = Mlp::random(&[3, 3], &mut Random::new(1));
    assert_eq!(once(RoutingPolicy::Dqn(Dqn::new(narrow, Features::Predictions, &models(), 2)), &idle), fallback);
    assert_eq!(router.counters().fallbacks, [0, 0, 1, 0]);
}

#[test]
fn the_rule_replaces_a_result_that_is_no_number() {
    let idle = [replica(0, 0), replica(1, 0), replica(2, 0)];
    let mut broken = dqn(1, Features::Predictions);
    broken.network.layers[1].bias[2] = f32::NAN;
    // With the default margin, the large model's 36 ms are too much.
    let fallback = Some((1, 1, Reason::Fallback(FallbackCause::NotFinite)));
    assert_eq!(once(RoutingPolicy::Dqn(broken), &idle), fallback);
    let thresholds = Thresholds::uniform(Measure::Fill, 3, 2, f64::NAN);
    assert_eq!(once(RoutingPolicy::Thresholds(thresholds), &idle), fallback);
}

#[test]
fn old_loads_are_for_the_rule_only() {
    let idle = [replica(0, 0), replica(1, 0), replica(2, 0)];
    let mut router = Router::new(models(), RoutingPolicy::Dqn(dqn(1, Features::Batches(2))));
    let state = State { replicas: &idle, admitted: &[], cached: &[], path: ClientPath::default() };
    let mut reason = |now_ns| router.route(&request(), &state, now_ns).map(|choice| choice.reason);
    assert_eq!(reason(SEC), Some(Reason::Value));
    assert_eq!(reason(SEC + 1), Some(Reason::Fallback(FallbackCause::Stale)));
    assert_eq!(router.counters().fallbacks, [0, 1, 0, 0]);
}

#[test]
fn an_old_load_counts_only_at_an_engine_that_may_answer() {
    let reason = |old: Replica, allowed| {
        let replicas = [replica(0, 0), replica(1, 0)].map(|idle| as_of(idle, 2 * SEC)).into_iter().chain([old]);
        let replicas: Vec<_> = replicas.collect();
        let state = State { replicas: &replicas, admitted: &[], cached: &[], path: ClientPath::default() };
        let request = RoutedRequest { allowed, ..request() };
        let mut router = Router::new(models(), RoutingPolicy::Dqn(dqn(1, Features::Batches(2))));
        router.route(&request, &state, 2 * SEC).map(|choice| choice.reason)
    };
    let (old, all) = (replica(2, 0), request().allowed);
    assert_eq!(reason(old, all), Some(Reason::Fallback(FallbackCause::Stale)));
    let two = ModelSet::NONE.with(0).with(1);
    let unusable = Replica { usable: false, ..old };
    let of_another = Replica { model: usize::MAX, ..old };
    for (old, allowed) in [(old, two), (unusable, all), (of_another, all)] {
        assert_eq!(reason(old, allowed), Some(Reason::Value), "{old:?}");
    }
}

#[test]
fn metadata_and_tensors_come_back_as_the_same_policy() {
    for features in [Features::Predictions, Features::Batches(4)] {
        let dqn = dqn(4, features);
        let fingerprint = format!("{:016x}", dqn.fingerprint);
        let metadata =
            [("features", dqn.features.name()), ("classes", dqn.classes.to_string()), ("fingerprint", fingerprint)];
        let pairs = || metadata.iter().map(|(name, value)| (*name, value.as_str()));
        assert_eq!(Dqn::from_parts(&dqn.network.tensors(), pairs()), Some(dqn.clone()));
        for missing in 0..metadata.len() {
            let some = pairs().enumerate().filter(|(at, _)| *at != missing).map(|(_, pair)| pair);
            assert_eq!(Dqn::from_parts(&dqn.network.tensors(), some), None);
        }
    }
}

fn any_policy() -> impl Strategy<Value = RoutingPolicy> {
    let thresholds = (prop::collection::vec(any::<f64>(), 10), any::<bool>()).prop_map(|(parameters, fill)| {
        let measure = if fill { Measure::Fill } else { Measure::Predicted };
        RoutingPolicy::Thresholds(Thresholds::uniform(measure, 3, 2, 1.0).with_parameters(&parameters))
    });
    let dqn = (any::<u64>(), any::<bool>()).prop_map(|(seed, paper)| {
        RoutingPolicy::Dqn(dqn(seed, if paper { Features::Batches(2) } else { Features::Predictions }))
    });
    prop_oneof![
        (0..4usize).prop_map(RoutingPolicy::Fixed),
        Just(RoutingPolicy::RoundRobin),
        Just(RoutingPolicy::LeastLoaded),
        any::<f64>().prop_map(|margin| RoutingPolicy::Rule { margin }),
        thresholds,
        dqn,
    ]
}

fn any_replica() -> impl Strategy<Value = Replica> {
    let closed_ns = prop_oneof![Just(0), 0..60 * SEC];
    let loads = (0..80u32, 0..20u32, any::<u64>(), prop_oneof![0.0..3.0f64, any::<f64>()], closed_ns, 0..3 * SEC);
    (0..4usize, prop::num::u8::ANY, loads).prop_map(
        |(model, usable, (running, waiting, tokens, others, closed_ns, updated_ns))| {
            let load = EngineLoad {
                running,
                waiting,
                outstanding_tokens: tokens % 100_000,
                others_utilisation: others,
                closed_ns,
                updated_ns,
            };
            Replica { model, usable: usable > 60, load, ..replica(model.min(2), 0) }
        },
    )
}

proptest! {
    #[test]
    fn a_guarded_choice_is_late_only_if_every_model_is(
        policy in any_policy(), replicas in prop::collection::vec(any_replica(), 0..8),
        requests in prop::collection::vec((0..3usize, 0..300u32, 0..20 * SEC, any::<f32>(), any::<u8>()), 1..8),
        rtt_ns in 0..SEC,
    ) {
        let mut router = Router::new(models(), policy);
        let path = ClientPath { smoothed_rtt_ns: rtt_ns, ..ClientPath::default() };
        for (at, (class, tokens, budget_ns, weight, allowed)) in requests.into_iter().enumerate() {
            let allowed = (0..4).filter(|model| allowed >> model & 1 == 1).fold(ModelSet::NONE, ModelSet::with);
            let request = RoutedRequest {
                class, expected_tokens: tokens, slo: Slo::within(budget_ns), weight, allowed, ..request()
            };
            let state = State { replicas: &replicas, admitted: &[], cached: &[], path };
            let open = |replica: &&Replica| replica.usable && replica.model < 3 && allowed.contains(replica.model);
            let in_time = replicas.iter().filter(open).any(|replica| {
                crate::route::state::Prediction::of(&request, replica, 0, &path).tightness(&request.slo) <= 1.0
            });
            let choice = router.route(&request, &state, at as u64 * SEC / 4);
            prop_assert_eq!(choice.is_some(), replicas.iter().filter(open).count() > 0);
            if let Some(choice) = choice {
                let chosen = &replicas[choice.replica];
                prop_assert!(open(&chosen) && chosen.model == choice.model);
                prop_assert_eq!(choice.in_time, in_time, "{:?}", choice);
            }
        }
    }
}
