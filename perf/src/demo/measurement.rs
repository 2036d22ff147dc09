//! The measurements of the demo: each model alone, and a load by one contender.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::join_all;
use instruments::random::Random;

use super::{
    arrivals::{Arrival, Class, request},
    calibration::Alone,
    client::{Asked, Client, Ended},
    contender::Contender,
    download::Download,
    stage::{Choose, Congestion, Kind, MODELS, Stage},
};

/// A request is given up after this many times its budget.
const PATIENCE: u32 = 3;

/// How often a request is repeated to measure how long it takes alone.
const ALONE: usize = 3;

/// How many tokens the answers have that show how long a model takes alone.
const TOKENS_ALONE: u32 = 65;

/// How many requests a model gets at once before the measurement.
const WARM: usize = 4;

/// How long a request may take that is not counted.
const LONG: Duration = Duration::from_secs(60);

/// Measures each model alone, over the empty link. Returns their times in the order of [`MODELS`].
pub(super) fn alone(kind: Kind, mbit: f64) -> Result<[Alone; MODELS.len()]> {
    let stage = Stage::new(kind, mbit, Choose::Rule)?;
    stage.client(async || {
        let (client, mut random) = (Client::new(PATIENCE), Random::new(0, 0xa10e));
        let mut all = [Alone::default(); MODELS.len()];
        for (at, (model, _)) in MODELS.iter().enumerate() {
            let mut seen = Vec::new();
            for _ in 0..=ALONE {
                let request = Arrival { tokens: TOKENS_ALONE, ..request(Class::Batch, &mut random) };
                let asked = client.ask(&request, &stage.engine(at), LONG, Instant::now()).await;
                ensure!(asked.ended == Ended::Whole, "the {model} model: {:?}", asked.ended);
                let first_ms = asked.first.unwrap_or_default().as_secs_f64() * 1e3;
                let token_ms = (asked.took.as_secs_f64() * 1e3 - first_ms) / f64::from(request.tokens - 1);
                seen.push(Alone { first_ms, token_ms });
            }
            // The first request pays for one-time work.
            all[at] = Alone::median(&seen[1..]);
        }
        Ok(all)
    })
}

/// The measurements while a load was offered.
pub struct Offered {
    /// The outcome of each request.
    pub asked: Vec<Asked>,
    /// The download's goodput, in Mbit/s, from the first request to the end of the last.
    pub download_mbit: f64,
    /// CPU time of gateway and edge together, in seconds.
    pub cpu_s: f64,
    /// The congestion controller of all connections.
    pub congestion: Congestion,
}

/// Sends all requests when they are due, and waits until they have ended.
pub(super) fn offer(stage: &Stage, contender: Contender, large: Alone, mix: &[Arrival]) -> Result<Offered> {
    stage.client(async || {
        let client = Client::new(PATIENCE);
        let download = Download::begin(stage.download(contender == Contender::Paced)?).await?;
        warm(stage, contender, &client).await?;
        let meters = stage.meters()?;
        let (before, start) = (download.bytes()?, Instant::now());
        let asked = mix.iter().enumerate().map(|(number, arrival)| {
            let (client, way, budget) = (&client, contender.way(stage, number), large.budget(arrival));
            async move { client.ask(arrival, &way, budget, start).await }
        });
        let asked = join_all(asked).await;
        let bits = 8 * (download.bytes()? - before);
        let cpu_s = meters.iter().map(|meter| Ok(meter.read()?.cpu_ns as f64 / 1e9)).sum::<Result<f64>>()?;
        let download_mbit = bits as f64 / 1e6 / start.elapsed().as_secs_f64();
        Ok(Offered { asked, download_mbit, cpu_s, congestion: stage.congestion() })
    })
}

/// Sends each model a few requests, one by one and at once. From these a gateway learns how long its engines take.
async fn warm(stage: &Stage, contender: Contender, client: &Client) -> Result<()> {
    let mut random = Random::new(0, 0x7a53);
    for (at, (model, _)) in MODELS.iter().enumerate() {
        let (way, start) = (contender.way_to(stage, at), Instant::now());
        let mut asked = Vec::new();
        for _ in 0..ALONE {
            asked.push(client.ask(&request(Class::Urgent, &mut random), &way, LONG, start).await);
        }
        let together: Vec<_> = (0..WARM).map(|_| request(Class::Urgent, &mut random)).collect();
        asked.extend(join_all(together.iter().map(|request| client.ask(request, &way, LONG, start))).await);
        let failed = asked.iter().find(|asked| asked.ended != Ended::Whole);
        ensure!(failed.is_none(), "a request to the {model} model before the measurement: {failed:?}");
    }
    Ok(())
}
