//! Runs [plans](plan).
//!
//! A run is one repetition: a fresh network, fresh endpoints, one scheduler. It returns a [`Sample`] per request; all
//! repetitions of a scheduler form an [`Outcome`], the source of rows, tables and plots.

mod attack;
pub mod backlog;
mod caps;
pub mod direct;
pub mod emulated;
mod manage;
pub mod masque;
mod outcome;
pub mod peer;
mod plot;
mod reader;
mod repetition;
mod row;
mod served;
pub mod serving;
pub mod simulated;
mod table;
pub mod tls;
mod train;
mod transfer;
mod tunnelled;
mod workers;
mod workload;

use std::{
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread::{self, available_parallelism},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use instruments::load::{self, Figure};
use plan::{Clock, Plan, Scheduler, Topology};

pub use self::{
    manage::manage,
    outcome::{Latencies, Measured, Outcome},
    plot::plot,
    repetition::{Run, Sample, Stream},
    row::Row,
    table::{curves, markdown, queues, table, tables},
    workload::{Request, requests},
};

/// Runs one repetition of a plan (or of a variant of it).
///
/// # Errors
/// When the scheduler does not exist on this clock or topology, an endpoint does not start, or a request fails for another
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
            _ if scheduler.is_of_quic_go() => peer::run(plan, scheduler, seed),
            _ => emulated::run(plan, scheduler, seed),
        },
        (Topology::Marked, Clock::Lab) => caps::run(plan),
        (Topology::Marked, Clock::VirtualNetwork) => bail!("the kernel's caps need a kernel"),
        (Topology::Masque, Clock::Lab) if scheduler.is_of_quic_go() => peer::run(plan, scheduler, seed),
        (Topology::Masque, Clock::Lab) => masque::run(plan, scheduler, seed),
        (Topology::Tunnelled, Clock::VirtualNetwork) => tunnelled::run(plan, scheduler, seed),
        (Topology::Tunnelled, Clock::Lab) => bail!("tunnels of this kind are simulated"),
        (Topology::Served, Clock::Lab) => served::run(plan, scheduler, seed),
        (Topology::Served, Clock::VirtualNetwork) => bail!("a gateway needs a kernel"),
        (Topology::Workers, Clock::Lab | Clock::Native) => workers::run(plan, scheduler),
        (Topology::Attacked, Clock::Lab | Clock::Native) => attack::run(plan, scheduler, seed),
        (Topology::Masque | Topology::Workers | Topology::Attacked, Clock::VirtualNetwork) => {
            bail!("relays need a kernel")
        }
        (_, Clock::Native) => bail!("this topology runs natively only one way"),
    }
}

/// Runs all repetitions of schedulers. They take turns, so that changes on the machine affect all alike. Such changes have
/// no effect on virtual time, where repetitions run in parallel.
///
/// # Errors
/// See [`run`].
pub fn compare(plan: &Plan, schedulers: &[Scheduler], clock: Clock) -> Result<Vec<Outcome>> {
    let repetition = |seed| -> Result<Vec<Run>> {
        let mut bases = RELATIVES.map(|_| None);
        let of = |scheduler: &Scheduler| {
            let mut run = run(plan, *scheduler, clock, seed).with_context(|| scheduler.name())?;
            relate(*scheduler, &mut run.figures, &mut bases);
            Ok(run)
        };
        schedulers.iter().map(of).collect()
    };
    let seeds: Vec<u64> = (plan.seed..plan.seed + plan.repetitions).collect();
    let abreast = match clock {
        Clock::VirtualNetwork => available_parallelism().map_or(1, NonZero::get),
        Clock::Lab | Clock::Native => 1,
    };
    let next = AtomicUsize::new(0);
    let worker = || -> Result<_> {
        let mut done = Vec::new();
        while let Some(seed) = seeds.get(next.fetch_add(1, Relaxed)) {
            let runs = repetition(*seed).with_context(|| format!("seed {seed}"));
            // Without this repetition there are no rows, so the others are not begun.
            done.push((*seed, runs.inspect_err(|_| next.store(seeds.len(), Relaxed))?));
        }
        Ok(done)
    };
    let mut repetitions: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (1..abreast).map(|_| scope.spawn(worker)).collect();
        let mut done = worker()?;
        for worker in workers {
            done.extend(worker.join().map_err(|_| anyhow!("a repetition panicked"))??);
        }
        anyhow::Ok(done)
    })?;
    repetitions.sort_by_key(|(seed, _)| *seed);
    let mut outcomes: Vec<_> =
        schedulers.iter().map(|scheduler| Outcome { scheduler: *scheduler, runs: Vec::new() }).collect();
    for (_, runs) in repetitions {
        outcomes.iter_mut().zip(runs).for_each(|(outcome, run)| outcome.runs.push(run));
    }
    Ok(outcomes)
}

/// A figure that is compared with the same figure of an earlier scheduler.
struct Relative {
    to: Scheduler,
    metric: &'static str,
    /// Subtracted from the ratio in percent.
    less_pct: f64,
    named: &'static str,
}

const RELATIVES: [Relative; 4] = [
    Relative { to: Scheduler::Plain, metric: "cpu_s_per_gb", less_pct: 100.0, named: "cpu_over_plain_pct" },
    Relative {
        to: Scheduler::Workers1,
        metric: "cpu_ns_per_packet",
        less_pct: 100.0,
        named: "cpu_over_one_worker_pct",
    },
    Relative { to: Scheduler::NoProxy, metric: "wire_kb", less_pct: 100.0, named: "wire_over_no_proxy_pct" },
    Relative { to: Scheduler::Calm, metric: "goodput_mbit", less_pct: 0.0, named: "share_of_calm_pct" },
];

/// Adds the figures that compare a scheduler with earlier ones, and keeps figures for comparison with later ones.
fn relate(scheduler: Scheduler, figures: &mut Vec<Figure>, bases: &mut [Option<f64>; RELATIVES.len()]) {
    for (Relative { to, metric, less_pct, named }, base) in RELATIVES.iter().zip(bases) {
        let Some(value) = load::value(figures, metric) else { continue };
        if scheduler == *to {
            *base = Some(value);
        } else if let Some(base) = base {
            let value = 100.0 * value / *base - less_pct;
            figures.push(Figure { metric: named, value, unit: "%" });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_count_beyond_those_of_the_first_and_goodput_as_a_share_of_it() {
        for (first, then, metric, named, expected) in [
            (Scheduler::Plain, Scheduler::Rr, "cpu_s_per_gb", "cpu_over_plain_pct", 25.0),
            (Scheduler::Workers1, Scheduler::Workers2, "cpu_ns_per_packet", "cpu_over_one_worker_pct", 25.0),
            (Scheduler::NoProxy, Scheduler::Stream, "wire_kb", "wire_over_no_proxy_pct", 25.0),
            (Scheduler::Calm, Scheduler::Guarded, "goodput_mbit", "share_of_calm_pct", 125.0),
        ] {
            let mut bases = RELATIVES.map(|_| None);
            let mut related = |scheduler, value| {
                let mut figures = vec![Figure { metric, value, unit: "" }];
                relate(scheduler, &mut figures, &mut bases);
                load::value(&figures, named)
            };
            assert_eq!(related(then, 10.0), None, "there is nothing to hold it against");
            assert_eq!([related(first, 8.0), related(then, 10.0)], [None, Some(expected)]);
        }
    }
}
