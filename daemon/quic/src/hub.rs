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
use prometheus_client::metrics::gauge::Gauge;
use s2n_quic::provider::datagram as provider;
use sched::stream::Discipline;

pub use self::{
    counters::DatagramCounters,
    flow::{DatagramBatch, Flow},
    slot::StreamWriteError,
    view::FlowView,
};
use self::{outbox::Filled, state::State};
pub use super::backlog::Losses;
use super::{
    class::Terms,
    clock::Clock,
    ledger::Ledger,
    schedule::{Schedule, Scheduled},
};

mod counters;
mod flow;
mod inbox;
mod outbox;
mod proof;
pub(super) mod service;
pub(super) mod slot;
pub(super) mod state;
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
            state: Mutex::new(State::new(schedule)),
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
        if (filled.capped || turns.releases_streams())
            && let Some(ledger) = ledger
        {
            // The driver's task has the timer, and hands over bytes of streams.
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

    /// Wakes the streams and flows whose departure time has come; returns the next such time.
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
