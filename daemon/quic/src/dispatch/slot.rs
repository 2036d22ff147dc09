//! One stream, as the dispatcher sees it.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use s2n_quic::stream::SendStream;
use sched::stream::{Expiry, Service};

use super::{Error, Shared};
use crate::{
    class::{Since, Terms},
    departure::Departure,
    events::ConnectionState,
    ledger::{Ledger, StreamLedger},
    queue::Queue,
    turns::Kind,
};

pub(super) struct Slot {
    pub(super) stream: SendStream,
    pub(super) ledger: Arc<StreamLedger>,
    pub(super) terms: Terms,
    pub(super) queue: Queue,
    /// When the message began that is being sent.
    pub(super) begun_ns: Option<u64>,
    pub(super) handed: u64,
    pub(super) finished: bool,
    /// Nobody holds the stream's writing end any more.
    pub(super) detached: bool,
    pub(super) error: Option<Error>,
    /// Whom to wake once fewer bytes than this wait.
    pub(super) writer: Option<(Waker, usize)>,
    pub(super) departure: Departure,
    /// Whether it waits aside until the transport has room for its bytes.
    pub(super) buffer_full: bool,
}

/// How a turn ended.
pub(super) enum End {
    /// As it should.
    Turn,
    /// The peer allows no more bytes for now.
    Blocked,
    /// The transport's buffer for the stream is full.
    Full,
    Failed(s2n_quic::stream::Error),
}

impl Slot {
    pub(super) fn new(stream: SendStream, ledger: Arc<StreamLedger>, terms: Terms) -> Self {
        ledger.set_class(&terms.class);
        Self {
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
            departure: Departure::default(),
            buffer_full: false,
        }
    }

    /// What the stream is to the scheduler now.
    pub(super) fn service(&self) -> Service {
        let since_ns = self.queue.oldest_ns().or(self.begun_ns).unwrap_or_default();
        self.terms.service_since(since_ns)
    }

    pub(super) fn set_terms(&mut self, shared: &Shared, name: u32, terms: Terms) {
        self.ledger.set_class(&terms.class);
        self.terms = terms;
        shared.hub.turns().set(Kind::Stream, name, self.service());
    }

    /// Makes the stream take part, if it may.
    pub(super) fn wake(&self, shared: &Shared, name: u32) {
        let held = self.departure.is_awaited() || self.buffer_full || self.error.is_some();
        if !held && !self.queue.is_empty() {
            let mut turns = shared.hub.turns();
            if self.terms.deadline_ns.is_some() {
                turns.set(Kind::Stream, name, self.service());
            }
            turns.wake(Kind::Stream, name);
        }
    }

    /// Hands up to `quantum` bytes to the transport; returns how many those were.
    pub(super) fn hand_over(
        &mut self,
        ledger: &Ledger,
        quantum: u64,
        now_ns: u64,
        expiry: Expiry,
        cx: &mut Context<'_>,
    ) -> (u64, End) {
        let begun = self.handed;
        let end = loop {
            let credit = self.credit(ledger);
            let max = credit.min(quantum.saturating_sub(self.handed - begun)) as usize;
            if max == 0 {
                break if credit == 0 { End::Blocked } else { End::Turn };
            }
            let Some(mut bytes) = self.queue.take(max, now_ns, &self.terms, expiry) else { break End::Turn };
            let len = bytes.len() as u64;
            ledger.hand_over(len);
            match self.stream.poll_send(&mut bytes, cx) {
                Poll::Ready(Ok(())) => self.handed += len,
                Poll::Pending => {
                    ledger.give_back(len);
                    self.queue.put_back(bytes);
                    self.buffer_full = true;
                    break End::Full;
                }
                Poll::Ready(Err(error)) => {
                    ledger.give_back(len);
                    break End::Failed(error);
                }
            }
        };
        let sent = self.handed - begun;
        if sent > 0 {
            self.terms.class.counters.sent_bytes.inc_by(sent);
            self.departure.left();
        }
        if let Some((writer, _)) = self.writer.take_if(|(_, below)| self.queue.bytes() < *below) {
            writer.wake();
        }
        if self.queue.is_empty() && self.terms.since == Since::Burst {
            self.begun_ns = None;
        }
        (sent, end)
    }

    /// Ends the stream if all of it was handed over; returns whether it was.
    pub(super) fn finish(&mut self) -> bool {
        let ends = self.finished && self.queue.is_empty();
        if ends {
            // Back to back with the last bytes, so that the end travels with them.
            _ = self.stream.finish();
        }
        ends
    }

    fn credit(&self, ledger: &Ledger) -> u64 {
        if ledger.binds_late() { self.ledger.max_data(self.handed).saturating_sub(self.handed) } else { u64::MAX }
    }

    /// Whether everything was sent that ever will be.
    pub(super) fn has_left(&self) -> bool {
        self.error.is_some() || (self.finished && self.queue.is_empty() && self.ledger.sent_bytes() >= self.handed)
    }

    pub(super) fn close_books(&self) {
        let id = self.stream.id();
        // Fails only once the connection is gone, and its books with it.
        _ = self
            .stream
            .connection()
            .query_event_context_mut(|connection: &mut ConnectionState| connection.account.close(id));
    }
}
