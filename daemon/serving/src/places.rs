//! The places for requests at a model's engines, and the order of the requests that wait for one.
//!
//! Requests wait here and not in an engine, which would serve them first come, first served. The order is that of the
//! policy's schedule, on the same [`Streams`](sched::stream::Streams) that orders bytes: a request is a stream with one turn.
//! Within a class, tenants have fair shares.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use parking_lot::Mutex;
use sched::stream::Discipline;
use tokio::sync::oneshot;

use self::{affinity::Affinity, queue::Queue};
pub use self::{
    affinity::{Kept, Prefix, Prefixes},
    queue::Claim,
};

mod affinity;
mod queue;

/// The engines that run one model.
#[derive(Debug)]
pub struct Engines {
    state: Mutex<State>,
    /// Requests that each works on at once.
    most_in_flight: u32,
    /// Requests that may wait.
    most_waiting: usize,
    now_ns: fn() -> u64,
}

#[derive(Debug)]
struct State {
    replicas: Vec<Replica>,
    queue: Queue<(oneshot::Sender<Place>, Prefix)>,
    affinity: Affinity,
}

#[derive(Clone, Debug, Default)]
struct Replica {
    in_flight: u32,
    /// How many requests in a row it failed, and how often in a row it got none for that.
    faults: u32,
    ejections: u32,
    /// Until when it gets none, as it failed.
    ejected_until_ns: u64,
    answered: u64,
    failed: u64,
}

/// An engine at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// How many requests it works on.
    pub in_flight: u32,
    /// For how long it gets none, as it failed; 0 if it gets some.
    pub ejected_for_ns: u64,
    /// How many requests it answered.
    pub answered: u64,
    /// How many requests it failed.
    pub failed: u64,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// As many requests wait as may.
    Crowded,
    /// No engine is left that has not failed.
    NoEngine,
}

/// A place at an engine, given back when dropped.
#[derive(Debug)]
pub struct Place {
    engines: Arc<Engines>,
    /// The engine.
    pub replica: usize,
    /// Whether it is the one that the prompt's beginning, or its session, had been sent to.
    pub kept: Kept,
}

/// A request that waits for its place. Dropped, it waits no longer.
#[derive(Debug)]
pub struct Waiting {
    engines: Arc<Engines>,
    name: u32,
    place: oneshot::Receiver<Place>,
}

/// How an engine failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing takes connections there.
    OutOfReach,
    /// It did not answer a request as it should, or not in time. The request may have to do with it.
    Answer,
}

/// How many requests in a row an engine fails before it gets none for a while.
const FAULTS: u32 = 5;

/// How long an engine that failed gets no requests: at first, and at most; twice as long each time.
const EJECTION_NS: (u64, u64) = (1_000_000_000, 30_000_000_000);

impl Engines {
    /// Returns `replicas` engines that have nothing to do, each for so many requests at once; of others, `most_waiting` wait.
    #[must_use]
    pub fn new(
        replicas: usize,
        most_in_flight: u32,
        most_waiting: usize,
        discipline: Discipline,
        now_ns: fn() -> u64,
    ) -> Arc<Self> {
        let state = State {
            replicas: vec![Replica::default(); replicas],
            queue: Queue::new(discipline),
            affinity: Affinity::default(),
        };
        Arc::new(Self { state: Mutex::new(state), most_in_flight, most_waiting, now_ns })
    }

    /// Orders what waits by another discipline from now on.
    pub fn reorder(&self, discipline: Discipline) {
        self.state.lock().queue.reorder(discipline);
    }

    /// Takes a place at the engine that may know the beginning of the prompt, or else at the least busy one that is not in
    /// `tried`; or waits for one in the order that `claim` gives. A request that an engine has tried already does not wait.
    ///
    /// # Errors
    /// Too many wait, or no engine is left that has not failed.
    pub fn take(self: &Arc<Self>, claim: impl Into<Claim>, tried: &[usize]) -> Result<Turn, NoPlace> {
        let (now_ns, claim) = ((self.now_ns)(), claim.into());
        let mut state = self.state.lock();
        if !(0..state.replicas.len())
            .any(|replica| !tried.contains(&replica) && state.replicas[replica].is_usable(now_ns))
        {
            return Err(NoPlace::NoEngine);
        }
        // A request that failed elsewhere has waited for its turn already.
        if (state.queue.is_empty() || !tried.is_empty())
            && let Some((replica, kept)) = state.give(&claim.prefix, self.most_in_flight, tried, now_ns)
        {
            return Ok(Turn::Now(Place { engines: self.clone(), replica, kept }));
        }
        if !tried.is_empty() || state.queue.len() >= self.most_waiting {
            return Err(NoPlace::Crowded);
        }
        let waiting = self.enqueue(&mut state, claim);
        let unwanted = self.give_places(&mut state, now_ns);
        drop(state);
        drop(unwanted);
        Ok(Turn::Later(waiting))
    }

    fn enqueue(self: &Arc<Self>, state: &mut State, mut claim: Claim) -> Waiting {
        let (told, place) = oneshot::channel();
        let prefix = std::mem::take(&mut claim.prefix);
        let name = state.queue.add(claim, (told, prefix));
        Waiting { engines: self.clone(), name, place }
    }

    /// Gives free places to the requests that wait, in turns. Returns places whose requests are gone, to be dropped without
    /// the lock.
    fn give_places(self: &Arc<Self>, state: &mut State, now_ns: u64) -> Vec<Place> {
        let mut unwanted = Vec::new();
        while state.least_busy(self.most_in_flight, &[], now_ns).is_some()
            && let Some((told, prefix)) = state.queue.next().and_then(|name| state.queue.serve(name))
            && let Some((replica, kept)) = state.give(&prefix, self.most_in_flight, &[], now_ns)
        {
            unwanted.extend(told.send(Place { engines: self.clone(), replica, kept }).err());
        }
        unwanted
    }

    /// Notes that an engine answered as it should.
    pub fn succeeded(&self, replica: usize) {
        if let Some(replica) = self.state.lock().replicas.get_mut(replica) {
            (replica.faults, replica.ejections, replica.ejected_until_ns) = (0, 0, 0);
            replica.answered += 1;
        }
    }

    /// Notes that an engine failed. One that is out of reach gets no requests for a while, and so does one that failed
    /// [`FAULTS`] requests in a row, unless it is the last: a request may be what makes engines fail, and must not take them
    /// from others. Where no engine is left, what waits is told so.
    pub fn failed(&self, replica: usize, fault: Fault) {
        let now_ns = (self.now_ns)();
        let mut state = self.state.lock();
        let usable = state.replicas.iter().filter(|replica| replica.is_usable(now_ns)).count();
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.faults = replica.faults.saturating_add(1);
            replica.failed += 1;
            if fault == Fault::OutOfReach || (replica.faults >= FAULTS && usable > 1) {
                let (first, longest) = EJECTION_NS;
                let ejection_ns = first.saturating_mul(1 << replica.ejections.min(10)).min(longest);
                replica.ejections = replica.ejections.saturating_add(1);
                replica.ejected_until_ns = now_ns.saturating_add(ejection_ns);
            }
        }
        if state.replicas.iter().all(|replica| !replica.is_usable(now_ns)) {
            state.queue.clear();
        }
    }

    /// How many requests each engine works on, and whether it gets any.
    #[must_use]
    pub fn loads(&self) -> Vec<(u32, bool)> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().map(|replica| (replica.in_flight, replica.is_usable(now_ns))).collect()
    }

    /// How each engine does.
    #[must_use]
    pub fn standings(&self) -> Vec<Standing> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let standing = |replica: &Replica| Standing {
            in_flight: replica.in_flight,
            ejected_for_ns: replica.ejected_until_ns.saturating_sub(now_ns),
            answered: replica.answered,
            failed: replica.failed,
        };
        state.replicas.iter().map(standing).collect()
    }

    /// How many engines there are.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.state.lock().replicas.len()
    }

    /// How many requests each works on at once at most.
    #[must_use]
    pub const fn most_in_flight(&self) -> u32 {
        self.most_in_flight
    }

    /// How many requests an engine works on.
    #[must_use]
    pub fn in_flight(&self, replica: usize) -> u32 {
        self.state.lock().replicas.get(replica).map_or(0, |replica| replica.in_flight)
    }

    /// Whether one more request would be worked on at once.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.queue.is_empty() && state.least_busy(self.most_in_flight, &[], now_ns).is_some()
    }

    /// Whether any engine gets requests.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.replicas.iter().any(|replica| replica.is_usable(now_ns))
    }

    /// How many requests wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Takes back a place, and gives it to the request whose turn it is.
    fn give_back(self: &Arc<Self>, replica: usize) {
        let now_ns = (self.now_ns)();
        let mut state = self.state.lock();
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.in_flight = replica.in_flight.saturating_sub(1);
        }
        let unwanted = self.give_places(&mut state, now_ns);
        drop(state);
        drop(unwanted);
    }
}

impl State {
    /// Gives a request a place at an engine with room that is not among `tried`: at the one that its prefix was sent to, unless
    /// that has much more to do, or at the least busy one.
    fn give(&mut self, prefix: &Prefix, most_in_flight: u32, tried: &[usize], now_ns: u64) -> Option<(usize, Kept)> {
        let least = self.least_busy(most_in_flight, tried, now_ns)?;
        let known = self.affinity.engine(prefix);
        let most = self.replicas[least].in_flight.saturating_add(affinity::slack(most_in_flight));
        let is_good = |known: &usize| {
            let fits = |replica: &Replica| {
                replica.is_usable(now_ns) && replica.in_flight < most_in_flight && replica.in_flight <= most
            };
            !tried.contains(known) && self.replicas.get(*known).is_some_and(fits)
        };
        let (replica, kept) = match known.filter(is_good) {
            Some(known) => (known, Kept::Kept),
            None => (least, if known.is_some() { Kept::Moved } else { Kept::New }),
        };
        self.affinity.note(prefix, replica);
        self.replicas[replica].in_flight += 1;
        Some((replica, kept))
    }

    /// The engine with the least to do of those with room that are not among `tried`.
    fn least_busy(&self, most_in_flight: u32, tried: &[usize], now_ns: u64) -> Option<usize> {
        let free = self.replicas.iter().enumerate().filter(|(place, replica)| {
            replica.in_flight < most_in_flight && replica.is_usable(now_ns) && !tried.contains(place)
        });
        free.min_by_key(|(_, replica)| replica.in_flight).map(|(place, _)| place)
    }
}

impl Replica {
    const fn is_usable(&self, now_ns: u64) -> bool {
        self.ejected_until_ns <= now_ns
    }
}

/// A place, or the wait for it.
#[derive(Debug)]
pub enum Turn {
    /// There is one.
    Now(Place),
    /// There will be one.
    Later(Waiting),
}

impl Future for Waiting {
    type Output = Result<Place, NoPlace>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.place).poll(cx).map(|place| place.map_err(|_| NoPlace::NoEngine))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.place.close();
        let mut state = self.engines.state.lock();
        // Only while this request waits: once it has a place, its name may be another's.
        if state.queue.get(self.name).is_some_and(|(told, _)| told.is_closed()) {
            drop(state.queue.remove(self.name));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.engines.give_back(self.replica);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use sched::stream::{Low, Service};

    use super::*;

    fn engines(replicas: usize, most_in_flight: u32) -> Arc<Engines> {
        Engines::new(replicas, most_in_flight, 3, Discipline::Edf { expiry: sched::stream::Expiry::Soft }, || {
            5_000_000_000
        })
    }

    fn due(deadline_ns: u64) -> Service {
        Service { deadline_ns: Some(deadline_ns), ..Service::default() }
    }

    fn now(turn: Result<Turn, NoPlace>) -> Place {
        match turn {
            Ok(Turn::Now(place)) => place,
            other => panic!("{other:?}"),
        }
    }

    fn later(turn: Result<Turn, NoPlace>) -> Waiting {
        match turn {
            Ok(Turn::Later(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }

    fn poll(waiting: &mut Waiting) -> Poll<Result<Place, NoPlace>> {
        Pin::new(waiting).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn requests_go_to_the_engine_with_the_least_to_do() {
        let engines = engines(2, 2);
        let places: Vec<_> = (0..4).map(|_| now(engines.take(Service::default(), &[]))).collect();
        assert_eq!(places.iter().map(|place| place.replica).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(engines.loads(), [(2, true), (2, true)]);
        drop(places);
        assert_eq!(engines.loads(), [(0, true), (0, true)]);
    }

    #[test]
    fn the_next_turn_of_a_chat_goes_where_the_one_before_was_unless_that_engine_is_much_busier() {
        let engines = engines(3, 16);
        let prefixes = Prefixes::default();
        let head = masque::h3::RequestHead {
            method: "POST".into(),
            scheme: None,
            authority: None,
            path: None,
            protocol: None,
            fields: Vec::new(),
        };
        let turn =
            |turns: usize| Claim { prefix: prefixes.of(&head, "x".repeat(600 * turns).as_bytes()), ..Claim::default() };
        let _busy = now(engines.take(Service::default(), &[]));
        let first = now(engines.take(turn(1), &[]));
        assert_eq!((first.replica, first.kept), (1, Kept::New));
        let second = now(engines.take(turn(2), &[]));
        assert_eq!((second.replica, second.kept), (1, Kept::Kept), "though the third one has nothing to do");
        let third = now(engines.take(turn(3), &[]));
        assert_eq!((third.replica, third.kept), (1, Kept::Kept));
        let fourth = now(engines.take(turn(4), &[]));
        assert_eq!((fourth.replica, fourth.kept), (2, Kept::Moved), "three more than that one");
        engines.failed(2, Fault::OutOfReach);
        let fifth = now(engines.take(turn(5), &[]));
        assert_eq!((fifth.replica, fifth.kept), (0, Kept::Moved), "it failed");
        assert_eq!(now(engines.take(turn(6), &[0])).kept, Kept::Moved, "it was tried");
    }

    #[test]
    fn what_waits_gets_places_as_the_discipline_says_and_more_than_may_is_refused() {
        let engines = engines(1, 1);
        let first = now(engines.take(due(1), &[]));
        let mut waiting: Vec<_> = [30, 10, 20].map(|due_ns| later(engines.take(due(due_ns << 4), &[]))).into();
        assert!(matches!(engines.take(due(1), &[]), Err(NoPlace::Crowded)));
        drop(first);
        let place = match poll(&mut waiting[1]) {
            Poll::Ready(Ok(place)) => place,
            other => panic!("{other:?}"),
        };
        assert!(poll(&mut waiting[0]).is_pending() && poll(&mut waiting[2]).is_pending());
        drop(place);
        assert!(poll(&mut waiting[2]).is_ready() && poll(&mut waiting[0]).is_ready(), "each gave its place back");
        assert_eq!((engines.waiting(), engines.loads()), (0, vec![(0, true)]));
    }

    #[test]
    fn a_request_that_gives_up_waits_no_longer_and_keeps_no_place() {
        let engines = engines(1, 1);
        let first = now(engines.take(due(1), &[]));
        let (gone, mut stays) = (later(engines.take(due(16), &[])), later(engines.take(due(32), &[])));
        drop(gone);
        assert_eq!(engines.waiting(), 1);
        drop(first);
        assert_eq!(engines.loads(), [(1, true)], "the place is on its way");
        let another = later(engines.take(due(48), &[]));
        drop(stays.place.try_recv());
        drop(stays);
        drop(another);
        assert_eq!((engines.waiting(), engines.loads()), (0, vec![(0, true)]), "whatever was on its way came back");
    }

    #[test]
    fn an_engine_that_fails_gets_nothing_and_when_none_is_left_nobody_waits() {
        let engines = engines(2, 1);
        let (first, second) = (now(engines.take(due(1), &[])), now(engines.take(due(2), &[])));
        let mut waiting = later(engines.take(due(16), &[]));
        engines.failed(first.replica, Fault::OutOfReach);
        drop(first);
        assert!(poll(&mut waiting).is_pending(), "the place of an engine that failed is given to nobody");
        assert!(matches!(engines.take(due(1), &[1]), Err(NoPlace::NoEngine)), "the only one left was tried");
        engines.failed(second.replica, Fault::OutOfReach);
        assert!(matches!(poll(&mut waiting), Poll::Ready(Err(NoPlace::NoEngine))));
        assert!(matches!(engines.take(due(1), &[]), Err(NoPlace::NoEngine)));
        engines.succeeded(0);
        assert_eq!(now(engines.take(due(1), &[])).replica, 0);
        drop(second);
    }

    #[test]
    fn a_request_that_makes_engines_fail_never_takes_the_last_one_from_others() {
        let engines = engines(2, 1);
        let is_usable = |replica: usize| engines.loads()[replica].1;
        for _ in 1..FAULTS {
            [0, 1].into_iter().for_each(|replica| engines.failed(replica, Fault::Answer));
        }
        assert!(is_usable(0) && is_usable(1), "it may be the request");
        [0, 1].into_iter().for_each(|replica| engines.failed(replica, Fault::Answer));
        assert!(!is_usable(0) && is_usable(1), "one of them is left");
        (0..100).for_each(|_| engines.failed(1, Fault::Answer));
        assert!(is_usable(1));
        engines.succeeded(1);
        engines.failed(1, Fault::OutOfReach);
        assert!(!engines.is_alive());
    }

    #[test]
    fn another_discipline_orders_what_waits_already() {
        let engines = engines(1, 1);
        let first = now(engines.take(due(1), &[]));
        let mut waiting: Vec<_> = [20, 10].map(|due_ns| later(engines.take(due(due_ns << 4), &[]))).into();
        engines.reorder(Discipline::Ml { low: Low::Fcfs });
        drop(first);
        assert!(poll(&mut waiting[1]).is_ready(), "what was first in the old order arrives first in the new one");
    }
}
