//! The two halves of a request stream, and the bounds on the messages that they carry.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use admission::strangers::{ClientStanding, StreamFrames};
use bytes::Bytes;
use masque::h3::{self, Code, Part, RequestStream, ResponseHead};
use s2n_quic::stream;

use super::{
    error::{Error, application_code, close},
    peer::Peer,
};
use crate::{
    backlog::Losses,
    class::Terms,
    dispatch::{self, Ahead, Payloads},
    events::frames_clock,
};

/// Bounds on what a peer may make us hold for one message.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    /// The largest header section, as RFC 9114 §4.2.2 counts it.
    pub field_section_bytes: u64,
}

impl Default for MessageLimits {
    fn default() -> Self {
        Self { field_section_bytes: 16 * 1024 }
    }
}

/// The receiving half of a request stream. Dropping it before its end asks the peer to stop sending.
pub struct RecvStream {
    pub(super) stream: stream::ReceiveStream,
    pub(super) parser: RequestStream,
    /// The frames and capsules in the bytes that were read.
    pub(super) frames: StreamFrames,
    pub(super) standing: ClientStanding,
    /// Whether the peer's last byte was read, or the peer was asked to stop.
    pub(super) finished: bool,
}

impl RecvStream {
    /// Reads the next part of the message; `None` at its end.
    ///
    /// # Errors
    /// The stream or the connection ended, or the peer broke a rule (see [`Error::Protocol`]).
    pub fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Part>, Error>> {
        loop {
            match self.parser.next_part() {
                Ok(Some(part)) => return Poll::Ready(Ok(Some(part))),
                Ok(None) if self.finished => return Poll::Ready(Ok(None)),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(self.refuse(error))),
            }
            self.frames.add(self.parser.take_frames());
            if self.frames.settle(&self.standing, frames_clock) {
                // The task that drives the connection was woken before, and ends it. Reading on would first process all that has arrived.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            match ready!(self.stream.poll_receive(cx))? {
                Some(bytes) => {
                    self.frames.on_read(bytes.len());
                    self.parser.on_bytes(bytes);
                }
                None => {
                    self.finished = true;
                    if let Err(error) = self.parser.on_fin() {
                        return Poll::Ready(Err(self.refuse(error)));
                    }
                }
            }
        }
    }

    /// Closes the connection if the error requires it.
    fn refuse(&self, error: h3::ProtocolError) -> Error {
        if let h3::ProtocolError::Connection(code, _) = error {
            close(&self.stream.connection(), code);
        }
        error.into()
    }

    /// As [`RecvStream::poll_part`].
    ///
    /// # Errors
    /// As [`RecvStream::poll_part`].
    pub async fn part(&mut self) -> Result<Option<Part>, Error> {
        poll_fn(|cx| self.poll_part(cx)).await
    }

    /// Notes that the content contained a capsule. Capsules count as frames do, against what the peer's user may send (see
    /// [`StreamFrames`]).
    #[inline]
    pub fn note_capsule(&mut self) {
        self.frames.add(1);
    }

    /// Allows only DATA frames from now on (RFC 9114 §4.4).
    pub fn set_connect(&mut self) {
        self.parser.set_connect();
    }

    /// Asks the peer to stop sending.
    pub fn stop(mut self, code: Code) {
        _ = self.stream.stop_sending(application_code(code));
        self.finished = true;
    }
}

impl Drop for RecvStream {
    fn drop(&mut self) {
        if !self.finished {
            // The transport would send code 0, which is none of HTTP/3's (RFC 9114 §8.1).
            _ = self.stream.stop_sending(application_code(Code::RequestCancelled));
        }
    }
}

/// The sending half of a request stream. Bytes that are written wait for their turn (see [`dispatch`]).
pub struct SendStream {
    pub(super) stream: dispatch::ScheduledSendStream,
    pub(super) peer: Arc<Peer>,
}

impl SendStream {
    /// Returns the stream's ID.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.stream.id()
    }

    /// Queues the head of a response.
    ///
    /// # Errors
    /// The stream or the connection ended, or the head exceeds what the peer accepts.
    pub async fn respond(&mut self, head: &ResponseHead) -> Result<(), Error> {
        let max = self.peer.settings.get().and_then(|settings| settings.max_field_section_size);
        let bytes = h3::encode_response(head, max)?;
        Ok(self.stream.send(bytes).await?)
    }

    /// Queues `bytes`, which have to be whole frames, however full the queue is.
    pub fn push(&mut self, bytes: Bytes) {
        self.stream.push(bytes);
    }

    /// Queues `bytes`, which have to be whole frames, as soon as there is room.
    ///
    /// # Errors
    /// As [`SendStream::poll_ready`].
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), Error> {
        Ok(self.stream.send(bytes).await?)
    }

    /// Begins a batch of payloads that leave in capsules (see [`dispatch::ScheduledSendStream::payloads`]).
    #[must_use]
    pub fn payloads<'a>(&'a mut self, limit_bytes: usize, losses: &'a Arc<Losses>) -> Payloads<'a> {
        self.stream.payloads(limit_bytes, losses)
    }

    /// Notes that the request is for a UDP tunnel, so that no deadline resets the stream, not even while the response waits.
    pub fn set_tunnel(&mut self) {
        self.stream.set_tunnel();
    }

    /// Ready when the stream's queue has room; pending while it is full.
    ///
    /// # Errors
    /// The peer stopped reading, the connection ended, or the stream's deadline passed.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.stream.poll_ready(cx).map_err(Error::from)
    }

    /// Ready when nothing waits for its turn.
    ///
    /// # Errors
    /// As [`SendStream::poll_ready`].
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.stream.poll_flush(cx).map_err(Error::from)
    }

    /// Ready when the peer has acknowledged everything that was written.
    ///
    /// # Errors
    /// As [`SendStream::poll_ready`].
    pub fn poll_acknowledged(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.stream.poll_acknowledged(cx).map_err(Error::from)
    }

    /// Returns how many queued bytes have not been sent yet; 0 once the stream has ended.
    #[must_use]
    pub fn unsent_bytes(&self) -> u64 {
        self.stream.unsent_bytes()
    }

    /// Asks to be woken when the stream takes no more bytes.
    ///
    /// # Errors
    /// As [`SendStream::poll_ready`].
    pub fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.stream.poll_stopped(cx).map_err(Error::from)
    }

    /// Returns what would leave before a byte that is queued now, and how fast.
    #[must_use]
    pub fn ahead(&self) -> Ahead {
        self.stream.ahead()
    }

    /// Changes the terms on which the stream is served, at once.
    pub fn set_terms(&self, terms: Terms) {
        self.stream.set_terms(terms);
    }

    /// As [`SendStream::set_terms`], with terms that depend on the current ones.
    pub fn change_terms(&self, change: impl FnOnce(&Terms) -> Terms) {
        self.stream.change_terms(change);
    }

    /// Ends the message properly.
    pub fn finish(&mut self) {
        self.stream.finish();
    }

    /// Ends the message properly and waits for at most `limit` until the peer has acknowledged all of it. Time in which a rate holds its
    /// bytes back does not count (see [`dispatch::ScheduledSendStream::finish_within`]).
    pub async fn finish_within(self, limit: Duration) {
        self.stream.finish_within(limit).await;
    }

    /// Ends the stream abruptly.
    pub fn reset(self, code: Code) {
        self.stream.reset(application_code(code));
    }
}
