//! The state of an emulated engine that runs: its pace, its counts, the last request, and what it reports about itself.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::batch::Sequence;

/// What the threads and connections of an engine share.
#[derive(Debug)]
pub(super) struct State {
    pub(super) name: String,
    pub(super) pace: Pace,
    /// Multiplies every duration of a [`Speed`].
    pub(super) slowness: AtomicU32,
    pub(super) running: AtomicU64,
    pub(super) asked: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) last: Mutex<Option<Asked>>,
    pub(super) says: Mutex<Says>,
}

impl State {
    pub(super) fn new(name: &str, pace: Pace) -> Self {
        Self {
            name: name.to_owned(),
            pace,
            slowness: AtomicU32::new(1),
            running: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            last: Mutex::default(),
            says: Mutex::default(),
        }
    }
}

/// What decides when tokens are made.
#[derive(Debug)]
pub(super) enum Pace {
    /// Each request by itself, more slowly the more there are.
    Alone(Speed),
    /// All requests step by step.
    Batch { ask: UnboundedSender<Sequence>, late_ns: Arc<AtomicU64> },
}

/// How long an engine takes for each kind of work.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Until the first token, for a prompt of any length.
    pub prefill: Duration,
    /// For one step, in which each request gets a token.
    pub step: Duration,
    /// How much longer a step takes for each request.
    pub step_per_request: Duration,
}

impl Default for Speed {
    /// Fast, and hardly slower under load.
    fn default() -> Self {
        let micros = Duration::from_micros;
        Self { prefill: micros(2_000), step: micros(1_000), step_per_request: micros(20) }
    }
}

/// What an engine reports about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Says {
    /// It is ready, and reports its own number of requests.
    #[default]
    Ready,
    /// It is loading its model: 503.
    Loading,
    /// It never answers.
    Nothing,
    /// Its metrics are 3.5 MiB long.
    TooMuch,
    /// It also works on this many requests of other clients.
    Others(u32),
}

/// A request that an engine received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The path.
    pub path: String,
    /// The body.
    pub body: String,
    /// The key that the request contained.
    pub authorization: Option<String>,
    /// The fields that say to which request of the client it belongs: `x-request-id` and `traceparent`.
    pub traced: [Option<String>; 2],
    /// The version of HTTP.
    pub version: hyper::Version,
}
