//! The writing end of a stream whose bytes wait for their turns.

use std::{
    future::poll_fn,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::MutexGuard;
use s2n_quic::application;

use super::{Binding, StreamWriteError, station::Station};
use crate::{
    backlog::Losses,
    class::Terms,
    hub::{slot::Slot, state::State},
};

/// H3_REQUEST_CANCELLED (RFC 9114 §8.1): how a stream ends if its writer was dropped without finishing it, or if its deadline
/// has passed.
pub(super) const CANCELLED: u32 = 0x10c;

/// Bytes that may wait in one stream's queue before its writer has to wait, whatever the path.
const QUEUE_BYTES: usize = 32 * 1024;

/// The largest turn of a late binding. Each stream's queue has room for its share of a turn if that is more than [`QUEUE_BYTES`].
const MOST_TURN_BYTES: u64 = Binding::MOST_BYTES / 2;

/// The bytes of other streams and of tunnels that leave before a stream's own bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// How many bytes.
    pub bytes: u64,
    /// How fast they leave: a congestion window in each round trip. 0 if nothing else waits, because the rate is not known then.
    pub bytes_per_sec: u64,
    /// The share of this rate with which the stream's own bytes then leave, as long as the others have bytes to send.
    pub share_bytes_per_sec: u64,
}

/// The sending half of a stream whose bytes wait for their turn. Dropping it before it is finished resets the stream.
pub struct ScheduledSendStream {
    of: Station,
    name: u32,
    id: u64,
}

impl ScheduledSendStream {
    pub(super) fn new(of: Station, name: u32, id: u64) -> Self {
        Self { of, name, id }
    }

    /// Returns the stream's ID.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Ready when there is room in the stream's queue: 32 KiB, or a turn divided by the number of the connection's streams if that is
    /// more, so that turns need not end early on a path of several hundred Mbit/s.
    ///
    /// # Errors
    /// The stream has ended without having been finished.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamWriteError>> {
        let turn_bytes = self.of.ledger.turn_bytes().min(MOST_TURN_BYTES) as usize;
        let mut state = self.of.hub.lock();
        let share = turn_bytes / state.streams.len().max(1);
        poll_below(&mut state, self.name, cx, share.max(QUEUE_BYTES))
    }

    /// Ready when nothing waits for its turn.
    ///
    /// # Errors
    /// As [`ScheduledSendStream::poll_ready`].
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamWriteError>> {
        poll_below(&mut self.of.hub.lock(), self.name, cx, 1)
    }

    /// Ready when the peer has acknowledged everything that was written.
    ///
    /// # Errors
    /// As [`ScheduledSendStream::poll_ready`].
    pub fn poll_acknowledged(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamWriteError>> {
        if self.poll_flush(cx)?.is_pending() {
            return Poll::Pending;
        }
        let mut state = self.of.hub.lock();
        let Some(slot) = state.streams.slot(self.name) else { return Poll::Ready(Err(StreamWriteError::Cancelled)) };
        if let Some(acknowledged) = slot.acknowledged.take() {
            return Poll::Ready(acknowledged);
        }
        slot.asks_acknowledged = Some(cx.waker().clone());
        state.streams.ask(self.name);
        drop(state);
        self.of.wake();
        Poll::Pending
    }

    /// Asks to be woken when the stream takes no more bytes.
    ///
    /// # Errors
    /// As [`ScheduledSendStream::poll_ready`].
    pub fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), StreamWriteError> {
        match poll_below(&mut self.of.hub.lock(), self.name, cx, 0) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    /// Returns how many queued bytes have not been sent yet; 0 once the stream has ended.
    #[must_use]
    pub fn unsent_bytes(&self) -> u64 {
        self.of.hub.lock().streams.slot(self.name).map_or(0, |slot| slot.unsent_bytes())
    }

    /// Queues bytes, however many are queued already: a writer that never calls [`ScheduledSendStream::poll_ready`] has
    /// no bound.
    pub fn push(&mut self, bytes: Bytes) {
        self.change(|slot, now_ns| {
            slot.begun_ns.get_or_insert(now_ns);
            slot.acknowledged = None;
            slot.queue.push(bytes);
        });
    }

    /// Queues bytes as soon as there is room.
    ///
    /// # Errors
    /// The stream has ended without having been finished.
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), StreamWriteError> {
        poll_fn(|cx| self.poll_ready(cx)).await?;
        self.push(bytes);
        Ok(())
    }

    /// Begins a batch of payloads of a [tunnel](Self::set_tunnel) that leave in DATAGRAM capsules. At most `limit_bytes` of them wait; the oldest are
    /// dropped to make room, and counted in the tunnel's `losses`. Bytes that are queued after payloads overtake the
    /// payloads that still wait, so a stream carries only one of the two.
    #[must_use]
    pub fn payloads<'a>(&'a mut self, limit_bytes: usize, losses: &'a Arc<Losses>) -> Payloads<'a> {
        let now_ns = self.of.now_ns();
        Payloads { of: &self.of, state: self.of.hub.lock(), name: self.name, limit_bytes, losses, now_ns }
    }

    /// Notes that the stream carries the payloads of a tunnel, before the first of them. No deadline resets it from then on: a tunnel's
    /// payloads are dropped one by one.
    pub fn set_tunnel(&mut self) {
        if let Some(slot) = self.of.hub.lock().streams.slot(self.name) {
            slot.is_tunnel = true;
        }
    }

    /// Returns what would leave before a byte that is queued now, and how fast.
    #[must_use]
    pub fn ahead(&self) -> Ahead {
        let (ledger, now_ns) = (&self.of.ledger, self.of.now_ns());
        let (turn_bytes, bytes_per_sec) = (ledger.turn_bytes(), ledger.bytes_per_sec());
        let contention = self.of.hub.lock().contention(self.name, turn_bytes, now_ns);
        // A window that nothing fills says nothing about the path.
        let Some(contention) = contention.filter(|contention| contention.is_contended) else { return Ahead::default() };
        let share_bytes_per_sec = contention.share_of(bytes_per_sec);
        Ahead { bytes: contention.bytes_ahead, bytes_per_sec, share_bytes_per_sec }
    }

    /// Ends the stream properly: sends the queued bytes, then the stream's end.
    pub fn finish(&mut self) {
        let mut state = self.of.hub.lock();
        let Some(slot) = state.streams.slot(self.name).filter(|slot| slot.is_open()) else { return };
        slot.finished = true;
        if slot.ends() {
            state.streams.ask(self.name);
            drop(state);
            self.of.wake();
        }
    }

    /// Ends the stream properly and waits until the peer has acknowledged all of it. After `limit` in which no rate held bytes back, or if
    /// the future is dropped before, resets the stream with H3_REQUEST_CANCELLED: bytes that a peer does not take would stay in memory
    /// until its connection ends. Once a rate has let the last bytes go, this takes at most twice the `limit`.
    pub async fn finish_within(mut self, limit: Duration) {
        self.finish();
        // What a rate held back before does not count.
        self.was_delayed();
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let mut timer = (self.of.hub.clock().sleep_until)(self.of.now_ns().saturating_add(limit_ns));
        let mut leaving = Leaving { stream: self, is_acknowledged: false };
        poll_fn(|cx| {
            loop {
                leaving.is_acknowledged = leaving.stream.poll_acknowledged(cx).is_ready();
                if leaving.is_acknowledged {
                    return Poll::Ready(());
                }
                ready!(timer.as_mut().poll(cx));
                // The peer cannot acknowledge bytes that a rate holds back, and bytes that have just left need a round trip.
                if !leaving.stream.was_delayed() {
                    return Poll::Ready(());
                }
                let of = &leaving.stream.of;
                timer = (of.hub.clock().sleep_until)(of.now_ns().saturating_add(limit_ns));
            }
        })
        .await;
    }

    /// Ends the stream abruptly; discards the queued bytes.
    pub fn reset(self, code: application::Error) {
        self.cancel(code);
    }

    /// Changes the terms on which the stream is served, at once.
    pub fn set_terms(&self, terms: Terms) {
        self.change_terms(|_| terms);
    }

    /// As [`ScheduledSendStream::set_terms`], with terms that depend on the current ones.
    pub fn change_terms(&self, change: impl FnOnce(&Terms) -> Terms) {
        self.of.hub.lock().set_stream_terms(self.name, change);
        self.of.wake();
    }

    /// Whether bytes have waited for the rate of the user or the class since the last call.
    fn was_delayed(&self) -> bool {
        self.of.hub.lock().streams.slot(self.name).is_some_and(|slot| slot.departure.was_awaited())
    }

    fn change(&mut self, change: impl FnOnce(&mut Slot, u64)) {
        let now_ns = self.of.now_ns();
        let mut state = self.of.hub.lock();
        let Some(slot) = state.streams.slot(self.name).filter(|slot| slot.is_open()) else { return };
        change(slot, now_ns);
        state.wake_stream(self.name);
        drop(state);
        self.of.wake();
    }

    fn cancel(&self, code: application::Error) {
        self.of.hub.lock().cancel(self.name, code);
        self.of.wake();
    }
}

/// A finished stream whose last bytes are on their way. Dropping it earlier resets the stream.
struct Leaving {
    stream: ScheduledSendStream,
    /// Whether the peer has acknowledged all of it, or it has failed.
    is_acknowledged: bool,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if !self.is_acknowledged {
            self.stream.cancel(CANCELLED.into());
        }
    }
}

/// Ready when fewer than `bytes` of a stream wait for their turn.
fn poll_below(state: &mut State, name: u32, cx: &mut Context<'_>, bytes: usize) -> Poll<Result<(), StreamWriteError>> {
    // All slots are gone once the driver is.
    let Some(slot) = state.streams.slot(name) else { return Poll::Ready(Err(StreamWriteError::Cancelled)) };
    if let Some(error) = slot.error {
        return Poll::Ready(Err(error));
    }
    if slot.queue.bytes() < bytes {
        return Poll::Ready(Ok(()));
    }
    slot.wake_below(bytes, cx.waker());
    Poll::Pending
}

impl Drop for ScheduledSendStream {
    fn drop(&mut self) {
        let mut state = self.of.hub.lock();
        let Some(slot) = state.streams.slot(self.name) else { return };
        slot.detached = true;
        if !slot.finished {
            state.cancel(self.name, CANCELLED.into());
        }
        state.streams.ask(self.name);
        drop(state);
        self.of.wake();
    }
}

/// Payloads of one tunnel on their way into the queue of its stream.
pub struct Payloads<'a> {
    of: &'a Station,
    state: MutexGuard<'a, State>,
    name: u32,
    limit_bytes: usize,
    losses: &'a Arc<Losses>,
    now_ns: u64,
}

impl Payloads<'_> {
    /// Queues a copy of `payload`; the oldest are dropped to make room.
    pub fn push(&mut self, payload: &[u8]) {
        let Some(slot) = self.state.streams.slot(self.name).filter(|slot| slot.is_open()) else {
            self.count_dropped(1);
            return;
        };
        let dropped = slot.queue.push_payload(payload, self.limit_bytes, self.losses, self.now_ns) as u64;
        if dropped > 0 {
            slot.terms.class.counters.dropped_queue.inc_by(dropped);
            self.count_dropped(dropped);
        }
    }

    fn count_dropped(&self, payloads: u64) {
        self.losses.capsules.fetch_add(payloads, Relaxed);
        self.of.hub.count_dropped_capsules(payloads);
    }
}

impl Drop for Payloads<'_> {
    fn drop(&mut self) {
        self.state.wake_stream(self.name);
        self.of.wake();
    }
}
