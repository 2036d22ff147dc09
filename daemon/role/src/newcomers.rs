//! Clients that may be evicted in favour of others, until they have shown what the listener asks of a client: at a gateway's own listener a
//! key, and at an edge a complete request. So connections that stay silent keep no other client out.
//!
//! A client has a while to show it, in which nothing evicts it; else, of many honest clients that connect at once, only the last ones would
//! be served. Without room, and without a client that may be evicted, a further one waits in the line of its address. Meanwhile, it gives
//! its place among the listener's connections back, so that lines keep no other client out. The next client comes from the line of the
//! address with the fewest newcomers, so that a long line holds up no other. If there are several such lines, the client that has waited
//! longest comes, so that many addresses hold up a further one only for a while; but a client of a network whose last newcomer has shown
//! nothing comes after others, and is sent away before them if too many wait (`lines`).
//!
//! A client that comes from a line may have to wait for a place. It is not read meanwhile, so its time begins with its place. Until then,
//! it is evicted only in favour of a client that has kept its place, which may be the place that it waits for.
//!
//! A client that has shown it is known from then on, and makes room by other rules (`known_clients`).

mod lines;

use std::{
    collections::VecDeque,
    convert::Infallible,
    net::IpAddr,
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use admission::strangers::AddressPrefix;
use parking_lot::Mutex;
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        oneshot::{self, error::TryRecvError},
    },
    time::{Instant, sleep, timeout, timeout_at},
};

pub(crate) use self::lines::MOST_WAITING;
use self::lines::{Lines, Waiting, keep_places};
use super::{
    holder::Holder,
    known_clients::{Activity, KnownClient, KnownClients, LINGER, PAUSE},
    unidentified_callers::UnidentifiedCallers,
};

/// The maximum number of newcomers at a listener. They never have more than half of its connections.
const MOST: usize = 256;

/// How long a newcomer is not evicted: enough for the handshakes and the first request over a slow path, including a lost packet.
const GRACE: Duration = Duration::from_secs(2);

/// The newcomers at one listener.
pub struct Newcomers {
    /// `None` once the listener ends.
    now: Mutex<Option<NewcomersNow>>,
    known: Arc<KnownClients>,
}

/// The newcomers, and the clients that want to be some.
struct NewcomersNow {
    inside: UnidentifiedCallers<Inside>,
    lines: Lines,
}

/// A newcomer that was let in. Dropping `stay` makes it leave.
struct Inside {
    /// When it was let in, or got its place.
    since: Instant,
    from: AddressPrefix,
    /// Whether it has a place among the listener's connections.
    has_place: bool,
    stay: oneshot::Sender<Infallible>,
}

/// A client that may be evicted until it may stay. Its end frees its place.
pub struct Newcomer {
    of: Arc<Newcomers>,
    number: u64,
    activity: Arc<Activity>,
    /// Set once the client is known.
    known: OnceLock<KnownClient>,
}

/// The wait of a newcomer for its eviction.
pub struct Eviction {
    of: Arc<Newcomers>,
    activity: Arc<Activity>,
    /// When it may be evicted at the earliest, until it is known.
    from: Instant,
    leave: oneshot::Receiver<Infallible>,
}

impl NewcomersNow {
    /// Lets clients in that wait, as far as there is room or newcomers may be evicted.
    fn settle(&mut self) {
        let Self { inside, lines, .. } = self;
        // `is_full` has an entry for each result of `keep_places`: whether there is no room for clients of such lines.
        let (mut is_tried, mut is_full): (Vec<IpAddr>, _) = (Vec::new(), [false; 2]);
        loop {
            let is_full_for = |line: &VecDeque<Waiting>| is_full.get(usize::from(keep_places(line))) == Some(&true);
            let may_enter = |place: &IpAddr, line: &VecDeque<Waiting>| {
                !is_tried.contains(place) && (!is_full_for(line) || inside.is_full_at(*place))
            };
            let next = lines
                .iter()
                .filter(|(place, line)| may_enter(place, line))
                .min_by_key(|(place, line)| (inside.count_at(**place), line.front().map(Waiting::rank)));
            let Some((&place, line)) = next else { return };
            let (stay, leave) = oneshot::channel();
            let (now, keeps_place) = (Instant::now(), keep_places(line));
            let may_leave = |of: &Inside| (of.has_place || keeps_place).then(|| now - of.since >= GRACE);
            // An evicted client learns of it when its sender is dropped.
            let entering = Inside { since: now, from: AddressPrefix::of(place), has_place: true, stay };
            let Some((number, evicted)) = inside.enter_if(place, entering, may_leave) else {
                // Others like it then have no room either, except by the eviction of a client of their own place.
                if let Some(is_full) = is_full.get_mut(usize::from(keeps_place)) {
                    *is_full |= !inside.is_full_at(place);
                }
                is_tried.push(place);
                continue;
            };
            // A client that waits for its place was never read.
            if let Some(evicted) = evicted.filter(|of| of.has_place) {
                lines.showed_nothing(evicted.from);
            }
            if lines.pop(place).is_none_or(|first| first.enters.send((number, leave)).is_err()) {
                inside.leave(number);
            }
        }
    }
}

impl Newcomers {
    /// Returns an empty set for a listener with this maximum of connections. At most `most_from_one` of its newcomers come from one IPv4
    /// address, or one IPv6 /64. Clients that stay are among the `known` ones.
    #[must_use]
    pub fn new(max_connections: usize, most_from_one: usize, known: Arc<KnownClients>) -> Arc<Self> {
        let most = (max_connections / 2).clamp(1, MOST);
        let inside = UnidentifiedCallers::new(most, most_from_one);
        Arc::new(Self { now: Mutex::new(Some(NewcomersNow { inside, lines: Lines::default() })), known })
    }

    /// Waits for one of the listener's `places` for connections. Meanwhile, known clients make room for the one that waits. `None` only if
    /// the semaphore is closed.
    pub async fn place(&self, places: Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        let mut coming = pin!(places.acquire_owned());
        if let Ok(place) = timeout(Duration::ZERO, coming.as_mut()).await {
            return place.ok();
        }
        let waiting = self.known.wait();
        loop {
            waiting.make_room();
            if let Ok(place) = timeout(PAUSE, coming.as_mut()).await {
                return place.ok();
            }
        }
    }

    /// Adds a client from an address as soon as there is room, or another one may be evicted. While the client waits, its `place` among the
    /// listener's connections is free for others unless it `keeps_place`; it is returned once the client is in and has a place again.
    /// Returns `None` if the listener has ended, if the client was evicted before it had a place again, or if more than 1,024 clients wait
    /// without a place and this one has to go.
    pub async fn enter(
        self: &Arc<Self>,
        from: IpAddr,
        mut place: Option<OwnedSemaphorePermit>,
        keeps_place: bool,
    ) -> Option<(Arc<Newcomer>, Eviction, Option<OwnedSemaphorePermit>)> {
        let (enters, mut entered) = oneshot::channel();
        {
            let mut now = self.now.lock();
            let now = now.as_mut()?;
            now.lines.push(from, keeps_place, enters);
            now.settle();
            now.lines.shorten();
        }
        let mut places = None;
        let (number, leave) = match entered.try_recv() {
            Ok(entered) => entered,
            Err(TryRecvError::Closed) => return None,
            Err(TryRecvError::Empty) => {
                if !keeps_place {
                    places = place.take().map(|place| place.semaphore().clone());
                }
                entered.await.ok()?
            }
        };
        let (activity, known) = (Arc::<Activity>::default(), OnceLock::new());
        let mut eviction =
            Eviction { of: self.clone(), activity: activity.clone(), from: Instant::now() + GRACE, leave };
        let newcomer = Arc::new(Newcomer { of: self.clone(), number, activity, known });
        if let Some(places) = places {
            self.renew(number, false);
            tokio::select! {
                again = self.place(places) => place = again,
                () = eviction.comes() => return None,
            }
            self.renew(number, true);
            eviction.from = Instant::now() + GRACE;
        }
        Some((newcomer, eviction, place))
    }

    /// Evicts all newcomers, because the listener ends. A client that it has accepted is also evicted if it enters later.
    pub fn evict_all(&self) {
        *self.now.lock() = None;
    }

    /// Begins the time of a client anew, if it is still in the set, and notes whether it has a place.
    fn renew(&self, number: u64, has_place: bool) {
        if let Some(inside) = self.now.lock().as_mut().and_then(|now| now.inside.renew(number)) {
            (inside.since, inside.has_place) = (Instant::now(), has_place);
        }
    }

    /// Takes a client out of the set, and notes for its network whether it `has_shown` what the listener asks for, unless it was never
    /// read. Returns its sender if it was in it.
    fn leave(&self, number: u64, has_shown: bool) -> Option<oneshot::Sender<Infallible>> {
        let mut now = self.now.lock();
        let now = now.as_mut()?;
        let Inside { stay, from, has_place, .. } = now.inside.leave(number)?;
        if has_shown {
            now.lines.has_shown(from);
        } else if has_place {
            now.lines.showed_nothing(from);
        }
        now.settle();
        Some(stay)
    }
}

impl Newcomer {
    /// Lets the client stay as one of `holder`, if that returns one, until it has to make room as a known client.
    pub fn may_stay_as(&self, holder: impl FnOnce() -> Option<Holder>) {
        if self.known.get().is_none()
            && let Some(holder) = holder()
            // The sender, and so whether the client stays, is now that of the known clients.
            && let Some(stay) = self.of.leave(self.number, true)
        {
            _ = self.known.set(self.of.known.enter(holder, self.activity.clone(), stay));
        }
    }

    /// Whether the client may stay, or might until it had to make room as a known client.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.known.get().is_some()
    }

    /// Returns what happens on its connection.
    #[must_use]
    pub fn activity(&self) -> Arc<Activity> {
        self.activity.clone()
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.of.leave(self.number, false);
    }
}

impl Eviction {
    /// Completes when the newcomer has to leave. A known client has some time for the end of an answer, once [`Activity::displaced`] has
    /// completed.
    pub async fn comes(&mut self) {
        if timeout_at(self.from, &mut self.leave).await.is_err() {
            // A client that waits may take its place from now on.
            if let Some(now) = self.of.now.lock().as_mut() {
                now.settle();
            }
            _ = (&mut self.leave).await;
        }
        if self.activity.is_displaced() {
            sleep(LINGER).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::Ipv4Addr,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use futures::future::join_all;
    use tokio::{sync::Semaphore, task::JoinHandle, time::sleep};

    use super::*;

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    pub(super) fn newcomers(max_connections: usize, most_from_one: usize) -> Arc<Newcomers> {
        let known = KnownClients::new((address(0), 80).into(), Box::new(|| {}));
        Newcomers::new(max_connections, most_from_one, known)
    }

    /// A client that connects now, and ends after this time. Returns whether it was neither refused nor evicted, and when its end came.
    fn client(newcomers: &Arc<Newcomers>, from: IpAddr, stays: Duration) -> JoinHandle<(bool, Duration)> {
        with_place(newcomers, (from, None), stays)
    }

    /// Like [`client`], with a place among the connections, which it keeps while it waits if it is on this host.
    fn with_place(
        newcomers: &Arc<Newcomers>,
        (from, place): (IpAddr, Option<OwnedSemaphorePermit>),
        stays: Duration,
    ) -> JoinHandle<(bool, Duration)> {
        let (newcomers, began) = (newcomers.clone(), Instant::now());
        tokio::spawn(async move {
            let entered = newcomers.enter(from, place, from.is_loopback()).await;
            let Some((newcomer, mut eviction, _place)) = entered else { return (false, began.elapsed()) };
            let is_served = tokio::select! {
                () = sleep(stays) => true,
                () = eviction.comes() => false,
            };
            newcomer.may_stay_as(|| is_served.then_some(Holder::Unknown));
            (is_served, began.elapsed())
        })
    }

    /// The time in which an honest client shows its key.
    const SOON: Duration = Duration::from_millis(100);

    /// The time for which a silent one stays.
    const HOUR: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn honest_clients_that_connect_at_once_are_all_served() {
        // At a gateway's own listener and at an edge, which this host's programs share.
        for (from, most_from_one) in [(address(1), 64), (Ipv4Addr::LOCALHOST.into(), usize::MAX)] {
            let (newcomers, places) = (newcomers(1_024, most_from_one), Arc::new(Semaphore::new(1_024)));
            let mut clients = Vec::new();
            for _ in 0..1_000 {
                let place = places.clone().acquire_owned().await.ok();
                clients.push(with_place(&newcomers, (from, place), SOON));
            }
            let served = join_all(clients).await;
            assert_eq!(served.into_iter().filter(|client| client.as_ref().unwrap().0).count(), 1_000, "{from}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_waits_leaves_its_place_to_others_and_is_served_once_it_has_one_again() {
        let (newcomers, places) = (newcomers(2, 2), Arc::new(Semaphore::new(1)));
        let place = || places.clone().try_acquire_owned().ok();
        let first = client(&newcomers, address(1), SOON);
        let second = with_place(&newcomers, (address(2), place()), SOON);
        sleep(SOON / 2).await;
        let other = place();
        assert!(other.is_some());
        assert_eq!(first.await.unwrap(), (true, SOON));
        sleep(SOON).await;
        assert!(!second.is_finished(), "another one has its place");
        drop(other);
        assert_eq!(second.await.unwrap(), (true, SOON * 3));

        let first = client(&newcomers, address(1), HOUR);
        let local = with_place(&newcomers, (Ipv4Addr::LOCALHOST.into(), place()), SOON);
        sleep(SOON).await;
        assert!(place().is_none(), "a client on this host keeps its place");
        assert_eq!((local.await.unwrap(), first.await.unwrap().0), ((true, GRACE + SOON), false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_without_a_place_is_evicted_only_for_a_client_that_keeps_one_and_its_time_begins_with_its_place()
    {
        for is_kept in [false, true] {
            let (newcomers, places) = (newcomers(2, 2), Arc::new(Semaphore::new(1)));
            let place = || places.clone().try_acquire_owned().ok();
            let first = client(&newcomers, address(1), SOON);
            let second = with_place(&newcomers, (address(2), place()), GRACE - SOON);
            sleep(SOON / 2).await;
            let mut other = place();
            assert!(other.is_some());
            let from = if is_kept { Ipv4Addr::LOCALHOST.into() } else { address(3) };
            let third = with_place(&newcomers, (from, if is_kept { other.take() } else { None }), SOON);
            assert!(first.await.unwrap().0);
            sleep(GRACE * 5).await;
            assert_eq!([second.is_finished(), third.is_finished()], [is_kept; 2]);
            drop(other);
            assert_eq!((second.await.unwrap().0, third.await.unwrap().0), (!is_kept, true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_clients_make_room_once_they_had_their_time_and_only_if_others_come() {
        let newcomers = newcomers(8, 4);
        let silent: Vec<_> = (0..4).map(|_| client(&newcomers, address(1), HOUR)).collect();
        let honest = client(&newcomers, address(1), SOON);
        assert_eq!(honest.await.unwrap(), (true, GRACE + SOON));
        sleep(GRACE * 10).await;
        let left: Vec<_> = silent.iter().map(JoinHandle::is_finished).collect();
        assert_eq!(left, [true, false, false, false]);
        let honest = client(&newcomers, address(2), SOON);
        assert_eq!(honest.await.unwrap(), (true, SOON), "the first has left room for it");
    }

    #[tokio::test(start_paused = true)]
    async fn the_flood_of_one_address_evicts_no_client_of_another_and_holds_none_up() {
        let newcomers = newcomers(16, 4);
        let slow = client(&newcomers, address(2), GRACE * 20);
        let refused = Arc::<AtomicUsize>::default();
        let (flood, at_once) = (newcomers.clone(), refused.clone());
        tokio::spawn(async move {
            loop {
                for _ in 0..50 {
                    let (silent, at_once) = (client(&flood, address(1), HOUR), at_once.clone());
                    tokio::spawn(async move { at_once.fetch_add(usize::from(!silent.await.unwrap().0), Relaxed) });
                }
                sleep(Duration::from_millis(100)).await;
            }
        });
        for _ in 0..20 {
            sleep(GRACE / 2).await;
            let (is_served, took) = client(&newcomers, address(3), SOON).await.unwrap();
            assert!(is_served && took == SOON, "{took:?}");
        }
        assert!(slow.await.unwrap().0);
        assert!(refused.load(Relaxed) > 1_000, "its line has an end");
    }

    #[tokio::test(start_paused = true)]
    async fn the_clients_of_many_addresses_that_have_all_room_hold_others_up_for_no_longer_than_their_time() {
        let newcomers = newcomers(16, 2);
        let flood: Vec<_> = (1..=4).flat_map(|last| [last; 8]).collect();
        for from in flood {
            client(&newcomers, address(from), HOUR);
        }
        sleep(GRACE / 2).await;
        let (is_served, took) = client(&newcomers, address(9), SOON).await.unwrap();
        assert!(is_served && took <= GRACE, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn clients_of_more_addresses_than_there_is_room_for_hold_up_a_further_one_only_for_a_while() {
        let newcomers = newcomers(16, 2);
        for last in (1..=12).flat_map(|last| [last; 2]) {
            let newcomers = newcomers.clone();
            tokio::spawn(async move {
                loop {
                    _ = client(&newcomers, address(last), HOUR).await;
                }
            });
        }
        sleep(GRACE * 3).await;
        let (is_served, took) = client(&newcomers, address(200), SOON).await.unwrap();
        assert!(is_served && took <= GRACE * 3, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_clients_that_wait_have_a_bound_and_those_of_crowded_addresses_are_sent_away_first() {
        let newcomers = newcomers(16, 8);
        let clients: Vec<_> = (1..=12).map(|last| client(&newcomers, address(last), HOUR)).collect();
        let crowd: Vec<_> = (0..MOST_WAITING).map(|_| client(&newcomers, address(12), HOUR)).collect();
        sleep(SOON).await;
        let left = |clients: &[JoinHandle<_>]| clients.iter().filter(|client| client.is_finished()).count();
        assert_eq!((left(&clients), left(&crowd)), (0, 4), "8 are in, and 4 wait besides the crowd");
        let single = client(&newcomers, address(17), SOON);
        sleep(SOON).await;
        assert_eq!((left(&crowd), single.is_finished()), (5, false));
        assert!(crowd.last().unwrap().is_finished() && !crowd[0].is_finished());
        assert_eq!(single.await.unwrap(), (true, GRACE - SOON + SOON));
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_listener_evicts_newcomers_and_clients_that_enter_after_it_but_no_known_ones() {
        let newcomers = newcomers(4, 16);
        let (known, mut known_leaves, _) = newcomers.enter(address(1), None, false).await.unwrap();
        known.may_stay_as(|| Some(Holder::Unknown));
        let new = [2, 3, 4].map(|last| client(&newcomers, address(last), HOUR));
        sleep(GRACE / 2).await;
        newcomers.evict_all();
        let [first, second, waiting] = new;
        assert_eq!([first.await.unwrap().0, second.await.unwrap().0, waiting.await.unwrap().0], [false; 3]);
        assert!(newcomers.enter(address(5), None, false).await.is_none());
        assert!(tokio::time::timeout(GRACE * 2, known_leaves.comes()).await.is_err());
    }
}
