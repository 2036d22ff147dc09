//! Outcomes of requests, and scores.

use crate::route::choice::ModelChoice;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunOutcome {
    /// Its index in the order of arrival.
    pub number: usize,
    /// Its class.
    pub class: usize,
    /// The decision; `None` if no model was permitted to answer.
    pub choice: Option<ModelChoice>,
    /// When the gateway decided.
    pub arrived_ns: u64,
    /// When the last token reached the client; 0 if there was none.
    pub finished_ns: u64,
    /// How it ended.
    pub fate: Fate,
    /// The reward: the model's for this class if the answer was in time, else 0 (the paper, §4.2).
    pub reward: f32,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Answered in time.
    Met,
    /// Answered too late.
    Late,
    /// Not answered.
    Discarded,
}

/// Returns the mean reward, 0 if there was no request. A request counts the same whatever its weight.
#[must_use]
pub fn mean_score(outcomes: &[RunOutcome]) -> f64 {
    let sum: f64 = outcomes.iter().map(|outcome| f64::from(outcome.reward)).sum();
    sum / outcomes.len().max(1) as f64
}
