//! Plans of model serving: which model answers, on simulated engines (`sched::route::serving`).
//!
//! They lie beside the plans of networks and are told apart by `kind = "serving"`. Nothing in them takes time on a clock, so
//! that a seed repeats every figure to the last digit on any machine with the same arithmetic.

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
    validity::METRICS,
    workload::{Arrivals, Workload},
};
use super::{Class, Scheduler, Verdict, variants};

/// One experiment with models, or one variant of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServingPlan {
    /// The same as the file's.
    pub name: String,
    /// What tells these plans from those of networks.
    pub kind: Kind,
    /// What it is, in a sentence.
    pub title: String,
    /// The figures, tables and sections it reproduces.
    pub source: String,
    /// Where chance begins.
    pub seeds: Seeds,
    /// How many GPUs there are, each with an engine for each model.
    pub gpus: u32,
    /// How much a whole other engine on the same GPU slows one down: 0 not at all, 1 by half.
    pub sharing: f64,
    /// The time for each token of an answer, in milliseconds.
    pub per_token_ms: f64,
    /// Whether engines drop a request that is too late already when its place in a batch is free.
    #[serde(default)]
    pub discards: bool,
    /// How long prompts and answers are.
    pub lengths: Lengths,
    /// What can answer, the best first.
    pub models: Vec<Model>,
    /// What is asked; each task is as frequent as any other.
    pub tasks: Vec<Task>,
    /// Latency of the network, if there is any: drawn for each request, whatever the load.
    pub latency: Option<Latency>,
    /// A link that all requests and answers share, if there is one.
    pub link: Option<Link>,
    /// When requests come.
    pub workloads: Vec<Workload>,
    /// How many consecutive requests a window has.
    #[serde(default = "window")]
    pub window: usize,
    /// How thresholds are tuned, by name.
    #[serde(default)]
    pub tuned: BTreeMap<String, Tuned>,
    /// How networks are trained, by name.
    #[serde(default)]
    pub dqn: BTreeMap<String, Dqn>,
    /// What is compared.
    pub policies: Vec<Policy>,
    /// What the paper says.
    #[serde(default)]
    pub published: Vec<Published>,
    /// What the results say about it.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Tables like this one's, with only what they change.
    #[serde(default)]
    variants: BTreeMap<String, Table>,
    /// Which variant this is.
    #[serde(skip, default = "super::base")]
    pub variant: String,
    /// The text that variants change.
    #[serde(skip)]
    table: Table,
}

const fn window() -> usize {
    20
}

/// What kind of plan it is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Models that answer requests.
    Serving,
}

/// Where chance begins. The three ranges must not meet, so that nothing is reported on what it has learned from.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seeds {
    /// The first seed that is reported on.
    pub evaluation: u64,
    /// How many; further ones count up.
    pub evaluations: u64,
    /// Of the first search for thresholds. A search draws the seeds of its workloads by chance that begins here.
    pub tuning: u64,
    /// The same of the first training of a network.
    pub training: u64,
}

/// Log-normal lengths.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// The mean of prompts, in tokens. With a link, classes say it in bytes instead.
    pub prompt_tokens: f64,
    /// The mean of answers, in tokens.
    pub output_tokens: f64,
    /// The deviation of the logarithm of both.
    pub sigma: f64,
    /// Whether the router knows the length of each answer, or the mean only.
    #[serde(default)]
    pub known: bool,
}

/// A model, with an engine on each GPU. Times are in milliseconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name in results.
    pub name: String,
    /// What an answer in time is worth, by task.
    pub rewards: Vec<f32>,
    /// The largest batch.
    pub most_running: u32,
    /// What a step takes on the host.
    pub host_ms: f64,
    /// What a step takes on the GPU, whatever the batch.
    pub gpu_ms: f64,
    /// What each sequence of the batch adds.
    pub gpu_per_sequence_ms: f64,
    /// What a prompt takes, whatever its length.
    pub prefill_ms: f64,
    /// What each of its tokens adds.
    pub prefill_per_token_ms: f64,
}

/// A task.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Its name in results.
    pub name: String,
    /// How much its rewards count while policies learn. Scores that are reported count all tasks alike.
    #[serde(default = "unit")]
    pub weight: f32,
    /// With a link: the names of its classes, each as frequent as any other.
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
    /// What each way takes at least.
    pub one_way_ms: f64,
    /// The part of requests whose path is congested.
    pub congested: f64,
    /// What congestion adds on the way to the gateway, on average.
    pub extra_up_ms: f64,
    /// What it adds on the way back, on average.
    pub extra_back_ms: f64,
    /// What deadlines allow for the network.
    pub grace_ms: f64,
}

/// A link between clients and gateway, the same in both directions, which streams share packet by packet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its rate in each direction, in Mbit/s of packets.
    pub rate_mbit: f64,
    /// The part of packets that is lost, and sent again after a round trip.
    pub loss: f64,
    /// How long a packet travels, in each direction.
    pub delay_ms: f64,
    /// How many bytes an answer has for each of its tokens.
    pub bytes_per_token: f64,
    /// How many bytes of a request are one token of its prompt.
    pub bytes_per_prompt_token: f64,
    /// How many tokens prompt and answer may have together; longer prompts are cut off.
    pub context_tokens: u32,
    /// Whether deadlines allow for what the class of a request allows for the network, or for tokens only.
    pub allows_for_network: bool,
    /// Who has the next turn, at both ends.
    pub schedulers: Vec<Scheduler>,
    /// What requests are to the schedulers. A deadline is the time that the network has for the request.
    pub classes: Vec<Class>,
}

/// What is compared.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Its name in results.
    pub name: String,
    /// How it chooses.
    pub choose: Choose,
    /// Whether the router's guard is in force: a model that is predicted late is not chosen while another is in time.
    #[serde(default)]
    pub guarded: bool,
    /// Whether the time that a request has spent in the network, and the way back, are kept from it.
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
    /// The best model that is predicted in time if all took this many times as long.
    Rule(f64),
    /// Thresholds, tuned by the recipe of this name.
    Tuned(String),
    /// A network, trained by the recipe of this name.
    Dqn(String),
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
    /// What is simulated.
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
            guess: None,
            discards: self.discards,
        }
    }

    /// What the schedulers of the link are, or one that is nothing where there is no link.
    #[must_use]
    pub fn schedulers(&self) -> Vec<Option<Scheduler>> {
        match &self.link {
            Some(link) => link.schedulers.iter().copied().map(Some).collect(),
            None => vec![None],
        }
    }

    /// The published value of a metric, where there is one.
    #[must_use]
    pub fn published(&self, workload: &str, scheduler: Option<Scheduler>, policy: &str, metric: &str) -> Option<f64> {
        let wanted = (workload, scheduler, policy, metric);
        let same = |p: &&Published| (p.workload.as_str(), p.scheduler, p.policy.as_str(), p.metric.as_str()) == wanted;
        self.published.iter().find(same).map(|published| published.value)
    }

    /// The place of a model by its name.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<usize> {
        self.models.iter().position(|model| model.name == name)
    }
}
