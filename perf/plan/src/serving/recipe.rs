//! How policies learn.

use anyhow::Result;
use routing::Measured;
use sched::route::{Features, train::Training, tune::Search};
use serde::Deserialize;

use crate::bounds::{entries, within};

/// A search for thresholds by the cross-entropy method; see `sched::route::tune`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// The score for comparing thresholds.
    pub measure: Measured,
    /// How often the distribution is updated.
    pub generations: usize,
    /// How many candidates are drawn each time.
    pub candidates: usize,
    /// How many of the best candidates update it.
    pub elites: usize,
    /// How many searches there are, each with its own seed.
    pub trainings: u64,
    /// The names of the workloads to learn from.
    pub learns_from: Vec<String>,
}

/// A training of a network by double deep Q-learning; see `sched::route::train::Training`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dqn {
    /// The inputs of the network.
    pub features: Inputs,
    /// The sizes of its hidden layers.
    pub hidden: Vec<usize>,
    /// The number of updates.
    pub updates: u64,
    /// How many steps each update learns from.
    pub batch: usize,
    /// How many steps are remembered.
    pub replay: usize,
    /// After how many steps learning begins.
    pub warm_up: usize,
    /// The discount factor for a reward one request later.
    pub gamma: f32,
    /// Adam's learning rate, at the beginning and at the end.
    pub learning_rate: [f32; 2],
    /// The fraction of random actions, at the beginning and from half of the time on.
    pub epsilon: [f64; 2],
    /// After how many updates the target network is replaced.
    pub target_every: u64,
    /// How many trainings there are, each with its own seed.
    pub trainings: u64,
    /// The names of the workloads to learn from.
    pub learns_from: Vec<String>,
}

/// The inputs of a network; see `sched::route::Features`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Inputs {
    /// The paper's state: batches, task, rate.
    Batches,
    /// The same, and predictions, budget and weight.
    Predictions,
}

impl Tuned {
    /// Checks that its values are within bounds.
    pub(super) fn check(&self, name: &str) -> Result<()> {
        let Self { generations, candidates, elites, .. } = *self;
        within(format_args!("recipe {name}: `generations`"), generations, 1..=10_000)?;
        within(format_args!("recipe {name}: `candidates`"), candidates, 1..=100_000)?;
        within(format_args!("recipe {name}: `elites`"), elites, 1..=candidates)
    }

    /// Returns the search that starts from a seed.
    #[must_use]
    pub fn search(&self, seed: u64) -> Search {
        let Self { generations, candidates, elites, .. } = *self;
        Search { generations, candidates, elites, seed, ..Search::default() }
    }
}

impl Dqn {
    /// Checks that its values are within bounds.
    pub(super) fn check(&self, name: &str) -> Result<()> {
        let key = |key: &str| format!("recipe {name}: `{key}`");
        entries(key("hidden"), self.hidden.len(), 0..=8)?;
        self.hidden.iter().try_for_each(|size| within(key("hidden"), *size, 1..=4_096))?;
        within(key("updates"), self.updates, 1..=100_000_000)?;
        within(key("batch"), self.batch, 1..=65_536)?;
        within(key("replay"), self.replay, self.batch..=10_000_000)?;
        within(key("warm_up"), self.warm_up, 0..=self.replay)?;
        within(key("gamma"), self.gamma, 0.0..=1.0)?;
        self.learning_rate.iter().try_for_each(|rate| within(key("learning_rate"), *rate, 0.0..=1.0))?;
        self.epsilon.iter().try_for_each(|share| within(key("epsilon"), *share, 0.0..=1.0))?;
        within(key("target_every"), self.target_every, 1..=100_000_000)
    }

    /// Returns the training that starts from a seed, with `replicas` replicas of each model.
    #[must_use]
    pub fn training(&self, replicas: u32, seed: u64) -> Training {
        let [learning_rate, last_learning_rate] = self.learning_rate;
        let [epsilon, last_epsilon] = self.epsilon;
        Training {
            features: match self.features {
                Inputs::Batches => Features::Batches(replicas as usize),
                Inputs::Predictions => Features::Predictions,
            },
            hidden: self.hidden.clone(),
            iterations: self.updates,
            batch: self.batch,
            replay: self.replay,
            warm_up: self.warm_up,
            gamma: self.gamma,
            learning_rate,
            last_learning_rate,
            epsilon,
            last_epsilon,
            target_every: self.target_every,
            seed,
        }
    }
}
