//! Clients of a model listener that have shown who they are, and which of them makes room for another.
//!
//! A user may have all connections of a listener while no other client waits for one. Once a client waits, the user with the most
//! connections loses one: the connection that has been without a request for longest, or else one that has waited for the rest of a body
//! for a while. A connection whose request is being answered stays. A user with no more than an equal share of the connections loses none,
//! so a user cannot keep others out, no matter from how many addresses it connects.

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
use tokio::{sync::oneshot, time::Instant};

use crate::{holder::Holder, seldom::Seldom};

/// How long a connection without a complete request is not closed: a body may come over a slow path.
const GRACE: Duration = Duration::from_secs(2);

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
}

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
    is_displaced: AtomicBool,
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

    /// Closes the connection that makes room for a client that waits, if there is one.
    pub fn make_room(&self) {
        let displaced = self.now.lock().displace(Instant::now());
        let Some((holder, connections)) = displaced else { return };
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

impl KnownNow {
    /// Removes the connection that makes room. Returns its holder, and how many connections the holder had.
    fn displace(&mut self, now: Instant) -> Option<(Holder, usize)> {
        // The client that waits may have a user of its own.
        let share = self.of.values().map(BTreeMap::len).sum::<usize>() / (self.of.len() + 1);
        let first_to_leave = |connections: &BTreeMap<u64, Connection>| {
            let waiting = connections.iter().filter_map(|(number, of)| Some((of.activity.waits(now)?, *number)));
            waiting.min()
        };
        let above = self.of.iter().filter(|(_, connections)| connections.len() > share.max(1));
        let leaving = above.filter_map(|(holder, connections)| {
            first_to_leave(connections).map(|first| (connections.len(), Reverse(first), holder))
        });
        let (count, Reverse((_, number)), holder) = leaving.max_by_key(|(count, first, _)| (*count, *first))?;
        let holder = holder.clone();
        let connection = self.of.get_mut(&holder)?.remove(&number)?;
        connection.activity.is_displaced.store(true, Relaxed);
        Some((holder, count))
    }
}

impl Drop for KnownClient {
    fn drop(&mut self) {
        let mut now = self.of.now.lock();
        if let Some(connections) = now.of.get_mut(&self.holder) {
            connections.remove(&self.number);
            if connections.is_empty() {
                now.of.remove(&self.holder);
            }
        }
    }
}

impl Default for Activity {
    fn default() -> Self {
        let requests = ActiveRequests { arriving: 0, answered: 0, since: Instant::now() };
        Self { requests: Mutex::new(requests), is_displaced: AtomicBool::new(false) }
    }
}

impl Activity {
    /// Begins a request whose body is not complete.
    pub fn begin(self: &Arc<Self>) -> ActiveRequest {
        let mut requests = self.requests.lock();
        if requests.arriving + requests.answered == 0 {
            requests.since = Instant::now();
        }
        requests.arriving += 1;
        ActiveRequest { of: self.clone(), is_complete: AtomicBool::new(false) }
    }

    /// Returns whether a request arrives, and since when the connection has waited for its client; `None` if the client waits for an
    /// answer, or its request may still arrive.
    fn waits(&self, now: Instant) -> Option<(bool, Instant)> {
        let ActiveRequests { arriving, answered, since } = *self.requests.lock();
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

    /// Whether its connection was closed in favour of another client.
    #[must_use]
    pub fn is_displaced(&self) -> bool {
        self.of.is_displaced.load(Relaxed)
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

    fn known_clients() -> (Arc<KnownClients>, Arc<AtomicUsize>) {
        let displaced = Arc::<AtomicUsize>::default();
        let counted = displaced.clone();
        let on_displaced = Box::new(move || _ = counted.fetch_add(1, Relaxed));
        (KnownClients::new(([127, 0, 0, 1], 80).into(), on_displaced), displaced)
    }

    fn in_of<const N: usize>(clients: &mut [Client; N]) -> [bool; N] {
        clients.each_mut().map(Client::is_in)
    }

    #[tokio::test(start_paused = true)]
    async fn the_user_with_the_most_connections_loses_idle_ones_then_slow_bodies_and_none_that_is_answered() {
        let (known, displaced) = known_clients();
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
    async fn no_user_loses_connections_of_an_equal_share_whatever_others_keep_open() {
        let (known, displaced) = known_clients();
        let mut modest = [(); 2].map(|()| Client::of(&known, "modest"));
        advance(GRACE).await;
        let greedy = [(); 40].map(|()| Client::of(&known, "greedy"));
        let busy = greedy.each_ref().map(|client| client.activity.begin());
        busy.iter().for_each(ActiveRequest::is_complete);
        known.make_room();
        assert_eq!((in_of(&mut modest), displaced.load(Relaxed)), ([true; 2], 0), "the others are all being answered");
        drop(busy);
        (0..38).for_each(|_| known.make_room());
        assert_eq!((in_of(&mut modest), displaced.load(Relaxed)), ([true; 2], 38), "both now have as many");
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_that_is_answered_keeps_the_connection_of_many_that_arrive() {
        let (known, displaced) = known_clients();
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
        let (known, _) = known_clients();
        let mut clients = [(); 3].map(|()| Client::of(&known, "ann"));
        known.make_room();
        clients.iter_mut().for_each(|client| client.known = None);
        assert!(known.now.lock().of.is_empty());
    }
}
