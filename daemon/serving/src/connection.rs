//! A client's TCP connection, with HTTP/1.1 or HTTP/2, at an edge or at a gateway's own listener: what the client may send and keep open,
//! how long it may stop reading, and how the connection ends.

mod patience;

use std::{
    error::Error,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt as _;
use h2::Reason;
use http_body_util::BodyExt as _;
use hyper::{
    Request, Response, StatusCode, Version,
    body::{Body, Frame, Incoming, SizeHint},
    header::HOST,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use role::known_clients::{ActiveRequest, Activity};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::{sleep, timeout},
};

pub use self::patience::Patience;
use self::patience::{PatientExecutor, TakenBody, TakenStream};

/// The maximum of concurrent requests on one HTTP/2 connection.
const STREAMS: u32 = 128;

/// The flow-control windows for unread bodies on an HTTP/2 connection: for one request, and for all requests together.
const WINDOWS_BYTES: (u32, u32) = (64 << 10, 256 << 10);

/// The largest head of a request by HTTP/1.1, in bytes; a connection reads one at a time.
const HEAD_BYTES: usize = 64 << 10;

/// The largest field section of a request by HTTP/2 (RFC 9113 §10.5.1), and the maximum number of its fields. A client sends a byte for a
/// field of its own dynamic table (RFC 7541), and each takes dozens of bytes here. With HTTP/1.1, hyper has the same maximum of fields.
const FIELD_SECTION: (u32, usize) = (16 << 10, 100);

/// How long, and up to how many bytes, the rest of a body is read after an early answer. Otherwise, the client's connection or stream is
/// reset after the answer, and a client that still sends may lose the answer (RFC 9112 §9.6; curl 7.88 does so over HTTP/2 even if the
/// reset says `NO_ERROR`).
pub(crate) const LINGER: (Duration, usize) = (Duration::from_secs(1), 16 << 20);

/// The preface with which a client begins HTTP/2 (RFC 9113 §3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How many bytes of the preface identify HTTP/2: no method begins with them.
const TELLING_BYTES: usize = 3;

/// The interval between peeks while only some of these bytes are there: a peek then returns at once.
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
    /// Detects a client's HTTP version on a connection without TLS. A client with prior knowledge begins with HTTP/2 (RFC 9113 §3.3).
    ///
    /// # Errors
    /// The client disconnects, or does not send enough bytes `within` the time.
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
    /// How long the client may stop reading an answer. After that, the connection closes (HTTP/1.1) or the stream is reset (HTTP/2).
    pub(crate) patience: Patience,
    /// True once the connection may begin no more requests; `None` if the caller ends the connection by dropping it.
    pub(crate) ending: Option<watch::Receiver<bool>>,
    /// Shows what happens on the connection, and says when it has to make room: it then begins no more requests.
    pub(crate) activity: Arc<Activity>,
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
    B: Body<Data = Bytes> + Unpin + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    E: Into<Box<dyn Error + Send + Sync>> + 'static,
{
    let ConnectionTerms { version, idle, patience, mut ending, activity } = terms;
    let (requests, of_connection) = (Arc::<Requests>::default(), Arc::<AtomicBool>::default());
    let answer = service_fn(|request: Request<Incoming>| {
        // Over HTTP/1.1, an answer that is not taken ends the connection.
        let is_untaken = if version == HttpVersion::Two { Arc::default() } else { of_connection.clone() };
        let open = requests.begin(is_untaken.clone(), activity.begin());
        // A request that is not answered ends here: until its task runs, it would take memory.
        let answer = match refusal(&request) {
            Some(status) => Err(NotAnswered::Refused(status)),
            None if open.active.is_displaced() => Err(NotAnswered::MakesRoom),
            None => Ok(answer(request, open)),
        };
        offered(answer, version, is_untaken)
    });
    let leaves = async {
        tokio::select! {
            () = ends(&mut ending) => {}
            () = activity.displaced() => {}
        }
    };
    let mut leaves = pin!(leaves.fuse());
    let served = match version {
        HttpVersion::One => {
            let serving = http1::Builder::new()
                .timer(TokioTimer::new())
                // A token is short, so a copy behind its chunk's size costs less than a gathering write.
                .writev(false)
                .max_buf_size(HEAD_BYTES)
                .header_read_timeout(idle)
                .serve_connection(TokioIo::new(TakenStream::new(stream, patience, of_connection.clone())), answer);
            let mut serving = pin!(serving);
            tokio::select! {
                served = serving.as_mut() => served,
                () = leaves => {
                    serving.as_mut().graceful_shutdown();
                    serving.await
                }
            }
        }
        HttpVersion::Two => {
            let serving = http2::Builder::new(PatientExecutor(patience.clone()))
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(WINDOWS_BYTES.0)
                .initial_connection_window_size(WINDOWS_BYTES.1)
                .max_header_list_size(FIELD_SECTION.0)
                // If a client vanishes, its requests end.
                .keep_alive_interval(Some(Duration::from_secs(20)))
                .keep_alive_timeout(Duration::from_secs(20))
                .serve_connection(TokioIo::new(stream), answer);
            let mut serving = pin!(serving);
            let (mut known, mut is_idle) = (None, false);
            loop {
                // After the last request, answers may still wait for a client that takes them slowly.
                let pause = if is_idle { idle.max(patience.time) } else { idle };
                tokio::select! {
                    served = serving.as_mut() => break served,
                    () = leaves.as_mut() => serving.as_mut().graceful_shutdown(),
                    () = sleep(pause) => {
                        let now = (requests.open.load(Relaxed), requests.begun.load(Relaxed));
                        if now.0 == 0 && known == Some(now) {
                            if std::mem::replace(&mut is_idle, true) {
                                // The last bytes of an answer still wait for a client that does not take them. If an earlier
                                // answer ended for the same reason, the client has been counted.
                                if !requests.is_untaken.load(Relaxed) {
                                    (patience.on_end)();
                                }
                                break Ok(());
                            }
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

/// Why a request gets no answer from its service.
enum NotAnswered {
    /// Its head is refused with this status.
    Refused(StatusCode),
    /// Its connection makes room for another one. Over HTTP/2, the client then knows that it can send the request again (RFC 9113 §8.7).
    MakesRoom,
}

/// Returns the status of a request that is refused whatever its service would answer; `None` if the service may answer.
fn refusal(request: &Request<Incoming>) -> Option<StatusCode> {
    let (fields, is_one) = (request.headers(), request.version() == Version::HTTP_11);
    if fields.len() > FIELD_SECTION.1 {
        Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
    } else if is_one && fields.get_all(HOST).iter().count() != 1 {
        // RFC 9112 §3.2: a proxy in front may have taken it for a request to another host.
        Some(StatusCode::BAD_REQUEST)
    } else {
        None
    }
}

/// Makes the answer to a request, with a body that gives up on a client that takes nothing of it. hyper keeps room for this future
/// as long as a connection by HTTP/1.1 or an answer by HTTP/2 lives, so it has none for `answer`, which is large.
fn offered<B, E>(
    answer: Result<impl Future<Output = Result<Response<B>, E>> + Send, NotAnswered>,
    version: HttpVersion,
    is_untaken: Arc<AtomicBool>,
) -> impl Future<Output = Result<Response<TakenBody<B>>, Box<dyn Error + Send + Sync>>> + Send
where
    B: Body<Data = Bytes> + Unpin + Send,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let answer = answer.map(Box::pin);
    async move {
        let answer = match answer {
            Ok(answer) => answer,
            Err(NotAnswered::MakesRoom) => return Err(h2::Error::from(Reason::REFUSED_STREAM).into()),
            Err(NotAnswered::Refused(status)) => {
                let mut refused = Response::new(TakenBody::empty());
                *refused.status_mut() = status;
                return Ok(refused);
            }
        };
        patience::noting_untaken(is_untaken);
        let taken = if version == HttpVersion::Two { TakenBody::in_parts } else { TakenBody::whole };
        answer.await.map(|answer| answer.map(taken)).map_err(Into::into)
    }
}

/// Waits until `ending` is true or its sender is gone. Without a receiver, waits for ever.
pub(crate) async fn ends(ending: &mut Option<watch::Receiver<bool>>) {
    match ending {
        Some(ending) => _ = ending.wait_for(|ends| *ends).await,
        None => std::future::pending().await,
    }
}

/// Reads the rest of a request's body and drops it, up to a time and a number of bytes. Unread bytes would reset the connection, and the
/// client would lose the answer (RFC 9112 §9.6).
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
    /// Whether the client took nothing of an answer that has ended.
    is_untaken: AtomicBool,
}

/// Counts one request as open until dropped.
pub(crate) struct OpenRequest {
    requests: Arc<Requests>,
    is_untaken: Arc<AtomicBool>,
    active: Arc<ActiveRequest>,
}

impl OpenRequest {
    /// Returns the request for the choice of the connection that makes room. It counts there until all clones are dropped.
    pub(crate) fn active(&self) -> Arc<ActiveRequest> {
        self.active.clone()
    }

    /// Returns the flag that is set when the answer ends because the client took nothing of it for too long.
    pub(crate) fn is_untaken(&self) -> Arc<AtomicBool> {
        self.is_untaken.clone()
    }
}

impl Requests {
    fn begin(self: &Arc<Self>, is_untaken: Arc<AtomicBool>, active: ActiveRequest) -> OpenRequest {
        [&self.open, &self.begun].iter().for_each(|count| _ = count.fetch_add(1, Relaxed));
        OpenRequest { requests: self.clone(), is_untaken, active: Arc::new(active) }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        // Either the connection or the gateway has set the flag, and counted the answer.
        if self.is_untaken.load(Relaxed) {
            self.requests.is_untaken.store(true, Relaxed);
        }
        self.requests.open.fetch_sub(1, Relaxed);
    }
}

/// The body of an answer, and a value that lives as long.
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

#[cfg(test)]
mod tests;
