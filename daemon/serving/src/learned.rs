//! A gateway's knowledge about its engines, in a form that survives restarts and changes of the configuration.

use serde::{Deserialize, Serialize};

/// A gateway's knowledge. It forgets models and engines that are no longer configured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// The average number of tokens in an answer, and of bytes of a body per token of a prompt; `None` before any was
    /// billed.
    pub averages: Option<(f64, f64)>,
    /// The engines that have measurements.
    pub engines: Vec<LearnedEngine>,
}

/// A gateway's knowledge about one engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnedEngine {
    /// The model's name.
    pub model: String,
    /// The engine's URL.
    pub engine: String,
    /// Its curve ([`sched::route::Curve::to_numbers`]).
    pub curve: Vec<f64>,
}
