//! One measurement of one peer, and the meters of its processes.

use std::{path::Path, time::Instant};

use anyhow::Result;
use instruments::process::{Meter, Process};

use super::{
    engine::Engine,
    peer::{Peer, Running, Wanted},
    rows::Sample,
};

/// How many requests one connection of paced may have at once, where this does not matter.
const REQUESTS: u32 = 20_000;

/// One measurement of one peer.
#[derive(Clone, Copy, Debug)]
pub struct Trial<'a> {
    /// The measured peer.
    pub peer: Peer,
    /// The program of [`Peer::PacedBefore`].
    pub before: Option<&'a Path>,
    /// The seed of random choices.
    pub seed: u64,
}

impl Trial<'_> {
    pub(super) fn start(self, engine: &Engine) -> Result<Running> {
        self.start_with(engine, REQUESTS)
    }

    pub(super) fn start_with(self, engine: &Engine, requests: u32) -> Result<Running> {
        Running::start(self.peer, Wanted { engine: engine.address(), requests }, self.before)
    }
}

/// CPU time of the proxies, and of engine and clients, which are this process.
pub(super) struct Meters<'a> {
    running: &'a Running,
    meters: Vec<(&'static str, Meter)>,
    own: Meter,
    pub(super) began: Instant,
}

impl<'a> Meters<'a> {
    pub(super) fn start(running: &'a Running) -> Result<Self> {
        let meter = |(name, process): &(&'static str, Process)| Ok((*name, Meter::start(*process)?));
        let meters = running.processes.iter().map(meter).collect::<Result<_>>()?;
        Ok(Self { running, meters, own: Meter::start(Process::own())?, began: Instant::now() })
    }

    /// Returns the cost of 1,000 of `count` for each process and for all, their memory, and how busy the generator was.
    pub(super) fn per_thousand(&self, count: u64) -> Result<Vec<Sample>> {
        let thousands = count.max(1) as f64 / 1e3;
        let (mut samples, mut all_ms) = (Vec::new(), 0.0);
        for (name, meter) in &self.meters {
            let ms = meter.read()?.cpu_ns as f64 / 1e6 / thousands;
            all_ms += ms;
            samples.push(Sample { metric: of(name, Of::Cpu), value: ms, unit: "ms" });
        }
        if !self.meters.is_empty() {
            samples.insert(0, Sample { metric: "CPU per 1,000", value: all_ms, unit: "ms" });
        }
        for (name, process) in &self.running.processes {
            let mib = process.resident_bytes()? as f64 / f64::from(1 << 20);
            samples.push(Sample { metric: of(name, Of::Memory), value: mib, unit: "MiB" });
        }
        samples.push(Sample { metric: "generator cores", value: self.own.read()?.cores(), unit: "cores" });
        Ok(samples)
    }
}

enum Of {
    Cpu,
    Memory,
}

/// Names a figure of a process.
fn of(process: &str, figure: Of) -> &'static str {
    match (figure, process) {
        (Of::Cpu, "gateway") => "CPU per 1,000, gateway",
        (Of::Cpu, "edge") => "CPU per 1,000, edge",
        (Of::Cpu, "front") => "CPU per 1,000, front",
        (Of::Cpu, "back") => "CPU per 1,000, back",
        (Of::Cpu, _) => "CPU per 1,000, alone",
        (Of::Memory, "gateway") => "memory, gateway",
        (Of::Memory, "edge") => "memory, edge",
        (Of::Memory, "front") => "memory, front",
        (Of::Memory, "back") => "memory, back",
        (Of::Memory, _) => "memory, alone",
    }
}
