//! One sender to a local address: its waiting payloads and its tunnel.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use masque::tunnel::Form;
use parking_lot::Mutex;
use quic::{class::Class, segments::Segments};
use quinn_udp::{Transmit, UdpSockRef};
use role::{traffic::Traffic, tunnel::UdpTunnel};
use tokio::io::Interest;
use uplink::Link;

use super::{address::LocalAddress, end::End};
use crate::{
    parting::{FormerTunnel, ROUNDS},
    roster::{EdgeTunnel, RosterEntry},
};

/// The maximum of a sender's payloads that count as questions, each with one answer: a resolver asks for the IPv4 and
/// the IPv6 addresses of a name from one port, and may ask again.
const QUESTIONS: u32 = 4;

/// How many bytes of a sender may wait while its tunnel opens: several flights of an inner QUIC handshake.
const WAITING_BYTES: usize = 64 * 1024;

/// One local sender.
pub(super) struct Source {
    /// Its address.
    pub(super) address: SocketAddr,
    /// The address that it sent to; answers come from there.
    pub(super) local_ip: Option<IpAddr>,
    pub(super) stage: Mutex<Stage>,
    /// Payloads that it sent, and payloads that came back for it.
    sent: AtomicU32,
    received: AtomicU32,
}

pub(super) enum Stage {
    /// The tunnel is not open yet.
    Waiting(Segments),
    /// The tunnel is open.
    Open(Box<Open>),
    /// The tunnel has ended.
    Closed,
}

/// An open tunnel.
pub(super) struct Open {
    /// Its end of the request.
    pub(super) tunnel: UdpTunnel,
    link: Link,
    /// The task that serves it.
    task: Waker,
    /// The class on whose terms its payloads leave.
    class: Arc<Class>,
    /// Whether a payload came back from the target.
    answered: bool,
    /// Its place in the roster, which counts its traffic.
    pub(super) listed: Arc<EdgeTunnel>,
    /// The tunnel that it has replaced, while that still receives.
    former: Option<FormerTunnel>,
}

impl Source {
    pub(super) fn new(address: SocketAddr, local_ip: Option<IpAddr>) -> Self {
        let stage = Mutex::new(Stage::Waiting(Segments::new(WAITING_BYTES)));
        Self { address, local_ip, stage, sent: AtomicU32::new(0), received: AtomicU32::new(0) }
    }

    /// Whether it has a place that another sender could take: an open tunnel, on a connection that takes tunnels.
    pub(super) fn has_place(&self) -> bool {
        matches!(&*self.stage.lock(), Stage::Open(open) if open.link.line().is_usable())
    }

    /// Whether it sent a few payloads and got as many back: most likely, it has its answers.
    pub(super) fn is_answered(&self) -> bool {
        let sent = self.sent.load(Relaxed);
        (1..=QUESTIONS).contains(&sent) && self.received.load(Relaxed) >= sent
    }

    /// Takes a message from the sender: payloads of `stride` bytes each; the last may be shorter. Returns whether there is, or will
    /// be, a tunnel for it.
    pub(super) fn push(&self, shared: &LocalAddress, message: &[u8], stride: usize) -> bool {
        let counters = &shared.counters;
        count(&self.sent, payloads(message, stride).count());
        match &mut *self.stage.lock() {
            Stage::Closed => return false,
            Stage::Waiting(queue) => {
                let dropped: usize = payloads(message, stride).map(|payload| queue.push(payload)).sum();
                counters.dropped_waiting.inc_by(dropped as u64);
            }
            Stage::Open(open) => {
                open.follow(shared);
                let Open { tunnel, link, task, listed, .. } = &mut **open;
                let mut batch = tunnel.batch(link.form(shared.mode));
                let count = payloads(message, stride).map(|payload| batch.push(payload)).count();
                counters.packets_up.inc_by(count as u64);
                listed.traffic.add_up(message.len() as u64, count as u64);
                counters.bytes_up.inc_by(message.len() as u64);
                listed.note_form(batch.form());
                // Datagrams wake the connection; capsules leave with the task's next turn.
                if batch.form() == Form::Capsule {
                    task.wake_by_ref();
                }
            }
        }
        true
    }

    /// Notes payloads that came back for it.
    pub(super) fn note_received(&self, payloads: usize) {
        count(&self.received, payloads);
    }

    /// Gives up its tunnel, and returns it if it is open. Payloads that wait for the tunnel are dropped and counted.
    pub(super) fn leave(&self, shared: &LocalAddress) -> Option<Box<Open>> {
        match std::mem::replace(&mut *self.stage.lock(), Stage::Closed) {
            Stage::Open(open) => return Some(open),
            Stage::Waiting(queue) => _ = shared.counters.dropped_waiting.inc_by(queue.len() as u64),
            Stage::Closed => {}
        }
        None
    }

    /// Installs a tunnel, and sends the waiting payloads into it.
    pub(super) fn open(
        &self,
        shared: &LocalAddress,
        mut tunnel: UdpTunnel,
        link: Link,
        (class, listed): (Arc<Class>, Arc<EdgeTunnel>),
    ) {
        let mut stage = self.stage.lock();
        let Stage::Waiting(queue) = &*stage else { return tunnel.finish() };
        let mut batch = tunnel.batch(link.form(shared.mode));
        queue.iter().for_each(|payload| batch.push(payload));
        listed.note_form(batch.form());
        shared.counters.packets_up.inc_by(queue.len() as u64);
        listed.traffic.add_up(queue.bytes() as u64, queue.len() as u64);
        shared.counters.bytes_up.inc_by(queue.bytes() as u64);
        drop(batch);
        *stage = Stage::Open(Box::new(Open {
            tunnel,
            link,
            task: Waker::noop().clone(),
            class,
            answered: false,
            listed,
            former: None,
        }));
    }

    /// Replaces the open tunnel, which has the place `entry` in the roster and ends soon. Payloads that the old tunnel has queued still
    /// leave through it, and payloads still come back through it for [a while](FormerTunnel).
    pub(super) fn change(
        &self,
        tunnel: UdpTunnel,
        link: Link,
        (class, listed): (Arc<Class>, Arc<EdgeTunnel>),
        entry: RosterEntry,
    ) {
        let mut stage = self.stage.lock();
        let Stage::Open(open) = &mut *stage else { return tunnel.finish() };
        let (task, line) = (open.task.clone(), link.line().clone());
        let next = Box::new(Open { tunnel, link, task, class, answered: open.answered, listed, former: None });
        let before = *std::mem::replace(open, next);
        open.former = FormerTunnel::keep(before.tunnel, before.link, entry, &line);
    }

    /// Sends everything in `downlink` to the sender, runs of equal size as one message.
    ///
    /// If the socket does not accept a payload at once, it is dropped, as in a router: the sender's device is slower than the
    /// relay, and waiting would only delay later payloads. The kernel fragments a payload that is too long for a packet, but not if it is one
    /// of several in a message, so the payloads of a message that fails are sent one by one.
    pub(super) fn send(&self, shared: &LocalAddress, downlink: &mut Segments, traffic: &Traffic) {
        let LocalAddress { socket, state, counters, .. } = shared;
        let mut most = state.max_gso_segments();
        while let Some((contents, segment, count)) = downlink.run(most) {
            let bytes = contents.len() as u64;
            let transmit = Transmit {
                destination: self.address,
                ecn: None,
                contents,
                segment_size: (count > 1).then_some(segment),
                src_ip: self.local_ip,
            };
            let sent = socket.try_io(Interest::WRITABLE, || state.try_send(UdpSockRef::from(socket), &transmit));
            if count > 1 && sent.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
                most = 1;
                continue;
            }
            if sent.is_ok() {
                counters.packets_down.inc_by(count as u64);
                counters.bytes_down.inc_by(bytes);
                traffic.add_down(bytes, count as u64);
            } else {
                counters.dropped_down.inc_by(count as u64);
                traffic.add_unsent(0, count as u64);
            }
            self.note_received(count);
            (0..count).for_each(|_| _ = downlink.pop());
        }
    }

    /// Moves payloads between the relay and the sender; ready when the tunnel has ended.
    pub(super) fn poll(&self, cx: &mut Context<'_>, shared: &LocalAddress, downlink: &mut Segments) -> Poll<End> {
        let mut stage = self.stage.lock();
        let Stage::Open(open) = &mut *stage else { return Poll::Ready(End::Finished) };
        let Open { tunnel, task, answered, listed, former, .. } = &mut **open;
        task.clone_from(cx.waker());
        FormerTunnel::poll(former, cx, downlink, |payloads, traffic| self.send(shared, payloads, traffic));
        for _ in 0..ROUNDS {
            match tunnel.poll_recv(cx, downlink) {
                Poll::Ready(Ok(true)) => {
                    if !std::mem::replace(answered, true) {
                        // The target exists, so earlier refusals mean nothing any more.
                        shared.backoff.lock().succeeded();
                    }
                    self.send(shared, downlink, &listed.traffic);
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
    /// Makes payloads leave on the terms of the current class.
    fn follow(&mut self, shared: &LocalAddress) {
        if shared.membership.update(&mut self.class).is_some() {
            self.tunnel.set_terms(&self.class.terms(None));
            if let Some(signal) = shared.signal(&self.class) {
                self.link.relay.http().reprioritize(self.tunnel.stream_id(), signal);
            }
        }
    }
}

/// Adds to a number that need not be exact once it is large.
fn count(number: &AtomicU32, more: usize) {
    // Each number has only one writing task.
    number.store(number.load(Relaxed).saturating_add(u32::try_from(more).unwrap_or(u32::MAX)), Relaxed);
}

/// Walks the payloads of a message; an empty message is an empty payload.
fn payloads(message: &[u8], stride: usize) -> impl Iterator<Item = &[u8]> {
    message.is_empty().then_some(message).into_iter().chain(message.chunks(stride.max(1)))
}
