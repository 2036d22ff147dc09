//! A local UDP address: each sender gets a tunnel of its own, and what comes out of that is sent back to it.
//!
//! The task of the address reads its socket and puts payloads straight into the tunnels; a task per sender opens its
//! tunnel and carries the other direction.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use config::forward::{Forward, Mode};
use masque::{h3::Code, priority::Priority, target::Target};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use tokio::{
    io::Interest,
    net::UdpSocket,
    task::{AbortHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tracing::{debug, info};

use super::{
    Counters,
    backoff::{Backoff, random},
    sources::Sources,
    uplink::{Link, NoDatagrams, Uplink},
};
use crate::{
    client::{OpenError, endpoint::ANSWER_TIMEOUT},
    quic::{
        class::{Class, Membership},
        h3,
    },
    segments::Segments,
    tunnel::{Batch, Ended, UdpTunnel},
};

/// How many senders one local address serves at once.
const MAX_SOURCES: usize = 1_024;

/// What a sender may have waiting while its tunnel is opened, in bytes: several flights of an inner QUIC handshake.
const WAITING_BYTES: usize = 64 * 1024;

/// What may come out of a tunnel in one go, in bytes.
const DOWNLINK_BYTES: usize = 256 * 1024;

/// Messages of one receive call.
const MESSAGES: usize = 16;

/// The longest message: as many payloads as GRO joins.
const MESSAGE_BYTES: usize = 1 << 16;

/// How many batches are moved before others get their turn.
const ROUNDS: usize = 8;

/// The most payload bytes that one GSO message can carry: 65,535 less the headers of IPv4 and UDP.
const GSO_BYTES: usize = 65_507;

/// A local address and everything that its tunnels share.
pub struct Local {
    shared: Arc<Shared>,
    idle: Duration,
    sources: Sources<Handle>,
    tasks: JoinSet<(SocketAddr, Arc<Source>)>,
}

struct Shared {
    socket: UdpSocket,
    state: UdpSocketState,
    target: Target,
    mode: Mode,
    /// The class of payloads that leave for the relay.
    membership: Membership,
    /// Whether somebody chose the class: one that nobody chose tells the relay nothing about what it sends back.
    is_chosen: bool,
    uplink: Arc<Uplink>,
    /// When a tunnel may be opened again after a refusal.
    backoff: Mutex<Backoff>,
    first_wait: Duration,
    counters: Arc<Counters>,
}

/// A sender's tunnel, as the table holds it.
struct Handle {
    source: Arc<Source>,
    task: AbortHandle,
}

/// One local sender.
struct Source {
    address: SocketAddr,
    /// The address it sent to, which answers come from.
    local_ip: Option<IpAddr>,
    stage: Mutex<Stage>,
}

enum Stage {
    /// The tunnel is not open yet.
    Waiting(Segments),
    /// It is.
    Open(Box<Open>),
    /// It has been.
    Closed,
}

/// An open tunnel.
struct Open {
    tunnel: UdpTunnel,
    link: Link,
    /// The task that serves it.
    task: Waker,
    /// The class on whose terms its payloads leave.
    class: Arc<Class>,
    /// Whether anything came back from the target.
    answered: bool,
}

/// Why a sender's tunnel is no more.
#[derive(Debug, thiserror::Error)]
enum End {
    /// There is no connection to the relay, which the uplink has said already.
    #[error("no connection to the relay")]
    NoLink,
    /// The connection, or the request, was lost before there was an answer.
    #[error(transparent)]
    Lost(h3::Error),
    /// The relay did not open it.
    #[error(transparent)]
    Refused(OpenError),
    /// The relay did not say whether it opens it.
    #[error("the relay does not answer")]
    NoAnswer,
    /// The configuration asks for what the relay does not offer.
    #[error(transparent)]
    NoDatagrams(#[from] NoDatagrams),
    /// The relay ended it properly.
    #[error("the relay closed it")]
    Finished,
    /// It failed.
    #[error(transparent)]
    Failed(#[from] Ended),
    /// It ended hardly after it was opened, which is as good as a refusal: a target that is not there, for example.
    #[error("it ended as soon as it was open: {0}")]
    AtOnce(Box<End>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks panics; and a sender's stage is valid whatever happened.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Local {
    /// Binds the local address of `forward`, whose tunnels go through `uplink` and are of the class of `membership`.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub async fn bind(
        forward: &Forward,
        membership: Membership,
        uplink: Arc<Uplink>,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        let socket = UdpSocket::bind(forward.listen).await?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let shared = Shared {
            socket,
            state,
            target: forward.target.clone(),
            mode: forward.mode,
            membership,
            is_chosen: forward.class.is_some(),
            uplink,
            backoff: Mutex::new(Backoff::new(forward.backoff)),
            first_wait: forward.backoff.0,
            counters,
        };
        let (shared, sources) = (Arc::new(shared), Sources::new(MAX_SOURCES));
        Ok(Self { shared, idle: forward.idle, sources, tasks: JoinSet::new() })
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.shared.socket.local_addr()
    }

    /// Serves the address until dropped.
    ///
    /// # Errors
    /// The socket failed for good.
    pub async fn run(mut self) -> io::Result<()> {
        let mut bytes = vec![0; MESSAGES * MESSAGE_BYTES];
        let mut sweep = interval((self.idle / 4).max(Duration::from_millis(100)));
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ready = self.shared.socket.readable() => {
                    ready?;
                    self.receive(&mut bytes)?;
                    // Others get their turn even when the socket never runs dry.
                    tokio::task::yield_now().await;
                }
                Some(ended) = self.tasks.join_next() => {
                    // Those that were aborted have left the table already.
                    if let Ok((address, source)) = ended {
                        self.sources.remove(address, |handle| Arc::ptr_eq(&handle.source, &source));
                    }
                }
                now = sweep.tick() => self.sources.expire(now, self.idle).for_each(Handle::close),
            }
        }
    }

    /// Reads what waits, within bounds.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let now = Instant::now();
        for _ in 0..ROUNDS {
            let mut buffers = bytes.chunks_exact_mut(MESSAGE_BYTES);
            let mut slices: [IoSliceMut<'_>; MESSAGES] =
                std::array::from_fn(|_| IoSliceMut::new(buffers.next().unwrap_or_default()));
            let mut meta = [RecvMeta::default(); MESSAGES];
            let Shared { socket, state, .. } = &*self.shared;
            let received =
                socket.try_io(Interest::READABLE, || state.recv(UdpSockRef::from(socket), &mut slices, &mut meta));
            let messages = match received {
                Ok(messages) => messages,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    // What ICMP says about answers to senders that are gone, or a signal.
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                },
            };
            for (slice, meta) in slices.iter().zip(&meta).take(messages) {
                self.source(meta, now).push(&self.shared, &slice[..meta.len], meta.stride);
            }
            if messages < MESSAGES {
                break;
            }
        }
        Ok(())
    }

    /// The sender of a message; a new one gets a tunnel.
    fn source(&mut self, meta: &RecvMeta, now: Instant) -> Arc<Source> {
        if let Some(handle) = self.sources.heard(meta.addr, now) {
            return handle.source.clone();
        }
        let stage = Mutex::new(Stage::Waiting(Segments::new(WAITING_BYTES)));
        let source = Arc::new(Source { address: meta.addr, local_ip: meta.dst_ip, stage });
        let task = self.tasks.spawn(serve(self.shared.clone(), source.clone()));
        if let Some(evicted) = self.sources.insert(meta.addr, Handle { source: source.clone(), task }, now) {
            self.shared.counters.sources_evicted.inc();
            evicted.close();
        }
        source
    }
}

impl Handle {
    /// Ends a sender's tunnel properly.
    fn close(self) {
        self.task.abort();
        if let Stage::Open(open) = std::mem::replace(&mut *lock(&self.source.stage), Stage::Closed) {
            open.tunnel.finish();
        }
    }
}

impl Source {
    /// Takes a message from the sender: payloads of `stride` bytes each, of which the last may be shorter.
    fn push(&self, shared: &Shared, message: &[u8], stride: usize) {
        let counters = &shared.counters;
        match &mut *lock(&self.stage) {
            Stage::Closed => {}
            Stage::Waiting(queue) => {
                let dropped: usize = payloads(message, stride).map(|payload| queue.push(payload)).sum();
                counters.dropped_waiting.inc_by(dropped as u64);
            }
            Stage::Open(open) => {
                open.follow(shared);
                let Open { tunnel, link, task, .. } = &mut **open;
                let mut batch = tunnel.batch(link.form(shared.mode));
                let count = payloads(message, stride).map(|payload| batch.push(payload)).count();
                counters.packets_up.inc_by(count as u64);
                // Datagrams wake the connection by themselves; capsules leave with the task's next turn.
                if matches!(batch, Batch::Capsules(..)) {
                    task.wake_by_ref();
                }
            }
        }
    }

    /// Puts a tunnel in place, and what has waited for it into the tunnel.
    fn open(&self, shared: &Shared, mut tunnel: UdpTunnel, link: Link, class: Arc<Class>) {
        let mut stage = lock(&self.stage);
        let Stage::Waiting(queue) = &*stage else { return tunnel.finish() };
        let mut batch = tunnel.batch(link.form(shared.mode));
        queue.iter().for_each(|payload| batch.push(payload));
        shared.counters.packets_up.inc_by(queue.len() as u64);
        drop(batch);
        *stage = Stage::Open(Box::new(Open { tunnel, link, task: Waker::noop().clone(), class, answered: false }));
    }

    /// Moves what can be moved between the relay and the sender; ready when the tunnel has ended.
    fn poll(&self, cx: &mut Context<'_>, shared: &Shared, downlink: &mut Segments) -> Poll<End> {
        let mut stage = lock(&self.stage);
        let Stage::Open(open) = &mut *stage else { return Poll::Ready(End::Finished) };
        let Open { tunnel, task, answered, .. } = &mut **open;
        task.clone_from(cx.waker());
        for _ in 0..ROUNDS {
            match tunnel.poll_recv(cx, downlink) {
                Poll::Ready(Ok(true)) => {
                    if !std::mem::replace(answered, true) {
                        // There is a target, so refusals before it say nothing any more.
                        lock(&shared.backoff).succeeded();
                    }
                    shared.send(downlink, self);
                }
                Poll::Ready(Ok(false)) => return Poll::Ready(End::Finished),
                Poll::Ready(Err(error)) => return Poll::Ready(error.into()),
                Poll::Pending => {
                    return match tunnel.poll_stopped(cx) {
                        Err(error) => Poll::Ready(error.into()),
                        Ok(()) => Poll::Pending,
                    };
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Open {
    /// Has payloads leave on the terms of the class that they are of by now.
    fn follow(&mut self, shared: &Shared) {
        if shared.membership.update(&mut self.class).is_some() {
            self.tunnel.set_terms(&self.class.terms(None));
            if let Some(signal) = shared.signal(&self.class) {
                self.link.relay.http().reprioritize(self.tunnel.stream_id(), signal);
            }
        }
    }
}

/// Walks the payloads of a message; an empty message is an empty payload.
fn payloads(message: &[u8], stride: usize) -> impl Iterator<Item = &[u8]> {
    message.is_empty().then_some(message).into_iter().chain(message.chunks(stride.max(1)))
}

impl Shared {
    /// What the relay is told about payloads that come back.
    fn signal(&self, class: &Class) -> Option<Priority> {
        self.is_chosen.then(|| class.policy().signal())
    }

    /// Sends everything in `downlink` to a local sender, runs of equal size as one message.
    ///
    /// What the socket does not take at once is dropped, as a router would: the sender's device is slower than the
    /// relay, and waiting would only make what comes later older.
    fn send(&self, downlink: &mut Segments, to: &Source) {
        let segments = self.state.max_gso_segments();
        while let Some((contents, segment, count)) = downlink.run(segments, GSO_BYTES) {
            let transmit = Transmit {
                destination: to.address,
                ecn: None,
                contents,
                segment_size: (count > 1).then_some(segment),
                src_ip: to.local_ip,
            };
            let sent = self
                .socket
                .try_io(Interest::WRITABLE, || self.state.try_send(UdpSockRef::from(&self.socket), &transmit));
            let counter = if sent.is_ok() { &self.counters.packets_down } else { &self.counters.dropped_down };
            counter.inc_by(count as u64);
            (0..count).for_each(|_| _ = downlink.pop());
        }
    }

    /// Opens the tunnel of a sender and carries it until it ends.
    async fn carry(&self, source: &Source) -> End {
        let wait = lock(&self.backoff).wait(Instant::now());
        sleep(wait).await;
        let Ok(link) = self.uplink.link().await else { return End::NoLink };
        let class = self.membership.get();
        let signal = self.signal(&class);
        let opening = link.relay.open_udp_signalled(&self.target, signal.as_ref());
        let opened = match timeout(ANSWER_TIMEOUT, opening).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(OpenError::Http(error))) => return End::Lost(error),
            Ok(Err(error)) => return End::Refused(error),
            Err(_) => return End::NoAnswer,
        };
        if let Err(error) = link.allows(self.mode) {
            opened.tunnel.reset(Code::RequestCancelled);
            return error.into();
        }
        debug!(sender = %source.address, target = %self.target, next_hop = ?opened.next_hop, "tunnel opened");
        self.counters.tunnels_opened.inc();
        opened.tunnel.set_terms(&class.terms(None));
        let (since, relay) = (Instant::now(), link.relay.clone());
        source.open(self, opened.tunnel, link, class);
        let mut downlink = Segments::new(DOWNLINK_BYTES);
        let end = std::future::poll_fn(|cx| source.poll(cx, self, &mut downlink)).await;
        if since.elapsed() < self.first_wait && relay.http().takes_requests() {
            return End::AtOnce(Box::new(end));
        }
        lock(&self.backoff).succeeded();
        end
    }
}

/// Serves one sender; returns who it was once its tunnel is no more.
async fn serve(shared: Arc<Shared>, source: Arc<Source>) -> (SocketAddr, Arc<Source>) {
    let end = shared.carry(&source).await;
    *lock(&source.stage) = Stage::Closed;
    let target = &shared.target;
    debug!(sender = %source.address, %target, "tunnel ended: {end}");
    if matches!(end, End::Refused(_) | End::NoAnswer | End::NoDatagrams(_) | End::AtOnce(_)) {
        shared.counters.tunnels_refused.inc();
        if let Some(wait) = lock(&shared.backoff).failed(Instant::now(), random()) {
            info!(%target, "no tunnel: {end}; next attempt in {wait:.1?} at the earliest");
        }
    }
    (source.address, source)
}
