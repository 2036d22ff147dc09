//! What operators see of engines.

use std::time::Duration;

use sched::route::Cost;

/// An engine of a gateway, at one moment.
#[derive(Clone, Debug)]
pub struct EngineView {
    /// The name of its model.
    pub model: String,
    /// Its URL.
    pub engine: String,
    /// The requests that it works on, and how many it may.
    pub in_flight: (u32, u32),
    /// How many requests wait for any engine of the model.
    pub waiting: usize,
    /// For how long it gets no requests, as it failed; zero if it gets some.
    pub ejected_for: Duration,
    /// How many requests it answered.
    pub answered: u64,
    /// How many requests it failed.
    pub failed: u64,
    /// How many of its steps and how many of its first tokens were learned from.
    pub samples: (u64, u64),
    /// What was learned: nothing yet where there are no samples.
    pub cost: Cost,
}
