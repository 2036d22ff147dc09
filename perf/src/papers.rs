//! All plans by one command: the cells to run, their existing results, and the report of all of them.
//!
//! | module | what it is |
//! |---|---|
//! | [`cell`] | a variant of a plan on a clock, and the order of cells |
//! | `durations` | how long cells took, and estimates for others |
//! | `lanes` | how many cells run at the same time |
//! | [`results`] | files of rows, and whether rows are of the current product |
//! | [`provenance`] | the commit that each result was measured on; refuses results that cannot be reproduced |
//! | [`report`](mod@report) | `perf/RESULTS.md`, made from rows and verdicts |

pub mod cell;
mod durations;
mod lanes;
#[cfg(test)]
mod manual;
pub mod provenance;
pub mod report;
pub mod results;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use instruments::origin::Checkout;
use plan::BASE;

pub use self::{cell::Cell, report::report, results::Results};
use self::{durations::Durations, lanes::Lanes};

/// A cell in the lab is ended after this multiple of its expected time: a run that needed 41 s of a core took 298 s on a machine
/// with other work.
const LATE: u32 = 8;

/// The shortest time after which a cell in the lab is ended.
const LEAST_TIMEOUT: Duration = Duration::from_secs(7_200);

/// How many lines of the output of a cell that failed are shown.
const LAST_LINES: usize = 20;

/// The bounds of a run of all plans.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// No cell begins that is expected to end later than this.
    pub budget: Option<Duration>,
    /// Only these plans, or variants of them as `PLAN:VARIANT`; all plans if empty.
    pub plans: Vec<String>,
    /// Whether cells of the VM lab run as well.
    pub lab: bool,
    /// The folder of rows.
    pub folder: PathBuf,
}

/// Runs every cell without rows of the current product, the most telling ones first, each in a separate process and one for each CPU
/// where this does not change their figures. Results are kept: an interrupted run continues where it was. Rows are never replaced by
/// rows of fewer repetitions. All rows name the commit and the trees that were checked out at the start.
///
/// # Errors
/// When the tree has uncommitted changes or changes during the run, a plan requires fewer repetitions than its rows have, or a file
/// of results cannot be read or written; cells that run are still waited for. A cell that fails is reported, and the others still run;
/// the error follows at the end.
pub fn run(bounds: &Bounds) -> Result<()> {
    let checkout = Checkout::standing();
    let trees = checkout.trees();
    ensure!(!trees.is_dirty(), "commit first: rows of a tree with changes cannot be reproduced");
    let all = cell::all(&bounds.plans, bounds.lab)?;
    let mut kept =
        Kept { results: Results::open(&bounds.folder)?, durations: Durations::read(&bounds.folder), failed: 0 };
    let open: Vec<_> = all.iter().filter(|cell| !kept.results.is_current(cell, &trees)).collect();
    for cell in &open {
        let standing = kept.results.repetitions(cell);
        ensure!(
            standing <= cell.repetitions,
            "{cell}: the plan requires {} repetitions, but its rows have {standing}; raise `repetitions` or `lab_repetitions`",
            cell.repetitions
        );
    }
    println!("{} of {} cells already have rows", all.len() - open.len(), all.len());
    let began = Instant::now();
    let (mut lanes, mut left_out) = (Lanes::of_this_machine(), 0);
    let (end, ended) = mpsc::channel();
    thread::scope(|scope| -> Result<()> {
        for (at, cell) in open.iter().copied().enumerate() {
            while !lanes.has_room(cell) {
                kept.keep(ended.recv()?, &mut lanes, &bounds.folder)?;
            }
            let expected = kept.durations.expected(cell, &all);
            if bounds.budget.is_some_and(|budget| began.elapsed() + expected > budget) {
                left_out += 1;
                continue;
            }
            checkout.still(&Checkout::standing())?;
            println!(
                "[{} of {}] {cell}: about {}{}",
                at + 1,
                open.len(),
                minutes(expected),
                kept.left(&open[at..], &all, &lanes)
            );
            lanes.take(cell);
            let (end, checkout) = (end.clone(), &checkout);
            scope.spawn(move || {
                let started = Instant::now();
                let rows = run_cell(cell, expected, &bounds.folder, checkout);
                // Nobody listens any more after an error, which is reported instead of this end.
                _ = end.send(Ended { cell, rows, took: started.elapsed() });
            });
        }
        drop(end);
        ended.iter().try_for_each(|one| kept.keep(one, &mut lanes, &bounds.folder))
    })?;
    if left_out > 0 {
        println!("{left_out} cells do not fit into the budget; the same command continues with them");
    }
    ensure!(kept.failed == 0, "{} cells failed", kept.failed);
    Ok(())
}

/// A cell that has ended.
struct Ended<'a> {
    cell: &'a Cell,
    /// Its rows, as lines of JSON.
    rows: Result<String>,
    took: Duration,
}

/// What is kept of cells that have ended.
struct Kept {
    results: Results,
    durations: Durations,
    failed: usize,
}

impl Kept {
    fn keep(&mut self, ended: Ended<'_>, lanes: &mut Lanes, folder: &Path) -> Result<()> {
        let Ended { cell, rows, took } = ended;
        lanes.free(cell);
        match rows {
            Ok(rows) => {
                self.results.replace(cell, &rows)?;
                self.durations.set(cell, took);
                self.durations.write(folder)?;
            }
            Err(error) => {
                eprintln!("paced-perf: {cell}: {error:#}");
                self.failed += 1;
            }
        }
        Ok(())
    }

    /// Tells how long all these cells will take.
    fn left(&self, cells: &[&Cell], all: &[Cell], lanes: &Lanes) -> String {
        let of = |cell: &Cell| lanes.share(cell) * self.durations.expected(cell, all).as_secs_f64();
        let left = Duration::try_from_secs_f64(cells.iter().copied().map(of).sum()).unwrap_or(Duration::MAX);
        let unknown = cells.iter().filter(|cell| self.durations.of(cell).is_none()).count();
        let of_which =
            if unknown > 0 { format!(", of which {unknown} cells were never timed here") } else { String::new() };
        format!("; {} left{of_which}", minutes(left))
    }
}

/// Runs a cell in a separate process, and returns its rows as lines of JSON. Pictures of base variants go to `results`.
fn run_cell(cell: &Cell, expected: Duration, results: &Path, checkout: &Checkout) -> Result<String> {
    let name = format!("paced-papers-{}-{}-{}-{}", std::process::id(), cell.plan, cell.variant, cell.clock);
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let rows = run_in(cell, expected, &folder, checkout).and_then(|rows| {
        // The program may have been built again before the cell started. The check before the next cell then ends the run.
        checkout.still(&Checkout::standing()).context("its rows and pictures are discarded")?;
        if cell.variant == BASE {
            keep_pictures(cell, &folder, results)?;
        }
        Ok(rows)
    });
    // A folder that stays behind does no harm.
    _ = fs::remove_dir_all(&folder);
    rows
}

fn run_in(cell: &Cell, expected: Duration, folder: &Path, checkout: &Checkout) -> Result<String> {
    let said = folder.join("cell.log");
    let status = command(cell, expected, folder, checkout)?.stdout(fs::File::create(&said)?).status()?;
    ensure!(status.success(), "{status}; it said at last:\n{}", last_lines(&fs::read(&said)?));
    let rows = folder.join("cell.json");
    fs::read_to_string(&rows).with_context(|| rows.display().to_string())
}

/// Returns the last lines of a program's output: those of the lab tell why a guest failed.
fn last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// Returns the command that runs a cell and writes its rows and pictures into a folder.
fn command(cell: &Cell, expected: Duration, folder: &Path, checkout: &Checkout) -> Result<Command> {
    let mut command = match cell.clock.as_str() {
        "lab" => {
            let mut command = Command::new("perf/vm-plan.sh");
            command.arg("--timeout").arg(lab_timeout(expected).as_secs().to_string());
            command.arg("--out").arg(folder.join("cell")).arg(&cell.plan);
            command
        }
        clock => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["run", &cell.plan, "--json"]).arg(folder.join("cell.json"));
            command.arg("--plot").arg(folder.join("cell.svg"));
            if clock != cell::SIMULATED {
                command.args(["--clock", clock]);
            }
            command
        }
    };
    command.args(["--variant", &cell.variant]);
    checkout.tell(&mut command);
    Ok(command)
}

/// Keeps pictures: `cell-scores.svg` of plan `p` becomes `p-scores.svg`, and in the lab `p-lab-scores.svg`.
fn keep_pictures(cell: &Cell, from: &Path, to: &Path) -> Result<()> {
    let lab = if cell.clock == "lab" { "-lab" } else { "" };
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(rest) = name.strip_prefix("cell").filter(|rest| rest.ends_with(".svg")) {
            fs::copy(&path, to.join(format!("{}{lab}{rest}", cell.plan)))?;
        }
    }
    Ok(())
}

/// Returns after how long a cell in the lab is ended.
fn lab_timeout(expected: Duration) -> Duration {
    (LATE * expected).max(LEAST_TIMEOUT)
}

fn minutes(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7200 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h", seconds.div_ceil(3600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_names_what_was_checked_out_at_the_start() {
        let cells = cell::all(&["thesis-fig7-8".to_owned(), "routing-fig9".to_owned()], true).unwrap();
        let checkout = Checkout::standing();
        for cell in &cells {
            let command = command(cell, Duration::ZERO, Path::new("/nowhere"), &checkout).unwrap();
            let told: Vec<_> = command.get_envs().filter(|(_, value)| value.is_some()).map(|(name, _)| name).collect();
            assert_eq!(told, ["PACED_COMMIT", "PACED_TREES"], "{cell}");
        }
    }

    #[test]
    fn runs_in_the_lab_name_the_commit_that_they_are_told_and_those_that_fail_keep_the_rows() {
        let folder = std::env::temp_dir().join(format!("paced-told-{}", std::process::id()));
        let (perf, vm) = (folder.join("perf"), folder.join("tests/vm"));
        [&perf.join("results"), &vm].iter().for_each(|path| fs::create_dir_all(path).unwrap());
        let script = |path: &Path, text: &str| {
            fs::write(path, format!("#!/usr/bin/env bash\n{text}\n")).unwrap();
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        script(&perf.join("commit.sh"), "echo of-now");
        let told_rows = r#"echo; echo "{\"commit\":\"$PACED_COMMIT\",\"trees\":\"$PACED_TREES\"}""#;
        script(&vm.join("run"), told_rows);
        for (name, arguments, rows) in [
            ("vm-plan.sh", &["p"][..], "results/p-lab.json"),
            ("vm-relay.sh", &[], "results/relay-virtual.json"),
            ("vm-relay.sh", &["--long-lived"], "results/long-lived-virtual.json"),
        ] {
            let original = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
            fs::copy(original, perf.join(name)).unwrap();
            for (told, named) in [(None, "of-now"), (Some("of-then"), "of-then")] {
                let mut command = Command::new("bash");
                command.arg(perf.join(name)).args(arguments).env_remove("PACED_COMMIT").env_remove("PACED_TREES");
                if let Some(told) = told {
                    command.env("PACED_COMMIT", told).env("PACED_TREES", told);
                }
                let output = command.output().unwrap();
                assert!(output.status.success(), "{output:?}");
                let line = format!("{{\"commit\":\"{named}\",\"trees\":\"{named}\"}}\n");
                assert_eq!(fs::read_to_string(perf.join(rows)).unwrap(), line, "{name}");
            }
            script(&vm.join("run"), "echo '{}'; echo the guest tells why; exit 7");
            let failed = Command::new("bash").arg(perf.join(name)).args(arguments).output().unwrap();
            assert!(!failed.status.success(), "{name}");
            assert!(String::from_utf8_lossy(&failed.stdout).contains("the guest tells why"), "{name}: {failed:?}");
            let kept = fs::read_to_string(perf.join(rows)).unwrap();
            assert!(kept.contains("of-then"), "{name}: a run that fails keeps the rows: {kept}");
            script(&vm.join("run"), told_rows);
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_last_lines_of_a_cell_that_failed_are_shown() {
        let output: String = (0..50).map(|line| format!("line {line}\n\n")).collect();
        let shown = last_lines(output.as_bytes());
        assert!(shown.starts_with("line 30\nline 31\n") && shown.ends_with("\nline 49"), "{shown}");
        assert_eq!([last_lines(b""), last_lines(b"alone"), last_lines(b"\xff")], ["", "alone", "\u{fffd}"]);
    }

    #[test]
    fn a_long_cell_has_longer_in_the_lab() {
        assert_eq!(lab_timeout(Duration::from_secs(60)), LEAST_TIMEOUT);
        assert_eq!(lab_timeout(Duration::from_secs(4_500)), Duration::from_secs(36_000));
        let cells = cell::all(&["thesis-fig7-8".to_owned()], true).unwrap();
        let lab = cells.iter().find(|cell| cell.clock == "lab" && cell.variant == BASE).unwrap();
        assert!(lab_timeout(lab.assumed) > 4 * LEAST_TIMEOUT, "a run by hand had to have 36,000 s");
    }
}
