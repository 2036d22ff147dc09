//! Which stream the next packet is of, and which path it takes.

use super::{link::Link, stream::Sending};
use crate::random::Random;

/// What decides.
pub(super) struct Strategy {
    rule: Rule,
    /// By stream: its turns so far, each divided by its share. The least has the next turn.
    turns: Vec<f64>,
    /// By stream: whether SA-ECF waits for the fast path.
    waits: Vec<bool>,
}

/// How it is decided.
#[derive(Clone, Debug)]
pub(super) enum Rule {
    /// MPQUIC's packet scheduler ("Multipath QUIC: Design and Evaluation", 2017, §3): the path with the lowest smoothed RTT
    /// whose window has room; streams take turns, packet by packet.
    LowestRtt,
    /// SA-ECF ("A Stream-Aware Multipath QUIC Scheduler for Heterogeneous Paths", 2018) as far as its abstract and FStream's
    /// section III C describe it, with the inequalities of ECF (2017) that it is named after: see [`waits`].
    SaEcf {
        /// Whether streams share by priority, or take turns.
        by_priority: bool,
    },
    /// Each stream on the path of its place.
    Pinned {
        /// By stream: its path.
        paths: Vec<usize>,
        /// Whether those of a path share it by lottery, as FStream's do, or in the order of weighted fair queueing.
        by_lottery: bool,
    },
}

impl Strategy {
    pub(super) fn new(rule: Rule, streams: usize) -> Self {
        Self { rule, turns: vec![0.0; streams], waits: vec![false; streams] }
    }

    /// The stream and the path of the next packet; `None` if nothing can or may be sent now.
    pub(super) fn next(
        &mut self,
        now_ns: u64,
        streams: &[Sending],
        links: &[Link],
        random: &mut Random,
    ) -> Option<(usize, usize)> {
        let ready: Vec<usize> = (0..streams.len()).filter(|at| streams[*at].has_data(now_ns)).collect();
        let (stream, path) = match &self.rule {
            Rule::LowestRtt => (self.least(&ready)?, fastest(links, Link::has_window)?),
            Rule::SaEcf { .. } => self.sa_ecf(ready, streams, links)?,
            Rule::Pinned { paths, by_lottery } => {
                (0..links.len()).filter(|path| links[*path].has_window()).find_map(|path| {
                    let here: Vec<usize> = ready.iter().copied().filter(|at| paths[*at] == path).collect();
                    let stream = if *by_lottery { drawn(&here, streams, random) } else { self.least(&here) };
                    Some((stream?, path))
                })?
            }
        };
        let share = match self.rule {
            Rule::LowestRtt | Rule::SaEcf { by_priority: false } => 1.0,
            Rule::SaEcf { by_priority: true } | Rule::Pinned { .. } => f64::from(streams[stream].weight),
        };
        self.turns[stream] += 1.0 / share;
        Some((stream, path))
    }

    fn least(&self, ready: &[usize]) -> Option<usize> {
        ready.iter().copied().min_by(|a, b| self.turns[*a].total_cmp(&self.turns[*b]))
    }

    fn sa_ecf(&mut self, mut ready: Vec<usize>, streams: &[Sending], links: &[Link]) -> Option<(usize, usize)> {
        let fast = fastest(links, |_| true)?;
        let free = fastest(links, Link::has_window)?;
        let Rule::SaEcf { by_priority } = self.rule else { return None };
        ready.sort_by(|a, b| self.turns[*a].total_cmp(&self.turns[*b]));
        let sum: f64 = ready.iter().map(|at| f64::from(streams[*at].weight)).sum();
        for at in &ready {
            let share = if by_priority { f64::from(streams[*at].weight) / sum } else { 1.0 / ready.len() as f64 };
            // What is sent until the stream has been, by all streams.
            let packets = streams[*at].waiting() as f64 / share;
            let total: usize = ready.iter().map(|other| streams[*other].waiting()).sum();
            let packets = packets.min(total as f64);
            if free == fast {
                self.waits[*at] = false;
                return Some((*at, fast));
            }
            self.waits[*at] = waits(packets, &links[fast], &links[free], self.waits[*at]);
            if !self.waits[*at] {
                return Some((*at, free));
            }
        }
        None
    }
}

/// ECF's decision for a stream of which so many packets are left, those of others that share with it included: to wait for the
/// fast path rather than to take the one that is free. The fast path is worth it if, after a round trip of waiting, it would
/// still end what is left earlier than a single round trip of the slow one does, and if the slow path would need longer than
/// two round trips of the fast one for its part. What it decided before makes it a quarter easier to decide so again.
fn waits(packets: f64, fast: &Link, slow: &Link, waited: bool) -> bool {
    let margin_ns = fast.deviation_ns().max(slow.deviation_ns());
    let on_fast_ns = (1.0 + packets / fast.window()) * fast.smoothed_ns();
    let on_slow_ns = (packets / slow.window()).ceil().max(1.0) * slow.smoothed_ns();
    let ease = if waited { 1.25 } else { 1.0 };
    on_fast_ns < ease * (slow.smoothed_ns() + margin_ns) && on_slow_ns >= 2.0 * fast.smoothed_ns() + margin_ns
}

/// The path with the lowest smoothed RTT of those that `may` be used.
fn fastest(links: &[Link], may: impl Fn(&Link) -> bool) -> Option<usize> {
    let usable = (0..links.len()).filter(|path| may(&links[*path]));
    usable.min_by(|a, b| links[*a].smoothed_ns().total_cmp(&links[*b].smoothed_ns()))
}

/// A stream by chance, each by its weight (FStream's section II).
fn drawn(ready: &[usize], streams: &[Sending], random: &mut Random) -> Option<usize> {
    let sum: f64 = ready.iter().map(|at| f64::from(streams[*at].weight)).sum();
    let mut left = random.share() * sum;
    for at in ready {
        left -= f64::from(streams[*at].weight);
        if left < 0.0 {
            return Some(*at);
        }
    }
    ready.last().copied()
}
