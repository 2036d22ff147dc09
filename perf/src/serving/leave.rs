//! Clients that leave, before their answer begins or in the middle of it. Nothing of them may stay.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use instruments::random::Random;
use tokio::time::sleep;

use super::{
    client::{self, Clients},
    engine::{Engine, Rhythm},
    peer::Running,
    rows::Sample,
    trial::Trial,
};

/// How many requests one connection of paced may have at once: far fewer than clients that leave, so that each has to free
/// its place.
const REQUESTS: u32 = 256;

/// How long the work for clients that left may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Clients that leave.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Leave {
    /// The number of clients that leave.
    #[arg(long, default_value_t = 10_000)]
    pub clients: u64,
    /// The number of clients at once.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    pub at_once: u64,
}

impl Leave {
    /// Returns the name of the load.
    pub fn name(&self) -> String {
        format!("{} clients leave, {} at once", self.clients, self.at_once)
    }
}

/// Makes clients leave, and then makes more requests.
///
/// # Errors
/// When the peer does not start, the work for clients that left does not end, or a later client gets no answer.
pub async fn run(leave: &Leave, trial: Trial<'_>) -> Result<Vec<Sample>> {
    // Tokens come fast, so that clients are soon in the middle of an answer.
    let engine = Engine::start(Rhythm { period_ns: 10_000_000, groups: leave.at_once }).await?;
    let running = trial.start_with(&engine, REQUESTS)?;
    let clients = Clients::new(running.address, client::PATIENCE)?;
    // Memory that is allocated once is allocated before the measurement.
    depart(leave, &clients, leave.clients / 5, trial.seed).await;
    settle(&engine).await?;
    let (before, began) = (resident_mib(&running)?, Instant::now());
    let mut left = depart(leave, &clients, leave.clients / 2, trial.seed + 1).await;
    settle(&engine).await?;
    let middle = resident_mib(&running)?;
    left += depart(leave, &clients, leave.clients / 2, trial.seed + 2).await;
    settle(&engine).await?;
    let (elapsed, after) = (began.elapsed(), resident_mib(&running)?);
    let (cancelled, seen) = (engine.cancelled(), clients.measured()?);
    if let Some(error) = &seen.first_error {
        println!("{}: {} errors, the first: {error}", trial.peer.name(), seen.errors);
    }
    for _ in 0..2 * REQUESTS {
        clients.ask(1, 1).await.context("a later client")?;
    }
    Ok(vec![
        Sample { metric: "clients that left", value: left as f64 / elapsed.as_secs_f64(), unit: "1/s" },
        Sample { metric: "errors", value: seen.errors as f64, unit: "" },
        Sample { metric: "given up at the engine", value: cancelled as f64, unit: "" },
        Sample { metric: "left at the engine", value: engine.running() as f64, unit: "" },
        Sample { metric: "memory, all, before", value: before, unit: "MiB" },
        Sample { metric: "memory, all, in the middle", value: middle, unit: "MiB" },
        Sample { metric: "memory, all, after", value: after, unit: "MiB" },
    ])
}

/// Makes clients leave after up to five tokens each, some before the first token: `count` of them, rounded down to a multiple of
/// `at_once`. Returns how many left.
async fn depart(leave: &Leave, clients: &Clients, count: u64, seed: u64) -> u64 {
    let each = count / leave.at_once;
    join_all((0..leave.at_once).map(async |number| {
        let mut random = Random::new(seed, number);
        for _ in 0..each {
            let asked = clients.ask(10_000, random.below(6) as u64).await;
            clients.count(asked);
        }
    }))
    .await;
    each * leave.at_once
}

/// Waits until the engine works for no client that left.
async fn settle(engine: &Engine) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while engine.running() > 0 {
        ensure!(Instant::now() < until, "the engine still works on {} requests of clients that left", engine.running());
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn resident_mib(running: &Running) -> Result<f64> {
    let bytes = running.processes.iter().map(|(_, process)| process.resident_bytes()).sum::<Result<u64>>()?;
    Ok(bytes as f64 / f64::from(1 << 20))
}
