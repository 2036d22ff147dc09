//! One tunnel's end of its connection's datagrams.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
};

use bytes::Bytes;
use masque::{
    capsule::Capsule,
    tunnel::{Form, TunnelError},
};
use parking_lot::{Mutex, MutexGuard};

use super::{FlowView, Hub, Losses, inbox::Arrivals, state::State};
use crate::{class::Terms, segments::Segments};

/// One tunnel's end of its connection's datagrams. Dropping it discards and counts the payloads that are queued in both
/// directions.
pub struct Flow {
    hub: Arc<Hub>,
    stream_id: u64,
    pub(super) slot: u32,
    arrivals: Arc<Mutex<Arrivals>>,
    losses: Arc<Losses>,
}

impl Hub {
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
}

impl Flow {
    /// Admits datagrams, beginning with early arrivals. Call this once the request is admitted, or at once for our own request. From then
    /// on, the flow's rule decides which payloads to drop beyond its bound.
    pub fn admit(&self) {
        let dropped = self.hub.lock().inbox.admit(self.stream_id);
        self.hub.counters.dropped_receive_queue.inc_by(dropped as u64);
    }

    /// Refuses datagrams, for a request that has no use for them: the first one resets the stream with H3_DATAGRAM_ERROR (RFC 9297
    /// §2), even if it arrived earlier.
    pub fn refuse_datagrams(&self) {
        let mut state = self.hub.lock();
        let refused = state.inbox.refuse(self.stream_id);
        if refused > 0 {
            self.hub.counters.dropped_unknown_stream.inc_by(refused as u64);
            state.end_request(self.stream_id);
        }
    }

    /// Notes whether the tunnel may send datagrams. This decides the form of outgoing payloads (see [`masque::tunnel::Tunnel`]).
    pub fn set_datagrams_usable(&self, usable: bool) {
        self.arrivals.lock().state.set_datagrams_usable(usable);
    }

    /// Makes this the proxy's end of the tunnel, which follows the form of its client's payloads.
    pub fn follow_peer(&self) {
        self.arrivals.lock().state.follow_peer();
    }

    /// Returns the form in which the tunnel's next payload leaves.
    #[must_use]
    pub fn form(&self) -> Form {
        self.arrivals.lock().state.form()
    }

    /// Whether payloads of the flow, or bytes of its stream, wait for the departure time of their user or class.
    #[must_use]
    pub fn is_delayed(&self) -> bool {
        let mut state = self.hub.lock();
        let stream = state.streams.name(self.stream_id);
        let is_stream_delayed =
            stream.and_then(|name| state.streams.slot(name)).is_some_and(|slot| slot.departure.is_awaited());
        is_stream_delayed || state.outbox.is_delayed(self.slot)
    }

    /// Counts payloads that arrived in capsules and were dropped because the tunnel's reader fell behind.
    pub fn note_overflow(&self, payloads: usize) {
        if payloads > 0 {
            self.losses.receive_queue.fetch_add(payloads as u64, Relaxed);
            self.hub.counters.dropped_receive_queue.inc_by(payloads as u64);
        }
    }

    /// Returns a view of the flow for other tasks.
    #[must_use]
    pub fn view(&self) -> FlowView {
        FlowView::new(&self.arrivals, &self.losses)
    }

    /// Returns the losses of the tunnel.
    #[must_use]
    pub fn losses(&self) -> &Arc<Losses> {
        &self.losses
    }

    /// Takes a capsule of the tunnel and returns the UDP payload in it, if there is one.
    ///
    /// # Errors
    /// The capsule breaks a rule that ends the tunnel.
    pub fn on_capsule(&self, capsule: Capsule) -> Result<Option<Bytes>, TunnelError> {
        self.arrivals.lock().state.on_capsule(capsule)
    }

    /// Begins a batch of UDP payloads to be sent in DATAGRAM frames with context ID 0; the connection is woken once,
    /// when the batch is dropped.
    ///
    /// The batch locks the connection: code between two payloads must not touch the connection's flows and streams.
    #[must_use]
    pub fn batch(&self) -> DatagramBatch<'_> {
        let now_ns = (self.hub.clock.now_ns)();
        DatagramBatch { flow: self, state: self.hub.lock(), now_ns, dropped: 0 }
    }

    /// Changes the terms on which the flow is served, at once.
    pub fn set_terms(&self, terms: Terms) {
        self.change_terms(|_| terms);
    }

    /// As [`Flow::set_terms`], with terms that depend on the current ones.
    pub fn change_terms(&self, change: impl FnOnce(&Terms) -> Terms) {
        self.hub.set_flow_terms(&mut self.hub.lock(), self.slot, change);
    }

    /// Moves the UDP payloads from received DATAGRAM frames into `payloads`, which must be empty. Its bound does not apply.
    ///
    /// # Errors
    /// A datagram broke a rule that ends the tunnel.
    pub fn poll_recv(&self, cx: &mut Context<'_>, payloads: &mut Segments) -> Poll<Result<(), TunnelError>> {
        debug_assert!(payloads.is_empty());
        let mut arrivals = self.arrivals.lock();
        if let Some(violation) = arrivals.violation {
            return Poll::Ready(Err(violation));
        }
        if arrivals.payloads.is_empty() {
            if !arrivals.reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker())) {
                arrivals.reader = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        arrivals.payloads.swap(payloads);
        Poll::Ready(Ok(()))
    }
}

/// A batch of payloads that enter one flow's queue.
pub struct DatagramBatch<'a> {
    flow: &'a Flow,
    state: MutexGuard<'a, State>,
    now_ns: u64,
    dropped: u64,
}

impl DatagramBatch<'_> {
    /// Queues a copy of `payload`. Payloads beyond a bound are dropped by the module's rules and counted.
    pub fn push(&mut self, payload: &[u8]) {
        let connection_bytes = self.flow.hub.limits.connection_bytes;
        let State { turns, outbox, .. } = &mut *self.state;
        self.dropped += outbox.push(turns, self.flow.slot, connection_bytes, payload, self.now_ns) as u64;
    }
}

impl Drop for DatagramBatch<'_> {
    fn drop(&mut self) {
        let hub = &self.flow.hub;
        if self.dropped > 0 {
            hub.counters.dropped_send_queue.inc_by(self.dropped);
        }
        hub.announce(self.state.turns.waits());
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        let State { turns, outbox, inbox, .. } = &mut *self.hub.lock();
        self.hub.counters.dropped_unknown_stream.inc_by(inbox.close(self.stream_id) as u64);
        outbox.close(turns, self.slot);
        let mut arrivals = self.arrivals.lock();
        self.losses.note_unread(arrivals.payloads.len());
        // Views of the flow may stay.
        arrivals.payloads.clear();
    }
}
