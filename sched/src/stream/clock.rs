//! What ranks are made of: arrivals, deadlines, priorities, virtual time and chance.

use super::{Discipline, Level, Low, Service};

/// A stream's place in the order: the smaller rank goes first, equal ranks take turns.
///
/// Ranks are comparable across all [`Streams`](super::Streams) that share a [`DisciplineClock`], and across no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u64);

/// The two upper bits of a rank.
#[derive(Clone, Copy)]
enum Band {
    First,
    FirstUndated,
    Second,
    SecondUndated,
}

/// What orders a stream within its band.
#[derive(Clone, Copy)]
enum Order {
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

    /// Deadlines within the same four nanoseconds are equal: their two lowest bits make room for the band.
    const fn by_deadline(band: Band, deadline_ns: u64) -> Self {
        Self::in_band(band, deadline_ns >> (u64::BITS - Self::VALUE_BITS))
    }

    const fn by_priority(priority: u8, arrival: u64) -> Self {
        Self(((u8::MAX - priority) as u64) << Self::ARRIVAL_BITS | arrival)
    }
}

impl From<Rank> for u64 {
    /// Returns the number that a rank is compared by.
    fn from(rank: Rank) -> Self {
        rank.0
    }
}

/// What the disciplines of a connection count: arrivals, virtual time and random numbers.
///
/// One per connection, shared by all [`Streams`](super::Streams) whose ranks are to be compared. It moves only with
/// what the streams do: the same calls with the same seed give the same order.
#[derive(Clone, Debug)]
pub struct DisciplineClock {
    discipline: Discipline,
    arrivals: u64,
    virtual_time: u64,
    random: u64,
}

impl DisciplineClock {
    /// Virtual time counts in 1/256 of a byte of a stream of weight 1, so 2^62 units are 16 PiB. After that all
    /// streams tie, which makes them take turns.
    const UNITS_PER_BYTE: u64 = 1 << 8;

    /// The mean cost of a lottery's turn in virtual time, at weight 1: fine enough for the largest weight, and 2^38
    /// turns to the end of virtual time.
    const UNITS_PER_TURN: f64 = (1u64 << 24) as f64;

    /// Starts the counts for streams that are served by `discipline`. Only [`Discipline::Lottery`] uses `seed`.
    #[must_use]
    pub const fn new(discipline: Discipline, seed: u64) -> Self {
        Self { discipline, arrivals: 0, virtual_time: 0, random: seed }
    }

    /// Returns how streams are ordered.
    #[must_use]
    pub const fn discipline(&self) -> Discipline {
        self.discipline
    }

    /// Returns an arrival number that is larger than all before it. A million every second last two thousand years.
    const fn arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals & ((1 << Rank::ARRIVAL_BITS) - 1)
    }

    /// Returns when a lottery's stream has its next turn: a time from the exponential distribution with the stream's
    /// weight as its rate. The smallest of such times belongs to each stream with a probability of its share of all
    /// weights, whatever happened before.
    fn draw(&mut self, weight: u64) -> u64 {
        // SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = (mixed ^ mixed >> 31) >> 11;
        // Uniform above 0 and at most 1, with all 53 bits that a double holds.
        let uniform = (bits + 1) as f64 / (1u64 << 53) as f64;
        let units = (-uniform.ln() * Self::UNITS_PER_TURN / weight as f64).round();
        (self.virtual_time + units as u64).min(Rank::VALUE_MAX)
    }
}

/// What a stream's rank is made of besides its [`Service`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    arrival: u64,
    /// In virtual time: where the stream's turn starts while it waits, where its last one ended while it does not.
    tag: u64,
    /// What the last turn left undivided by the weight, in units: no rounding error adds up.
    carry: u64,
}

impl Account {
    /// Notes that the stream begins to wait.
    pub(super) fn open(&mut self, service: &Service, clock: &mut DisciplineClock) {
        self.arrival = clock.arrival();
        self.start(service, clock);
    }

    /// Notes that the stream's service changed from `before`.
    pub(super) fn change(&mut self, before: &Service, service: &Service, clock: &mut DisciplineClock) {
        if weight(before) != weight(service) || before.level != service.level {
            self.carry = 0;
            self.start(service, clock);
        }
    }

    fn start(&mut self, service: &Service, clock: &mut DisciplineClock) {
        match order(clock.discipline, service).1 {
            Order::Share => self.tag = self.tag.max(clock.virtual_time),
            Order::Draw => self.tag = clock.draw(weight(service)),
            Order::Turns | Order::Arrival | Order::Deadline(_) | Order::Priority => {}
        }
    }

    /// Charges the stream for a turn. Returns whether it has to go behind those of the rank that it now has.
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
            }
            Order::Draw => {
                clock.virtual_time = clock.virtual_time.max(self.tag);
                self.tag = clock.draw(weight(service));
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

const fn order(discipline: Discipline, service: &Service) -> (Band, Order) {
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

const fn weight(service: &Service) -> u64 {
    match service.weight {
        0 => 1,
        weight => weight as u64,
    }
}
