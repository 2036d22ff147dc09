//! Open loop: payloads leave at a rate, however many arrive.

use std::{
    cell::Cell,
    fmt,
    future::poll_fn,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use quic::segments::Segments;
use role::tunnel::UdpTunnel;
use tokio::{task::JoinSet, time::sleep};

use super::{DRAIN, Figure, Meters, Tunnels, WARM_UP, next_trial, value};
use crate::{
    client::{Client, Connection},
    pace::Pacer,
    payload::{Head, PAYLOAD_BYTES, now_ns},
    process,
    relay::Relay,
    target::{Behaviour, HELLO, Target},
};

/// The highest loss, in percent, that counts as none.
pub const LOSS_FREE_PERCENT: f64 = 0.1;

/// The range of rates to search, in payloads per second: up to one that no generator on one core reaches.
const SEARCHED: (f64, f64) = (4e3, 4e6);

/// How close the search gets to the highest rate, as a ratio.
const PRECISION: f64 = 1.05;

/// The fraction of a rate that a generator has to offer in order to be on schedule.
const ON_SCHEDULE: f64 = 0.98;

/// The fraction of its core from which a generator counts as always busy: the kernel's ticks and other programs use the rest.
const BUSY: f64 = 0.97;

/// The metric of [`OneWay::search`] for the rate that it found, in payloads per second.
pub const HIGHEST_RATE: &str = "highest rate without loss";

/// The metric of [`OneWay::search`] for what prevents higher rates: 1 for the generator, 0 for the relay. With 1, the highest
/// rate is a lower bound.
pub const GENERATOR_LIMITS: &str = "generator is the limit";

/// Which way payloads go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// From the client to the target.
    Up,
    /// From the target to the client.
    Down,
}

/// Tunnels that carry payloads one way.
pub struct OneWay<'a> {
    relay: &'a Relay,
    client: Client,
    target: Target,
    path: Path,
    _connections: Vec<Rc<Connection>>,
}

enum Path {
    Up(Source),
    Down { counted: Rc<Counted>, readers: JoinSet<()> },
}

/// The counts of the readers of all tunnels.
#[derive(Default)]
struct Counted {
    trial: Cell<u32>,
    received: Cell<u64>,
}

impl<'a> OneWay<'a> {
    /// Opens tunnels.
    ///
    /// # Errors
    /// When the relay refuses, or carries nothing.
    pub async fn open(relay: &'a Relay, direction: Direction, tunnels: &Tunnels) -> Result<Self> {
        Self::to(Target::start(Behaviour::Sink)?, relay, direction, tunnels).await
    }

    /// Opens tunnels to a target that counts.
    ///
    /// # Errors
    /// As [`OneWay::open`].
    pub async fn to(target: Target, relay: &'a Relay, direction: Direction, tunnels: &Tunnels) -> Result<Self> {
        let client = Client::start(relay, target.address()?)?;
        let (mut opened, connections) = client.open(tunnels.tunnels, tunnels.connections).await?;
        greet(&mut opened, &target).await?;
        let path = match direction {
            Direction::Up => Path::Up(Source { sequences: vec![0; opened.len()], tunnels: opened, next: 0 }),
            Direction::Down => {
                let counted = Rc::<Counted>::default();
                let mut readers = JoinSet::new();
                for (index, tunnel) in opened.into_iter().enumerate() {
                    readers.spawn_local(read(tunnel, index as u32, counted.clone()));
                }
                Path::Down { counted, readers }
            }
        };
        Ok(Self { relay, client, target, path, _connections: connections })
    }

    /// Offers `per_second` payloads per second for `seconds`, and counts arrivals.
    ///
    /// # Errors
    /// When a socket fails, or a tunnel ends.
    pub async fn measure(&mut self, per_second: f64, seconds: f64) -> Result<Vec<Figure>> {
        let trial = next_trial();
        let sent = Cell::new(0);
        let drops_before = (process::socket_drops(self.relay.address.port())?, self.target.dropped()?);
        let left_before = self.client.sent();
        self.target.begin(trial);
        let meters = Meters::start(self.relay)?;
        let started = Instant::now();
        let duration = Duration::from_secs_f64(seconds);
        match &mut self.path {
            Path::Up(source) => tokio::select! {
                outcome = source.run(trial, per_second, &sent) => outcome?,
                () = sleep(duration) => {}
            },
            Path::Down { counted, .. } => {
                counted.trial.set(trial);
                counted.received.set(0);
                tokio::select! {
                    outcome = self.target.source(trial, per_second, &sent) => outcome?,
                    () = sleep(duration) => {}
                }
            }
        }
        let elapsed = started.elapsed().as_secs_f64();
        let busy = meters.generator_cores()?;
        sleep(DRAIN).await;
        let mut held_back = 0;
        let received = match &self.path {
            Path::Up(_) => {
                held_back = sent.get().saturating_sub(self.client.sent() - left_before);
                self.target.received()
            }
            Path::Down { counted, readers } => {
                ensure!(readers.len() == self.target.known_tunnels(), "a tunnel ended");
                counted.received.get()
            }
        };
        let sent = sent.get();
        ensure!(sent > 0, "nothing was sent");
        let relay_drops = process::socket_drops(self.relay.address.port())? - drops_before.0;
        let mut figures = vec![
            Figure::new("offered", sent as f64 / elapsed, "1/s"),
            Figure::new("delivered", received as f64 / elapsed, "1/s"),
            Figure::new("loss", 100.0 * sent.saturating_sub(received) as f64 / sent as f64, "%"),
            Figure::new("held back by the client", held_back as f64, "payloads"),
            Figure::new("lost at the relay's QUIC socket", relay_drops as f64, "packets"),
            Figure::new("lost at the target's socket", (self.target.dropped()? - drops_before.1) as f64, "payloads"),
            Figure::new("generator cores while offering", busy, "cores"),
        ];
        figures.append(&mut meters.per_payload(received)?);
        Ok(figures)
    }

    /// Searches for the highest rate at which less than [`LOSS_FREE_PERCENT`] is lost, and returns the figures at that rate, with
    /// [`GENERATOR_LIMITS`]. Each trial opens tunnels of its own, because a trial at too high a rate leaves its connection with a
    /// small window and a long round trip. A rate fails only if it fails twice, because another program may have used the core
    /// meanwhile.
    ///
    /// # Errors
    /// As [`OneWay::open`] and [`OneWay::measure`]; also if even the lowest rate that is tried loses payloads, or is too high for the
    /// generator.
    pub async fn search(
        relay: &'a Relay,
        direction: Direction,
        tunnels: &Tunnels,
        seconds: f64,
    ) -> Result<Vec<Figure>> {
        let (mut low, mut high) = SEARCHED;
        let mut best = None;
        let mut limit = Limit::Generator;
        while high / low > PRECISION {
            let rate = (low * high).sqrt();
            let trial = async || Self::open(relay, direction, tunnels).await?.measure(rate, seconds).await;
            match try_twice(trial, rate).await? {
                Ok(figures) => (low, best) = (rate, Some(figures)),
                Err(failed) => (high, limit) = (rate, failed),
            }
        }
        let Some(mut figures) = best else { bail!("{limit} even at {high:.0} payloads per second") };
        for figure in figures.iter_mut().filter(|figure| figure.metric == "delivered") {
            figure.metric = HIGHEST_RATE;
        }
        figures.push(Figure::new(GENERATOR_LIMITS, f64::from(u8::from(limit == Limit::Generator)), "1 if so"));
        Ok(figures)
    }
}

/// Returns the figures of a trial at a rate, or whether generator or relay failed at it in two attempts.
async fn try_twice(
    trial: impl AsyncFn() -> Result<Vec<Figure>>,
    per_second: f64,
) -> Result<Result<Vec<Figure>, Limit>> {
    let mut failed = Limit::Relay;
    for _ in 0..2 {
        let figures = trial().await?;
        match judge(&figures, per_second) {
            Ok(()) => return Ok(Ok(figures)),
            // Such an attempt says nothing about the relay, so a single one suffices.
            Err(Limit::Generator) => failed = Limit::Generator,
            Err(Limit::Relay) => {}
        }
    }
    Ok(Err(failed))
}

/// The side that limits the rate; as text, what it does at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Generator,
    Relay,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Generator => "the generator reaches its limit",
            Self::Relay => "the relay loses payloads",
        })
    }
}

/// Judges the figures at a rate. The generator failed if it fell behind its schedule, or if payloads were lost while it had no
/// time left: its own sockets may have overflowed then, or it may have acknowledged late.
fn judge(figures: &[Figure], per_second: f64) -> Result<(), Limit> {
    // A figure that is missing or not a number passes no test.
    let is = |metric, at_least: f64| value(figures, metric).is_some_and(|value| value >= at_least);
    let lossless = value(figures, "loss").is_some_and(|loss| loss <= LOSS_FREE_PERCENT);
    let on_schedule = is("offered", ON_SCHEDULE * per_second);
    let is_busy = is("generator cores while offering", BUSY);
    if lossless && on_schedule {
        Ok(())
    } else if on_schedule && !is_busy {
        Err(Limit::Relay)
    } else {
        Err(Limit::Generator)
    }
}

/// Sends from each tunnel until the target knows all of them; this also settles path MTU and congestion window.
async fn greet(tunnels: &mut [UdpTunnel], target: &Target) -> Result<()> {
    let mut payload = [0; PAYLOAD_BYTES];
    let until = Instant::now() + WARM_UP * 10;
    loop {
        for (index, tunnel) in tunnels.iter_mut().enumerate() {
            Head { trial: HELLO, tunnel: index as u32, sequence: 0, sent_ns: 0 }.write(&mut payload);
            tunnel.batch(None).push(&payload);
        }
        sleep(WARM_UP / 3).await;
        if target.known_tunnels() == tunnels.len() {
            return Ok(());
        }
        ensure!(Instant::now() < until, "only {} of {} tunnels carry payloads", target.known_tunnels(), tunnels.len());
    }
}

/// The client as a source: all tunnels in turns.
struct Source {
    tunnels: Vec<UdpTunnel>,
    sequences: Vec<u64>,
    next: usize,
}

impl Source {
    /// Sends until dropped.
    async fn run(&mut self, trial: u32, per_second: f64, sent: &Cell<u64>) -> Result<()> {
        let mut pacer = Pacer::start(per_second)?;
        let mut payload = [0; PAYLOAD_BYTES];
        loop {
            let mut due = pacer.due().await?;
            // Spreads payloads evenly; a tunnel's share of a tick is one batch.
            let share = due.div_ceil(self.tunnels.len());
            while due > 0 {
                let count = share.min(due);
                let mut batch = self.tunnels[self.next].batch(None);
                for _ in 0..count {
                    let sequence = self.sequences[self.next];
                    self.sequences[self.next] += 1;
                    Head { trial, tunnel: self.next as u32, sequence, sent_ns: now_ns() }.write(&mut payload);
                    batch.push(&payload);
                }
                due -= count;
                sent.set(sent.get() + count as u64);
                self.next = (self.next + 1) % self.sequences.len();
            }
        }
    }
}

/// Counts the payloads that were sent to a tunnel and arrive there, until it ends.
async fn read(mut tunnel: UdpTunnel, index: u32, counted: Rc<Counted>) {
    let mut payloads = Segments::new(4 << 20);
    while let Ok(true) = poll_fn(|cx| tunnel.poll_recv(cx, &mut payloads)).await {
        let of_trial = |head: &Head| head.trial == counted.trial.get() && head.tunnel == index;
        let ours = payloads.iter().filter_map(Head::read).filter(of_trial);
        counted.received.set(counted.received.get() + ours.count() as u64);
        payloads.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_that_loses_is_told_from_a_generator_that_can_do_no_more() {
        let judged = |loss, offered, cores| {
            let figures = [
                Figure::new("loss", loss, "%"),
                Figure::new("offered", offered, "1/s"),
                Figure::new("generator cores while offering", cores, "cores"),
            ];
            judge(&figures, 1000.0)
        };
        assert_eq!(judged(0.05, 990.0, 1.0), Ok(()), "busy, but nothing was lost");
        assert_eq!(judged(2.0, 1000.0, 0.6), Err(Limit::Relay));
        assert_eq!(judged(2.0, 1000.0, 1.0), Err(Limit::Generator), "its own sockets may have lost them");
        assert_eq!(judged(0.0, 900.0, 0.6), Err(Limit::Generator), "it was not on its core");
        assert_eq!(judge(&[], 1000.0), Err(Limit::Generator), "nothing is known of the relay");
    }
}
