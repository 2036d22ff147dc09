//! What tests of the whole product and experiments share: the rings of tests, network namespaces, the simulated network.
//!
//! Each ring is one executable of `tests`: `pure` needs neither root nor a kernel, `netns` needs root, `vm` the lab's Debian
//! kernel, `engines` a real engine for models. CONTRIBUTING.md says how to run and how to add tests.

pub mod authority;
pub mod capture;
pub mod client;
pub mod engine;
pub mod frame;
pub mod llama;
pub mod models;
pub mod name_server;
pub mod netns;
pub mod process;
pub mod report;
pub mod simulation;
pub mod site;
pub mod streams;

use std::path::PathBuf;

/// Gives the path of a program of this workspace, such as `paced`, built in the same profile as the running test or
/// program.
///
/// `make test` builds it; under a bare `cargo test` run `cargo build --workspace` first.
///
/// # Errors
/// When the running program does not know its own path, or the other was not built.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let running = std::env::current_exe()?;
    // Tests lie in a folder of their own below the others.
    let mut paths = running.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    paths
        .find(|path| path.is_file())
        .ok_or_else(|| anyhow::anyhow!("{name} is not built: run `cargo build --workspace`"))
}
