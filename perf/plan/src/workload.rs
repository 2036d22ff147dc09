//! What a plan's client asks for: how many requests, when, and of which classes.

use sched::stream::{self, Service};
use serde::Deserialize;

/// What the client does.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// How many requests it makes. Of clients of workers: how many payloads each has in flight.
    pub requests: usize,
    /// When.
    pub arrivals: Arrivals,
    /// How requests get their class.
    pub mix: Mix,
    /// With a relay: over how many inner connections, each in an outer stream of its own, they are spread. With workers:
    /// how many clients there are.
    #[serde(default = "one_connection")]
    pub connections: usize,
    /// Without a relay: how many streams, of no class, always have something to send beside the requests. If there are
    /// any, what is measured of a request is not its echo but when its last byte has left the client.
    #[serde(default)]
    pub backlog: usize,
    /// Without a relay: whether nothing comes back. Then bytes leave as fast as they go, and what is measured besides is the
    /// sender's CPU time. Whatever the arrivals, all requests start at once.
    #[serde(default)]
    pub one_way: bool,
    /// The reader of what goes one way, if it is a slow one.
    pub reader: Option<Reader>,
    /// When it gives up, in seconds; where it would go on for ever, how long that is.
    pub limit_s: u64,
}

fn one_connection() -> usize {
    1
}

/// A receiver whose CPU is slow and whose kernel keeps little for it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reader {
    /// The size of its socket's receive buffer, as given to SO_RCVBUF.
    pub buffer_bytes: usize,
    /// How long it takes for a full packet, in microseconds.
    pub packet_us: f64,
}

/// When requests are made.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// All at once, as soon as there is a connection.
    AtOnce,
    /// By a Poisson process of this many per second.
    PoissonPerS(f64),
}

/// How requests get their class.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Mix {
    /// Each by chance, all classes alike.
    Random,
    /// In turns.
    Even,
}

/// A kind of requests. The server echoes what it receives, as it receives it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Its name in results.
    pub name: String,
    /// How much each request sends, and receives.
    pub bytes: usize,
    /// Within how long of its start a request has to be completed; without it, any time will do.
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
    /// Of marked classes: what the kernel lets through, in Mbit/s of Ethernet frames. Where a relay is attacked: what the
    /// client offers, in Mbit/s of payload.
    pub rate_mbit: Option<f64>,
    /// Of marked classes: how many sockets send.
    #[serde(default = "one_connection")]
    pub flows: usize,
    /// Of marked classes: the distance of the departure times that their sockets ask for, if they do.
    pub gap_us: Option<u64>,
    /// Where tunnelled: how long a packet travels between an inner client and the edge, in each direction, so that inner
    /// connections have other round trips than the link alone gives them.
    #[serde(default)]
    pub client_delay_ms: f64,
}

fn unit_weight() -> u16 {
    1
}

impl Class {
    /// What it is to the scheduler; its deadline is not in there, because it counts from each request's start.
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
    /// Before all others, by deadline.
    High,
    /// After them.
    #[default]
    Low,
}
