//! HTTP/3 on s2n-quic: feeds [`masque::h3`] with the bytes that arrive and carries out its verdicts.
//!
//! One task polls [`HttpConnection::next`], which drives everything that belongs to the connection as a whole: control and
//! QPACK streams, settings, GOAWAY, and requests as they arrive. Each request is then read and written by the code that
//! holds its [`RecvStream`] and [`SendStream`].
//!
//! No task is started here, and only `events` has a clock, so that the same code runs over s2n-quic's simulated network.

mod client;
mod error;
mod message;
mod peer;
mod request;
mod signal;

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use admission::{
    stopped::StoppedReaders,
    strangers::{ClientStanding, FRAMES_PER_SECOND, Limit, StreamFrames},
    uploads::Uploads,
};
use bytes::Bytes;
use futures::task::{AtomicWaker, waker_ref};
use masque::{
    h3::{self, Code, ControlEvent, ControlReceiver, Role, Settings, UniStream, UniVerdict},
    priority::Priority,
};
use parking_lot::Mutex;
use s2n_quic::{
    connection::{BidirectionalStreamAcceptor, ReceiveStreamAcceptor},
    stream,
};
use tokio::sync::Notify;

pub use self::{
    client::{Client, Reserved},
    error::{Error, close, connection_reason, refused_by_tls},
    message::{MessageLimits, RecvStream, SendStream},
    request::Request,
};
use self::{error::application_code, peer::Peer, signal::Signals};
use super::{
    datagrams::Sender,
    dispatch::{Dispatcher, Driver},
    events::{ConnectionState, frames_clock},
    flow_control::stream_windows,
    stirred::Stirred,
};

/// The name under which forgotten priorities of streams are counted.
const PRIORITY_UPDATES: Limit = "priority_updates";

/// A HTTP/3 connection, as seen by the one task that drives it.
pub struct HttpConnection {
    role: Role,
    requests: BidirectionalStreamAcceptor,
    unidirectional: ReceiveStreamAcceptor,
    peer_streams: Vec<(stream::ReceiveStream, UniStream)>,
    control: ControlReceiver,
    /// The frames on the peer's control stream.
    control_frames: StreamFrames,
    control_stream: stream::SendStream,
    control_queue: VecDeque<Bytes>,
    driver: Driver,
    client: Client,
    /// The lowest request stream ID that was not accepted yet.
    next_request: u64,
    goaway: Option<u64>,
    /// Priorities of requests that have not arrived.
    early_signals: Signals,
    /// Whether anything but the driver may have something to do: each check takes the transport's lock several times.
    stirred: Arc<Stirred>,
}

impl HttpConnection {
    /// Takes over a QUIC connection whose handshake is complete and opens the control stream.
    ///
    /// # Errors
    /// The connection ended, or was not made by an endpoint with paced's datagram provider.
    pub async fn start(connection: s2n_quic::Connection, role: Role, limits: MessageLimits) -> Result<Self, Error> {
        let (mut handle, acceptor) = connection.split();
        let (requests, unidirectional) = acceptor.split();
        let hub = handle.datagram_mut(|sender: &mut Sender| sender.hub());
        let hub = hub.map_err(|_| Error::Closed)?;
        let (dispatcher, driver) = Dispatcher::of(&mut handle).map_err(|_| Error::Closed)?;
        let standing = |state: &ConnectionState| state.standing.clone();
        let standing = handle.query_event_context(standing).map_err(|_| Error::Closed)?;
        let control = ControlReceiver::new(role, Settings::announced_by(role, limits.field_section_bytes));
        // The peer may never give credit for this stream.
        let opened = poll_fn(|cx| match standing.poll_exceeded(cx) {
            Poll::Ready(limit) => Poll::Ready(Err(excess(&standing, limit).into())),
            Poll::Pending => handle.poll_open_send_stream(cx).map_err(Error::from),
        });
        let control_stream = opened.await.inspect_err(|error| {
            if let Error::Protocol(error) = error {
                close(&handle, error.code());
            }
        })?;
        let control_queue = VecDeque::from([control.preamble()]);
        let readers = match role {
            Role::Server => StoppedReaders::at_relay,
            Role::Client => StoppedReaders::at_edge,
        };
        let peer = Arc::new(Peer {
            settings: OnceLock::new(),
            changed: Notify::new(),
            goaway: AtomicU64::new(u64::MAX),
            ended: OnceLock::new(),
            signals: Mutex::default(),
            signalled: AtomicWaker::new(),
        });
        Ok(Self {
            role,
            requests,
            unidirectional,
            peer_streams: Vec::new(),
            control,
            control_frames: StreamFrames::default(),
            control_stream,
            control_queue,
            driver,
            client: Client {
                opener: Arc::new(tokio::sync::Mutex::new(handle.clone())),
                handle,
                hub,
                dispatcher,
                peer,
                standing,
                limits,
                stopped_readers: readers(stream_windows(role)),
                uploads: matches!(role, Role::Client).then(|| Uploads::new(stream_windows(Role::Server))),
            },
            next_request: 0,
            goaway: None,
            early_signals: Signals::default(),
            stirred: Arc::default(),
        })
    }

    /// Returns the handle that the tasks of this connection share.
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

    /// As [`HttpConnection::next`], for callers that have other things to poll too.
    ///
    /// # Errors
    /// The connection ended, by either side.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Request, Error>> {
        let polled = match self.stirred.take(cx.waker()) {
            true => self.poll_all(&mut Context::from_waker(&waker_ref(&self.stirred.clone()))),
            false => Poll::Pending,
        };
        if polled.is_ready() {
            // There may be more.
            self.stirred.set();
        }
        // Poll the driver last, so that it acts on the decisions above. Poll it even after the connection is over, so that streams learn of
        // the end.
        self.driver.poll(cx);
        if let Poll::Ready(Err(error)) = &polled {
            if let Error::Protocol(error) = error {
                // On control streams, every error is a connection error.
                close(&self.client.handle, error.code());
            }
            // A task that waits for settings or a stream must learn that they will not come, and why. The first reason counts.
            _ = self.client.peer.ended.set(error.clone());
            self.client.peer.goaway.store(0, Relaxed);
            self.client.peer.changed.notify_waiters();
        }
        polled
    }

    /// Announces that no further request will be accepted (RFC 9114 §5.2); requests that arrive anyway are rejected, which tells the client
    /// that it may repeat them elsewhere.
    pub fn go_away(&mut self) {
        if self.goaway.is_none() {
            self.goaway = Some(self.next_request);
            self.control_queue.push_back(ControlReceiver::goaway(self.next_request));
            self.stirred.set();
        }
    }

    /// As [`HttpConnection::go_away`]; then drives the connection until the peer has received the announcement, which closing the
    /// connection would discard. Call it when no accepted request is open.
    ///
    /// # Errors
    /// The connection ended, by either side.
    pub async fn depart(&mut self) -> Result<(), Error> {
        self.go_away();
        poll_fn(|cx| {
            // Later requests are rejected, so none arrives.
            while let Poll::Ready(request) = self.poll_next(cx) {
                drop(request?);
            }
            if self.control_queue.is_empty() {
                self.control_stream.poll_flush(cx).map_err(Error::from)
            } else {
                Poll::Pending
            }
        })
        .await
    }

    /// Returns why the transport accepts no more streams. Its acceptors do not say whether the peer closed the connection or fell silent.
    fn why_over(&mut self) -> Error {
        match self.client.handle.ping() {
            Err(silence @ s2n_quic::connection::Error::IdleTimerExpired { .. }) => Error::Connection(silence),
            Ok(()) | Err(_) => Error::Closed,
        }
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<Result<Request, Error>> {
        if let Poll::Ready(error) = self.client.hub.poll_violation(cx) {
            return Poll::Ready(Err(h3::ProtocolError::from(error).into()));
        }
        if let Poll::Ready(limit) = self.client.standing.poll_exceeded(cx) {
            return Poll::Ready(Err(excess(&self.client.standing, limit).into()));
        }
        self.poll_control_queue(cx)?;
        while let Poll::Ready(accepted) = self.unidirectional.poll_accept_receive_stream(cx)? {
            match accepted {
                Some(stream) => self.peer_streams.push((stream, self.control.accept_uni())),
                None => return Poll::Ready(Err(self.why_over())),
            }
        }
        self.poll_peer_streams(cx)?;
        loop {
            let Some(stream) = ready!(self.requests.poll_accept_bidirectional_stream(cx)?) else {
                return Poll::Ready(Err(self.why_over()));
            };
            if self.role == Role::Client {
                return Poll::Ready(Err(h3::SERVER_OPENED_BIDIRECTIONAL.into()));
            }
            let stream_id = stream.id();
            let flow = self.client.hub.open(stream_id);
            let (recv, send) = self.client.split(stream, Role::Server);
            if self.goaway.is_some_and(|limit| stream_id >= limit) {
                self.client.reject(stream_id, recv, send);
                continue;
            }
            self.next_request = self.next_request.max(stream_id + 4);
            let signal = self.early_signals.take(stream_id);
            let Some(waiting) = self.client.standing.begin_request() else {
                self.client.standing.count("stranger_requests");
                self.client.reject(stream_id, recv, send);
                continue;
            };
            return Poll::Ready(Ok(Request { stream_id, recv, send, flow, signal, waiting: Some(waiting) }));
        }
    }

    /// Changes a stream's priority, or remembers it: an update may overtake its request (RFC 9218 §7).
    fn on_priority_update(&mut self, stream_id: u64, value: &[u8]) {
        let Some(signal) = Priority::parse(value) else { return };
        if stream_id < self.next_request {
            self.client.change_terms(stream_id, |terms| terms.moved(&signal));
            return;
        }
        if self.early_signals.put(stream_id, signal) {
            self.client.standing.count(PRIORITY_UPDATES);
        }
    }

    fn poll_control_queue(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.client.peer.signalled.register(cx.waker());
        loop {
            let Some(front) = self.control_queue.front_mut() else {
                // Not earlier: until an update is sent, a newer priority of its stream replaces it.
                let Some((stream_id, signal)) = self.client.peer.signals().pop() else {
                    // The transport wakes nobody if the peer stops a stream on which nothing waits; the next thing that wakes this task
                    // shows it. Other ends are those of the connection, about which the acceptors say more.
                    return match self.control_stream.poll_send_ready(cx) {
                        Poll::Ready(Err(stream::Error::StreamReset { .. })) => Err(h3::CONTROL_STREAM_STOPPED.into()),
                        _ => Ok(()),
                    };
                };
                self.control_queue
                    .push_back(ControlReceiver::priority_update(stream_id, signal.to_field_value().as_bytes()));
                continue;
            };
            match self.control_stream.poll_send(front, cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(())) => _ = self.control_queue.pop_front(),
                Poll::Ready(Err(stream::Error::StreamReset { .. })) => {
                    return Err(h3::CONTROL_STREAM_STOPPED.into());
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
    }

    fn poll_peer_streams(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let mut index = 0;
        while let Some((stream, state)) = self.peer_streams.get_mut(index) {
            let verdict = match stream.poll_receive(cx) {
                Poll::Pending => {
                    index += 1;
                    continue;
                }
                Poll::Ready(Ok(Some(bytes))) => {
                    self.control_frames.on_read(bytes.len());
                    let verdict = self.control.on_uni_bytes(state, bytes);
                    self.control_frames.add(self.control.take_frames());
                    // If they are too many, the next turn ends the connection. The stream's small window bounds the frames before that.
                    self.control_frames.settle(&self.client.standing, frames_clock);
                    verdict
                }
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
        for _ in 0..self.control.take_dropped_priority_updates() {
            self.client.standing.count(PRIORITY_UPDATES);
        }
        Ok(())
    }
}

/// Counts that a connection exceeded a limit; returns the error that ends it.
fn excess(standing: &ClientStanding, limit: Limit) -> h3::ProtocolError {
    standing.count(limit);
    let reason = match limit {
        FRAMES_PER_SECOND => "too many frames or capsules within a second",
        _ => "too much for a client that is not known yet",
    };
    h3::ProtocolError::Connection(Code::ExcessiveLoad, reason)
}

#[cfg(test)]
mod tests;
