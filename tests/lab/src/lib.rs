//! What experiments and tests of the whole product share: the rings of tests, network namespaces, the simulated network.
//!
//! The executables of `tests` have the names of their rings: `pure` needs neither root nor a particular kernel, `netns` (with `netns_bpf` and
//! `netns_control`) needs root, `vm` the lab's Debian kernel, and `engines` a real engine for models. CONTRIBUTING.md says how to run and how to add tests.

pub mod application;
pub mod authority;
pub mod capture;
pub mod client;
pub mod downloads;
pub mod engine;
pub mod flow;
pub mod forwarded;
pub mod frame;
pub mod inner;
pub mod iperf;
pub mod link;
pub mod llama;
pub mod models;
pub mod name_server;
pub mod netem;
pub mod netns;
pub mod operator;
pub mod process;
pub mod promql;
pub mod report;
pub mod simulation;
pub mod site;
pub mod stack_counters;
pub mod stalls;
pub mod streams;
pub mod uplinks;

use std::path::PathBuf;

/// Returns the path of a program of this workspace, such as `paced`, built in the same profile as the running test or
/// program.
///
/// `make test` builds it; before a bare `cargo test`, run `cargo build --workspace`.
///
/// # Errors
/// When the running program does not know its own path, or the requested one was not built.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let running = std::env::current_exe()?;
    // Test executables lie in a folder below that of programs.
    let mut paths = running.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    paths
        .find(|path| path.is_file())
        .ok_or_else(|| anyhow::anyhow!("{name} is not built: run `cargo build --workspace`"))
}
