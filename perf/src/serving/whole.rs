//! Closed loop: whole answers, one after another on connections that stay open.

use anyhow::{Context as _, Result};
use futures::future::try_join_all;

use super::{
    client::{self, Clients},
    engine::{Engine, Rhythm},
    rows::Sample,
    trial::{Meters, Trial},
};

/// Whole answers.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Whole {
    /// The number of connections.
    #[arg(long, default_value_t = 8)]
    pub connections: u64,
    /// Requests on each connection, one after another.
    #[arg(long, default_value_t = 10_000)]
    pub requests: u64,
}

impl Whole {
    /// Returns the name of the load.
    pub fn name(&self) -> String {
        format!("{} connections × {} whole answers", self.connections, self.requests)
    }
}

/// Requests answers through a peer.
///
/// # Errors
/// When the peer does not start, or an answer is not as expected.
pub async fn run(whole: &Whole, trial: Trial<'_>) -> Result<Vec<Sample>> {
    let engine = Engine::start(Rhythm { period_ns: 1_000_000, groups: 1 }).await?;
    let running = trial.start(&engine)?;
    let clients = Clients::new(running.address, client::PATIENCE)?;
    clients.ask_again_and_again(100).await.context("the first requests")?;
    drop(clients.measured()?);
    let meters = Meters::start(&running)?;
    try_join_all((0..whole.connections).map(|_| clients.ask_again_and_again(whole.requests))).await?;
    let elapsed = meters.began.elapsed();
    let seen = clients.measured()?;
    let mut samples = meters.per_thousand(seen.answers)?;
    let micros = |metric, value: u64| Sample { metric, value: value as f64 / 1e3, unit: "µs" };
    samples.extend([
        Sample { metric: "answers", value: seen.answers as f64 / elapsed.as_secs_f64(), unit: "1/s" },
        micros("answer, median", seen.first.value_at_quantile(0.5)),
        micros("answer, 99 %", seen.first.value_at_quantile(0.99)),
    ]);
    Ok(samples)
}
