//! Which stream has the next turn.
//!
//! A discipline is nothing more than a rank on one [`Pifo`]; equal ranks take turns in the order in which they were queued.
//!
//! | discipline | rank | a stream with more to send | source |
//! |---|---|---|---|
//! | [`Rr`](Discipline::Rr) | 0 | ties with all others: goes to the back | Enhancing QUIC, ch. 1, §4.1 |
//! | [`Fcfs`](Discipline::Fcfs) | arrival | stays at the head | §4.1 (1) |
//! | [`Edf`](Discipline::Edf) | deadline | stays until a smaller one comes | §4.1 (2) |
//! | [`Abs`](Discipline::Abs) | priority, then arrival | stays until a higher one comes | §4.1 (3) |
//! | [`Ml`](Discipline::Ml) | level, then the rank within that level | as its level says | §4.1 (4) |
//! | [`Wfq`](Discipline::Wfq) | virtual start time | moves back by bytes / weight | start-time fair queueing, SIGCOMM 1996 |
//! | [`Lottery`](Discipline::Lottery) | random virtual time | draws again, at a rate equal to its weight | FStream, §II |
//!
//! "Enhancing QUIC" is the thesis "Enhancing QUIC: Quality-of-Service LLM Serving and MASQUE Proxy Scheduling".

mod clock;
mod contention;
mod discipline;
#[cfg(test)]
mod tests;

use clock::Account;
pub use clock::{DisciplineClock, Rank};
pub use contention::Contention;
pub use discipline::{Discipline, Expiry, Level, Low, Service};

use crate::pifo::Pifo;

/// A set of streams, and the order of the streams that have something to send.
///
/// Streams are named by small integers, such as slab indices: memory is proportional to the largest one in use. All calls
/// that take a [`DisciplineClock`] must be given the same one. The caller defines the length of a turn, a packet or a
/// quantum of bytes.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    known: Vec<Option<Stream>>,
    queue: Pifo<Rank>,
    /// How many waiting streams take turns with all others of their rank.
    in_turns: usize,
}

/// Memory for this many streams is not worth releasing.
const KEPT: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Stream {
    service: Service,
    account: Account,
}

impl Streams {
    /// Creates an empty set without allocating.
    #[must_use]
    pub const fn new() -> Self {
        Self { known: Vec::new(), queue: Pifo::new(), in_turns: 0 }
    }

    /// Adds `stream`, with nothing to send yet. It replaces any stream of this name.
    pub fn insert(&mut self, clock: &mut DisciplineClock, stream: u32, service: Service) {
        self.sleep(clock, stream);
        if stream as usize >= self.known.len() {
            self.known.resize(stream as usize + 1, None);
        }
        self.known[stream as usize] = Some(Stream { service, account: Account::default() });
    }

    /// Changes the service of a known stream, from its next turn on. A waiting stream moves to where the new service puts
    /// it; its arrival and its charges so far still count. Does nothing for an unknown stream.
    pub fn set(&mut self, clock: &mut DisciplineClock, stream: u32, service: Service) {
        let Some(known) = known(&mut self.known, stream) else { return };
        let (rank, waits) = (known.rank(clock), self.queue.contains(stream));
        known.account.change(&known.service, &service, clock, waits);
        let [turned, turns] = [&known.service, &service].map(|of| usize::from(waits && clock.takes_turns(of)));
        self.in_turns = self.in_turns + turns - turned;
        known.service = service;
        let changed = known.rank(clock);
        if changed != rank && waits {
            self.queue.push(stream, changed);
        }
    }

    /// Returns the service of a known stream.
    #[must_use]
    pub fn service(&self, stream: u32) -> Option<&Service> {
        self.known.get(stream as usize)?.as_ref().map(|known| &known.service)
    }

    /// Notes that a known stream has something to send. A stream that already waits keeps its place.
    pub fn wake(&mut self, clock: &mut DisciplineClock, stream: u32) {
        if let Some(known) = known(&mut self.known, stream)
            && !self.queue.contains(stream)
        {
            known.account.open(&known.service, clock);
            self.in_turns += usize::from(clock.takes_turns(&known.service));
            self.queue.push(stream, known.rank(clock));
        }
    }

    /// Returns the stream whose turn it is, and its rank. The answer stays the same until that turn ends, unless a stream
    /// that goes before it wakes.
    #[must_use]
    pub fn turn(&self) -> Option<(u32, Rank)> {
        self.queue.peek()
    }

    /// Returns the stream whose turn it is if it has to be given up instead: under [`Discipline::Edf`] with
    /// [`Expiry::Hard`], a stream whose deadline is before `now_ns`.
    #[must_use]
    pub fn expired(&self, clock: &DisciplineClock, now_ns: u64) -> Option<u32> {
        let Discipline::Edf { expiry: Expiry::Hard } = clock.discipline() else { return None };
        let (stream, _) = self.turn()?;
        self.service(stream)?.deadline_ns.is_some_and(|deadline_ns| deadline_ns < now_ns).then_some(stream)
    }

    /// Ends a turn in which `stream` sent `bytes`: with `more` to send it goes where the discipline puts it, otherwise it
    /// leaves until the next wake. A stream that was removed during its turn stays removed.
    pub fn end_turn(&mut self, clock: &mut DisciplineClock, stream: u32, bytes: u64, more: bool) {
        let Some(known) = known(&mut self.known, stream) else { return };
        let moves = known.account.charge(&known.service, clock, bytes);
        if !more {
            self.sleep(clock, stream);
        } else if moves && self.queue.contains(stream) {
            self.queue.push(stream, known.rank(clock));
        }
    }

    /// Notes that a waiting stream has nothing to send any more, though it had no turn. Its charges so far still count.
    pub fn sleep(&mut self, clock: &mut DisciplineClock, stream: u32) {
        if self.queue.remove(stream)
            && let Some(known) = known(&mut self.known, stream)
        {
            Account::close(&known.service, clock);
            self.in_turns -= usize::from(clock.takes_turns(&known.service));
        }
    }

    /// Orders the streams by another `clock` from now on; the previous one must not be used any more. Waiting streams start
    /// afresh, in the order in which they waited.
    pub fn reorder(&mut self, clock: &mut DisciplineClock) {
        self.known.iter_mut().flatten().for_each(|known| known.account = Account::default());
        let waiting: Vec<_> = std::iter::from_fn(|| self.queue.pop()).collect();
        self.in_turns = 0;
        waiting.into_iter().for_each(|(stream, _)| self.wake(clock, stream));
    }

    /// Removes `stream`, whose name may be reused at once. Returns whether it was known.
    pub fn remove(&mut self, clock: &mut DisciplineClock, stream: u32) -> bool {
        self.sleep(clock, stream);
        let was_known = self.known.get_mut(stream as usize).and_then(Option::take).is_some();
        while let Some(None) = self.known.last() {
            self.known.pop();
        }
        if self.known.capacity() > KEPT.max(4 * self.known.len()) {
            self.known.shrink_to(2 * self.known.len());
        }
        was_known
    }

    /// Returns whether `stream` has something to send.
    #[must_use]
    pub fn contains(&self, stream: u32) -> bool {
        self.queue.contains(stream)
    }

    /// Returns how many streams have something to send.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns how many of these streams take turns with all others of their rank, because nothing else orders them.
    #[must_use]
    pub const fn in_turns(&self) -> usize {
        self.in_turns
    }

    /// Returns whether no stream has anything to send.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Stream {
    const fn rank(&self, clock: &DisciplineClock) -> Rank {
        self.account.rank(&self.service, clock)
    }
}

fn known(streams: &mut [Option<Stream>], stream: u32) -> Option<&mut Stream> {
    streams.get_mut(stream as usize)?.as_mut()
}
