//! The pump of one TCP tunnel (classic CONNECT, RFC 9114 §4.4), in either role: bytes in DATA frames to a socket and back.
//! At the relay the socket leads to the target, at the edge to an application.
//!
//! Each direction ends on its own: a FIN on the socket finishes the request stream, and vice versa. A reset of the socket
//! resets the stream with H3_CONNECT_ERROR, and vice versa.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use admission::{
    stopped::{OpenReader, ReaderOwner},
    uploads::OpenUpload,
};
use bytes::{Buf as _, Bytes};
use masque::{
    datagram,
    h3::{self, Code, Part},
};
use quic::{
    class::{Class, PolicyRole},
    dispatch::StreamWriteError,
    h3::{Client, Error, Request},
};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf},
    net::TcpStream,
    time::{Instant, timeout_at},
};

use super::gate::{Gate, TransferCost};
use crate::traffic::Traffic;

/// How much is read from the socket at once: one DATA frame.
const CHUNK_BYTES: usize = 16 * 1024;

/// Whether bytes after a request of HTTP/1.1 begin another; empty lines do not (RFC 9112 §2.2).
#[must_use]
pub fn is_another_request(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| !matches!(byte, b'\r' | b'\n'))
}

/// Why a TCP tunnel failed.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// The request side failed.
    #[error(transparent)]
    Http(#[from] Error),
    /// The socket side failed.
    #[error("the TCP connection failed: {0}")]
    Socket(#[from] io::Error),
}

/// How a TCP tunnel ended.
#[derive(Debug)]
pub enum End {
    /// Both sides finished.
    Finished,
    /// One side failed.
    Failed(TcpError),
    /// No bytes moved for too long.
    Idle,
    /// The socket, or at an edge the target, took too few bytes for too long, and unread bytes of such tunnels used up the connection's
    /// credit.
    Stopped,
}

impl End {
    /// Returns the code with which both halves of the stream end, unless both sides finished.
    const fn code(&self) -> Code {
        match self {
            // A datagram has ended the sending half (RFC 9297 §2), or the connection is gone.
            Self::Failed(TcpError::Http(Error::Ended(StreamWriteError::Cancelled))) => datagram::WITHOUT_USE,
            _ => Code::ConnectError,
        }
    }

    /// Returns the word for it at a relay.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed(TcpError::Http(Error::Protocol(_))) => "violation",
            // Our schedule has reset the stream.
            Self::Failed(TcpError::Http(Error::Ended(StreamWriteError::Expired))) => "late",
            Self::Failed(TcpError::Http(_)) => "client",
            Self::Failed(TcpError::Socket(_)) => "target_failed",
            Self::Idle => "idle",
            Self::Stopped => "stopped",
        }
    }
}

/// The end of a tunnel that is not a request: the connection of an application or a target, or a pipe to other code.
pub trait PumpSocket: AsyncRead + AsyncWrite + Unpin {
    /// Polls for bytes to read, or their end. May be ready without any.
    ///
    /// # Errors
    /// The socket has failed.
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Sets whether dropping it tells the other side that bytes are missing.
    fn set_cuts(&self, cuts: bool);
}

impl PumpSocket for TcpStream {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        TcpStream::poll_read_ready(self, cx)
    }

    fn set_cuts(&self, cuts: bool) {
        _ = SockRef::from(self).set_linger(cuts.then_some(Duration::ZERO));
    }
}

/// The other side of a pipe sees the end of the bytes in either case, and learns from [`TcpPump::run`]'s result whether some are missing.
impl PumpSocket for DuplexStream {
    fn poll_read_ready(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn set_cuts(&self, _: bool) {}
}

/// A TCP tunnel and its socket.
pub struct TcpPump<S = TcpStream> {
    request: Request,
    socket: S,
    role: PolicyRole,
    gate: Gate,
    /// Bytes read from the request and not yet written to the socket.
    unwritten: Bytes,
    /// How many of `unwritten` may be written now, under the rates of the user and the class.
    granted: usize,
    /// How many of the socket's bytes are still for the other end; further bytes end the tunnel.
    wanted: u64,
    request_finished: bool,
    socket_finished: bool,
    traffic: Arc<Traffic>,
    /// The socket, as the reader of the request.
    reader: OpenReader,
    /// At an edge, the socket as the source of the request's bytes.
    upload: Option<OpenUpload>,
    /// Whether the reader has to be judged earlier than `run` knows.
    has_new_due: bool,
}

/// Why a poll of a pump is over.
enum Step {
    /// Both directions have ended.
    Ended,
    /// The connection has no room for the unread bytes of this tunnel.
    Stopped,
    /// The socket takes no more bytes at the moment.
    Waits,
}

impl<S: PumpSocket> TcpPump<S> {
    /// Joins an accepted request to the connection to its target, through the gate of its class; moved bytes are counted
    /// in `traffic`. `http` is the connection of the request, and `owner` stands for the target.
    #[must_use]
    pub fn new(
        request: Request,
        (http, owner): (&Client, ReaderOwner),
        target: S,
        gate: Gate,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self::join(request, (http, owner), target, PolicyRole::Relay, (gate, traffic))
    }

    /// Joins the connection of an application, which is one of `owner`, to a request that a relay has accepted, as [`TcpPump::new`] does.
    #[must_use]
    pub fn at_edge(
        request: Request,
        (http, owner): (&Client, ReaderOwner),
        application: S,
        gate: Gate,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self::join(request, (http, owner), application, PolicyRole::Edge, (gate, traffic))
    }

    fn join(
        mut request: Request,
        (http, owner): (&Client, ReaderOwner),
        socket: S,
        role: PolicyRole,
        (gate, traffic): (Gate, Arc<Traffic>),
    ) -> Self {
        request.recv.set_connect();
        let upload = http.upload(request.stream_id, owner.clone());
        request.flow.refuse_datagrams();
        Self {
            request,
            socket,
            role,
            gate,
            unwritten: Bytes::new(),
            granted: 0,
            wanted: u64::MAX,
            request_finished: false,
            socket_finished: false,
            traffic,
            reader: http.stopped_readers().open(owner, Instant::now().into_std()),
            upload,
            has_new_due: false,
        }
    }

    /// Sends `bytes`, already read from the socket, and then the socket's next `wanted` bytes. Further bytes belong to another request,
    /// which would get no answer. The tunnel then ends with a reset, so that the application does not wait.
    #[must_use]
    pub fn behind(mut self, bytes: &[u8], wanted: u64) -> Self {
        if !bytes.is_empty() {
            self.count_from_socket(bytes.len());
            self.request.send.push(h3::data_frame(bytes));
        }
        self.wanted = wanted;
        self
    }

    /// Relays until both sides have ended, one has failed, or no bytes have moved, or waited for a rate, for `idle`. Calls
    /// `on_class` with the old and the new class when the tunnel's class changes.
    ///
    /// When both sides have ended, waits until the other end has acknowledged everything, because a connection that is closed before that
    /// cuts the tail. After `idle`, not counting time in which a rate holds bytes back, resets the stream instead. A tunnel also ends if
    /// the connection has no room for its unread bytes: its socket has stopped taking them, or, at an edge, its target has.
    pub async fn run(mut self, idle: Duration, mut on_class: impl FnMut(&S, &Class, &Arc<Class>)) -> End {
        let (mut moved, mut quiet_since) = (self.traffic.bytes(), Instant::now());
        // An early end of any kind is a reset (RFC 9114 §4.4), so that neither peer takes a part for the whole.
        self.socket.set_cuts(true);
        let end = loop {
            let idle_due = quiet_since + idle;
            let due = self.reader.due().map_or(idle_due, |due| idle_due.min(due.into()));
            match timeout_at(due, poll_fn(|cx| self.poll(cx, &mut on_class))).await {
                Ok(Ok(Step::Ended)) => {
                    self.socket.set_cuts(false);
                    let Self { request, socket, .. } = self;
                    drop(socket);
                    request.send.finish_within(idle).await;
                    return End::Finished;
                }
                Ok(Ok(Step::Stopped)) => break End::Stopped,
                Ok(Ok(Step::Waits)) => self.has_new_due = false,
                Ok(Err(error)) => break End::Failed(error),
                Err(_) => {
                    let now = Instant::now();
                    if self.reader.due().is_some_and(|due| due <= now.into_std()) {
                        self.reader.judge(now.into_std());
                    }
                    // Bytes that a rate holds back do not move, but the tunnel is not silent.
                    if self.traffic.bytes() != moved || self.gate.is_waiting() || self.request.flow.is_delayed() {
                        (moved, quiet_since) = (self.traffic.bytes(), now);
                    } else if idle_due <= now {
                        break End::Idle;
                    }
                }
            }
        };
        tracing::debug!("tunnel failed: {end:?}");
        self.request.reset(end.code());
        end
    }

    /// Moves bytes as far as possible; ready when both directions have ended, or the state of the reader changes.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        on_class: &mut impl FnMut(&S, &Class, &Arc<Class>),
    ) -> Poll<Result<Step, TcpError>> {
        if let Some((before, class)) = self.gate.follow() {
            on_class(&self.socket, &before, class);
        }
        let to_socket = self.poll_to_socket(cx)?;
        let from_socket = self.poll_from_socket(cx)?;
        if to_socket.is_ready() && from_socket.is_ready() {
            return Poll::Ready(Ok(Step::Ended));
        }
        if self.has_new_due {
            return Poll::Ready(Ok(Step::Waits));
        }
        let upload_ends = self.upload.as_ref().is_some_and(|upload| upload.poll_has_to_end(cx).is_ready());
        if upload_ends || self.reader.poll_has_to_end(cx).is_ready() {
            return Poll::Ready(Ok(Step::Stopped));
        }
        Poll::Pending
    }

    fn poll_to_socket(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TcpError>> {
        loop {
            while !self.unwritten.is_empty() {
                if self.granted == 0 {
                    let most = self.gate.turn().map_or(usize::MAX, |turn| turn.bytes);
                    let bytes = self.unwritten.len().min(most);
                    if self.gate.poll(cx, TransferCost::of_tcp(bytes)).is_pending() {
                        // The rate of the class or the user holds the bytes, and not the socket.
                        self.reader.rests();
                        return Poll::Pending;
                    }
                    self.granted = bytes;
                }
                let granted = &self.unwritten[..self.granted];
                let Poll::Ready(written) = Pin::new(&mut self.socket).poll_write(cx, granted) else {
                    self.has_new_due |= self.reader.waits(|| Instant::now().into_std());
                    return Poll::Pending;
                };
                let written = written?;
                self.unwritten.advance(written);
                self.granted -= written;
                if self.granted == 0 {
                    self.gate.passed();
                }
                self.reader.takes(written, || Instant::now().into_std());
                match self.role {
                    PolicyRole::Relay => self.traffic.add_up(written as u64, 0),
                    PolicyRole::Edge => self.traffic.add_down(written as u64, 0),
                }
            }
            if self.request_finished {
                return Pin::new(&mut self.socket).poll_shutdown(cx).map_err(TcpError::from);
            }
            let Poll::Ready(part) = self.request.recv.poll_part(cx) else {
                self.reader.rests();
                return Poll::Pending;
            };
            match part? {
                Some(Part::Data(bytes)) => self.unwritten = bytes,
                Some(_) => {}
                None => {
                    self.request_finished = true;
                    // No bytes wait for the socket any more, and the tunnel may still wait long for an answer.
                    self.reader.rests();
                }
            }
        }
    }

    fn poll_from_socket(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TcpError>> {
        if !self.socket_finished {
            // A peer that reads no more ends the tunnel, although the socket may be silent for long (RFC 9114 §4.4).
            self.request.send.poll_stopped(cx)?;
        }
        while !self.socket_finished {
            // A slow peer delays reading from the socket instead of filling our memory.
            ready!(self.request.send.poll_ready(cx))?;
            match ready!(self.poll_read(cx))? {
                Some(frame) => self.request.send.push(frame),
                None => {
                    self.socket_finished = true;
                    self.request.send.finish();
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads from the socket and returns a DATA frame; `None` at the end of the socket's bytes.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            // Readiness first: a waiting tunnel owns no buffer.
            ready!(self.socket.poll_read_ready(cx))?;
            let mut buffer = [0; CHUNK_BYTES];
            let mut read = ReadBuf::new(&mut buffer);
            ready!(Pin::new(&mut self.socket).poll_read(cx, &mut read))?;
            let bytes = read.filled();
            turns::arrived(bytes.len());
            if bytes.is_empty() {
                return Poll::Ready(Ok(None));
            }
            let len = usize::try_from(self.wanted).unwrap_or(usize::MAX).min(bytes.len());
            if is_another_request(&bytes[len..]) {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a second request on its connection",
                )));
            }
            if self.wanted != u64::MAX {
                self.wanted -= len as u64;
            }
            if len > 0 {
                self.count_from_socket(len);
                return Poll::Ready(Ok(Some(h3::data_frame(&bytes[..len]))));
            }
        }
    }

    fn count_from_socket(&mut self, bytes: usize) {
        match self.role {
            PolicyRole::Relay => self.traffic.add_down(bytes as u64, 0),
            PolicyRole::Edge => self.traffic.add_up(bytes as u64, 0),
        }
        self.gate.received(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_the_relays_own_schedule_has_reset_was_not_ended_by_the_client() {
        let label = |error| End::Failed(TcpError::Http(error)).label();
        assert_eq!(label(Error::Ended(StreamWriteError::Expired)), "late");
        // As when the connection is gone.
        assert_eq!([Error::Ended(StreamWriteError::Cancelled), Error::Closed].map(label), ["client"; 2]);
    }
}
