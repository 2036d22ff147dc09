//! Plans: each describes one experiment, as TOML in `perf/plans/`.
//!
//! A plan names everything that decides its result. Its [variants](Plan::variant) change single keys, for what a paper leaves
//! open or for another network.

mod bounds;
mod clock;
mod file;
mod network;
pub mod paths;
pub mod processes;
mod scheduler;
pub mod serving;
pub mod stack;
#[cfg(test)]
mod tests;
pub mod trees;
mod validity;
mod variants;
mod verdict;
mod workload;

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use instruments::flood::Flood;
use serde::Deserialize;
use toml::Table;

use self::file::PlanFile;
pub use self::{
    clock::Clock,
    file::{is_path, names},
    network::{Congestion, Family, Network},
    paths::PathsPlan,
    processes::ProcessesPlan,
    scheduler::{Scheduler, named_once},
    serving::ServingPlan,
    stack::StackPlan,
    trees::TreesPlan,
    validity::{MAX_REPETITIONS, METRICS, whole},
    variants::{BASE, Varied},
    verdict::{Judgement, Verdict},
    workload::{Arrivals, Class, Engine, Level, Mix, Reader, Workload},
};

/// A plan of any kind.
#[derive(Clone, Debug)]
pub enum Any {
    /// Requests over a network.
    Network(Box<Plan>),
    /// Requests to models.
    Serving(Box<ServingPlan>),
    /// Streams over several paths.
    Paths(Box<PathsPlan>),
    /// Pages over several paths.
    Trees(Box<TreesPlan>),
    /// Single streams over the kernel's stack and over simulated paths.
    Stack(Box<StackPlan>),
    /// Requests to models, simulated and to processes.
    Processes(Box<ProcessesPlan>),
}

impl Any {
    /// Reads a plan by the name of its file in `perf/plans/`, or by its path.
    ///
    /// # Errors
    /// When there is no such file, the plan has another name, or [`Plan::from_toml`] or its counterpart of another kind fails.
    pub fn read(name: &str) -> Result<Self> {
        PlanFile::read(name)?.parse(Self::from_toml, Self::name)
    }

    /// Parses a plan of any kind. The key `kind` names the kind of every plan except those with a network.
    fn from_toml(text: &str) -> Result<Self> {
        Ok(match file::kind(text)?.as_ref().map(|kind| kind.as_str()) {
            None => Self::Network(Box::new(Plan::from_toml(text)?)),
            Some(Some("paths")) => Self::Paths(Box::new(PathsPlan::from_toml(text)?)),
            Some(Some("trees")) => Self::Trees(Box::new(TreesPlan::from_toml(text)?)),
            Some(Some("stack")) => Self::Stack(Box::new(StackPlan::from_toml(text)?)),
            Some(Some("processes")) => Self::Processes(Box::new(ProcessesPlan::from_toml(text)?)),
            Some(Some("serving")) => Self::Serving(Box::new(ServingPlan::from_toml(text)?)),
            Some(_) => {
                bail!("kind: known are paths, trees, stack, processes and serving; plans with a network have none")
            }
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Network(plan) => &plan.name,
            Self::Serving(plan) => &plan.name,
            Self::Paths(plan) => &plan.name,
            Self::Trees(plan) => &plan.name,
            Self::Stack(plan) => &plan.name,
            Self::Processes(plan) => &plan.name,
        }
    }

    /// Its title: what the plan measures.
    #[must_use]
    pub fn title(&self) -> &str {
        match self {
            Self::Network(plan) => &plan.title,
            Self::Serving(plan) => &plan.title,
            Self::Paths(plan) => &plan.title,
            Self::Trees(plan) => &plan.title,
            Self::Stack(plan) => &plan.title,
            Self::Processes(plan) => &plan.title,
        }
    }

    /// The publication that it reproduces, or `none` and the reason if nothing was published.
    #[must_use]
    pub fn source(&self) -> &str {
        match self {
            Self::Network(plan) => &plan.source,
            Self::Serving(plan) => &plan.source,
            Self::Paths(plan) => &plan.source,
            Self::Trees(plan) => &plan.source,
            Self::Stack(plan) => &plan.source,
            Self::Processes(plan) => &plan.source,
        }
    }

    /// Whether it repeats a paper's measurement.
    #[must_use]
    pub fn is_of_a_paper(&self) -> bool {
        !self.source().starts_with("none")
    }

    /// What its results say about the published claims.
    #[must_use]
    pub fn verdicts(&self) -> &[Verdict] {
        match self {
            Self::Network(plan) => &plan.verdicts,
            Self::Serving(plan) => &plan.verdicts,
            Self::Paths(plan) => &plan.verdicts,
            Self::Trees(plan) => &plan.verdicts,
            Self::Stack(plan) => &plan.verdicts,
            Self::Processes(plan) => &plan.verdicts,
        }
    }
}

/// One experiment with a network, or one variant of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The name, the same as the file's.
    pub name: String,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The figures and sections it reproduces.
    pub source: String,
    /// The parties between client and server.
    pub topology: Topology,
    /// Where it can run; the first is the default.
    pub clocks: Vec<Clock>,
    /// The congestion controller of the connection that crosses the link. Inside tunnels it is CUBIC, unless
    /// [`Tunnel::inner_congestion`] names another.
    #[serde(default)]
    pub congestion: Congestion,
    /// How much earlier a packet may leave in order to share a message, in microseconds; the product's default if absent.
    pub quantum_us: Option<u64>,
    /// The shortest round trip of paced paths, in microseconds; the product's default if absent.
    pub min_paced_rtt_us: Option<u64>,
    /// The seed of the first repetition; each further one has the next.
    pub seed: u64,
    /// How often each scheduler runs.
    pub repetitions: u64,
    /// The same in the lab, where runs take long.
    pub lab_repetitions: Option<u64>,
    /// The schedulers that are compared.
    pub schedulers: Vec<Scheduler>,
    /// Schedulers that are compared only in the lab, because they need a kernel.
    #[serde(default)]
    pub lab_schedulers: Vec<Scheduler>,
    /// The link between the client and the next machine.
    pub network: Network,
    /// The tunnels, if there is a relay.
    #[serde(default)]
    pub tunnel: Tunnel,
    /// The IP version, for topologies in which no connection determines it.
    #[serde(default)]
    pub family: Family,
    /// The engine that answers requests, if they are requests to a model.
    pub engine: Option<Engine>,
    /// The packets that an attacker sends.
    pub flood: Option<Flood>,
    /// What the client does.
    pub workload: Workload,
    /// The kinds of requests.
    pub classes: Vec<Class>,
    /// The paper's figures.
    #[serde(default)]
    pub published: Vec<Published>,
    /// What the results say about the paper's claims.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Queues for which the time to manage many streams is measured as well.
    #[serde(default)]
    pub queues: Vec<ManagedBy>,
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

/// The parties between client and server.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// None: requests are streams of one QUIC connection.
    Direct,
    /// None: UDP of classes whose rate the kernel caps, as fast as possible.
    Marked,
    /// A relay: QUIC connections to the server run inside streams of one connection to the relay.
    Masque,
    /// A relay or none: a server sends objects over QUIC connections, each with its own tunnel to the relay.
    Tunnelled,
    /// A relay: payloads of many clients, which the target returns.
    Workers,
    /// A relay: a client's payloads, one way at a fixed rate, while an attacker floods the relay.
    Attacked,
    /// A gateway for models: answers of its engine, token by token.
    Served,
}

/// The path between the edge and the target.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tunnel {
    /// How payloads travel to the relay and back.
    pub mode: Mode,
    /// How long a packet travels between relay and target, in each direction. This link has no other properties.
    pub target_delay_ms: f64,
    /// In [`Topology::Tunnelled`]: the largest packets of inner connections, in bytes of UDP payload.
    pub inner_packet_bytes: u16,
    /// The size of the first packets of inner connections, in bytes of UDP payload. The connections then search for larger packets that
    /// arrive (RFC 8899). By default, `inner_packet_bytes`.
    pub inner_initial_bytes: Option<u16>,
    /// The largest packets of the connection between edge and relay, in bytes of UDP payload.
    pub packet_bytes: u16,
    /// The congestion controller of inner connections.
    pub inner_congestion: Congestion,
    /// How many bytes of payloads may wait for each tunnel, at the relay and at the edge.
    pub queue_bytes: usize,
    /// How many bytes an earlier connection of the edge has carried, so that `auto` has measured the path.
    pub earlier_bytes: usize,
}

impl Default for Tunnel {
    /// The product's defaults over Ethernet, with inner packets that fit.
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            target_delay_ms: 0.0,
            inner_packet_bytes: 1_400,
            inner_initial_bytes: None,
            packet_bytes: 1_472,
            inner_congestion: Congestion::Cubic,
            queue_bytes: 256 * 1024,
            earlier_bytes: 3_000_000,
        }
    }
}

/// The form of a tunnel.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Capsules on a stream: in order and without loss.
    #[default]
    Stream,
    /// QUIC datagrams.
    Datagram,
}

impl Mode {
    /// Its name in plans, and in the configuration of forwards.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Datagram => "datagram",
        }
    }
}

/// A figure that the paper gives for a class or for `all`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The paper's scheduler.
    pub scheduler: Scheduler,
    /// A class's name, or `all`.
    pub class: String,
    /// A metric's name, as in results.
    pub metric: String,
    /// The value, in the metric's unit.
    pub value: f64,
}

/// A queue of streams, ordered by priority.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Queue {
    /// A list in order, as in the thesis's base.
    List,
    /// A binary heap, with which the thesis replaced the list.
    Heap,
    /// The product's queue.
    Pifo,
}

impl Queue {
    /// The name in plans and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Heap => "heap",
            Self::Pifo => "pifo",
        }
    }
}

/// A queue, and what the paper says about it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManagedBy {
    /// The queue.
    pub queue: Queue,
    /// The published time, in milliseconds.
    pub published_ms: Option<f64>,
}

variants::varied!(Plan);

impl Plan {
    /// Reads a plan by the name of its file in `perf/plans/`, or by its path.
    ///
    /// # Errors
    /// As [`Any::read`], or when the plan is of another kind.
    pub fn read(name: &str) -> Result<Self> {
        match Any::read(name)? {
            Any::Network(plan) => Ok(*plan),
            Any::Serving(_) | Any::Processes(_) => bail!("plan {name} is about models and has no network of this kind"),
            Any::Paths(_) | Any::Trees(_) | Any::Stack(_) => {
                bail!("plan {name} is about several paths and has no network of this kind")
            }
        }
    }

    /// Describes the links between the machines: `veth` or `loopback` if no emulated link limits them.
    #[must_use]
    pub fn links(&self, natively: bool) -> String {
        match self.topology {
            Topology::Workers | Topology::Attacked => "veth".to_owned(),
            _ if natively => "loopback".to_owned(),
            _ => self.network.to_string(),
        }
    }

    /// How often each scheduler runs on a clock.
    #[must_use]
    pub fn repetitions_on(&self, clock: Clock) -> u64 {
        self.lab_repetitions.filter(|_| clock == Clock::Lab).unwrap_or(self.repetitions)
    }

    /// The least duration of a scheduler's repetition, in seconds on the plan's own clock: the time that the link needs for the
    /// bytes, or the whole limit if requests continue until then. Losses and round trips make it longer, up to the limit.
    #[must_use]
    pub fn least_seconds(&self) -> f64 {
        let Workload { requests, arrivals, limit_s, .. } = self.workload;
        let limit_s = limit_s as f64;
        if matches!(self.topology, Topology::Marked | Topology::Workers | Topology::Attacked) {
            return limit_s;
        }
        let bytes_a_request =
            self.classes.iter().map(|class| class.bytes as f64).sum::<f64>() / self.classes.len() as f64;
        let sending_s = requests as f64 * bytes_a_request * 8.0 / (self.network.rate_mbit * 1e6);
        let arriving_s = match arrivals {
            Arrivals::PoissonPerS(rate) => requests as f64 / rate,
            Arrivals::AtOnce => 0.0,
        };
        sending_s.max(arriving_s).min(limit_s)
    }

    /// Returns the schedulers that are compared on a clock.
    #[must_use]
    pub fn schedulers_on(&self, clock: Clock) -> Vec<Scheduler> {
        let lab = self.lab_schedulers.iter().filter(|_| clock == Clock::Lab);
        self.schedulers.iter().chain(lab).copied().collect()
    }

    /// The published value of a metric. Returns `None` if the paper gives none.
    #[must_use]
    pub fn published(&self, scheduler: Scheduler, class: &str, metric: &str) -> Option<f64> {
        let same = |p: &&Published| (p.scheduler, p.class.as_str(), p.metric.as_str()) == (scheduler, class, metric);
        self.published.iter().find(same).map(|published| published.value)
    }
}
