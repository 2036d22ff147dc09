//! Runs [plans](crate::plan).
//!
//! A run is one repetition: a fresh network, fresh endpoints, one scheduler. It returns a [`Sample`] per request; all
//! repetitions of a scheduler together are an [`Outcome`], from which rows, tables and plots are made.

pub mod direct;
mod outcome;
mod random;
pub mod simulated;
mod table;
mod workload;

use anyhow::{Result, bail, ensure};

pub use self::{
    outcome::{Latencies, Outcome, Row},
    table::table,
    workload::{Request, requests},
};
use crate::{
    load::Figure,
    plan::{Clock, Plan, Scheduler, Topology},
};

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Index of its class in the plan.
    pub class: usize,
    /// From its start to the last byte of the echo; `None` if that never came.
    pub latency_ns: Option<u64>,
}

/// One repetition.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// One for each request.
    pub samples: Vec<Sample>,
    /// From the first request to the end of the last.
    pub total_ns: u64,
    /// What else was measured, under the names of [`METRICS`](crate::plan::METRICS).
    pub figures: Vec<Figure>,
}

/// Runs one repetition of a plan (or of a variant of it).
///
/// # Errors
/// The scheduler does not exist on this clock or topology, an endpoint does not start, or a request fails for another
/// reason than its deadline.
pub fn run(plan: &Plan, scheduler: Scheduler, clock: Clock, seed: u64) -> Result<Run> {
    ensure!(plan.clocks.contains(&clock), "plan {} does not run on clock {}", plan.name, clock.name());
    match (plan.topology, clock) {
        (Topology::Direct, Clock::VirtualNetwork) => simulated::run(plan, scheduler, seed),
        (topology, clock) => bail!("there is no {topology:?} topology on clock {} yet", clock.name()),
    }
}

/// Runs all repetitions of a scheduler.
///
/// # Errors
/// See [`run`].
pub fn repeat(plan: &Plan, scheduler: Scheduler, clock: Clock) -> Result<Outcome> {
    let seeds = plan.seed..plan.seed + plan.repetitions;
    let runs = seeds.map(|seed| run(plan, scheduler, clock, seed)).collect::<Result<_>>()?;
    Ok(Outcome { scheduler, runs })
}
