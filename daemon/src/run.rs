//! The daemon's life: starts roles, obeys signals, and ends everything in order.
//!
//! Two threads: the main one only moves data; `control` resolves names, listens to netlink and answers scrapes and the
//! control plane, where a pause delays no packet. A relay with several workers has one more thread for each worker
//! after the first.

use std::{
    fs::{self, TryLockError},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, SystemTime},
};

use admission::connection_id::Secret;
use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use config::{Config, policy::Policy};
use edge::{Edge, EntranceClasses};
use enforcement::{
    Enforcement,
    confinement::{self, Process},
};
use quic::class::PolicyRole;
use relay::Phase;
use role::{classes::Classes, ready::LifeStage};
use sd_notify::NotifyState;
use state::FolderClaim;
use tokio::{
    runtime::{self, Handle},
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval_at, timeout},
};

use self::{
    gateway_role::GatewayRole,
    relay_role::RelayRole,
    start::{Launch, without_missing_families},
};
use crate::{
    activation::Activation,
    certificates::{Certificate, CertificateWarnings, Nearness},
    configuration::files::SeenFiles,
    control::{Control, Reload, doors::Doors},
    log::{self, LogControl},
    metrics::{Metrics, MetricsPage},
    parts::Parts,
    policy::Policies,
    watchdog::Watchdog,
    workers,
};

mod announce;
mod fronts;
mod gateway_role;
mod lessons;
mod records;
mod relay_role;
mod reload;
mod start;

/// Where the echo of development mode listens.
pub const DEVELOPMENT_ECHO: &str = "127.0.0.1:4434";

/// Runs with a configuration, which was read from `file`, until SIGTERM.
///
/// # Errors
/// A file or address that it names is missing or taken, or another process uses its state folder.
pub fn production(config: Config, file: &Path) -> Result<()> {
    start(config, Some(file))
}

/// Runs for this machine only, without a configuration: a relay without tokens, for targets on loopback, that keeps its
/// own certificate in `state_dir`.
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

/// Returns the classes of a policy, for one role.
fn classes(policy: &Policy, role: PolicyRole, parts: &Parts) -> Arc<Classes> {
    let marks = parts.kernel.marks();
    let of_class = |class: &str| marks.as_ref().map(|marks| marks.of_class(class, role)).unwrap_or_default();
    Arc::new(Classes::new(policy.clone(), role, &parts.classes, of_class))
}

/// Claims the state folder. Without a folder, or where it cannot be locked, paced runs without the claim; the log says so.
///
/// # Errors
/// Another process, most likely another paced, uses the folder: each would overwrite what the other saves.
fn claim(state_dir: &Path) -> Result<Option<FolderClaim>> {
    let folder = state_dir.display();
    match FolderClaim::new(state_dir) {
        Ok(claim) => Ok(Some(claim)),
        Err(TryLockError::WouldBlock) => anyhow::bail!(
            "another process, most likely another paced, uses the state folder {folder}, and each would overwrite what the other saves \
             there: stop it, or give this one its own `state_dir` (in development mode, `--state-dir`)"
        ),
        Err(TryLockError::Error(error)) => {
            tracing::warn!(%folder, %error, "failed to lock the state folder: make sure that no other paced uses it");
            Ok(None)
        }
    }
}

/// Opens what needs the rights of the process, gives these up, starts the threads, and serves.
fn start(config: Config, file: Option<&Path>) -> Result<()> {
    let log = log::start(&config);
    let config = if file.is_none() { without_missing_families(config) } else { config };
    if let Some(owner) = fs::metadata(&config.state_dir).ok().map(|folder| folder.uid()) {
        refuse_foreign_state(&config.state_dir, rustix::process::geteuid().as_raw(), owner)?;
    }
    // Every role may have a policy to save. The claim lasts until this function returns.
    let _claim = match fs::create_dir_all(&config.state_dir) {
        Ok(()) => claim(&config.state_dir)?,
        Err(error) => {
            let folder = config.state_dir.display();
            tracing::warn!(%folder, %error, "failed to create the state folder: no policy can be saved, and a restart loses what paced has learned");
            None
        }
    };
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
    let data = runtime::Builder::new_current_thread().enable_all().build().context("failed to start the runtime")?;
    let access = parts.access.clone();
    access.set(&config.log);
    control.spawn(access.clone().keep_summarising());
    let (file, runtime) = (file.map(Path::to_owned), control.handle().clone());
    let outcome = data.block_on(serve(Launch { config, file, log, parts, places, door, runtime }));
    access.finish(Duration::from_secs(1));
    control.shutdown_timeout(Duration::from_secs(1));
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

/// State that the daemon keeps while it runs.
struct Daemon {
    /// The configuration in force, except for its policy.
    config: Arc<Config>,
    /// The file of the configuration; `None` in development mode.
    file: Option<PathBuf>,
    log: LogControl,
    parts: Arc<Parts>,
    metrics: Arc<Metrics>,
    relay: Option<RelayRole>,
    gateway: GatewayRole,
    edge: Edge,
    /// The class of each local address.
    entrance_classes: EntranceClasses,
    roles: JoinSet<Result<()>>,
    watchdog: Option<Arc<Watchdog>>,
    /// Runs tasks that may wait.
    runtime: Handle,
    /// The page that serves metrics.
    page: Option<MetricsPage>,
    /// The files that the configuration names, as they were when they were read.
    read: Arc<ArcSwap<SeenFiles>>,
    /// The certificates in use, and the warnings already given about them.
    certificates: Vec<Certificate>,
    warnings: CertificateWarnings,
}

/// The policy, the control plane, and its doors.
struct Open {
    policies: Arc<Policies>,
    control: Arc<Control>,
    doors: Doors,
}

/// Requests to the daemon that do not come from the service manager.
struct Wishes {
    /// Callers of the doors want the configuration reloaded.
    reloads: mpsc::Receiver<Reload>,
    /// Files that the configuration names have changed.
    files: mpsc::Receiver<()>,
}

/// Signals of the service manager or of a terminal.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        let (terminate, interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: listen(SignalKind::hangup())? })
    }

    /// Does work that may wait for the disk, unless a signal ends the daemon first: then returns `None`.
    async fn unless_ended<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            _ = self.terminate.recv() => None,
            _ = self.interrupt.recv() => None,
        }
    }
}

impl Daemon {
    /// Obeys signals and callers until a signal ends the daemon.
    ///
    /// # Errors
    /// A role failed.
    async fn keep_serving(&mut self, open: &mut Open, wishes: &mut Wishes, signals: &mut Signals) -> Result<()> {
        self.tell_of_certificates();
        let mut refresh = interval_at(Instant::now() + REFRESH, REFRESH);
        loop {
            tokio::select! {
                _ = refresh.tick() => {
                    self.refresh_guard();
                    self.tell_of_certificates();
                }
                Some(()) = wishes.files.recv() => {
                    let Some(()) = signals.unless_ended(self.read_files_again(open)).await else { return Ok(()) };
                }
                _ = signals.terminate.recv() => return Ok(()),
                _ = signals.interrupt.recv() => return Ok(()),
                _ = signals.hangup.recv() => {
                    // `reload` logs its own refusal.
                    let Some(_) = signals.unless_ended(self.reload("SIGHUP", open)).await else { return Ok(()) };
                }
                Some(Reload { author, done }) = wishes.reloads.recv() => {
                    let reload = self.reload(&author, open);
                    let Some(outcome) = signals.unless_ended(reload).await else { return Ok(()) };
                    // The caller may have gone.
                    _ = done.send(outcome);
                }
                failed = self.edge.failed() => {
                    failed?;
                    anyhow::bail!("a local address ended");
                }
                Some(ended) = self.roles.join_next() => {
                    ended.context("a role ended unexpectedly")??;
                    anyhow::bail!("an endpoint failed");
                }
            }
        }
    }

    /// Updates the kernel's programs with the current listeners, addresses and connection IDs.
    fn refresh_guard(&mut self) {
        if let Some(role) = &mut self.relay {
            role.refresh_guard(&self.parts.kernel);
        }
    }

    /// Warns of certificates that expire soon: once at each step of nearness.
    fn tell_of_certificates(&mut self) {
        let now = SystemTime::now();
        for (certificate, nearness) in self.warnings.due(&self.certificates, now) {
            let (address, outlook) = (certificate.address, certificate.outlook(now));
            match nearness {
                Nearness::Expired => tracing::error!(used_by = certificate.used_by, %address, "{outlook}"),
                Nearness::Days | Nearness::Weeks => {
                    tracing::warn!(used_by = certificate.used_by, %address, "{outlook}");
                }
            }
        }
    }

    /// Shuts down gracefully: refuses new requests and gives open ones time to finish. A second signal ends them at
    /// once.
    async fn end(mut self, mut signals: Signals) {
        self.parts.ready.reach(LifeStage::Draining);
        let drain = self.relay.as_ref().map(|role| role.drain).or(self.gateway.drain()).or(self.edge.drain());
        if let Some(drain) = drain {
            tracing::info!(seconds = drain.as_secs(), "draining");
            // The unit's TimeoutStopSec may be shorter than the configured drain.
            let patience = (drain + AFTER_DRAIN).as_micros();
            notify(&[NotifyState::ExtendTimeoutUsec(u32::try_from(patience).unwrap_or(u32::MAX))]);
        }
        let drain = drain.unwrap_or(CLOSING);
        if let Some(role) = &self.relay {
            role.open.store(false, Relaxed);
            role.relay.end(Phase::Draining);
        }
        tokio::select! {
            outcome = timeout(drain, self.all_ended()) => {
                if outcome.is_err() {
                    // An edge does not wait for its tunnels.
                    let tunnels = self.relay.as_ref().map_or(0, |role| role.relay.tunnels.len());
                    if tunnels > 0 {
                        tracing::info!(tunnels, "tunnels were still open");
                    }
                }
            }
            _ = signals.terminate.recv() => {}
            _ = signals.interrupt.recv() => {}
        }
        if let Some(role) = &self.relay {
            role.relay.end(Phase::Closing);
        }
        self.gateway.cut();
        self.edge.cut();
        _ = timeout(CLOSING, self.all_ended()).await;
        if let Some(role) = &self.relay {
            role.ledger.save(SystemTime::now());
        }
        self.gateway.save();
        // The endpoints still have CONNECTION_CLOSE frames to send.
        tokio::time::sleep(CLOSING).await;
    }

    async fn all_ended(&mut self) {
        tokio::join!(self.gateway.end(), self.edge.end());
        // A relay that is gone does not answer.
        _ = timeout(CLOSING, self.edge.close()).await;
        while self.roles.join_next().await.is_some() {}
    }
}

/// How often the kernel's guard receives this host's addresses.
const REFRESH: Duration = Duration::from_secs(10);

/// How long connections have to close, and then their last packets to leave.
const CLOSING: Duration = Duration::from_millis(50);

/// How long paced may take to end after a drain before the service manager kills it.
const AFTER_DRAIN: Duration = Duration::from_secs(30);

fn notify(state: &[NotifyState<'_>]) {
    // Without a service manager there is no receiver.
    _ = sd_notify::notify(state);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_on_a_state_folder_is_refused_with_the_way_out() {
        let folder = std::env::temp_dir().join(format!("paced-claim-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let first = claim(&folder).unwrap();
        let error = claim(&folder).unwrap_err().to_string();
        assert!(error.contains(folder.to_str().unwrap()) && error.contains("its own `state_dir`"), "{error}");
        drop(first);
        // A program that another test starts holds a copy of the lock until it is executed.
        let mut tries = (0..500).map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            claim(&folder)
        });
        assert!(tries.find_map(Result::ok).unwrap().is_some());
        fs::remove_dir_all(&folder).unwrap();
        assert!(claim(&folder).unwrap().is_none(), "a folder that cannot be locked ends nothing");
    }

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
