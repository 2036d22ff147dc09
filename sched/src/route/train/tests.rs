use super::*;
use crate::route::{
    features::Features,
    mlp::Activations,
    policy::RoutingPolicy,
    router::Router,
    serving::{RATES, mean_score},
};

/// A recipe that takes a second instead of hours.
fn short(seed: u64) -> Training {
    Training {
        features: Features::Predictions,
        hidden: vec![16],
        iterations: 8_000,
        batch: 16,
        replay: 4_000,
        warm_up: 200,
        gamma: 0.5,
        learning_rate: 3e-3,
        last_learning_rate: 3e-4,
        target_every: 100,
        seed,
        ..Training::paper()
    }
}

fn mix() -> Vec<Workload> {
    RATES.into_iter().map(Workload::stable).chain([Workload::bursts(0.25, 48.0, 500)]).collect()
}

fn sweep(setup: &Setup, policy: &RoutingPolicy, seed: u64) -> f64 {
    let scores = RATES.map(|rate| {
        let mut router = Router::new(setup.models.clone(), policy.clone()).unguarded();
        mean_score(&run(setup, &Workload::stable(rate).arrivals(setup, seed), &mut router))
    });
    scores.iter().sum::<f64>() / scores.len() as f64
}

#[test]
fn a_short_training_usually_beats_each_model_alone() {
    let setup = Setup::paper();
    let alone = (0..3).map(|model| sweep(&setup, &RoutingPolicy::Fixed(model), 700_000)).fold(0.0, f64::max);
    let scores: Vec<_> = (0..6)
        .map(|seed| sweep(&setup, &RoutingPolicy::Dqn(double_dqn(&setup, &mix(), &short(seed)).dqn), 700_000))
        .collect();
    // Double DQN varies by seed; one in ten such short trainings fails.
    let better = scores.iter().filter(|score| **score > alone + 0.05).count();
    assert!(better >= 5, "{scores:?} and {alone}");
}

#[test]
fn a_seed_repeats_a_training() {
    let setup = Setup::paper();
    let brief = Training { iterations: 300, ..short(3) };
    let trained = double_dqn(&setup, &mix(), &brief);
    assert_eq!(trained, double_dqn(&setup, &mix(), &brief));
    assert_ne!(trained, double_dqn(&setup, &mix(), &Training { seed: 4, ..brief }));
    assert_eq!((trained.losses.len(), trained.rewards.len()), (10, 10));
}

#[test]
fn a_step_is_worth_what_it_earns_when_nothing_comes_after_it() {
    // With γ = 0 and one request per episode, far apart, values are the rewards of table 1.
    let setup = Setup::paper();
    let one = [Workload::bursts(0.01, 0.01, 1)];
    for seed in 0..3 {
        let training = Training { gamma: 0.0, epsilon: 1.0, last_epsilon: 1.0, hidden: vec![32], ..short(seed) };
        let dqn = double_dqn(&setup, &one, &training).dqn;
        let mut router = Router::new(setup.models.clone(), RoutingPolicy::Dqn(dqn.clone())).unguarded();
        let outcomes = run(&setup, &Workload::stable(0.05).arrivals(&setup, seed), &mut router);
        assert!(mean_score(&outcomes) > 0.99, "seed {seed}: {outcomes:?}");
        let wrong = Features::from_name(&training.features.name());
        assert_eq!(wrong, Some(dqn.features));
    }
}

#[test]
fn a_value_contains_what_comes_later() {
    // One request in 20 s, so that each is answered in time: with the best model every reward is 1, and with γ = 0.8 the
    // values of a long episode add up to 5.
    let setup = Setup::paper();
    let calm = [Workload::Stable { requests_per_sec: 0.05, duration_ns: 6_000_000_000_000 }];
    let highest = |gamma| {
        let training = Training { gamma, features: Features::Batches(4), ..short(1) };
        let network = double_dqn(&setup, &calm, &training).dqn.network;
        // All engines are idle, and the class is the first; the rate is 0.
        let mut input = vec![0.0; network.inputs()];
        input[12] = 1.0;
        network.forward(&input, &mut Activations::default()).iter().copied().fold(0.0, f32::max)
    };
    let (now, later) = (highest(0.0), highest(0.8));
    assert!((0.9..1.1).contains(&now) && (4.5..5.3).contains(&later), "{now} and {later}");
}

#[test]
fn without_requests_there_is_nothing_to_learn() {
    let setup = Setup::paper();
    assert!(double_dqn(&setup, &[], &short(1)).losses.iter().all(|loss| *loss == 0.0));
    let silent = Workload::Stable { requests_per_sec: 1.0, duration_ns: 0 };
    assert!(double_dqn(&setup, &[silent], &short(1)).rewards.iter().all(|reward| *reward == 0.0));
}
