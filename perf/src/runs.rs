//! Experiments by hand: a plan's variants are run, their rows are written, and their tables and pictures are shown.

mod rows_file;
#[cfg(test)]
mod tests;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use api::say;
use experiment::{
    self, peer,
    serving::{self as routing, processes},
};
use instruments::origin::Origin;
use paths::{stack, trees};
use plan::{
    self, BASE, Clock, MAX_REPETITIONS, PathsPlan, ProcessesPlan, Scheduler, ServingPlan, StackPlan, TreesPlan,
    Varied as _, named_once, paths::Scheduler as PathScheduler, serving::Goals,
};

use self::rows_file::{RowsFile, check_writable, write};

/// An experiment to run, and where its results go.
#[derive(clap::Args)]
pub struct Experiment {
    /// A plan's name, or the path of its file, which has a slash or ends in `.toml`.
    plan: String,
    /// A variant, or `all`.
    #[arg(long, default_value = BASE)]
    variant: String,
    /// Only these schedulers.
    #[arg(long, value_delimiter = ',')]
    scheduler: Vec<Scheduler>,
    /// Only these schedulers, for a plan with several paths.
    #[arg(long, value_delimiter = ',')]
    path_scheduler: Vec<PathScheduler>,
    /// Only these policies, for a plan of model serving.
    #[arg(long, value_delimiter = ',')]
    policy: Vec<String>,
    /// The number of runs of each scheduler, or of seeds for each policy, instead of the plan's.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_REPETITIONS))]
    repetitions: Option<u64>,
    /// The clock to run on, instead of the plan's first; `lab` is for inside the VM.
    #[arg(long)]
    clock: Option<Clock>,
    /// The file for results, as lines of JSON. Its results of other variants of the plan stay.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The SVG file for a picture; each of several variants gets its own file, named after this one.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

impl Experiment {
    /// Returns the variants of the plan to run.
    fn variants<'a>(&'a self, all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        match &*self.variant {
            "all" => all.collect(),
            one => vec![one],
        }
    }

    /// Returns the file for a picture of a variant, if there should be one.
    fn picture(&self, variant: &str) -> Option<PathBuf> {
        self.plot.as_deref().map(|path| match &*self.variant {
            "all" => named_after(path, variant),
            _ => path.to_owned(),
        })
    }
}

/// Runs a plan's variants and prints their tables. Rows and pictures are written first, because printing ends the process if
/// its output is closed; if they cannot be written, the tables are printed nevertheless.
///
/// # Errors
/// When the plan or variant does not exist, an option is for another kind of plan, results cannot be written, or a run fails.
pub fn run(experiment: &Experiment) -> Result<()> {
    let plan = plan::Any::read(&experiment.plan)?;
    if plan::is_path(&experiment.plan) {
        eprintln!("the plan is {}", fs::canonicalize(&experiment.plan)?.display());
    }
    let file = experiment.json.as_deref().map(|path| RowsFile::open(path, plan.name())).transpose()?;
    let file = file.as_ref();
    match plan {
        plan::Any::Network(plan) => run_network(experiment, &plan, file),
        plan::Any::Serving(plan) => run_serving(experiment, &plan, file),
        plan::Any::Paths(plan) => run_paths(experiment, &plan, file),
        plan::Any::Trees(plan) => run_trees(experiment, *plan, file),
        plan::Any::Stack(plan) => run_stack(experiment, *plan, file),
        plan::Any::Processes(plan) => run_processes(experiment, &plan, file),
    }
}

fn run_network(experiment: &Experiment, plan: &plan::Plan, file: Option<&RowsFile>) -> Result<()> {
    ensure!(experiment.policy.is_empty(), "--policy is for plans of model serving");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let clock = experiment.clock.unwrap_or(plan.clocks[0]);
    let origin = Origin::of_this_run(clock.name())?;
    let variant = |name: &str| {
        let mut plan = plan.variant(name)?;
        let clocks = || plan.clocks.iter().map(|clock| clock.name()).collect::<Vec<_>>().join(", ");
        ensure!(plan.clocks.contains(&clock), "--clock: {} runs on {}, not on {}", plan.name, clocks(), clock.name());
        plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions_on(clock));
        plan.check_schedulers(&experiment.scheduler, clock).context("--scheduler")?;
        if let Some(path) = experiment.picture(name) {
            check_writable("--plot", &path)?;
        }
        Ok(plan)
    };
    let plans = experiment.variants(plan.variants()).into_iter().map(variant).collect::<Result<Vec<_>>>()?;
    let mut lines = String::new();
    for mut plan in plans {
        plan.schedulers = match experiment.scheduler.as_slice() {
            [] => present(&plan, clock),
            chosen => chosen.to_vec(),
        };
        let outcomes = experiment::compare(&plan, &plan.schedulers, clock)?;
        let mut of_variant: Vec<_> = outcomes.iter().flat_map(|outcome| outcome.rows(&plan, &origin)).collect();
        let of_runs = of_variant.len();
        if plan.variant == BASE && !plan.queues.is_empty() {
            of_variant.extend(experiment::manage(&plan, &Origin::of_this_run("wall")?));
        }
        lines += &experiment::Row::lines(&of_variant)?;
        let written = file.map_or(Ok(()), |file| file.write(&lines));
        let picture = experiment.picture(&plan.variant);
        let drawn = picture.as_deref().map_or(Ok(()), |path| write(path, &experiment::plot(&plan, &outcomes)));
        let (of_runs, managed) = of_variant.split_at(of_runs);
        say!("{}", experiment::table(&plan, of_runs));
        if !managed.is_empty() {
            say!("{}", experiment::queues(managed));
        }
        written?;
        drawn?;
        if let Some(path) = &picture {
            say!("the picture is {}\n", path.display());
        }
    }
    Ok(())
}

fn run_serving(experiment: &Experiment, plan: &ServingPlan, file: Option<&RowsFile>) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some();
    ensure!(!misplaced, "--scheduler and --clock are for plans of networks");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let origin = Origin::of_this_run("simulated")?;
    let fingerprint = |variant: &str| anyhow::Ok(plan.variant(variant)?.fingerprint());
    let variant = |name: &str| {
        let mut plan = plan.variant(name)?;
        plan.seeds.evaluations = experiment.repetitions.unwrap_or(plan.seeds.evaluations);
        plan.validate().context("--repetitions")?;
        if let Some(path) = &experiment.plot {
            // There are several pictures, whose names are known when they are drawn.
            check_writable("--plot", &named_after(path, name))?;
        }
        Ok(plan)
    };
    let plans = experiment.variants(plan.variants()).into_iter().map(variant).collect::<Result<Vec<_>>>()?;
    let (mut rows, mut drawn, mut written) = (Vec::new(), Vec::new(), Ok(()));
    for plan in plans {
        let (of_variant, of_windows) = routing::run_and_draw(&plan, &experiment.policy)?;
        rows.extend(of_variant);
        drawn.extend(of_windows);
        // Trainings take long, so finished variants are kept. Each time all rows are written, so only the last time counts.
        if let Some(file) = file {
            written = file.write_rows(&rows, &origin, |row| fingerprint(&row.variant));
        }
    }
    show_serving((&rows, drawn), &goals(plan, &rows), experiment.plot.as_deref())?;
    written
}

fn run_paths(experiment: &Experiment, plan: &PathsPlan, file: Option<&RowsFile>) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some() || !experiment.policy.is_empty();
    ensure!(
        !misplaced,
        "--scheduler, --clock and --policy are for other plans; --path-scheduler names schedulers here"
    );
    named_once(experiment.path_scheduler.iter().map(|scheduler| scheduler.name())).context("--path-scheduler")?;
    if let Some(path) = &experiment.plot {
        check_writable("--plot", path)?;
    }
    let origin = Origin::of_this_run("simulated")?;
    let fingerprint = |variant: &str| anyhow::Ok(plan.variant(variant)?.fingerprint());
    let mut rows = Vec::new();
    for variant in experiment.variants(plan.variants()) {
        let mut plan = plan.variant(variant)?;
        plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions);
        ensure!(plan.repetitions >= 2, "--repetitions: a deviation needs at least two");
        if !experiment.path_scheduler.is_empty() {
            plan.schedulers.clone_from(&experiment.path_scheduler);
        }
        rows.extend(paths::run(&plan)?);
    }
    let written = file.map_or(Ok(()), |file| file.write_rows(&rows, &origin, |row| fingerprint(&row.variant)));
    show_paths(&rows, experiment.plot.as_deref())?;
    written
}

fn run_trees(experiment: &Experiment, mut plan: TreesPlan, file: Option<&RowsFile>) -> Result<()> {
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
    let written = file.map_or(Ok(()), |file| file.write_rows(&rows, &origin, |_| Ok(plan.fingerprint())));
    say!("{}", trees::tables(&rows));
    written
}

fn run_stack(experiment: &Experiment, mut plan: StackPlan, file: Option<&RowsFile>) -> Result<()> {
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
    let written = file.map_or(Ok(()), |file| file.write_rows(&rows, &origin, |_| Ok(plan.fingerprint())));
    say!("{}", stack::tables(&rows));
    written
}

fn run_processes(experiment: &Experiment, plan: &ProcessesPlan, file: Option<&RowsFile>) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || !experiment.path_scheduler.is_empty();
    ensure!(!misplaced, "--scheduler and --path-scheduler are for other plans");
    ensure!(["all", BASE].contains(&&*experiment.variant), "plans of processes have no variants");
    let clock = experiment.clock.unwrap_or(Clock::Native);
    ensure!(clock != Clock::VirtualNetwork, "processes need a kernel: --clock native or lab");
    let origin = Origin::of_this_run(clock.name())?;
    let part = processes::Part { clock, policies: &experiment.policy, seeds: experiment.repetitions };
    let mut written = Ok(());
    let rows = processes::run(plan, &part, |rows| {
        // Each time all rows are written, so only the last time counts.
        written = file.map_or(Ok(()), |file| file.write_rows(rows, &origin, |_| Ok(plan.fingerprint())));
        Ok(())
    })?;
    say!("{}", processes::tables(&rows));
    written
}

/// Returns the schedulers of a plan that can run on a clock here, and prints which ones are omitted and why.
fn present(plan: &plan::Plan, clock: Clock) -> Vec<Scheduler> {
    let is_present = |scheduler: &Scheduler| match peer::check(plan, *scheduler) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("{} ({}): {} is omitted: {error:#}", plan.name, plan.variant, scheduler.name());
            false
        }
    };
    plan.schedulers_on(clock).into_iter().filter(is_present).collect()
}

/// Prints the tables of a file of rows, and draws their pictures: rows of model serving, of its comparison with
/// processes, of paths, of pages or of the kernel's stack. Only a run draws windows of requests, which rows do not
/// tell.
///
/// # Errors
/// When the file cannot be read or has other rows, or a picture cannot be written.
pub fn show(results: &Path, plot: Option<&Path>) -> Result<()> {
    let text = fs::read_to_string(results).with_context(|| format!("failed to read {}", results.display()))?;
    if let Ok(rows) = paths::Row::parse_all(&text) {
        return show_paths(&rows, plot);
    }
    if let Ok(rows) = stack::Row::parse_all(&text) {
        say!("{}", stack::tables(&rows));
        return Ok(());
    }
    if let Ok(rows) = trees::Row::parse_all(&text) {
        say!("{}", trees::tables(&rows));
        return Ok(());
    }
    if let Ok(rows) = processes::Row::parse_all(&text) {
        say!("{}", processes::tables(&rows));
        return Ok(());
    }
    let rows = routing::Row::parse_all(&text).with_context(|| results.display().to_string())?;
    // Rows of a plan that is no longer there have no goals.
    let plan = rows.first().and_then(|row| plan::Any::read(&row.plan).ok());
    let goals = match plan {
        Some(plan::Any::Serving(plan)) => goals(&plan, &rows),
        _ => Goals::default(),
    };
    show_serving((&rows, Vec::new()), &goals, plot)
}

/// Returns the goals of the variant that tables show: the variant of the first row.
fn goals(plan: &ServingPlan, rows: &[routing::Row]) -> Goals {
    let variant = rows.first().and_then(|row| plan.variant(&row.variant).ok());
    variant.map_or_else(Goals::default, |plan| plan.goals)
}

/// Prints tables of rows, and draws a picture of the first variant.
fn show_paths(rows: &[paths::Row], plot: Option<&Path>) -> Result<()> {
    say!("{}", paths::tables(rows));
    if let Some(path) = plot {
        let variant = rows.first().map(|row| row.variant.clone());
        let first: Vec<_> = rows.iter().filter(|row| Some(&row.variant) == variant.as_ref()).cloned().collect();
        write(path, &paths::picture(&first))?;
        say!("the picture is {}", path.display());
    }
    Ok(())
}

/// Prints tables of rows, and draws the pictures of the rows and of their run.
fn show_serving(
    (rows, drawn): (&[routing::Row], Vec<routing::Picture>),
    goals: &Goals,
    plot: Option<&Path>,
) -> Result<()> {
    say!("{}", routing::tables(rows, goals));
    let Some(plot) = plot else { return Ok(()) };
    for (name, svg) in routing::pictures(rows).into_iter().chain(drawn) {
        let path = named_after(plot, &name);
        write(&path, &svg)?;
        say!("a picture is {}", path.display());
    }
    Ok(())
}

/// Returns `results/plan-rtt-100.svg` for `results/plan.svg` and `rtt-100`.
fn named_after(path: &Path, variant: &str) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{variant}.{extension}"))
}
