//! The start: first roles with nothing open and the default policy, then the configured policy, then the listeners and
//! doors.

use std::{
    net::UdpSocket,
    os::unix::net::UnixListener,
    path::PathBuf,
    sync::{Arc, Weak},
};

use admission::connection_id::Secret;
use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use config::{Config, policy::Policy, targets::Protocol};
use edge::{Edge, EntranceClasses, NamedSchedules};
use pacing::io::{device::Devices, qdisc};
use quic::{class::PolicyRole, endpoint::Transport};
use role::{
    bind_error::BindError,
    ready::{LifeStage, PartReady},
    transport::transport,
};
use sd_notify::NotifyState;
use state::StateFolder;
use systemd::watchdog::Watchdog;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    announce,
    daemon::{Daemon, Open, Wishes, notify},
    gateway_role::GatewayRole,
    relay_role::RelayRole,
};
use crate::{
    certificates::{self, CertificateWarnings},
    configuration::files::{self, SeenFiles},
    control::{Control, Facts, Reload, doors::Doors},
    echo::{self, DEVELOPMENT_ECHO},
    log::LogControl,
    metrics::Metrics,
    parts::Parts,
    policy::{self, Policies},
    workers::{Steering, WorkerSockets},
};

/// The inputs of the start.
pub(super) struct Launch {
    pub(super) config: Config,
    /// The file of the configuration; `None` in development mode.
    pub(super) file: Option<PathBuf>,
    pub(super) folder: StateFolder,
    pub(super) log: LogControl,
    pub(super) parts: Arc<Parts>,
    /// The relay role's sockets, steering and secret, if there is one.
    pub(super) places: Option<(WorkerSockets, Steering, Secret)>,
    /// The control socket, if the service manager opened it.
    pub(super) door: Option<UnixListener>,
    /// Runs tasks that may wait.
    pub(super) runtime: Handle,
}

impl Daemon {
    /// Starts everything that the configuration names, and notifies the service manager.
    ///
    /// # Errors
    /// A file or address that the configuration names is missing or taken.
    pub(super) async fn start(launch: Launch) -> Result<(Self, Open, Wishes)> {
        let Launch { config, file, folder, log, parts, places, door, runtime } = launch;
        // The daemon keeps the policy of the files, with which a reload compares them.
        let (first, saved) = with_saved_policy(&config);
        let config = Arc::new(config);
        parts.kernel.limit(&config.kernel);
        let devices = follow_devices(&config, &parts, &runtime);
        let transport = transport(&config.transport).leaving_by(&devices, &parts.packets);
        let (edge, entrance_classes) = prepare_edge(transport.clone(), &parts, &runtime);
        let gateway = GatewayRole::new(&folder, &parts);
        certificates::warn_of_unfit(&config);
        let mut daemon = Self {
            log,
            metrics: Metrics::new(&parts),
            relay: None,
            gateway,
            edge,
            entrance_classes,
            roles: JoinSet::new(),
            watchdog: Watchdog::wanted(),
            page: None,
            read: Arc::new(ArcSwap::from_pointee(SeenFiles::of(&config))),
            certificates: certificates::shown(&config)?,
            warnings: CertificateWarnings::default(),
            config: config.clone(),
            file,
            parts,
            runtime,
        };
        let sockets = daemon.prepare_relay(&folder, places).await?;
        // Without a relay, one thread moves packets too.
        let workers = u8::try_from(sockets.len().max(1)).unwrap_or(u8::MAX);
        let has_marks = daemon.parts.kernel.marks().is_some();
        let policies = Policies::new(&first, folder, saved, daemon.enforce());
        if !has_marks && uses_marks(&config) {
            daemon.mark_late(&policies);
        }
        let gateway = daemon.gateway.prepare(&config, &[], &daemon.parts)?;
        daemon.gateway.serve(gateway, &daemon.parts, &daemon.runtime, None);
        if let (Some(role), Some(settings)) = (&daemon.relay, &config.relay) {
            let given = (sockets, daemon.watchdog.clone());
            role.listen(&settings.limits, transport, &daemon.parts, given, &mut daemon.roles).await?;
        }
        let entrances = daemon.edge.prepare(&config)?;
        daemon.edge.serve(entrances, &daemon.entrance_classes);
        // The guard must be in place before any door shows that the relay is there.
        daemon.refresh_guard();
        let (open, reloads) = daemon.open(policies, workers, door).await?;
        announce::announce(&daemon, &open.control.facts())?;
        daemon.keep_state();
        daemon.announce_readiness(&Arc::downgrade(&open.control));
        let (changed, files) = mpsc::channel(1);
        daemon.runtime.spawn(files::follow(daemon.read.clone(), changed));
        Ok((daemon, open, Wishes { reloads, files }))
    }

    /// Saves the state of the roles as it changes. Called once the start has succeeded: a start that is refused writes nothing, so that it
    /// costs no user anything if its clock is wrong.
    fn keep_state(&self) {
        if let Some(role) = &self.relay {
            self.runtime.spawn(role.ledger.clone().keep());
        }
        self.gateway.keep(&self.runtime);
    }

    /// Prepares the relay role, if there is one; returns the sockets that it will listen on.
    async fn prepare_relay(
        &mut self,
        folder: &StateFolder,
        places: Option<(WorkerSockets, Steering, Secret)>,
    ) -> Result<WorkerSockets> {
        let (Some((sockets, steering, secret)), Some(settings)) = (places, &self.config.relay) else {
            return Ok(WorkerSockets::new());
        };
        let (secret, gateway) = ((steering, secret), self.gateway.in_force.clone());
        let of = (&*self.config, folder);
        self.relay = Some(RelayRole::new(of, settings, &self.parts, &self.runtime, secret, gateway).await?);
        Ok(sockets)
    }

    /// Opens the doors, the page of metrics and, in development mode, the echo.
    async fn open(
        &mut self,
        policies: Arc<Policies>,
        workers: u8,
        door: Option<UnixListener>,
    ) -> Result<(Open, mpsc::Receiver<Reload>)> {
        let (reloads, wanted) = mpsc::channel(1);
        let facts = Facts::new(&self.config, workers, &self.certificates);
        self.metrics.set_certificates(&self.certificates);
        let relay = self.relay.as_ref().map(|role| role.relay.clone());
        let answering = (relay, self.gateway.in_force.clone());
        let control = Control::new(policies.clone(), answering, self.parts.clone(), facts, reloads);
        let mut open = Open { doors: Doors::new(control.clone(), self.runtime.clone()), control, policies };
        open.doors.start(&self.config.control, door)?;
        self.page = match self.prepare_page(self.config.metrics.listen) {
            // Development mode has no configuration that could name another address.
            Err(error) if self.file.is_none() => {
                tracing::warn!("there are no metrics: {error:#}");
                None
            }
            page => page?.flatten(),
        };
        if self.file.is_none() {
            let address = DEVELOPMENT_ECHO.parse().context("the echo has an address")?;
            let bound = self.runtime.spawn(echo::bind(address)).await?;
            let socket = bound
                .map_err(|error| BindError::new(Protocol::Udp, address, error))
                .context("failed to start the echo")?;
            self.runtime.spawn(echo::serve(socket));
        }
        Ok((open, wanted))
    }

    /// Tells the service manager, the readiness page and the watchdog that the daemon serves.
    fn announce_readiness(&self, control: &Weak<Control>) {
        notify(&[NotifyState::Ready]);
        let control = control.clone();
        self.parts.ready.require(move || {
            let Some(control) = control.upgrade() else { return PartReady::Gone };
            // From the configuration in force, which a reload may change.
            match control.facts().has_listeners() {
                true => PartReady::Ready,
                false => PartReady::Missing("nothing to listen on".into()),
            }
        });
        self.parts.ready.reach(LifeStage::Serving);
        if let Some(watchdog) = &self.watchdog {
            tokio::spawn(watchdog.clone().feed(self.parts.ready.clone()));
        }
    }
}

/// Returns the configuration with the policy that takes effect first, and its text if it was saved.
fn with_saved_policy(config: &Config) -> (Config, Option<String>) {
    let mut first = config.clone();
    let saved = policy::prefer_saved(&mut first).unwrap_or_else(|error| {
        tracing::error!("the saved policy cannot be used; the policy in the files is in force: {error:#}");
        None
    });
    (first, saved)
}

/// Whether the tc program is to use marks, now or once a monitor has loaded it.
fn uses_marks(config: &Config) -> bool {
    config.kernel.egress && !config.kernel.devices.is_empty()
}

/// Starts to follow this host's devices; returns none if neither this process nor the kernel's programs depend on them.
fn follow_devices(config: &Config, parts: &Parts, runtime: &Handle) -> Devices {
    let kernel = parts.kernel.clone();
    if config.transport.io == config::transport::PacketIo::Stock && !uses_marks(config) {
        return Devices::default();
    }
    let listener = move |device: &str, ahead_ns| kernel.set_fq(device, ahead_ns >= bpf::egress::HORIZON_NS);
    qdisc::follow(parts.qdiscs.clone(), runtime, Box::new(listener))
}

/// Returns the edge role without local addresses, and the classes of the addresses that it will have.
fn prepare_edge(transport: Transport, parts: &Arc<Parts>, runtime: &Handle) -> (Edge, EntranceClasses) {
    let moved = watch::Sender::default();
    let moves = moved.subscribe();
    runtime.spawn(uplink::moves::follow(moved));
    let (schedules, counted) = (NamedSchedules::default(), parts.clone());
    let make = move |policy: &Policy| counted.classes_of(policy, PolicyRole::Edge);
    let entrance_classes = EntranceClasses::new(Policy::default(), schedules.clone(), make);
    (Edge::new(transport, parts.edge.clone(), schedules, moves), entrance_classes)
}

/// Removes listeners whose address family this machine lacks, as many containers lack IPv6: development mode listens on
/// both by default, without the operator asking.
pub(super) fn without_missing_families(mut config: Config) -> Config {
    if let Some(relay) = &mut config.relay {
        relay.listeners.retain(|listener| {
            let is_missing = UdpSocket::bind((listener.address.ip(), 0)).is_err_and(|error| {
                matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
            });
            if is_missing {
                tracing::warn!(address = %listener.address, "this machine has no such address; development mode does without it");
            }
            !is_missing
        });
    }
    config
}

#[cfg(test)]
mod tests {
    use config::change;

    use super::*;

    #[test]
    fn the_saved_policy_takes_effect_first_and_the_files_are_compared_with_their_own() {
        let folder = std::env::temp_dir().join(format!("paced-first-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("policy.toml"), "[class.saved]\n").unwrap();
        let read = || Config::from_toml(&format!("state_dir = \"{}\"\n[class.files]\n", folder.display())).unwrap();
        let config = read();
        let (first, saved) = with_saved_policy(&config);
        assert_eq!(saved.as_deref(), Some("[class.saved]\n"));
        assert!(change::rows(&config, &first).iter().any(|row| row.has_changed), "it is the saved one");
        assert!(change::rows(&config, &read()).iter().all(|row| !row.has_changed), "no file has changed");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
