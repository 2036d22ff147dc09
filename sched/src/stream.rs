//! Which stream has the next turn.
//!
//! A discipline is a rank on one [`Pifo`], nothing more; equal ranks take turns in the order they asked.
//!
//! | discipline | rank | a stream with more to send | source |
//! |---|---|---|---|
//! | [`Rr`](Discipline::Rr) | 0 | ties with all others: goes to the back | Enhancing QUIC, ch. 1, §4.1 |
//! | [`Fcfs`](Discipline::Fcfs) | arrival | stays at the head | §4.1 (1) |
//! | [`Edf`](Discipline::Edf) | deadline | stays until a smaller one comes | §4.1 (2) |
//! | [`Abs`](Discipline::Abs) | priority, then arrival | stays until a higher one comes | §4.1 (3) |
//! | [`Ml`](Discipline::Ml) | level, then what orders that level | as its level says | §4.1 (4) |
//! | [`Wfq`](Discipline::Wfq) | virtual start time | moves back by bytes / weight | start-time fair queueing, SIGCOMM 1996 |
//! | [`Lottery`](Discipline::Lottery) | random virtual time | draws again, at a rate of its weight | FStream, §II |
//!
//! "Enhancing QUIC" is the thesis "Enhancing QUIC: Quality-of-Service LLM Serving and MASQUE Proxy Scheduling".

mod clock;
#[cfg(test)]
mod tests;

pub use clock::{DisciplineClock, Rank};

use crate::pifo::Pifo;
use clock::Account;

/// How streams that have something to send are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Discipline {
    /// Round robin, what QUIC stacks do unasked: one turn each, in the order in which they asked for one.
    #[default]
    Rr,
    /// First come, first served (Enhancing QUIC, ch. 1, §4.1): a stream is served until it has nothing left; one that
    /// has something again is a new arrival. [Incremental](Service::incremental) streams go to the back after a turn.
    Fcfs,
    /// Earliest deadline first (§4.1): deadlines closer than four nanoseconds may count as equal. Streams without a
    /// deadline come after streams with one, first come, first served.
    Edf {
        /// What happens to a stream whose deadline has passed.
        expiry: Expiry,
    },
    /// Absolute priority (§4.1): the highest priority there is, first come, first served within it.
    /// [Incremental](Service::incremental) streams go behind their equals after a turn. Starves low priorities.
    Abs,
    /// Multi-level (§4.1): [`Level::High`] before [`Level::Low`], always. The high level is served earliest deadline
    /// first, the low one as `low` says. The high level can starve the low one.
    Ml {
        /// How the low level is ordered; the thesis has round robin.
        low: Low,
    },
    /// Weighted fair queueing by bytes: start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing",
    /// SIGCOMM 1996), which needs not know how long a turn will be. Between two streams that wait all the time, bytes
    /// per weight differ by at most one turn of each. A stream that slept is owed nothing.
    Wfq,
    /// Lottery: each turn goes to a stream with a probability of its weight's share in the weights of all that wait,
    /// however long its turns are (FStream, §II, where the weight is called the stream's priority, PRT).
    Lottery,
}

/// What happens to a stream whose deadline has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Expiry {
    /// It is served all the same, and first.
    #[default]
    Soft,
    /// It is to be given up, see [`Streams::expired`].
    Hard,
}

/// What orders the low level of [`Discipline::Ml`], as the discipline of the same name does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Low {
    /// [`Discipline::Rr`].
    #[default]
    Rr,
    /// [`Discipline::Fcfs`].
    Fcfs,
    /// [`Discipline::Edf`] with [`Expiry::Soft`].
    Edf,
    /// [`Discipline::Wfq`].
    Wfq,
}

/// One of the two levels of [`Discipline::Ml`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Level {
    /// Always before the low one.
    High,
    /// When the high one has nothing to send.
    #[default]
    Low,
}

/// What a stream is to its scheduler. Each discipline uses the parts that it ranks by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Used by [`Discipline::Ml`].
    pub level: Level,
    /// Used by [`Discipline::Abs`]; the higher goes first.
    pub priority: u8,
    /// The stream's share under [`Discipline::Wfq`] and [`Discipline::Lottery`]; 0 is treated as 1.
    pub weight: u16,
    /// When all must have left, in nanoseconds of the caller's time. Used by [`Discipline::Edf`] and both levels of
    /// [`Discipline::Ml`].
    pub deadline_ns: Option<u64>,
    /// Whether a stream that is ranked by arrival shares with its equals, turn by turn, instead of being served to its
    /// end (the `i` parameter of RFC 9218 §4.2).
    pub incremental: bool,
}

impl Default for Service {
    /// The low level, the lowest priority, weight 1, no deadline, served to its end.
    fn default() -> Self {
        Self { level: Level::Low, priority: 0, weight: 1, deadline_ns: None, incremental: false }
    }
}

/// A set of streams, and the order of the streams that have something to send.
///
/// Streams are named by small integers, such as slab indices: memory follows the largest that is known. All calls
/// that take a [`DisciplineClock`] must be given the same one. What a turn is worth, a packet or a quantum of bytes, is
/// up to the caller.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    known: Vec<Option<Stream>>,
    queue: Pifo<Rank>,
}

/// Memory for so many streams is not worth giving back.
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
        Self { known: Vec::new(), queue: Pifo::new() }
    }

    /// Makes `stream` known, with nothing to send yet. It forgets a stream that was known under this name.
    pub fn insert(&mut self, stream: u32, service: Service) {
        self.queue.remove(stream);
        if stream as usize >= self.known.len() {
            self.known.resize(stream as usize + 1, None);
        }
        self.known[stream as usize] = Some(Stream { service, account: Account::default() });
    }

    /// Changes what a known stream is entitled to, from its next turn on. A stream that waits goes where the new
    /// service puts it; its arrival and what it was charged so far still count. Does nothing for an unknown stream.
    pub fn set(&mut self, clock: &mut DisciplineClock, stream: u32, service: Service) {
        let Some(known) = known(&mut self.known, stream) else { return };
        let rank = known.rank(clock);
        known.account.change(&known.service, &service, clock);
        known.service = service;
        let changed = known.rank(clock);
        if changed != rank && self.queue.contains(stream) {
            self.queue.push(stream, changed);
        }
    }

    /// Returns what a known stream is entitled to.
    #[must_use]
    pub fn service(&self, stream: u32) -> Option<&Service> {
        self.known.get(stream as usize)?.as_ref().map(|known| &known.service)
    }

    /// Notes that a known stream has something to send. A stream that waits already keeps its place.
    pub fn wake(&mut self, clock: &mut DisciplineClock, stream: u32) {
        if let Some(known) = known(&mut self.known, stream)
            && !self.queue.contains(stream)
        {
            known.account.open(&known.service, clock);
            self.queue.push(stream, known.rank(clock));
        }
    }

    /// Returns the stream whose turn it is, and its rank. Asking again gives the same answer until that turn ends,
    /// unless one that goes before it wakes.
    #[must_use]
    pub fn turn(&self) -> Option<(u32, Rank)> {
        self.queue.peek()
    }

    /// Returns the stream whose turn it is if it has to be given up instead: under [`Discipline::Edf`] with
    /// [`Expiry::Hard`], one whose deadline is before `now_ns`.
    #[must_use]
    pub fn expired(&self, clock: &DisciplineClock, now_ns: u64) -> Option<u32> {
        let Discipline::Edf { expiry: Expiry::Hard } = clock.discipline() else { return None };
        let (stream, _) = self.turn()?;
        self.service(stream)?.deadline_ns.is_some_and(|deadline_ns| deadline_ns < now_ns).then_some(stream)
    }

    /// Ends a turn in which `stream` sent `bytes`: with `more` to send it goes where the discipline puts it, otherwise
    /// it leaves until it is woken. A stream that was removed during its turn stays away.
    pub fn end_turn(&mut self, clock: &mut DisciplineClock, stream: u32, bytes: u64, more: bool) {
        let Some(known) = known(&mut self.known, stream) else { return };
        let moves = known.account.charge(&known.service, clock, bytes);
        if !more {
            self.queue.remove(stream);
        } else if moves && self.queue.contains(stream) {
            self.queue.push(stream, known.rank(clock));
        }
    }

    /// Orders the streams by another `clock` from now on. Waiting streams begin anew, in the order in which they
    /// waited.
    pub fn reorder(&mut self, clock: &mut DisciplineClock) {
        self.known.iter_mut().flatten().for_each(|known| known.account = Account::default());
        let waiting: Vec<_> = std::iter::from_fn(|| self.queue.pop()).collect();
        waiting.into_iter().for_each(|(stream, _)| self.wake(clock, stream));
    }

    /// Forgets `stream`, whose name may be given to another at once. Returns whether it was known.
    pub fn remove(&mut self, stream: u32) -> bool {
        self.queue.remove(stream);
        let was_known = self.known.get_mut(stream as usize).and_then(Option::take).is_some();
        while let Some(None) = self.known.last() {
            self.known.pop();
        }
        if self.known.capacity() > KEPT.max(4 * self.known.len()) {
            self.known.shrink_to(2 * self.known.len());
        }
        was_known
    }

    /// Tells whether `stream` has something to send.
    #[must_use]
    pub fn contains(&self, stream: u32) -> bool {
        self.queue.contains(stream)
    }

    /// Returns how many streams have something to send.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether no stream has anything to send.
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
