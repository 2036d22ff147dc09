//! Runs [plans that check the simulator](plan::stack): each stream alone, over the kernel's stack and over simulated links.
//!
//! Two things are checked separately. In a cell with one path, TCP checks links, queues, windows and losses. In a cell with two
//! paths, MPTCP also checks the choice of the path, because the simulator has the kernel's [rule] for it (the kernel has none of
//! MPQUIC's schedulers).

mod kernel;
mod row;
mod rule;
#[cfg(test)]
mod tests;

use anyhow::{Context as _, Result};
use instruments::random::Random;
use plan::{
    paths::{Links, Path},
    stack::StackPlan,
};

pub use self::row::{Row, tables};
use self::{
    kernel::{Known, Measured, Network},
    row::Setting,
    rule::KernelDefault,
};
use super::{
    link::Link,
    simulator,
    simulator::Sender,
    strategy::{Order, Rule, Strategy},
    stream::Stream,
};

/// The purpose of this module's random numbers.
const PURPOSE: u64 = 0x6d70_7463;

/// Each transfer has its own port, starting with the port after this one.
const FIRST_PORT: u16 = 5_000;

/// Runs all transfers in the lab, and returns the rows of results, in the order of the plan.
///
/// # Errors
/// When this is not the lab, or a transfer does not end.
pub fn run(plan: &StackPlan) -> Result<Vec<Row>> {
    let (mut rows, mut port) = (Vec::new(), FIRST_PORT);
    for settings in Setting::all(plan).chunk_by(|a, b| (a.congestion, &a.cell.name) == (b.congestion, &b.cell.name)) {
        let Setting { cell, congestion, .. } = settings[0];
        let place = || format!("{} in cell {}; the lab is perf/vm-plan.sh {}", congestion.name(), cell.name, plan.name);
        let network = Network::new(cell, &plan.links, congestion).with_context(place)?;
        for setting in settings {
            let mut transfer = |_| {
                port += 1;
                network.transfer(port, setting.stream.bytes)
            };
            let measured = (0..plan.repetitions).map(&mut transfer).collect::<Result<Vec<_>>>().with_context(place)?;
            rows.push(setting.row(&measured)?);
        }
    }
    Ok(rows)
}

/// The simulation of one transfer.
#[derive(Clone, Debug, PartialEq)]
struct Simulated {
    completion_ms: f64,
    /// By path: packets sent.
    packets: Vec<u64>,
    dropped: u64,
}

impl Setting<'_> {
    /// Simulates all repetitions under the kernel's rule, with senders that know `known` of their paths at the beginning.
    fn simulated(&self, known: &[Known]) -> Result<Vec<Simulated>> {
        if self.cell.paths.len() == 1 {
            return self.lowest_rtt(known); // TCP has no choice.
        }
        let pacing_mbit: Vec<_> = known.iter().map(|known| known.pacing_mbit).collect();
        self.simulate(known, || KernelDefault::new(&self.links(), &pacing_mbit))
    }

    /// The same under MPQUIC's own scheduler.
    fn lowest_rtt(&self, known: &[Known]) -> Result<Vec<Simulated>> {
        self.simulate(known, || Strategy::new(Rule::LowestRtt, Order::Turns))
    }

    fn simulate<S: Sender>(&self, known: &[Known], sender: impl Fn() -> S) -> Result<Vec<Simulated>> {
        let common = self.links();
        let link = |(path, known): (&Path, &Known)| {
            let packet_ns = (common.packet_bytes as f64 * 8e3 / path.rate_mbit) as u64;
            Link::new(packet_ns, (path.rtt_ms * 1e6) as u64, known.rtt_ms * 1e6, &common)
        };
        let repetition = |seed| {
            let links = self.cell.paths.iter().zip(known).map(link).collect();
            let mut random = Random::new(seed, PURPOSE);
            let ended = simulator::run(links, &[self.stream(&common)], &mut sender(), &mut random);
            let ended =
                ended.with_context(|| format!("{} in cell {} does not end", self.stream.name, self.cell.name))?;
            Ok(Simulated {
                completion_ms: ended.ended_ns[0] as f64 / 1e6,
                packets: ended.sent[0].clone(),
                dropped: ended.dropped,
            })
        };
        (self.plan.seed..self.plan.seed + self.plan.repetitions).map(repetition).collect()
    }

    /// Returns the links, with the packet payload of the stack that runs.
    fn links(&self) -> Links {
        let less = if self.cell.paths.len() > 1 { self.plan.mptcp_option_bytes } else { 0 };
        Links { payload_bytes: self.plan.links.payload_bytes - less, ..self.plan.links }
    }

    /// Returns the stream, which is requested over the first path, the kernel's first subflow.
    fn stream(&self, links: &Links) -> Stream {
        Stream {
            of: 0,
            packets: self.stream.bytes.div_ceil(links.payload_bytes) as usize,
            weight: 1,
            begins_ns: (self.cell.paths[0].rtt_ms * 1e6) as u64 / 2,
            path: None,
            signal: super::BY_WEIGHT,
        }
    }
}
