//! A client's TCP connection, with HTTP/1.1 or HTTP/2, at an edge or at a gateway's own listener: the limits on what the client
//! may send and keep open, and the end of the connection.

use std::{
    error::Error,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::{
    Request, Response,
    body::{Body, Frame, Incoming, SizeHint},
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::{sleep, timeout},
};

/// The maximum of concurrent requests on one HTTP/2 connection.
const STREAMS: u32 = 128;

/// The flow-control windows for unread bodies on an HTTP/2 connection: for one request, and for all requests together.
const WINDOWS_BYTES: (u32, u32) = (64 << 10, 256 << 10);

/// The largest head of a request, in bytes.
const HEAD_BYTES: u32 = 64 << 10;

/// The preface with which a client begins HTTP/2 (RFC 9113 §3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The number of bytes of the preface that identify HTTP/2: no method begins with them.
const TELLING_BYTES: usize = 3;

/// The interval between peeks while only some of these bytes have arrived, because a peek then returns at once.
const PAUSE: Duration = Duration::from_millis(5);

/// A version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpVersion {
    /// HTTP/1.1 (RFC 9112).
    One,
    /// HTTP/2 (RFC 9113).
    Two,
}

impl HttpVersion {
    /// Detects the version with which a client begins a connection without TLS. A client with prior knowledge begins with HTTP/2
    /// (RFC 9113 §3.3).
    ///
    /// # Errors
    /// The client does not send enough bytes `within` this time, or disconnects.
    pub(crate) async fn of_beginning(stream: &TcpStream, within: Duration) -> io::Result<Self> {
        let looking = async {
            loop {
                let mut bytes = [0; TELLING_BYTES];
                let count = stream.peek(&mut bytes).await?;
                match bytes.get(..count).unwrap_or_default() {
                    [] => return Err(io::ErrorKind::UnexpectedEof.into()),
                    begun if !PREFACE.starts_with(begun) => return Ok(Self::One),
                    begun if begun.len() == TELLING_BYTES => return Ok(Self::Two),
                    _ => sleep(PAUSE).await,
                }
            }
        };
        timeout(within, looking).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// The terms on which a connection is served.
pub(crate) struct ConnectionTerms {
    /// The version of HTTP.
    pub(crate) version: HttpVersion,
    /// How long the connection may stay without a request.
    pub(crate) idle: Duration,
    /// Becomes true when the connection may begin no more requests; `None` if the caller ends the connection by dropping it.
    pub(crate) ending: Option<watch::Receiver<bool>>,
}

/// Serves a connection until it ends; `answer` answers each request. With HTTP/2, a request counts as open until its
/// [`OpenRequest`] is dropped.
pub(crate) async fn serve<A, F, B, E>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    terms: ConnectionTerms,
    answer: A,
) where
    A: Fn(Request<Incoming>, OpenRequest) -> F,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let ConnectionTerms { version, idle, mut ending } = terms;
    let requests = Arc::<Requests>::default();
    let (stream, answer) = (TokioIo::new(stream), service_fn(|request| answer(request, requests.begin())));
    let served = match version {
        HttpVersion::One => {
            let serving = http1::Builder::new()
                .timer(TokioTimer::new())
                // A token is short: copying it behind its chunk's size costs less than letting the kernel gather the two.
                .writev(false)
                .max_buf_size(HEAD_BYTES as usize)
                .header_read_timeout(idle)
                .serve_connection(stream, answer);
            let mut serving = pin!(serving);
            tokio::select! {
                served = serving.as_mut() => served,
                () = ends(&mut ending) => {
                    serving.as_mut().graceful_shutdown();
                    serving.await
                }
            }
        }
        HttpVersion::Two => {
            let serving = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(WINDOWS_BYTES.0)
                .initial_connection_window_size(WINDOWS_BYTES.1)
                .max_header_list_size(HEAD_BYTES)
                // If a client vanishes, its requests end.
                .keep_alive_interval(Some(Duration::from_secs(20)))
                .keep_alive_timeout(Duration::from_secs(20))
                .serve_connection(stream, answer);
            let mut serving = pin!(serving);
            let (mut known, mut is_ending) = (None, false);
            loop {
                tokio::select! {
                    served = serving.as_mut() => break served,
                    () = ends(&mut ending), if !is_ending => {
                        is_ending = true;
                        serving.as_mut().graceful_shutdown();
                    }
                    () = sleep(idle) => {
                        let now = (requests.open.load(Relaxed), requests.begun.load(Relaxed));
                        if now.0 == 0 && known == Some(now) {
                            serving.as_mut().graceful_shutdown();
                        }
                        known = Some(now);
                    }
                }
            }
        }
    };
    if let Err(error) = served {
        tracing::debug!("client left: {error}");
    }
}

/// Waits until `ending` is set, or its sender is gone; for ever without a receiver.
pub(crate) async fn ends(ending: &mut Option<watch::Receiver<bool>>) {
    match ending {
        Some(ending) => _ = ending.wait_for(|ends| *ends).await,
        None => std::future::pending().await,
    }
}

/// Reads the rest of a request's body and drops it, within a time and a number of bytes. Bytes that stay unread would reset the
/// connection, and the client would lose the answer (RFC 9112 §9.6).
pub(crate) async fn discard(body: &mut Incoming, (within, most_bytes): (Duration, usize)) {
    let mut room_bytes = most_bytes;
    let reading = async {
        while !body.is_end_stream() {
            let Some(Ok(frame)) = body.frame().await else { return };
            let read_bytes = frame.data_ref().map_or(0, Bytes::len);
            let Some(left) = room_bytes.checked_sub(read_bytes) else { return };
            room_bytes = left;
        }
    };
    _ = timeout(within, reading).await;
}

/// The requests on one connection.
#[derive(Debug, Default)]
struct Requests {
    open: AtomicUsize,
    begun: AtomicUsize,
}

/// Counts one request as open until dropped.
pub(crate) struct OpenRequest(Arc<Requests>);

impl Requests {
    fn begin(self: &Arc<Self>) -> OpenRequest {
        [&self.open, &self.begun].iter().for_each(|count| _ = count.fetch_add(1, Relaxed));
        OpenRequest(self.clone())
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

/// The body of an answer, with a value that is kept until the body is dropped.
pub(crate) struct KeptBody<B, K> {
    pub(crate) body: B,
    pub(crate) _kept: K,
}

impl<B: Body + Unpin, K: Unpin> Body for KeptBody<B, K> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
