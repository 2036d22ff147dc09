//! The origin of results: what you need to reproduce them.

use std::{collections::BTreeMap, env, fs, process::Command};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

/// The environment variable that names the commit of a run.
const COMMIT: &str = "PACED_COMMIT";

/// The environment variable that names the git trees of the product's folders.
const TREES: &str = "PACED_TREES";

/// Machine, kernel, commit, command and clock of a run; part of every line of results.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Origin {
    machine: String,
    kernel: String,
    commit: String,
    /// The git trees of the product's folders, as `perf/commit.sh --trees` prints them; empty in older rows.
    #[serde(default)]
    trees: String,
    command: String,
    clock: String,
}

impl Origin {
    /// Describes this machine, and this program with its arguments. `PACED_COMMIT` and `PACED_TREES` take precedence
    /// over git.
    ///
    /// # Errors
    /// When procfs is missing.
    pub fn of_this_run(clock: &str) -> Result<Self> {
        let cpus = fs::read_to_string("/proc/cpuinfo").context("failed to read /proc/cpuinfo")?;
        let field = |name| cpus.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let model = field("model name");
        // The lab's CPU charges for copies differently with and without `erms`: rows of the two kinds are not
        // comparable.
        let copies = match model.contains("QEMU") && !field("flags").split(' ').any(|flag| flag == "erms") {
            true => " without erms",
            false => "",
        };
        let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("failed to read the kernel's release")?;
        let mut arguments: Vec<String> = env::args().collect();
        // The folder of the program says nothing about the result.
        if let Some(program) = arguments.first_mut() {
            *program = program.rsplit('/').next().unwrap_or_default().to_owned();
        }
        let Checkout { commit, trees } = Checkout::standing();
        Ok(Self {
            machine: format!("{}{copies}, {cores} cores", model.trim_start_matches([' ', '\t', ':'])),
            kernel: kernel.trim().to_owned(),
            commit,
            trees,
            command: arguments.join(" "),
            clock: clock.to_owned(),
        })
    }

    /// The commit, with `-dirty` if the working tree differed from it.
    #[must_use]
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// The git trees of the product's folders.
    #[must_use]
    pub fn trees(&self) -> &str {
        &self.trees
    }

    /// The clock's name.
    #[must_use]
    pub fn clock(&self) -> &str {
        &self.clock
    }

    /// The kernel's release.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Whether the run used the machine's own clock.
    #[must_use]
    pub fn is_native(&self) -> bool {
        self.clock == "native"
    }
}

/// The commit that is checked out here, and its trees, as `perf/commit.sh` prints them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkout {
    commit: String,
    trees: String,
}

impl Checkout {
    /// Reads them from git. `PACED_COMMIT` and `PACED_TREES` take precedence.
    #[must_use]
    pub fn standing() -> Self {
        let told = |name: &str, arguments: &[&str]| env::var(name).unwrap_or_else(|_| standing(arguments));
        Self { commit: told(COMMIT, &[]), trees: told(TREES, &["--trees"]) }
    }

    /// The git trees of the product's folders.
    #[must_use]
    pub fn trees(&self) -> Trees {
        Trees::parse(&self.trees)
    }

    /// Makes a program that this one starts name this commit and these trees in its rows, whatever is checked out then.
    pub fn tell(&self, command: &mut Command) {
        command.env(COMMIT, &self.commit).env(TREES, &self.trees);
    }

    /// Checks that the trees are still checked out and unchanged. Another commit with the same trees passes: one that adds
    /// results, for example.
    ///
    /// # Errors
    /// When a tree differs or has uncommitted changes; the error names both commits.
    pub fn still(&self, now: &Self) -> Result<()> {
        ensure!(
            self.trees == now.trees,
            "the sources changed during the run, from commit {} to {}: rows must name the program that was measured; build \
             it again and repeat the command, which continues with the cells that are left",
            self.commit,
            now.commit
        );
        Ok(())
    }
}

/// The folders of the product, in the order of `perf/commit.sh`.
const FOLDERS: [&str; 5] = ["bpf", "config", "daemon", "masque", "sched"];

/// The folder of the experiments, which `perf/commit.sh` prints as well; older rows lack it.
const EXPERIMENTS: &str = "perf/experiment";

/// The versions of the libraries that move bytes, in the same output; older rows lack them.
const LIBRARIES: &str = "libraries";

/// The git trees of the product's folders and of the experiments: if they are equal, so is the product.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trees(BTreeMap<String, String>);

impl Trees {
    /// Returns the trees of the commit that is checked out here.
    #[must_use]
    pub fn standing() -> Self {
        Self::parse(&standing(&["--trees"]))
    }

    /// Parses the output of `perf/commit.sh --trees`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let words: Vec<_> = text.split_whitespace().collect();
        Self(
            words
                .chunks(2)
                .map(|pair| (pair[0].to_owned(), pair.get(1).copied().unwrap_or_default().to_owned()))
                .collect(),
        )
    }

    /// Whether there were uncommitted changes.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.0.contains_key("dirty")
    }

    /// Whether no tree is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all folders of the product are present.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        FOLDERS.iter().all(|folder| self.0.get(*folder).is_some_and(|tree| !tree.is_empty()))
    }

    /// Returns the folders that differ and that a clock depends on. Simulations use only part of the product. Older rows that do not
    /// name the experiments' tree or the libraries' versions are judged without these.
    #[must_use]
    pub fn changed(&self, other: &Self, clock: &str) -> Vec<String> {
        let folders: &[&str] = match clock {
            "simulated" => &["sched"],
            "virtual-network" => &["daemon", "masque", "sched"],
            _ => &FOLDERS,
        };
        let newer: &[&str] = if clock == "simulated" { &[EXPERIMENTS] } else { &[EXPERIMENTS, LIBRARIES] };
        let newer = newer.iter().filter(|name| self.0.contains_key(**name));
        let differ = |name: &&&str| self.0.get(**name) != other.0.get(**name);
        folders.iter().chain(newer).filter(differ).map(|name| (*name).to_owned()).collect()
    }

    /// Whether the product is the same, in the folders that a clock depends on, without uncommitted changes in `self`.
    #[must_use]
    pub fn same(&self, other: &Self, clock: &str) -> bool {
        !self.is_empty() && !self.is_dirty() && self.changed(other, clock).is_empty()
    }
}

#[derive(Serialize)]
struct Line<'a, R> {
    #[serde(flatten)]
    origin: &'a Origin,
    #[serde(flatten)]
    row: &'a R,
}

/// Renders rows as lines of JSON, each with its origin.
///
/// # Errors
/// When a value cannot be written, for example a number that is not finite.
pub fn json_lines<R: Serialize>(rows: &[R], origin: &Origin) -> Result<String> {
    rows.iter().map(|row| Ok(serde_json::to_string(&Line { origin, row })? + "\n")).collect()
}

/// Returns the output of `perf/commit.sh` for the commit that is checked out here, or `unknown` if it fails.
fn standing(arguments: &[&str]) -> String {
    // Not from the working folder: cargo starts benchmarks in the folder of their package.
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../commit.sh");
    let output = Command::new(script).args(arguments).output().ok().filter(|output| output.status.success());
    output.map_or("unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_stops_when_sources_change_and_not_when_results_are_committed() {
        let of = |commit: &str, trees: &str| Checkout { commit: commit.to_owned(), trees: trees.to_owned() };
        let began = of("0abc123", "daemon 1 sched 2");
        assert!(began.still(&began).is_ok() && began.still(&of("1abc123", "daemon 1 sched 2")).is_ok());
        for now in [of("1abc123", "daemon 1 sched 3"), of("0abc123-dirty", "daemon 1 sched 2 dirty")] {
            let error = began.still(&now).unwrap_err().to_string();
            assert!(error.contains(&format!("0abc123 to {}", now.commit)), "{error}");
        }
    }

    #[test]
    fn rows_are_current_while_the_folders_that_they_depend_on_are_the_same() {
        let then = Trees::parse("bpf 1 config 2 daemon 3 masque 4 sched 5");
        let now = Trees::parse("bpf 0 config 2 daemon 0 masque 4 sched 5");
        assert!(then.same(&then, "lab") && then.same(&now, "simulated"));
        assert_eq!(then.changed(&now, "lab"), ["bpf", "daemon"]);
        assert_eq!(then.changed(&now, "virtual-network"), ["daemon"]);
        let dirty = Trees::parse("bpf 1 config 2 daemon 3 masque 4 sched 5 dirty");
        assert!(dirty.is_dirty() && !dirty.same(&then, "simulated"));
        assert!(!Trees::parse("").same(&then, "simulated"), "rows that say nothing are of nothing");
    }

    #[test]
    fn rows_depend_on_the_experiments_and_on_libraries_if_they_name_them() {
        let of = |more: &str| Trees::parse(&format!("bpf 1 config 2 daemon 3 masque 4 sched 5{more}"));
        let (then, older) = (of(" perf/experiment 6 libraries 7"), of(""));
        let (other, updated) = (of(" perf/experiment 0 libraries 7"), of(" perf/experiment 6 libraries 0"));
        for clock in ["simulated", "virtual-network", "lab", "native"] {
            assert!(then.same(&then, clock) && older.same(&other, clock) && older.same(&updated, clock));
            assert_eq!(then.changed(&other, clock), ["perf/experiment"]);
        }
        assert_eq!(then.changed(&updated, "lab"), ["libraries"]);
        assert!(then.same(&updated, "simulated"), "simulations use no library that moves bytes");
        assert!(then.is_complete() && older.is_complete());
    }
}
