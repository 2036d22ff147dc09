//! Training of networks by double deep Q-learning on simulated engines (the paper, §4.2).
//!
//! A decision is a step: its state consists of the features, its action is the model, its reward the worth of the answer.
//! The next state is that of the next request. Rewards come late, so a step is stored once both are known. Target values
//! are `r + γ · Q'(s', argmax Q(s', ·))`, where `Q'` is an older copy of `Q` (van Hasselt et al.: "Deep Reinforcement
//! Learning with Double Q-learning", AAAI 2016).

mod adam;
mod learner;
mod recipe;
mod replay;

pub use adam::{Adam, Gradient};
use learner::Learner;
pub use recipe::{Trained, Training};

use super::serving::{Arrival, Setup, Workload, run};
use crate::random::Random;

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
