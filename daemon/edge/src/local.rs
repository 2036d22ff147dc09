//! A local UDP address: each sender gets its own tunnel, and payloads from the tunnel go back to the sender.
//!
//! The task of the address reads its socket and puts payloads straight into the tunnels. One task per sender opens its tunnel
//! and carries the other direction.

use std::{
    future::poll_fn,
    io::{self, IoSliceMut},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use config::{forward::Forward, targets::Protocol};
use futures::FutureExt as _;
use pacing::descriptor::set_option;
use parking_lot::Mutex;
use quic::{class::Membership, segments::Segments, stirred::either};
use quinn_udp::{RecvMeta, UdpSockRef, UdpSocketState};
use relay_client::{Opened, TunnelSecret, backoff::Backoff};
use tokio::{
    io::Interest,
    net::UdpSocket,
    sync::Notify,
    task::{AbortHandle, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::debug;
use uplink::{Link, Uplink, places};

use self::{address::LocalAddress, end::End, opening::Replacement, source::Source};
use super::{
    connect::OPERATOR,
    notice::Notice,
    parting::ROUNDS,
    roster::{LocalClient, LocalEntrance, UNSERVED},
    sources::Sources,
};

mod address;
mod end;
mod opening;
mod source;
#[cfg(test)]
mod tests;

/// How many senders one local address serves at once: as many as have a place on one connection to the relay.
const MAX_SOURCES: usize = places::MOST;

/// How many bytes may come out of a tunnel in one turn.
const DOWNLINK_BYTES: usize = 256 * 1024;

/// Messages of one receive call.
const MESSAGES: usize = 16;

/// The longest message: as many payloads as GRO joins.
const MESSAGE_BYTES: usize = 1 << 16;

/// A server of a local address, and the tunnels of its senders.
pub struct Local {
    shared: Arc<LocalAddress>,
    idle: Idle,
    sources: Sources<Handle>,
    tasks: JoinSet<(SocketAddr, Arc<Source>)>,
}

/// How long senders may be silent.
#[derive(Clone, Copy)]
struct Idle {
    /// Any of them.
    any: Duration,
    /// Senders that asked little and got their answers.
    answered: Duration,
}

/// A sender's tunnel, as the table holds it.
struct Handle {
    source: Arc<Source>,
    task: AbortHandle,
}

/// Binds a local address.
///
/// # Errors
/// It is taken or not ours.
pub fn bind(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = std::net::UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Lets the kernel fragment payloads that are too long for a packet of the device: a tunnel carries them in capsules, and not every protocol
/// can send shorter ones. [`UdpSocketState`] has forbidden it.
fn allow_fragments(socket: &UdpSocket) -> io::Result<()> {
    // A socket for IPv6 may have senders over IPv4.
    set_option(socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
    if socket.local_addr()?.is_ipv6() {
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)?;
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 0)?;
    }
    Ok(())
}

impl Local {
    /// Returns a server for `forward` on a socket that [`bind`] returned. Its tunnels go through `uplink`, in the class of
    /// `membership`.
    ///
    /// # Errors
    /// The system does not accept the socket.
    pub fn new(
        socket: std::net::UdpSocket,
        forward: &Forward,
        membership: Membership,
        uplink: Arc<Uplink>,
        entrance: Arc<LocalEntrance>,
    ) -> io::Result<Self> {
        let socket = UdpSocket::from_std(socket)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        allow_fragments(&socket)?;
        let shared = Arc::new(LocalAddress {
            socket,
            state,
            target: forward.target.clone(),
            mode: forward.mode,
            membership,
            is_chosen: forward.class.is_some(),
            uplink,
            backoff: Mutex::new(Backoff::new(forward.uplink.backoff)),
            first_wait: forward.uplink.backoff.0,
            crowding: AtomicUsize::new(0),
            crowded: Notify::new(),
            notice: Notice::default(),
            counters: entrance.counters.clone(),
            entrance,
        });
        let sources = Sources::new(MAX_SOURCES);
        let idle = Idle { any: forward.idle, answered: forward.idle_answered.min(forward.idle) };
        Ok(Self { shared, idle, sources, tasks: JoinSet::new() })
    }

    /// Returns the bound address.
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
        let mut crowding = self.shared.uplink.crowding();
        let mut sweep = interval((self.idle.answered / 4).max(Duration::from_millis(100)));
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ready = self.shared.socket.readable() => {
                    ready?;
                    self.receive(&mut bytes)?;
                    // Other tasks get their turn even if the socket never runs dry.
                    tokio::task::yield_now().await;
                }
                Some(ended) = self.tasks.join_next() => self.forget(ended),
                now = sweep.tick() => {
                    let Self { shared, idle, sources, .. } = &mut self;
                    let allowed = |handle: &Handle| match handle.source.is_answered() {
                        true => idle.answered,
                        false => idle.any,
                    };
                    sources.expire(now, allowed).for_each(|handle| handle.close(shared, "idle"));
                }
                () = self.shared.crowded.notified() => self.make_room(),
                Ok(()) = crowding.changed() => self.make_room_for_others(),
            }
        }
    }

    /// Forgets a sender whose task has ended.
    fn forget(&mut self, ended: Result<(SocketAddr, Arc<Source>), JoinError>) {
        // Aborted tasks have already left the table.
        if let Ok((address, source)) = ended {
            self.sources.remove(address, |handle| Arc::ptr_eq(&handle.source, &source));
        }
    }

    /// Reads the waiting messages, within bounds.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let now = Instant::now();
        for _ in 0..ROUNDS {
            let mut buffers = bytes.chunks_exact_mut(MESSAGE_BYTES);
            let mut slices: [IoSliceMut<'_>; MESSAGES] =
                std::array::from_fn(|_| IoSliceMut::new(buffers.next().unwrap_or_default()));
            let mut meta = [RecvMeta::default(); MESSAGES];
            let LocalAddress { socket, state, .. } = &*self.shared;
            let received =
                socket.try_io(Interest::READABLE, || state.recv(UdpSockRef::from(socket), &mut slices, &mut meta));
            let messages = match received {
                Ok(messages) => messages,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    // An ICMP error about answers to senders that are gone, or a signal.
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                },
            };
            for (slice, meta) in slices.iter().zip(&meta).take(messages) {
                let message = &slice[..meta.len];
                turns::arrived(message.len());
                if !self.source(meta, now).push(&self.shared, message, meta.stride) {
                    // The tunnel has ended, and its task was not joined yet: a new tunnel carries the message.
                    self.sources.remove(meta.addr, |_| true);
                    self.source(meta, now).push(&self.shared, message, meta.stride);
                }
            }
            if messages < MESSAGES {
                break;
            }
        }
        Ok(())
    }

    /// Returns the sender of a message; a new sender gets a tunnel.
    fn source(&mut self, meta: &RecvMeta, now: Instant) -> Arc<Source> {
        if let Some(handle) = self.sources.heard(meta.addr, now) {
            return handle.source.clone();
        }
        // New senders may come faster than the loop in `run` joins ended tasks, which keep their memory until then.
        while let Some(ended) = self.tasks.try_join_next() {
            self.forget(ended);
        }
        let source = Arc::new(Source::new(meta.addr, meta.dst_ip));
        let handle =
            Handle { source: source.clone(), task: self.tasks.spawn(serve(self.shared.clone(), source.clone())) };
        if let Some(evicted) = self.sources.insert(meta.addr, handle, now, |it| Some(!it.source.is_answered())) {
            self.evict(evicted);
        }
        source
    }

    /// Ends tunnels for senders that found all places on connections taken. If none can be ended here, other addresses are asked.
    fn make_room(&mut self) {
        let wanted = self.shared.crowding.swap(0, Relaxed);
        let made = (0..wanted).take_while(|_| self.give_place()).count();
        if made < wanted {
            self.shared.uplink.crowd(wanted - made);
        }
    }

    /// Ends tunnels for senders of other addresses with the same connections, which have no tunnel to end.
    fn make_room_for_others(&mut self) {
        let uplink = self.shared.uplink.clone();
        uplink.make_room(|| self.give_place());
    }

    /// Ends the tunnel of a sender whose place another one can take. Returns whether there was one.
    fn give_place(&mut self) -> bool {
        // Only senders with a place on a connection that takes tunnels have one to give.
        let rank = |it: &Handle| it.source.has_place().then(|| !it.source.is_answered());
        let evicted = self.sources.evict(rank);
        evicted.map(|evicted| self.evict(evicted)).is_some()
    }

    fn evict(&self, handle: Handle) {
        self.shared.counters.sources_evicted.inc();
        handle.close(&self.shared, "evicted");
    }
}

impl Drop for Local {
    /// Ends all tunnels gracefully.
    fn drop(&mut self) {
        let Self { shared, sources, .. } = self;
        sources.expire(Instant::now(), |_| Duration::ZERO).for_each(|handle| handle.close(shared, UNSERVED));
    }
}

impl Handle {
    /// Ends a sender's tunnel gracefully, for a reason.
    fn close(self, shared: &LocalAddress, reason: &'static str) {
        self.task.abort();
        if let Some(open) = self.source.leave(shared) {
            open.listed.note_end(reason);
            open.tunnel.finish();
        }
    }
}

impl LocalAddress {
    /// Opens the tunnel of a sender and carries it until it ends.
    async fn carry(&self, source: &Source) -> End {
        let wait = self.backoff.lock().wait(Instant::now());
        sleep(wait).await;
        let (class, secret) = (self.membership.get(), TunnelSecret::new());
        let (link, opened) = match self.open(&class, (secret, None)).await {
            Ok(opened) => opened,
            Err(error) => return error.into(),
        };
        debug!(sender = %source.address, target = %self.target, next_hop = ?opened.next_hop, "tunnel opened");
        self.counters.tunnels_opened.inc();
        opened.tunnel.set_terms(&class.terms(None));
        let (since, mut place) = (Instant::now(), link.id());
        let target = (Protocol::Udp, &self.target);
        let client = LocalClient::from(source.address);
        let enter = |link: &Link, opened: &Opened| {
            let terms = (&self.membership, Some(opened.tunnel.losses().clone()));
            self.entrance.enter(&client, target, (link, opened.tunnel.stream_id()), terms)
        };
        let mut entry = enter(&link, &opened);
        source.open(self, opened.tunnel, link, (class, entry.tunnel()));
        let mut downlink = Segments::new(DOWNLINK_BYTES);
        let end = loop {
            let next = {
                let carrying = poll_fn(|cx| source.poll(cx, self, &mut downlink)).map(Err);
                // The next tunnel is opened before this one ends. `either` polls `replacing` only if `replacing` itself woke the task, so
                // payloads cause no poll of it.
                let replacing = async {
                    tokio::select! {
                        () = entry.closed() => Ok(None),
                        next = self.replace(&place, secret) => Ok(Some(next)),
                    }
                };
                either(carrying, replacing).await
            };
            let Replacement { link, opened, class, is_return } = match next {
                Ok(Some(next)) => next,
                Ok(None) => {
                    entry.note_end(OPERATOR);
                    return End::Finished;
                }
                Err(end) => break end,
            };
            opened.tunnel.set_terms(&class.terms(None));
            let next = enter(&link, &opened);
            let from = std::mem::replace(&mut place, link.id());
            self.uplink.note_move(from.line(), link.line(), is_return);
            let (from, to) = (from.line().id, link.connection());
            debug!(sender = %source.address, target = %self.target, from, to, "tunnel moved");
            let listed = next.tunnel();
            source.change(opened.tunnel, link, (class, listed), std::mem::replace(&mut entry, next));
        };
        entry.note_end(end.word());
        if since.elapsed() < self.first_wait && place.line().is_usable() {
            return End::AtOnce(Box::new(end));
        }
        self.backoff.lock().succeeded();
        end
    }
}

/// Serves one sender; returns its address and its source once its tunnel has ended.
async fn serve(shared: Arc<LocalAddress>, source: Arc<Source>) -> (SocketAddr, Arc<Source>) {
    let end = shared.carry(&source).await;
    drop(source.leave(&shared));
    let target = &shared.target;
    debug!(sender = %source.address, %target, "tunnel ended: {end}");
    if let End::Unopened(error) = &end {
        shared.counters.refuse(error.reason());
        shared.entrance.record_refusal(&source.address.into(), Some((Protocol::Udp, target)), error.as_refusal());
    }
    shared.note_refusal(&end);
    (source.address, source)
}
