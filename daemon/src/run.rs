//! Runs the daemon: claims its state folder, gives up rights, and starts threads and roles.
//!
//! Two threads: the main one only moves data; `control` resolves names, listens to netlink and answers scrapes and the
//! control plane, where a pause delays no packet. A relay with several workers has one more thread for each worker
//! after the first.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path, sync::Arc, time::Duration};

use admission::connection_id::Secret;
use anyhow::{Context as _, Result};
use config::Config;
use enforcement::{
    Enforcement,
    confinement::{self, Process},
};
use role::{descriptors, freed_memory};
use sd_notify::NotifyState;
use state::StateFolder;
use systemd::activation::Activation;
use tokio::runtime;

use self::{
    daemon::{Daemon, Signals, notify},
    start::{Launch, without_missing_families},
};
pub use crate::echo::DEVELOPMENT_ECHO;
use crate::{log, parts::Parts, workers};

mod announce;
mod daemon;
mod enforce;
mod fronts;
mod gateway_role;
mod lessons;
mod records;
mod relay_role;
mod reload;
mod start;

/// Runs with a configuration, which was read from `file`, until SIGTERM.
///
/// # Errors
/// A file or address that it names is missing or taken, or another process uses its state folder.
pub fn production(config: Config, file: &Path) -> Result<()> {
    start(config, Some(file))
}

/// Runs for this machine only, without a configuration: a relay without tokens, for targets on loopback, that keeps its
/// own certificate in `state_dir`. Also ends if its terminal hangs up.
///
/// # Errors
/// The folder cannot be written, another process uses it, or an address is taken.
pub fn development(state_dir: &Path) -> Result<()> {
    start(Config::development(state_dir.to_owned()), None)
}

/// Returns the secret of the state folder; if it cannot be kept there, one that ends with the process.
fn secret(state_dir: &Path) -> Result<Secret> {
    Secret::keep_in(state_dir).or_else(|error| {
        tracing::warn!("after a restart, peers will have to wait for their timeout (no stateless resets): {error:#}");
        Secret::ephemeral()
    })
}

/// Refuses to run as root on the state folder of another user: its owner could not read what root saves there, and would begin without
/// its quotas.
fn refuse_foreign_state(state_dir: &Path, user: u32, owner: u32) -> Result<()> {
    anyhow::ensure!(
        user != 0 || owner == user,
        "{} belongs to user ID {owner}, who could not read the quotas and policies that root saves there. Start the service \
         (`systemctl start paced`), run paced as that user (`setpriv --reuid={owner} --regid={owner} --clear-groups paced run …`), \
         or give this one its own `state_dir` (in development mode, `--state-dir`)",
        state_dir.display()
    );
    Ok(())
}

/// Opens what needs the rights of the process, gives these up, starts the threads, and serves.
fn start(config: Config, file: Option<&Path>) -> Result<()> {
    let log = log::start(&config);
    let config = if file.is_none() { without_missing_families(config) } else { config };
    if let Some(owner) = fs::metadata(&config.state_dir).ok().map(|folder| folder.uid()) {
        refuse_foreign_state(&config.state_dir, rustix::process::geteuid().as_raw(), owner)?;
    }
    // Every role may have a policy to save. The claim lasts at least until this function returns.
    let folder = StateFolder::open(&config.state_dir)?;
    let Activation { listeners: opened, control: door } = Activation::take()?;
    anyhow::ensure!(
        config.relay.is_some() || opened.is_empty(),
        "paced.socket opens UDP sockets, but there is no [relay]: remove its ListenDatagram= lines"
    );
    let places = config.relay.as_ref().map(|relay| -> Result<_> {
        let secret = secret(&config.state_dir)?;
        let (sockets, steering) = workers::bind(&relay.listeners, relay.workers, &secret, opened)?;
        Ok((sockets, steering, secret))
    });
    let places = places.transpose()?;
    // Before any other thread starts, so that none keeps a right.
    let parts = Arc::<Parts>::default();
    parts.users.limit(config.metrics.users);
    parts.kernel.in_force.probe();
    let mut enforcement = Enforcement::start(&config.kernel, parts.kernel.clone());
    // After the monitor has started, which does not need more.
    descriptors::raise(&config);
    confinement::confine(Process::Data)
        .unwrap_or_else(|error| tracing::warn!("this process has no seccomp filter: {error:#}"));
    let control = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        // For tasks that may wait: for the disk, the kernel, or the user database.
        .max_blocking_threads(16)
        .thread_name("control")
        .enable_all()
        .build()
        .context("failed to start the control thread")?;
    enforcement.iter_mut().for_each(|enforcement| enforcement.watch(control.handle()));
    let (data, access) = (turns::runtime(parts.waits(&config.transport)), parts.access.clone());
    let data = data.context("failed to start the runtime")?;
    access.set(&config.log);
    control.spawn(access.clone().keep_summarising());
    control.spawn(freed_memory::keep_returning());
    let (file, runtime) = (file.map(Path::to_owned), control.handle().clone());
    let outcome =
        data.block_on(serve(Launch { config, file, folder: folder.clone(), log, parts, places, door, runtime }));
    access.finish(Duration::from_secs(1));
    // A thread may still wait for a file, which nothing can end.
    [control, data].into_iter().for_each(|runtime| runtime.shutdown_timeout(Duration::from_secs(1)));
    outcome
}

/// Starts, serves until a signal or a fault, and shuts down.
async fn serve(launch: Launch) -> Result<()> {
    // From here on, a signal is queued and does not kill the process.
    let mut signals = Signals::listen()?;
    let (mut daemon, mut open, mut wishes) = Daemon::start(launch).await?;
    let outcome = daemon.keep_serving(&mut open, &mut wishes, &mut signals).await;
    if let Err(error) = &outcome {
        tracing::error!("ending, because a part of paced has failed: {error:#}");
    }
    // Callers that still want a reload learn at once that the daemon is ending.
    drop(wishes);
    notify(&[NotifyState::Stopping]);
    // Also after a failure: the other parts drain, and what is kept is saved.
    daemon.end(signals).await;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_refuses_the_state_folder_of_another_user() {
        let folder = Path::new("/var/lib/paced");
        let error = refuse_foreign_state(folder, 0, 900).unwrap_err().to_string();
        assert!(error.contains("/var/lib/paced belongs to user ID 900") && error.contains("--reuid=900"), "{error}");
        // The kernel decides what other users may do with each other's files.
        for (user, owner) in [(0, 0), (900, 900), (900, 901)] {
            refuse_foreign_state(folder, user, owner).unwrap();
        }
    }
}
