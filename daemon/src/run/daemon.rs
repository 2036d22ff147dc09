//! The running daemon: it obeys signals and callers, and ends everything in order.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use config::Config;
use edge::{Edge, EntranceClasses};
use relay::Phase;
use role::ready::LifeStage;
use sd_notify::NotifyState;
use systemd::watchdog::Watchdog;
use tokio::{
    runtime::Handle,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval_at, timeout},
};

use super::{
    gateway_role::GatewayRole,
    relay_role::{GUARD_REFRESH, RelayRole},
};
use crate::{
    certificates::{Certificate, CertificateWarnings, Nearness},
    configuration::files::SeenFiles,
    control::{Control, Reload, doors::Doors},
    log::LogControl,
    metrics::{Metrics, MetricsPage},
    parts::Parts,
    policy::Policies,
    workers::CLOSING,
};

/// How long paced may take to end after a drain before the service manager kills it.
const AFTER_DRAIN: Duration = Duration::from_secs(30);

/// State that the daemon keeps while it runs.
pub(super) struct Daemon {
    /// The configuration in force, except for its policy.
    pub(super) config: Arc<Config>,
    /// The file of the configuration; `None` in development mode.
    pub(super) file: Option<PathBuf>,
    pub(super) log: LogControl,
    pub(super) parts: Arc<Parts>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) relay: Option<RelayRole>,
    pub(super) gateway: GatewayRole,
    pub(super) edge: Edge,
    /// The class of each local address.
    pub(super) entrance_classes: EntranceClasses,
    pub(super) roles: JoinSet<Result<()>>,
    pub(super) watchdog: Option<Arc<Watchdog>>,
    /// Runs tasks that may wait.
    pub(super) runtime: Handle,
    /// The page that serves metrics.
    pub(super) page: Option<MetricsPage>,
    /// The files that the configuration names, as they were when they were read.
    pub(super) read: Arc<ArcSwap<SeenFiles>>,
    /// The certificates in use, and the warnings already given about them.
    pub(super) certificates: Vec<Certificate>,
    pub(super) warnings: CertificateWarnings,
}

/// The policy, the control plane, and its doors.
pub(super) struct Open {
    pub(super) policies: Arc<Policies>,
    pub(super) control: Arc<Control>,
    pub(super) doors: Doors,
}

/// Requests to the daemon that do not come from the service manager.
pub(super) struct Wishes {
    /// Callers of the doors want the configuration reloaded.
    pub(super) reloads: mpsc::Receiver<Reload>,
    /// Files that the configuration names have changed.
    pub(super) files: mpsc::Receiver<()>,
}

/// Signals of the service manager or of a terminal.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Whether the process ignored hang-ups when it began, as after nohup(1).
    outlives_terminal: bool,
}

impl Signals {
    pub(super) fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        let outlives_terminal = ignores_hangup(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let (terminate, interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: listen(SignalKind::hangup())?, outlives_terminal })
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

/// Returns whether a process ignores SIGHUP, by the mask in its status (proc_pid_status(5)).
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (libc::SIGHUP - 1) & 1 == 1)
}

impl Daemon {
    /// Obeys signals and callers until a signal ends the daemon.
    ///
    /// # Errors
    /// A role failed.
    pub(super) async fn keep_serving(
        &mut self,
        open: &mut Open,
        wishes: &mut Wishes,
        signals: &mut Signals,
    ) -> Result<()> {
        self.tell_of_certificates();
        let mut refresh = interval_at(Instant::now() + GUARD_REFRESH, GUARD_REFRESH);
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
                    // There is nothing to reload, and no terminal any more.
                    if self.file.is_none() && !signals.outlives_terminal {
                        return Ok(());
                    }
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
    pub(super) fn refresh_guard(&mut self) {
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
    pub(super) async fn end(mut self, mut signals: Signals) {
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

/// Tells the service manager of a state.
pub(super) fn notify(state: &[NotifyState<'_>]) {
    // Without a service manager there is no receiver.
    _ = sd_notify::notify(state);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_started_to_outlive_its_terminal_is_known_by_its_mask() {
        let status = |mask: &str| format!("SigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n");
        assert!(ignores_hangup(&status("0000000000001001")));
        assert!(!ignores_hangup(&status("0000000000001000")) && !ignores_hangup(""));
    }
}
