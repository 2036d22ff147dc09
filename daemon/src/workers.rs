//! Workers: threads that move packets, each with its own endpoint at every listener.
//!
//! The sockets of a listener share its address. A program steers each packet to the worker that its connection ID
//! names, wherever it comes from; without the program, a client whose address changed would reach a worker that does
//! not know it. So there is only one worker if the program cannot be attached.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8},
    },
    thread,
    time::Duration,
};

use admission::connection_id::{Issuer, Secret};
use anyhow::{Context as _, Result};
use bpf::steer::Steer;
use config::{
    relay::{ListenerSettings, RelayLimits},
    targets::Protocol,
};
use enforcement::advice;
use quic::{
    datagrams::{Datagrams, QueueLimits},
    endpoint::{self, Admission, Transport},
    events::LoopTurns,
    tls::ServerTls,
};
use relay::{Relay, RelayMetrics};
use role::bind_error::BindError;
use s2n_quic_platform::syscall::bind_udp;
use systemd::{
    activation,
    watchdog::{Watchdog, Watched},
};
use tokio::{sync::oneshot, task::JoinSet, time::sleep};

/// How long connections have to close, and then their last packets to leave.
pub(crate) const CLOSING: Duration = Duration::from_millis(50);

/// The sockets of a relay: for each worker, one per listener.
pub type WorkerSockets = Vec<Vec<UdpSocket>>;

/// The programs that steer packets to workers: one per listener, or none for a single worker.
#[derive(Default)]
pub struct Steering(Vec<Steer>);

/// Takes the sockets that the service manager `opened`, or binds one per worker and listener. If packets cannot be
/// steered, it logs this and binds sockets for one worker. Call it while the process has its rights.
///
/// # Errors
/// An address is in use or not ours. For opened sockets: their addresses differ from the listeners' addresses, a
/// listener does not have one socket per worker, or the kernel cannot steer packets. The message says what to change.
pub fn bind(
    listeners: &[ListenerSettings],
    workers: u8,
    secret: &Secret,
    opened: Vec<UdpSocket>,
) -> Result<(WorkerSockets, Steering)> {
    if !opened.is_empty() {
        let why = "paced cannot spread packets over several sockets of paced.socket; write each address once there, and workers = 1 in [relay]";
        return spread(activation::by_listener(opened, listeners, workers)?, secret).context(why);
    }
    // First without sharing, even if it will be shared: a shared bind would succeed although another program uses the
    // address.
    let one = || listeners.iter().map(|listener| socket(listener.address, false)).collect::<Result<_>>();
    let alone = vec![one()?];
    if workers == 1 {
        return Ok((alone, Steering::default()));
    }
    drop(alone);
    share(listeners, workers, secret).or_else(|error| {
        let why = format!("{error:#}");
        tracing::warn!("one worker instead of {workers}, because packets cannot be steered: {why}{}", advice(&why));
        Ok((vec![one()?], Steering::default()))
    })
}

fn share(listeners: &[ListenerSettings], workers: u8, secret: &Secret) -> Result<(WorkerSockets, Steering)> {
    let group = |listener: &ListenerSettings| -> Result<Vec<_>> {
        let first = socket(listener.address, true)?;
        let address = first.local_addr()?;
        std::iter::once(Ok(first)).chain((1..workers).map(|_| socket(address, true))).collect()
    };
    spread(listeners.iter().map(group).collect::<Result<_>>()?, secret)
}

/// Gives each worker one socket of each group, whose sockets have the same address; steers packets if a group has
/// several.
fn spread(groups: WorkerSockets, secret: &Secret) -> Result<(WorkerSockets, Steering)> {
    let (mut sockets, mut steering) = (WorkerSockets::new(), Steering::default());
    for group in groups {
        if group.len() > 1 {
            steering.0.push(Steer::attach(&group, &secret.connection_id_keys())?);
        }
        sockets.resize_with(group.len(), Vec::new);
        sockets.iter_mut().zip(group).for_each(|(of_worker, socket)| of_worker.push(socket));
    }
    Ok((sockets, steering))
}

impl Steering {
    /// Sets the keys of connection IDs, by which the kernel steers packets. Call this regularly: keys change, though
    /// each is known a week ahead.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn steer_by(&mut self, secret: &Secret) -> Result<()> {
        Ok(self.0.iter_mut().try_for_each(|steer| steer.set_keys(&secret.connection_id_keys()))?)
    }
}

fn socket(address: SocketAddr, shared: bool) -> Result<UdpSocket> {
    let socket = bind_udp(address, false, shared, address.is_ipv6());
    Ok(socket.map_err(|error| BindError::new(Protocol::Udp, address, error))?.into())
}

/// The settings that the endpoints of all workers share.
pub struct Endpoints {
    /// The relay that serves accepted connections.
    pub relay: Arc<Relay>,
    /// How they send.
    pub transport: Transport,
    /// How many workers there are.
    pub workers: usize,
    /// How the workers wait for events.
    pub waits: turns::Waits,
    /// The listeners, and their certificates.
    pub listeners: Vec<(ListenerSettings, ServerTls)>,
    /// The number of each listener's class, for new connection IDs.
    pub classes: Vec<Arc<AtomicU8>>,
    /// The limits of the relay.
    pub limits: RelayLimits,
    /// Their counters.
    pub metrics: Arc<RelayMetrics>,
    /// The secret from which connection IDs and tokens are derived.
    pub secret: Secret,
    /// Whether new connections are accepted.
    pub open: Arc<AtomicBool>,
    /// The watchdog that checks whether they still serve, if there is one.
    pub watchdog: Option<Arc<Watchdog>>,
}

impl Endpoints {
    /// Starts the endpoints of one worker on the current runtime, with a socket for each listener.
    ///
    /// # Errors
    /// The settings are invalid.
    pub fn start(&self, worker: u8, sockets: Vec<UdpSocket>) -> Result<JoinSet<()>> {
        let (mut serving, mut watched) = (JoinSet::new(), Vec::new());
        let limits = &self.limits;
        for (((listener, tls), class), socket) in self.listeners.iter().zip(&self.classes).zip(sockets) {
            let datagrams = Datagrams {
                limits: QueueLimits {
                    flow_bytes: limits.queue_bytes_per_tunnel as usize,
                    connection_bytes: limits.queue_bytes_per_connection as usize,
                },
                counters: self.metrics.datagrams.clone(),
                max_frame_bytes: u64::from(u16::MAX),
                schedules: self.relay.schedules(listener.address),
            };
            let admission = Admission {
                places: self.relay.places().clone(),
                max_handshakes: limits.handshakes_in_flight,
                open: self.open.clone(),
                handshakes: self.metrics.handshakes.clone(),
                turns: LoopTurns::default(),
                ports: Default::default(),
            };
            let issuer = Issuer::new(self.secret.clone(), listener.address, worker).of_class(class.clone());
            let issuer = issuer.counting_unanswered(self.metrics.unanswered_packets.clone());
            let issuer = match self.workers {
                1 => issuer,
                workers => issuer.among(workers, self.metrics.misdirected_packets.clone()),
            };
            if self.watchdog.is_some() {
                watched.push(Watched::new(&socket, admission.turns.clone())?);
            }
            let sockets = self.transport.sockets_on(socket)?;
            let server = endpoint::serve(sockets, &self.transport, tls.clone(), datagrams, admission, &issuer)
                .with_context(|| format!("failed to listen on {}", listener.address))?;
            serving.spawn(self.relay.clone().serve(server, listener.address));
        }
        if let Some(watchdog) = &self.watchdog {
            // Ends with the thread's runtime.
            tokio::spawn(watchdog.pulse(format!("worker-{worker}"), watched));
        }
        Ok(serving)
    }

    /// Starts the endpoints of one worker on a new thread; returns a future that completes when all of them have ended.
    /// Their last packets then have [`CLOSING`] to leave.
    ///
    /// # Errors
    /// The thread cannot be started, or as in [`Endpoints::start`].
    pub async fn start_thread(
        self: Arc<Self>,
        worker: u8,
        sockets: Vec<UdpSocket>,
    ) -> Result<impl Future<Output = Result<()>> + Send + 'static> {
        let (started, has_started) = oneshot::channel();
        let (ended, has_ended) = oneshot::channel();
        let runtime = turns::runtime(self.waits.clone())?;
        let work = async move {
            match self.start(worker, sockets) {
                // If the daemon is ending, the receivers are gone.
                Err(error) => _ = started.send(Err(error)),
                Ok(mut serving) => {
                    _ = started.send(Ok(()));
                    while serving.join_next().await.is_some() {}
                    _ = ended.send(());
                    sleep(CLOSING).await;
                }
            }
        };
        thread::Builder::new().name(format!("worker-{worker}")).spawn(move || runtime.block_on(work))?;
        has_started.await.context("a worker's thread ended while it started")??;
        Ok(async { has_ended.await.context("a worker's thread ended unexpectedly") })
    }
}
