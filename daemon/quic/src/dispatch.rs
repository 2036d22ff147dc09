//! Late binding: which stream's bytes the transport gets next.
//!
//! The transport serves streams round robin and has no say in it for anybody else. So the bytes of all streams wait
//! here, and only as many are handed over as leave within about a millisecond ([`Binding`]): what is urgent waits
//! behind little. The order is `sched`'s; the books are the [`Ledger`]'s.
//!
//! | what may go wrong | remedy |
//! |---|---|
//! | a peer that does not read its stream | no bytes beyond the stream's flow-control limit are handed over |
//! | a stream that is reset, by either side | what it had not sent is given back to the budget |
//! | a stream whose acknowledgements are late | it waits aside while the transport's buffer for it is full |
//! | a writer that is faster than the path | the stream's queue has a bound; the writer waits |
//! | a tunnel that is faster than the path | its oldest payloads are dropped, before any byte of them was handed over |
//!
//! The connection's credit needs no tracking: it stops all streams alike, and what was handed over is little.
//!
//! **Invariant:** locks are taken in the order dispatcher, connection, hub. Callbacks of the transport never take the
//! dispatcher's.

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::{Arc, mpsc},
    task::{Context, Poll},
};

use parking_lot::{Mutex, MutexGuard};
use s2n_quic::connection::Handle;

use super::{
    class::Terms,
    clock::Sleep,
    datagrams::{Hub, Sender},
    departure::Departures,
    events::ConnectionState,
    ledger::{Ledger, StreamLedger},
    turns::Kind,
};

mod slot;
mod stream;

use self::slot::{End, Slot};
pub use self::stream::{Payloads, SendStream};
pub use super::binding::Binding;

/// Bytes that wait in one stream's queue before its writer has to.
const QUEUE_BYTES: usize = 32 * 1024;

/// How many bytes of a stream count as a packet where a class has so many of them a second.
const STREAM_BYTES_PER_PACKET: u64 = 1200;

/// H3_REQUEST_CANCELLED (RFC 9114 §8.1): how a stream ends that nobody finished, or whose deadline is over.
const CANCELLED: u32 = 0x10c;

/// Why a stream takes no more bytes.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum Error {
    /// The peer or the connection ended it.
    #[error(transparent)]
    Stream(#[from] s2n_quic::stream::Error),
    /// Its deadline passed before all of it was handed over, and the schedule drops what is late.
    #[error("the deadline passed")]
    Expired,
    /// We ended it.
    #[error("the stream was reset")]
    Cancelled,
}

/// The connection was not made by an endpoint of ours, or has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection has ended, or its endpoint does not use paced's providers")]
pub struct NotOurs;

/// Hands the bytes of one connection's streams to the transport. Clones are the same dispatcher.
#[derive(Clone)]
pub struct Dispatcher(Arc<Shared>);

/// What the parts of a dispatcher share.
pub(super) struct Shared {
    hub: Arc<Hub>,
    ledger: Arc<Ledger>,
    state: Mutex<State>,
}

struct State {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    names: HashMap<u64, u32>,
    /// Streams whose limit grew, or that the peer stopped.
    told: mpsc::Receiver<u32>,
    /// Streams for which the transport's buffer was full.
    full: Vec<u32>,
    /// Streams whose last byte was handed over and has not left.
    leaving: Vec<u32>,
    /// Streams whose class may not send before a moment.
    capped: Departures,
    timer: Option<(u64, Sleep)>,
}

impl Dispatcher {
    /// Returns the dispatcher of a connection.
    ///
    /// # Errors
    /// See [`NotOurs`].
    pub fn of(handle: &mut Handle) -> Result<Self, NotOurs> {
        let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub()).map_err(|_| NotOurs)?;
        if let Some(shared) = hub.dispatcher() {
            return Ok(Self(shared));
        }
        let join = |state: &mut ConnectionState| (state.account.join(), state.tap.clone());
        let ((ledger, told), tap) = handle.query_event_context_mut(join).map_err(|_| NotOurs)?;
        let state = State {
            slots: Vec::new(),
            free: Vec::new(),
            names: HashMap::new(),
            told: told.ok_or(NotOurs)?,
            full: Vec::new(),
            leaving: Vec::new(),
            capped: Departures::default(),
            timer: None,
        };
        let shared = Arc::new(Shared { hub, ledger, state: Mutex::new(state) });
        shared.hub.join(shared.clone(), shared.ledger.clone());
        shared.hub.turns().tap = tap;
        Ok(Self(shared))
    }

    /// Takes charge of the sending half of a bidirectional stream to which nothing was written yet.
    #[must_use]
    pub fn attach(&self, stream: s2n_quic::stream::SendStream, terms: Terms) -> SendStream {
        let mut state = self.0.state();
        let name = state.free.pop().unwrap_or(state.slots.len() as u32);
        let id = stream.id();
        let ledger = stream
            .connection()
            .query_event_context_mut(|connection: &mut ConnectionState| connection.account.open(id, name))
            .unwrap_or_else(|_| StreamLedger::detached(name));
        self.0.hub.turns().set(Kind::Stream, name, terms.service);
        let slot = Slot::new(stream, ledger, terms);
        match state.slots.get_mut(name as usize) {
            Some(free) => *free = Some(slot),
            None => state.slots.push(Some(slot)),
        }
        state.names.insert(id, name);
        self.0.hub.streams().inc();
        drop(state);
        SendStream::new(self.0.clone(), name, id)
    }

    /// Changes the terms of a stream, if there is one of this ID.
    pub fn change_terms(&self, stream_id: u64, change: impl FnOnce(&Terms) -> Terms) {
        let mut state = self.0.state();
        if let Some(&name) = state.names.get(&stream_id)
            && let Some(slot) = state.slot(name)
        {
            slot.set_terms(&self.0, name, change(&slot.terms));
        }
    }

    /// Hands over what may be handed over. Has to be polled by one task, which is woken when there is more to do.
    pub fn poll(&self, cx: &mut Context<'_>) {
        self.0.ledger.dispatcher().register(cx.waker());
        self.0.state().poll(&self.0, cx);
    }

    /// Hands over for as long as it is polled; never returns.
    pub async fn run(&self) -> std::convert::Infallible {
        poll_fn(|cx| {
            self.poll(cx);
            Poll::Pending
        })
        .await
    }

    /// The books of the connection.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// How many streams there are, those included of which the last byte has not left.
    #[must_use]
    pub fn streams(&self) -> usize {
        let state = self.0.state();
        state.slots.len() - state.free.len()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock panics; and the state is usable however it was left.
        self.state.lock()
    }

    fn now_ns(&self) -> u64 {
        (self.hub.clock().now_ns)()
    }

    /// Wakes the task that polls the dispatcher: something happened that the callbacks do not know of.
    pub(super) fn wake(&self) {
        self.ledger.dispatcher().wake();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        self.hub.streams().dec_by((state.slots.len() - state.free.len()) as i64);
    }
}

impl State {
    fn slot(&mut self, name: u32) -> Option<&mut Slot> {
        self.slots.get_mut(name as usize)?.as_mut()
    }

    fn poll(&mut self, shared: &Shared, cx: &mut Context<'_>) {
        if shared.ledger.is_closed() {
            for name in 0..self.slots.len() as u32 {
                self.check(shared, name, cx);
            }
            return;
        }
        while let Ok(name) = self.told.try_recv() {
            self.check(shared, name, cx);
        }
        for name in std::mem::take(&mut self.full) {
            if self.check(shared, name, cx) {
                self.full.push(name);
            }
        }
        loop {
            self.release(shared, cx);
            // A stream that was made to wait now needs the timer.
            if !self.hand_over(shared, cx) {
                break;
            }
        }
        self.sweep(shared);
    }

    /// Looks at a stream to which something may have happened: it ended, or may go on. Returns whether the transport's
    /// buffer for it is still full.
    fn check(&mut self, shared: &Shared, name: u32, cx: &mut Context<'_>) -> bool {
        let Some(slot) = self.slot(name) else { return false };
        match slot.stream.poll_send_ready(cx) {
            Poll::Ready(Err(error)) if slot.error.is_none() && !slot.has_left() => {
                self.fail(shared, name, error.into());
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending if slot.buffer_full => return true,
            Poll::Ready(Ok(_)) | Poll::Pending => {
                slot.buffer_full = false;
                slot.wake(shared, name);
            }
        }
        false
    }

    /// Wakes the streams whose class's departure time has come, and sets the timer for the next.
    fn release(&mut self, shared: &Shared, cx: &mut Context<'_>) {
        loop {
            let now_ns = shared.now_ns();
            while let Some((at_ns, name)) = self.capped.pop_due(now_ns) {
                if let Some(slot) = self.slot(name)
                    && slot.departure.come(at_ns)
                {
                    slot.wake(shared, name);
                }
            }
            let next = [shared.hub.release(now_ns), self.capped.next_ns()].into_iter().flatten().min();
            let Some(next_ns) = next else {
                self.timer = None;
                return;
            };
            let timer = match &mut self.timer {
                Some((at_ns, timer)) if *at_ns == next_ns => timer,
                timer => &mut timer.insert((next_ns, (shared.hub.clock().sleep_until)(next_ns))).1,
            };
            if timer.as_mut().poll(cx).is_pending() {
                return;
            }
            self.timer = None;
        }
    }

    /// Gives turns until enough was handed over, or nothing waits. Returns whether a stream now waits for the departure
    /// time of its class.
    fn hand_over(&mut self, shared: &Shared, cx: &mut Context<'_>) -> bool {
        let now_ns = shared.now_ns();
        let mut capped = false;
        loop {
            let Some(quantum) = shared.ledger.room() else {
                shared.ledger.wait_for_room();
                return capped;
            };
            let turns = shared.hub.turns();
            let Some((name, rank)) = turns.turn(Kind::Stream) else { return capped };
            let (expiry, expired) = (turns.expiry(), turns.expired_stream(now_ns) == Some(name));
            drop(turns);
            let Some(slot) = self.slot(name) else {
                shared.hub.turns().remove(Kind::Stream, name);
                continue;
            };
            if expired && !slot.queue.is_tunnel() {
                slot.terms.class.counters.expired_streams.inc();
                _ = slot.stream.reset(CANCELLED.into());
                self.fail(shared, name, Error::Expired);
                continue;
            }
            let waiting_bytes = quantum.min(slot.queue.bytes() as u64);
            let packets = waiting_bytes.div_ceil(STREAM_BYTES_PER_PACKET);
            if let Some(at_ns) = slot.departure.wait(&slot.terms.class, now_ns, waiting_bytes, packets) {
                shared.hub.turns().end_turn(Kind::Stream, name, 0, false);
                self.capped.push(at_ns, name);
                capped = true;
                continue;
            }
            let (sent, end) = slot.hand_over(&shared.ledger, quantum, now_ns, expiry, cx);
            if let End::Failed(error) = end {
                self.fail(shared, name, error.into());
                continue;
            }
            let more = matches!(end, End::Turn) && !slot.queue.is_empty();
            let mut turns = shared.hub.turns();
            turns.handed_over(rank, &shared.ledger);
            if more && slot.terms.deadline_ns.is_some() {
                turns.set(Kind::Stream, name, slot.service());
            }
            turns.end_turn(Kind::Stream, name, sent, more);
            if sent > 0
                && let Some(log) = turns.tap.log()
            {
                let waiting = [Kind::Stream, Kind::Flow].map(|kind| turns.waiting(kind));
                log.stream_turn(slot.stream.id(), slot.terms.class.key, sent, waiting);
            }
            drop(turns);
            if slot.finish() {
                self.leaving.push(name);
            } else if matches!(end, End::Full) {
                self.full.push(name);
            }
        }
    }

    /// Forgets streams of which nothing is left to do.
    fn sweep(&mut self, shared: &Shared) {
        let mut index = 0;
        while let Some(&name) = self.leaving.get(index) {
            let Some(slot) = self.slot(name) else {
                self.leaving.swap_remove(index);
                continue;
            };
            if !slot.has_left() {
                index += 1;
                continue;
            }
            if slot.detached {
                self.free(shared, name);
            }
            self.leaving.swap_remove(index);
        }
        if !self.leaving.is_empty() {
            shared.ledger.wait_for_room();
        }
    }

    /// Ends a stream on which nothing more can be sent.
    fn fail(&mut self, shared: &Shared, name: u32, error: Error) {
        let Some(slot) = self.slot(name) else { return };
        if slot.error.is_none() {
            slot.error = Some(error);
            slot.queue.clear();
            shared.ledger.give_back(slot.handed - slot.ledger.sent_bytes());
            // Nothing more of it will be sent, whatever the callbacks are still told.
            slot.close_books();
            shared.hub.turns().remove(Kind::Stream, name);
            if let Some((writer, _)) = slot.writer.take() {
                writer.wake();
            }
        }
        if slot.detached {
            self.free(shared, name);
        }
    }

    fn free(&mut self, shared: &Shared, name: u32) {
        if let Some(slot) = self.slots.get_mut(name as usize).and_then(Option::take) {
            slot.close_books();
            shared.hub.turns().remove(Kind::Stream, name);
            self.names.remove(&slot.stream.id());
            shared.hub.streams().dec();
            self.free.push(name);
        }
    }
}
