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
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    task::{Context, Poll, Waker},
};

use masque::priority::Priority;
use s2n_quic::connection::Handle;

use super::{
    class::{Since, Terms},
    clock::Sleep,
    datagrams::{Hub, Sender},
    events::ConnectionState,
    ledger::{Ledger, StreamLedger},
    queue::Queue,
    turns::Kind,
};

mod stream;

pub use self::stream::{Payloads, SendStream};
pub use super::ledger::Binding;

/// Bytes that wait in one stream's queue before its writer has to.
const QUEUE_BYTES: usize = 32 * 1024;

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
#[error("the connection has ended or is not of an endpoint with paced's providers")]
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
    capped: BinaryHeap<Reverse<(u64, u32)>>,
    timer: Option<(u64, Sleep)>,
}

struct Slot {
    stream: s2n_quic::stream::SendStream,
    ledger: Arc<StreamLedger>,
    terms: Terms,
    queue: Queue,
    /// When the first byte was queued.
    begun_ns: Option<u64>,
    handed: u64,
    finished: bool,
    /// Nobody holds the [`SendStream`] any more.
    detached: bool,
    error: Option<Error>,
    /// Whom to wake once fewer bytes than this wait.
    writer: Option<(Waker, usize)>,
    departure: Departure,
}

/// When the class of a stream lets it send its next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Departure {
    Unknown,
    /// Reserved, and waited for.
    At(u64),
    Due,
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
        let joined = handle.query_event_context_mut(|state: &mut ConnectionState| state.account.join());
        let (ledger, told) = joined.map_err(|_| NotOurs)?;
        let state = State {
            slots: Vec::new(),
            free: Vec::new(),
            names: HashMap::new(),
            told: told.ok_or(NotOurs)?,
            full: Vec::new(),
            leaving: Vec::new(),
            capped: BinaryHeap::new(),
            timer: None,
        };
        let shared = Arc::new(Shared { hub, ledger, state: Mutex::new(state) });
        shared.hub.join(&shared, shared.ledger.clone());
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
        let slot = Slot {
            stream,
            ledger,
            terms,
            queue: Queue::default(),
            begun_ns: None,
            handed: 0,
            finished: false,
            detached: false,
            error: None,
            writer: None,
            departure: Departure::Unknown,
        };
        match state.slots.get_mut(name as usize) {
            Some(free) => *free = Some(slot),
            None => state.slots.push(Some(slot)),
        }
        state.names.insert(id, name);
        self.0.hub.streams().inc();
        drop(state);
        SendStream::new(self.0.clone(), name, id)
    }

    /// Moves a stream within what its class allows, if there is one of this ID.
    pub fn signal(&self, stream_id: u64, signal: &Priority) {
        let mut state = self.0.state();
        if let Some(&name) = state.names.get(&stream_id)
            && let Some(slot) = state.slot(name)
        {
            slot.set_terms(&self.0, name, slot.terms.moved(signal));
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        (self.hub.clock().now_ns)()
    }

    /// Wakes whoever polls the dispatcher: something happened that the callbacks do not know of.
    pub(super) fn wake(&self) {
        self.ledger.dispatcher().wake();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
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
            self.check(shared, name, cx);
        }
        loop {
            self.release(shared, cx);
            // Whoever was made to wait now needs the timer.
            if !self.hand_over(shared, cx) {
                break;
            }
        }
        self.sweep(shared);
    }

    /// Looks at a stream to which something may have happened: it ended, or may go on.
    fn check(&mut self, shared: &Shared, name: u32, cx: &mut Context<'_>) {
        let Some(slot) = self.slot(name) else { return };
        match slot.stream.poll_send_ready(cx) {
            Poll::Ready(Ok(_)) => slot.wake(shared, name),
            Poll::Pending => self.full.push(name),
            Poll::Ready(Err(error)) if slot.error.is_none() && !slot.has_left() => {
                self.fail(shared, name, error.into());
            }
            Poll::Ready(Err(_)) => {}
        }
    }

    /// Lets those go on whose class's departure time has come, and sets the timer for the next.
    fn release(&mut self, shared: &Shared, cx: &mut Context<'_>) {
        loop {
            let now_ns = shared.now_ns();
            while let Some(&Reverse((at_ns, name))) = self.capped.peek()
                && at_ns <= now_ns
            {
                self.capped.pop();
                if let Some(slot) = self.slot(name)
                    && slot.departure == Departure::At(at_ns)
                {
                    slot.departure = Departure::Due;
                    slot.wake(shared, name);
                }
            }
            let next = self.capped.peek().map(|&Reverse((at_ns, _))| at_ns);
            let next = [shared.hub.release(now_ns), next].into_iter().flatten().min();
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
            if let Some(at_ns) = slot.wait_for_departure(now_ns, quantum) {
                shared.hub.turns().end_turn(Kind::Stream, name, 0, false);
                self.capped.push(Reverse((at_ns, name)));
                capped = true;
                continue;
            }
            let mut sent = 0;
            let end = loop {
                let credit = slot.credit(&shared.ledger);
                let max = credit.min(quantum.saturating_sub(sent)) as usize;
                if max == 0 {
                    break if credit == 0 { End::Blocked } else { End::Turn };
                }
                let Some(mut bytes) = slot.queue.take(max, now_ns, &slot.terms, expiry) else { break End::Turn };
                let len = bytes.len() as u64;
                shared.ledger.hand_over(len);
                match slot.stream.poll_send(&mut bytes, cx) {
                    Poll::Ready(Ok(())) => {
                        slot.handed += len;
                        sent += len;
                    }
                    Poll::Pending => {
                        shared.ledger.give_back(len);
                        slot.queue.put_back(bytes);
                        break End::Full;
                    }
                    Poll::Ready(Err(error)) => {
                        shared.ledger.give_back(len);
                        break End::Failed(error);
                    }
                }
            };
            if let End::Failed(error) = end {
                self.fail(shared, name, error.into());
                continue;
            }
            slot.terms.class.counters.sent_bytes.inc_by(sent);
            let more = matches!(end, End::Turn) && !slot.queue.is_empty();
            {
                let mut turns = shared.hub.turns();
                turns.handed_over(rank, &shared.ledger);
                if more && slot.terms.deadline_ns.is_some() {
                    turns.set(Kind::Stream, name, slot.service());
                }
                turns.end_turn(Kind::Stream, name, sent, more);
            }
            if let Some((writer, _)) = slot.writer.take_if(|(_, below)| slot.queue.bytes() < *below) {
                writer.wake();
            }
            if slot.queue.is_empty() && slot.terms.since == Since::Burst {
                slot.begun_ns = None;
            }
            if slot.finished && slot.queue.is_empty() {
                _ = slot.stream.finish();
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

/// How a turn ended.
enum End {
    /// As it should.
    Turn,
    /// The peer allows no more bytes for now.
    Blocked,
    /// The transport's buffer for the stream is full.
    Full,
    Failed(s2n_quic::stream::Error),
}

impl Slot {
    fn service(&self) -> sched::stream::Service {
        let since_ns = self.queue.oldest_ns().or(self.begun_ns).unwrap_or_default();
        self.terms.service_since(since_ns)
    }

    fn set_terms(&mut self, shared: &Shared, name: u32, terms: Terms) {
        self.terms = terms;
        shared.hub.turns().set(Kind::Stream, name, self.service());
    }

    /// Has the stream take part, if it may.
    fn wake(&self, shared: &Shared, name: u32) {
        if !self.queue.is_empty() && !matches!(self.departure, Departure::At(_)) && self.error.is_none() {
            let mut turns = shared.hub.turns();
            if self.terms.deadline_ns.is_some() {
                turns.set(Kind::Stream, name, self.service());
            }
            turns.wake(Kind::Stream, name);
        }
    }

    /// Returns until when the class makes the stream wait.
    fn wait_for_departure(&mut self, now_ns: u64, quantum: u64) -> Option<u64> {
        let cap = self.terms.class.to_peers.as_ref()?;
        if std::mem::replace(&mut self.departure, Departure::Unknown) == Departure::Due {
            return None;
        }
        let at_ns = cap.reserve(now_ns, quantum.min(self.queue.bytes() as u64));
        (at_ns > now_ns).then(|| {
            self.departure = Departure::At(at_ns);
            at_ns
        })
    }

    fn credit(&self, ledger: &Ledger) -> u64 {
        if ledger.binds_late() { self.ledger.max_data(self.handed).saturating_sub(self.handed) } else { u64::MAX }
    }

    /// Whether everything was sent that ever will be.
    fn has_left(&self) -> bool {
        self.error.is_some() || (self.finished && self.queue.is_empty() && self.ledger.sent_bytes() >= self.handed)
    }

    fn close_books(&self) {
        let id = self.stream.id();
        // Fails only once the connection is gone, and its books with it.
        _ = self
            .stream
            .connection()
            .query_event_context_mut(|connection: &mut ConnectionState| connection.account.close(id));
    }
}
