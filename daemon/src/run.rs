//! The daemon's life: roles are started, signals obeyed, and everything is brought to an end.
//!
//! Two threads: the main one moves data and nothing else; `control` resolves names, listens to netlink and answers
//! scrapes and the control plane, where a pause costs no packet. A relay with several workers has a further thread for each but the first.

use std::{
    io::{self, Write as _},
    net::UdpSocket,
    os::unix::net::UnixListener,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use arc_swap::ArcSwap;
use config::{Config, hash::hex, policy::Policy, relay::Listener};
use edge::{Edge, EntranceClasses};
use pacing::io::{device::Devices, qdisc};
use quic::{
    class::{Classes, Role},
    connection_id::Secret,
    datagrams::Schedules,
    endpoint::Transport,
    tls::{self, ServerTls},
};
use relay::{
    Phase, Relay, Resources, Rules,
    host_addresses::HostAddresses,
    ledger::Ledger,
    resolve::{Resolver, ResolverSettings},
};
use role::{
    bind_error::BindError,
    ready::{Stage, Verdict},
};
use sd_notify::NotifyState;
use tokio::{
    runtime::{self, Handle},
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, interval_at, timeout},
};

use crate::{
    activation::Activation,
    certificates::{self, Certificate, Nearness, Told},
    configuration::{
        self,
        files::{self, Files},
        identity,
    },
    confinement::{self, Process},
    control::{Control, Facts, Reload, doors::Doors},
    echo,
    enforcement::Enforcement,
    log::{self, Log},
    metrics::{Metrics, Page},
    parts::Parts,
    policy::{self, Policies},
    watchdog::Watchdog,
    workers::{self, Endpoints, Sockets, Steering},
};

mod reload;

/// Where the echo of development mode listens.
pub const DEVELOPMENT_ECHO: &str = "127.0.0.1:4434";

/// Runs with a configuration file until SIGTERM.
///
/// # Errors
/// The configuration is not valid, or something it names is missing or taken.
pub fn production(file: &Path) -> Result<()> {
    let config = configuration::read(file)?;
    start(config, Some(file))
}

/// Runs for this machine only, with no configuration: a relay with a certificate of its own that it keeps in
/// `state_dir`, without tokens, to targets on loopback.
///
/// # Errors
/// The folder cannot be written, or an address is taken.
pub fn development(state_dir: &Path) -> Result<()> {
    start(Config::development(state_dir.to_owned()), None)
}

/// What the policy calls classes, for one role.
fn classes(policy: &Policy, role: Role, parts: &Parts) -> Arc<Classes> {
    let marks = parts.kernel.marks();
    let of_class = |class: &str| marks.as_ref().map(|marks| marks.of_class(class, role)).unwrap_or_default();
    Arc::new(Classes::new(policy.clone(), role, &parts.classes, of_class))
}

/// The secret of the state folder; where there can be none, one that ends with the process.
fn secret(state_dir: &Path) -> Result<Secret> {
    Secret::keep_in(state_dir).or_else(|error| {
        tracing::warn!("peers will not learn of a restart: {error:#}");
        Secret::ephemeral()
    })
}

/// Returns the edge role without local addresses, and the classes of the addresses that it will have.
fn prepare_edge(config: &Config, parts: &Arc<Parts>, devices: &Devices, control: &Handle) -> (Edge, EntranceClasses) {
    let moved = watch::Sender::new(());
    let moves = moved.subscribe();
    control.spawn(edge::moves::follow(moved));
    let transport = Transport::from(&config.transport).leaving_by(devices, &parts.io);
    let (schedules, counted) = (Schedules::default(), parts.clone());
    let make = move |policy: &Policy| classes(policy, Role::Edge, &counted);
    let entrance_classes = EntranceClasses::new(config.policy.clone(), schedules.clone(), make);
    (Edge::new(transport, parts.edge.clone(), schedules, moves), entrance_classes)
}

/// Leaves out listeners whose address family this machine does not have, as IPv6 in many containers: development mode asks
/// for both, and nobody wrote that it should.
fn without_missing_families(mut config: Config) -> Config {
    if let Some(relay) = &mut config.relay {
        relay.listeners.retain(|listener| {
            let is_missing = UdpSocket::bind((listener.address.ip(), 0)).is_err_and(|error| {
                matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
            });
            if is_missing {
                tracing::warn!(address = %listener.address, "this machine has no such address, development mode does without");
            }
            !is_missing
        });
    }
    config
}

fn start(config: Config, file: Option<&Path>) -> Result<()> {
    let log = log::start(&config);
    let config = if file.is_none() { without_missing_families(config) } else { config };
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
    // Before there are threads, so that none keeps a right.
    let parts = Arc::<Parts>::default();
    parts.relay.users.limit(config.metrics.users);
    parts.kernel.in_force.probe();
    let mut enforcement = Enforcement::start(&config.kernel, parts.kernel.clone());
    confinement::confine(Process::Data)
        .unwrap_or_else(|error| tracing::warn!("this process is not confined: {error:#}"));
    let control = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        // For what may wait: for the disk, the kernel, or the user database.
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
    let outcome = data.block_on(Daemon::serve(config, file, control.handle(), log, parts, places, door));
    access.finish(Duration::from_secs(1));
    control.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// What has to be kept at hand while the daemon runs.
struct Daemon {
    /// What is in force, but for the policy.
    config: Arc<Config>,
    log: Log,
    parts: Arc<Parts>,
    metrics: Arc<Metrics>,
    /// Which of them keep departure times.
    devices: Devices,
    relay: Option<RelayRole>,
    edge: Edge,
    /// The class that each local address is of.
    entrance_classes: EntranceClasses,
    roles: JoinSet<Result<()>>,
    watchdog: Option<Arc<Watchdog>>,
    /// Runs what may wait.
    runtime: Handle,
    /// Where metrics are served.
    page: Option<Page>,
    /// The files that the configuration names, as they were when they were read.
    read: Arc<ArcSwap<Files>>,
    /// The certificates that are shown, and what was said of them.
    certificates: Vec<Certificate>,
    told: Told,
}

/// What is asked, and by which doors.
struct Open {
    policies: Arc<Policies>,
    control: Arc<Control>,
    doors: Doors,
}

struct RelayRole {
    relay: Arc<Relay>,
    listeners: Vec<(Listener, ServerTls)>,
    /// The numbers of their classes, as connection IDs say them.
    classes: Vec<Arc<AtomicU8>>,
    /// Whether new connections are let in.
    open: Arc<AtomicBool>,
    drain: Duration,
    host_addresses: HostAddresses,
    secret: Secret,
    steering: Steering,
    /// What users have used of their quotas.
    ledger: Arc<Ledger>,
}

impl Daemon {
    async fn serve(
        mut config: Config,
        file: Option<&Path>,
        control: &Handle,
        log: Log,
        parts: Arc<Parts>,
        places: Option<(Sockets, Steering, Secret)>,
        door: Option<UnixListener>,
    ) -> Result<()> {
        // Signals that arrive from here on are kept, not obeyed by dying.
        let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        let mut hangup = listen(SignalKind::hangup())?;
        let (relay, roles) = (None, JoinSet::new());
        let kernel = parts.kernel.clone();
        let saved = policy::prefer_saved(&mut config).unwrap_or_else(|error| {
            tracing::error!("the saved policy cannot be used, that of the files is in force: {error:#}");
            None
        });
        let published = kernel.publish(&config.policy);
        published.unwrap_or_else(|error| tracing::warn!("no class has terms in the kernel: {error:#}"));
        kernel.limit(&config.kernel);
        parts.io.departures.follow(&config.policy.names());
        let devices = match config.transport.io {
            config::Io::Stock if kernel.marks().is_none() => Devices::default(),
            _ => {
                let listener = move |device: &str, keeps| kernel.set_fq(device, keeps);
                qdisc::follow(parts.qdiscs.clone(), control, Box::new(listener))
            }
        };
        let (edge, entrance_classes) = prepare_edge(&config, &parts, &devices, control);
        let watchdog = Watchdog::wanted();
        let config = Arc::new(config);
        let mut daemon = Self {
            config: config.clone(),
            log,
            metrics: Metrics::new(&parts),
            parts: parts.clone(),
            devices,
            relay,
            edge,
            entrance_classes,
            roles,
            watchdog,
            runtime: control.clone(),
            page: None,
            read: Arc::new(ArcSwap::from_pointee(Files::of(&config))),
            certificates: certificates::shown(&config)?,
            told: Told::default(),
        };
        if let Some(places) = places {
            daemon.start_relay(&config, &parts, control, places).await?;
        }
        let entrances = daemon.edge.prepare(&config)?;
        daemon.edge.serve(entrances, &daemon.entrance_classes);
        let policies = Policies::new(&config, saved, daemon.enforce());
        let (reloads, mut reload_wanted) = mpsc::channel(1);
        let facts = Facts::new(&config, &daemon.certificates);
        daemon.metrics.set_certificates(&daemon.certificates);
        let relay = daemon.relay.as_ref().map(|role| role.relay.clone());
        let asked = Control::new(policies.clone(), relay, parts.clone(), facts.clone(), reloads);
        let mut open = Open { doors: Doors::new(asked.clone(), control.clone()), control: asked, policies };
        open.doors.start(&config.control, door)?;
        daemon.page = daemon.prepare_page(config.metrics.listen)?.flatten();
        if file.is_none() {
            let address = DEVELOPMENT_ECHO.parse().context("the echo has an address")?;
            let bound = control.spawn(echo::bind(address)).await?;
            let socket = bound.map_err(|error| BindError::new(address, error)).context("there is no echo")?;
            control.spawn(echo::serve(socket));
        }
        // A relay that is said to be ready is guarded already.
        daemon.refresh_guard();
        daemon.announce(&config, file, &facts)?;
        notify(&[NotifyState::Ready]);
        let asked = Arc::downgrade(&open.control);
        parts.ready.require(move || {
            let Some(control) = asked.upgrade() else { return Verdict::Gone };
            // By the configuration in force, which a reload may change.
            let facts = control.facts();
            match facts.listeners.is_empty() && facts.forwards.is_empty() {
                true => Verdict::Missing("nothing to listen on".into()),
                false => Verdict::Ready,
            }
        });
        parts.ready.reach(Stage::Serving);
        if let Some(watchdog) = &daemon.watchdog {
            tokio::spawn(watchdog.clone().feed());
        }
        daemon.tell_of_certificates();
        let (changed, mut files_changed) = mpsc::channel(1);
        control.spawn(files::follow(daemon.read.clone(), changed));
        let mut refresh = interval_at(Instant::now() + REFRESH, REFRESH);
        loop {
            tokio::select! {
                _ = refresh.tick() => {
                    daemon.refresh_guard();
                    daemon.tell_of_certificates();
                }
                Some(()) = files_changed.recv() => daemon.read_files_again(&mut open),
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {
                    if let Some(file) = file {
                        _ = daemon.reload(file, "SIGHUP", &mut open).await;
                    }
                }
                Some(Reload { author, done }) = reload_wanted.recv() => {
                    let outcome = match file {
                        Some(file) => daemon.reload(file, &author, &mut open).await,
                        None => Err("development mode has no configuration to read".into()),
                    };
                    // The caller may have gone.
                    _ = done.send(outcome);
                }
                failed = daemon.edge.failed() => {
                    failed?;
                    anyhow::bail!("a local address ended");
                }
                Some(ended) = daemon.roles.join_next() => {
                    ended.context("a role ended unexpectedly")??;
                    anyhow::bail!("an endpoint failed");
                }
            }
        }
        notify(&[NotifyState::Stopping]);
        daemon.end(terminate, interrupt).await;
        Ok(())
    }

    async fn start_relay(
        &mut self,
        config: &Config,
        parts: &Arc<Parts>,
        control: &Handle,
        (workers, steering, secret): (Sockets, Steering, Secret),
    ) -> Result<()> {
        let Some(settings) = &config.relay else { return Ok(()) };
        let limits = &settings.limits;
        let resolver = Resolver::start(
            ResolverSettings {
                lookups_in_flight: limits.dns_lookups_in_flight as usize,
                timeout: limits.dns_timeout,
                ..ResolverSettings::default()
            },
            parts.relay.dns.clone(),
            control,
        )
        .context("failed to start the resolver")?;
        let host_addresses =
            control.spawn(HostAddresses::watch()).await?.context("failed to read this host's addresses")?;
        let policy = classes(&config.policy, Role::Relay, parts);
        let kernel = parts.kernel.clone();
        let resources = Resources {
            resolver,
            host_addresses: host_addresses.clone(),
            metrics: parts.relay.clone(),
            access: parts.access.clone(),
            ids: [parts.edge.connections.ids.clone(), parts.edge.roster.tunnels.count()],
            proven: Box::new(move |client| kernel.know(client)),
        };
        let relay = Relay::new(Rules::new(settings), policy, resources);
        let ledger = Ledger::open(&config.state_dir, relay.accounts.clone(), parts.relay.quotas.clone());
        control.spawn(ledger.clone().keep());
        let transport = Transport {
            idle_timeout: limits.connection_idle,
            // Many more than there may be tunnels, so that one too many gets an answer: the transport gives new credit
            // only when a tenth of all streams has ended.
            max_requests: 2 * u64::from(limits.tunnels_per_connection) + 64,
            // Clients keep their connections alive, or let them go.
            keep_alive: None,
            ..Transport::from(&config.transport).leaving_by(&self.devices, &parts.io)
        };
        let prepare = |listener: &Listener| -> Result<_> {
            Ok((listener.clone(), ServerTls::new(identity(listener, &config.state_dir)?)))
        };
        let listeners = settings.listeners.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let class = |listener: &Listener| Arc::new(AtomicU8::new(parts.kernel.number_of(listener.class.as_deref())));
        let classes: Vec<_> = settings.listeners.iter().map(class).collect();
        let open = Arc::new(AtomicBool::new(true));
        let endpoints = Arc::new(Endpoints {
            relay: relay.clone(),
            transport,
            workers: workers.len(),
            listeners: listeners.clone(),
            classes: classes.clone(),
            limits: limits.clone(),
            metrics: parts.relay.clone(),
            secret: secret.clone(),
            open: open.clone(),
            watchdog: self.watchdog.clone(),
        });
        for (worker, sockets) in (0..).zip(workers) {
            if worker > 0 {
                self.roles.spawn(endpoints.clone().start_thread(worker, sockets, CLOSING).await?);
                continue;
            }
            let mut serving = endpoints.start(worker, sockets)?;
            self.roles.spawn(async move {
                while serving.join_next().await.is_some() {}
                Ok(())
            });
        }
        let drain = settings.drain;
        self.relay =
            Some(RelayRole { relay, listeners, classes, open, drain, host_addresses, secret, steering, ledger });
        Ok(())
    }

    /// Returns what puts a policy in force in the kernel and in all roles.
    fn enforce(&self) -> policy::Enforce {
        let (parts, entrance_classes) = (self.parts.clone(), self.entrance_classes.clone());
        let relay = self.relay.as_ref().map(|role| role.relay.clone());
        Box::new(move |policy| {
            parts.kernel.publish(policy).map_err(|error| format!("{error:#}"))?;
            // From here on nothing fails.
            if let Some(relay) = &relay {
                relay.replace_classes(classes(policy, Role::Relay, &parts));
            }
            entrance_classes.follow(policy);
            parts.classes.retain(policy);
            parts.io.departures.follow(&policy.names());
            Ok(())
        })
    }

    /// Says what is served and how to try it.
    fn announce(&self, config: &Config, file: Option<&Path>, facts: &Facts) -> Result<()> {
        for warning in config.warnings() {
            tracing::warn!("{warning}");
        }
        let Some(role) = &self.relay else { return Ok(()) };
        if file.is_some() {
            for (listener, _) in &role.listeners {
                tracing::info!(address = %listener.address, "listening");
            }
            tracing::info!("ready");
            return Ok(());
        }
        let certificate = tls::development_identity(&config.state_dir)?.chain.first().map(tls::fingerprint);
        let socket = config.control.socket.as_ref().map(|socket| socket.display().to_string());
        let pacectl = std::env::current_exe()?.with_file_name("pacectl");
        let text = format!(
            "paced {version}: development mode, for this machine only\n\n\
             {explained}\n\
             certificate SHA-256  {certificate}\n\
             certificate file     {file}\n\
             UDP echo             {DEVELOPMENT_ECHO}\n\
             control socket       {socket}\n\n\
             {features}\n\n\
             Try, in another terminal:  {pacectl} probe\n",
            version = env!("CARGO_PKG_VERSION"),
            explained = config::explain(config, SystemTime::now()),
            certificate = certificate.map(|hash| hex(&hash)).unwrap_or_default(),
            file = config.state_dir.join("certificate.pem").display(),
            socket = socket.unwrap_or_default(),
            features = self.parts.kernel.in_force.features(&facts.own_features),
            pacectl = pacectl.display(),
        );
        // It serves whether or not somebody reads this.
        _ = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
        Ok(())
    }

    /// Tells the kernel's programs which packets are to listeners and which connection IDs are known.
    fn refresh_guard(&mut self) {
        let Some(role) = &mut self.relay else { return };
        if let Err(error) = role.steering.steer_by(&role.secret) {
            tracing::warn!("workers do not hear of changes: {error:#}");
        }
        let listeners = role.listeners.iter().map(|(listener, _)| (listener.address, listener.class.as_deref()));
        self.parts.kernel.guard(listeners, &role.host_addresses, &role.secret);
    }

    /// Says which certificates come to their end, each as it comes nearer.
    fn tell_of_certificates(&mut self) {
        let now = SystemTime::now();
        for (certificate, nearness) in self.told.due(&self.certificates, now) {
            let (address, outlook) = (certificate.address, certificate.outlook(now));
            match nearness {
                Nearness::Expired => tracing::error!(used_by = certificate.used_by, %address, "{outlook}"),
                Nearness::Days | Nearness::Weeks => {
                    tracing::warn!(used_by = certificate.used_by, %address, "{outlook}");
                }
            }
        }
    }

    /// Shuts down gracefully: it takes no new requests, and open ones get their time. A second signal ends it at once.
    async fn end(mut self, mut terminate: Signal, mut interrupt: Signal) {
        self.parts.ready.reach(Stage::Draining);
        let drain = self.relay.as_ref().map_or(CLOSING, |role| role.drain);
        if let Some(role) = &self.relay {
            tracing::info!(seconds = drain.as_secs(), "draining");
            role.open.store(false, Relaxed);
            role.relay.end(Phase::Draining);
        }
        tokio::select! {
            outcome = timeout(drain, self.all_ended()) => {
                if outcome.is_err() {
                    tracing::info!("tunnels were still open");
                }
            }
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if let Some(role) = &self.relay {
            role.relay.end(Phase::Closing);
        }
        _ = timeout(CLOSING, self.all_ended()).await;
        if let Some(role) = &self.relay {
            role.ledger.save(SystemTime::now());
        }
        // The endpoints still have CONNECTION_CLOSE frames to send.
        tokio::time::sleep(CLOSING).await;
    }

    async fn all_ended(&mut self) {
        self.edge.close().await;
        while self.roles.join_next().await.is_some() {}
    }
}

/// How often the kernel's guard hears of this host's addresses.
const REFRESH: Duration = Duration::from_secs(10);

/// How long connections, and then their last packets, are given to leave.
const CLOSING: Duration = Duration::from_millis(50);

fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).context("failed to listen for signals")
}

fn notify(state: &[NotifyState<'_>]) {
    // Without a service manager there is nobody to tell.
    _ = sd_notify::notify(state);
}
