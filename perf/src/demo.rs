//! The demo of models: a mix of urgent and batch requests to three engines behind a thin link that a download fills, by round
//! robin over plain HTTP and by paced.
//!
//! Both contenders get the same requests at the same times from the same client over the same link, one after the other. Each
//! has engines that were started for it, and the same warm-up requests, which are not counted.
//!
//! | module | what it is |
//! |---|---|
//! | [`mod@arrivals`] | the due times and contents of requests, from a seed |
//! | [`calibration`] | deadlines and rates, from the measured speed of the machine |
//! | [`client`] | sends requests, and records their outcome |
//! | [`download`] | fills the link |
//! | [`stage`] | namespaces, the link, engines, gateway and edge |
//! | [`rows`] | results, as lines of JSON and as tables |
//! | [`picture`] | results as SVG |
//! | [`guard`] | ends all processes and cleans up, however the demo ends |

pub mod arrivals;
pub mod calibration;
pub mod client;
pub mod download;
pub mod guard;
pub mod picture;
pub mod rows;
pub mod stage;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use instruments::{
    origin::{Origin, json_lines},
    random::Random,
};

use self::{
    arrivals::{Arrival, Class, arrivals, request},
    calibration::Alone,
    client::{Asked, Client, Ended, Way},
    download::Download,
    rows::{Load, Run},
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

/// The engines, the loads and the link of a comparison, and where its results go.
#[derive(Clone, Debug, clap::Args)]
pub struct Demo {
    /// The engines that answer.
    #[arg(long, value_enum, default_value = "llama-server")]
    pub engine: Kind,
    /// The loads, as multiples of the large model's throughput for this mix, one request after another.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    pub loads: Vec<f64>,
    /// Seconds for which requests arrive.
    #[arg(long, default_value_t = 50.0)]
    pub seconds: f64,
    /// The link's rate each way, in Mbit/s.
    #[arg(long, default_value_t = 1.0)]
    pub mbit: f64,
    /// Seeds of arrivals and prompts. Each load runs once for each seed, with the same deadlines and rates.
    #[arg(long, alias = "seed", value_delimiter = ',', default_value = "1")]
    pub seeds: Vec<u64>,
    /// The gateway's policy for choosing models.
    #[arg(long, value_enum, default_value = "considerate")]
    pub policy: Choose,
    /// The file for results, as lines of JSON. If the option is repeated, the last one counts.
    #[arg(long, value_name = "FILE", overrides_with = "json")]
    pub json: Option<PathBuf>,
    /// The folder for the gateway's decisions and their outcomes: a file for each load and seed, for `pacectl route`.
    #[arg(long, value_name = "FOLDER")]
    pub decisions: Option<PathBuf>,
    /// The SVG file for a picture. If the option is repeated, the last one counts.
    #[arg(long, value_name = "FILE", overrides_with = "plot")]
    pub plot: Option<PathBuf>,
}

/// Chooses the engine that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The client: each engine in turn, over plain HTTP.
    RoundRobin,
    /// A gateway, behind an edge.
    Paced,
}

impl Contender {
    /// Both contenders, in the order of tables.
    pub const ALL: [Self; 2] = [Self::RoundRobin, Self::Paced];

    /// The name in tables and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round robin, HTTP",
            Self::Paced => "paced",
        }
    }

    /// Returns where the request with this number goes.
    fn way(self, stage: &Stage, number: usize) -> Way {
        match self {
            Self::RoundRobin => stage.engine(number % MODELS.len()),
            Self::Paced => Stage::paced("auto"),
        }
    }

    /// Returns where a request for one model goes.
    fn way_to(self, stage: &Stage, at: usize) -> Way {
        match self {
            Self::RoundRobin => stage.engine(at),
            Self::Paced => Stage::paced(MODELS[at].0),
        }
    }
}

impl Demo {
    /// Returns an error if an option makes no sense.
    fn check(&self) -> Result<()> {
        ensure!(self.loads.iter().all(|load| (0.01..=100.0).contains(load)), "loads must be between 0.01 and 100");
        ensure!((1.0..=3_600.0).contains(&self.seconds), "requests must arrive for 1 to 3,600 seconds");
        ensure!(!self.loads.is_empty() && !self.seeds.is_empty(), "at least one load and one seed are needed");
        ensure!((0.05..=1_000.0).contains(&self.mbit), "the link's rate must be between 0.05 and 1,000 Mbit/s");
        for path in [&self.json, &self.plot].into_iter().flatten() {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            ensure!(folder.is_none_or(Path::is_dir), "there is no folder for {}", path.display());
        }
        if let Some(folder) = &self.decisions {
            ensure!(folder.is_dir(), "{} is not a folder", folder.display());
        }
        Ok(())
    }
}

/// Measures, prints the results, and writes rows and picture.
///
/// # Errors
/// Without root, or when a process does not start or the download breaks off.
pub fn run(demo: &Demo) -> Result<()> {
    demo.check()?;
    demo.engine.look()?;
    println!("engines: {}", demo.engine.name());
    println!("link: {} Mbit/s each way, which a download fills; seeds {:?}", demo.mbit, demo.seeds);
    let runs = compare(demo)?;
    println!("\n{}", rows::report(&runs));
    if let Some(path) = &demo.json {
        let lines = json_lines(&runs, &Origin::of_this_run("wall")?)?;
        std::fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))?;
        println!("rows: {}", path.display());
    }
    if let Some(path) = &demo.plot {
        std::fs::write(path, picture::picture(&runs)).with_context(|| format!("failed to write {}", path.display()))?;
        println!("picture: {}", path.display());
    }
    Ok(())
}

/// Measures each load by each contender.
///
/// # Errors
/// As [`run`].
pub fn compare(demo: &Demo) -> Result<Vec<Run>> {
    let alone = alone(demo.engine, demo.mbit)?;
    let large = alone[0];
    println!("{}", rows::calibration(&alone));
    let mut runs = Vec::new();
    for load in &demo.loads {
        let per_second = large.per_second() * load;
        for seed in &demo.seeds {
            let mix = arrivals(*seed, per_second, demo.seconds);
            ensure!(!mix.is_empty(), "no request arrives within {} s: raise --seconds", demo.seconds);
            for contender in Contender::ALL {
                eprintln!("seed {seed}, {} requests in {} s: {}", mix.len(), demo.seconds, contender.name());
                let stage = Stage::new(demo.engine, demo.mbit, demo.policy)?;
                let seen = offer(&stage, contender, large, &mix)?;
                let of = Load { times: *load, per_second, alone: &alone, seed: *seed };
                runs.push(Run::of(demo, contender, &of, &seen));
                if let Some(folder) = demo.decisions.as_ref().filter(|_| contender == Contender::Paced) {
                    let path = folder.join(format!("load-{load}-seed-{seed}.jsonl"));
                    std::fs::write(&path, stage.decisions()?)
                        .with_context(|| format!("failed to write {}", path.display()))?;
                }
            }
        }
    }
    Ok(runs)
}

/// Measures each model alone, over the empty link. Returns their times in the order of [`MODELS`].
fn alone(kind: Kind, mbit: f64) -> Result<[Alone; MODELS.len()]> {
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
fn offer(stage: &Stage, contender: Contender, large: Alone, mix: &[Arrival]) -> Result<Offered> {
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
