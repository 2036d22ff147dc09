//! The relay role of this daemon: its listeners and what they need.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use config::{
    Config,
    policy::Policy,
    relay::{ListenerSettings, RelayLimits, RelaySettings as Settings},
};
use quic::{
    class::PolicyRole,
    connection_id::Secret,
    endpoint::Transport,
    tls::{self, ServerTls},
};
use relay::{
    Relay, Resources, Rules,
    host_addresses::HostAddresses,
    ledger::QuotaLedger,
    resolve::{Resolver, ResolverSettings},
};
use serving::gateway::Gateway;
use tokio::{runtime::Handle, task::JoinSet};

use super::{
    CLOSING, classes,
    lessons::{Lessons, TokenLedger},
    records::Records,
};
use crate::{
    configuration::identity,
    enforcement::Tables,
    parts::Parts,
    watchdog::Watchdog,
    workers::{Endpoints, Steering, WorkerSockets},
};

/// What of the role has to be kept at hand while the daemon runs.
pub(super) struct RelayRole {
    pub(super) relay: Arc<Relay>,
    pub(super) listeners: Vec<(ListenerSettings, ServerTls)>,
    /// The numbers of their classes, as connection IDs say them.
    classes: Vec<Arc<AtomicU8>>,
    /// Whether new connections are let in.
    pub(super) open: Arc<AtomicBool>,
    /// What users have used of their quotas.
    pub(super) ledger: Arc<QuotaLedger>,
    /// What its gateway has learned of engines.
    pub(super) lessons: Arc<Lessons>,
    /// Writes what its gateway decided.
    pub(super) records: Arc<Records>,
    /// What keys of its clients were used for this month.
    pub(super) tokens: Arc<TokenLedger>,
    /// How long tunnels may go on after SIGTERM.
    pub(super) drain: Duration,
    host_addresses: HostAddresses,
    secret: Secret,
    steering: Steering,
}

impl RelayRole {
    /// Makes the role ready: it has the default policy until another is put in force, and listens nowhere.
    ///
    /// # Errors
    /// A certificate or key is not usable, or this host's addresses or resolver cannot be read.
    pub(super) async fn new(
        config: &Config,
        settings: &Settings,
        parts: &Arc<Parts>,
        runtime: &Handle,
        (steering, secret): (Steering, Secret),
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
            access: parts.access.clone(),
            ids: [parts.edge.connections.ids.clone(), parts.edge.roster.tunnels.count()],
            proven: Box::new(move |client| kernel.know(client)),
        };
        let relay = Relay::new(Rules::new(settings), classes(&Policy::default(), PolicyRole::Relay, parts), resources);
        let lessons = Lessons::open(&config.state_dir, relay.clone());
        let tokens = TokenLedger::open(&config.state_dir, parts.spending.clone());
        let gateway = prepare_gateway(config, &relay, &lessons, parts)?;
        put_in_force(&relay, gateway, parts, runtime);
        let ledger = QuotaLedger::open(&config.state_dir, relay.accounts.clone(), parts.relay.quotas.clone());
        runtime.spawn(ledger.clone().keep());
        runtime.spawn(lessons.clone().keep());
        let records = Records::new(&config.state_dir, parts.decisions.clone());
        runtime.spawn(records.clone().keep());
        runtime.spawn(tokens.clone().keep());
        let listener = |listener: &ListenerSettings| -> Result<_> {
            Ok((listener.clone(), ServerTls::new(identity(listener, &config.state_dir)?)))
        };
        Ok(Self {
            relay,
            listeners: settings.listeners.iter().map(listener).collect::<Result<_>>()?,
            classes: settings.listeners.iter().map(|_| Arc::default()).collect(),
            open: Arc::new(AtomicBool::new(true)),
            ledger,
            lessons,
            records,
            tokens,
            drain: settings.drain,
            host_addresses,
            secret,
            steering,
        })
    }

    /// Lets connections in: those of the first worker on this thread, those of others on threads of their own. `roles` get
    /// what ends when an endpoint does.
    ///
    /// # Errors
    /// An endpoint or a thread does not start.
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
            max_requests: Transport::requests_for(limits.tunnels_per_connection),
            // Clients keep their connections alive, or let them go.
            keep_alive: None,
            ..transport
        };
        let endpoints = Arc::new(Endpoints {
            relay: self.relay.clone(),
            transport,
            workers: sockets.len(),
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
                roles.spawn(endpoints.clone().start_thread(worker, sockets, CLOSING).await?);
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

    /// Goes by other settings from now on, whose listeners are at the same addresses and have these `identities`.
    pub(super) fn replace(
        &mut self,
        settings: &Settings,
        (identities, gateway): (Vec<tls::PreparedTls>, Option<Arc<Gateway>>),
        parts: &Parts,
        runtime: &Handle,
    ) {
        for ((_, tls), identity) in self.listeners.iter().zip(identities) {
            tls.replace(identity);
        }
        for (listener, _) in &mut self.listeners {
            let new = settings.listeners.iter().find(|new| new.address == listener.address);
            listener.class = new.and_then(|new| new.class.clone());
        }
        self.number_classes(&parts.kernel);
        self.relay.replace_rules(Rules::new(settings));
        put_in_force(&self.relay, gateway, parts, runtime);
        self.drain = settings.drain;
    }

    /// Makes connection IDs to come say the numbers by which the kernel knows the listeners' classes.
    fn number_classes(&self, kernel: &Tables) {
        for ((listener, _), class) in self.listeners.iter().zip(&self.classes) {
            class.store(kernel.number_of(listener.class.as_deref()), Relaxed);
        }
    }

    /// Tells the kernel's programs which packets are to listeners and which connection IDs are known. To be repeated:
    /// addresses and keys change.
    pub(super) fn refresh_guard(&mut self, kernel: &Tables) {
        if let Err(error) = self.steering.steer_by(&self.secret) {
            tracing::warn!("the program that steers packets to workers was not updated: {error:#}");
        }
        let listeners = self.listeners.iter().map(|(listener, _)| (listener.address, listener.class.as_deref()));
        kernel.guard(listeners, &self.host_addresses, &self.secret);
    }
}

/// Returns the gateway that a configuration wants: the one that `relay` has, if nothing about it is different.
///
/// # Errors
/// A file with a key or a policy cannot be used.
pub(super) fn prepare_gateway(
    config: &Config,
    relay: &Relay,
    lessons: &Lessons,
    parts: &Parts,
) -> Result<Option<Arc<Gateway>>> {
    let Some(settings) = &config.gateway else { return Ok(None) };
    let shared = (parts.gateway.clone(), parts.requests.clone(), parts.decisions.clone());
    let gateway = Gateway::new(settings, &relay.classes(), (shared, &parts.spending), &lessons.learned())?;
    Ok(Some(relay.gateway().filter(|before| before.is_like(&gateway)).unwrap_or(gateway)))
}

/// Has a gateway answer from now on, or none.
fn put_in_force(relay: &Relay, gateway: Option<Arc<Gateway>>, parts: &Parts, runtime: &Handle) {
    match &gateway {
        Some(gateway) => gateway.begin(runtime),
        None => parts.gateway.show(Vec::new()),
    }
    relay.replace_gateway(gateway);
}
