//! The recipe of a training, with the paper's values, and what a training gives.

use crate::route::{features::Features, policy::Dqn};

/// How to train. [`Training::paper`] uses the paper's values; the paper leaves those marked "open" undefined.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The inputs of the network.
    pub features: Features,
    /// The hidden layers' sizes.
    pub hidden: Vec<usize>,
    /// The number of updates of the network.
    pub iterations: u64,
    /// How many steps each update learns from (open).
    pub batch: usize,
    /// How many steps are remembered (open).
    pub replay: usize,
    /// The number of stored steps at which learning begins (open).
    pub warm_up: usize,
    /// The discount of a reward one request later, from 0 to 1.
    pub gamma: f32,
    /// Adam's learning rate at the beginning.
    pub learning_rate: f32,
    /// The learning rate at the end, reached linearly.
    pub last_learning_rate: f32,
    /// The fraction of random actions at the beginning (open).
    pub epsilon: f64,
    /// The fraction of random actions from [half](Training::iterations) of the updates on, reached linearly (open).
    pub last_epsilon: f64,
    /// The number of updates after which the older copy is renewed.
    pub target_every: u64,
    /// The seed of all random choices.
    pub seed: u64,
}

/// The result of a training.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// The policy.
    pub dqn: Dqn,
    /// The mean loss in each tenth of the training.
    pub losses: Vec<f64>,
    /// The mean weighted reward in each tenth of the training, including exploration.
    pub rewards: Vec<f64>,
}

impl Training {
    /// Returns the paper's recipe (§4.2 and §5.1.1): two layers of 256, double DQN with a copy every 500 updates, a
    /// discount of 0.99, a learning rate of 0.0001, and 1.2 million updates. The open values are chosen here: 32 steps a
    /// batch, a memory of 50,000, learning from 1,000 steps on, ε from 1 to 0.02.
    #[must_use]
    pub fn paper() -> Self {
        Self {
            features: Features::Batches(4),
            hidden: vec![256, 256],
            iterations: 1_200_000,
            batch: 32,
            replay: 50_000,
            warm_up: 1_000,
            gamma: 0.99,
            learning_rate: 1e-4,
            last_learning_rate: 1e-4,
            epsilon: 1.0,
            last_epsilon: 0.02,
            target_every: 500,
            seed: 1,
        }
    }
}
