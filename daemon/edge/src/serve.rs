//! A local address for clients of the OpenAI API. Their requests go to a gateway over the connections that all local addresses
//! share.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use admission::stopped::StoppedReaders;
use config::serve::Serve;
use masque::h3::{ProtocolError, RequestHead, ResponseHead};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use quic::{
    class::{Membership, Terms},
    h3::{self, Request},
};
use relay_client::{FirstRequest, credentials::CredentialsRefused, endpoint::ANSWER_TIMEOUT};
use role::{
    access::way::Way,
    door::{self, Door},
    traffic::{Traffic, UserTraffic, Volume},
};
use serving::{
    classes::RequestClasses,
    entrance::{Asked, ClientLimits, GatewayAccess, ModelEntrance, NotAsked, Patience},
    pages::PageRules,
};
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep, timeout},
};
use uplink::{Link, Uplink};

use super::{
    LocalAddressCounters,
    balance::{self, GatewayHealth, Seen},
    connect::{NoConnection, RelayAccess},
    roster::LocalEntrance,
};

/// A local address, and its connected clients.
pub struct Clients {
    door: Door,
    entrance: Arc<ModelEntrance<ToGateways>>,
    last: LastAnswers,
}

/// The answers that go on after their local addresses have ended, for up to [`config::relay::DRAIN`]. Clones share them.
#[derive(Clone, Debug)]
pub struct LastAnswers(
    /// True once they are cut. Each of these local addresses has a receiver.
    watch::Sender<bool>,
);

impl Default for LastAnswers {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl LastAnswers {
    /// Cuts all answers, now and later.
    pub fn cut(&self) {
        self.0.send_replace(true);
    }

    /// Whether there are any.
    pub fn go_on(&self) -> bool {
        self.0.receiver_count() > 0
    }

    /// Waits until there are none.
    pub async fn ended(&self) {
        self.0.closed().await;
    }
}

/// A local address while it is served. Dropping it accepts no more clients, and lets their current answers end.
struct Open {
    /// `None` once this is dropped.
    door: Option<Door>,
    entrance: Arc<ModelEntrance<ToGateways>>,
    last: LastAnswers,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.entrance.end();
        // There is no runtime if the process ends.
        let (Some(door), Ok(runtime)) = (self.door.take(), Handle::try_current()) else { return };
        let (entrance, mut is_cut) = (self.entrance.clone(), self.last.0.subscribe());
        runtime.spawn(async move {
            tokio::select! {
                () = door.end() => {}
                // The sender may be gone before.
                _ = is_cut.wait_for(|is_cut| *is_cut) => entrance.cut(),
                () = sleep(config::relay::DRAIN) => entrance.cut(),
            }
        });
    }
}

/// How requests of one local address get to gateways.
struct ToGateways {
    /// The bytes of all its requests and answers.
    moved: Arc<UserTraffic>,
    /// One for each gateway, or a single one for the first gateway that works.
    accesses: Vec<RelayAccess>,
    health: Arc<Mutex<Vec<GatewayHealth>>>,
}

/// A request that was sent to a gateway.
pub struct RequestAtGateway {
    link: Link,
    traffic: Arc<Traffic>,
    _first: FirstRequest,
    counted: CountedRequest,
}

/// A request that counts at a gateway until it is dropped.
struct CountedRequest {
    /// The index of the gateway, and the hash of the model's name in the request.
    place: usize,
    model: u64,
    health: Arc<Mutex<Vec<GatewayHealth>>>,
}

impl Drop for CountedRequest {
    fn drop(&mut self) {
        if let Some(gateway) = self.health.lock().get_mut(self.place) {
            gateway.ended();
        }
    }
}

/// A place on another path, for a copy of a request to a gateway.
pub struct CopyPath {
    link: Link,
    terms: Terms,
    place: usize,
    model: u64,
}

impl Drop for RequestAtGateway {
    fn drop(&mut self) {
        // A request without an answer, such as a copy that was not needed, says nothing about the size of answers.
        if self.traffic.bytes().1 == 0 {
            self.link.forget_traffic();
        }
    }
}

impl Clients {
    /// Serves `serve` on a listener that [`door::bind`] made, through one of `uplinks`. `classes` decide the class of each
    /// request. When the address ends, its answers become some of the `last`.
    ///
    /// # Errors
    /// The system refuses to watch the listener.
    pub fn new(
        listener: TcpListener,
        serve: &Serve,
        classes: RequestClasses,
        uplinks: Vec<Arc<Uplink>>,
        (entrance, last): (Arc<LocalEntrance>, LastAnswers),
    ) -> io::Result<Self> {
        let counters = entrance.counters.clone();
        let door = Door::new(listener, serve.max_connections, counters.when_full())?;
        let access = |uplink| {
            // Requests have classes of their own.
            let (membership, is_chosen) = (Membership::default(), false);
            RelayAccess {
                uplink,
                membership,
                is_chosen,
                idle: serve.idle,
                entrance: entrance.clone(),
                counters: counters.clone(),
                told: Default::default(),
            }
        };
        let accesses: Vec<_> = uplinks.into_iter().map(access).collect();
        let health = Arc::new(Mutex::new(vec![GatewayHealth::default(); accesses.len()]));
        let [untaken, evicted, displaced] = [(); 3].map(|()| counters.clone());
        let on_end = Arc::new(move || untaken.limit_hit("stall_timeout_seconds"));
        let limits = ClientLimits {
            max_body_bytes: serve.max_body_bytes as usize,
            bodies_bytes: serve.bodies_bytes as usize,
            max_requests: serve.max_connections as usize,
            idle: serve.idle,
            patience: Patience { time: serve.stall_timeout, on_end },
            pages: PageRules::new(&serve.hosts, serve.listen, false),
            on_evicted: Arc::new(move || evicted.limit_hit("clients_without_request")),
            on_displaced: Arc::new(move || displaced.limit_hit("connections_of_a_user")),
        };
        let gateways = ToGateways { moved: moved(&counters), accesses, health };
        Ok(Self { door, entrance: ModelEntrance::new(gateways, classes, limits, entrance.access.clone()), last })
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.door.address()
    }

    /// Serves clients until dropped. Then their connections end with their current answers, in tasks of their own.
    pub async fn run(self) {
        let Self { door, entrance, last } = self;
        let mut open = Open { door: Some(door), entrance, last };
        while let Some(door) = &mut open.door {
            let (stream, from, place) = door.next_among(open.entrance.newcomers()).await;
            // Tokens leave as they arrive.
            _ = stream.set_nodelay(true);
            door::buffer_little(&stream);
            let entrance = open.entrance.clone();
            door.spawn(entrance.serve(stream, from, place));
        }
    }
}

/// Returns the traffic that the counters of a local address count.
fn moved(counters: &LocalAddressCounters) -> Arc<UserTraffic> {
    let volume = |bytes: &Counter| Volume { bytes: bytes.clone(), ..Volume::default() };
    let (up, down) = (volume(&counters.bytes_up), volume(&counters.bytes_down));
    Arc::new(UserTraffic { up, down, ..UserTraffic::default() })
}

impl ToGateways {
    /// Returns how each gateway can be reached now.
    fn seen(&self) -> Vec<Seen> {
        let see = |access: &RelayAccess| Seen {
            // If there is no connection, this requests one.
            is_within_reach: access.uplink.is_within_reach(),
            smoothed_rtt: access.uplink.lines().iter().filter_map(|line| line.path.get().smoothed_rtt).min(),
        };
        match self.accesses.len() {
            // There is nothing to choose.
            1 => vec![Seen::default()],
            _ => self.accesses.iter().map(see).collect(),
        }
    }

    /// Chooses an untried gateway for a request for `model`, and counts the request there.
    fn choose(&self, model: u64, tried: &mut Vec<usize>) -> Option<(&RelayAccess, CountedRequest)> {
        let seen = self.seen();
        let mut health = self.health.lock();
        // A single gateway is tried again, over another connection.
        let avoided: &[usize] = if self.accesses.len() == 1 { &[] } else { tried };
        let chosen = balance::choose(&health, &seen, (model, avoided), Instant::now());
        // After all were tried, any of them.
        let place = chosen.or_else(|| balance::choose(&health, &seen, (model, &[]), Instant::now()))?;
        health.get_mut(place)?.asked();
        drop(health);
        tried.push(place);
        Some((self.accesses.get(place)?, CountedRequest { place, model, health: self.health.clone() }))
    }

    /// Counts another request at a gateway.
    fn count(&self, place: usize, model: u64) -> CountedRequest {
        if let Some(gateway) = self.health.lock().get_mut(place) {
            gateway.asked();
        }
        CountedRequest { place, model, health: self.health.clone() }
    }

    /// Sends the head of a request over a connection, on the terms of the time at which it leaves.
    async fn send(
        &self,
        link: Link,
        terms: impl FnOnce() -> Terms + Send,
        counted: CountedRequest,
        head: impl FnOnce() -> RequestHead + Send,
    ) -> Result<(Request, RequestAtGateway), h3::Error> {
        let (request, first) = link.relay.ask_itself(head).await?;
        let terms = terms();
        request.set_terms(&terms);
        let traffic = Arc::new(Traffic::of([Some(self.moved.clone()), None]));
        link.carries_traffic(traffic.clone(), &terms.class, terms.signal.as_ref());
        Ok((request, RequestAtGateway { link, traffic, _first: first, counted }))
    }

    fn failed(&self, place: usize) {
        if let Some(gateway) = self.health.lock().get_mut(place) {
            gateway.failed(Instant::now());
        }
    }
}

impl GatewayAccess for ToGateways {
    type Place = RequestAtGateway;

    type OtherPath = CopyPath;

    async fn ask(
        &self,
        head: impl FnOnce() -> RequestHead + Send,
        terms: impl Fn() -> Terms + Send + Sync,
        model: u64,
        body_bytes: usize,
        tried: &mut Vec<usize>,
    ) -> Result<Asked<Self>, NotAsked> {
        let (access, counted) =
            self.choose(model, tried).ok_or_else(|| NotAsked::NoGateway("no gateway is configured".into()))?;
        let chosen = counted.place;
        let asking = async {
            // The waits for a connection and for a stream are a part of the request's time.
            let (link, copy) = access.places_for_request(&terms(), body_bytes as u64).await?;
            let (request, place) = self.send(link, &terms, counted, head).await.map_err(NoConnection::Lost)?;
            let other_path = copy.map(|link| CopyPath { link, terms: terms(), place: chosen, model });
            Ok(Asked { request, place, other_path })
        };
        let asked = match access.uplink.unreached_for(ANSWER_TIMEOUT) {
            Some(failure) => Err(NoConnection::NoLink(failure)),
            None => timeout(ANSWER_TIMEOUT, asking).await.unwrap_or_else(|_| Err(access.late())),
        };
        match &asked {
            Ok(_) => _ = access.counters.tunnels_opened.inc(),
            // The client is at fault, and the gateway was not asked.
            Err(NoConnection::Lost(h3::Error::Protocol(ProtocolError::Stream(_, why)))) => {
                access.counters.refuse("invalid_head");
                return Err(NotAsked::Head(why));
            }
            Err(error) => {
                access.refused(error);
                self.failed(chosen);
            }
        }
        asked.map_err(|error: NoConnection| NotAsked::NoGateway(error.to_string()))
    }

    async fn copy(
        &self,
        path: CopyPath,
        head: impl FnOnce() -> RequestHead + Send,
    ) -> Option<(Request, RequestAtGateway)> {
        let CopyPath { link, terms, place, model } = path;
        let access = self.accesses.get(place)?;
        let asked = self.send(link, || terms, self.count(place, model), head);
        let asked = timeout(ANSWER_TIMEOUT, asked).await.ok()?.ok()?;
        access.uplink.note_copy();
        Some(asked)
    }

    fn copy_was_first(&self, copy: &RequestAtGateway) {
        if let Some(access) = self.accesses.get(copy.counted.place) {
            access.uplink.note_copy_first();
        }
    }

    fn readers(&self, place: &RequestAtGateway) -> Arc<StoppedReaders> {
        place.link.relay.http().stopped_readers().clone()
    }

    fn traffic(&self, place: &RequestAtGateway) -> Arc<Traffic> {
        place.traffic.clone()
    }

    fn way(&self, place: &RequestAtGateway) -> Option<Way> {
        Some(place.link.line().way().clone())
    }

    fn has_others(&self, tried: &[usize]) -> bool {
        (0..self.accesses.len()).any(|place| !tried.contains(&place))
    }

    fn has_ready(&self, tried: &[usize]) -> bool {
        balance::has_ready(&self.health.lock(), &self.seen(), tried, Instant::now())
    }

    async fn lost(&self, asked: &RequestAtGateway) {
        asked.link.line().silenced().await;
        if self.accesses.len() > 1 {
            self.failed(asked.counted.place);
        }
    }

    fn next_attempt_in(&self) -> Option<Duration> {
        // `None` is less than any time: a gateway that is within reach, or that is being connected to, needs no wait.
        self.accesses.iter().map(|access| access.uplink.next_attempt_in()).min().flatten()
    }

    fn accepted(&self, asked: &RequestAtGateway) {
        asked.link.relay.let_in();
    }

    fn answered(&self, asked: &RequestAtGateway, answer: Option<&ResponseHead>) {
        // Without credentials that the gateway accepts, it treats us as a stranger. 401 is about the client's own key.
        match answer {
            Some(head) if head.status == 407 => {
                let refused = CredentialsRefused::of(head);
                let is_news = asked.link.relay.credentials().note(refused.clone());
                // The introduction may have succeeded before the token expired or was removed.
                if let (true, Some(refused), Some(access)) = (is_news, refused, self.accesses.get(asked.counted.place))
                {
                    access.uplink.tell_refusal(asked.link.line(), &refused);
                }
            }
            Some(_) => asked.link.relay.let_in(),
            None => {}
        }
        let CountedRequest { place, model, .. } = asked.counted;
        let Some(head) = answer else { return self.failed(place) };
        let length = head.field("content-length").and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
        if let Some(length) = length {
            asked.link.id().ends_after(length);
        }
        let said = (head.status, serving::load_permille(head));
        if let Some(gateway) = self.health.lock().get_mut(place) {
            gateway.answered(model, said, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
