//! One stream that waits for its turns, as the holder of the connection's lock sees it.

use std::{sync::Arc, task::Waker};

use s2n_quic::application;
use sched::stream::Service;

use crate::{
    cap::STREAM_BYTES_PER_PACKET,
    class::{Since, Terms},
    departure::Departure,
    ledger::{Ledger, StreamLedger},
    queue::Queue,
};

/// Returns as how many packets bytes of a stream count.
fn packets(bytes: u64) -> u64 {
    bytes.div_ceil(STREAM_BYTES_PER_PACKET)
}

/// Why a stream takes no more bytes.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum StreamWriteError {
    /// The peer or the connection ended it.
    #[error(transparent)]
    Stream(#[from] s2n_quic::stream::Error),
    /// Its deadline passed before all of it was handed over, and the schedule drops late streams.
    #[error("the deadline passed")]
    Expired,
    /// We ended it.
    #[error("the stream was reset")]
    Cancelled,
}

pub(crate) struct Slot {
    pub(crate) id: u64,
    pub(crate) ledger: Arc<StreamLedger>,
    pub(crate) terms: Terms,
    /// Whether it carries the payloads of a tunnel. It then survives its deadlines, which only drop payloads.
    pub(crate) is_tunnel: bool,
    pub(crate) queue: Queue,
    /// When the message that is being sent began.
    pub(crate) begun_ns: Option<u64>,
    /// How many bytes were handed to the transport.
    pub(crate) handed: u64,
    /// Nothing more will be queued.
    pub(crate) finished: bool,
    /// The stream's writing end was dropped.
    pub(crate) detached: bool,
    pub(crate) error: Option<StreamWriteError>,
    /// The code with which the driver has to reset it.
    pub(crate) reset: Option<application::Error>,
    /// Whether the transport was told of its end, proper or not.
    pub(crate) ended: bool,
    /// Whether it failed and its unsent bytes were given back.
    pub(crate) settled: bool,
    /// Whether the driver waits for its last byte to leave.
    pub(crate) leaving: bool,
    /// The writer to wake once fewer bytes than this wait.
    pub(crate) writer: Option<(Waker, usize)>,
    /// The task that waits until all bytes are acknowledged, and the answer.
    pub(crate) asks_acknowledged: Option<Waker>,
    pub(crate) acknowledged: Option<Result<(), StreamWriteError>>,
    pub(crate) departure: Departure,
    /// Whether it takes no turns until the transport has room for its bytes.
    pub(crate) buffer_full: bool,
}

impl Slot {
    pub(crate) fn new(id: u64, ledger: Arc<StreamLedger>, terms: Terms) -> Self {
        ledger.set_class(&terms.class);
        Self {
            id,
            ledger,
            terms,
            is_tunnel: false,
            queue: Queue::default(),
            begun_ns: None,
            handed: 0,
            finished: false,
            detached: false,
            error: None,
            reset: None,
            ended: false,
            settled: false,
            leaving: false,
            writer: None,
            asks_acknowledged: None,
            acknowledged: None,
            departure: Departure::default(),
            buffer_full: false,
        }
    }

    /// Returns the stream's service at the moment.
    pub(crate) fn service(&self) -> Service {
        self.service_from(0)
    }

    /// Returns the stream's service at the moment, or from `now_ns` on if it has not begun to send.
    pub(crate) fn service_from(&self, now_ns: u64) -> Service {
        self.terms.service_since(self.queue.oldest_ns().or(self.begun_ns).unwrap_or(now_ns))
    }

    /// Whether its writer may queue more.
    pub(crate) fn is_open(&self) -> bool {
        self.error.is_none() && !self.finished
    }

    /// Wakes `waker` once fewer than `bytes` wait. A larger number from an earlier call stays: a writer may wait for room and for the
    /// stream's end at the same time.
    pub(crate) fn wake_below(&mut self, bytes: usize, waker: &Waker) {
        match &mut self.writer {
            Some((writer, below)) => {
                writer.clone_from(waker);
                *below = bytes.max(*below);
            }
            writer => *writer = Some((waker.clone(), bytes)),
        }
    }

    /// Whether it may take turns.
    pub(crate) fn is_ready(&self) -> bool {
        let held = self.departure.is_awaited() || self.buffer_full || self.error.is_some();
        !held && !self.queue.is_empty()
    }

    /// Whether all of it was handed over, so that the transport may be told of its end.
    pub(crate) fn ends(&self) -> bool {
        self.finished && self.error.is_none() && !self.ended && self.queue.is_empty()
    }

    /// Whether everything that will ever be sent has been sent.
    pub(crate) fn has_left(&self) -> bool {
        self.error.is_some() || (self.finished && self.queue.is_empty() && self.ledger.sent_bytes() >= self.handed)
    }

    /// Returns how many bytes wait for their turn, or were handed over and have not been sent for the first time.
    pub(crate) fn unsent_bytes(&self) -> u64 {
        self.queue.bytes() as u64 + self.handed.saturating_sub(self.ledger.sent_bytes())
    }

    /// Returns how many more bytes the peer allows to be handed over; unlimited under
    /// [`Binding::Early`](crate::binding::Binding::Early).
    pub(crate) fn credit(&self, ledger: &Ledger) -> u64 {
        if ledger.binds_late() { self.ledger.max_data(self.handed).saturating_sub(self.handed) } else { u64::MAX }
    }

    /// Returns the most bytes of a turn: `quantum`, or less if the class or the user has a rate.
    pub(crate) fn turn_bytes(&self, quantum: u64) -> u64 {
        let (of_user, of_class) = (self.terms.user_cap(), &self.terms.class.to_peers);
        [&of_user, of_class].into_iter().flatten().fold(quantum, |turn, cap| turn.min(cap.turn_bytes()))
    }

    /// Reserves a departure for up to `bytes`, if there is none, and returns until when to wait for it; `None` if they may leave
    /// now.
    pub(crate) fn depart(&mut self, now_ns: u64, bytes: u64) -> Option<u64> {
        let bytes = bytes.min(self.queue.bytes() as u64);
        self.departure.wait(&self.terms, now_ns, bytes, packets(bytes))
    }

    /// Ends a turn in which `sent_bytes` were handed over.
    pub(crate) fn end_turn(&mut self, now_ns: u64, sent_bytes: u64) {
        if sent_bytes > 0 {
            self.terms.class.counters.sent_bytes.inc_by(sent_bytes);
            self.departure.left(now_ns, sent_bytes, packets(sent_bytes));
        } else if self.queue.is_empty() {
            self.departure.give_back();
        }
        if let Some((writer, _)) = self.writer.take_if(|(_, below)| self.queue.bytes() < *below) {
            writer.wake();
        }
        if self.queue.is_empty() && self.terms.since == Since::Burst {
            self.begun_ns = None;
        }
    }

    /// Gives the stream up: discards the queued bytes and takes no more.
    pub(crate) fn fail(&mut self, error: StreamWriteError) {
        self.error.get_or_insert(error);
        self.queue.clear();
        self.departure.give_back();
        self.wake_all();
    }

    /// Wakes all tasks that wait for the stream.
    pub(crate) fn wake_all(&mut self) {
        let (writer, asking) = (self.writer.take(), self.asks_acknowledged.take());
        for waker in writer.map(|(writer, _)| writer).into_iter().chain(asking) {
            waker.wake();
        }
    }
}
