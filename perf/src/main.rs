//! `paced-perf`: loads relays and compares them, and runs experiments.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use experiment::{
    self,
    paths::{self, stack, trees},
    peer, serving as routing,
};
use instruments::{
    load::{
        self, Figure, Tunnels,
        echo::Echo,
        long_lived::LongLived,
        one_way::{Direction, OneWay},
        setup::Setup,
    },
    origin::Origin,
    process::Process,
    relay::{self, GENERATOR_CORE, Kind, Relay, Started},
};
use perf::{
    bench::{self, Bench},
    demo::{self, Demo},
    papers,
    serving::{self, Serving},
};
use plan::{
    self, BASE, Clock, PathsPlan, Scheduler, ServingPlan, StackPlan, TreesPlan, Varied as _,
    paths::Scheduler as PathScheduler,
};

/// Where results lie, from the project's folder.
const RESULTS: &str = "perf/results";

/// Where their report lies.
const REPORT: &str = "perf/RESULTS.md";

/// Loads CONNECT-UDP relays and compares them, and runs experiments.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Loads one relay and prints what was measured.
    Load {
        /// The relay to start, and to end afterwards.
        #[arg(long, default_value = "paced")]
        start: Kind,
        /// A relay that runs already, instead; it has to reach loopback.
        #[arg(long, value_name = "ADDRESS", requires_all = ["fingerprint", "pid"])]
        relay: Option<SocketAddr>,
        /// SHA-256 of its certificate.
        #[arg(long, value_parser = relay::parse_fingerprint)]
        fingerprint: Option<[u8; 32]>,
        /// Its process on this machine.
        #[arg(long)]
        pid: Option<u32>,
        /// The core of the generator.
        #[arg(long, default_value_t = GENERATOR_CORE, requires = "relay")]
        core: usize,
        #[command(subcommand)]
        scenario: Scenario,
    },
    /// Measures paced and its peer in turns and prints a table.
    Bench {
        /// One round of short measurements.
        #[arg(long)]
        quick: bool,
        /// Where results are written.
        #[arg(long, value_name = "DIR", default_value = "perf/results")]
        out: PathBuf,
        /// Few, short measurements for a machine that counts time in instructions; results go to standard output.
        #[arg(long)]
        virtual_time: bool,
        /// The same of ten, a thousand and ten thousand tunnels that stay open.
        #[arg(long, requires = "virtual_time")]
        long_lived: bool,
    },
    /// Measures what payloads cost in instructions, of two builds of paced in turns; only where the clock counts those.
    BenchDiff {
        /// The build to compare with, of paced before the change.
        #[arg(long, value_name = "FILE")]
        before: Option<PathBuf>,
        /// How often each step is measured; the noise is known from two on.
        #[arg(long, default_value_t = 2)]
        rounds: usize,
    },
    /// Measures the gateway for models beside plain reverse proxies, in turns, and prints a table.
    Serving(Serving),
    /// Compares round robin over plain HTTP with paced, for a mix of requests to three models behind a thin link. Needs root.
    DemoLlm(Demo),
    /// Lists all plans and their variants.
    List,
    /// Runs an experiment and prints a table.
    Run(Experiment),
    /// Runs all plans of which there are no results of the product as it stands, the most telling first, and writes the report.
    Papers(Papers),
    /// Writes the report of all results, `perf/RESULTS.md`.
    Report,
    /// Prints of which commits results are, and what of the product has changed since; fails if some are of a tree with changes, or do
    /// not name their trees.
    Provenance,
    /// Prints the tables of results that a plan of model serving, of paths, of pages or of the kernel's stack has left.
    Show {
        /// Lines of JSON, as `run` writes them.
        results: PathBuf,
        /// Where pictures are written, as SVG, each to a file of its own.
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
    },
}

#[derive(clap::Args)]
struct Papers {
    /// For how many minutes; by default until all is done.
    #[arg(long, value_name = "MINUTES")]
    budget: Option<u64>,
    /// Leaves out what runs in the VM lab, which takes most of the time.
    #[arg(long)]
    no_lab: bool,
    /// Only these plans.
    plans: Vec<String>,
}

#[derive(clap::Args)]
struct Experiment {
    /// A plan's name, or the path of its file.
    plan: String,
    /// A variant, or `all`.
    #[arg(long, default_value = BASE)]
    variant: String,
    /// Only these schedulers.
    #[arg(long, value_delimiter = ',')]
    scheduler: Vec<Scheduler>,
    /// Of a plan with several paths: only these schedulers.
    #[arg(long, value_delimiter = ',')]
    path_scheduler: Vec<PathScheduler>,
    /// Of a plan of model serving: only these policies.
    #[arg(long, value_delimiter = ',')]
    policy: Vec<String>,
    /// How often each scheduler runs, or how many seeds policies are held against, instead of what the plan says.
    #[arg(long)]
    repetitions: Option<u64>,
    /// Where it runs, instead of the plan's first; `lab` is for inside the VM.
    #[arg(long)]
    clock: Option<Clock>,
    /// Where results are written, as lines of JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where a picture is written, as SVG; of several variants, each to a file of its own.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
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
    /// Memory of tunnels that nobody uses.
    Idle(Tunnels),
    /// Echoes through some or all of many tunnels that stay open.
    LongLived(LongLived),
}

#[derive(clap::Args)]
struct Rate {
    #[command(flatten)]
    tunnels: Tunnels,
    /// Payloads per second over all tunnels; without it, the highest rate without loss is searched.
    #[arg(long)]
    rate: Option<f64>,
    /// Seconds to measure (for each rate).
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
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
        Command::Run(experiment) => run_plan(&experiment),
        Command::Papers(Papers { budget, no_lab, plans }) => {
            let budget = budget.map(|minutes| Duration::from_secs(60 * minutes));
            let done = papers::run(&papers::Bounds { budget, plans, lab: !no_lab, folder: RESULTS.into() });
            // What is there is worth a report, whatever failed.
            report().and(done)
        }
        Command::Report => report(),
        Command::Provenance => papers::provenance::check(Path::new(RESULTS)),
        Command::Show { results, plot } => show(&results, plot.as_deref()),
    }
}

fn report() -> Result<()> {
    let folder = Path::new(RESULTS);
    let text = papers::report(&papers::Results::open(folder)?, folder)?;
    fs::write(REPORT, text).with_context(|| format!("failed to write {REPORT}; run this in the project's folder"))?;
    println!("the report is {REPORT}");
    Ok(())
}

/// `results/plan.svg` and `rtt-100` make `results/plan-rtt-100.svg`.
fn named_after(path: &Path, variant: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{variant}.{extension}"))
}

fn list() -> Result<()> {
    for name in plan::names()? {
        let (title, source, variants) = match plan::Any::read(&name)? {
            plan::Any::Network(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Serving(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Paths(plan) => (plan.title.clone(), plan.source.clone(), variants(plan.variants())),
            plan::Any::Trees(plan) => (plan.title.clone(), plan.source.clone(), BASE.to_owned()),
            plan::Any::Stack(plan) => (plan.title.clone(), plan.source.clone(), BASE.to_owned()),
        };
        println!("{name:24} {title} ({source}); variants: {variants}");
    }
    Ok(())
}

fn variants<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

fn run_plan(experiment: &Experiment) -> Result<()> {
    let plan = match plan::Any::read(&experiment.plan)? {
        plan::Any::Network(plan) => *plan,
        plan::Any::Serving(plan) => return run_serving(experiment, &plan),
        plan::Any::Paths(plan) => return run_paths(experiment, &plan),
        plan::Any::Trees(plan) => return run_trees(experiment, *plan),
        plan::Any::Stack(plan) => return run_stack(experiment, *plan),
    };
    ensure!(experiment.policy.is_empty(), "--policy is for plans of model serving");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let variants: Vec<_> = match experiment.variant.as_str() {
        "all" => plan.variants().collect(),
        one => vec![one],
    };
    let clock = experiment.clock.unwrap_or(plan.clocks[0]);
    let origin = Origin::of_this_run(clock.name())?;
    let mut lines = String::new();
    for variant in variants {
        let mut plan = plan.variant(variant)?;
        plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions_on(clock));
        plan.schedulers = match experiment.scheduler.as_slice() {
            [] => present(&plan, clock),
            chosen => chosen.to_vec(),
        };
        let outcomes = experiment::compare(&plan, &plan.schedulers, clock)?;
        let mut of_variant: Vec<_> = outcomes.iter().flat_map(|outcome| outcome.rows(&plan, &origin)).collect();
        println!("{}", experiment::table(&plan, &of_variant));
        if let Some(path) = &experiment.plot {
            let path = if experiment.variant == "all" { named_after(path, variant) } else { path.clone() };
            fs::write(&path, experiment::plot(&plan, &outcomes))
                .with_context(|| format!("failed to write {}", path.display()))?;
            println!("the picture is {}\n", path.display());
        }
        if variant == BASE && !plan.queues.is_empty() {
            let managed = experiment::manage(&plan, &Origin::of_this_run("wall")?);
            println!("{}", experiment::queues(&managed));
            of_variant.extend(managed);
        }
        lines += &experiment::Row::lines(&of_variant)?;
    }
    if let Some(path) = &experiment.json {
        fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the schedulers of a plan that can run on a clock here, and prints which ones are left out and why.
fn present(plan: &plan::Plan, clock: Clock) -> Vec<Scheduler> {
    let is_present = |scheduler: &Scheduler| match peer::check(plan, *scheduler) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("{} ({}): {} is left out: {error:#}", plan.name, plan.variant, scheduler.name());
            false
        }
    };
    plan.schedulers_on(clock).into_iter().filter(is_present).collect()
}

/// A line of results.
#[derive(serde::Serialize)]
struct Line<'a, R> {
    #[serde(flatten)]
    row: &'a R,
    #[serde(flatten)]
    origin: &'a Origin,
}

fn run_serving(experiment: &Experiment, plan: &ServingPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some();
    ensure!(!misplaced, "--scheduler and --clock are for plans of networks");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let origin = Origin::of_this_run("simulated")?;
    let chosen: Vec<_> = match experiment.variant.as_str() {
        "all" => plan.variants().collect(),
        one => vec![one],
    };
    let (mut rows, mut lines) = (Vec::new(), String::new());
    for variant in chosen {
        let mut plan = plan.variant(variant)?;
        plan.seeds.evaluations = experiment.repetitions.unwrap_or(plan.seeds.evaluations);
        for row in routing::run(&plan, &experiment.policy)? {
            lines += &serde_json::to_string(&Line { row: &row, origin: &origin })?;
            lines.push('\n');
            rows.push(row);
        }
        // Trainings take long, so what is done is kept.
        if let Some(path) = &experiment.json {
            fs::write(path, &lines).with_context(|| format!("failed to write {}", path.display()))?;
        }
    }
    show_serving(&rows, experiment.plot.as_deref())
}

fn run_paths(experiment: &Experiment, plan: &PathsPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some() || !experiment.policy.is_empty();
    ensure!(
        !misplaced,
        "--scheduler, --clock and --policy are for other plans; --path-scheduler names schedulers here"
    );
    let origin = Origin::of_this_run("simulated")?;
    let chosen: Vec<_> = match experiment.variant.as_str() {
        "all" => plan.variants().collect(),
        one => vec![one],
    };
    let (mut rows, mut lines) = (Vec::new(), String::new());
    for variant in chosen {
        let mut plan = plan.variant(variant)?;
        plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions);
        ensure!(plan.repetitions >= 2, "--repetitions: a deviation needs at least two");
        if !experiment.path_scheduler.is_empty() {
            plan.schedulers.clone_from(&experiment.path_scheduler);
        }
        for row in paths::run(&plan)? {
            lines += &serde_json::to_string(&Line { row: &row, origin: &origin })?;
            lines.push('\n');
            rows.push(row);
        }
    }
    if let Some(path) = &experiment.json {
        fs::write(path, &lines).with_context(|| format!("failed to write {}", path.display()))?;
    }
    show_paths(&rows, experiment.plot.as_deref())
}

fn run_trees(experiment: &Experiment, mut plan: TreesPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty()
        || experiment.clock.is_some()
        || !experiment.policy.is_empty()
        || !experiment.path_scheduler.is_empty();
    ensure!(!misplaced, "--scheduler, --path-scheduler, --clock and --policy are for other plans");
    ensure!(["all", BASE].contains(&&*experiment.variant), "plans of pages have no variants");
    let origin = Origin::of_this_run("simulated")?;
    plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions);
    ensure!(plan.repetitions >= 2, "--repetitions: an interval needs at least two");
    let rows = trees::run(&plan)?;
    if let Some(path) = &experiment.json {
        write_rows(path, &rows, &origin)?;
    }
    println!("{}", trees::tables(&rows));
    Ok(())
}

fn run_stack(experiment: &Experiment, mut plan: StackPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty()
        || !experiment.policy.is_empty()
        || !experiment.path_scheduler.is_empty()
        || experiment.clock.is_some_and(|clock| clock != Clock::Lab);
    ensure!(!misplaced, "--scheduler, --path-scheduler, --policy and other clocks than lab are for other plans");
    ensure!(["all", BASE].contains(&&*experiment.variant), "plans of the kernel's stack have no variants");
    let origin = Origin::of_this_run(Clock::Lab.name())?;
    plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions);
    ensure!(plan.repetitions >= 2, "--repetitions: an interval needs at least two");
    let rows = stack::run(&plan)?;
    if let Some(path) = &experiment.json {
        write_rows(path, &rows, &origin)?;
    }
    println!("{}", stack::tables(&rows));
    Ok(())
}

/// Writes rows as lines of JSON.
fn write_rows<R: serde::Serialize>(path: &Path, rows: &[R], origin: &Origin) -> Result<()> {
    let line = |row| serde_json::to_string(&Line { row, origin }).map(|line| line + "\n");
    let lines = rows.iter().map(line).collect::<Result<String, _>>()?;
    fs::write(path, lines).with_context(|| format!("failed to write {}", path.display()))
}

/// Prints tables of rows, and draws a picture of the first variant.
fn show_paths(rows: &[paths::Row], plot: Option<&Path>) -> Result<()> {
    println!("{}", paths::tables(rows));
    if let Some(path) = plot {
        let variant = rows.first().map(|row| row.variant.clone());
        let first: Vec<_> = rows.iter().filter(|row| Some(&row.variant) == variant.as_ref()).cloned().collect();
        fs::write(path, paths::picture(&first)).with_context(|| format!("failed to write {}", path.display()))?;
        println!("the picture is {}", path.display());
    }
    Ok(())
}

/// Prints tables of rows, and draws their pictures.
fn show_serving(rows: &[routing::Row], plot: Option<&Path>) -> Result<()> {
    println!("{}", routing::tables(rows));
    for (name, svg) in plot.map(|_| routing::pictures(rows)).unwrap_or_default() {
        let Some(path) = plot.map(|path| named_after(path, &name)) else { continue };
        fs::write(&path, svg).with_context(|| format!("failed to write {}", path.display()))?;
        println!("a picture is {}", path.display());
    }
    Ok(())
}

/// Reads rows that a plan of model serving or of paths has left.
fn show(results: &Path, plot: Option<&Path>) -> Result<()> {
    let text = fs::read_to_string(results).with_context(|| format!("failed to read {}", results.display()))?;
    if let Ok(rows) = paths::Row::parse_all(&text) {
        return show_paths(&rows, plot);
    }
    if let Ok(rows) = stack::Row::parse_all(&text) {
        println!("{}", stack::tables(&rows));
        return Ok(());
    }
    if let Ok(rows) = trees::Row::parse_all(&text) {
        println!("{}", trees::tables(&rows));
        return Ok(());
    }
    let rows = routing::Row::parse_all(&text).with_context(|| results.display().to_string())?;
    show_serving(&rows, plot)
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
        println!("{metric:40} {value:12.2} {unit}");
    }
    Ok(())
}

async fn one_way(relay: &Relay, direction: Direction, rate: &Rate) -> Result<Vec<Figure>> {
    let mut path = OneWay::open(relay, direction, &rate.tunnels).await?;
    match rate.rate {
        Some(per_second) => path.measure(per_second, rate.seconds).await,
        None => path.search(rate.seconds).await,
    }
}
