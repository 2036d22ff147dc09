//! Open loop: streams of tokens, which begin when they are due.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::time::sleep;

use super::{
    client::{Clients, Load, PATIENCE, Seen},
    engine::{Engine, Rhythm},
    peer::Peer,
    rows::Sample,
    trial::{Meters, Trial},
};

/// Each step of a search multiplies the number of tokens by this factor, up to a maximum of tokens per second.
const STEP: u64 = 2;
const MOST_PER_SEC: u64 = 640_000;

/// The shortest time after which a stream without tokens is an error. The machine itself may pause for a while.
const LEAST_PATIENCE: Duration = Duration::from_secs(2);

/// Streams of tokens.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Tokens {
    /// The average number of streams at once.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub streams: u64,
    /// Tokens per second of each stream.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub rate: u64,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: u64,
    /// Streams that get their tokens at the same time, like the requests in one step of an engine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub at_once: u64,
    /// Seconds to measure.
    #[arg(long, default_value_t = 5)]
    pub seconds: u64,
}

impl Tokens {
    fn period_ns(&self) -> u64 {
        1_000_000_000 / self.rate
    }

    /// Returns how long a stream may lack tokens. If the measurement takes three seconds or more, this is shorter, so that a stream that
    /// stalls early is an error before the end.
    fn patience(&self) -> Duration {
        (Duration::from_secs(self.seconds) / 2).clamp(LEAST_PATIENCE, PATIENCE)
    }

    /// Returns the name of the load.
    pub fn name(&self) -> String {
        let Self { streams, rate, at_once, .. } = self;
        let at_once = if *at_once > 1 { format!(", {at_once} at once") } else { String::new() };
        format!("{streams} streams × {rate} tokens/s{at_once}")
    }
}

/// Streams tokens through a peer.
///
/// # Errors
/// When the peer does not start, or too few streams run.
pub async fn run(tokens: &Tokens, trial: Trial<'_>) -> Result<Vec<Sample>> {
    let rhythm = Rhythm { period_ns: tokens.period_ns(), groups: (tokens.streams / tokens.at_once).max(1) };
    let engine = Engine::start(rhythm).await?;
    let running = trial.start(&engine)?;
    let clients = Clients::new(running.address, tokens.patience())?;
    clients.ask(1, 1).await.context("the first request")?;
    let load = Load { streams: tokens.streams, tokens: tokens.tokens, period_ns: tokens.period_ns(), seed: trial.seed };
    let offered = clients.offer(load);
    // By then all streams have begun, and have had tokens.
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
    let Seen { delay, first, jitter, .. } = &seen;
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
        micros("jitter between tokens, median", jitter.value_at_quantile(0.5)),
        micros("jitter between tokens, 99 %", jitter.value_at_quantile(0.99)),
    ]);
    if let Some(error) = seen.first_error {
        println!("{}: {} errors, the first: {error}", trial.peer.name(), seen.errors);
    }
    Ok(samples)
}

/// Doubles the tokens per second without a peer until the engine or its clients fall behind. Returns the samples of the
/// highest rate that passed.
///
/// # Errors
/// As [`run`].
pub async fn ceiling(tokens: &Tokens, trial: Trial<'_>) -> Result<Vec<Sample>> {
    let trial = Trial { peer: Peer::Direct, ..trial };
    let mut best = Vec::new();
    let mut tokens = *tokens;
    while tokens.streams * tokens.rate <= MOST_PER_SEC {
        // Answers last as long as before: shorter ones would be another load.
        let samples = run(&tokens, trial).await?;
        let of = |metric| samples.iter().find(|sample| sample.metric == metric).map_or(0.0, |sample| sample.value);
        // The number of streams varies a little around its mean.
        let due = of("streams") * tokens.rate as f64;
        if of("tokens") < 0.9 * due || of("errors") > 0.0 || of("token, 99 %") > 1e6 / tokens.rate as f64 {
            break;
        }
        best = samples;
        tokens = Tokens { rate: tokens.rate * STEP, tokens: tokens.tokens * STEP, ..tokens };
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    #[test]
    fn a_stream_that_stalls_is_an_error_before_the_measurement_ends() {
        for (seconds, patience_ms) in [(4, 2_000), (5, 2_500), (15, 7_500), (60, 10_000)] {
            let tokens = Tokens { streams: 1, rate: 10, tokens: 100, at_once: 1, seconds };
            assert_eq!(tokens.patience(), Duration::from_millis(patience_ms));
            assert!(tokens.patience() < Duration::from_secs(seconds));
        }
    }

    #[tokio::test]
    async fn streams_without_anybody_in_between_lose_no_token_and_get_them_at_their_rate() {
        let tokens = Tokens { streams: 40, rate: 50, tokens: 20, at_once: 4, seconds: 1 };
        let trial = Trial { peer: Peer::Direct, before: None, seed: 1 };
        let samples = LocalSet::new().run_until(run(&tokens, trial)).await.unwrap();
        let of = |metric| samples.iter().find(|sample| sample.metric == metric).unwrap().value;
        assert_eq!((of("errors"), of("stalls of the engine")), (0.0, 0.0));
        // As many as run on average, more or less.
        assert!((1_000.0..3_000.0).contains(&of("tokens")), "{samples:?}");
        // Little's law: a busy machine holds up tokens, and as many more are then on the way.
        let longest_s = of("token, 99.9 %").max(of("first token, 99 %")) / 1e6;
        let held_up = of("tokens") * longest_s;
        assert!(of("token, median") < 100_000.0 && of("tokens on the way").abs() < 100.0 + held_up, "{samples:?}");
    }
}
