//! `paced-perf`: loads relays and compares them, and runs experiments.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result};
use api::say;
use clap::{Parser, Subcommand};
use instruments::{
    load::{
        self, Figure, Tunnels,
        echo::Echo,
        long_lived::LongLived,
        one_way::{Direction, OneWay},
        setup::Setup,
    },
    process::Process,
    relay::{self, GENERATOR_CORE, Kind, Relay, Started},
};
use perf::{
    bench::{self, Bench},
    demo::{self, Demo},
    papers,
    runs::{self, Experiment},
    serving::{self, Serving},
};
use plan::{self, BASE, Varied as _};

/// The folder of results, relative to the project's folder.
const RESULTS: &str = "perf/results";

/// The file of their report.
const REPORT: &str = "perf/RESULTS.md";

/// The page with the table of the fast path.
const README: &str = "perf/README.md";

/// Loads CONNECT-UDP relays and compares them, and runs experiments.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Loads one relay and prints the measurements.
    Load {
        /// The relay to start for the measurement.
        #[arg(long, default_value = "paced")]
        start: Kind,
        /// A running relay to use instead; it must reach loopback.
        #[arg(long, value_name = "ADDRESS", requires_all = ["fingerprint", "pid"])]
        relay: Option<SocketAddr>,
        /// SHA-256 of the running relay's certificate.
        #[arg(long, value_parser = relay::parse_fingerprint)]
        fingerprint: Option<[u8; 32]>,
        /// The running relay's process ID on this machine.
        #[arg(long)]
        pid: Option<u32>,
        /// The core of the load generator.
        #[arg(long, default_value_t = GENERATOR_CORE, requires = "relay")]
        core: usize,
        #[command(subcommand)]
        scenario: Scenario,
    },
    /// Measures paced and its peers in turns and prints a table.
    Bench {
        /// One round of short measurements.
        #[arg(long)]
        quick: bool,
        /// The folder for results.
        #[arg(long, value_name = "DIR", default_value = "perf/results")]
        out: PathBuf,
        /// Few, short measurements for a machine that counts time in instructions; results go to standard output.
        #[arg(long)]
        virtual_time: bool,
        /// The same for ten, a thousand and ten thousand tunnels that stay open.
        #[arg(long, requires = "virtual_time")]
        long_lived: bool,
    },
    /// Measures a payload's cost in instructions for two builds of paced, in turns. Needs a clock that counts instructions.
    BenchDiff {
        /// The build to compare with, from before the change.
        #[arg(long, value_name = "FILE")]
        before: Option<PathBuf>,
        /// The number of measurements of each step; from two on, they show the noise.
        #[arg(long, default_value_t = 2)]
        rounds: usize,
    },
    /// Measures the gateway for models and plain reverse proxies, in turns, and prints a table.
    Serving(Serving),
    /// Compares round robin over plain HTTP with paced, for a mix of requests to three models behind a thin link. Needs root.
    DemoLlm(Demo),
    /// Lists all plans and their variants.
    List,
    /// Runs an experiment and prints a table.
    Run(Experiment),
    /// Runs all plans that have no results for the current product, the most informative first, and writes the report.
    Papers(Papers),
    /// Writes the report of all results, `perf/RESULTS.md`, and the table of the fast path in `perf/README.md`.
    Report,
    /// Prints the commits of results, and the product's changes since. Fails if results come from a tree with changes, or do not
    /// name their trees.
    Provenance,
    /// Prints the tables of existing results of a plan of model serving, of its comparison with processes, of paths, of pages or of the
    /// kernel's stack.
    Show {
        /// The file of results: lines of JSON, as `run` writes them.
        results: PathBuf,
        /// The SVG file for pictures; each picture goes to its own file, named after this one.
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
    },
}

#[derive(clap::Args)]
struct Papers {
    /// The time limit, as in `2h` or `90m`; by default, there is none. A bare number counts minutes.
    #[arg(long, value_name = "TIME", value_parser = budget)]
    budget: Option<Duration>,
    /// Omits runs in the VM lab, which take most of the time.
    #[arg(long)]
    no_lab: bool,
    /// Only these plans, or variants of them: PLAN or PLAN:VARIANT.
    plans: Vec<String>,
}

#[derive(Subcommand)]
enum Scenario {
    /// Round trips without a relay.
    Direct,
    /// Closed loop: windows of payloads that the target sends back.
    Echo(Echo),
    /// Open loop from the client to the target.
    Up(Rate),
    /// Open loop from the target to the client.
    Down(Rate),
    /// Tunnels opened per second.
    Setup(Setup),
    /// Memory of idle tunnels.
    Idle(Tunnels),
    /// Echoes through some or all of many tunnels that stay open.
    LongLived(LongLived),
}

#[derive(clap::Args)]
struct Rate {
    #[command(flatten)]
    tunnels: Tunnels,
    /// Payloads per second over all tunnels; by default, searches for the highest rate without loss.
    #[arg(long)]
    rate: Option<f64>,
    /// Seconds to measure (for each rate).
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// Parses hours (`2h`) or minutes (`90m`, `90`).
fn budget(text: &str) -> Result<Duration, String> {
    let (number, seconds) = match text.strip_suffix('h') {
        Some(hours) => (hours, 3_600),
        None => (text.strip_suffix('m').unwrap_or(text), 60),
    };
    let number: u32 = number.parse().map_err(|_| format!("{text} is no time: write 2h, 90m or 90"))?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("paced-perf: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Load {
            relay: Some(address), fingerprint: Some(fingerprint), pid: Some(pid), core, scenario, ..
        } => load::on_core(core, async {
            measure(&Relay { address, fingerprint, process: Process { pid } }, scenario).await
        }),
        Command::Load { start, scenario, .. } => {
            load::on_core(GENERATOR_CORE, async { measure(&Started::start(start)?.relay, scenario).await })
        }
        Command::Bench { quick, out, virtual_time, long_lived } => {
            let bench = match (virtual_time, long_lived, quick) {
                (_, true, _) => Bench::of_long_lived_tunnels(),
                (true, ..) => Bench::in_virtual_time(),
                (.., true) => Bench::quick(),
                (.., false) => Bench::full(),
            };
            load::on_core(GENERATOR_CORE, bench::run(&bench, &out))
        }
        Command::BenchDiff { before, rounds } => {
            load::on_core(GENERATOR_CORE, bench::difference::run(before.as_deref(), rounds))
        }
        Command::Serving(serving) => load::on_core(GENERATOR_CORE, serving::run(&serving)),
        Command::DemoLlm(demo) => demo::guard::guarded(|| demo::run(&demo)),
        Command::List => list(),
        Command::Run(experiment) => runs::run(&experiment),
        Command::Papers(Papers { budget, no_lab, plans }) => {
            let done = papers::run(&papers::Bounds { budget, plans, lab: !no_lab, folder: RESULTS.into() });
            // The existing results deserve a report, whether or not a run failed.
            report().and(done)
        }
        Command::Report => report(),
        Command::Provenance => papers::provenance::check(Path::new(RESULTS)),
        Command::Show { results, plot } => runs::show(&results, plot.as_deref()),
    }
}

fn report() -> Result<()> {
    let folder = Path::new(RESULTS);
    let text = papers::report(&papers::Results::open(folder)?, folder)?;
    let written = |path| format!("failed to write {path}; run this in the project's folder");
    fs::write(REPORT, text).with_context(|| written(REPORT))?;
    let page = fs::read_to_string(README).with_context(|| README)?;
    fs::write(README, bench::figures::replaced(&page, folder)?).with_context(|| written(README))?;
    say!("the report is {REPORT}; {README} has the table of the fast path");
    Ok(())
}

fn list() -> Result<()> {
    for name in plan::names()? {
        let (title, source, variants) = match plan::Any::read(&name)? {
            plan::Any::Network(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Serving(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Paths(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Trees(plan) => (plan.title.clone(), plan.source.clone(), BASE.to_owned()),
            plan::Any::Stack(plan) => (plan.title.clone(), plan.source.clone(), BASE.to_owned()),
            plan::Any::Processes(plan) => (plan.title.clone(), plan.source.clone(), BASE.to_owned()),
        };
        say!("{name:24} {title} ({source}); variants: {variants}");
    }
    Ok(())
}

fn variants<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

async fn measure(relay: &Relay, scenario: Scenario) -> Result<()> {
    let figures = match scenario {
        Scenario::Direct => load::echo::direct(1.0).await?,
        Scenario::Echo(echo) => load::echo::run(relay, &echo).await?,
        Scenario::Up(rate) => one_way(relay, Direction::Up, &rate).await?,
        Scenario::Down(rate) => one_way(relay, Direction::Down, &rate).await?,
        Scenario::Setup(setup) => load::setup::run(relay, &setup).await?,
        Scenario::Idle(tunnels) => load::idle::run(relay, &tunnels).await?,
        Scenario::LongLived(tunnels) => load::long_lived::run(relay, &tunnels).await?,
    };
    for Figure { metric, value, unit } in figures {
        say!("{metric:40} {value:12.2} {unit}");
    }
    Ok(())
}

async fn one_way(relay: &Relay, direction: Direction, rate: &Rate) -> Result<Vec<Figure>> {
    match rate.rate {
        Some(per_second) => {
            OneWay::open(relay, direction, &rate.tunnels).await?.measure(per_second, rate.seconds).await
        }
        None => OneWay::search(relay, direction, &rate.tunnels, rate.seconds).await,
    }
}
