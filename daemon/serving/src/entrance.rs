//! A client's connection to an edge: HTTP/1.1 or HTTP/2 in, and one HTTP/3 request to the gateway for each of its requests.
//!
//! The policy's rules give a request its class at the edge, as they do at the gateway. The class orders the request among all traffic of
//! the edge, and tells the gateway how urgent the answer is. Time that passes at the edge is subtracted from all budgets of the request.
//!
//! The edge reads the whole body, so that it can send it again if the gateway has not begun an answer, or over two paths at once. It
//! passes the answer on as it arrives, including the gateway's errors. The edge's own errors have the form of the API's errors.

mod answer;
mod gateway_access;
mod recording;

use std::{
    cell::LazyCell,
    convert::Infallible,
    future::Future,
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use admission::stopped::ReaderOwner;
use bytes::Bytes;
use futures::future::{Either as Race, select};
use http_body_util::{Either, Full};
use hyper::{
    Response, StatusCode, Version,
    body::Incoming,
    header::{CONNECTION, EXPECT, HeaderValue},
};
use masque::{
    h3::{Field, RequestHead, ResponseHead},
    priority::{self, Priority},
};
use openai::{OpenAiError, RoutingFields};
use quic::class::{Since, Terms};
use role::{
    access::AccessLog,
    holder::{Holder, reader_owner},
    holder_places::{HolderPlace, HolderPlaces},
    known_clients::KnownClients,
    newcomers::{Newcomer, Newcomers},
};
use routes::limits;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, oneshot, watch},
    time::{Instant, timeout},
};

pub use self::gateway_access::{Asked, GatewayAccess, NotAsked};
use self::{
    answer::{Answer, Outcome},
    recording::Recording,
};
use crate::{
    classes::{RequestClass, RequestClasses},
    connection::{self, ConnectionTerms, HttpVersion, KeptBody, LINGER, OpenRequest},
    departure::Departure,
    gateway::{Bodies, Body, BodyShare, Failure, read_body},
    load_permille, message,
    pages::PageRules,
};

/// The fields with the time allowed for the whole answer and for its first token, in milliseconds. The time allowed for each further
/// token does not begin at an edge.
const BUDGETS: [&[u8]; 2] = [b"x-paced-budget-ms", b"x-slo-ttft-ms"];

/// How many times a request is sent at most; it is sent again only after the gateway was lost.
const MOST_TRIES: usize = 2;

pub use crate::connection::Patience;

/// The limits of clients.
#[derive(Clone)]
pub struct ClientLimits {
    /// The maximum size of a request's body.
    pub max_body_bytes: usize,
    /// The maximum size of all bodies in memory together.
    pub bodies_bytes: usize,
    /// The maximum of concurrent requests on all connections. Further ones wait once their bodies are complete, as do those of a user or
    /// network that has as many as could still begin.
    pub max_requests: usize,
    /// How long a connection may be without a request.
    pub idle: Duration,
    /// How long a client may stop reading an answer.
    pub patience: Patience,
    /// Which requests of web pages are refused.
    pub pages: PageRules,
    /// The callback after a client without a complete request was closed in favour of another one.
    pub on_evicted: Arc<dyn Fn() + Send + Sync>,
    /// The callback after a connection of the user with the most was closed in favour of a client that waited.
    pub on_displaced: Arc<dyn Fn() + Send + Sync>,
}

/// A local address of an edge for clients of models.
pub struct ModelEntrance<W> {
    gateways: W,
    classes: RequestClasses,
    limits: ClientLimits,
    access: Arc<AccessLog>,
    /// The number of requests so far.
    requests: AtomicU64,
    /// The bodies of requests without an answer.
    bodies: Arc<Bodies>,
    /// The places for concurrent requests.
    places: Arc<HolderPlaces>,
    /// Clients without a complete request.
    newcomers: Arc<Newcomers>,
    /// True once connections may begin no more requests.
    ending: watch::Sender<bool>,
    /// Whether the remaining answers are cut.
    is_cut: Arc<AtomicBool>,
}

type Answered<P> = Response<Either<KeptBody<Full<Bytes>, oneshot::Sender<Infallible>>, Answer<P>>>;

impl<W: GatewayAccess> ModelEntrance<W> {
    /// Returns an address whose requests go to `gateways`. `classes` gives each request its class, and `access` records it.
    #[must_use]
    pub fn new(gateways: W, classes: RequestClasses, limits: ClientLimits, access: Arc<AccessLog>) -> Arc<Self> {
        let (requests, places) = (AtomicU64::new(0), HolderPlaces::new(limits.max_requests));
        // All programs of this host have the same address.
        let displaced = limits.on_displaced.clone();
        let known = KnownClients::new(classes.listener(), Box::new(move || displaced()));
        let newcomers = Newcomers::new(limits.max_requests, usize::MAX, known);
        let (ending, is_cut) = (watch::Sender::new(false), Arc::default());
        let bodies = Bodies::new(limits.bodies_bytes, "bodies_bytes of this edge");
        Arc::new(Self { gateways, classes, limits, access, requests, bodies, places, newcomers, ending, is_cut })
    }

    /// Makes each connection end after its current requests. Connections without a complete request end at once.
    pub fn end(&self) {
        self.ending.send_replace(true);
        self.newcomers.evict_all();
    }

    /// Makes records of answers that end from now on say that the edge cut them. Call it before the connections are dropped.
    pub fn cut(&self) {
        self.is_cut.store(true, Relaxed);
    }

    /// Returns the clients that may have to make room for others.
    #[must_use]
    pub fn newcomers(&self) -> &Newcomers {
        &self.newcomers
    }

    /// Serves a connection of the client at the address `from` to its end. Until a request of it was complete, the client may have to make
    /// room for others. `place` is its place among the address's connections.
    pub async fn serve(self: Arc<Self>, stream: TcpStream, from: SocketAddr, place: Option<OwnedSemaphorePermit>) {
        // All programs of this host have one address, and so one line. None of them is sent away.
        let is_local = from.ip().to_canonical().is_loopback();
        if let Some((newcomer, mut eviction, _place)) = self.newcomers.enter(from.ip(), place, is_local).await {
            tokio::select! {
                () = self.clone().converse(stream, from, newcomer.clone()) => return,
                () = eviction.comes() => {}
            }
            if newcomer.is_known() {
                return tracing::debug!(client = %from, "closed a connection of the user with the most: too many clients");
            }
        }
        if !*self.ending.borrow() {
            (self.limits.on_evicted)();
            tracing::debug!(client = %from, "closed a client without a complete request: too many clients");
        }
    }

    async fn converse(self: Arc<Self>, stream: TcpStream, from: SocketAddr, newcomer: Arc<Newcomer>) {
        let version = match HttpVersion::of_beginning(&stream, self.limits.idle).await {
            Ok(version) => version,
            Err(error) => return tracing::debug!(client = %from, "client left: {error}"),
        };
        self.talk(stream, version, from, newcomer).await;
    }

    /// Serves a connection with a version of HTTP to its end.
    async fn talk(
        self: Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        version: HttpVersion,
        from: SocketAddr,
        newcomer: Arc<Newcomer>,
    ) {
        let (entrance, activity) = (self.clone(), newcomer.activity());
        let answer = move |request, open: OpenRequest| {
            let (entrance, newcomer) = (entrance.clone(), newcomer.clone());
            async move {
                let (answered, place) = entrance.answer(request, (from, &open), &newcomer).await?;
                Ok::<_, io::Error>(answered.map(|body| KeptBody { body, _kept: (open, place) }))
            }
        };
        let (idle, patience) = (self.limits.idle, self.limits.patience.clone());
        let ending = Some(self.ending.subscribe());
        connection::serve(stream, ConnectionTerms { version, idle, patience, ending, activity }, answer).await;
    }

    /// Answers a request, and returns its place among the concurrent ones. Fails if the client left within the body.
    async fn answer(
        &self,
        request: hyper::Request<Incoming>,
        (from, open): (SocketAddr, &OpenRequest),
        newcomer: &Newcomer,
    ) -> io::Result<(Answered<W::Place>, Option<HolderPlace>)> {
        let start = Instant::now();
        let id = self.requests.fetch_add(1, Relaxed) + 1;
        let departure = Departure::of(open, &self.is_cut);
        let mut recording = Recording::begin(&self.access, start, id, (self.classes.listener(), from), departure);
        let expects_continue = request.version() < Version::HTTP_2 && request.headers().contains_key(EXPECT);
        let (answering, begun) = oneshot::channel();
        match self.pass(request, (start, from, open), newcomer, (&mut recording, begun)).await {
            Ok((response, place)) => {
                Ok((response.map(|answer| Either::Right(answer.recorded(recording))), Some(place)))
            }
            // The record says by default that the client left.
            Err(Failure::Gone | Failure::Untaken) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Failure::Refused(refusal) | Failure::Broken(refusal, _)) => {
                recording.refused(&refusal);
                tracing::debug!(%refusal, "request refused");
                let body = KeptBody { body: Full::new(refusal.body()), _kept: answering };
                let mut response = Response::new(Either::Left(body));
                *response.status_mut() = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::BAD_GATEWAY);
                let fields = response.headers_mut();
                fields.insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                if let Some(seconds) = refusal.retry_after_s() {
                    fields.insert(hyper::header::RETRY_AFTER, HeaderValue::from(seconds));
                }
                if expects_continue && matches!(refusal, OpenAiError::TooLarge { .. }) {
                    // The next bytes may be the body or another request (RFC 9110 §10.1.1).
                    fields.insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok((response, None))
            }
        }
    }

    async fn pass(
        &self,
        request: hyper::Request<Incoming>,
        (start, from, open): (Instant, SocketAddr, &OpenRequest),
        newcomer: &Newcomer,
        (recording, begun): (&mut Recording, oneshot::Receiver<Infallible>),
    ) -> Result<(Response<Answer<W::Place>>, HolderPlace), Failure> {
        let gateways = &self.gateways;
        let (parts, body) = request.into_parts();
        // `GatewayAccess::ask` adds the gateway's authority.
        let mut head = message::head(&parts);
        let user = self.classes.user(&head, SystemTime::now());
        recording.asked_by(user.clone(), &head);
        let holder = Holder::of(user.as_ref(), Some(from));
        let reader = reader_owner(user.as_ref(), from.ip());
        // No page of a browser knows a key.
        let checked = if user.is_none() { self.limits.pages.check(&parts) } else { Ok(()) };
        drop(parts);
        let share = self.bodies.begin(holder.clone()).with_head(&head);
        let body = read(body, begun, checked.map(|()| self.limits.max_body_bytes), share).await?;
        open.active().is_complete();
        newcomer.may_stay_as(|| Some(holder.clone()));
        // Only now: requests that wait for a place would fill the window of their HTTP/2 connection, and so hold up the body of one that
        // has a place.
        let request_place = self.places.take(holder).await;
        let body = &body.bytes;
        // The gateway would refuse the same limit, after the way to it.
        limits::read(&head)?;
        if !body.is_empty() {
            head.fields.push(Field::new("content-length", body.len().to_string()));
        }
        let (class, model) = {
            // Read once, for rules, the log and the choice between gateways, and only if one of them needs the fields.
            let fields = LazyCell::new(|| RoutingFields::read(body).ok());
            let class = self.classes.of(user.as_deref(), &head, || fields.as_ref());
            recording.asks(|| fields.as_ref(), &class.class.policy().name);
            let named = if gateways.has_others(&[0]) { fields.as_ref() } else { None };
            // A gateway's report about the engines of a model is kept under this hash of the model's name.
            let hash = |fields: &RoutingFields| BuildHasherDefault::<DefaultHasher>::default().hash_one(&fields.model);
            (class, named.map(hash).unwrap_or_default())
        };
        let signal = Priority::from_fields(&head.fields);
        if class.is_chosen && head.field(priority::FIELD_NAME).is_none() {
            head.fields.extend(class.class.signal().to_field());
        }
        let (mut tries, mut tried, mut refusal) = (0, Vec::new(), None);
        let no_gateway = |why: &str| OpenAiError::no_gateway(why, gateways.next_attempt_in());
        let answered = loop {
            tries += 1;
            let head_now = || budgeted(&head, start.elapsed());
            let terms_now = || terms(&class, signal, start.elapsed());
            let asked = match gateways.ask(head_now, terms_now, model, body.len(), &mut tried).await {
                Ok(asked) => asked,
                Err(NotAsked::Head(why)) => break Err(OpenAiError::Head(why)),
                Err(_) if self.may_do_better(refusal.as_ref(), &tried) => continue,
                Err(NotAsked::NoGateway(why)) => break Err(no_gateway(&why)),
            };
            recording.goes(|| gateways.way(&asked.place));
            let is_tried_on = tries < MOST_TRIES || self.may_do_better(refusal.as_ref(), &tried);
            let may_leave = is_tried_on || refusal.is_some();
            let (outcome, answer) = race(gateways, (asked, &reader), head_now, body, may_leave).await;
            let is_good = outcome.is_good();
            match outcome {
                Outcome::Answered(answered) => {
                    let is_refused = answered.status == 407;
                    let answered = (answered, answer);
                    if is_good || !self.may_do_better(Some(&answered), &tried) {
                        // A proxy's status for bad credentials; these are the edge's, not the client's.
                        let refused = "it does not take this edge's credentials";
                        break if is_refused { Err(no_gateway(refused)) } else { Ok(answered) };
                    }
                    // The client gets it if no other gateway has an answer.
                    refusal = if is_refused { refusal } else { Some(answered) };
                }
                // No part of an answer has arrived, so the client cannot get parts of two.
                Outcome::Lost | Outcome::Silent if is_tried_on => {}
                Outcome::Lost | Outcome::Silent => {
                    break Err(no_gateway("the gateway was lost before it answered"));
                }
            }
        };
        let (answered, answer) = answered.or_else(|error| refusal.ok_or(error))?;
        recording.goes(|| gateways.way(answer.place()));
        recording.answers(&head, &answered);
        Ok((message::response(answered, answer), request_place))
    }

    /// Whether another gateway may have a better answer than the `refusal`, if there is one. The refusal of a gateway that works does not
    /// wait for a gateway that may be down.
    fn may_do_better(&self, refusal: Option<&(ResponseHead, Answer<W::Place>)>, tried: &[usize]) -> bool {
        match refusal {
            Some((head, _)) if load_permille(head).is_some() => self.gateways.has_ready(tried),
            _ => self.gateways.has_others(tried),
        }
    }
}

/// Returns the terms on which the edge sends a request of a class, whose client gave this signal `elapsed` ago.
fn terms(class: &RequestClass, signal: Option<Priority>, elapsed: Duration) -> Terms {
    let signal = signal.map(|signal| shortened(signal, elapsed));
    Terms { since: Since::First, ..class.class.terms(signal.as_ref()) }
}

/// Sends the body of a request that was `asked`, and a copy of it if there is another path for that. The first answer that the other
/// request cannot better counts, and the other request is cancelled.
async fn race<W: GatewayAccess>(
    gateways: &W,
    (Asked { request, place, other_path }, reader): (Asked<W>, &ReaderOwner),
    head: impl FnOnce() -> RequestHead + Send,
    body: &Bytes,
    may_leave: bool,
) -> (Outcome, Answer<W::Place>) {
    let mut first = Answer::new(gateways, request, place, reader);
    let Some(other_path) = other_path else {
        let outcome = first.begin(gateways, body, may_leave).await;
        return (outcome, first);
    };
    // Few requests have a copy, and the others have no room for one.
    let beginning = Box::pin(async move {
        let outcome = first.begin(gateways, body, true).await;
        (outcome, first)
    });
    let copying = Box::pin(async {
        let (request, place) = gateways.copy(other_path, head).await?;
        let mut copy = Answer::new(gateways, request, place, reader);
        let outcome = copy.begin(gateways, body, true).await;
        Some((outcome, copy))
    });
    let (won, is_copy) = winner(beginning, copying).await;
    if is_copy {
        gateways.copy_was_first(won.1.place());
    }
    won
}

/// Returns the outcome of a request or of its copy that the client can use best, and whether it is the copy's. Waits for both unless one
/// settles the matter.
async fn winner<A>(
    beginning: impl Future<Output = (Outcome, A)>,
    copying: impl Future<Output = Option<(Outcome, A)>>,
) -> ((Outcome, A), bool) {
    let (first, copy) = match select(pin!(beginning), pin!(copying)).await {
        Race::Left((first, _)) if first.0.is_settled() => return (first, false),
        Race::Right((Some(copy), _)) if copy.0.is_settled() => return (copy, true),
        Race::Left((first, copying)) => (first, copying.await),
        Race::Right((copy, beginning)) => (beginning.await, copy),
    };
    match copy {
        Some(copy) if copy.0.says_more_than(&first.0) => (copy, true),
        _ => (first, false),
    }
}

/// Returns a head whose budgets, in whichever field, are reduced by `elapsed`: the gateway counts only from the arrival of the request.
fn budgeted(head: &RequestHead, elapsed: Duration) -> RequestHead {
    let mut head = head.clone();
    for field in &mut head.fields {
        if BUDGETS.contains(&&field.name[..]) {
            if let Some(budget_ms) = limits::milliseconds(&field.value) {
                field.value = left_ms(budget_ms, elapsed).to_string().into();
            }
        } else if field.name == priority::FIELD_NAME
            && let Some(signal) = Priority::parse(&field.value).filter(|signal| signal.deadline_ms.is_some())
        {
            field.value = shortened(signal, elapsed).to_field_value().into();
        }
    }
    head
}

/// Returns a signal whose deadline, if it has one, is reduced by `elapsed`.
fn shortened(signal: Priority, elapsed: Duration) -> Priority {
    Priority { deadline_ms: signal.deadline_ms.map(|deadline_ms| left_ms(deadline_ms, elapsed)), ..signal }
}

fn left_ms(budget_ms: u64, elapsed: Duration) -> u64 {
    budget_ms.saturating_sub(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX))
}

/// Reads a client's body of up to `max_bytes`, or refuses the request with the error in its place. After a refusal, the rest is read and
/// dropped for a while: unread bytes would reset the connection before the client has read the reason. `begun` completes once the head of
/// a refusal is on its way.
async fn read(
    mut body: Incoming,
    begun: oneshot::Receiver<Infallible>,
    max_bytes: Result<usize, OpenAiError>,
    share: BodyShare,
) -> Result<Body, Failure> {
    let read = match max_bytes {
        Ok(max_bytes) => read_body(&mut body, max_bytes, share).await,
        Err(refusal) => Err(refusal.into()),
    };
    if matches!(read, Err(Failure::Refused(_))) {
        tokio::spawn(async move {
            // If the body were asked for earlier, hyper would send 100 (Continue) to a client that waits for it, and the client a body
            // without use (RFC 9110 §10.1.1).
            _ = timeout(LINGER.0, begun).await;
            connection::discard(&mut body, LINGER).await;
        });
    }
    read
}

#[cfg(test)]
mod tests;
