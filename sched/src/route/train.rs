//! Training of networks by double deep Q-learning on simulated engines (the paper, §4.2).
//!
//! A decision is a step: its state consists of the features, its action is the model, its reward the worth of the answer.
//! The next state is that of the next request. Rewards come late, so a step is stored once both are known. Target values
//! are `r + γ · Q'(s', argmax Q(s', ·))`, where `Q'` is an older copy of `Q` (van Hasselt et al.: "Deep Reinforcement
//! Learning with Double Q-learning", AAAI 2016).

mod adam;
mod learner;
mod replay;

pub use adam::{Adam, Gradient};
use learner::Learner;

use super::{
    features::Features,
    policy::Dqn,
    serving::{Arrival, Setup, Workload, run},
};
use crate::random::Random;

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

/// Trains a network on episodes of these workloads, drawing one workload for each episode. They have to include sustained
/// high rates: a network that has only seen short bursts fails at those.
///
/// Each request is a step of the simulation and, after the warm-up, an update. If no workload has requests, the result is
/// an untrained network.
#[must_use]
pub fn double_dqn(setup: &Setup, workloads: &[Workload], training: &Training) -> Trained {
    double_dqn_on(setup, training, |random| {
        let workload = workloads.get(random.below(workloads.len()))?;
        Some(workload.arrivals(setup, random.bits()))
    })
}

/// Trains a network on episodes from `draw`, as [`double_dqn`] does; training ends early when `draw` returns `None`.
#[must_use]
pub fn double_dqn_on(
    setup: &Setup,
    training: &Training,
    mut draw: impl FnMut(&mut Random) -> Option<Vec<Arrival>>,
) -> Trained {
    let mut random = Random::new(training.seed);
    let mut learner = Learner::new(setup, training, random.bits());
    let mut idle = 0;
    while !learner.is_done() && idle < 1_000 {
        let Some(arrivals) = draw(&mut random) else { break };
        idle = if arrivals.is_empty() { idle + 1 } else { 0 };
        run(setup, &arrivals, &mut learner);
        learner.end_episode();
    }
    learner.into_trained()
}

#[cfg(test)]
mod tests;
