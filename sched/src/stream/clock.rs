//! The components of ranks: arrivals, deadlines, priorities, virtual time and random draws.

use super::discipline::{Discipline, Level, Low, Service};
use crate::random::Random;

/// A stream's place in the order: the smaller rank goes first, equal ranks take turns.
///
/// Ranks are comparable across all [`Streams`](super::Streams) that share a [`DisciplineClock`], but not beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u64);

/// The two upper bits of a rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Band {
    First,
    FirstUndated,
    Second,
    SecondUndated,
}

/// What orders a stream within its band.
#[derive(Clone, Copy)]
pub(super) enum Order {
    Turns,
    Arrival,
    Deadline(u64),
    Priority,
    Share,
    Draw,
}

impl Rank {
    const VALUE_BITS: u32 = 62;
    const VALUE_MAX: u64 = (1 << Self::VALUE_BITS) - 1;
    const ARRIVAL_BITS: u32 = 56;

    const fn in_band(band: Band, value: u64) -> Self {
        Self((band as u64) << Self::VALUE_BITS | value)
    }

    /// Deadlines within the same four nanoseconds are equal: the two lowest bits make room for the band.
    const fn by_deadline(band: Band, deadline_ns: u64) -> Self {
        Self::in_band(band, deadline_ns >> (u64::BITS - Self::VALUE_BITS))
    }

    const fn by_priority(priority: u8, arrival: u64) -> Self {
        Self(((u8::MAX - priority) as u64) << Self::ARRIVAL_BITS | arrival)
    }
}

impl From<Rank> for u64 {
    /// Returns the number by which ranks compare.
    fn from(rank: Rank) -> Self {
        rank.0
    }
}

/// The counters of a connection's disciplines: arrivals, virtual time and random numbers.
///
/// One per connection, shared by all [`Streams`](super::Streams) whose ranks are compared. It advances only with the
/// calls for streams: the same calls with the same seed give the same order.
#[derive(Clone, Debug)]
pub struct DisciplineClock {
    discipline: Discipline,
    arrivals: u64,
    virtual_time: u64,
    /// How many streams that are ordered by virtual start time wait, in all sets.
    pub(super) sharing: usize,
    /// The latest end of a turn of such a stream, in virtual time.
    latest_end: u64,
    random: Random,
}

impl DisciplineClock {
    /// Virtual time counts in 1/256 of a byte of a stream of weight 1, so 2^62 units are 16 PiB. Beyond that all
    /// streams tie, and so take turns.
    const UNITS_PER_BYTE: u64 = 1 << 8;

    /// The mean cost of a lottery turn in virtual time, at weight 1: fine enough for the largest weight, with 2^38
    /// turns until virtual time ends.
    const UNITS_PER_TURN: f64 = (1u64 << 24) as f64;

    /// Creates the counters for streams served by `discipline`. Only [`Discipline::Lottery`] uses `seed`.
    #[must_use]
    pub const fn new(discipline: Discipline, seed: u64) -> Self {
        Self { discipline, arrivals: 0, virtual_time: 0, sharing: 0, latest_end: 0, random: Random::new(seed) }
    }

    /// Returns how streams are ordered.
    #[must_use]
    pub const fn discipline(&self) -> Discipline {
        self.discipline
    }

    /// Whether streams of this service take turns, and all have the same rank.
    pub(super) const fn takes_turns(&self, service: &Service) -> bool {
        matches!(order(self.discipline, service).1, Order::Turns)
    }

    /// Returns an arrival number larger than all before it. A million per second last two thousand years.
    const fn arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals & ((1 << Rank::ARRIVAL_BITS) - 1)
    }

    /// Returns when a stream has its next turn in the lottery after `from`, in virtual time: later by a time from the exponential
    /// distribution with the stream's weight as its rate. The smallest of such times belongs to each stream with a
    /// probability of its share of all weights, whatever happened before.
    fn draw(&mut self, from: u64, weight: u64) -> u64 {
        let units = (self.random.exponential(Self::UNITS_PER_TURN) / weight as f64).round();
        from.saturating_add(units as u64).min(Rank::VALUE_MAX)
    }
}

/// The parts of a stream's rank that its [`Service`] does not hold.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    arrival: u64,
    /// In virtual time: the start of the stream's turn while it waits, the end of its last turn otherwise.
    tag: u64,
    /// The remainder of the last turn after division by the weight, in units, so that rounding errors do not add up.
    carry: u64,
}

impl Account {
    /// Notes that the stream begins to wait.
    pub(super) fn open(&mut self, service: &Service, clock: &mut DisciplineClock) {
        self.arrival = clock.arrival();
        self.start(service, clock);
        clock.sharing += usize::from(clock.discipline.is_by_share(service));
    }

    /// Notes that the stream, which waited, does not wait any more.
    pub(super) fn close(service: &Service, clock: &mut DisciplineClock) {
        clock.sharing = clock.sharing.saturating_sub(usize::from(clock.discipline.is_by_share(service)));
    }

    /// Notes that the service of the stream, which `waits` or not, changed from `before`.
    pub(super) fn change(&mut self, before: &Service, service: &Service, clock: &mut DisciplineClock, waits: bool) {
        if weight(before) != weight(service) || before.level != service.level {
            self.carry = 0;
            self.start(service, clock);
            let [shared, shares] = [before, service].map(|of| waits && clock.discipline.is_by_share(of));
            clock.sharing = (clock.sharing + usize::from(shares)).saturating_sub(usize::from(shared));
        }
    }

    fn start(&mut self, service: &Service, clock: &mut DisciplineClock) {
        match order(clock.discipline, service).1 {
            Order::Share => {
                if clock.sharing == 0 {
                    // A busy period has ended (SIGCOMM 1996, §2): the first stream to wake starts the next one with no debt.
                    clock.virtual_time = clock.virtual_time.max(clock.latest_end);
                }
                self.tag = self.tag.max(clock.virtual_time);
            }
            Order::Draw => self.tag = clock.draw(clock.virtual_time, weight(service)),
            Order::Turns | Order::Arrival | Order::Deadline(_) | Order::Priority => {}
        }
    }

    /// Charges the stream for a turn. Returns whether it has to go behind the streams of its new rank.
    pub(super) fn charge(&mut self, service: &Service, clock: &mut DisciplineClock, bytes: u64) -> bool {
        match order(clock.discipline, service).1 {
            Order::Turns => {}
            Order::Deadline(_) => return false,
            Order::Arrival | Order::Priority if !service.incremental => return false,
            Order::Arrival | Order::Priority => self.arrival = clock.arrival(),
            Order::Share => {
                clock.virtual_time = clock.virtual_time.max(self.tag);
                let units = bytes.saturating_mul(DisciplineClock::UNITS_PER_BYTE).saturating_add(self.carry);
                self.carry = units % weight(service);
                self.tag = self.tag.saturating_add(units / weight(service)).min(Rank::VALUE_MAX);
                clock.latest_end = clock.latest_end.max(self.tag);
            }
            Order::Draw => {
                clock.virtual_time = clock.virtual_time.max(self.tag);
                // From its own turn, because virtual time may be ahead: streams are charged when their bytes are handed over,
                // and tunnels when they leave.
                self.tag = clock.draw(self.tag, weight(service));
            }
        }
        true
    }

    pub(super) const fn rank(&self, service: &Service, clock: &DisciplineClock) -> Rank {
        let (band, order) = order(clock.discipline, service);
        match order {
            Order::Turns => Rank::in_band(band, 0),
            Order::Arrival => Rank::in_band(band, self.arrival),
            Order::Deadline(deadline_ns) => Rank::by_deadline(band, deadline_ns),
            Order::Priority => Rank::by_priority(service.priority, self.arrival),
            Order::Share | Order::Draw => Rank::in_band(band, self.tag),
        }
    }
}

impl Discipline {
    /// Whether a stream of this service gets a share by its weight, charged by the bytes that it sends.
    #[must_use]
    pub const fn is_by_share(self, service: &Service) -> bool {
        matches!(order(self, service).1, Order::Share)
    }
}

/// Returns the band of a stream of this service, and what orders it there.
pub(super) const fn order(discipline: Discipline, service: &Service) -> (Band, Order) {
    match (discipline, service.level) {
        (Discipline::Rr, _) => (Band::First, Order::Turns),
        (Discipline::Fcfs, _) => (Band::First, Order::Arrival),
        (Discipline::Edf { .. }, _) | (Discipline::Ml { .. }, Level::High) => {
            by_deadline(service, Band::First, Band::FirstUndated)
        }
        (Discipline::Abs, _) => (Band::First, Order::Priority),
        (Discipline::Ml { low: Low::Rr }, Level::Low) => (Band::Second, Order::Turns),
        (Discipline::Ml { low: Low::Fcfs }, Level::Low) => (Band::Second, Order::Arrival),
        (Discipline::Ml { low: Low::Edf }, Level::Low) => by_deadline(service, Band::Second, Band::SecondUndated),
        (Discipline::Ml { low: Low::Wfq }, Level::Low) => (Band::Second, Order::Share),
        (Discipline::Wfq, _) => (Band::First, Order::Share),
        (Discipline::Lottery, _) => (Band::First, Order::Draw),
    }
}

const fn by_deadline(service: &Service, dated: Band, undated: Band) -> (Band, Order) {
    match service.deadline_ns {
        Some(deadline_ns) => (dated, Order::Deadline(deadline_ns)),
        None => (undated, Order::Arrival),
    }
}

/// Returns the weight of a service, at least 1.
pub(super) const fn weight(service: &Service) -> u64 {
    match service.weight {
        0 => 1,
        weight => weight as u64,
    }
}
