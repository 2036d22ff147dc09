//! A gateway's own listener, for clients of the OpenAI API without an edge: HTTP/1.1, and HTTP/2 if TLS negotiates it (ALPN).
//!
//! The gateway admits and handles these requests like those over HTTP/3.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use hyper::{
    Response,
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pacing::path::PathStats;
use parking_lot::Mutex;
use quic::class::Classes;
use role::{accept::Strangers, door::Door};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{oneshot, watch},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    gateway::{Asker, Exchange, Gateway, ResponseBody, TcpExchange},
    message,
    metrics::GatewayMetrics,
    served::Served,
};

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many clients without an admitted request there may be at once: in total, and from one address (IPv4) or /64 (IPv6). They
/// never have more than half of the connections of a listener.
const STRANGERS: (usize, usize) = (256, 64);

/// The maximum of concurrent requests on one HTTP/2 connection.
const STREAMS: u32 = 128;

/// How many unread bytes of bodies a client may send: of one request, and of all requests on one HTTP/2 connection.
const WINDOWS_BYTES: (u32, u32) = (64 << 10, 256 << 10);

/// The maximum size of a request's head, in bytes.
const HEAD_BYTES: u32 = 64 << 10;

/// Returns what answers requests now: the gateway, and the classes of the policy. `None` while there is no gateway.
pub type Source = Arc<dyn Fn() -> Option<(Arc<Gateway>, Arc<Classes>)> + Send + Sync>;

/// Called with each request that has ended.
pub type OnServed = Arc<dyn Fn(Served) + Send + Sync>;

/// The certificate that a listener shows to clients; `None` without TLS. Clones share it.
#[derive(Clone)]
pub struct ShownCertificate(Option<Arc<ArcSwap<ServerConfig>>>);

impl ShownCertificate {
    /// Returns a prepared certificate; `None` stands for no TLS.
    #[must_use]
    pub fn new(prepared: Option<Arc<ServerConfig>>) -> Self {
        Self(prepared.map(|prepared| Arc::new(ArcSwap::new(prepared))))
    }

    /// Shows another certificate on future connections.
    pub fn replace(&self, prepared: Arc<ServerConfig>) {
        if let Some(shown) = &self.0 {
            shown.store(prepared);
        }
    }
}

/// A listener.
pub struct Front {
    /// Accepts clients.
    pub door: Door,
    /// The certificate that clients see.
    pub shown: ShownCertificate,
    /// The address, as configured: rules of the policy name it.
    pub listener: SocketAddr,
    /// How long a connection may be without a request.
    pub idle: Duration,
    /// The gateway that answers.
    pub source: Source,
    /// Called with each request that has ended.
    pub on_served: OnServed,
    /// Counts handshakes.
    pub metrics: GatewayMetrics,
    /// Becomes `true` when the listener must accept no more clients and its connections no more requests.
    pub ending: watch::Receiver<bool>,
}

/// What all clients of a listener share.
struct Hall {
    shown: ShownCertificate,
    listener: SocketAddr,
    idle: Duration,
    source: Source,
    on_served: OnServed,
    metrics: GatewayMetrics,
    ending: watch::Receiver<bool>,
    /// Dropping a client's sender makes the client leave.
    strangers: Mutex<Strangers<oneshot::Sender<Infallible>>>,
}

/// A client that may be evicted in favour of another until one of its requests is admitted.
struct Newcomer {
    hall: Arc<Hall>,
    number: u64,
    /// Set once the client may stay.
    stay: OnceLock<oneshot::Sender<Infallible>>,
}

impl Front {
    /// Serves clients until `ending` is set and their requests have ended. Dropping the future ends their connections.
    pub async fn run(self) {
        let Self { mut door, shown, listener, idle, source, on_served, metrics, mut ending } = self;
        let most = (door.max_connections() as usize / 2).clamp(1, STRANGERS.0);
        let strangers = Mutex::new(Strangers::new(most, STRANGERS.1));
        let hall =
            Arc::new(Hall { shown, listener, idle, source, on_served, metrics, ending: ending.clone(), strangers });
        loop {
            let (stream, from, place) = tokio::select! {
                next = door.next() => next,
                () = ends(&mut ending) => return door.end().await,
            };
            // Tokens leave as they arrive.
            _ = stream.set_nodelay(true);
            let hall = hall.clone();
            door.spawn(async move {
                hall.welcome(stream, from).await;
                drop(place);
            });
        }
    }
}

impl Hall {
    async fn welcome(self: Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let (stay, mut leave) = oneshot::channel();
        let (number, evicted) = self.strangers.lock().enter(from.ip(), stay);
        // An evicted client learns of it when its sender is dropped.
        drop(evicted);
        let newcomer = Arc::new(Newcomer { hall: self.clone(), number, stay: OnceLock::new() });
        let Some(shown) = &self.shown.0 else {
            return self.unless_evicted(self.serve_http1(stream, from, &newcomer), leave, from).await;
        };
        let acceptor = TlsAcceptor::from(shown.load_full());
        let greeted = tokio::select! {
            greeted = timeout(HANDSHAKE, acceptor.accept(stream)) => greeted.map_err(|_| "timeout"),
            _ = &mut leave => Err("crowded"),
        };
        let greeted: Result<TlsStream<TcpStream>, &'static str> =
            greeted.and_then(|greeted| greeted.map_err(|_| "failed"));
        self.metrics.handshake(greeted.as_ref().err().copied().unwrap_or("completed"));
        match greeted {
            Ok(stream) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => {
                self.unless_evicted(self.serve_http2(stream, from, newcomer), leave, from).await;
            }
            Ok(stream) => self.unless_evicted(self.serve_http1(stream, from, &newcomer), leave, from).await,
            Err(why) => tracing::debug!(client = %from, why, "refused a client of the gateway"),
        }
    }

    /// Serves a client until it leaves, or is evicted.
    async fn unless_evicted(
        &self,
        serving: impl Future<Output = ()>,
        leave: oneshot::Receiver<Infallible>,
        from: SocketAddr,
    ) {
        tokio::select! {
            () = serving => {}
            _ = leave => {
                self.metrics.evicted();
                tracing::debug!(client = %from, "a client without an admitted request made room for another one");
            }
        }
    }

    async fn serve_http1(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
        from: SocketAddr,
        newcomer: &Newcomer,
    ) {
        let answer = async |request| self.answer(request, from, newcomer, None).await;
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            // A token is short: copying it after its chunk's size costs less than to make the kernel gather the two.
            .writev(false)
            .max_buf_size(HEAD_BYTES as usize)
            .header_read_timeout(self.idle)
            .serve_connection(TokioIo::new(stream), service_fn(answer));
        let (mut serving, mut ending) = (std::pin::pin!(serving), self.ending.clone());
        let served = tokio::select! {
            served = serving.as_mut() => served,
            () = ends(&mut ending) => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        };
        if let Err(error) = served {
            tracing::debug!("client left: {error}");
        }
    }

    async fn serve_http2(
        self: &Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        from: SocketAddr,
        newcomer: Arc<Newcomer>,
    ) {
        let requests = Arc::<Requests>::default();
        let answer = {
            let (hall, requests) = (self.clone(), requests.clone());
            move |request| {
                let (hall, newcomer, open) = (hall.clone(), newcomer.clone(), requests.begin());
                async move { hall.answer(request, from, &newcomer, Some(open)).await }
            }
        };
        let mut serving = std::pin::pin!(
            http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(WINDOWS_BYTES.0)
                .initial_connection_window_size(WINDOWS_BYTES.1)
                .max_header_list_size(HEAD_BYTES)
                // The keep-alive ends the requests of a client that vanished.
                .keep_alive_interval(Some(Duration::from_secs(20)))
                .keep_alive_timeout(Duration::from_secs(20))
                .serve_connection(TokioIo::new(stream), service_fn(answer))
        );
        let (mut known, mut is_ending, mut ending) = (None, false, self.ending.clone());
        let served = loop {
            tokio::select! {
                served = serving.as_mut() => break served,
                () = ends(&mut ending), if !is_ending => {
                    is_ending = true;
                    serving.as_mut().graceful_shutdown();
                }
                () = sleep(self.idle) => {
                    let now = (requests.open.load(Relaxed), requests.begun.load(Relaxed));
                    if now.0 == 0 && known == Some(now) {
                        serving.as_mut().graceful_shutdown();
                    }
                    known = Some(now);
                }
            }
        };
        if let Err(error) = served {
            tracing::debug!("client left: {error}");
        }
    }

    /// Passes a request to the gateway; `open` lives until the gateway has answered.
    async fn answer(
        &self,
        request: hyper::Request<Incoming>,
        from: SocketAddr,
        newcomer: &Newcomer,
        open: Option<Open>,
    ) -> io::Result<Response<ResponseBody>> {
        let Some((gateway, classes)) = (self.source)() else { return Err(io::ErrorKind::ConnectionReset.into()) };
        let (parts, body) = request.into_parts();
        let head = message::head(&parts);
        newcomer.may_stay_if(|| gateway.knows(&head));
        let (exchange, awaited) = TcpExchange::new(body);
        let asker = Asker { user: None, listener: self.listener, client: Some(from), path: PathStats::default() };
        let on_served = self.on_served.clone();
        // In its own task, which notices that the client is gone and then ends the engine's work.
        tokio::spawn(async move {
            on_served(gateway.serve(Exchange::Tcp(exchange), &head, &classes, &asker).await);
            drop(open);
        });
        let (head, answer) = awaited.answer().await?;
        Ok(message::response(head, answer))
    }
}

impl Newcomer {
    /// Lets a known client stay without a limit.
    fn may_stay_if(&self, is_known: impl FnOnce() -> bool) {
        // Once the client is out of the list, this is the only holder of its sender.
        if self.stay.get().is_none()
            && is_known()
            && let Some(stay) = self.hall.strangers.lock().leave(self.number)
        {
            _ = self.stay.set(stay);
        }
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.hall.strangers.lock().leave(self.number);
    }
}

/// Waits until the listener is to end, or the sender of `ending` is gone.
async fn ends(ending: &mut watch::Receiver<bool>) {
    _ = ending.wait_for(|ends| *ends).await;
}

/// The requests on one connection.
#[derive(Debug, Default)]
struct Requests {
    open: AtomicUsize,
    begun: AtomicUsize,
}

/// A request that is open, until dropped.
struct Open(Arc<Requests>);

impl Requests {
    fn begin(self: &Arc<Self>) -> Open {
        [&self.open, &self.begun].iter().for_each(|count| _ = count.fetch_add(1, Relaxed));
        Open(self.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}
