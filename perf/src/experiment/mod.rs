//! Runs [plans](crate::plan).
//!
//! A run is one repetition: a fresh network, fresh endpoints, one scheduler. It returns a [`Sample`] per request; all
//! repetitions of a scheduler together are an [`Outcome`], from which rows, tables and plots are made.

pub mod backlog;
mod caps;
pub mod direct;
pub mod lab;
mod manage;
pub mod masque;
mod outcome;
mod plot;
pub mod random;
mod reader;
pub mod simulated;
mod table;
pub mod tls;
mod train;
mod transfer;
mod unpaced;
mod workload;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

pub use self::{
    manage::manage,
    outcome::{Latencies, Outcome, Row},
    plot::plot,
    table::{queues, table},
    workload::{Request, requests},
};
use crate::{
    load::{self, Figure},
    plan::{Clock, Plan, Scheduler, Topology},
};

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Index of its class in the plan.
    pub class: usize,
    /// From its start to the last byte of the echo, or beside a backlog until its own last byte has left; `None` if that
    /// never came.
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
    /// The same, for each class.
    pub class_figures: Vec<Vec<Figure>>,
}

impl Run {
    /// Puts together how long each request took, `None` for those whose echo never came.
    #[must_use]
    pub fn new(plan: &Plan, requests: &[Request], latencies: &[Option<Duration>], total: Duration) -> Self {
        let pairs = || requests.iter().zip(latencies);
        let echoed = pairs().filter(|(_, latency)| latency.is_some());
        let echoed_bytes: usize = echoed.map(|(request, _)| plan.classes[request.class].bytes).sum();
        let goodput_mbit = echoed_bytes as f64 * 8e-6 / total.as_secs_f64();
        let sample = |(request, latency): (&Request, &Option<Duration>)| Sample {
            class: request.class,
            latency_ns: latency.map(|latency| latency.as_nanos() as u64),
        };
        Self {
            samples: pairs().map(sample).collect(),
            total_ns: total.as_nanos() as u64,
            figures: vec![Figure { metric: "goodput_mbit", value: goodput_mbit, unit: "Mbit/s" }],
            class_figures: Vec::new(),
        }
    }
}

/// Runs one repetition of a plan (or of a variant of it).
///
/// # Errors
/// The scheduler does not exist on this clock or topology, an endpoint does not start, or a request fails for another
/// reason than its deadline.
pub fn run(plan: &Plan, scheduler: Scheduler, clock: Clock, seed: u64) -> Result<Run> {
    ensure!(plan.clocks.contains(&clock), "plan {} does not run on clock {}", plan.name, clock.name());
    if plan.workload.one_way {
        return transfer::run(plan, scheduler, clock, seed);
    }
    match (plan.topology, clock) {
        (Topology::Direct, Clock::VirtualNetwork) => simulated::run(plan, scheduler, seed),
        (Topology::Direct, Clock::Lab) => match scheduler {
            Scheduler::TlsN => tls::run(plan, tls::Connections::PerRequest, seed),
            Scheduler::Tls1 => tls::run(plan, tls::Connections::One, seed),
            _ => lab::run(plan, scheduler, seed),
        },
        (Topology::Marked, Clock::Lab) => caps::run(plan),
        (Topology::Marked, Clock::VirtualNetwork) => bail!("the kernel's caps need a kernel"),
        (Topology::Masque, Clock::Lab) => masque::run(plan, scheduler, seed),
        (Topology::Masque, Clock::VirtualNetwork) => bail!("relays run in the lab only"),
        (_, Clock::Native) => bail!("only what goes one way runs natively"),
    }
}

/// Runs all repetitions of schedulers. They take turns, so that what changes on the machine meanwhile concerns all alike.
///
/// # Errors
/// See [`run`].
pub fn compare(plan: &Plan, schedulers: &[Scheduler], clock: Clock) -> Result<Vec<Outcome>> {
    let outcome = |scheduler: &Scheduler| Outcome { scheduler: *scheduler, runs: Vec::new() };
    let mut outcomes: Vec<_> = schedulers.iter().map(outcome).collect();
    for seed in plan.seed..plan.seed + plan.repetitions {
        let mut plain_cost = None;
        for Outcome { scheduler, runs } in &mut outcomes {
            let mut run = run(plan, *scheduler, clock, seed).with_context(|| scheduler.name())?;
            let cost = load::value(&run.figures, "cpu_s_per_gb");
            if *scheduler == Scheduler::Plain {
                plain_cost = cost;
            } else if let (Some(cost), Some(plain)) = (cost, plain_cost) {
                let value = 100.0 * (cost / plain - 1.0);
                run.figures.push(Figure { metric: "cpu_over_plain_pct", value, unit: "%" });
            }
            runs.push(run);
        }
    }
    Ok(outcomes)
}
