//! What one end of a connection has to send: bytes of streams and datagrams of tunnels, which wait here, and the order in which
//! they take turns.
//!
//! All of this is behind one lock ([`Hub::lock`]). Three parties take it: callbacks of the transport
//! ([`datagrams`](super::datagrams)), which fill packets and take arriving datagrams; the [driver](super::dispatch), which hands
//! bytes of streams to the transport; and the ends of streams and tunnels. A [`Flow`] is one tunnel's end.
//!
//! | bound | drop rule |
//! |---|---|
//! | bytes queued per flow, each direction, and 16 for each payload | the flow's own oldest payload is dropped first |
//! | bytes queued to send per connection, counted likewise | a flow that grows keeps at most its equal share; then the largest flow's oldest is dropped |
//! | the rule of the flow's class | payloads that waited too long, or are late, are dropped when their turn comes |
//! | bytes for requests that are not admitted yet, per connection | later datagrams are dropped |
//! | a payload that no packet of the path can carry | dropped when its turn comes; the flow goes on |
//!
//! **Invariant:** no task calls the transport while it holds the lock, except to wake it: callbacks run inside the transport's
//! own lock of the connection (s2n-quic `connection_trait.rs`) and then take this one. Calls to the transport are decided on
//! under the lock, and made after it is released.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use futures::task::AtomicWaker;
use masque::datagram::{self, DatagramError, UDP_CONTEXT};
use pacing::qlog::Tap;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use s2n_quic::{application, provider::datagram as provider};
use sched::stream::Discipline;

pub use self::{
    flow::{DatagramBatch, Flow},
    slot::StreamWriteError,
    view::FlowView,
};
use self::{
    inbox::Inbox,
    outbox::{Filled, Outbox},
    streams::Streams,
};
pub use super::backlog::Losses;
use super::{
    binding::Binding,
    class::Terms,
    clock::Clock,
    ledger::Ledger,
    schedule::{Schedule, Scheduled},
    turns::Turns,
};

mod flow;
mod inbox;
mod outbox;
mod proof;
pub(super) mod slot;
pub(super) mod streams;
mod view;

/// Bounds of one connection's datagram queues, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// How many bytes one flow may hold, per direction. Each payload counts for 16 more.
    pub flow_bytes: usize,
    /// How many bytes all flows of a connection together may hold to be sent, counted likewise.
    pub connection_bytes: usize,
}

/// Counters of datagrams over all connections of an endpoint. Each counts datagrams, unless it says otherwise.
#[derive(Debug, Default)]
pub struct DatagramCounters {
    /// Written into packets.
    pub sent: Counter,
    /// Packets that were filled up, to prove that the path carries full ones.
    pub filled_up: Counter,
    /// UDP payloads received in DATAGRAM frames, without the other datagrams that peers may send.
    pub received: Counter,
    /// Dropped before sending: their flow's or connection's bound was reached.
    pub dropped_send_queue: Counter,
    /// Dropped before sending: they were late, or had waited too long for their class.
    pub dropped_stale: Counter,
    /// Dropped before sending: no packet of this path, or the peer's limit, can carry them.
    pub dropped_too_big: Counter,
    /// UDP payloads dropped before they left in capsules: a bound was reached.
    pub dropped_capsules: Counter,
    /// UDP payloads dropped before they left, in either form: their tunnel ended first.
    pub dropped_unsent: Counter,
    /// UDP payloads dropped after they arrived, in either form: their tunnel ended before they went on.
    pub dropped_unread: Counter,
    /// Dropped on arrival: the reader of their flow fell behind.
    pub dropped_receive_queue: Counter,
    /// Dropped on arrival, or later if they came before their request: the stream does not exist or has ended (RFC 9297 §2.1), its request
    /// takes no datagrams or was not admitted, or too many came before the request was admitted.
    pub dropped_unknown_stream: Counter,
    /// Streams that the dispatchers hold, including finished ones whose last byte has not left.
    pub streams: Gauge,
}

/// What one end of a connection has to send, and what arrived for its tunnels.
pub struct Hub {
    peer_accepts: bool,
    transport: Waker,
    limits: QueueLimits,
    counters: Arc<DatagramCounters>,
    /// Whether a flow waits for a turn; read by the transport for every packet.
    pending: AtomicBool,
    /// Why the first datagram that broke a rule of the connection did.
    violation: OnceLock<DatagramError>,
    /// The task to wake on a violation.
    listener: AtomicWaker,
    clock: Clock,
    terms: Terms,
    state: Mutex<State>,
}

/// The state behind the lock of a connection.
pub(super) struct State {
    pub(super) turns: Turns,
    /// Where turns are logged.
    pub(super) tap: Tap,
    /// The books of the transport's callbacks, once there is a driver.
    ledger: Option<Arc<Ledger>>,
    /// How early the bytes of streams are handed over.
    binding: Binding,
    /// Whether the connection has a schedule of its own, and so does not follow its endpoint's.
    has_own_schedule: bool,
    pub(super) streams: Streams,
    outbox: Outbox,
    inbox: Inbox,
}

impl Hub {
    /// Creates the hub of a new connection, whose peer `accepts` DATAGRAM frames or does not. `transport` wakes the transport to
    /// ask for datagrams.
    pub(super) fn new(
        schedule: &Schedule,
        limits: QueueLimits,
        counters: Arc<DatagramCounters>,
        accepts: bool,
        transport: Waker,
    ) -> Self {
        Self {
            peer_accepts: accepts,
            transport,
            limits,
            counters,
            pending: AtomicBool::new(false),
            violation: OnceLock::new(),
            listener: AtomicWaker::new(),
            clock: schedule.clock,
            terms: schedule.terms.clone(),
            state: Mutex::new(State {
                turns: Turns::new(schedule.discipline, schedule.seed),
                tap: Tap::default(),
                ledger: None,
                binding: schedule.binding,
                has_own_schedule: false,
                streams: Streams::default(),
                outbox: Outbox::default(),
                inbox: Inbox::default(),
            }),
        }
    }

    /// Locks the connection. The transport must not be called while the lock is held.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether the peer accepts DATAGRAM frames at all (RFC 9221 §3).
    #[must_use]
    pub fn peer_accepts(&self) -> bool {
        self.peer_accepts
    }

    /// Opens the flow of a new request stream. Until the request is admitted ([`Flow::admit`]), its datagrams share a little room with the
    /// datagrams of all other waiting requests.
    ///
    /// Streams have to be opened in the order of their IDs: datagrams for a lower ID that is not open are dropped.
    pub fn open(self: &Arc<Self>, stream_id: u64) -> Flow {
        let losses = Arc::new(Losses::among(&self.counters.dropped_unsent, &self.counters.dropped_unread));
        let State { turns, outbox, inbox, .. } = &mut *self.lock();
        let slot = outbox.open(turns, stream_id, self.limits.flow_bytes, self.terms.clone(), losses.clone());
        let (arrivals, dropped) = inbox.open(stream_id, slot, self.limits.flow_bytes, losses.clone());
        self.counters.dropped_unknown_stream.inc_by(dropped as u64);
        Flow { hub: self.clone(), stream_id, slot, arrivals, losses }
    }

    /// Changes the terms of the flow of a stream, if there is one.
    pub fn change_terms(&self, stream_id: u64, change: impl FnOnce(&Terms) -> Terms) {
        let mut state = self.lock();
        if let Some(slot) = state.inbox.slot(stream_id) {
            self.set_flow_terms(&mut state, slot, change);
        }
    }

    fn set_flow_terms(&self, state: &mut State, slot: u32, change: impl FnOnce(&Terms) -> Terms) {
        state.outbox.set_terms(&mut state.turns, slot, change);
        self.announce(state.turns.waits());
    }

    /// Becomes ready when the peer sent a datagram that cannot belong to any stream.
    pub fn poll_violation(&self, cx: &mut Context<'_>) -> Poll<DatagramError> {
        self.listener.register(cx.waker());
        self.violation.get().map_or(Poll::Pending, |error| Poll::Ready(*error))
    }

    /// Takes the content of a DATAGRAM frame.
    pub(super) fn on_datagram(&self, bytes: &[u8]) {
        let (quarter_stream_id, http_datagram) = match datagram::split(bytes) {
            Ok(split) => split,
            Err(error) => {
                // The first error counts.
                _ = self.violation.set(error);
                self.listener.wake();
                return;
            }
        };
        let is_payload = datagram::context(http_datagram).is_some_and(|(context_id, _)| context_id == UDP_CONTEXT);
        self.counters.received.inc_by(is_payload.into());
        let (stream_id, mut state) = (quarter_stream_id * 4, self.lock());
        if state.inbox.push(stream_id, http_datagram, &self.counters) {
            state.end_request(stream_id);
        }
    }

    /// Whether datagrams wait for a packet.
    pub(super) fn wants_packet(&self) -> bool {
        self.pending.load(Relaxed)
    }

    /// Fills a packet with datagrams, if it is their turn.
    pub(super) fn on_transmit<P: provider::Packet>(&self, packet: &mut P) {
        if !self.wants_packet() {
            return;
        }
        let mut state = self.lock();
        let State { turns, tap, ledger, outbox, .. } = &mut *state;
        let filled = if turns.datagrams_next(ledger.as_deref(), packet.has_pending_streams()) {
            outbox.fill(turns, tap, packet, ledger.as_deref(), (self.clock.now_ns)())
        } else {
            Filled::default()
        };
        self.pending.store(turns.waits(), Relaxed);
        if filled.capped
            && let Some(ledger) = ledger
        {
            // The driver's task has the timer.
            ledger.driver().wake();
        }
        drop(state);
        if filled.missed {
            // The transport may send nothing now, and then would not ask again by itself.
            self.transport.wake_by_ref();
        }
        self.counters.sent.inc_by(filled.sent);
        if filled.filled_up {
            self.counters.filled_up.inc();
        }
        if filled.too_big + filled.stale > 0 {
            self.counters.dropped_too_big.inc_by(filled.too_big);
            self.counters.dropped_stale.inc_by(filled.stale);
        }
    }

    /// Makes the transport ask for datagrams if some wait, as `waits` says, and it does not know of any yet.
    fn announce(&self, waits: bool) {
        if waits && !self.pending.swap(true, Relaxed) {
            self.transport.wake_by_ref();
        }
    }

    /// Counts payloads that their class's rule dropped before they left in capsules.
    pub(super) fn count_stale(&self, payloads: u64) {
        if payloads > 0 {
            self.counters.dropped_stale.inc_by(payloads);
        }
    }

    /// Counts payloads that a bound dropped before they left in capsules.
    pub(super) fn count_dropped_capsules(&self, payloads: u64) {
        self.counters.dropped_capsules.inc_by(payloads);
    }

    /// Returns the gauge that counts streams.
    pub(super) fn gauge(&self) -> &Gauge {
        &self.counters.streams
    }

    /// Returns the clock of the connection's schedule.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns the default terms of streams and flows.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns how many datagrams wait for their requests to be admitted.
    #[cfg(test)]
    pub(super) fn early_datagrams(&self) -> usize {
        self.lock().inbox.early.len()
    }

    /// Returns how many bytes of payloads wait to leave in DATAGRAM frames.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.lock().outbox.bytes()
    }

    /// Returns how many bytes of streams, including capsules of tunnels, wait for their turn, or were handed to the transport
    /// and have not been sent.
    #[must_use]
    pub fn waiting_stream_bytes(&self) -> u64 {
        let state = self.lock();
        state.streams.bytes() + state.ledger.as_ref().map_or(0, |ledger| ledger.unsent_bytes())
    }

    /// Connects the books of the transport's callbacks and the connection's tap.
    pub(super) fn join(&self, ledger: Arc<Ledger>, tap: Tap) {
        let mut state = self.lock();
        ledger.bind(state.binding);
        state.ledger = Some(ledger);
        state.tap = tap;
    }

    /// Gives the connection a schedule of its own, which takes effect at once and stays when the endpoint's schedule changes.
    /// The clock and the default terms of streams and flows stay.
    pub fn set_schedule(&self, schedule: &Schedule) {
        let mut state = self.lock();
        state.has_own_schedule = true;
        state.go_by(schedule);
    }

    /// Returns the connection's discipline.
    #[must_use]
    pub fn discipline(&self) -> Discipline {
        self.lock().turns.discipline()
    }

    /// Wakes the streams and flows whose class's departure time has come; returns the next such time.
    pub(super) fn release(&self, now_ns: u64) -> Option<u64> {
        let mut state = self.lock();
        let State { turns, outbox, .. } = &mut *state;
        let flow_ns = outbox.release(turns, now_ns);
        let waits = turns.waits();
        let stream_ns = state.release_streams(now_ns);
        drop(state);
        self.announce(waits);
        [flow_ns, stream_ns].into_iter().flatten().min()
    }
}

impl State {
    /// Ends a request for which a datagram arrived, but which has no use for datagrams.
    fn end_request(&mut self, stream_id: u64) {
        // Codes are far below 2^62.
        let code = application::Error::new(datagram::WITHOUT_USE.value()).unwrap_or(application::Error::UNKNOWN);
        if let Some(name) = self.streams.name(stream_id)
            && self.cancel(name, code)
            && let Some(ledger) = &self.ledger
        {
            ledger.driver().wake();
        }
    }

    fn go_by(&mut self, schedule: &Schedule) {
        self.turns.reorder(schedule.discipline, schedule.seed);
        self.binding = schedule.binding;
        if let Some(ledger) = &self.ledger {
            ledger.bind(schedule.binding);
            // There may be more room than before.
            ledger.driver().wake();
        }
    }
}

impl Scheduled for Hub {
    fn follow(&self, schedule: &Schedule) {
        let mut state = self.lock();
        if !state.has_own_schedule {
            state.go_by(schedule);
        }
    }
}

#[cfg(test)]
mod tests;
