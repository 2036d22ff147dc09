//! The places for requests at a model's engines, and the order of the requests that wait for one.
//!
//! Requests wait here, not in an engine, which would serve them first come, first served. They wait in the order of the policy's schedule,
//! on the same [`Streams`](sched::stream::Streams) that order bytes: a request is a stream with one turn. Within a class, tenants have fair
//! shares.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use parking_lot::{Mutex, MutexGuard};
use quic::clock::Clock;
use sched::stream::Discipline;
use tokio::sync::{Notify, oneshot};

use self::{affinity::Affinity, queue::Queue};
pub use self::{
    affinity::{CachedBytes, PrefixAffinity, PrefixHashes, Prefixes},
    claim::{Claim, Wish},
    load::EngineStatus,
};
use crate::{
    closing::Closing,
    health::{EngineHealth, Fault, Found, Health},
    reported::Reported,
};

mod affinity;
mod choice;
mod claim;
mod load;
mod queue;
mod recall;

/// The engines that run one model.
#[derive(Debug)]
pub struct Engines {
    state: Mutex<State>,
    /// The maximum of requests that each works on at once.
    most_in_flight: u32,
    /// The maximum of waiting requests.
    most_waiting: usize,
    now_ns: fn() -> u64,
    /// Notified of each failure, which may have ejected an engine, and of each refusal, which may have closed one.
    failed: Notify,
}

#[derive(Debug)]
struct State {
    /// The maximum age of an engine's report, in nanoseconds.
    report_ns: u64,
    replicas: Vec<Replica>,
    queue: Queue<Waiting>,
    affinity: Affinity,
}

/// A waiting request: the channel for its place, and the engine where it is served best.
#[derive(Debug)]
struct Waiting {
    told: oneshot::Sender<EnginePlace>,
    wish: Wish,
}

#[derive(Clone, Debug, Default)]
struct Replica {
    work: Arc<EngineWork>,
    /// Gateways share it, because after a reload, the old gateway's requests may still be refused.
    closing: Arc<Mutex<Closing>>,
    health: Health,
    /// The last report about the requests of the engine's other clients, and its time.
    others: Option<(Reported, u64)>,
}

/// Counts of an engine's requests: in flight, answered and failed. Gateways share them, because after a reload, the old gateway still
/// finishes its requests.
#[derive(Debug, Default)]
struct EngineWork {
    in_flight: AtomicU32,
    answered: AtomicU64,
    failed: AtomicU64,
    /// How many of its places were asked back and not given back yet.
    asked_back: AtomicU32,
    /// Notified if requests wait after an event, so that a place may have to be asked back.
    wanted: Notify,
    /// The gateways' [`Engines`] that share these counts, if there are several.
    sharers: Mutex<Vec<Weak<Engines>>>,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPlace {
    /// The maximum of requests waits, in total or for this user.
    Crowded,
    /// No engine is left: each has failed, now or with this request.
    NoEngine,
}

/// A place at an engine, given back when dropped.
#[derive(Debug)]
pub struct EnginePlace {
    engines: Arc<Engines>,
    /// The engine.
    pub replica: usize,
    /// Whether it is the engine that the prompt's beginning, or its session, had been sent to.
    pub affinity: PrefixAffinity,
    /// Whether it was given back already, and whether it was asked back.
    is_back: AtomicBool,
    is_asked_back: AtomicBool,
}

/// A request that waits for its place. Dropping it ends the wait.
#[derive(Debug)]
pub struct QueuedRequest {
    engines: Arc<Engines>,
    name: u32,
    place: oneshot::Receiver<EnginePlace>,
}

impl Engines {
    /// Returns `replicas` idle engines, each for up to `most_in_flight` requests at once; up to `most_waiting` others wait.
    #[must_use]
    pub fn new(
        replicas: usize,
        most_in_flight: u32,
        most_waiting: usize,
        discipline: Discipline,
        now_ns: fn() -> u64,
    ) -> Arc<Self> {
        let state = State {
            report_ns: u64::MAX,
            replicas: (0..replicas).map(|_| Replica::default()).collect(),
            queue: Queue::new(discipline),
            affinity: Affinity::default(),
        };
        Arc::new(Self { state: Mutex::new(state), most_in_flight, most_waiting, now_ns, failed: Notify::new() })
    }

    /// Notes whether these engines will be checked, and how long their reports count, in nanoseconds.
    pub fn expect(&self, is_checked: bool, report_ns: u64) {
        let mut state = self.state.lock();
        state.report_ns = report_ns;
        state.replicas.iter_mut().for_each(|replica| replica.health = Health::new(is_checked));
    }

    /// Shares the counts of an engine's requests with `before`, where the engine has the index `known`: after a reload, both use the
    /// engine until the requests of `before` have ended. Takes over what is known of the engine, except for its load, which the next
    /// check reports, and for its health if checks have begun or ended since then, or if it is not reached alike (by the same key and
    /// authorities). An engine that is reached alike is closed for both as long as it refuses requests. Call this before the first request.
    pub fn share(self: &Arc<Self>, replica: usize, before: &Arc<Self>, known: usize, is_reached_alike: bool) {
        let Some(known) = before.state.lock().replicas.get(known).cloned() else { return };
        [before, self].into_iter().for_each(|sharer| known.work.share(sharer));
        if let Some(replica) = self.state.lock().replicas.get_mut(replica) {
            let Replica { work, closing, health, others: _ } = known;
            replica.work = work;
            if is_reached_alike {
                replica.closing = closing;
                replica.health.recall(health);
            }
        }
    }

    /// Takes over which of the same engines got which prompts of `before`. Call this before the first request.
    pub fn recall_prompts(&self, before: &Self) {
        let affinity = before.state.lock().affinity.clone();
        self.state.lock().affinity = affinity;
    }

    /// Orders waiting requests by another discipline from now on.
    pub fn reorder(&self, discipline: Discipline) {
        self.state.lock().queue.reorder(discipline);
    }

    /// Takes a place at an engine that is not in `tried`. A preference that weighs cached prompts comes first, then the engine that may
    /// know the beginning of the prompt, then any other preference, then the least busy engine. Without a free place, waits for one in the
    /// order of `claim`. A request that an engine has already tried does not wait. A request that has waited for its turn takes a free
    /// place at once, and waits once more if there is none. An engine that refuses requests for its load has no free place, except for a
    /// request that all others have tried: otherwise that request would fail where it could be answered.
    ///
    /// # Errors
    /// Too many requests wait, in total or for one user, or no engine is left: each has failed, now or with this request.
    pub fn take(self: &Arc<Self>, claim: impl Into<Claim>, tried: &[usize]) -> Result<Turn, NoPlace> {
        let (now_ns, claim) = ((self.now_ns)(), claim.into());
        let mut state = self.state.lock();
        if !(0..state.replicas.len())
            .any(|replica| !tried.contains(&replica) && state.replicas[replica].is_usable(now_ns))
        {
            return Err(NoPlace::NoEngine);
        }
        // A request that failed elsewhere has already waited for its turn.
        if (state.queue.is_empty() || !tried.is_empty() || claim.has_waited)
            && let Some((replica, affinity)) = state.begin(&claim.wish, self.most_in_flight, tried, now_ns)
        {
            state.affinity.note(&claim.wish.prefix, replica, now_ns);
            return Ok(Turn::Now(EnginePlace::new(self, (replica, affinity))));
        }
        // A user may have as many waiting as others still could, so that it does not keep all others out (dynamic thresholds).
        let room = self.most_waiting.saturating_sub(state.queue.len());
        if !tried.is_empty() || room == 0 || state.queue.of(claim.user.as_ref()) >= room {
            return Err(NoPlace::Crowded);
        }
        let waiting = self.enqueue(&mut state, claim);
        self.give_places(state, now_ns);
        Ok(Turn::Later(waiting))
    }

    /// Returns the engine at which a request would get a place now; `None` if it would have to wait.
    #[must_use]
    pub fn foresee(&self, wish: &Wish) -> Option<usize> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let picked = state.pick(wish, self.most_in_flight, &[], now_ns).filter(|_| state.queue.is_empty());
        picked.map(|(replica, _)| replica)
    }

    /// Returns how many bytes of the prompt each engine may have in its cache.
    #[must_use]
    pub fn cached_bytes(&self, prefix: &PrefixHashes) -> Vec<CachedBytes> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        state.affinity.cached_bytes(prefix, state.replicas.len(), now_ns)
    }

    /// Learns from an engine's report on a prompt of the user with this hash. `compared` tokens of the
    /// prompt are in blocks that an earlier prompt at the engine had, too, and the engine had `reported` tokens in its cache. If an engine
    /// that has reported before reports nothing, the count is 0. Returns the count, if it is known.
    pub fn confirm_cached(&self, replica: usize, user: u64, compared: u32, reported: Option<u64>) -> Option<u64> {
        let mut state = self.state.lock();
        if replica < state.replicas.len() {
            state.affinity.confirm(replica, user, compared, reported)
        } else {
            reported
        }
    }

    fn enqueue(self: &Arc<Self>, state: &mut State, mut claim: Claim) -> QueuedRequest {
        let (told, place) = oneshot::channel();
        let wish = std::mem::take(&mut claim.wish);
        let name = state.queue.add(claim, Waiting { told, wish });
        QueuedRequest { engines: self.clone(), name, place }
    }

    /// Gives free places to waiting requests, in the order of their turns, and releases the lock.
    fn give_places(self: &Arc<Self>, mut state: MutexGuard<'_, State>, now_ns: u64) {
        let mut unwanted = Vec::new();
        // The place first: without one, the request still waits.
        while let Some(name) = state.queue.next()
            && let Some(Waiting { wish, .. }) = state.queue.get(name)
            && let Some((replica, affinity)) = state.begin(wish, self.most_in_flight, &[], now_ns)
            && let Some(Waiting { told, wish }) = state.queue.serve(name)
        {
            state.affinity.note(&wish.prefix, replica, now_ns);
            unwanted.extend(told.send(EnginePlace::new(self, (replica, affinity))).err());
        }
        if !state.queue.is_empty() {
            state.replicas.iter().for_each(|replica| replica.work.wanted.notify_one());
        }
        // A place whose request is gone takes the lock to be given back.
        drop(state);
        drop(unwanted);
    }

    /// Notes that an engine has begun to answer a request. If that brings the engine back, it gets waiting requests.
    pub fn began(self: &Arc<Self>, replica: usize) {
        let mut state = self.state.lock();
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.health.began();
            replica.closing.lock().accepted();
        }
        self.give_places(state, (self.now_ns)());
    }

    /// Notes that an engine answered a request completely. If that brings the engine back, it gets waiting requests.
    pub fn succeeded(self: &Arc<Self>, replica: usize) {
        let mut state = self.state.lock();
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.health.succeeded();
            replica.closing.lock().accepted();
            replica.work.answered.fetch_add(1, Relaxed);
        }
        self.give_places(state, (self.now_ns)());
    }

    /// Notes that an engine failed a request, and why. If no engine is left, waiting requests end with [`NoPlace::NoEngine`].
    pub fn failed(&self, replica: usize, fault: Fault, why: &str) {
        let now_ns = (self.now_ns)();
        let mut state = self.state.lock();
        let is_last = state.is_last(replica, now_ns);
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.health.failed(fault, why, is_last, now_ns);
            replica.work.failed.fetch_add(1, Relaxed);
        }
        state.give_up_without_engines(now_ns);
        drop(state);
        self.failed.notify_one();
    }

    /// Notes that an engine refused a request for its load, and for how many nanoseconds it says that it refuses requests, if it does. Until
    /// then, new requests go to other engines, or wait. Returns for how long, if the engine got requests until now.
    pub fn refused(self: &Arc<Self>, replica: usize, named_ns: Option<u64>) -> Option<u64> {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let found = state.replicas.get(replica)?;
        let (work, closing) = (found.work.clone(), found.closing.clone());
        drop(state);
        let closed_ns = {
            let mut closing = closing.lock();
            closing.refused(named_ns, now_ns).then(|| closing.left_ns(now_ns))
        };
        // Requests wait for the same time at each of them.
        work.others(self).iter().chain([self]).for_each(|sharer| sharer.failed.notify_one());
        closed_ns
    }

    /// Gives waiting requests the places of engines whose ejection or closing ends, by this clock, until dropped. Without it, such an engine
    /// gets only new requests.
    pub async fn readmit(self: Arc<Self>, clock: Clock) {
        loop {
            let failed = self.failed.notified();
            match self.next_end_ns((clock.now_ns)()) {
                None => failed.await,
                Some(until_ns) => tokio::select! {
                    () = failed => {}
                    () = (clock.sleep_until)(until_ns) => self.give_places(self.state.lock(), (clock.now_ns)()),
                },
            }
        }
    }

    /// Returns when the next ejection or closing of an engine ends, if there is any.
    fn next_end_ns(&self, now_ns: u64) -> Option<u64> {
        let state = self.state.lock();
        let ends_ns = |replica: &Replica| {
            let closed_ns = Some(replica.closed_ns(now_ns)).filter(|left_ns| *left_ns > 0);
            [replica.health.ejected_until_ns(now_ns), closed_ns.map(|left_ns| now_ns + left_ns)]
        };
        state.replicas.iter().flat_map(ends_ns).flatten().min()
    }

    /// Notes the result of a check of an engine, and its reason. An engine that is ready again gets waiting requests.
    pub fn checked(self: &Arc<Self>, replica: usize, found: Found, why: &str) {
        let now_ns = (self.now_ns)();
        let mut state = self.state.lock();
        let is_last = state.is_last(replica, now_ns);
        if let Some(replica) = state.replicas.get_mut(replica) {
            replica.health.checked(found, why, is_last);
        }
        state.give_up_without_engines(now_ns);
        self.give_places(state, now_ns);
    }

    /// Takes back a place, and gives it to the request whose turn it is.
    fn give_back(self: &Arc<Self>, replica: usize, was_asked_back: bool) {
        let (now_ns, state) = ((self.now_ns)(), self.state.lock());
        let work = state.replicas.get(replica).map(|replica| replica.work.clone());
        if let Some(work) = &work {
            work.end();
            if was_asked_back {
                work.asked_back.fetch_sub(1, Relaxed);
            }
        }
        self.give_places(state, now_ns);
        let others = work.map(|work| work.others(self)).unwrap_or_default();
        others.iter().for_each(|other| other.give_places(other.state.lock(), now_ns));
    }
}

impl EnginePlace {
    fn new(engines: &Arc<Engines>, (replica, affinity): (usize, PrefixAffinity)) -> Self {
        let [is_back, is_asked_back] = [(); 2].map(|()| AtomicBool::new(false));
        Self { engines: engines.clone(), replica, affinity, is_back, is_asked_back }
    }

    /// Gives the place back early, because the engine has ended its answer and only the client has to take the rest.
    pub fn give_back(&self) {
        if !self.is_back.swap(true, Relaxed) {
            self.engines.give_back(self.replica, self.is_asked_back.load(Relaxed));
        }
    }
}

impl State {
    /// Whether no other engine gets requests.
    fn is_last(&self, replica: usize, now_ns: u64) -> bool {
        let mut others = self.replicas.iter().enumerate().filter(|(other, _)| *other != replica);
        !others.any(|(_, other)| other.is_usable(now_ns))
    }

    /// Ends the wait of all requests if there is no engine.
    fn give_up_without_engines(&mut self, now_ns: u64) {
        if self.replicas.iter().all(|replica| !replica.is_usable(now_ns)) {
            self.queue.clear();
        }
    }
}

impl EngineWork {
    /// Returns how many requests the engine works on.
    fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// Notes that it gets one more, unless it works on `most` or more. Returns whether it gets one.
    fn begin(&self, most: u32) -> bool {
        // The gateways before and after a reload hold different locks here.
        self.in_flight.fetch_update(Relaxed, Relaxed, |count| (count < most).then(|| count + 1)).is_ok()
    }

    /// Notes that a request has ended.
    fn end(&self) {
        // Every end follows a `begin`.
        self.in_flight.fetch_sub(1, Relaxed);
    }

    /// Lets requests that wait at `sharer` take places that other gateways give back.
    fn share(&self, sharer: &Arc<Engines>) {
        let mut sharers = self.sharers.lock();
        sharers.retain(|known| known.strong_count() > 0);
        let sharer = Arc::downgrade(sharer);
        if !sharers.iter().any(|known| known.ptr_eq(&sharer)) {
            sharers.push(sharer);
        }
    }

    /// Returns the other gateways' engines that share these counts.
    fn others(&self, than: &Arc<Engines>) -> Vec<Arc<Engines>> {
        let sharers = self.sharers.lock();
        sharers.iter().filter_map(Weak::upgrade).filter(|sharer| !Arc::ptr_eq(sharer, than)).collect()
    }
}

impl Replica {
    const fn is_usable(&self, now_ns: u64) -> bool {
        self.health.is_usable(now_ns)
    }

    /// Whether it would work on one more request, if it takes that.
    fn has_room(&self, most_in_flight: u32, now_ns: u64) -> bool {
        self.is_usable(now_ns) && self.work.in_flight() < most_in_flight
    }

    /// Returns for how many nanoseconds it still gets no new requests, because it refused one for its load.
    fn closed_ns(&self, now_ns: u64) -> u64 {
        self.closing.lock().left_ns(now_ns)
    }

    /// Whether it gets no new requests now, because it refused one for its load.
    fn is_closed(&self, now_ns: u64) -> bool {
        self.closed_ns(now_ns) > 0
    }

    /// Whether it gets requests, and why not.
    fn verdict(&self, now_ns: u64) -> EngineHealth {
        match (self.health.verdict(now_ns), self.closed_ns(now_ns)) {
            (EngineHealth::Ready | EngineHealth::Untried, for_ns @ 1..) => EngineHealth::Refusing { for_ns },
            (verdict, _) => verdict,
        }
    }

    /// Returns the requests of other clients: zero before the first report; `None` if the last report is too old.
    fn others(&self, now_ns: u64, report_ns: u64) -> Option<Reported> {
        let Some((others, at_ns)) = self.others else { return Some(Reported::default()) };
        (now_ns.saturating_sub(at_ns) <= report_ns).then_some(others)
    }
}

/// A place, or the wait for it.
#[derive(Debug)]
pub enum Turn {
    /// There is a place.
    Now(EnginePlace),
    /// There is none yet.
    Later(QueuedRequest),
}

impl Future for QueuedRequest {
    type Output = Result<EnginePlace, NoPlace>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.place).poll(cx).map(|place| place.map_err(|_| NoPlace::NoEngine))
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        self.place.close();
        let mut state = self.engines.state.lock();
        // Only while this request waits: once it has a place, its name may belong to another.
        if state.queue.get(self.name).is_some_and(|waiting| waiting.told.is_closed()) {
            drop(state.queue.remove(self.name));
        }
    }
}

impl Drop for EnginePlace {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests;
