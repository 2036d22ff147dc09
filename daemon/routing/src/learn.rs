//! Policies that are tuned or trained on a scenario, and their scores on separate seeds.

use sched::route::{
    Random, Router, RoutingPolicy, Thresholds,
    serving::{Arrival, Fate, Interval, mean_score, run},
    train::{Trained, Training, double_dqn_on},
    tune::{Search, cross_entropy},
};

use crate::{Measured, policy::PolicyFile, scenario::Scenario};

/// The result of a policy at one rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateResult {
    /// The rate.
    pub requests_per_sec: f64,
    /// The mean worth of a request: the model's quality, from 0 to 1, for an answer in time, and 0 for a late one.
    pub score: Interval,
    /// The fraction of requests that were answered in time.
    pub met: Interval,
    /// The number of simulated requests, over all seeds.
    pub requests: usize,
}

/// The first seed of evaluations, so far from the seeds of learning that no search reaches it. Learning draws 64-bit seeds from a
/// random generator whose own seed is a small number.
pub const EVALUATION: u64 = 700_000;

/// Tunes thresholds for the mean score over all rates, with equal weights. The guard is off: the tuned thresholds must be good
/// without it.
#[must_use]
pub fn tune(scenario: &Scenario, measure: Measured, search: &Search) -> PolicyFile {
    let setup = scenario.setup();
    let (models, classes) = (setup.models.len(), setup.classes());
    let start = Thresholds::uniform(measure.measure(), models, classes, 0.9);
    let deviations = [(models * classes, 0.2), (models, 0.4), (1, 0.2)];
    let spread: Vec<f64> = deviations.into_iter().flat_map(|(count, spread)| vec![spread; count]).collect();
    let mut played: (Option<u64>, Vec<Vec<Arrival>>) = (None, Vec::new());
    let numbers = cross_entropy(search, &start.parameters(), &spread, |numbers, seed| {
        if played.0 != Some(seed) {
            played = (Some(seed), all_rates(scenario, seed));
        }
        let policy = RoutingPolicy::Thresholds(start.clone().with_parameters(numbers));
        let scores = played.1.iter().map(|arrivals| {
            let mut router = Router::new(setup.models.clone(), policy.clone()).unguarded();
            mean_score(&run(&setup, arrivals, &mut router))
        });
        scores.sum::<f64>() / played.1.len().max(1) as f64
    });
    file(scenario, RoutingPolicy::Thresholds(start.with_parameters(&numbers)))
}

/// Trains a network by double deep Q-learning, each episode at one of the rates. Also returns the progress.
#[must_use]
pub fn train(scenario: &Scenario, training: &Training) -> (PolicyFile, Trained) {
    let setup = scenario.setup();
    let rates = &scenario.requests_per_sec;
    let trained = double_dqn_on(&setup, training, |random| {
        let rate = rates.get(random.below(rates.len()))?;
        Some(scenario.arrivals(*rate, random.bits()))
    });
    (file(scenario, RoutingPolicy::Dqn(trained.dqn.clone())), trained)
}

/// Simulates a policy at each rate for `seeds` seeds from [`EVALUATION`] on. All policies get the same requests. The guard is on
/// as in a gateway, except over [`RoutingPolicy::Fixed`], which stands for clients that name their model.
#[must_use]
pub fn evaluate(scenario: &Scenario, policy: &RoutingPolicy, seeds: u64) -> Vec<RateResult> {
    let setup = scenario.setup();
    let at_rate = |rate: &f64| {
        let (mut scores, mut met, mut requests) = (Vec::new(), Vec::new(), 0);
        for seed in EVALUATION..EVALUATION + seeds {
            let arrivals = scenario.arrivals(*rate, seed);
            if arrivals.is_empty() {
                continue;
            }
            let router = Router::new(setup.models.clone(), policy.clone());
            let is_named = matches!(policy, RoutingPolicy::Fixed(_));
            let outcomes = run(&setup, &arrivals, &mut if is_named { router.unguarded() } else { router });
            let in_time = outcomes.iter().filter(|outcome| outcome.fate == Fate::Met).count();
            scores.push(mean_score(&outcomes));
            met.push(in_time as f64 / outcomes.len() as f64);
            requests += arrivals.len();
        }
        let share = |values: &[f64]| Interval::of(values).of_share(1.0);
        RateResult { requests_per_sec: *rate, score: share(&scores), met: share(&met), requests }
    };
    scenario.requests_per_sec.iter().map(at_rate).collect()
}

/// Returns the policy of a file, for the models of a scenario in their order.
///
/// # Errors
/// It is for other models or classes.
pub fn fit(scenario: &Scenario, file: &PolicyFile) -> anyhow::Result<RoutingPolicy> {
    file.check(&scenario.model_names())?;
    anyhow::ensure!(
        file.models == scenario.model_names() && file.classes == scenario.class_names(),
        "it is for the models {} and the classes {}, in this order; the scenario has {} and {}",
        file.models.join(", "),
        file.classes.join(", "),
        scenario.model_names().join(", "),
        scenario.class_names().join(", ")
    );
    Ok(file.policy.clone())
}

fn all_rates(scenario: &Scenario, seed: u64) -> Vec<Vec<Arrival>> {
    let mut seeds = Random::new(seed);
    scenario.requests_per_sec.iter().map(|rate| scenario.arrivals(*rate, seeds.bits())).collect()
}

fn file(scenario: &Scenario, policy: RoutingPolicy) -> PolicyFile {
    PolicyFile { models: scenario.model_names(), classes: scenario.class_names(), policy }
}

#[cfg(test)]
mod tests {
    use sched::route::Features;

    use super::*;

    fn scenario() -> Scenario {
        Scenario::parse(crate::scenario::tests::TWO).unwrap()
    }

    fn mean(rows: &[RateResult]) -> f64 {
        rows.iter().map(|row| row.score.mean).sum::<f64>() / rows.len() as f64
    }

    #[test]
    fn tuned_thresholds_are_for_the_scenario_and_no_worse_than_the_rule() {
        let scenario = scenario();
        let search = Search { generations: 8, candidates: 16, elites: 4, ..Search::default() };
        let tuned = tune(&scenario, Measured::Predicted, &search);
        assert_eq!(fit(&scenario, &tuned).unwrap(), tuned.policy);
        let again = PolicyFile::parse(&tuned.to_bytes("").unwrap()).unwrap();
        assert_eq!(again, tuned, "what is written is what was tuned");
        let score = |policy: &RoutingPolicy| mean(&evaluate(&scenario, policy, 4));
        let rows = evaluate(&scenario, &RoutingPolicy::Fixed(0), 2);
        let are_shares = |of: &Interval| (0.0..=1.0).contains(&of.low) && (0.0..=1.0).contains(&of.high);
        assert!(rows.iter().all(|row| are_shares(&row.score) && are_shares(&row.met)), "{rows:?}");
        let (tuned, rule) = (score(&tuned.policy), score(&RoutingPolicy::Rule { margin: 1.1 }));
        assert!(tuned >= rule, "{tuned} and {rule}");
        assert!(rule > score(&RoutingPolicy::Fixed(0)), "the large one alone is too slow for six a second");
    }

    #[test]
    fn a_trained_network_is_for_the_scenario() {
        let scenario = scenario();
        let training =
            Training { features: Features::Predictions, hidden: vec![16], iterations: 3_000, ..Training::paper() };
        let (file, trained) = train(&scenario, &training);
        assert_eq!(trained.losses.len(), 10);
        assert_eq!(PolicyFile::parse(&file.to_bytes("").unwrap()).unwrap(), file);
        assert!(mean(&evaluate(&scenario, &fit(&scenario, &file).unwrap(), 2)) > 0.3);
    }

    #[test]
    fn a_policy_of_another_scenario_does_not_fit() {
        let mut other = scenario();
        other.classes.reverse();
        let search = Search { generations: 0, ..Search::default() };
        let error = fit(&scenario(), &tune(&other, Measured::Fill, &search)).unwrap_err().to_string();
        assert!(error.contains("patient, interactive"), "{error}");
    }
}
