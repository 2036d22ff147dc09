//! HTTP Datagrams over QUIC DATAGRAM frames: a queue per tunnel, pulled when the transport has room.
//!
//! The transport asks ([`Sender::on_transmit`]) and the queues answer, so the choice of what leaves next is made as
//! late as it can be. A [`Hub`] belongs to one connection; a [`Flow`] is one tunnel's end of it.
//!
//! | bound | drop rule |
//! |---|---|
//! | bytes queued per flow, each direction | the flow's own oldest payload goes first |
//! | bytes queued to send per connection | once reached, a flow keeps at most its equal share |
//! | what the flow's class says | payloads that waited too long, or are late, go when their turn comes |
//! | bytes for requests that are not admitted yet, per connection | what comes later is dropped |
//! | a payload no packet of the path can carry | dropped when its turn comes; the flow goes on |
//!
//! **Invariant:** nothing here calls into the transport; callbacks run inside the connection's lock (s2n-quic
//! `connection_trait.rs`), where such a call would never return. They take the hub's own locks and wake wakers.

use std::{
    any::Any,
    collections::HashMap,
    ops::{Deref, DerefMut},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use futures::task::AtomicWaker;
use masque::{
    datagram::{self, UDP_CONTEXT},
    tunnel::{Tunnel, TunnelError},
};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use s2n_quic::provider::datagram as provider;
use sched::stream::Discipline;

use self::outbox::{Filled, Outbox};
pub use self::{
    flow::{Batch, Flow},
    view::{Losses, View},
};
pub use super::schedule::{Schedule, Schedules};
use super::{class::Terms, clock::Clock, ledger::Ledger, schedule::Scheduled, turns::Turns};
use crate::segments::Segments;

mod flow;
mod outbox;
mod proof;
mod view;

/// Bytes kept for all of a connection's requests that are not admitted yet, or have not even arrived: enough for the
/// first flights of a few inner QUIC handshakes sent along with their requests (RFC 9298 §5 lets a client do so).
const EARLY_BYTES: usize = 64 * 1024;

/// How many datagrams that may be.
const EARLY_DATAGRAMS: usize = 128;

/// Bounds of one connection's datagram queues, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// What one flow may hold, per direction.
    pub flow_bytes: usize,
    /// What all flows of a connection may hold to be sent.
    pub connection_bytes: usize,
}

/// What happened to datagrams, over all connections of an endpoint. Each is a count of datagrams, where it says nothing else.
#[derive(Debug, Default)]
pub struct DatagramCounters {
    /// Written into packets.
    pub sent: Counter,
    /// Packets that were filled up, to prove that the path carries full ones.
    pub filled_up: Counter,
    /// Received in DATAGRAM frames: UDP payloads, not what else peers may send.
    pub received: Counter,
    /// Dropped before sending: their flow's or connection's bound was reached.
    pub dropped_send_queue: Counter,
    /// Dropped before sending: they were late, or had waited too long for their class.
    pub dropped_stale: Counter,
    /// Dropped before sending: no packet of this path, or the peer's limit, can carry them.
    pub dropped_too_big: Counter,
    /// Dropped on arrival: the reader of their flow fell behind.
    pub dropped_receive_queue: Counter,
    /// Dropped on arrival: no such stream, not any more (RFC 9297 §2.1), or more than is kept before a request is admitted.
    pub dropped_unknown_stream: Counter,
    /// Streams that the dispatchers hold, those included whose last byte has not left.
    pub streams: Gauge,
}

/// The datagram provider of an endpoint.
#[derive(Debug)]
pub struct Datagrams {
    /// Bounds of each connection.
    pub limits: QueueLimits,
    /// Shared by all connections.
    pub counters: Arc<DatagramCounters>,
    /// The largest DATAGRAM frame accepted, in bytes; 0 switches the extension off.
    pub max_frame_bytes: u64,
    /// The order in which payloads, and the bytes of streams, leave.
    pub schedules: Schedules,
}

impl provider::Endpoint for Datagrams {
    type Sender = Sender;
    type Receiver = Receiver;

    fn create_connection(&mut self, info: &provider::ConnectionInfo) -> (Sender, Receiver) {
        let schedule = self.schedules.get();
        let hub = Arc::new(Hub {
            peer_accepts: info.max_datagram_payload > 0,
            connection: info.waker.clone(),
            limits: self.limits,
            counters: self.counters.clone(),
            pending: AtomicBool::new(false),
            violation: AtomicBool::new(false),
            driver: AtomicWaker::new(),
            outbox: Mutex::new(Outbox::new(&schedule)),
            inbox: Mutex::default(),
            clock: schedule.clock,
            terms: schedule.terms.clone(),
            dispatcher: OnceLock::new(),
        });
        self.schedules.attach(hub.clone(), &schedule);
        (Sender(hub.clone()), Receiver(hub))
    }

    fn max_datagram_frame_size(&self, _: &provider::PreConnectionInfo) -> u64 {
        self.max_frame_bytes
    }
}

/// One connection's datagram queues.
pub struct Hub {
    peer_accepts: bool,
    connection: Waker,
    limits: QueueLimits,
    counters: Arc<DatagramCounters>,
    /// Whether a flow in `outbox` waits for a turn; read by the transport for every packet.
    pending: AtomicBool,
    violation: AtomicBool,
    driver: AtomicWaker,
    outbox: Mutex<Outbox>,
    inbox: Mutex<Inbox>,
    clock: Clock,
    terms: Terms,
    /// The connection's dispatcher, of whose kind nothing has to be known here, and the books that both share.
    dispatcher: OnceLock<(Weak<dyn Any + Send + Sync>, Arc<Ledger>)>,
}

#[derive(Default)]
struct Inbox {
    flows: HashMap<u64, Entrance>,
    early: Vec<(u64, Box<[u8]>)>,
    early_bytes: usize,
    /// Stream IDs below this have been accepted.
    accepted: u64,
}

/// Where datagrams of a flow go.
struct Entrance {
    slot: u32,
    admitted: bool,
    arrivals: Arc<Mutex<Arrivals>>,
}

struct Arrivals {
    payloads: Segments,
    state: Tunnel,
    /// Why the tunnel has to end, until its reader has been told.
    violation: Option<TunnelError>,
    reader: Option<Waker>,
    losses: Arc<Losses>,
}

impl Arrivals {
    /// Takes an HTTP Datagram; returns how many payloads were dropped for it.
    fn push(&mut self, http_datagram: &[u8]) -> usize {
        match self.state.on_datagram(http_datagram) {
            Ok(Some(payload)) => {
                let dropped = self.payloads.push(payload);
                if dropped > 0 {
                    self.losses.receive_queue.fetch_add(dropped as u64, Relaxed);
                }
                dropped
            }
            Ok(None) => 0,
            Err(error) => {
                self.violation.get_or_insert(error);
                0
            }
        }
    }
}

impl Hub {
    /// Whether the peer accepts DATAGRAM frames at all (RFC 9221 §3).
    #[must_use]
    pub fn peer_accepts(&self) -> bool {
        self.peer_accepts
    }

    /// Opens the flow of a request stream that was just accepted or opened. Until it is admitted ([`Flow::admit`]), what
    /// arrives for it shares a little room with that of all others that wait.
    ///
    /// Streams have to be opened in the order of their IDs: what arrives for a lower ID that is not open is dropped.
    pub fn open(self: &Arc<Self>, stream_id: u64) -> Flow {
        let payloads = Segments::new(self.limits.flow_bytes);
        let losses = Arc::<Losses>::default();
        let state = Tunnel::new(false);
        let arrivals = Arrivals { payloads, state, violation: None, reader: None, losses: losses.clone() };
        let arrivals = Arc::new(Mutex::new(arrivals));
        let slot = self.outbox.lock().open(stream_id, self.limits.flow_bytes, self.terms.clone(), losses.clone());
        let mut inbox = self.inbox.lock();
        // Of streams that were passed over, nothing will be asked.
        let passed_over = inbox.accepted..stream_id;
        drop(inbox.take_early(|id| passed_over.contains(&id)));
        inbox.accepted = inbox.accepted.max(stream_id + 4);
        inbox.flows.insert(stream_id, Entrance { slot, admitted: false, arrivals: arrivals.clone() });
        drop(inbox);
        Flow { hub: self.clone(), stream_id, slot, arrivals, losses }
    }

    /// Changes the terms of the flow of a stream, if there is one.
    pub fn change_terms(&self, stream_id: u64, change: impl FnOnce(&Terms) -> Terms) {
        let slot = self.inbox.lock().flows.get(&stream_id).map(|entrance| entrance.slot);
        if let Some(slot) = slot {
            self.outbox.lock().set_terms(slot, change);
        }
    }

    /// Becomes ready when the peer sent a datagram that cannot belong to any stream: H3_DATAGRAM_ERROR (RFC 9297
    /// §2.1).
    pub fn poll_violation(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.driver.register(cx.waker());
        if self.violation.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn on_datagram(&self, bytes: &[u8]) {
        let Ok((quarter_stream_id, http_datagram)) = datagram::split(bytes) else {
            self.violation.store(true, Relaxed);
            self.driver.wake();
            return;
        };
        let is_payload = datagram::context(http_datagram).is_some_and(|(context_id, _)| context_id == UDP_CONTEXT);
        self.counters.received.inc_by(is_payload.into());
        let stream_id = quarter_stream_id * 4;
        let mut inbox = self.inbox.lock();
        let Some(entrance) = inbox.flows.get(&stream_id).filter(|entrance| entrance.admitted) else {
            if !inbox.keep_early(stream_id, http_datagram) {
                self.counters.dropped_unknown_stream.inc();
            }
            return;
        };
        let mut arrivals = entrance.arrivals.lock();
        let dropped = arrivals.push(http_datagram);
        if dropped > 0 {
            self.counters.dropped_receive_queue.inc_by(dropped as u64);
        }
        if let Some(reader) = arrivals.reader.take() {
            reader.wake();
        }
    }

    fn on_transmit<P: provider::Packet>(&self, packet: &mut P) {
        if !self.pending.load(Relaxed) {
            return;
        }
        let ledger = self.dispatcher.get().map(|(_, ledger)| ledger);
        let mut outbox = self.outbox.lock();
        let next = outbox.turns.datagrams_next(ledger.map(|ledger| &**ledger), packet.has_pending_streams());
        let filled = if next {
            outbox.fill(packet, ledger.map(|ledger| &**ledger), (self.clock.now_ns)())
        } else {
            Filled::default()
        };
        self.pending.store(outbox.waits(), Relaxed);
        drop(outbox);
        self.counters.sent.inc_by(filled.sent);
        if filled.filled_up {
            self.counters.filled_up.inc();
        }
        if filled.too_big + filled.stale > 0 {
            self.counters.dropped_too_big.inc_by(filled.too_big);
            self.counters.dropped_stale.inc_by(filled.stale);
        }
        if filled.capped
            && let Some(ledger) = ledger
        {
            // Whose task has the timer.
            ledger.dispatcher().wake();
        }
    }

    /// Where streams are counted.
    pub(super) fn streams(&self) -> &Gauge {
        &self.counters.streams
    }

    /// The clock of the connection's schedule.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The terms of what was given no others.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// How many bytes of payloads wait to leave in DATAGRAM frames.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.outbox.lock().bytes()
    }

    /// The order of the connection, locked.
    pub(super) fn turns(&self) -> impl DerefMut<Target = Turns> + '_ {
        Locked(self.outbox.lock())
    }

    /// The connection's dispatcher, if it has one.
    pub(super) fn dispatcher<D: Any + Send + Sync>(&self) -> Option<Arc<D>> {
        let (dispatcher, _) = self.dispatcher.get()?;
        dispatcher.upgrade()?.downcast().ok()
    }

    /// Makes the connection's dispatcher known.
    pub(super) fn join(&self, dispatcher: Arc<dyn Any + Send + Sync>, ledger: Arc<Ledger>) {
        let outbox = self.outbox.lock();
        ledger.bind(outbox.binding);
        _ = self.dispatcher.set((Arc::downgrade(&dispatcher), ledger));
    }

    /// Gives the connection a schedule of its own, by which it goes at once, and whatever becomes of that of its endpoint.
    /// The clock and the terms of what was given no others stay.
    pub fn set_schedule(&self, schedule: &Schedule) {
        let mut outbox = self.outbox.lock();
        outbox.is_own = true;
        self.go_by(outbox, schedule);
    }

    /// The discipline by which the connection goes.
    #[must_use]
    pub fn discipline(&self) -> Discipline {
        self.turns().discipline()
    }

    fn go_by(&self, mut outbox: MutexGuard<'_, Outbox>, schedule: &Schedule) {
        outbox.turns.reorder(schedule.discipline, schedule.seed);
        outbox.binding = schedule.binding;
        let Some((_, ledger)) = self.dispatcher.get() else { return };
        ledger.bind(schedule.binding);
        drop(outbox);
        // There may be more room than before.
        ledger.dispatcher().wake();
    }

    /// Lets flows go on whose class's departure time has come; returns the next such time.
    pub(super) fn release(&self, now_ns: u64) -> Option<u64> {
        let mut outbox = self.outbox.lock();
        let next_ns = outbox.release(now_ns);
        let waits = outbox.waits();
        drop(outbox);
        if waits && !self.pending.swap(true, Relaxed) {
            self.connection.wake_by_ref();
        }
        next_ns
    }
}

impl Scheduled for Hub {
    fn follow(&self, schedule: &Schedule) {
        let outbox = self.outbox.lock();
        if !outbox.is_own {
            self.go_by(outbox, schedule);
        }
    }
}

/// The order of a connection, for as long as it is locked.
struct Locked<'a>(MutexGuard<'a, Outbox>);

impl Deref for Locked<'_> {
    type Target = Turns;

    fn deref(&self) -> &Turns {
        &self.0.turns
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Turns {
        &mut self.0.turns
    }
}

impl Inbox {
    /// Keeps an HTTP Datagram for a request that may still be admitted; returns whether it is kept. The first ones of a
    /// handshake are worth more than what follows them, and refusing costs less than making room.
    fn keep_early(&mut self, stream_id: u64, http_datagram: &[u8]) -> bool {
        let expected = stream_id >= self.accepted || self.flows.contains_key(&stream_id);
        let fits = self.early_bytes + http_datagram.len() <= EARLY_BYTES && self.early.len() < EARLY_DATAGRAMS;
        if expected && fits {
            self.early_bytes += http_datagram.len();
            self.early.push((stream_id, http_datagram.into()));
        }
        expected && fits
    }

    /// Takes the early datagrams of the streams that `wanted` names.
    fn take_early(&mut self, wanted: impl Fn(u64) -> bool) -> impl Iterator<Item = Box<[u8]>> {
        let taken: Vec<_> = self.early.extract_if(.., |(stream_id, _)| wanted(*stream_id)).collect();
        self.early_bytes -= taken.iter().map(|(_, http_datagram)| http_datagram.len()).sum::<usize>();
        if self.early.is_empty() {
            self.early = Vec::new();
        }
        taken.into_iter().map(|(_, http_datagram)| http_datagram)
    }
}

/// The sending half of the provider.
pub struct Sender(Arc<Hub>);

impl Sender {
    /// The connection's queues: how the application gets at them (`Handle::datagram_mut`).
    #[must_use]
    pub fn hub(&self) -> Arc<Hub> {
        self.0.clone()
    }
}

impl provider::Sender for Sender {
    fn on_transmit<P: provider::Packet>(&mut self, packet: &mut P) {
        self.0.on_transmit(packet);
    }

    fn has_transmission_interest(&self) -> bool {
        self.0.pending.load(Relaxed)
    }

    fn on_connection_error(&mut self, _: s2n_quic::connection::Error) {}
}

/// The receiving half of the provider.
pub struct Receiver(Arc<Hub>);

impl provider::Receiver for Receiver {
    fn on_datagram(&mut self, _: &provider::ReceiveContext<'_>, bytes: &[u8]) {
        self.0.on_datagram(bytes);
    }

    fn on_connection_error(&mut self, _: s2n_quic::connection::Error) {}
}

#[cfg(test)]
mod tests;
