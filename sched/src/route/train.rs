//! Networks, trained by double deep Q-learning on simulated engines (the paper, §4.2).
//!
//! A decision is a step: its state are the features, its action is the model, its reward what the answer turns out to be
//! worth. The next state is that of the next request. Rewards come late, so a step is remembered when both are known. Values
//! for learning are `r + γ · Q'(s', argmax Q(s', ·))`, where `Q'` is an older copy of `Q` (van Hasselt et al.: "Deep
//! Reinforcement Learning with Double Q-learning", AAAI 2016).

mod adam;
mod learner;
mod replay;

pub use adam::{Adam, Gradient};

use super::features::Features;
use super::policy::Dqn;
use super::random::Random;
use super::serving::{Arrival, Setup, Workload, run};
use learner::Learner;

/// How to train. [`Training::paper`] has what the paper says; it leaves open what is marked so.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// What the network sees.
    pub features: Features,
    /// The hidden layers' sizes.
    pub hidden: Vec<usize>,
    /// How many updates of the network.
    pub iterations: u64,
    /// How many steps each update learns from (open).
    pub batch: usize,
    /// How many steps are remembered (open).
    pub replay: usize,
    /// After how many steps learning begins (open).
    pub warm_up: usize,
    /// What a reward is worth one request later, from 0 to 1.
    pub gamma: f32,
    /// The rate of Adam at the beginning.
    pub learning_rate: f32,
    /// The rate at the end, which it reaches in a straight line.
    pub last_learning_rate: f32,
    /// The part of random actions at the beginning (open).
    pub epsilon: f64,
    /// That part from [half](Training::iterations) of the time on, to which it falls in a straight line (open).
    pub last_epsilon: f64,
    /// After how many updates the older copy is renewed.
    pub target_every: u64,
    /// Where chance begins.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// The policy.
    pub dqn: Dqn,
    /// The mean loss of each tenth of the time.
    pub losses: Vec<f64>,
    /// The mean weighted reward of each tenth of the time, exploration included.
    pub rewards: Vec<f64>,
}

impl Training {
    /// Returns the paper's recipe (§4.2 and §5.1.1): two layers of 256, double DQN with a copy every 500 updates, a discount
    /// of 0.99, a rate of 0.0001, and 1.2 million updates. What it does not say is chosen here: 32 steps a batch, a memory of
    /// 50,000, ε from 1 to 0.02.
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

/// Trains a network on episodes of these workloads, one of them drawn for each. Sustained high rates have to be among them:
/// a network that has only seen short bursts fails there.
///
/// Each request is a step of the simulation and, after the warm-up, an update. With no workload that has requests it returns
/// an untrained network.
#[must_use]
pub fn double_dqn(setup: &Setup, workloads: &[Workload], training: &Training) -> Trained {
    double_dqn_on(setup, training, |random| {
        let workload = workloads.get(random.below(workloads.len()))?;
        Some(workload.arrivals(setup, random.bits()))
    })
}

/// Trains a network on episodes that `draw` gives, as [`double_dqn`] does; it ends early when `draw` has no more.
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
