//! A gateway's own listener, for clients of the OpenAI API without an edge: HTTP/1.1, and HTTP/2 if TLS negotiates it (ALPN) or, without
//! TLS, if the client begins with its preface.
//!
//! The gateway admits and handles these requests like those over HTTP/3.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use hyper::{
    Response, Version,
    body::Incoming,
    header::{CONNECTION, EXPECT, HeaderValue},
};
use masque::{
    h3::{Field, RequestHead},
    request::is_ping,
};
use pacing::path::PathStats;
use role::{
    access::served::Served,
    classes::Classes,
    door::{self, Door},
    holder::Holder,
    known_clients::KnownClients,
    newcomers::{Eviction, Newcomer, Newcomers},
};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, watch},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    connection::{self, ConnectionTerms, HttpVersion, KeptBody, OpenRequest, Patience},
    departure::Departure,
    gateway::{Asker, Exchange, Gateway, REQUEST_ID, ResponseBody, TcpExchange, acknowledge, client_id},
    message,
    metrics::GatewayMetrics,
    pages::PageRules,
};

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many clients without an admitted request there may be at once from one address (IPv4) or /64 (IPv6).
const MOST_FROM_ONE: usize = 64;

/// Returns the gateway that answers requests now, and the classes of the policy. `None` while there is no gateway.
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
    /// Which requests of web pages are refused while the gateway has no keys.
    pub pages: PageRules,
    /// The gateway that answers.
    pub source: Source,
    /// Called with each request that has ended.
    pub on_served: OnServed,
    /// Counts handshakes.
    pub metrics: GatewayMetrics,
    /// Becomes `true` when the listener must accept no more clients and its connections no more requests.
    pub ending: watch::Receiver<bool>,
    /// Set before the future of [`Front::run`] is dropped, so that records of the cut answers do not blame their clients.
    pub is_cut: Arc<AtomicBool>,
}

/// The state that all clients of a listener share.
struct Hall {
    shown: ShownCertificate,
    listener: SocketAddr,
    idle: Duration,
    pages: PageRules,
    source: Source,
    on_served: OnServed,
    metrics: GatewayMetrics,
    ending: watch::Receiver<bool>,
    is_cut: Arc<AtomicBool>,
    /// Clients without an admitted request.
    newcomers: Arc<Newcomers>,
}

impl Front {
    /// Serves clients until `ending` is set and their requests have ended. Dropping the future ends their connections.
    pub async fn run(self) {
        let Self { mut door, shown, listener, idle, pages, source, on_served, metrics, ending, is_cut } = self;
        let displaced = metrics.clone();
        let known = KnownClients::new(listener, Box::new(move || displaced.displaced()));
        let newcomers = Newcomers::new(door.max_connections() as usize, MOST_FROM_ONE, known);
        let mut ends = Some(ending.clone());
        let hall =
            Arc::new(Hall { shown, listener, idle, pages, source, on_served, metrics, ending, is_cut, newcomers });
        loop {
            let (stream, from, place) = tokio::select! {
                // First, so that another door with the same socket gets all clients from then on.
                biased;
                () = connection::ends(&mut ends) => {
                    // Newcomers may stay silent for long, and they have no answer to lose.
                    hall.newcomers.evict_all();
                    return door.end().await;
                }
                next = door.next_among(&hall.newcomers) => next,
            };
            // Tokens leave as they arrive.
            _ = stream.set_nodelay(true);
            door::buffer_little(&stream);
            let hall = hall.clone();
            door.spawn(hall.welcome(stream, from, place));
        }
    }
}

impl Hall {
    /// Serves a client that has a place among the connections.
    async fn welcome(self: Arc<Self>, stream: TcpStream, from: SocketAddr, place: Option<OwnedSemaphorePermit>) {
        let entered = self.newcomers.enter(from.ip(), place, false).await;
        let Some((newcomer, mut eviction, _place)) = entered else { return self.turned_away(from, None) };
        let client = newcomer.clone();
        let Some(shown) = &self.shown.0 else {
            let serving = Box::pin(async {
                match HttpVersion::of_beginning(&stream, self.idle).await {
                    Ok(version) => self.serve(stream, version, from, newcomer).await,
                    Err(error) => tracing::debug!(client = %from, "client left: {error}"),
                }
            });
            return self.unless_evicted(serving, eviction, (from, &client)).await;
        };
        let acceptor = TlsAcceptor::from(shown.load_full());
        let greeted = tokio::select! {
            greeted = timeout(HANDSHAKE, acceptor.accept(stream)) => greeted.map_err(|_| "timeout"),
            () = eviction.comes() => Err("crowded"),
        };
        let greeted: Result<TlsStream<TcpStream>, &'static str> =
            greeted.and_then(|greeted| greeted.map_err(|_| "failed"));
        self.metrics.handshake(greeted.as_ref().err().copied().unwrap_or("completed"));
        match greeted {
            Ok(stream) => {
                let is_two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let version = if is_two { HttpVersion::Two } else { HttpVersion::One };
                let serving = Box::pin(self.serve(stream, version, from, newcomer));
                self.unless_evicted(serving, eviction, (from, &client)).await;
            }
            Err(why) => tracing::debug!(client = %from, why, "refused a client of the gateway"),
        }
    }

    /// Serves a client until it leaves, or is evicted. Each level of calls would have room for `serving`, which is large, if it had no box.
    async fn unless_evicted(
        &self,
        serving: Pin<Box<impl Future<Output = ()>>>,
        mut eviction: Eviction,
        (from, client): (SocketAddr, &Newcomer),
    ) {
        tokio::select! {
            () = serving => {}
            () = eviction.comes() => self.turned_away(from, Some(client)),
        }
    }

    /// Counts a client that is closed in favour of others, unless all are closed, or it was known, and so counted when it had to leave.
    fn turned_away(&self, from: SocketAddr, client: Option<&Newcomer>) {
        if client.is_some_and(Newcomer::is_known) {
            tracing::debug!(client = %from, "closed a connection of the user with the most: too many clients");
        } else if !*self.ending.borrow() {
            self.metrics.evicted();
            tracing::debug!(client = %from, "closed a client without an admitted request: too many clients");
        }
    }

    /// Serves a connection to its end.
    async fn serve(
        self: &Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        version: HttpVersion,
        from: SocketAddr,
        newcomer: Arc<Newcomer>,
    ) {
        let (hall, activity) = (self.clone(), newcomer.activity());
        let answer = move |request, open| hall.answer(request, from, &newcomer, open);
        // No gateway, no answers.
        let time = (self.source)().map_or(self.idle, |(gateway, _)| gateway.stall_timeout());
        let metrics = self.metrics.clone();
        let patience = Patience { time, on_end: Arc::new(move || metrics.untaken()) };
        let ending = Some(self.ending.clone());
        let terms = ConnectionTerms { version, idle: self.idle, patience, ending, activity };
        connection::serve(stream, terms, answer).await;
    }

    /// Passes a request to the gateway. `open` lives until the connection has taken the gateway's whole answer. The key is looked up at
    /// once, not when the future is polled, so that a stranger's head takes no memory until then.
    fn answer(
        &self,
        request: hyper::Request<Incoming>,
        from: SocketAddr,
        newcomer: &Newcomer,
        open: OpenRequest,
    ) -> impl Future<Output = io::Result<Response<KeptBody<ResponseBody, Arc<OpenRequest>>>>> + Send + use<> {
        let (parts, body) = request.into_parts();
        let expects_continue = parts.version < Version::HTTP_2 && parts.headers.contains_key(EXPECT);
        let begun = (self.source)().map(|(gateway, classes)| {
            let mut head = message::head(&parts);
            let refusal = if gateway.has_keys() { None } else { self.pages.check(&parts).err() };
            let tenant = gateway.tenant(&head);
            match &tenant {
                Ok(tenant) if refusal.is_none() => {
                    let user = tenant.as_ref().map(|tenant| &tenant.name);
                    newcomer.may_stay_as(|| Some(Holder::of(user, Some(from))));
                }
                Ok(_) => {}
                Err(_) => head = refused_head(head),
            }
            let (exchange, awaited) = TcpExchange::new(body, Departure::of(&open, &self.is_cut));
            let (listener, path) = (self.listener, PathStats::default());
            let asker = Asker { user: None, tenant, listener, client: Some(from), path, refusal };
            let (on_served, open) = (self.on_served.clone(), Arc::new(open));
            let kept = open.clone();
            // In its own task, which notices that the client is gone and then ends the engine's work.
            tokio::spawn(async move {
                let exchange = Exchange::Tcp(exchange);
                if is_ping(&head) {
                    acknowledge(exchange).await;
                } else {
                    on_served(gateway.serve(exchange, head, &classes, &asker).await);
                }
                drop(open);
            });
            (awaited, kept)
        });
        async move {
            let (awaited, kept) = begun.ok_or(io::ErrorKind::ConnectionReset)?;
            let (head, answer) = awaited.answer().await?;
            let is_last = expects_continue && !answer.asked_for_body();
            let mut response = message::response(head, KeptBody { body: answer, _kept: kept });
            if is_last {
                // The next bytes may be the body or another request (RFC 9110 §10.1.1).
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response)
        }
    }
}

/// Returns what the gateway needs of the head of a request without a key that it knows. Until the request's task runs, the rest would take
/// memory: a connection by HTTP/2 brings up to 128 heads at once.
fn refused_head(head: RequestHead) -> RequestHead {
    // No operation has a longer path, but for the name of a model.
    const PATH_BYTES: usize = 256;
    let path = head.path.as_ref().map(|path| Bytes::copy_from_slice(path.get(..PATH_BYTES).unwrap_or(path)));
    let id = client_id(&head).map(|id| Field::new(REQUEST_ID, id.to_owned()));
    RequestHead { path, fields: id.into_iter().collect(), ..head }
}

#[cfg(test)]
mod tests;
