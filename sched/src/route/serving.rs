//! Simulated engines on GPUs, on which policies are compared, tuned and trained.
//!
//! An engine gives all its running sequences one token per step, up to a largest batch; further requests wait in order of
//! arrival. Reading a prompt stops the whole engine (prefill first, as in early vLLM: Kwon et al., SOSP 2023). A step takes
//! as long as [`Cost`] says, so it is slower while other engines use the same GPU. The simulation treats steps as a fluid:
//! it moves from event to event (an arrival, the end of a prompt, a last token), not from step to step.
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
pub use score::{Fate, RunOutcome, mean_score};
#[cfg(test)]
pub(crate) use workload::RATES;
pub use workload::{Arrival, Workload};

use super::{
    curve::{Cost, Curve},
    request::Model,
    state::{EngineLoad, Replica},
};

/// The simulated system.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// The models, with rewards by class.
    pub models: Vec<Model>,
    /// The engines. Engines on one GPU have the same group.
    pub engines: Vec<SimulatedEngine>,
    /// The weight of requests, by class; all classes are equally frequent.
    pub weights: Vec<f32>,
    /// The lengths of prompts and answers.
    pub lengths: Lengths,
    /// An answer has this much time for each of its tokens, from the client's request to the arrival of the last token
    /// there.
    pub per_token_ns: u64,
    /// The network between clients and gateway; without it only the engines take time.
    pub network: Option<Network>,
    /// What the router knows of costs, and of the mean length of answers if lengths are not known in advance.
    pub knowledge: Knowledge,
    /// Whether a request that is already too late is dropped when its place in a batch becomes free.
    pub discards: bool,
    /// The coefficient of variation of the times between requests, which have a gamma distribution. With 1, requests at a constant rate are
    /// a Poisson process.
    pub gap_variation: f64,
}

/// What a router knows of engines and answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Knowledge {
    /// The true costs and the true mean length.
    Given,
    /// It begins with this cost for every engine and with the true mean length, and learns from answers.
    Guessed(Cost),
    /// It begins with what a gateway has learned of idle engines, which cannot tell the host's part of a step from the GPU's, and with the
    /// true mean length. It goes on learning from answers.
    Learned,
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
    /// The true cost of its work.
    pub cost: Cost,
}

/// Log-normal lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// The mean length of prompts.
    pub prompt_tokens: f64,
    /// The mean length of answers, which are between 16 and 1000 tokens.
    pub output_tokens: f64,
    /// The standard deviation of the logarithm of both.
    pub sigma: f64,
    /// Whether the router knows the length of an answer in advance, or only the mean. The time limit given to the router
    /// depends on it.
    pub known: bool,
}

/// A network between clients and gateway. **It is invented:** its defaults are not based on any measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// The least time of each way.
    pub one_way_ns: u64,
    /// The fraction of requests whose path is congested.
    pub congested: f64,
    /// The mean delay that congestion adds on the way to the gateway; it is distributed exponentially.
    pub extra_up_ns: u64,
    /// The mean delay that it adds on the way back. The router receives this mean as a backlog.
    pub extra_back_ns: u64,
    /// The time that the deadline allows for the network.
    pub grace_ns: u64,
}

impl Default for Network {
    /// Returns 50 ms each way; 3 in 10 requests take 3 s more on the way up and 1.5 s more on the way back. Deadlines allow
    /// 200 ms.
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
    /// table 1, and 40 ms for a token (§5.1.1). Steps of 22 + 3.6 b, 11 + 1.1 b and 7 + 0.28 b ms give figure 4's shape.
    /// The host's part of that is a guess: most of the constant part, since engines of the time launched kernels one by
    /// one.
    #[must_use]
    pub fn paper() -> Self {
        Self::on_four_gpus([
            (32, [8.0, 14.0, 3.6], [8.0, 0.12]),
            (64, [7.0, 4.0, 1.1], [4.0, 0.03]),
            (256, [6.0, 1.0, 0.28], [3.0, 0.006]),
        ])
    }

    /// Takes for each model the largest batch; the time of a step on the host, on the GPU, and for each sequence; the time
    /// of a prompt, and of each of its tokens. All times are in milliseconds.
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
            knowledge: Knowledge::Given,
            discards: false,
            gap_variation: 1.0,
        }
    }

    /// Returns how many classes there are.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.weights.len().max(1)
    }

    /// Whether the router learns from answers.
    fn is_learning(&self) -> bool {
        self.knowledge != Knowledge::Given
    }

    /// Returns what the router knows at first of the cost of an engine.
    fn known(&self, cost: Cost) -> Cost {
        match self.knowledge {
            Knowledge::Given => cost,
            Knowledge::Guessed(guess) => guess,
            Knowledge::Learned => Cost { host_ns: 0.0, gpu_ns: cost.host_ns + cost.gpu_ns, sharing: 0.0, ..cost },
        }
    }

    fn replicas(&self) -> Vec<Replica> {
        let replica = |engine: &SimulatedEngine| Replica {
            model: engine.model,
            group: engine.group,
            usable: true,
            most_running: engine.most_running,
            load: EngineLoad::default(),
            curve: Curve::new(self.known(engine.cost)),
        };
        self.engines.iter().map(replica).collect()
    }
}

#[cfg(test)]
mod tests;
