//! The gateway for models under load, beside plain reverse proxies: each peer in turns, at the same load.
//!
//! ```text
//! core 1: client ── HTTP ──▶ core 0: proxies ── HTTP ──▶ core 1: engine
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`engine`] | tokens when they are due |
//! | [`client`] | streams that begin when they are due, whole answers, clients that leave |
//! | [`wire`] | what the two say to each other |
//! | [`peer`] | who stands in between, as processes |
//! | [`rows`] | results and their table |

pub mod client;
pub mod engine;
pub mod peer;
pub mod rows;
pub mod wire;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use tokio::time::sleep;

use self::{
    client::{Clients, Load, Seen},
    engine::{Engine, Rhythm},
    peer::{Peer, Running, Wanted},
    rows::{Rows, Sample},
};
use crate::{
    origin::Origin,
    process::{Meter, Process},
};

/// Requests over one connection of paced at once, where they are no matter.
const REQUESTS: u32 = 20_000;

/// What is measured, and how often.
#[derive(Clone, Debug, clap::Args)]
pub struct Serving {
    /// Whom to measure; all but `paced-before` unless it says otherwise.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<Peer>,
    /// Another build of paced, for the peer `paced-before`.
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// How often each peer is measured, in turns.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// Of the first round; each further round has the next.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where results are written, as lines of JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    scenario: Scenario,
}

/// What clients ask for.
#[derive(Clone, Copy, Debug, clap::Subcommand)]
enum Scenario {
    /// Open loop: streams of tokens.
    Tokens(Tokens),
}

/// Streams of tokens.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Tokens {
    /// Streams at once, on average.
    #[arg(long, default_value_t = 1_000)]
    streams: u64,
    /// Tokens per second of each.
    #[arg(long, default_value_t = 10)]
    rate: u64,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 100)]
    tokens: u64,
    /// Streams that get their tokens at the same moment, as the requests of one step of an engine do.
    #[arg(long, default_value_t = 1)]
    at_once: u64,
    /// Seconds to measure.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

impl Tokens {
    fn period_ns(&self) -> u64 {
        1_000_000_000 / self.rate.max(1)
    }

    fn name(&self) -> String {
        let Self { streams, rate, at_once, .. } = self;
        let at_once = if *at_once > 1 { format!(", {at_once} at once") } else { String::new() };
        format!("{streams} streams × {rate} tokens/s{at_once}")
    }
}

/// Measures all peers in turns, prints the table and writes the rows. A peer whose program is missing is reported and left
/// out; one that fails is reported.
///
/// # Errors
/// The results cannot be written.
pub async fn run(serving: &Serving) -> Result<()> {
    let all = [Peer::Direct, Peer::Paced, Peer::Nginx, Peer::NginxTwice, Peer::NginxTwiceTls];
    let wanted = if serving.peers.is_empty() { &all[..] } else { &serving.peers };
    let mut peers = Vec::new();
    for peer in wanted {
        match peer.program(serving.before.as_deref()) {
            Ok(_) => peers.push(*peer),
            Err(reason) => println!("comparison with {} SKIPPED: {reason:#}", peer.name()),
        }
    }
    let mut rows = Rows::default();
    for round in 0..serving.rounds {
        for peer in &peers {
            let seed = serving.seed + round;
            eprintln!("round {} of {}: {}", round + 1, serving.rounds, peer.name());
            let Scenario::Tokens(tokens) = &serving.scenario;
            let (config, measured) = (tokens.name(), stream(*peer, tokens, serving.before.as_deref(), seed).await);
            match measured {
                Ok(samples) => rows.add(&config, peer.name(), serving.seed, &samples),
                Err(error) => println!("FAILED {config}, {}: {error:#}", peer.name()),
            }
        }
    }
    for (metric, name) in [
        ("first token, median", "added to the first token, median"),
        ("first token, 99 %", "added to the first token, 99 %"),
        ("token, median", "added to a token, median"),
        ("token, 99 %", "added to a token, 99 %"),
        ("between tokens, median", "added between tokens, median"),
        ("between tokens, 99 %", "added between tokens, 99 %"),
    ] {
        rows.add_difference(Peer::Direct.name(), metric, name);
    }
    println!("\n{}", rows.table());
    if let Some(path) = &serving.json {
        let lines = rows.json_lines(&Origin::of_this_run("wall")?)?;
        std::fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

/// CPU time of the processes in between, and of engine and clients, which are this process.
struct Meters<'a> {
    running: &'a Running,
    meters: Vec<(&'static str, Meter)>,
    own: Meter,
    began: Instant,
}

impl<'a> Meters<'a> {
    fn start(running: &'a Running) -> Result<Self> {
        let meter = |(name, process): &(&'static str, Process)| Ok((*name, Meter::start(*process)?));
        let meters = running.processes.iter().map(meter).collect::<Result<_>>()?;
        Ok(Self { running, meters, own: Meter::start(Process::own())?, began: Instant::now() })
    }

    /// What 1,000 of `count` cost each process and all of them, their memory, and how busy the generator was.
    fn per_thousand(&self, count: u64) -> Result<Vec<Sample>> {
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

/// Streams tokens through a peer.
async fn stream(peer: Peer, tokens: &Tokens, before: Option<&Path>, seed: u64) -> Result<Vec<Sample>> {
    let rhythm = Rhythm { period_ns: tokens.period_ns(), groups: (tokens.streams / tokens.at_once.max(1)).max(1) };
    let engine = Engine::start(rhythm).await?;
    let running = Running::start(peer, Wanted { engine: engine.address(), requests: REQUESTS }, before)?;
    let clients = Clients::new(running.address)?;
    clients.ask(1, 1).await.context("the first request")?;
    let load = Load { streams: tokens.streams, tokens: tokens.tokens, period_ns: tokens.period_ns(), seed };
    let offered = clients.offer(load);
    // All streams have begun, and have had tokens.
    sleep(Duration::from_nanos(2 * tokens.period_ns()) + Duration::from_secs(2)).await;
    ensure!(clients.running() > tokens.streams / 2, "only {} streams run", clients.running());
    drop(clients.measured()?);
    let (meters, written) = (Meters::start(&running)?, engine.tokens());
    clients.measure();
    sleep(Duration::from_secs(tokens.seconds)).await;
    let seen = clients.measured()?;
    let (elapsed, written) = (meters.began.elapsed(), engine.tokens() - written);
    let mut samples = meters.per_thousand(seen.tokens)?;
    offered.abort();
    let micros = |metric, value: u64| Sample { metric, value: value as f64 / 1e3, unit: "µs" };
    let Seen { delay, first, gap, .. } = &seen;
    samples.extend([
        Sample { metric: "tokens", value: seen.tokens as f64 / elapsed.as_secs_f64(), unit: "1/s" },
        Sample { metric: "tokens on the way", value: written as f64 - seen.tokens as f64, unit: "" },
        Sample { metric: "streams", value: clients.running() as f64, unit: "" },
        Sample { metric: "errors", value: seen.errors as f64, unit: "" },
        Sample { metric: "stalls of the engine", value: engine.stalls() as f64, unit: "" },
        micros("first token, median", first.value_at_quantile(0.5)),
        micros("first token, 99 %", first.value_at_quantile(0.99)),
        micros("token, median", delay.value_at_quantile(0.5)),
        micros("token, 99 %", delay.value_at_quantile(0.99)),
        micros("token, 99.9 %", delay.value_at_quantile(0.999)),
        micros("between tokens, median", gap.value_at_quantile(0.5)),
        micros("between tokens, 99 %", gap.value_at_quantile(0.99)),
    ]);
    if let Some(error) = seen.first_error {
        println!("{}: {} errors, the first: {error}", peer.name(), seen.errors);
    }
    Ok(samples)
}
