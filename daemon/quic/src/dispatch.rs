//! Late binding: which stream's bytes the transport gets next.
//!
//! The transport serves streams round robin and lets its callers choose no other order. So the bytes of all streams wait in
//! the connection's [`Hub`](crate::hub::Hub), and the transport receives only the bytes that leave within about a millisecond
//! ([`Binding`]): urgent bytes wait behind few others. `sched` decides the order; the [`Ledger`] keeps the books.
//!
//! | what may go wrong | remedy |
//! |---|---|
//! | a peer that does not read its stream | no bytes beyond the stream's flow-control limit are handed over |
//! | a stream that is reset, by either side | its unsent bytes are given back to the budget |
//! | a stream whose acknowledgements are late | it takes no turns while the transport's buffer for it is full |
//! | a writer that is faster than the path | the stream's queue has a bound; the writer waits |
//! | a tunnel that is faster than the path | its oldest payloads are dropped, before any byte of them is handed over |
//!
//! The connection's credit needs no tracking: it stops all streams alike, and few bytes are handed over at a time.
//!
//! **Invariant:** only the [`Driver`], which one task owns, and [`Dispatcher::attach`] call the transport. A stream's writer
//! notes its requests in the hub and wakes the driver.

use std::{
    future::poll_fn,
    sync::{Arc, mpsc},
    task::{Context, Poll},
};

use admission::uploads::Credit;
use s2n_quic::{connection::Handle, stream};

use super::{
    class::Terms,
    clock::Sleep,
    datagrams::Sender,
    events::ConnectionState,
    hub::service::{Begun, End},
    ledger::{Ledger, StreamLedger},
};

mod station;
mod writer;

pub use self::writer::{Ahead, Payloads, ScheduledSendStream};
use self::{station::Station, writer::CANCELLED};
pub use super::{binding::Binding, hub::StreamWriteError};

/// The connection was not made by an endpoint of ours, has ended, or has a driver already.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection has ended, or has a driver already, or its endpoint does not use paced's providers")]
pub struct NotOurs;

/// Takes the streams of one connection whose bytes take turns. Clones are the same dispatcher.
#[derive(Clone)]
pub struct Dispatcher(Station);

impl Dispatcher {
    /// Returns the dispatcher of a connection and its driver, without which nothing is sent. Works once for each connection.
    ///
    /// # Errors
    /// See [`NotOurs`].
    pub fn of(handle: &mut Handle) -> Result<(Self, Driver), NotOurs> {
        let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub()).map_err(|_| NotOurs)?;
        let join = |state: &mut ConnectionState| (state.account.join(), state.tap.clone());
        let ((ledger, told), tap) = handle.query_event_context_mut(join).map_err(|_| NotOurs)?;
        let told = told.ok_or(NotOurs)?;
        hub.join(ledger.clone(), tap);
        let station = Station { hub, ledger };
        let driver = Driver {
            of: station.clone(),
            streams: Vec::new(),
            told,
            full: Vec::new(),
            leaving: Vec::new(),
            flushing: Vec::new(),
            timer: None,
        };
        Ok((Self(station), driver))
    }

    /// Takes charge of the sending half of a bidirectional stream to which nothing was written yet.
    #[must_use]
    pub fn attach(&self, stream: stream::SendStream, terms: Terms) -> ScheduledSendStream {
        let id = stream.id();
        let name = self.0.hub.lock().streams.reserve();
        let books = stream
            .connection()
            .query_event_context_mut(|connection: &mut ConnectionState| connection.account.open(id, name))
            .unwrap_or_else(|_| StreamLedger::detached(name));
        let refused = self.0.hub.lock().attach(name, stream, books, terms);
        if let Some(mut stream) = refused {
            // The transport ends a stream that is dropped as if it were finished.
            _ = stream.reset(CANCELLED.into());
            close_books(&stream);
        } else {
            self.0.hub.gauge().inc();
            self.0.wake();
        }
        ScheduledSendStream::new(self.0.clone(), name, id)
    }

    /// Returns the books of the stream with this ID, if there is one.
    pub(crate) fn books(&self, stream_id: u64) -> Option<Arc<StreamLedger>> {
        let streams = &mut self.0.hub.lock().streams;
        streams.name(stream_id).and_then(|name| Some(streams.slot(name)?.ledger.clone()))
    }

    /// Returns the peer's credit for all streams together.
    pub(crate) fn credit(&self) -> Credit {
        self.0.ledger.credit()
    }

    /// Changes the terms of the stream with this ID, if there is one.
    pub fn change_terms(&self, stream_id: u64, change: impl FnOnce(&Terms) -> Terms) {
        let mut state = self.0.hub.lock();
        if let Some(name) = state.streams.name(stream_id) {
            state.set_stream_terms(name, change);
            drop(state);
            self.0.wake();
        }
    }

    /// Lets the driver's task run before tasks that are woken later. Call it before a stream is opened: opening wakes the transport, which
    /// announces the stream in its next packet. If the first bytes are written at once, the driver hands them over in time for that
    /// packet. This holds on a runtime of one thread; elsewhere, the announcement may leave alone.
    pub fn go_first(&self) {
        self.0.wake();
    }

    /// Announces that no stream will be added, so that [`Driver::run`] returns after the last stream.
    pub fn retire(&self) {
        self.0.hub.lock().streams.retire();
        self.0.wake();
    }

    /// Returns the books of the connection.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Returns how many streams there are, including finished ones whose last byte has not left.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.0.hub.lock().streams.len()
    }
}

/// Hands the bytes of one connection's streams to the transport, for as long as it is polled. Dropping it resets all streams
/// whose end the transport does not know.
pub struct Driver {
    of: Station,
    /// By name.
    streams: Vec<Option<stream::SendStream>>,
    /// Streams whose limit grew, or that the peer stopped.
    told: mpsc::Receiver<u32>,
    /// Streams for which the transport's buffer was full.
    full: Vec<u32>,
    /// Streams whose last byte was handed over and has not left.
    leaving: Vec<u32>,
    /// Streams whose writers wait until all bytes are acknowledged.
    flushing: Vec<u32>,
    timer: Option<(u64, Sleep)>,
}

impl Driver {
    /// Hands bytes over until the connection's task drops it, or until no stream is left after [`Dispatcher::retire`].
    pub async fn run(mut self) {
        poll_fn(|cx| {
            self.poll(cx);
            if self.of.hub.lock().streams.is_done() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Hands over all bytes that may be handed over. The task is woken when there is more to do.
    pub fn poll(&mut self, cx: &mut Context<'_>) {
        self.of.ledger.driver().register(cx.waker());
        let (arrived, asked, names) = {
            let streams = &mut self.of.hub.lock().streams;
            (streams.take_arrived(), streams.take_asked(), streams.names())
        };
        self.streams.resize_with(names as usize, || None);
        for (name, stream) in arrived {
            if let Some(place) = self.streams.get_mut(name as usize) {
                *place = Some(stream);
            }
            // The callbacks may have reported something about it before it arrived.
            self.check(name, cx);
        }
        let closed = self.of.ledger.is_closed();
        if closed {
            (0..names).for_each(|name| _ = self.check(name, cx));
        }
        while let Ok(name) = self.told.try_recv() {
            self.check(name, cx);
        }
        for name in std::mem::take(&mut self.full) {
            if self.check(name, cx) {
                self.full.push(name);
            }
        }
        asked.into_iter().for_each(|name| self.answer(name));
        self.flush(cx);
        loop {
            self.release(cx);
            // A stream that has just begun to wait needs the timer.
            if closed || !self.hand_over(cx) {
                break;
            }
        }
        self.sweep();
    }

    fn stream(&mut self, name: u32) -> Option<&mut stream::SendStream> {
        self.streams.get_mut(name as usize)?.as_mut()
    }

    /// Checks a stream that may have ended, or may continue. Returns whether the transport's buffer for it is still full.
    fn check(&mut self, name: u32, cx: &mut Context<'_>) -> bool {
        let Some(stream) = self.stream(name) else { return false };
        let ready = stream.poll_send_ready(cx);
        let mut state = self.of.hub.lock();
        let Some(slot) = state.streams.slot(name) else { return false };
        match ready {
            // Once it is finished, the transport takes nothing more, although its last bytes have not left.
            Poll::Ready(Err(stream::Error::SendAfterFinish { .. })) if slot.ended => {}
            Poll::Ready(Err(error)) if slot.error.is_none() && !slot.has_left() => {
                drop(state);
                self.fail(name, error.into());
            }
            Poll::Ready(Err(_)) => {}
            Poll::Pending if slot.buffer_full => return true,
            Poll::Ready(Ok(_)) | Poll::Pending => {
                slot.buffer_full = false;
                state.wake_stream(name);
            }
        }
        false
    }

    /// Handles the requests of a stream's writer.
    fn answer(&mut self, name: u32) {
        let Some(asked) = self.of.hub.lock().streams.answer(name) else { return };
        let Some(stream) = self.stream(name) else { return };
        if let Some(code) = asked.reset {
            _ = stream.reset(code);
            self.fail(name, StreamWriteError::Cancelled);
            return;
        }
        if asked.finish {
            _ = stream.finish();
        }
        if asked.flush && !self.flushing.contains(&name) {
            self.flushing.push(name);
        }
        if asked.leave {
            self.leaving.push(name);
        }
    }

    /// Wakes the tasks that wait for acknowledgements.
    fn flush(&mut self, cx: &mut Context<'_>) {
        for name in std::mem::take(&mut self.flushing) {
            let ended = self.of.hub.lock().streams.slot(name).is_some_and(|slot| slot.ended);
            let Some(stream) = self.stream(name) else { continue };
            // Once a flush has reported that a stream is finished, s2n-quic keeps the stream for as long as the connection,
            // because dropping it no longer counts, and so gives the peer no credit for another. Closing observes the stream's
            // final state.
            let flushed = if ended { stream.poll_close(cx) } else { stream.poll_flush(cx) };
            let mut state = self.of.hub.lock();
            let Some(slot) = state.streams.slot(name) else { continue };
            match flushed {
                Poll::Ready(result) => {
                    slot.acknowledged = Some(result.map_err(StreamWriteError::from));
                    slot.asks_acknowledged.take().into_iter().for_each(std::task::Waker::wake);
                }
                Poll::Pending => self.flushing.push(name),
            }
        }
    }

    /// Wakes the streams and flows whose departure time has come, and sets the timer for the next.
    fn release(&mut self, cx: &mut Context<'_>) {
        loop {
            let Some(next_ns) = self.of.hub.release(self.of.now_ns()) else {
                self.timer = None;
                return;
            };
            let timer = match &mut self.timer {
                Some((at_ns, timer)) if *at_ns == next_ns => timer,
                timer => &mut timer.insert((next_ns, (self.of.hub.clock().sleep_until)(next_ns))).1,
            };
            if timer.as_mut().poll(cx).is_pending() {
                return;
            }
            self.timer = None;
        }
    }

    /// Gives turns until enough was handed over, or nothing waits. Returns whether a stream now waits for the departure
    /// time of its user or class.
    fn hand_over(&mut self, cx: &mut Context<'_>) -> bool {
        let (Station { hub, ledger }, now_ns) = (self.of.clone(), self.of.now_ns());
        let mut capped = false;
        loop {
            let Some(quantum) = ledger.room() else {
                ledger.set_holds_back(hub.lock().has_turns());
                if ledger.wait_for_room() {
                    return capped;
                }
                continue;
            };
            let mut state = hub.lock();
            let Some(quantum) = state.stream_quantum(quantum, &ledger) else {
                ledger.set_holds_back(true);
                return capped;
            };
            let mut turn = match state.begin_turn(quantum, now_ns, &ledger) {
                None => {
                    ledger.set_holds_back(false);
                    return capped;
                }
                Some(Begun::Turn(turn)) => turn,
                Some(Begun::Capped) => {
                    capped = true;
                    continue;
                }
                Some(Begun::Expired(name)) => {
                    drop(state);
                    if let Some(stream) = self.stream(name) {
                        _ = stream.reset(CANCELLED.into());
                    }
                    self.fail(name, StreamWriteError::Expired);
                    continue;
                }
            };
            let end = loop {
                let mut bytes = match state.take(&mut turn, &ledger) {
                    Ok(bytes) => bytes,
                    Err(end) => break end,
                };
                drop(state);
                let len = bytes.len() as u64;
                let sent = match self.stream(turn.name) {
                    Some(stream) => stream.poll_send(&mut bytes, cx),
                    // The stream arrives with the next poll.
                    None => Poll::Pending,
                };
                state = hub.lock();
                match sent {
                    Poll::Ready(Ok(())) => state.took(&mut turn, len),
                    Poll::Pending => {
                        state.put_back(&turn, bytes, &ledger);
                        break End::Full;
                    }
                    Poll::Ready(Err(error)) => {
                        ledger.give_back(len);
                        break End::Failed(error);
                    }
                }
            };
            let ends = state.end_turn(&turn, &end, &ledger);
            drop(state);
            hub.count_stale(turn.stale);
            if ends {
                // Right after the last bytes, so that the stream's end travels with them.
                if let Some(stream) = self.stream(turn.name) {
                    _ = stream.finish();
                }
                self.leaving.push(turn.name);
            }
            match end {
                End::Turn | End::Blocked => {}
                End::Full => self.full.push(turn.name),
                End::Failed(error) => self.fail(turn.name, error.into()),
            }
        }
    }

    /// Forgets dropped streams whose last byte has left.
    fn sweep(&mut self) {
        self.sweep_left();
        // Bytes may have left before the callbacks knew that the driver waits for that.
        if !self.leaving.is_empty() && !self.of.ledger.wait_for_room() {
            self.sweep_left();
        }
    }

    fn sweep_left(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let mut gone = Vec::new();
        let mut state = self.of.hub.lock();
        self.leaving.retain(|name| {
            let Some(slot) = state.streams.slot(*name) else { return false };
            let has_left = slot.has_left() && slot.reset.is_none();
            if has_left {
                slot.leaving = false;
                gone.extend(slot.detached.then_some(*name));
            }
            !has_left
        });
        drop(state);
        gone.into_iter().for_each(|name| self.forget(name));
    }

    /// Ends a stream on which nothing more can be sent.
    fn fail(&mut self, name: u32, error: StreamWriteError) {
        // Nothing more of it will be sent, whatever callbacks still come.
        self.close_books(name);
        if self.of.hub.lock().fail(name, error, &self.of.ledger) {
            self.forget(name);
        }
    }

    fn forget(&mut self, name: u32) {
        self.close_books(name);
        if self.of.hub.lock().forget(name) {
            self.of.hub.gauge().dec();
        }
        if let Some(place) = self.streams.get_mut(name as usize) {
            *place = None;
        }
        // Another stream may have the name by the next poll.
        for names in [&mut self.full, &mut self.leaving, &mut self.flushing] {
            names.retain(|other| *other != name);
        }
    }

    fn close_books(&mut self, name: u32) {
        if let Some(stream) = self.stream(name) {
            close_books(stream);
        }
    }
}

/// Closes the books of a stream.
fn close_books(stream: &stream::SendStream) {
    let id = stream.id();
    // Fails only once the connection is gone, and its books with it.
    _ = stream.connection().query_event_context_mut(|connection: &mut ConnectionState| connection.account.close(id));
}

impl Drop for Driver {
    fn drop(&mut self) {
        let (count, unended, arrived) = self.of.hub.lock().abandon();
        self.of.hub.gauge().dec_by(count as i64);
        // The transport ends a stream that is dropped as if it were finished, so the peer would take a part for the whole.
        for (name, code) in unended {
            if let Some(stream) = self.stream(name) {
                _ = stream.reset(code.unwrap_or(CANCELLED.into()));
            }
        }
        for (_, mut stream) in arrived {
            _ = stream.reset(CANCELLED.into());
        }
    }
}
