//! Where results come from: what has to be known to get them again.

use std::{env, fs, process::Command};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Machine, kernel, commit, command and clock of a run; part of every line of results.
#[derive(Clone, Debug, Serialize)]
pub struct Origin {
    machine: String,
    kernel: String,
    commit: String,
    command: String,
    clock: &'static str,
}

impl Origin {
    /// Describes this machine, this program and what it was told. `PACED_COMMIT` takes precedence over git.
    ///
    /// # Errors
    /// procfs is not there.
    pub fn of_this_run(clock: &'static str) -> Result<Self> {
        let cpus = fs::read_to_string("/proc/cpuinfo").context("failed to read /proc/cpuinfo")?;
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("failed to read the kernel's release")?;
        let mut arguments: Vec<String> = env::args().collect();
        // Whose folder the program lies in says nothing.
        if let Some(program) = arguments.first_mut() {
            *program = program.rsplit('/').next().unwrap_or_default().to_owned();
        }
        Ok(Self {
            machine: format!("{}, {cores} cores", model.trim_start_matches([' ', '\t', ':'])),
            kernel: kernel.trim().to_owned(),
            commit: env::var("PACED_COMMIT").unwrap_or_else(|_| commit()),
            command: arguments.join(" "),
            clock,
        })
    }

    /// Whether time was the machine's own.
    #[must_use]
    pub fn is_native(&self) -> bool {
        self.clock == "native"
    }
}

/// What `perf/commit.sh` says, where there is one.
fn commit() -> String {
    let output = Command::new("perf/commit.sh").output().ok().filter(|output| output.status.success());
    output.map_or("unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
