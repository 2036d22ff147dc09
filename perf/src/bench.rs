//! Compares paced with its peers: all run the same steps in turns; the result is the medians over the rounds.

pub mod difference;
pub mod figures;
mod results;

use std::path::Path;

use anyhow::{Result, ensure};
use clap::ValueEnum as _;
use instruments::{
    load::{
        self, Figure, Tunnels,
        echo::{self, Echo},
        long_lived::LongLived,
        one_way::{Direction, OneWay},
        setup::{self, Setup},
    },
    origin::Origin,
    relay::{Kind, Relay, Started, program},
};

use self::results::Results;

/// The steps to measure, and how often.
pub struct Bench {
    rounds: usize,
    steps: Vec<Step>,
    /// Whether time is counted in instructions, so that CPU time is a number of instructions.
    virtual_time: bool,
}

/// A scenario with its parameters.
#[derive(Clone, Copy, Debug)]
enum Step {
    Direct { seconds: f64 },
    Echo(Echo),
    AtRate { direction: Direction, tunnels: Tunnels, rate: f64, seconds: f64 },
    Search { direction: Direction, tunnels: Tunnels, seconds: f64 },
    Setup(Setup),
    Idle(Tunnels),
    LongLived(LongLived),
}

/// The rate at which loss is compared with published figures, in payloads per second. Echoes are compared at this rate as well, so
/// that all relays handle the same number.
const COMPARED_RATE: f64 = 40e3;

/// A rate that keeps a relay busy, in payloads per second.
const BUSY_RATE: f64 = 120e3;

/// The number of connections, with a tunnel each, that carry echoes.
const CONNECTIONS: usize = 100;

/// The rate of echoes over all long-lived tunnels, in payloads per second: two in each tick of the generator.
const LONG_LIVED_RATE: f64 = 8e3;

/// Numbers of tunnels, and the window of each in closed loops: enough to keep a relay busy. At most 32, because quic-go
/// queues 32 datagrams for each stream and drops those beyond.
const SIZES: [(usize, u64); 3] = [(1, 32), (10, 16), (100, 4)];

/// The number of idle tunnels, and of their connections if each has its own.
const IDLE: usize = 1_000;

/// Numbers of long-lived tunnels: the others are compared with the first.
const LONG_LIVED: [usize; 3] = [10, 1_000, 10_000];

fn over_one_connection(tunnels: usize) -> Tunnels {
    Tunnels { tunnels, connections: 1 }
}

fn echo_steps(seconds: f64) -> impl Iterator<Item = Step> {
    SIZES.into_iter().map(move |(tunnels, window)| {
        Step::Echo(Echo { tunnels: over_one_connection(tunnels), window, seconds, sockets: false })
    })
}

/// Echoes at a rate, which each number of tunnels carries in turns.
fn echo_rate_steps(rate: f64, seconds: f64) -> impl Iterator<Item = Step> {
    SIZES.into_iter().map(move |(tunnels, _)| {
        let tunnels = over_one_connection(tunnels);
        Step::LongLived(LongLived { tunnels, active: None, window: 0, rate, seconds })
    })
}

fn rate_steps(direction: Direction, rate: f64, seconds: f64) -> impl Iterator<Item = Step> {
    SIZES.into_iter().map(move |(tunnels, _)| Step::AtRate {
        direction,
        tunnels: over_one_connection(tunnels),
        rate,
        seconds,
    })
}

impl Bench {
    /// All steps, in less than fifteen minutes with four relays.
    #[must_use]
    pub fn full() -> Self {
        Self { rounds: 3, steps: native_steps(1.0, 0.25, &SIZES), virtual_time: false }
    }

    /// All steps once and briefly, in less than three minutes.
    #[must_use]
    pub fn quick() -> Self {
        Self { rounds: 1, steps: native_steps(0.7, 0.2, &SIZES[1..2]), virtual_time: false }
    }

    /// Steps that count instructions per payload, for a machine whose clock counts instructions.
    #[must_use]
    pub fn in_virtual_time() -> Self {
        let up = rate_steps(Direction::Up, 4e3, 0.5);
        Self { rounds: 1, steps: echo_steps(0.5).chain(up).collect(), virtual_time: true }
    }

    /// Instructions per echoed payload while more and more tunnels stay open, over one connection and over ten: once through ten
    /// of the tunnels, once through all at a low rate. For a machine whose clock counts instructions.
    #[must_use]
    pub fn of_long_lived_tunnels() -> Self {
        let mut steps = Vec::new();
        for active in [Some(LONG_LIVED[0]), None] {
            for connections in [1, 10] {
                steps.extend(LONG_LIVED.map(|tunnels| {
                    let tunnels = Tunnels { tunnels, connections };
                    Step::LongLived(LongLived { tunnels, active, window: 16, rate: LONG_LIVED_RATE, seconds: 1.0 })
                }));
            }
        }
        Self { rounds: 1, steps, virtual_time: true }
    }

    /// Whether the benchmark fails if this relay is not built. Go may be missing on this machine, and the lab may measure paced alone.
    fn requires(&self, kind: Kind) -> bool {
        match kind {
            Kind::Paced | Kind::Coalescing | Kind::Polling => true,
            Kind::Quinn => !self.virtual_time,
            Kind::QuicGo => false,
        }
    }
}

fn native_steps(seconds: f64, trial_seconds: f64, searched: &[(usize, u64)]) -> Vec<Step> {
    let one = Echo { tunnels: over_one_connection(1), window: 1, seconds, sockets: false };
    let mut steps = vec![Step::Direct { seconds: seconds / 2.0 }, Step::Echo(one)];
    steps.extend(echo_steps(seconds));
    let tunnels = Tunnels { tunnels: CONNECTIONS, connections: CONNECTIONS };
    steps.push(Step::Echo(Echo { tunnels, window: 4, seconds, sockets: false }));
    steps.extend(echo_rate_steps(COMPARED_RATE, seconds));
    steps.extend(rate_steps(Direction::Up, COMPARED_RATE, seconds));
    steps.extend(rate_steps(Direction::Up, BUSY_RATE, seconds));
    for &(tunnels, _) in searched {
        let tunnels = over_one_connection(tunnels);
        steps.push(Step::Search { direction: Direction::Up, tunnels, seconds: trial_seconds });
    }
    steps.push(Step::Search { direction: Direction::Down, tunnels: over_one_connection(10), seconds: trial_seconds });
    for new_connections in [false, true] {
        steps.push(Step::Setup(Setup { new_connections, at_once: 32, seconds }));
    }
    for connections in [1, IDLE] {
        steps.push(Step::Idle(Tunnels { tunnels: IDLE, connections }));
    }
    steps
}

impl Step {
    /// Names the step in results.
    fn name(&self) -> String {
        let over = |tunnels: &Tunnels| match (tunnels.tunnels, tunnels.connections) {
            (1, _) => "1 tunnel".to_owned(),
            (tunnels, 1) => format!("{tunnels} tunnels"),
            (tunnels, connections) => format!("{tunnels} tunnels over {connections} connections"),
        };
        let way = |direction: &Direction| match direction {
            Direction::Up => "up",
            Direction::Down => "down",
        };
        match self {
            Self::Direct { .. } => "no relay".to_owned(),
            Self::Echo(echo) => format!("echo, {} × {} in flight", over(&echo.tunnels), echo.window),
            Self::AtRate { direction, tunnels, rate, .. } => {
                format!("{} at {:.0} thousand/s, {}", way(direction), rate / 1e3, over(tunnels))
            }
            Self::Search { direction, tunnels, .. } => format!("{} searched, {}", way(direction), over(tunnels)),
            Self::Setup(Setup { new_connections: false, .. }) => "set-up on an existing connection".to_owned(),
            Self::Setup(_) => "set-up with a new connection each".to_owned(),
            Self::Idle(tunnels) => format!("idle, {}", over(tunnels)),
            Self::LongLived(LongLived { tunnels, active: Some(active), window, .. }) => {
                format!("echo, {active} × {window} in flight, of {} open", over(tunnels))
            }
            Self::LongLived(LongLived { tunnels, rate, .. }) => {
                format!("echo at {:.0} thousand/s, all of {} in turns", rate / 1e3, over(tunnels))
            }
        }
    }

    /// Whether one measurement suffices. The memory of idle tunnels does not depend on other work of the machine, but the CPU time of
    /// echoes does.
    fn only_once(&self) -> bool {
        matches!(self, Self::Idle(_))
    }

    /// Whether a relay has something to show in this step. Polling saves the time until a sleeping thread is awake, which a payload alone in
    /// flight has to wait for.
    fn suits(&self, kind: Kind) -> bool {
        kind != Kind::Polling || matches!(self, Self::Echo(Echo { window: 1, .. }))
    }

    async fn run(self, kind: Kind, relay: &Relay) -> Result<Vec<Figure>> {
        match self {
            Self::Direct { seconds } => echo::direct(seconds).await,
            Self::Echo(echo) => echo::run(relay, &echo).await,
            Self::AtRate { direction, tunnels, rate, seconds } => {
                OneWay::open(relay, direction, &tunnels).await?.measure(rate, seconds).await
            }
            Self::Search { direction, tunnels, seconds } => OneWay::search(relay, direction, &tunnels, seconds).await,
            Self::Setup(setup) => setup::run(relay, &setup).await,
            // On a fresh relay, because the memory of earlier work would count.
            Self::Idle(tunnels) => load::idle::run(&Started::start(kind)?.relay, &tunnels).await,
            Self::LongLived(tunnels) => load::long_lived::run(&Started::start(kind)?.relay, &tunnels).await,
        }
    }
}

/// Runs all steps against all available relays, prints the table, and writes the results to `out`, or to standard output in
/// virtual time, where files vanish with the machine. A step that fails is reported and omitted, and the other steps still run.
///
/// # Errors
/// When a required relay is not built, a relay does not start, the results cannot be written, or a step failed.
pub async fn run(bench: &Bench, out: &Path) -> Result<()> {
    let mut kinds = Vec::new();
    for &kind in Kind::value_variants() {
        // In virtual time, sleeping costs nothing, and the steps there compare the costs of single events.
        if bench.virtual_time && matches!(kind, Kind::Coalescing | Kind::Polling) {
            continue;
        }
        match program(kind) {
            Ok(_) => kinds.push(kind),
            Err(reason) if bench.requires(kind) => return Err(reason),
            Err(reason) => println!("comparison with {} SKIPPED: {reason:#}", kind.name()),
        }
    }
    let (mut results, mut failed) = (Results::default(), 0);
    for round in 0..bench.rounds {
        let started = kinds.iter().map(|kind| Ok((*kind, Started::start(*kind)?))).collect::<Result<Vec<_>>>()?;
        for (kind, relay) in &started {
            results.name_stack(kind.name(), relay.stack.as_deref());
        }
        for step in bench.steps.iter().filter(|step| round == 0 || !step.only_once()) {
            let config = step.name();
            eprintln!("round {} of {}: {config}", round + 1, bench.rounds);
            // A step without a relay is the same for all kinds.
            let is_direct = matches!(step, Step::Direct { .. });
            let relays = if is_direct { &started[..1] } else { &started[..] };
            for (kind, relay) in relays.iter().filter(|(kind, _)| step.suits(*kind)) {
                let peer = if is_direct { "none" } else { kind.name() };
                match step.run(*kind, &relay.relay).await {
                    Ok(figures) => results.add(&config, peer, &figures, bench.virtual_time),
                    Err(error) => {
                        println!("FAILED {config}, {peer}: {error:#}");
                        failed += 1;
                    }
                }
            }
        }
    }
    results.add_derived();
    println!("\n{}", results.table(&kinds));
    for kind in &kinds {
        println!("memory of {}: allocated by the {}", kind.name(), kind.allocator());
    }
    let lines = results.json_lines(&Origin::of_this_run(if bench.virtual_time { "instructions" } else { "wall" })?)?;
    if bench.virtual_time {
        print!("{lines}");
    } else {
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("relay-native.json"), lines)?;
        println!("written to {}", out.join("relay-native.json").display());
    }
    ensure!(failed == 0, "{failed} steps failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_the_memory_of_idle_tunnels_is_measured_in_every_round() {
        for step in Bench::full().steps {
            assert_eq!(step.only_once(), step.name().starts_with("idle, "), "{step:?}");
        }
    }
}
