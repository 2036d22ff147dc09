//! Plans of model serving: which model answers a request, on simulated engines (`sched::route::serving`).
//!
//! They lie beside the plans of networks and have `kind = "serving"`. They use no clock, so that a seed reproduces every
//! figure to the last digit on any machine with the same arithmetic.

mod recipe;
#[cfg(test)]
mod tests;
mod validity;
mod workload;

use std::collections::BTreeMap;

use sched::route::{self, Cost, serving};
use serde::Deserialize;
use toml::Table;

pub use self::{
    recipe::{Dqn, Inputs, Tuned},
    validity::{METRICS, whole},
    workload::{Arrivals, Workload},
};
use super::{Class, Scheduler, Verdict, variants};

/// One experiment with models, or one variant of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServingPlan {
    /// The name, the same as the file's.
    pub name: String,
    /// Distinguishes these plans from plans of networks.
    pub kind: Kind,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The figures, tables and sections it reproduces.
    pub source: String,
    /// The seeds of randomness.
    pub seeds: Seeds,
    /// How many GPUs there are, each with an engine for each model.
    pub gpus: u32,
    /// How much another fully busy engine on the same GPU slows one down: 0 not at all, 1 by half.
    pub sharing: f64,
    /// The time for each token of an answer, in milliseconds.
    pub per_token_ms: f64,
    /// Whether engines drop a request that is already too late when its place in a batch becomes free.
    #[serde(default)]
    pub discards: bool,
    /// How long prompts and answers are.
    pub lengths: Lengths,
    /// The models that can answer, the best first.
    pub models: Vec<Model>,
    /// The tasks of requests; all are equally frequent.
    pub tasks: Vec<Task>,
    /// Latency of the network, if any: drawn for each request, whatever the load.
    pub latency: Option<Latency>,
    /// A link that all requests and answers share, if there is one.
    pub link: Option<Link>,
    /// When requests come.
    pub workloads: Vec<Workload>,
    /// The coefficient of variation of the times between requests at a constant rate: 1 for a Poisson process, 0 for equal times.
    #[serde(default = "poisson")]
    pub gap_variation: f64,
    /// How many consecutive requests form a window.
    #[serde(default = "window")]
    pub window: usize,
    /// Whether policies learn with costs and lengths as a gateway learns them, instead of the true costs and the true mean length.
    #[serde(default)]
    pub learned_costs: bool,
    /// How thresholds are tuned, by name.
    #[serde(default)]
    pub tuned: BTreeMap<String, Tuned>,
    /// How networks are trained, by name.
    #[serde(default)]
    pub dqn: BTreeMap<String, Dqn>,
    /// The policies that are compared.
    pub policies: Vec<Policy>,
    /// The paper's figures.
    #[serde(default)]
    pub published: Vec<Published>,
    /// What policies that learn should reach; tables say whether they do.
    #[serde(default)]
    pub goals: Goals,
    /// What the results say about the paper's claims.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Tables with this plan's structure that contain only the changed keys.
    #[serde(default)]
    variants: BTreeMap<String, Table>,
    /// The name of this variant.
    #[serde(skip, default = "variants::base")]
    pub variant: String,
    /// The TOML table that variants change.
    #[serde(skip)]
    table: Table,
}

const fn window() -> usize {
    20
}

const fn poisson() -> f64 {
    1.0
}

/// The kind of a plan.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Models that answer requests.
    Serving,
}

/// The seeds of randomness. The three ranges must not overlap, so that no policy is evaluated on workloads that it learned
/// from.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seeds {
    /// The first seed of the evaluation.
    pub evaluation: u64,
    /// How many seeds the evaluation uses, counting up from the first.
    pub evaluations: u64,
    /// The seed of the first search for thresholds. A search draws the seeds of its workloads from a generator with this
    /// seed.
    pub tuning: u64,
    /// The same for the first training of a network.
    pub training: u64,
}

/// Log-normal lengths. Each answer is cut to 16 to 1000 tokens
/// ([`ANSWER_TOKENS`](sched::route::serving::Workload::ANSWER_TOKENS)); prompts have at least one token.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// The mean length of prompts, in tokens. With a link, classes give it in bytes instead.
    pub prompt_tokens: f64,
    /// The mean length of answers before they are cut, in tokens: from 16 to 1000.
    pub output_tokens: f64,
    /// The standard deviation of the logarithm of both.
    pub sigma: f64,
    /// Whether the router knows the length of each answer, or only the mean.
    #[serde(default)]
    pub known: bool,
}

/// A model, with an engine on each GPU. Times are in milliseconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name in results.
    pub name: String,
    /// The reward for an answer in time, by task.
    pub rewards: Vec<f32>,
    /// The largest batch.
    pub most_running: u32,
    /// How long a step takes on the host.
    pub host_ms: f64,
    /// How long a step takes on the GPU, whatever the batch.
    pub gpu_ms: f64,
    /// How much each sequence of the batch adds.
    pub gpu_per_sequence_ms: f64,
    /// How long a prompt takes, whatever its length.
    pub prefill_ms: f64,
    /// How much each of its tokens adds.
    pub prefill_per_token_ms: f64,
}

/// A task.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Its name in results.
    pub name: String,
    /// The weight of its rewards while policies learn. Reported scores weigh all tasks equally.
    #[serde(default = "unit")]
    pub weight: f32,
    /// With a link: the names of its classes, which are equally frequent.
    #[serde(default)]
    pub classes: Vec<String>,
}

const fn unit() -> f32 {
    1.0
}

/// Latency between clients and gateway; see `sched::route::serving::Network`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latency {
    /// The least time of each direction.
    pub one_way_ms: f64,
    /// The fraction of requests whose path is congested.
    pub congested: f64,
    /// The mean time that congestion adds on the path to the gateway.
    pub extra_up_ms: f64,
    /// The mean time that it adds on the path back.
    pub extra_back_ms: f64,
    /// The time that deadlines allow for the network.
    pub grace_ms: f64,
}

/// A link between clients and gateway, the same in both directions, which streams share packet by packet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its rate in each direction, in Mbit/s of packets.
    pub rate_mbit: f64,
    /// The fraction of packets that are lost, and sent again after a round trip.
    pub loss: f64,
    /// How long a packet travels, in each direction.
    pub delay_ms: f64,
    /// How many bytes an answer has for each of its tokens.
    pub bytes_per_token: f64,
    /// How many bytes of a request make one token of its prompt.
    pub bytes_per_prompt_token: f64,
    /// How many tokens prompt and answer may have together; longer prompts are truncated.
    pub context_tokens: u32,
    /// Whether deadlines include the time that a request's class allows for the network, or only the time for tokens.
    pub allows_for_network: bool,
    /// The schedulers of both ends, which choose the stream with the next turn.
    pub schedulers: Vec<Scheduler>,
    /// The scheduling parameters of requests. A deadline is the time that the network has for the request.
    pub classes: Vec<Class>,
}

/// A policy that is compared.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Its name in results.
    pub name: String,
    /// How it chooses a model.
    pub choose: Choose,
    /// Whether the router's guard is active: a model that is predicted late is not chosen while another is predicted in
    /// time.
    #[serde(default)]
    pub guarded: bool,
    /// Whether the policy is not told how long a request spent in the network and how long the way back takes.
    #[serde(default)]
    pub blind: bool,
}

/// How models are chosen; see `sched::route::RoutingPolicy`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Choose {
    /// Always this model.
    Fixed(String),
    /// Engines in turns.
    RoundRobin,
    /// The engine with the fewest requests.
    LeastLoaded,
    /// The best model that would be predicted in time if all took this many times as long.
    Rule(f64),
    /// Thresholds, tuned by the recipe of this name.
    Tuned(String),
    /// A network, trained by the recipe of this name.
    Dqn(String),
}

/// What policies that learn should reach. A goal that is absent is not in the tables.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct Goals {
    /// How far the score may be below that of the best model alone, at each steady rate.
    pub below_best: Option<f64>,
    /// A high rate at which most deadlines are met.
    pub heavy: Option<Heavy>,
    /// The mean score under EDF on the link.
    pub edf_score: Option<f64>,
}

/// The goal at a high steady rate: so many deadlines are met, and the score is above that of the best model alone.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Heavy {
    /// Requests per second.
    pub rate: f64,
    /// The percentage of deadlines that should be met.
    pub met_pct: f64,
    /// Why this rate, in a few words.
    pub reason: String,
}

/// A figure that the paper gives.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The name of the workload.
    pub workload: String,
    /// The link's scheduler, if there is a link.
    pub scheduler: Option<Scheduler>,
    /// The name of the policy.
    pub policy: String,
    /// The name of the metric, as in results.
    pub metric: String,
    /// The value, in the metric's unit.
    pub value: f64,
}

variants::varied!(ServingPlan);

impl ServingPlan {
    /// Returns the setup of the simulation.
    #[must_use]
    pub fn setup(&self) -> serving::Setup {
        let ns = |ms: f64| ms * 1e6;
        let cost = |model: &Model| Cost {
            host_ns: ns(model.host_ms),
            gpu_ns: ns(model.gpu_ms),
            gpu_per_sequence_ns: ns(model.gpu_per_sequence_ms),
            prefill_ns: ns(model.prefill_ms),
            prefill_per_token_ns: ns(model.prefill_per_token_ms),
            sharing: self.sharing,
        };
        let engine = |group, (at, model): (usize, &Model)| serving::SimulatedEngine {
            model: at,
            group,
            most_running: model.most_running,
            cost: cost(model),
        };
        let engines = (0..self.gpus).flat_map(|group| self.models.iter().enumerate().map(move |at| engine(group, at)));
        let Lengths { prompt_tokens, output_tokens, sigma, known } = self.lengths;
        let latency = |latency: &Latency| serving::Network {
            one_way_ns: ns(latency.one_way_ms) as u64,
            congested: latency.congested,
            extra_up_ns: ns(latency.extra_up_ms) as u64,
            extra_back_ns: ns(latency.extra_back_ms) as u64,
            grace_ns: ns(latency.grace_ms) as u64,
        };
        serving::Setup {
            models: (0..)
                .zip(&self.models)
                .map(|(id, model)| route::Model { id, rewards: model.rewards.clone() })
                .collect(),
            engines: engines.collect(),
            weights: self.tasks.iter().map(|task| task.weight).collect(),
            lengths: serving::Lengths { prompt_tokens, output_tokens, sigma, known },
            per_token_ns: ns(self.per_token_ms) as u64,
            network: self.latency.as_ref().map(latency),
            knowledge: serving::Knowledge::Given,
            discards: self.discards,
            gap_variation: self.gap_variation,
        }
    }

    /// Returns the setup in which the policies for `setup` learn.
    #[must_use]
    pub fn training_setup(&self, setup: &serving::Setup) -> serving::Setup {
        let knowledge = if self.learned_costs { serving::Knowledge::Learned } else { setup.knowledge };
        serving::Setup { knowledge, ..setup.clone() }
    }

    /// The schedulers of the link, or a single `None` without a link.
    #[must_use]
    pub fn schedulers(&self) -> Vec<Option<Scheduler>> {
        match &self.link {
            Some(link) => link.schedulers.iter().copied().map(Some).collect(),
            None => vec![None],
        }
    }

    /// The published value of a metric. Returns `None` if the paper gives none.
    #[must_use]
    pub fn published(&self, workload: &str, scheduler: Option<Scheduler>, policy: &str, metric: &str) -> Option<f64> {
        let wanted = (workload, scheduler, policy, metric);
        let same = |p: &&Published| (p.workload.as_str(), p.scheduler, p.policy.as_str(), p.metric.as_str()) == wanted;
        self.published.iter().find(same).map(|published| published.value)
    }

    /// The index of a model by its name.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<usize> {
        self.models.iter().position(|model| model.name == name)
    }
}
