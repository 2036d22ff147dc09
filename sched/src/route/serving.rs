//! Engines on GPUs, simulated: what policies are compared, tuned and trained on.
//!
//! An engine gives all its running sequences one token per step, up to a largest batch; further requests wait in the order
//! in which they came. Reading a prompt stops the whole engine (prefill first, as in early vLLM: Kwon et al., SOSP 2023). A
//! step takes what [`Cost`] says, so it is slower while other engines use the same GPU. The simulation treats steps as a
//! fluid: it moves from event to event (an arrival, the end of a prompt, a last token), not from step to step.
//!
//! **The costs are not measured.** [`Setup::paper`] is fitted by hand to the rates at which the models of the paper's
//! figure 4 break down, so that agreement with its shape is by construction. Nothing absolute follows from it.

mod engine;
mod interval;
mod run;
mod score;
mod workload;

pub use interval::Interval;
pub use run::{Decide, run};
pub use score::{Fate, RunOutcome, mean_score, windows};
pub use workload::{Arrival, RATES, Workload};

use super::curve::{Cost, Curve};
use super::request::Model;
use super::state::{EngineLoad, Replica};

/// What is simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// The models, with rewards by class.
    pub models: Vec<Model>,
    /// The engines. Engines on one GPU have the same group.
    pub engines: Vec<SimulatedEngine>,
    /// The weight of requests, by class; each class is as frequent as any other.
    pub weights: Vec<f32>,
    /// How long prompts and answers are.
    pub lengths: Lengths,
    /// An answer has this much time for each of its tokens, from when the client asks to the last token there.
    pub per_token_ns: u64,
    /// The way between clients and gateway; without it nothing takes time but the engines.
    pub network: Option<Network>,
    /// What the router is told about costs at first: with nothing, the truth; else this for every engine, and it learns.
    pub guess: Option<Cost>,
    /// Whether a request that is too late already is dropped when its place in a batch is free.
    pub discards: bool,
}

/// One engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedEngine {
    /// The index of the model.
    pub model: usize,
    /// The GPU.
    pub group: u32,
    /// The largest batch.
    pub most_running: u32,
    /// What its work really costs.
    pub cost: Cost,
}

/// Log-normal lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// The mean of prompts.
    pub prompt_tokens: f64,
    /// The mean of answers, between 16 and 1000.
    pub output_tokens: f64,
    /// The deviation of the logarithm of both.
    pub sigma: f64,
    /// Whether the router knows the length of an answer before, or the mean only. The time limit that it is told follows.
    pub known: bool,
}

/// A network between clients and gateway. **It is invented:** no measurement stands behind its defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// What each way takes at least.
    pub one_way_ns: u64,
    /// The part of requests whose path is congested.
    pub congested: f64,
    /// What congestion adds on the way to the gateway, on average; it is distributed exponentially.
    pub extra_up_ns: u64,
    /// What it adds on the way back, on average. The router is told this mean as a backlog.
    pub extra_back_ns: u64,
    /// What the deadline allows for the network.
    pub grace_ns: u64,
}

impl Default for Network {
    /// Returns 50 ms each way; 3 in 10 requests have 3 s more on the way up and 1.5 s more on the way back. Deadlines allow
    /// for 200 ms.
    fn default() -> Self {
        const MS: u64 = 1_000_000;
        Self {
            one_way_ns: 50 * MS,
            congested: 0.3,
            extra_up_ns: 3_000 * MS,
            extra_back_ns: 1_500 * MS,
            grace_ns: 200 * MS,
        }
    }
}

impl Setup {
    /// Returns 4 GPUs with OPT-6.7B, OPT-1.3B and OPT-125M (in this order of models) on each, the four tasks of the paper's
    /// table 1, and 40 ms for a token (§5.1.1). Steps of 22 + 3.6 b, 11 + 1.1 b and 7 + 0.28 b ms give figure 4's shape. How much
    /// of that is the host's is a guess: most of what does not grow, since engines of the time launched kernels one by one.
    #[must_use]
    pub fn paper() -> Self {
        Self::on_four_gpus([
            (32, [8.0, 14.0, 3.6], [8.0, 0.12]),
            (64, [7.0, 4.0, 1.1], [4.0, 0.03]),
            (256, [6.0, 1.0, 0.28], [3.0, 0.006]),
        ])
    }

    /// Takes for each model the largest batch; what a step takes on the host, on the GPU, and for each sequence; what a
    /// prompt takes, and each of its tokens. All times are in milliseconds.
    fn on_four_gpus(models: [(u32, [f64; 3], [f64; 2]); 3]) -> Self {
        // Table 1: HellaSwag, COPA, PIQA, OpenBookQA.
        let rewards = [[1.0, 1.0, 1.0, 1.0], [0.78, 0.95, 0.96, 0.94], [0.45, 0.80, 0.82, 0.70]];
        let engine =
            |group, model, (most_running, [host, gpu, more], [prefill, per_token]): (u32, [f64; 3], [f64; 2])| {
                let cost = Cost {
                    host_ns: host * 1e6,
                    gpu_ns: gpu * 1e6,
                    gpu_per_sequence_ns: more * 1e6,
                    prefill_ns: prefill * 1e6,
                    prefill_per_token_ns: per_token * 1e6,
                    sharing: 0.5,
                };
                SimulatedEngine { model, group, most_running, cost }
            };
        let engines = (0..4).flat_map(|group| (0..).zip(models).map(move |(model, times)| engine(group, model, times)));
        Self {
            models: (0..).zip(rewards).map(|(id, rewards)| Model { id, rewards: rewards.to_vec() }).collect(),
            engines: engines.collect(),
            weights: vec![1.0; 4],
            lengths: Lengths { prompt_tokens: 100.0, output_tokens: 200.0, sigma: 0.5, known: false },
            per_token_ns: 40_000_000,
            network: None,
            guess: None,
            discards: false,
        }
    }

    /// Returns how many classes there are.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.weights.len().max(1)
    }

    fn replicas(&self) -> Vec<Replica> {
        let replica = |engine: &SimulatedEngine| Replica {
            model: engine.model,
            group: engine.group,
            usable: true,
            most_running: engine.most_running,
            load: EngineLoad::default(),
            curve: Curve::new(self.guess.unwrap_or(engine.cost)),
        };
        self.engines.iter().map(replica).collect()
    }
}

#[cfg(test)]
mod tests;
