//! The requests of a plan's client: their number, times and classes.

use sched::stream::{self, Service};
use serde::Deserialize;

/// What the client does.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// How many requests it makes. For clients of workers: how many payloads each has in flight.
    pub requests: usize,
    /// When it makes them.
    pub arrivals: Arrivals,
    /// How requests get their class.
    pub mix: Mix,
    /// With a relay: over how many inner connections, each in its own outer stream, the requests are spread. With workers:
    /// how many clients there are.
    #[serde(default = "one_connection")]
    pub connections: usize,
    /// Without a relay: how many streams, of no class, always have something to send beside the requests. If there are any,
    /// a request is measured until its last byte has left the client, not until its echo.
    #[serde(default)]
    pub backlog: usize,
    /// Without a relay: whether the server returns nothing. Bytes then leave as fast as possible, and the sender's CPU time
    /// is measured as well. Whatever the arrivals, all requests start at once.
    #[serde(default)]
    pub one_way: bool,
    /// The reader of one-way data, if it is a slow one.
    pub reader: Option<Reader>,
    /// When it gives up, in seconds; for a workload that would not end, its duration.
    pub limit_s: u64,
}

fn one_connection() -> usize {
    1
}

/// A receiver whose CPU is slow and whose kernel buffers little for it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reader {
    /// The size of its socket's receive buffer, as passed to SO_RCVBUF.
    pub buffer_bytes: usize,
    /// How long it takes to process a full packet, in microseconds.
    pub packet_us: f64,
}

/// An emulated engine. It works on any number of requests, which do not slow each other, so that only the network makes tokens late.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// How long it takes to make the first token of an answer, in milliseconds.
    pub first_ms: u64,
    /// How long it takes to make each further token.
    pub token_ms: u64,
}

/// When requests are made.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// All at once, as soon as there is a connection.
    AtOnce,
    /// By a Poisson process with this many requests per second.
    PoissonPerS(f64),
}

/// How requests get their class.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Mix {
    /// Each at random, with equal probability.
    Random,
    /// In turns.
    Even,
}

/// A kind of requests. The server echoes bytes as it receives them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Its name in results.
    pub name: String,
    /// How many bytes each request sends, and receives. To a model: the bytes of its prompt.
    pub bytes: usize,
    /// Of requests to a model: how many tokens each answer has.
    #[serde(default)]
    pub tokens: usize,
    /// How long after its start a request has to be completed; without it, there is no deadline.
    pub deadline_ms: Option<u64>,
    /// Its level under `ml`.
    #[serde(default)]
    pub level: Level,
    /// Its priority under `abs`; higher goes first.
    #[serde(default)]
    pub priority: u8,
    /// Its share under `wfq` and `lottery`.
    #[serde(default = "unit_weight")]
    pub weight: u16,
    /// Of marked classes: the rate that the kernel admits, in Mbit/s of Ethernet frames. If a relay is attacked: the rate
    /// that the client offers, in Mbit/s of payload.
    pub rate_mbit: Option<f64>,
    /// Of marked classes: how many sockets send.
    #[serde(default = "one_connection")]
    pub flows: usize,
    /// Of marked classes: the interval between the departure times that their sockets request, if they request any.
    pub gap_us: Option<u64>,
    /// In [`Topology::Tunnelled`](super::Topology::Tunnelled): how long a packet travels between an inner client and the
    /// edge, in each direction, so that inner connections have other round trips than the link alone gives them.
    #[serde(default)]
    pub client_delay_ms: f64,
}

fn unit_weight() -> u16 {
    1
}

impl Class {
    /// Returns its scheduling parameters, without the deadline, which counts from each request's start.
    #[must_use]
    pub fn service(&self) -> Service {
        let level = match self.level {
            Level::High => stream::Level::High,
            Level::Low => stream::Level::Low,
        };
        Service { level, priority: self.priority, weight: self.weight, ..Service::default() }
    }
}

/// A level of `ml`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Before the low level, by deadline.
    High,
    /// After the high level.
    #[default]
    Low,
}
