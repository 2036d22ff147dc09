//! HTTP/3 on s2n-quic: feeds [`masque::h3`] with what arrives and carries out its verdicts.
//!
//! One task polls [`Connection::next`], which drives everything that belongs to the connection as a whole: control and
//! QPACK streams, settings, GOAWAY, and requests as they arrive. Each request is then read and written by whoever
//! holds its [`RecvStream`] and [`SendStream`].
//!
//! No clock and no task is started here, so that the same code runs over s2n-quic's simulated network.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use masque::{
    h3::{
        self, Code, Control, ControlEvent, Part, RequestHead, RequestStream, ResponseHead, Role, Settings, UniStream,
        UniVerdict,
    },
    priority::Priority,
};
use s2n_quic::{
    connection::{BidirectionalStreamAcceptor, Handle, ReceiveStreamAcceptor},
    stream,
};
use tokio::sync::Notify;

use super::{
    class::Terms,
    datagrams::{Flow, Hub, Sender},
    dispatch::{self, Dispatcher, Payloads},
};

/// Why a connection or a stream came to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The peer broke a rule. Where that ends the connection, it is closed already; where it ends the stream, whoever
    /// holds the stream still has to answer or reset it.
    #[error(transparent)]
    Protocol(#[from] h3::Error),
    /// The connection was closed without an error.
    #[error("connection closed")]
    Closed,
    /// The connection is gone.
    #[error("{}", connection_reason(.0))]
    Connection(s2n_quic::connection::Error),
    /// The peer ended the stream.
    #[error("{}", stream_reason(.0))]
    Stream(stream::Error),
    /// We ended the stream.
    #[error(transparent)]
    Ended(dispatch::Error),
    /// The peer goes away and takes no more requests (RFC 9114 §5.2).
    #[error("the peer is going away")]
    GoingAway,
}

/// Closes the connection with an HTTP/3 error code.
fn close(handle: &Handle, code: Code) {
    handle.close(application_code(code));
}

impl From<s2n_quic::connection::Error> for Error {
    fn from(error: s2n_quic::connection::Error) -> Self {
        Self::Connection(error)
    }
}

impl From<stream::Error> for Error {
    fn from(error: stream::Error) -> Self {
        Self::Stream(error)
    }
}

impl From<dispatch::Error> for Error {
    fn from(error: dispatch::Error) -> Self {
        match error {
            dispatch::Error::Stream(error) => Self::Stream(error),
            dispatch::Error::Expired | dispatch::Error::Cancelled => Self::Ended(error),
        }
    }
}

/// Says in HTTP/3's words why a stream ended.
fn stream_reason(error: &stream::Error) -> String {
    match error {
        stream::Error::StreamReset { error, .. } => {
            format!("the peer ended the stream with {}", code_name((*error).into()))
        }
        stream::Error::ConnectionError { error, .. } => connection_reason(error),
        error => error.to_string(),
    }
}

/// Says in HTTP/3's words why a connection ended.
fn connection_reason(error: &s2n_quic::connection::Error) -> String {
    use s2n_quic::connection::Error as Reason;
    match error {
        Reason::Application { error, .. } => format!("connection closed with {}", code_name((*error).into())),
        Reason::IdleTimerExpired { .. } => "the peer has gone silent".to_owned(),
        Reason::StatelessReset { .. } => "the peer does not know the connection any more".to_owned(),
        error => error.to_string(),
    }
}

fn code_name(value: u64) -> String {
    Code::from_value(value).map_or_else(|| format!("error code {value:#x}"), |code| code.name().to_owned())
}

fn application_code(code: Code) -> s2n_quic::application::Error {
    // Codes are far below 2^62.
    s2n_quic::application::Error::new(code.value()).unwrap_or(s2n_quic::application::Error::UNKNOWN)
}

/// A HTTP/3 connection, as seen by the one task that drives it.
pub struct Connection {
    role: Role,
    requests: BidirectionalStreamAcceptor,
    unidirectional: ReceiveStreamAcceptor,
    peer_streams: Vec<(stream::ReceiveStream, UniStream)>,
    control: Control,
    control_stream: stream::SendStream,
    control_queue: VecDeque<Bytes>,
    client: Client,
    /// The lowest request stream ID that was not accepted yet.
    next_request: u64,
    goaway: Option<u64>,
    /// Priorities of requests that have not arrived, the oldest first.
    early_signals: VecDeque<(u64, Priority)>,
}

/// How many priorities are remembered for requests that have not arrived.
const EARLY_SIGNALS: usize = 64;

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

/// A request as it arrives at a server. Its head is still to be read from `recv`.
pub struct Request {
    /// The stream's ID.
    pub stream_id: u64,
    /// The receiving half.
    pub recv: RecvStream,
    /// The sending half.
    pub send: SendStream,
    /// The datagrams that belong to the request.
    pub flow: Flow,
    /// Where the peer wanted the request to be moved before it arrived; this wins over its `priority` field (RFC 9218
    /// §7).
    pub signal: Option<Priority>,
}

impl Request {
    /// Changes the terms on which what answers the request leaves, in streams and in datagrams.
    pub fn set_terms(&self, terms: &Terms) {
        self.flow.set_terms(terms.clone());
        self.send.set_terms(terms.clone());
    }
}

/// What the tasks of one connection share; opens requests in the client role.
#[derive(Clone)]
pub struct Client {
    handle: Handle,
    hub: Arc<Hub>,
    dispatcher: Dispatcher,
    peer: Arc<Peer>,
    limits: MessageLimits,
}

struct Peer {
    settings: OnceLock<Settings>,
    changed: Notify,
    /// Request streams from this ID on are not processed by the peer.
    goaway: AtomicU64,
}

impl Connection {
    /// Takes over a QUIC connection whose handshake is complete and opens the control stream.
    ///
    /// # Errors
    /// The connection ended, or was not made by an endpoint with paced's datagram provider.
    pub async fn start(connection: s2n_quic::Connection, role: Role, limits: MessageLimits) -> Result<Self, Error> {
        let (mut handle, acceptor) = connection.split();
        let (requests, unidirectional) = acceptor.split();
        let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub());
        let hub = hub.map_err(|_| Error::Closed)?;
        let dispatcher = Dispatcher::of(&mut handle).map_err(|_| Error::Closed)?;
        let local = Settings {
            max_field_section_size: Some(limits.field_section_bytes),
            enable_connect_protocol: role == Role::Server,
            h3_datagram: true,
        };
        let control = Control::new(role, local);
        let control_stream = handle.open_send_stream().await?;
        let control_queue = VecDeque::from([control.preamble()]);
        let peer =
            Arc::new(Peer { settings: OnceLock::new(), changed: Notify::new(), goaway: AtomicU64::new(u64::MAX) });
        Ok(Self {
            role,
            requests,
            unidirectional,
            peer_streams: Vec::new(),
            control,
            control_stream,
            control_queue,
            client: Client { handle, hub, dispatcher, peer, limits },
            next_request: 0,
            goaway: None,
            early_signals: VecDeque::new(),
        })
    }

    /// What tasks of this connection share.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Drives the connection until the next request arrives (server), or until it ends.
    ///
    /// # Errors
    /// The connection ended, by either side.
    pub async fn next(&mut self) -> Result<Request, Error> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`Connection::next`], for callers that have other things to poll too.
    ///
    /// # Errors
    /// The connection ended, by either side.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Request, Error>> {
        let polled = self.poll_all(cx);
        // Last, so that what was just decided is in order; and even if the connection is over, which streams learn so.
        self.client.dispatcher.poll(cx);
        if let Poll::Ready(Err(error)) = &polled {
            if let Error::Protocol(error) = error {
                // On control streams every error is one of the connection.
                close(&self.client.handle, error.code());
            }
            // Whoever waits for settings must learn that they will not come.
            self.client.peer.goaway.store(0, Relaxed);
            self.client.peer.changed.notify_waiters();
        }
        polled
    }

    /// Announces that no further request will be accepted (RFC 9114 §5.2); those that arrive all the same are
    /// rejected, which tells the client that it may repeat them elsewhere.
    pub fn go_away(&mut self) {
        if self.goaway.is_none() {
            self.goaway = Some(self.next_request);
            self.control_queue.push_back(Control::goaway(self.next_request));
        }
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<Result<Request, Error>> {
        if self.client.hub.poll_violation(cx).is_ready() {
            let error = h3::Error::Connection(Code::DatagramError, "a datagram of a stream that cannot exist");
            return Poll::Ready(Err(error.into()));
        }
        self.poll_control_queue(cx)?;
        while let Poll::Ready(accepted) = self.unidirectional.poll_accept_receive_stream(cx)? {
            match accepted {
                Some(stream) => self.peer_streams.push((stream, self.control.accept_uni())),
                None => return Poll::Ready(Err(Error::Closed)),
            }
        }
        self.poll_peer_streams(cx)?;
        loop {
            let Some(stream) = ready!(self.requests.poll_accept_bidirectional_stream(cx)?) else {
                return Poll::Ready(Err(Error::Closed));
            };
            if self.role == Role::Client {
                return Poll::Ready(Err(h3::SERVER_OPENED_BIDIRECTIONAL.into()));
            }
            let stream_id = stream.id();
            let flow = self.client.hub.open(stream_id);
            let (recv, send) = self.client.split(stream, Role::Server);
            if self.goaway.is_some_and(|limit| stream_id >= limit) {
                recv.stop(Code::RequestRejected);
                send.reset(Code::RequestRejected);
                continue;
            }
            self.next_request = self.next_request.max(stream_id + 4);
            let signal = self.take_early_signal(stream_id);
            return Poll::Ready(Ok(Request { stream_id, recv, send, flow, signal }));
        }
    }

    /// Moves a stream, or remembers where it is to be moved: an update may overtake its request (RFC 9218 §7).
    fn on_priority_update(&mut self, stream_id: u64, value: &[u8]) {
        let Some(signal) = Priority::parse(value) else { return };
        if stream_id < self.next_request {
            self.client.hub.signal(stream_id, &signal);
            self.client.dispatcher.signal(stream_id, &signal);
            return;
        }
        self.early_signals.retain(|(early, _)| *early != stream_id);
        if self.early_signals.len() == EARLY_SIGNALS {
            self.early_signals.pop_front();
        }
        self.early_signals.push_back((stream_id, signal));
    }

    fn take_early_signal(&mut self, stream_id: u64) -> Option<Priority> {
        let place = self.early_signals.iter().position(|(early, _)| *early == stream_id)?;
        self.early_signals.remove(place).map(|(_, signal)| signal)
    }

    fn poll_control_queue(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        while let Some(front) = self.control_queue.front_mut() {
            match self.control_stream.poll_send(front, cx) {
                Poll::Pending => break,
                Poll::Ready(Ok(())) => _ = self.control_queue.pop_front(),
                Poll::Ready(Err(stream::Error::StreamReset { .. })) => {
                    return Err(h3::CONTROL_STREAM_STOPPED.into());
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn poll_peer_streams(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let mut index = 0;
        while let Some((stream, state)) = self.peer_streams.get_mut(index) {
            let verdict = match stream.poll_receive(cx) {
                Poll::Pending => {
                    index += 1;
                    continue;
                }
                Poll::Ready(Ok(Some(bytes))) => self.control.on_uni_bytes(state, bytes),
                Poll::Ready(Ok(None) | Err(stream::Error::StreamReset { .. })) => {
                    self.control.on_uni_closed(state)?;
                    self.peer_streams.swap_remove(index);
                    continue;
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
            };
            match verdict? {
                UniVerdict::Continue => {}
                UniVerdict::StopSending(code) => {
                    _ = stream.stop_sending(application_code(code));
                    self.peer_streams.swap_remove(index);
                }
            }
        }
        while let Some(event) = self.control.next_event() {
            match event {
                ControlEvent::Settings(settings) => {
                    _ = self.client.peer.settings.set(settings);
                    self.client.peer.changed.notify_waiters();
                }
                ControlEvent::GoAway(id) => {
                    self.client.peer.goaway.store(id, Relaxed);
                    self.client.peer.changed.notify_waiters();
                }
                ControlEvent::PriorityUpdate { stream_id, value } => self.on_priority_update(stream_id, &value),
            }
        }
        Ok(())
    }
}

impl Client {
    /// The QUIC connection.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Closes the connection with an error code; `NoError` where nothing is wrong (RFC 9114 §5.3).
    pub fn close(&self, code: Code) {
        close(&self.handle, code);
    }

    /// The peer's settings, once they have arrived.
    #[must_use]
    pub fn settings(&self) -> Option<&Settings> {
        self.peer.settings.get()
    }

    /// Waits for the peer's settings, which have to be known before extended CONNECT and datagrams may be used
    /// (RFC 8441 §3, RFC 9297 §2.1.1).
    ///
    /// # Errors
    /// The connection ended first.
    pub async fn wait_for_settings(&self) -> Result<&Settings, Error> {
        loop {
            let changed = self.peer.changed.notified();
            if let Some(settings) = self.peer.settings.get() {
                return Ok(settings);
            }
            if self.peer.goaway.load(Relaxed) == 0 {
                return Err(Error::GoingAway);
            }
            changed.await;
        }
    }

    /// Whether the peer still takes new requests.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.peer.goaway.load(Relaxed) == u64::MAX
    }

    /// Whether HTTP Datagrams may be sent in DATAGRAM frames: the transport allows it and the peer has said so
    /// (RFC 9297 §2.1.1).
    #[must_use]
    pub fn datagrams_allowed(&self) -> bool {
        self.hub.peer_accepts() && self.settings().is_some_and(|settings| settings.h3_datagram)
    }

    /// Opens a request stream and sends the request's head.
    ///
    /// # Errors
    /// The connection ended, the peer goes away, or the head exceeds what the peer accepts.
    pub async fn request(&self, head: &RequestHead) -> Result<Request, Error> {
        if !self.takes_requests() {
            return Err(Error::GoingAway);
        }
        let max = self.settings().and_then(|settings| settings.max_field_section_size);
        let head = h3::encode_request(head, max)?;
        let stream = self.handle.clone().open_bidirectional_stream().await?;
        let stream_id = stream.id();
        let flow = self.hub.open(stream_id);
        let (recv, mut send) = self.split(stream, Role::Client);
        send.stream.push(head);
        Ok(Request { stream_id, recv, send, flow, signal: None })
    }

    fn split(&self, stream: stream::BidirectionalStream, role: Role) -> (RecvStream, SendStream) {
        let (recv, send) = stream.split();
        let parser = RequestStream::new(role, self.limits.field_section_bytes);
        let send = self.dispatcher.attach(send, self.hub.terms().clone());
        (RecvStream { stream: recv, parser, finished: false }, SendStream { stream: send, peer: self.peer.clone() })
    }
}

/// The receiving half of a request stream.
pub struct RecvStream {
    stream: stream::ReceiveStream,
    parser: RequestStream,
    finished: bool,
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
            match ready!(self.stream.poll_receive(cx))? {
                Some(bytes) => self.parser.on_bytes(bytes),
                None => {
                    self.finished = true;
                    if let Err(error) = self.parser.on_fin() {
                        return Poll::Ready(Err(self.refuse(error)));
                    }
                }
            }
        }
    }

    /// Closes the connection where the error demands it.
    fn refuse(&self, error: h3::Error) -> Error {
        if let h3::Error::Connection(code, _) = error {
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

    /// From here on only DATA frames are allowed (RFC 9114 §4.4).
    pub fn set_connect(&mut self) {
        self.parser.set_connect();
    }

    /// Asks the peer to stop sending.
    pub fn stop(mut self, code: Code) {
        _ = self.stream.stop_sending(application_code(code));
    }
}

/// The sending half of a request stream. What is written waits for its turn (see [`dispatch`]).
pub struct SendStream {
    stream: dispatch::SendStream,
    peer: Arc<Peer>,
}

impl SendStream {
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

    /// Begins a batch of payloads that leave in capsules (see [`dispatch::SendStream::payloads`]).
    #[must_use]
    pub fn payloads(&mut self, limit_bytes: usize) -> Payloads<'_> {
        self.stream.payloads(limit_bytes)
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

    /// Asks to be woken when the stream takes no more bytes.
    ///
    /// # Errors
    /// As [`SendStream::poll_ready`].
    pub fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.stream.poll_stopped(cx).map_err(Error::from)
    }

    /// Changes the terms on which the stream is served, at once.
    pub fn set_terms(&self, terms: Terms) {
        self.stream.set_terms(terms);
    }

    /// Ends the message properly.
    pub fn finish(&mut self) {
        self.stream.finish();
    }

    /// Ends the stream abruptly.
    pub fn reset(self, code: Code) {
        self.stream.reset(application_code(code));
    }
}
