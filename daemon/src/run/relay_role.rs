//! The relay role of this daemon: its listeners and what they need.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use admission::connection_id::Secret;
use anyhow::{Context as _, Result};
use config::{
    Config,
    policy::Policy,
    relay::{ListenerSettings, RelayLimits, RelaySettings as Settings},
};
use enforcement::Tables;
use quic::{
    class::PolicyRole,
    endpoint::Transport,
    flow_control::requests_for,
    tls::{self, ServerTls},
};
use relay::{
    Relay, Resources, Rules,
    host_addresses::HostAddresses,
    ledger::QuotaLedger,
    resolve::{Resolver, ResolverSettings},
};
use serving::in_force::GatewayInForce;
use state::StateFolder;
use systemd::watchdog::Watchdog;
use tokio::{runtime::Handle, task::JoinSet};

use crate::{
    configuration::identity,
    parts::Parts,
    workers::{Endpoints, Steering, WorkerSockets},
};

/// How often the kernel's guard receives this host's addresses.
pub(super) const GUARD_REFRESH: Duration = Duration::from_secs(10);

/// The state of the role that the daemon keeps while it runs.
pub(super) struct RelayRole {
    pub(super) relay: Arc<Relay>,
    pub(super) listeners: Vec<(ListenerSettings, ServerTls)>,
    /// The numbers of the listeners' classes, as connection IDs contain them.
    classes: Vec<Arc<AtomicU8>>,
    /// Whether new connections are accepted.
    pub(super) open: Arc<AtomicBool>,
    /// What users have used of their quotas.
    pub(super) ledger: Arc<QuotaLedger>,
    /// How long tunnels may continue after SIGTERM.
    pub(super) drain: Duration,
    /// How the workers wait for events.
    waits: turns::Waits,
    host_addresses: HostAddresses,
    secret: Secret,
    steering: Steering,
}

impl RelayRole {
    /// Prepares the role: with the default policy until another is put in force, and without listening yet.
    ///
    /// # Errors
    /// A certificate or key is not usable, or this host's addresses or resolver configuration cannot be read.
    pub(super) async fn new(
        (config, folder): (&Config, &StateFolder),
        settings: &Settings,
        parts: &Arc<Parts>,
        runtime: &Handle,
        (steering, secret): (Steering, Secret),
        gateway: Arc<GatewayInForce>,
    ) -> Result<Self> {
        let resolver = ResolverSettings {
            lookups_in_flight: settings.limits.dns_lookups_in_flight as usize,
            timeout: settings.limits.dns_timeout,
            ..ResolverSettings::default()
        };
        let resolver = Resolver::start(resolver, parts.relay.dns.clone(), runtime);
        let addresses = runtime.spawn(HostAddresses::watch()).await?;
        let host_addresses = addresses.context("failed to read this host's addresses")?;
        let kernel = parts.kernel.clone();
        let resources = Resources {
            resolver: resolver.context("failed to start the resolver")?,
            host_addresses: host_addresses.clone(),
            metrics: parts.relay.clone(),
            usages: parts.usages.clone(),
            access: parts.access.clone(),
            ids: [parts.edge.uplinks.ids.clone(), parts.edge.roster.tunnels.count()],
            proven: Box::new(move |client| kernel.know(client)),
            gateway,
        };
        let relay =
            Relay::new(Rules::new(settings), parts.classes_of(&Policy::default(), PolicyRole::Relay), resources);
        let quotas = parts.relay.quotas.clone();
        let ledger = QuotaLedger::open(folder, relay.accounts.clone(), quotas, &parts.saves);
        let listener = |listener: &ListenerSettings| -> Result<_> {
            Ok((listener.clone(), ServerTls::new(identity(listener, &config.state_dir, &[])?)))
        };
        Ok(Self {
            relay,
            listeners: settings.listeners.iter().map(listener).collect::<Result<_>>()?,
            classes: settings.listeners.iter().map(|_| Arc::default()).collect(),
            open: Arc::new(AtomicBool::new(true)),
            ledger,
            drain: settings.drain,
            waits: parts.waits(&config.transport),
            host_addresses,
            secret,
            steering,
        })
    }

    /// Starts listening: the first worker on this thread, each other worker on a thread of its own. Adds to `roles` the
    /// tasks that end when an endpoint does.
    ///
    /// # Errors
    /// An endpoint or a thread cannot be started.
    pub(super) async fn listen(
        &self,
        limits: &RelayLimits,
        transport: Transport,
        parts: &Parts,
        (sockets, watchdog): (WorkerSockets, Option<Arc<Watchdog>>),
        roles: &mut JoinSet<Result<()>>,
    ) -> Result<()> {
        self.number_classes(&parts.kernel);
        let transport = Transport {
            idle_timeout: limits.connection_idle,
            max_requests: requests_for(limits.tunnels_per_connection),
            // The clients keep their connections alive, or let them time out.
            keep_alive: None,
            ..transport
        };
        let endpoints = Arc::new(Endpoints {
            relay: self.relay.clone(),
            transport,
            workers: sockets.len(),
            waits: self.waits.clone(),
            listeners: self.listeners.clone(),
            classes: self.classes.clone(),
            limits: limits.clone(),
            metrics: parts.relay.clone(),
            secret: self.secret.clone(),
            open: self.open.clone(),
            watchdog,
        });
        for (worker, sockets) in (0..).zip(sockets) {
            if worker > 0 {
                roles.spawn(endpoints.clone().start_thread(worker, sockets).await?);
                continue;
            }
            let mut serving = endpoints.start(worker, sockets)?;
            roles.spawn(async move {
                while serving.join_next().await.is_some() {}
                Ok(())
            });
        }
        Ok(())
    }

    /// Switches to other settings, whose listeners are at the same addresses and have these `identities`.
    pub(super) fn replace(&mut self, settings: &Settings, identities: Vec<tls::PreparedTls>, parts: &Parts) {
        for ((_, tls), identity) in self.listeners.iter().zip(identities) {
            tls.replace(identity);
        }
        for (listener, _) in &mut self.listeners {
            let new = settings.listeners.iter().find(|new| new.address == listener.address);
            listener.class = new.and_then(|new| new.class.clone());
        }
        self.number_classes(&parts.kernel);
        self.relay.replace_rules(Rules::new(settings));
        self.drain = settings.drain;
    }

    /// Puts the kernel's numbers for the listeners' classes into new connection IDs.
    fn number_classes(&self, kernel: &Tables) {
        for ((listener, _), class) in self.listeners.iter().zip(&self.classes) {
            class.store(kernel.number_of(listener.class.as_deref()), Relaxed);
        }
    }

    /// Updates the kernel's programs with the listeners' addresses and the keys of connection IDs. To be repeated,
    /// because addresses and keys change.
    pub(super) fn refresh_guard(&mut self, kernel: &Tables) {
        if let Err(error) = self.steering.steer_by(&self.secret) {
            tracing::warn!("the program that steers packets to workers was not updated: {error:#}");
        }
        let listeners = self.listeners.iter().map(|(listener, _)| (listener.address, listener.class.as_deref()));
        kernel.guard(listeners, &self.host_addresses, &self.secret);
    }
}
