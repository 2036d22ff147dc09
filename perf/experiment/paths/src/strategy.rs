//! The choice of the next packet's stream and path.

use instruments::random::Random;

use super::{link::Link, order::Signals, simulator::Sender, stream::Sending};

/// Chooses the stream and path of each packet.
pub(super) struct Strategy {
    rule: Rule,
    order: Order,
    /// By stream: its turns so far, each divided by its share. The stream with the least has the next turn. A later stream begins
    /// with the least value of those on its path.
    turns: Vec<Option<f64>>,
    /// By stream: whether SA-ECF waits for the fast path.
    waits: Vec<bool>,
    /// By path; only the first is used if packets are placed separately.
    signals: Vec<Signals>,
}

/// How paths are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// MPQUIC's packet scheduler ("Multipath QUIC: Design and Evaluation", 2017, §3): the path with the lowest smoothed RTT whose
    /// window has room.
    LowestRtt,
    /// SA-ECF ("A Stream-Aware Multipath QUIC Scheduler for Heterogeneous Paths", 2018), as far as its abstract and FStream's
    /// section III C describe it, with the inequalities of ECF (2017), after which it is named: see [`waits`]. Streams share by
    /// [`Order::Priority`] or [`Order::Turns`].
    SaEcf,
    /// Each stream on its own path.
    Pinned,
}

/// The order in which the streams of a path are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Packet by packet in turns, as in MPQUIC.
    Turns,
    /// By weight, in the order of weighted fair queueing.
    Priority,
    /// By lottery with weights, as in FStream.
    Lottery,
    /// By the priorities of requests ([`Signal`](super::signal::Signal)).
    Signals,
}

impl Strategy {
    pub(super) fn new(rule: Rule, order: Order) -> Self {
        Self { rule, order, turns: Vec::new(), waits: Vec::new(), signals: Vec::new() }
    }
}

impl Sender for Strategy {
    fn next(
        &mut self,
        now_ns: u64,
        streams: &[Sending],
        links: &[Link],
        random: &mut Random,
    ) -> Option<(usize, usize)> {
        let ready: Vec<usize> = (0..streams.len()).filter(|at| streams[*at].has_data(now_ns)).collect();
        self.admit(&ready, streams, links.len());
        let (stream, path) = match self.rule {
            Rule::LowestRtt => {
                let path = fastest(links, Link::has_window)?;
                (self.choose(0, &ready, streams, random)?, path)
            }
            Rule::SaEcf => self.sa_ecf(ready, streams, links)?,
            Rule::Pinned => (0..links.len()).filter(|path| links[*path].has_window()).find_map(|path| {
                let here: Vec<usize> = ready.iter().copied().filter(|at| streams[*at].path == Some(path)).collect();
                Some((self.choose(path, &here, streams, random)?, path))
            })?,
        };
        let share = match self.order {
            Order::Turns => 1.0,
            Order::Priority | Order::Lottery | Order::Signals => f64::from(streams[stream].weight),
        };
        self.turns[stream] = Some(self.had(stream) + 1.0 / share);
        Some((stream, path))
    }
}

impl Strategy {
    /// Adds streams that have data for the first time.
    fn admit(&mut self, ready: &[usize], streams: &[Sending], paths: usize) {
        self.turns.resize(streams.len(), None);
        self.waits.resize(streams.len(), false);
        self.signals.resize(paths, Signals::default());
        for new in ready {
            if self.turns[*new].is_none() {
                let beside = ready.iter().filter(|at| streams[**at].path == streams[*new].path);
                let least = beside.filter_map(|at| self.turns[*at]).reduce(f64::min);
                self.turns[*new] = Some(least.unwrap_or_default());
            }
        }
    }

    fn choose(&mut self, path: usize, ready: &[usize], streams: &[Sending], random: &mut Random) -> Option<usize> {
        match self.order {
            Order::Turns | Order::Priority => self.least(ready),
            Order::Lottery => drawn(ready, streams, random),
            Order::Signals => self.signals[path].next(ready, streams),
        }
    }

    fn had(&self, stream: usize) -> f64 {
        self.turns[stream].unwrap_or_default()
    }

    fn least(&self, ready: &[usize]) -> Option<usize> {
        ready.iter().copied().min_by(|a, b| self.had(*a).total_cmp(&self.had(*b)))
    }

    fn sa_ecf(&mut self, mut ready: Vec<usize>, streams: &[Sending], links: &[Link]) -> Option<(usize, usize)> {
        let fast = fastest(links, |_| true)?;
        let free = fastest(links, Link::has_window)?;
        let by_priority = self.order == Order::Priority;
        ready.sort_by(|a, b| self.had(*a).total_cmp(&self.had(*b)));
        let sum: f64 = ready.iter().map(|at| f64::from(streams[*at].weight)).sum();
        for at in &ready {
            let share = if by_priority { f64::from(streams[*at].weight) / sum } else { 1.0 / ready.len() as f64 };
            // How many packets all streams send until this stream is complete.
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

/// ECF's decision for a stream with `packets` packets left, including packets of streams that share the path: whether to wait for the fast
/// path or take the free path. Waiting is worthwhile if the fast path, after a round trip of waiting, would
/// still send the rest earlier than a single round trip of the slow one, and if the slow path would need longer than two round
/// trips of the fast one for the stream's packets. Having waited before makes it a quarter easier to wait again.
fn waits(packets: f64, fast: &Link, slow: &Link, waited: bool) -> bool {
    let margin_ns = fast.deviation_ns().max(slow.deviation_ns());
    let on_fast_ns = (1.0 + packets / fast.window()) * fast.smoothed_ns();
    let on_slow_ns = (packets / slow.window()).ceil().max(1.0) * slow.smoothed_ns();
    let ease = if waited { 1.25 } else { 1.0 };
    on_fast_ns < ease * (slow.smoothed_ns() + margin_ns) && on_slow_ns >= 2.0 * fast.smoothed_ns() + margin_ns
}

/// Returns the path with the lowest smoothed RTT among the paths that `may` admits.
fn fastest(links: &[Link], may: impl Fn(&Link) -> bool) -> Option<usize> {
    let usable = (0..links.len()).filter(|path| may(&links[*path]));
    usable.min_by(|a, b| links[*a].smoothed_ns().total_cmp(&links[*b].smoothed_ns()))
}

/// Draws a stream at random, each with the probability of its weight (FStream's section II).
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
