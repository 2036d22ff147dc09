//! A gateway's knowledge about its engines and about the lengths of answers, in a form that survives restarts and changes of the configuration.

use serde::{Deserialize, Serialize};

/// The file of this knowledge in the state folder.
pub const FILE: &str = "engines.json";

/// A gateway's knowledge. It forgets models and engines that are no longer configured, and classes that the policy no longer has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// The average number of tokens in an answer, and of bytes of a body per token of a prompt; `None` before any was
    /// billed.
    pub averages: Option<(f64, f64)>,
    /// The classes with enough answers to know their lengths.
    #[serde(default)]
    pub classes: Vec<LearnedClass>,
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

/// A gateway's knowledge about the answers of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnedClass {
    /// The class's name.
    pub class: String,
    /// The average number of tokens in an answer.
    pub tokens: Option<f64>,
    /// The average part of the tokens that a request allows.
    pub used: Option<f64>,
}
