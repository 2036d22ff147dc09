//! Runs [plans with several paths](plan::paths).
//!
//! In each cell, every scheduler sends the same streams over the same links, for each seed. Beside the mean, results show the
//! [closed form](closed) for ideal links. MPQUIC's schedulers are simulated as schedulers of packets; FStream and ours place
//! whole streams, by `sched::path`.

mod closed;
mod link;
mod order;
mod picture;
mod row;
mod signal;
mod simulator;
pub mod stack;
mod strategy;
mod stream;
mod tables;
#[cfg(test)]
mod tests;
pub mod trees;

use anyhow::{Context as _, Result};
use instruments::random::Random;
use plan::paths::{Cell, Links, Path, PathsPlan, Scheduler};
use sched::path::{self as placement, PathChoice, Placement, StreamProfile, precedence::Precedence};

use self::{
    link::Link,
    row::Shown,
    signal::Signal,
    simulator::Ended,
    strategy::{Order, Rule, Strategy},
    stream::Stream,
};
pub use self::{picture::picture, row::Row, tables::tables};

/// The purpose of this module's random numbers.
const PURPOSE: u64 = 0x7061_7468;

/// Runs all schedulers in all cells, and returns the rows of results, in the order of the plan.
///
/// # Errors
/// When streams do not end within an hour of simulated time.
pub fn run(plan: &PathsPlan) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for cell in &plan.cells {
        for scheduler in &plan.schedulers {
            let seeds = plan.seed..plan.seed + plan.repetitions;
            let runs = seeds.map(|seed| Of { plan, cell, seed }.run(*scheduler));
            let runs = runs.collect::<Result<Vec<_>>>();
            let runs = runs.with_context(|| format!("{} in cell {}", scheduler.name(), cell.name))?;
            rows.extend(row::of(plan, cell, *scheduler, &runs));
        }
    }
    Ok(rows)
}

/// One cell with one seed.
struct Of<'a> {
    plan: &'a PathsPlan,
    cell: &'a Cell,
    seed: u64,
}

/// A way to send all streams.
struct Way {
    streams: Vec<Stream>,
    rule: Rule,
    order: Order,
    /// By stream of the plan.
    closed_ms: Vec<f64>,
}

impl Of<'_> {
    fn run(&self, scheduler: Scheduler) -> Result<Vec<Shown>> {
        if scheduler != Scheduler::BestPerStream {
            return self.send(self.way(scheduler));
        }
        let ways = assignments(self.plan.streams.len(), self.cell.paths.len()).into_iter();
        let runs = ways.map(|paths| self.send(self.pinned(&paths, Order::Priority))).collect::<Result<Vec<_>>>()?;
        let best = |at: usize| {
            let shown = runs.iter().map(|run| run[at]);
            shown
                .min_by(|a, b| a.completion_ms.total_cmp(&b.completion_ms))
                .context("no assignment of streams to paths")
        };
        (0..self.plan.streams.len()).map(best).collect()
    }

    fn send(&self, way: Way) -> Result<Vec<Shown>> {
        let mut random = Random::new(self.seed, PURPOSE);
        let links = links(self.cell, &self.plan.links, &mut random);
        let mut strategy = Strategy::new(way.rule, way.order);
        let ended = simulator::run(links, &way.streams, &mut strategy, &mut random).context("streams do not end")?;
        Ok((0..self.plan.streams.len()).map(|at| self.shown(at, &way.streams, &ended, way.closed_ms[at])).collect())
    }

    fn shown(&self, at: usize, streams: &[Stream], ended: &Ended, closed_ms: f64) -> Shown {
        let parts = || (0..streams.len()).filter(|part| streams[*part].of == at);
        let last = parts().map(|part| ended.ended_ns[part]).max().unwrap_or_default();
        let bytes = self.wire_bytes(self.packets(self.plan.streams[at].bytes));
        let alone = |path: &Path| bytes as f64 * 8.0 / (path.rate_mbit * 1e3) + path.rtt_ms;
        let times: Vec<f64> = self.cell.paths.iter().map(alone).collect();
        let [least, most] = [f64::min, f64::max].map(|of| times.iter().copied().reduce(of).unwrap_or_default());
        let slowest = times.iter().position(|time| *time == most).filter(|_| most > 1.01 * least);
        let sent = |path: usize| parts().map(|part| ended.sent[part][path]).sum::<u64>() as f64;
        let all: f64 = (0..times.len()).map(sent).sum();
        let slow_pct = slowest.map_or(0.0, |path| 100.0 * sent(path) / all);
        Shown { completion_ms: last as f64 / 1e6, slow_pct, closed_ms }
    }

    fn way(&self, scheduler: Scheduler) -> Way {
        match scheduler {
            Scheduler::MpquicLowestRtt => self.packets_by(Rule::LowestRtt, Order::Turns),
            Scheduler::MpquicSaEcf => self.packets_by(Rule::SaEcf, Order::Priority),
            Scheduler::MpquicSaEcfTurns => self.packets_by(Rule::SaEcf, Order::Turns),
            Scheduler::Fstream => {
                let paths: Vec<_> = self.place(Placement::FStream, false).iter().map(PathChoice::path).collect();
                // FStream places streams at the sending server.
                let request_ns = self.first_request_ns();
                let mut way = self.pinned(&paths, Order::Lottery);
                way.streams.iter_mut().for_each(|stream| stream.begins_ns = request_ns);
                let leads = vec![request_ns; self.cell.paths.len()];
                way.closed_ms = closed::pinned_ms(&self.views(&leads), &self.shares(&way.streams, &paths), self.plan);
                way
            }
            Scheduler::Paced | Scheduler::BestPerStream => {
                let paths: Vec<_> = self.place(Placement::Paced, false).iter().map(PathChoice::path).collect();
                self.pinned(&paths, Order::Priority)
            }
            Scheduler::PacedRanges => self.parted(&self.place(Placement::Paced, true)),
        }
    }

    /// Schedules every packet separately. The request takes the path with the shortest round trip.
    fn packets_by(&self, rule: Rule, order: Order) -> Way {
        let begins_ns = self.first_request_ns();
        let streams = self.plan.streams.iter().enumerate().map(|(of, stream)| Stream {
            of,
            packets: self.packets(stream.bytes),
            weight: stream.priority,
            begins_ns,
            path: None,
            signal: BY_WEIGHT,
        });
        let streams: Vec<_> = streams.collect();
        let by_priority = order == Order::Priority;
        let closed_ms =
            closed::pooled_ms(&self.views(&vec![begins_ns; self.cell.paths.len()]), &streams, by_priority, self.plan);
        Way { streams, rule, order, closed_ms }
    }

    /// Sends each stream on one path, over which it is also requested.
    fn pinned(&self, paths: &[usize], order: Order) -> Way {
        let choices: Vec<_> = paths.iter().map(|path| PathChoice::One(*path)).collect();
        Way { order, ..self.parted(&choices) }
    }

    /// Sends streams, or parts of them, where they were placed. Each is requested over its path.
    fn parted(&self, choices: &[PathChoice]) -> Way {
        let (mut streams, mut paths) = (Vec::new(), Vec::new());
        for (of, (stream, choice)) in self.plan.streams.iter().zip(choices).enumerate() {
            let parts = match choice {
                PathChoice::One(path) | PathChoice::Copies([path, _]) => vec![(*path, stream.bytes)],
                PathChoice::Ranges(ranges) => ranges.iter().map(|range| (range.path, range.bytes)).collect(),
            };
            for (path, bytes) in parts {
                let begins_ns = (self.cell.paths[path].rtt_ms * 1e6) as u64 / 2;
                streams.push(Stream {
                    of,
                    packets: self.packets(bytes),
                    weight: stream.priority,
                    begins_ns,
                    path: Some(path),
                    signal: BY_WEIGHT,
                });
                paths.push(path);
            }
        }
        let leads: Vec<_> = self.cell.paths.iter().map(|path| (path.rtt_ms * 1e6) as u64 / 2).collect();
        let closed_ms = closed::pinned_ms(&self.views(&leads), &self.shares(&streams, &paths), self.plan);
        Way { streams, rule: Rule::Pinned, order: Order::Priority, closed_ms }
    }

    /// Places all streams by what the sender knows of the paths: rates and round trips, as in the paper.
    fn place(&self, placement: Placement, in_ranges: bool) -> Vec<PathChoice> {
        let leads: Vec<_> = self.cell.paths.iter().map(|path| (path.rtt_ms * 1e6) as u64 / 2).collect();
        let requests = self.plan.streams.iter().map(|stream| StreamProfile {
            bytes: stream.bytes,
            weight: stream.priority,
            precedence: Precedence::SHARED,
            is_urgent: false,
            is_idempotent: true,
            is_divisible: in_ranges && stream.divisible,
        });
        let requests: Vec<_> = requests.collect();
        placement::place_all(placement, &requests, &mut self.views(&leads), 0)
    }

    /// Returns the paths as schedulers see them. Rates count the bytes of streams only.
    fn views(&self, leads: &[u64]) -> Vec<placement::CandidatePath> {
        let links = &self.plan.links;
        let view = |(path, lead_ns): (&Path, &u64)| placement::CandidatePath {
            smoothed_rtt_ns: (path.rtt_ms * 1e6) as u64,
            min_rtt_ns: (path.rtt_ms * 1e6) as u64,
            bytes_per_sec: stream_bytes_per_sec(path, links),
            window_bytes: u64::from(links.initial_window) * links.payload_bytes,
            lead_ns: *lead_ns,
            ..placement::CandidatePath::default()
        };
        self.cell.paths.iter().zip(leads).map(view).collect()
    }

    /// Returns the load of each path, by part: the part's stream, its bytes and its weight.
    fn shares(&self, streams: &[Stream], paths: &[usize]) -> Vec<closed::Share> {
        let share = |(stream, path): (&Stream, &usize)| closed::Share {
            of: stream.of,
            path: *path,
            bytes: stream.packets as u64 * self.plan.links.payload_bytes,
            weight: stream.weight,
        };
        streams.iter().zip(paths).map(share).collect()
    }

    fn first_request_ns(&self) -> u64 {
        let ways = self.cell.paths.iter().map(|path| (path.rtt_ms * 1e6) as u64 / 2);
        ways.min().unwrap_or_default()
    }

    fn packets(&self, bytes: u64) -> usize {
        bytes.div_ceil(self.plan.links.payload_bytes) as usize
    }

    fn wire_bytes(&self, packets: usize) -> u64 {
        packets as u64 * self.plan.links.packet_bytes
    }
}

/// The priority of streams in these plans, which set only weights.
const BY_WEIGHT: Signal = Signal { urgency: 0, is_incremental: true, group: None, weight: 1 };

/// Makes the links of a cell. The sender knows each round trip with an error.
fn links(cell: &Cell, links: &Links, random: &mut Random) -> Vec<Link> {
    let of = |path: &Path| {
        let known_ns = path.rtt_ms * 1e6 * (1.0 + links.rtt_error * (2.0 * random.share() - 1.0));
        let packet_ns = (links.packet_bytes as f64 * 8e3 / path.rate_mbit) as u64;
        Link::new(packet_ns, (path.rtt_ms * 1e6) as u64, known_ns, links)
    };
    cell.paths.iter().map(of).collect()
}

/// Returns the goodput of a path, in bytes of streams per second.
fn stream_bytes_per_sec(path: &Path, links: &Links) -> u64 {
    (path.rate_mbit * 125e3 * links.payload_bytes as f64 / links.packet_bytes as f64) as u64
}

/// Returns all ways to assign one of `paths` paths to each of `streams` streams.
fn assignments(streams: usize, paths: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for _ in 0..streams {
        let longer = |ways: &Vec<usize>| (0..paths).map(|path| [ways.as_slice(), &[path]].concat()).collect::<Vec<_>>();
        all = all.iter().flat_map(longer).collect();
    }
    all
}
