//! The HTTP side of one UDP tunnel, in either role: payloads in and out, in either form on the wire.
//!
//! The relay joins it to a target's socket, the edge to a local one; probes and load generators use it directly.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::task::waker_ref;
use masque::{
    capsule, datagram,
    h3::{Code, Part},
    tunnel::{Form, TunnelError},
};
use quic::{
    class::Terms,
    datagrams::{self, Flow},
    dispatch::Payloads,
    h3::{Error, RecvStream, Request, SendStream},
    segments::Segments,
    stirred::Stirred,
};

/// How many bytes of payloads from capsules are taken at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// How many payloads from capsules are taken at once: as many as a chunk has of small ones.
const CHUNK_PAYLOADS: usize = 256;

/// The longest DATAGRAM capsule that is kept whole: context ID and the longest UDP payload.
const CAPSULE_BYTES: u16 = datagram::MAX_UDP_PAYLOAD_BYTES as u16 + 8;

/// Why a tunnel ended, unless either side finished it.
#[derive(Debug, thiserror::Error)]
pub enum TunnelEnd {
    /// The request stream or the connection ended.
    #[error(transparent)]
    Http(#[from] Error),
    /// A received payload or capsule broke a rule, which ends the tunnel.
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
    /// The stream ended inside a capsule (RFC 9297 §3.3).
    #[error(transparent)]
    Truncated(#[from] capsule::Truncated),
}

impl TunnelEnd {
    /// Returns the code with which to end the request stream.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Http(Error::Protocol(error)) => error.code(),
            Self::Http(_) => Code::RequestCancelled,
            Self::Tunnel(error) => error.code(),
            Self::Truncated(error) => error.code(),
        }
    }

    /// Whether the peer asked for no more payloads because it has finished the tunnel. What it has sent before may
    /// still arrive: a request to stop does not wait for the stream's other data.
    fn is_finish(&self) -> bool {
        matches!(self, Self::Http(error) if error.reset_code() == Some(Code::NoError.value()))
    }

    /// Whether the peer broke a rule of HTTP/3 or of the tunnel.
    #[must_use]
    pub fn is_violation(&self) -> bool {
        matches!(self, Self::Http(Error::Protocol(_)) | Self::Tunnel(_) | Self::Truncated(_))
    }
}

/// One UDP tunnel whose request was accepted.
pub struct UdpTunnel {
    recv: RecvStream,
    send: SendStream,
    flow: Flow,
    capsules: capsule::Reader,
    /// Bytes read from the stream and not yet parsed.
    unread: Bytes,
    /// How many bytes of payloads may be queued for sending in capsules.
    queue_bytes: usize,
    peer_finished: bool,
    /// Wakes for the request's stream, whose state is behind the lock of its connection in the transport: most payloads
    /// travel in datagrams and need not check it.
    stirred: Arc<Stirred>,
    /// Whether the receiving half may have news.
    recv_stirred: bool,
    /// Whether the sending half may have news.
    send_stirred: bool,
}

impl UdpTunnel {
    /// Joins the parts of an accepted request.
    ///
    /// For `datagrams_allowed` see [`Client::datagrams_allowed`](quic::h3::Client::datagrams_allowed); `queue_bytes`
    /// bounds the queue of payloads to be sent as capsules.
    #[must_use]
    pub fn new(mut request: Request, datagrams_allowed: bool, queue_bytes: usize) -> Self {
        request.recv.set_connect();
        request.send.set_tunnel();
        request.flow.set_datagrams_usable(datagrams_allowed);
        request.flow.admit();
        Self {
            recv: request.recv,
            send: request.send,
            flow: request.flow,
            capsules: capsule::Reader::new(CAPSULE_BYTES),
            unread: Bytes::new(),
            queue_bytes,
            peer_finished: false,
            stirred: Arc::default(),
            recv_stirred: true,
            send_stirred: true,
        }
    }

    /// Notes whether the request's stream has woken the task since the last look; it wakes `cx` from now on.
    fn look(&mut self, cx: &Context<'_>) {
        if self.stirred.take(cx.waker()) {
            (self.recv_stirred, self.send_stirred) = (true, true);
        }
    }

    /// Returns the ID of the request's stream.
    #[must_use]
    pub fn stream_id(&self) -> u64 {
        self.send.id()
    }

    /// Sets whether datagrams may be sent, for a peer whose settings arrived after its request.
    pub fn set_datagrams_usable(&self, usable: bool) {
        self.flow.set_datagrams_usable(usable);
    }

    /// Makes this the relay's end, which follows the form of its client's payloads.
    pub fn follow_peer(&self) {
        self.flow.follow_peer();
    }

    /// Changes the terms on which the tunnel's payloads are sent, in either form.
    pub fn set_terms(&self, terms: &Terms) {
        self.flow.set_terms(terms.clone());
        self.send.set_terms(terms.clone());
    }

    /// Returns the form in which payloads are sent.
    #[must_use]
    pub fn form(&self) -> Form {
        self.flow.form()
    }

    /// Whether payloads for the peer wait for the departure time of their user or class.
    #[must_use]
    pub fn is_delayed(&self) -> bool {
        self.flow.is_delayed()
    }

    /// Returns the counts of its losses, which remain valid after its end.
    #[must_use]
    pub fn losses(&self) -> &Arc<datagrams::Losses> {
        self.flow.losses()
    }

    /// Returns a view of the tunnel for other tasks, which remains valid after its end.
    #[must_use]
    pub fn view(&self) -> datagrams::FlowView {
        self.flow.view()
    }

    /// Moves received payloads into `payloads`, which must be empty. Ready with `false` once the peer has ended the
    /// tunnel properly.
    ///
    /// # Errors
    /// The stream or the connection ended, or the peer broke a rule that ends the tunnel.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, payloads: &mut Segments) -> Poll<Result<bool, TunnelEnd>> {
        if self.flow.poll_recv(cx, payloads)?.is_ready() {
            return Poll::Ready(Ok(true));
        }
        loop {
            while let Some(capsule) = self.capsules.next(&mut self.unread) {
                self.recv.note_capsule();
                if let Some(payload) = self.flow.on_capsule(capsule)? {
                    self.flow.note_overflow(payloads.push(&payload));
                }
                if payloads.bytes() >= CHUNK_BYTES || payloads.len() >= CHUNK_PAYLOADS {
                    return Poll::Ready(Ok(true));
                }
            }
            if !payloads.is_empty() || self.peer_finished {
                return Poll::Ready(Ok(!payloads.is_empty()));
            }
            self.look(cx);
            if !self.recv_stirred {
                return Poll::Pending;
            }
            let polled = self.recv.poll_part(&mut Context::from_waker(&waker_ref(&self.stirred)));
            // There may be more until it returns pending.
            self.recv_stirred = polled.is_ready();
            match ready!(polled)? {
                Some(Part::Data(bytes)) => self.unread = bytes,
                Some(_) => {}
                None => {
                    self.capsules.finish()?;
                    self.peer_finished = true;
                }
            }
        }
    }

    /// Begins a batch of UDP payloads for the peer, in `form` or, if that is `None`, in the tunnel's current form.
    #[must_use]
    pub fn batch(&mut self, form: Option<Form>) -> PayloadBatch<'_> {
        match form.unwrap_or_else(|| self.flow.form()) {
            Form::Datagram => PayloadBatch::Datagrams(self.flow.batch()),
            Form::Capsule => PayloadBatch::Capsules(self.send.payloads(self.queue_bytes, self.flow.losses())),
        }
    }

    /// Ready when no capsule waits to be sent.
    ///
    /// # Errors
    /// The peer stopped reading, or the connection ended.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TunnelEnd>> {
        // The stream now wakes the last caller.
        self.send_stirred = true;
        self.send.poll_flush(cx).map_err(TunnelEnd::from)
    }

    /// Registers to be woken when capsules can no longer be sent.
    ///
    /// # Errors
    /// The peer stopped reading, or the connection ended. A peer that stops reading because it has finished is no error: its last payloads
    /// and the end of its stream follow.
    pub fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), TunnelEnd> {
        self.look(cx);
        if !std::mem::take(&mut self.send_stirred) {
            return Ok(());
        }
        let stopped = self.send.poll_stopped(&mut Context::from_waker(&waker_ref(&self.stirred)));
        stopped.map_err(TunnelEnd::from).or_else(|end| if end.is_finish() { Ok(()) } else { Err(end) })
    }

    /// Ends our side properly, after the waiting capsules.
    pub fn finish(mut self) {
        self.send.finish();
        self.recv.stop(Code::NoError);
    }

    /// As [`finish`](Self::finish). If capsules wait, or the response itself, waits for at most `limit` until the peer has acknowledged
    /// them, and then resets the stream: a peer that allows no bytes would keep them in memory until its connection ends. Time in which a
    /// rate holds its bytes back does not count.
    pub async fn finish_within(self, limit: Duration) {
        let Self { mut send, recv, flow, .. } = self;
        recv.stop(Code::NoError);
        drop(flow);
        match send.unsent_bytes() {
            0 => send.finish(),
            _ => send.finish_within(limit).await,
        }
    }

    /// Ends the tunnel abruptly.
    pub fn reset(self, code: Code) {
        self.send.reset(code);
        self.recv.stop(code);
    }
}

/// Payloads to be queued on a tunnel.
pub enum PayloadBatch<'a> {
    /// They are sent in DATAGRAM frames.
    Datagrams(datagrams::DatagramBatch<'a>),
    /// They are sent in capsules.
    Capsules(Payloads<'a>),
}

impl PayloadBatch<'_> {
    /// Queues a copy of `payload`; if the queue is full, the oldest payloads make room and are counted.
    pub fn push(&mut self, payload: &[u8]) {
        match self {
            Self::Datagrams(batch) => batch.push(payload),
            Self::Capsules(queue) => queue.push(payload),
        }
    }

    /// Returns the form in which its payloads leave.
    #[must_use]
    pub fn form(&self) -> Form {
        match self {
            Self::Datagrams(_) => Form::Datagram,
            Self::Capsules(_) => Form::Capsule,
        }
    }
}
