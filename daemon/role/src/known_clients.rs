//! Clients of a listener for models, or of a proxy, that are no newcomers any more (`newcomers`), and which of their connections makes room
//! for another client. At a proxy, none makes room.
//!
//! A user may have all connections of a listener while no other client waits for one. Once a client waits, the user with the most
//! connections loses one: the connection that has been without a request for longest, or else one that has waited for the rest of a body
//! for a while. A connection whose request is being answered stays. The end of an earlier answer may still be on its way, so a connection
//! that makes room begins no more requests and then has a second in which its client can take the rest.
//!
//! A user loses none while it has no more than an equal share of the connections, where the client that waits counts as one more user. So
//! a user cannot keep others out, no matter from how many addresses it connects.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::{holder::Holder, seldom::Seldom};

/// How long the body of a request may arrive before its connection can make room: it may come over a slow path.
const GRACE: Duration = Duration::from_secs(2);

/// How long the end of an answer may still take to its client, once the connection makes room.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// The interval at which the clients that wait for a place, together, look for a connection that can make room.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Called with each connection that was closed in favour of a client that waited.
pub type OnDisplaced = Box<dyn Fn() + Send + Sync>;

/// The known clients of one listener.
pub struct KnownClients {
    listener: SocketAddr,
    on_displaced: OnDisplaced,
    told: Seldom,
    now: Mutex<KnownNow>,
}

#[derive(Default)]
struct KnownNow {
    /// The connections of each holder, by their numbers.
    of: HashMap<Holder, BTreeMap<u64, Connection>>,
    /// How many connections there were so far.
    came: u64,
    /// How many clients wait for a place.
    waiting: usize,
    /// How many connections make room and have not ended yet.
    leaving: usize,
    /// Until when no connection is looked for, because none could make room just before.
    none_until: Option<Instant>,
}

/// A client that waits for a place among the connections, until dropped.
pub(crate) struct WaitingClient(Arc<KnownClients>);

/// A connection. Dropping `_stay` makes its client leave.
struct Connection {
    activity: Arc<Activity>,
    _stay: oneshot::Sender<Infallible>,
}

/// A known client, until dropped.
pub(crate) struct KnownClient {
    of: Arc<KnownClients>,
    holder: Holder,
    number: u64,
}

/// What happens on one connection.
#[derive(Debug)]
pub struct Activity {
    requests: Mutex<ActiveRequests>,
    /// Whether it makes room. Set while `requests` is locked, so that a request that begins later knows it.
    is_displaced: AtomicBool,
    displaced: Notify,
}

#[derive(Debug)]
struct ActiveRequests {
    /// Requests whose bodies are not complete.
    arriving: usize,
    /// Requests that are being answered.
    answered: usize,
    /// Since when the connection has had no request that is being answered. It begins anew with the first body that arrives.
    since: Instant,
}

/// A request on a connection, until dropped.
#[derive(Debug)]
pub struct ActiveRequest {
    of: Arc<Activity>,
    is_complete: AtomicBool,
}

impl KnownClients {
    /// Returns an empty set for a listener with this configured address, which names it in the log. Calls `on_displaced` for each
    /// connection that makes room.
    #[must_use]
    pub fn new(listener: SocketAddr, on_displaced: OnDisplaced) -> Arc<Self> {
        Arc::new(Self { listener, on_displaced, told: Seldom::default(), now: Mutex::default() })
    }

    /// Adds a connection, whose client leaves when `stay` is dropped.
    pub(crate) fn enter(
        self: &Arc<Self>,
        holder: Holder,
        activity: Arc<Activity>,
        stay: oneshot::Sender<Infallible>,
    ) -> KnownClient {
        let mut now = self.now.lock();
        now.came += 1;
        let number = now.came;
        now.of.entry(holder.clone()).or_default().insert(number, Connection { activity, _stay: stay });
        KnownClient { of: self.clone(), holder, number }
    }

    /// Adds a client that waits for a place.
    pub(crate) fn wait(self: &Arc<Self>) -> WaitingClient {
        self.now.lock().waiting += 1;
        WaitingClient(self.clone())
    }

    /// Makes a connection leave in favour of a client that waits, if one can make room and fewer leave already than clients wait. Does
    /// nothing for a while after it found none: each search looks at all connections, and all clients that wait ask for it.
    fn make_room(&self) {
        let Some((holder, connections)) = self.now.lock().make_room(Instant::now()) else { return };
        (self.on_displaced)();
        self.told.note(|unsaid| {
            // Without keys, only an address would say more.
            let user = if let Holder::User(name) = &holder { name } else { "" };
            tracing::warn!(
                listener = %self.listener, user, connections, unsaid,
                "all connections of a listener for models were taken and another client waited, so the user with the most has lost one \
                 without a complete request: raise `max_connections`, or let the user keep fewer connections open"
            );
        });
    }
}

impl WaitingClient {
    /// Lets a known client make room, if one can.
    pub(crate) fn make_room(&self) {
        self.0.make_room();
    }
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        self.0.now.lock().waiting -= 1;
    }
}

impl KnownNow {
    /// Displaces a connection if that is due. Returns the same as [`displace`](Self::displace).
    fn make_room(&mut self, now: Instant) -> Option<(Holder, usize)> {
        if self.leaving >= self.waiting || self.none_until.is_some_and(|until| now < until) {
            return None;
        }
        let displaced = self.displace(now);
        self.none_until = displaced.is_none().then(|| now + PAUSE);
        displaced
    }

    /// Removes the connection that makes room. Returns its holder, and how many connections the holder had.
    fn displace(&mut self, now: Instant) -> Option<(Holder, usize)> {
        // The client that waits may have a user of its own.
        let share = self.of.values().map(BTreeMap::len).sum::<usize>() / (self.of.len() + 1);
        let first_to_leave = |connections: &BTreeMap<u64, Connection>| {
            let waiting =
                connections.iter().filter_map(|(number, of)| Some((of.activity.requests.lock().waits(now)?, *number)));
            waiting.min()
        };
        let above = self.of.iter().filter(|(_, connections)| connections.len() > share.max(1));
        let leaving = above.filter_map(|(holder, connections)| {
            first_to_leave(connections).map(|first| (connections.len(), Reverse(first), holder))
        });
        let (count, Reverse((_, number)), holder) = leaving.max_by_key(|(count, first, _)| (*count, *first))?;
        let holder = holder.clone();
        let connections = self.of.get_mut(&holder)?;
        // A request may have come meanwhile.
        if !connections.get(&number)?.activity.displace(now) {
            return None;
        }
        connections.remove(&number);
        self.leaving += 1;
        Some((holder, count))
    }
}

impl Drop for KnownClient {
    fn drop(&mut self) {
        let mut now = self.of.now.lock();
        let connections = now.of.get_mut(&self.holder);
        let Some(connections) = connections.filter(|connections| connections.contains_key(&self.number)) else {
            now.leaving -= 1;
            return;
        };
        connections.remove(&self.number);
        if connections.is_empty() {
            now.of.remove(&self.holder);
        }
    }
}

impl Default for Activity {
    fn default() -> Self {
        let requests = ActiveRequests { arriving: 0, answered: 0, since: Instant::now() };
        Self { requests: Mutex::new(requests), is_displaced: AtomicBool::new(false), displaced: Notify::new() }
    }
}

impl Activity {
    /// Begins a request whose body is not complete. If the connection makes room, the request comes too late.
    pub fn begin(self: &Arc<Self>) -> ActiveRequest {
        let mut requests = self.requests.lock();
        if requests.arriving + requests.answered == 0 {
            requests.since = Instant::now();
        }
        requests.arriving += 1;
        ActiveRequest { of: self.clone(), is_complete: AtomicBool::new(false) }
    }

    /// Waits until the connection has to make room. Only one caller may wait.
    pub async fn displaced(&self) {
        while !self.is_displaced.load(Relaxed) {
            self.displaced.notified().await;
        }
    }

    /// Makes the connection leave. Returns `false`, and changes nothing, if its client waits for an answer, or its request may still
    /// arrive.
    pub fn displace(&self, now: Instant) -> bool {
        let requests = self.requests.lock();
        let leaves = requests.waits(now).is_some();
        if leaves {
            self.is_displaced.store(true, Relaxed);
            self.displaced.notify_one();
        }
        leaves
    }

    /// Whether the connection has to make room.
    pub(crate) fn is_displaced(&self) -> bool {
        self.is_displaced.load(Relaxed)
    }
}

impl ActiveRequests {
    /// Returns whether a request arrives, and since when the connection has waited for its client; `None` if the client waits for an
    /// answer, or its request may still arrive.
    fn waits(&self, now: Instant) -> Option<(bool, Instant)> {
        let Self { arriving, answered, since } = *self;
        let is_waiting = answered == 0 && (arriving == 0 || now.saturating_duration_since(since) >= GRACE);
        is_waiting.then_some((arriving > 0, since))
    }
}

impl ActiveRequest {
    /// Notes that the whole body has arrived.
    pub fn is_complete(&self) {
        if !self.is_complete.swap(true, Relaxed) {
            let mut requests = self.of.requests.lock();
            requests.arriving -= 1;
            requests.answered += 1;
        }
    }

    /// Whether its connection leaves in favour of another client.
    #[must_use]
    pub fn is_displaced(&self) -> bool {
        self.of.is_displaced()
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut requests = self.of.requests.lock();
        if self.is_complete.load(Relaxed) {
            requests.answered -= 1;
        } else {
            requests.arriving -= 1;
        }
        if requests.arriving + requests.answered == 0 || (self.is_complete.load(Relaxed) && requests.answered == 0) {
            requests.since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::time::advance;

    use super::*;

    /// A client of a user, with the activity of its connection.
    struct Client {
        activity: Arc<Activity>,
        known: Option<KnownClient>,
        leave: oneshot::Receiver<Infallible>,
    }

    impl Client {
        fn of(known: &Arc<KnownClients>, user: &str) -> Self {
            let (stay, leave) = oneshot::channel();
            let activity = Arc::<Activity>::default();
            let known = Some(known.enter(Holder::User(user.into()), activity.clone(), stay));
            Self { activity, known, leave }
        }

        fn is_in(&mut self) -> bool {
            self.leave.try_recv() == Err(oneshot::error::TryRecvError::Empty)
        }
    }

    /// The known clients of a listener at which so many others wait, and how many connections have made room.
    fn known_clients(waiting: usize) -> (Arc<KnownClients>, Arc<AtomicUsize>) {
        let displaced = Arc::<AtomicUsize>::default();
        let counted = displaced.clone();
        let on_displaced = Box::new(move || _ = counted.fetch_add(1, Relaxed));
        let known = KnownClients::new(([127, 0, 0, 1], 80).into(), on_displaced);
        known.now.lock().waiting = waiting;
        (known, displaced)
    }

    fn in_of<const N: usize>(clients: &mut [Client; N]) -> [bool; N] {
        clients.each_mut().map(Client::is_in)
    }

    #[tokio::test(start_paused = true)]
    async fn the_user_with_the_most_connections_loses_idle_ones_then_slow_bodies_and_none_that_is_answered() {
        let (known, displaced) = known_clients(64);
        let mut greedy = [(); 5].map(|()| Client::of(&known, "greedy"));
        let mut modest = [(); 1].map(|()| Client::of(&known, "modest"));
        let requests = greedy.each_mut().map(|client| client.activity.begin());
        requests[0].is_complete();
        advance(Duration::from_secs(1)).await;
        // Its third connection has been idle for less time than its fourth one, and two bodies arrive.
        let [answered, slow, third, fourth, _new] = requests;
        drop(fourth);
        advance(Duration::from_millis(100)).await;
        drop(third);
        let order = [[true, true, true, false, true], [true, true, false, false, true]];
        for left in order {
            known.make_room();
            assert_eq!(in_of(&mut greedy), left);
        }
        // The bodies have their time.
        known.make_room();
        assert_eq!(in_of(&mut greedy), order[1]);
        advance(GRACE).await;
        known.make_room();
        assert_eq!(in_of(&mut greedy), [true, false, false, false, true], "the older body");
        assert!(slow.is_displaced() && !answered.is_displaced());
        known.make_room();
        assert_eq!(in_of(&mut greedy), [true, false, false, false, false]);
        known.make_room();
        assert_eq!((greedy[0].is_in(), in_of(&mut modest)), (true, [true]), "it has its share");
        assert_eq!(displaced.load(Relaxed), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_user_loses_none_of_an_equal_share_where_the_client_that_waits_counts_as_one_more_user() {
        let (known, displaced) = known_clients(64);
        let mut modest = [(); 2].map(|()| Client::of(&known, "modest"));
        advance(GRACE).await;
        let greedy = [(); 40].map(|()| Client::of(&known, "greedy"));
        let busy = greedy.each_ref().map(|client| client.activity.begin());
        busy.iter().for_each(ActiveRequest::is_complete);
        known.make_room();
        assert_eq!((in_of(&mut modest), displaced.load(Relaxed)), ([true; 2], 0), "the others are all being answered");
        drop(busy);
        advance(PAUSE).await;
        (0..38).for_each(|_| known.make_room());
        assert_eq!((in_of(&mut modest), displaced.load(Relaxed)), ([true; 2], 38), "both now have as many");
        // Of four connections, an equal share is one, because the client that waits may have a user of its own.
        known.make_room();
        assert_eq!((in_of(&mut modest), displaced.load(Relaxed)), ([false, true], 39), "idle for longer");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_connections_leave_than_clients_wait() {
        let (known, displaced) = known_clients(0);
        let mut clients = [(); 4].map(|()| Client::of(&known, "greedy"));
        known.make_room();
        let waiting = [(); 2].map(|()| known.wait());
        for _ in 0..3 {
            waiting.iter().for_each(WaitingClient::make_room);
        }
        assert_eq!((in_of(&mut clients), displaced.load(Relaxed)), ([false, false, true, true], 2));
        let [first, _second] = waiting;
        drop(first);
        clients[0].known = None;
        known.make_room();
        assert_eq!(displaced.load(Relaxed), 2, "one waits, and one leaves");
        clients[1].known = None;
        known.make_room();
        assert_eq!((in_of(&mut clients), displaced.load(Relaxed)), ([false, false, false, true], 3));
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_wait_together_look_for_a_connection_once_in_a_while_if_there_is_none() {
        let (known, displaced) = known_clients(64);
        let clients = [(); 2].map(|()| Client::of(&known, "greedy"));
        let requests = clients.each_ref().map(|client| client.activity.begin());
        known.make_room();
        drop(requests);
        known.make_room();
        assert_eq!(displaced.load(Relaxed), 0, "it has just looked");
        advance(PAUSE).await;
        known.make_room();
        assert_eq!(displaced.load(Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_makes_room_unless_a_request_comes_before_and_one_that_comes_later_knows_it() {
        let activity = Arc::<Activity>::default();
        let request = activity.begin();
        request.is_complete();
        assert!(!activity.displace(Instant::now()) && !request.is_displaced());
        drop(request);
        assert!(activity.displace(Instant::now()) && activity.begin().is_displaced());
        activity.displaced().await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_that_is_answered_keeps_the_connection_of_many_that_arrive() {
        let (known, displaced) = known_clients(64);
        let mut clients = [(); 2].map(|()| Client::of(&known, "greedy"));
        let other = clients[1].activity.begin();
        other.is_complete();
        let mut requests: Vec<_> = (0..8).map(|_| clients[0].activity.begin()).collect();
        requests[3].is_complete();
        advance(GRACE * 10).await;
        known.make_room();
        assert_eq!(displaced.load(Relaxed), 0);
        requests.drain(..7);
        known.make_room();
        assert_eq!(displaced.load(Relaxed), 0, "until now, it waited for an answer");
        advance(GRACE).await;
        known.make_room();
        assert_eq!((in_of(&mut clients), requests[0].is_displaced()), ([false, true], true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_leaves_nothing_behind() {
        let (known, _) = known_clients(64);
        let mut clients = [(); 3].map(|()| Client::of(&known, "ann"));
        known.make_room();
        clients.iter_mut().for_each(|client| client.known = None);
        assert!(known.now.lock().of.is_empty());
    }
}
