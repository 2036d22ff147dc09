//! Experiments by hand: a plan's variants are run, their rows are written, and their tables and pictures are shown.

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
    self, BASE, Clock, PathsPlan, ProcessesPlan, Scheduler, ServingPlan, StackPlan, TreesPlan, Varied as _,
    paths::Scheduler as PathScheduler, serving::Goals,
};

/// An experiment to run, and where its results go.
#[derive(clap::Args)]
pub struct Experiment {
    /// A plan's name, or the path of its file.
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
    #[arg(long)]
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
}

/// Runs a plan's variants and prints their tables. Rows and pictures are written first, because printing ends the process if
/// its output is closed.
///
/// # Errors
/// When the plan or variant does not exist, an option is for another kind of plan, or a run fails.
pub fn run(experiment: &Experiment) -> Result<()> {
    let plan = match plan::Any::read(&experiment.plan)? {
        plan::Any::Network(plan) => *plan,
        plan::Any::Serving(plan) => return run_serving(experiment, &plan),
        plan::Any::Paths(plan) => return run_paths(experiment, &plan),
        plan::Any::Trees(plan) => return run_trees(experiment, *plan),
        plan::Any::Stack(plan) => return run_stack(experiment, *plan),
        plan::Any::Processes(plan) => return run_processes(experiment, &plan),
    };
    ensure!(experiment.policy.is_empty(), "--policy is for plans of model serving");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let clock = experiment.clock.unwrap_or(plan.clocks[0]);
    let origin = Origin::of_this_run(clock.name())?;
    let mut lines = String::new();
    for variant in experiment.variants(plan.variants()) {
        let mut plan = plan.variant(variant)?;
        plan.repetitions = experiment.repetitions.unwrap_or(plan.repetitions_on(clock));
        plan.schedulers = match experiment.scheduler.as_slice() {
            [] => present(&plan, clock),
            chosen => chosen.to_vec(),
        };
        let outcomes = experiment::compare(&plan, &plan.schedulers, clock)?;
        let mut of_variant: Vec<_> = outcomes.iter().flat_map(|outcome| outcome.rows(&plan, &origin)).collect();
        let of_runs = of_variant.len();
        if variant == BASE && !plan.queues.is_empty() {
            of_variant.extend(experiment::manage(&plan, &Origin::of_this_run("wall")?));
        }
        lines += &experiment::Row::lines(&of_variant)?;
        if let Some(path) = &experiment.json {
            fs::write(path, &lines).with_context(|| format!("failed to write {}", path.display()))?;
        }
        let picture = experiment.plot.as_deref().map(|path| match &*experiment.variant {
            "all" => named_after(path, variant),
            _ => path.to_owned(),
        });
        if let Some(path) = &picture {
            fs::write(path, experiment::plot(&plan, &outcomes))
                .with_context(|| format!("failed to write {}", path.display()))?;
        }
        let (of_runs, managed) = of_variant.split_at(of_runs);
        say!("{}", experiment::table(&plan, of_runs));
        if let Some(path) = &picture {
            say!("the picture is {}\n", path.display());
        }
        if !managed.is_empty() {
            say!("{}", experiment::queues(managed));
        }
    }
    Ok(())
}

fn run_serving(experiment: &Experiment, plan: &ServingPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some();
    ensure!(!misplaced, "--scheduler and --clock are for plans of networks");
    ensure!(experiment.path_scheduler.is_empty(), "--path-scheduler is for plans with several paths");
    let origin = Origin::of_this_run("simulated")?;
    let fingerprint = |variant: &str| anyhow::Ok(plan.variant(variant)?.fingerprint());
    let (mut rows, mut drawn) = (Vec::new(), Vec::new());
    for variant in experiment.variants(plan.variants()) {
        let mut plan = plan.variant(variant)?;
        plan.seeds.evaluations = experiment.repetitions.unwrap_or(plan.seeds.evaluations);
        let (of_variant, of_windows) = routing::run_and_draw(&plan, &experiment.policy)?;
        rows.extend(of_variant);
        drawn.extend(of_windows);
        // Trainings take long, so finished variants are kept.
        if let Some(path) = &experiment.json {
            write_rows(path, &rows, &origin, |row| fingerprint(&row.variant))?;
        }
    }
    show_serving((&rows, drawn), &goals(plan, &rows), experiment.plot.as_deref())
}

fn run_paths(experiment: &Experiment, plan: &PathsPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || experiment.clock.is_some() || !experiment.policy.is_empty();
    ensure!(
        !misplaced,
        "--scheduler, --clock and --policy are for other plans; --path-scheduler names schedulers here"
    );
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
    if let Some(path) = &experiment.json {
        write_rows(path, &rows, &origin, |row| fingerprint(&row.variant))?;
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
        write_rows(path, &rows, &origin, |_| Ok(plan.fingerprint()))?;
    }
    say!("{}", trees::tables(&rows));
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
        write_rows(path, &rows, &origin, |_| Ok(plan.fingerprint()))?;
    }
    say!("{}", stack::tables(&rows));
    Ok(())
}

fn run_processes(experiment: &Experiment, plan: &ProcessesPlan) -> Result<()> {
    let misplaced = !experiment.scheduler.is_empty() || !experiment.path_scheduler.is_empty();
    ensure!(!misplaced, "--scheduler and --path-scheduler are for other plans");
    ensure!(["all", BASE].contains(&&*experiment.variant), "plans of processes have no variants");
    let clock = experiment.clock.unwrap_or(Clock::Native);
    ensure!(clock != Clock::VirtualNetwork, "processes need a kernel: --clock native or lab");
    let origin = Origin::of_this_run(clock.name())?;
    let part = processes::Part { clock, policies: &experiment.policy, seeds: experiment.repetitions };
    let rows = processes::run(plan, &part, |rows| match &experiment.json {
        Some(path) => write_rows(path, rows, &origin, |_| Ok(plan.fingerprint())),
        None => Ok(()),
    })?;
    say!("{}", processes::tables(&rows));
    Ok(())
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

/// A line of results.
#[derive(serde::Serialize)]
struct Line<'a, R> {
    #[serde(flatten)]
    row: &'a R,
    fingerprint: String,
    #[serde(flatten)]
    origin: &'a Origin,
}

/// Where a line of results belongs.
#[derive(PartialEq, serde::Deserialize)]
struct Place {
    plan: String,
    variant: String,
    clock: String,
}

impl Place {
    fn of(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// Returns lines of results with those of a new run: other variants of their plan stay.
fn with_other_variants(existing: &str, new: &str) -> String {
    let places: Vec<_> = new.lines().filter_map(Place::of).collect();
    let stays = |line: &&str| {
        let place = Place::of(line);
        place.is_some_and(|place| places.iter().all(|new| new.plan == place.plan && *new != place))
    };
    let kept: String = existing.lines().filter(stays).map(|line| format!("{line}\n")).collect();
    kept + new
}

/// Writes rows as lines of JSON, each with the fingerprint of its variant, in place of the file's rows of these variants.
fn write_rows<R: serde::Serialize>(
    path: &Path,
    rows: &[R],
    origin: &Origin,
    fingerprint: impl Fn(&R) -> Result<String>,
) -> Result<()> {
    let line = |row| Ok(serde_json::to_string(&Line { row, fingerprint: fingerprint(row)?, origin })? + "\n");
    let lines = rows.iter().map(line).collect::<Result<String>>()?;
    let existing = fs::read_to_string(path).unwrap_or_default();
    fs::write(path, with_other_variants(&existing, &lines))
        .with_context(|| format!("failed to write {}", path.display()))
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
        fs::write(path, paths::picture(&first)).with_context(|| format!("failed to write {}", path.display()))?;
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
        fs::write(&path, svg).with_context(|| format!("failed to write {}", path.display()))?;
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

#[cfg(test)]
mod tests {
    use instruments::origin::Trees;

    use super::*;
    use crate::papers::{Results, cell};

    #[test]
    fn a_run_of_one_variant_replaces_no_rows_of_others() {
        let line = |plan, variant, clock, value| {
            format!("{{\"plan\":\"{plan}\",\"variant\":\"{variant}\",\"clock\":\"{clock}\",\"value\":{value}}}\n")
        };
        let [one, two, in_lab] =
            [line("p", "one", "native", 1), line("p", "two", "native", 1), line("p", "two", "lab", 1)];
        let new = line("p", "two", "native", 2);
        let existing = [&*one, &two, &in_lab].concat();
        assert_eq!(with_other_variants(&existing, &new), [&*one, &in_lab, &new].concat());
        assert_eq!(with_other_variants(&format!("{one}{}no row\n", line("q", "one", "native", 1)), &new), one + &new);
        assert_eq!(with_other_variants("", &new), new);
    }

    #[test]
    fn rows_of_simulations_name_their_variant_as_cells_do() {
        let folder = std::env::temp_dir().join(format!("paced-fingerprints-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let cells = cell::all(&["routing-fig9".to_owned()], false).unwrap();
        let rows: Vec<_> = cells
            .iter()
            .map(
                |cell| serde_json::json!({"plan": cell.plan, "variant": cell.variant, "repetitions": cell.repetitions}),
            )
            .collect();
        let origin = Origin::of_this_run("simulated").unwrap();
        let plan::Any::Serving(plan) = plan::Any::read("routing-fig9").unwrap() else { panic!("another kind") };
        let of_row = |row: &serde_json::Value| Ok(plan.variant(row["variant"].as_str().unwrap())?.fingerprint());
        write_rows(&folder.join("routing-fig9.json"), &rows, &origin, of_row).unwrap();
        let (results, trees) = (Results::open(&folder).unwrap(), Trees::parse("sched 1"));
        let line = results.lines("routing-fig9", false);
        for cell in &cells {
            assert!(line.contains(&format!("\"fingerprint\":\"{}\"", cell.fingerprint)), "{cell}");
        }
        // Whatever is checked out, a row of another text is not of the cell.
        let text = line.replace(origin.trees(), "sched 1");
        fs::write(folder.join("routing-fig9.json"), text).unwrap();
        let results = Results::open(&folder).unwrap();
        assert!(cells.iter().all(|cell| results.is_current(cell, &trees)));
        let changed = |cell: &cell::Cell| cell::Cell { fingerprint: "00000000".to_owned(), ..cell.clone() };
        assert!(!cells.iter().any(|cell| results.is_current(&changed(cell), &trees)));
        fs::remove_dir_all(&folder).unwrap();
    }
}
