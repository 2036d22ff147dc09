//! Compares policies that choose models, on simulated engines:
//! `cargo run --release -p sched --example routing -- [paper|a100|network] [DQN UPDATES]`.
//!
//! Each line is a policy: the mean score over the paper's stable rates (12 rates of 40 s), the scores of the four highest of
//! them, the mean score of bursts over the same range and from 1 to 24 requests per second (3000 requests each), and for the
//! latter how many windows of 20 have a mean of at least 1, 0.99, 0.98, 0.96 and 0.94. Six seeds are played that no policy was
//! tuned or trained on; tuned and trained ones have a line for each seed of their search.

use sched::route::serving::{Network, RATES, Setup, Workload, mean_score, run, windows};
use sched::route::train::{Training, double_dqn};
use sched::route::tune::{Search, sweep, thresholds};
use sched::route::{Features, Measure, Policy, Router, Thresholds};

const SEEDS: std::ops::Range<u64> = 700_000..700_006;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (setup, scale) = match arguments.next().as_deref() {
        Some("a100") => (Setup::a100(), 12.0),
        Some("network") => (Setup { network: Some(Network::default()), ..Setup::paper() }, 1.0),
        _ => (Setup::paper(), 1.0),
    };
    let updates = arguments.next().and_then(|updates| updates.parse().ok()).unwrap_or(60_000);

    for (name, policy) in [
        ("6.7B", Policy::Fixed(0)),
        ("1.3B", Policy::Fixed(1)),
        ("125M", Policy::Fixed(2)),
        ("round robin", Policy::RoundRobin),
        ("least loaded", Policy::LeastLoaded),
        ("rule 1.0", Policy::Rule { margin: 1.0 }),
        ("rule 1.1", Policy::Rule { margin: 1.1 }),
        ("rule 1.25", Policy::Rule { margin: 1.25 }),
        ("untuned thresholds 0.9", Policy::Thresholds(Thresholds::uniform(Measure::Predicted, 3, 4, 0.9))),
    ] {
        print(name, &setup, scale, &policy, false);
    }
    let stable: Vec<_> = sweep().into_iter().map(|workload| faster(workload, scale)).collect();
    let mix: Vec<_> = stable.iter().copied().chain([bursts(0.25 * scale, 48.0 * scale)]).collect();
    for seed in 1..=3 {
        for (name, measure) in [("predicted", Measure::Predicted), ("fill", Measure::Fill)] {
            let tuned = thresholds(&setup, measure, &mix, &Search { seed, ..Search::default() });
            println!("# {tuned:.2?}");
            let policy = Policy::Thresholds(tuned);
            print(&format!("tuned {name}, seed {seed}"), &setup, scale, &policy, false);
            print(&format!("tuned {name}, seed {seed}, guard"), &setup, scale, &policy, true);
        }
    }
    for seed in 1..=3 {
        for (name, features) in [("batches", Features::Batches(4)), ("predictions", Features::Predictions)] {
            let training = Training {
                features,
                hidden: vec![64, 64],
                iterations: updates,
                learning_rate: 5e-4,
                last_learning_rate: 5e-5,
                seed,
                ..Training::paper()
            };
            let policy = Policy::Dqn(double_dqn(&setup, &mix, &training).dqn);
            print(&format!("dqn {name}, seed {seed}"), &setup, scale, &policy, false);
            print(&format!("dqn {name}, seed {seed}, guard"), &setup, scale, &policy, true);
        }
    }
}

fn faster(workload: Workload, scale: f64) -> Workload {
    match workload {
        Workload::Stable { requests_per_sec, duration_ns } => {
            Workload::Stable { requests_per_sec: requests_per_sec * scale, duration_ns }
        }
        other => other,
    }
}

const fn bursts(low_per_sec: f64, high_per_sec: f64) -> Workload {
    Workload::bursts(low_per_sec, high_per_sec, 3_000)
}

fn print(name: &str, setup: &Setup, scale: f64, policy: &Policy, guarded: bool) {
    let play = |workload: Workload, seed| {
        let router = Router::new(setup.models.clone(), policy.clone());
        let mut router = if guarded { router } else { router.unguarded() };
        run(setup, &workload.arrivals(setup, seed), &mut router)
    };
    let mean = |workload| SEEDS.map(|seed| mean_score(&play(workload, seed))).sum::<f64>() / SEEDS.count() as f64;
    let stable = RATES.map(|rate| mean(Workload::stable(rate * scale)));
    let wide = mean(bursts(0.25 * scale, 48.0 * scale));
    let narrow: Vec<_> = SEEDS.map(|seed| play(bursts(scale, 24.0 * scale), seed)).collect();
    let enough = [1.0, 0.99, 0.98, 0.96, 0.94]
        .map(|threshold| narrow.iter().map(|outcomes| windows(outcomes, 20, threshold)).sum::<usize>() / narrow.len());
    println!(
        "{name:32} {:.3} {:.2?} {wide:.3} {:.3} {enough:?}",
        stable.iter().sum::<f64>() / RATES.len() as f64,
        &stable[8..],
        narrow.iter().map(|outcomes| mean_score(outcomes)).sum::<f64>() / narrow.len() as f64,
    );
}
