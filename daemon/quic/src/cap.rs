//! Rates that traffic of a class or of a user shares, and the departures that are reserved under them.

use std::{mem::replace, sync::Arc};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use sched::{pace::Pace, stream::Level};

/// How many bytes of a stream count as one packet, for classes with a limit in packets per second.
pub(crate) const STREAM_BYTES_PER_PACKET: u64 = 1_200;

/// A limit that all traffic of a class or of a user shares, in bytes or packets per second or both ([`Pace`]). Departures
/// are reserved in the order of turns, so waiting for one costs no other stream or tunnel its turn.
///
/// Loads of the high level wait for no load of the low level. They take their time from the low level: each postpones the departures that
/// the low level waits for. A class has one level, so only the traffic of a user can have both.
#[derive(Debug)]
pub struct Cap {
    state: Mutex<CapState>,
    turn_bytes: u64,
}

#[derive(Debug)]
struct CapState {
    bytes: Option<Paces>,
    /// Counts one "byte" per packet.
    packets: Option<Paces>,
    /// By how much all loads of the high level have postponed the low one together, in nanoseconds.
    high_ns: u64,
}

/// The limit in one unit.
#[derive(Clone, Copy, Debug)]
struct Paces {
    /// Of both levels together: when the next load of the low level may leave.
    all: Pace,
    /// Of the high level alone: when the next load of the high level may leave.
    high: Pace,
}

impl Paces {
    fn ready_at(&self, now_ns: u64, level: Level) -> u64 {
        match level {
            Level::High => self.high.ready_at(now_ns),
            Level::Low => self.all.ready_at(now_ns),
        }
    }

    /// Charges a load that leaves at `at_ns`.
    fn sent(&mut self, at_ns: u64, amount: u64, level: Level) {
        self.all.sent(at_ns, amount);
        if level == Level::High {
            self.high.sent(at_ns, amount);
        }
    }

    /// Takes back the charge for a load that will not leave.
    fn give_back(&mut self, amount: u64, level: Level) {
        self.all.give_back(amount);
        if level == Level::High {
            self.high.give_back(amount);
        }
    }
}

impl CapState {
    /// Returns when a load of a level may leave: `now_ns` or later.
    fn ready_at(&self, now_ns: u64, level: Level) -> u64 {
        let ready_ns = |paces: &Option<Paces>| paces.map_or(now_ns, |paces| paces.ready_at(now_ns, level));
        ready_ns(&self.bytes).max(ready_ns(&self.packets))
    }

    /// Charges a load; returns when it may leave, and by how much it postpones the low level if it is of the high one. That is not the time
    /// that the load itself takes: of loads that alternate in what limits them, bytes or packets, two take less time than each alone.
    fn reserve(&mut self, now_ns: u64, bytes: u64, packets: u64, level: Level) -> (u64, u64) {
        let (at_ns, low_ns) = (self.ready_at(now_ns, level), self.ready_at(now_ns, Level::Low));
        for (paces, amount) in [(&mut self.bytes, bytes), (&mut self.packets, packets)] {
            paces.iter_mut().for_each(|paces| paces.sent(at_ns, amount, level));
        }
        let postpones_ns = match level {
            Level::High => self.ready_at(now_ns, Level::Low).saturating_sub(low_ns),
            Level::Low => 0,
        };
        self.high_ns = self.high_ns.saturating_add(postpones_ns);
        (at_ns, postpones_ns)
    }

    /// Takes back a part of a load's charge, and what of `postponed_ns` it was the cause of.
    fn give_back(&mut self, bytes: u64, packets: u64, level: Level, postponed_ns: u64) {
        let low_ns = self.ready_at(0, Level::Low);
        for (paces, amount) in [(&mut self.bytes, bytes), (&mut self.packets, packets)] {
            paces.iter_mut().for_each(|paces| paces.give_back(amount, level));
        }
        let earlier_ns = low_ns.saturating_sub(self.ready_at(0, Level::Low));
        self.high_ns = self.high_ns.saturating_sub(earlier_ns.min(postponed_ns));
    }
}

impl Cap {
    /// How many nanoseconds' worth of traffic may leave at once after a silence.
    const BURST_NS: u64 = 10_000_000;

    /// The part of a second's traffic that a stream sends in a turn: 100 µs.
    const TURNS_PER_SEC: u64 = 10_000;

    /// Returns a cap that nothing has used yet; `None` if there is no limit.
    #[must_use]
    pub fn new(bytes_per_sec: Option<u64>, packets_per_sec: Option<u64>) -> Option<Self> {
        let pace = |per_sec| Pace::new(per_sec, Self::BURST_NS);
        let paces = |per_sec: Option<u64>| per_sec.map(|per_sec| Paces { all: pace(per_sec), high: pace(per_sec) });
        let state = CapState { bytes: paces(bytes_per_sec), packets: paces(packets_per_sec), high_ns: 0 };
        let in_packets = packets_per_sec.map(|per_sec| per_sec.saturating_mul(STREAM_BYTES_PER_PACKET));
        let bytes_per_sec = [bytes_per_sec, in_packets].into_iter().flatten().min()?;
        // Whole packets, because each turn counts as whole ones.
        let packets = (bytes_per_sec / Self::TURNS_PER_SEC / STREAM_BYTES_PER_PACKET).max(1);
        let turn_bytes = packets * STREAM_BYTES_PER_PACKET;
        Some(Self { state: Mutex::new(state), turn_bytes })
    }

    /// Returns how many bytes of a stream may leave in one turn. A tunnel reserves a departure for one payload at a time, so next to long
    /// turns of streams it would get a small part of the rate.
    #[must_use]
    pub const fn turn_bytes(&self) -> u64 {
        self.turn_bytes
    }

    /// Charges `bytes` in `packets` of the low level, and returns when they are due: `now_ns` or later.
    pub fn reserve(&self, now_ns: u64, bytes: u64, packets: u64) -> u64 {
        self.state.lock().reserve(now_ns, bytes, packets, Level::Low).0
    }

    /// Reserves a departure for `bytes` in `packets` of a level, and returns what gives it back if it is dropped before it is
    /// [spent](Reservation::spend).
    pub fn hold(self: &Arc<Self>, now_ns: u64, bytes: u64, packets: u64, level: Level) -> Reservation {
        let mut state = self.state.lock();
        let (due_ns, postpones_ns) = state.reserve(now_ns, bytes, packets, level);
        Reservation { cap: self.clone(), bytes, packets, level, due_ns, postpones_ns, high_ns: state.high_ns }
    }
}

/// Bytes and packets for which a class or a user has reserved a departure. Dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    cap: Arc<Cap>,
    bytes: u64,
    packets: u64,
    level: Level,
    due_ns: u64,
    /// By how much it has postponed the low level.
    postpones_ns: u64,
    /// By how much all loads of the high level had postponed the low one when `due_ns` was last true.
    high_ns: u64,
}

impl Reservation {
    /// Returns when the departure is due: later than before if loads of the high level have come meanwhile, and it is of the low one.
    pub fn due_ns(&mut self) -> u64 {
        if self.level == Level::Low {
            let high_ns = self.cap.state.lock().high_ns;
            let postponed_ns = high_ns.saturating_sub(replace(&mut self.high_ns, high_ns));
            self.due_ns = self.due_ns.saturating_add(postponed_ns);
        }
        self.due_ns
    }

    /// Notes that the departure has come, so that nothing is given back any more.
    pub fn spend(mut self) {
        (self.bytes, self.packets) = (0, 0);
    }

    /// Whether this cap made it for a load of this level.
    #[must_use]
    pub fn is_of(&self, cap: &Arc<Cap>, level: Level) -> bool {
        Arc::ptr_eq(&self.cap, cap) && self.level == level
    }

    /// Gives back the reservation for unsent bytes and packets, and charges sent bytes and packets without a reservation: an upper layer
    /// may queue more before the departure.
    pub fn settle(mut self, now_ns: u64, bytes: u64, packets: u64) {
        if bytes > self.bytes || packets > self.packets {
            let (bytes, packets) = (bytes.saturating_sub(self.bytes), packets.saturating_sub(self.packets));
            self.cap.state.lock().reserve(now_ns, bytes, packets, self.level);
        }
        self.bytes = self.bytes.saturating_sub(bytes);
        self.packets = self.packets.saturating_sub(packets);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 || self.packets > 0 {
            self.cap.state.lock().give_back(self.bytes, self.packets, self.level, self.postpones_ns);
        }
    }
}

/// The rate of a user in one direction, which may change while its tunnels are open.
#[derive(Debug, Default)]
pub struct UserRate(ArcSwapOption<Cap>);

impl UserRate {
    /// Puts another limit in force, as of [`Cap::new`]. What has been used of the former one does not count.
    pub fn set(&self, bytes_per_sec: Option<u64>, packets_per_sec: Option<u64>) {
        self.0.store(Cap::new(bytes_per_sec, packets_per_sec).map(Arc::new));
    }

    /// Returns the limit, if there is one.
    #[must_use]
    pub fn cap(&self) -> Option<Arc<Cap>> {
        self.0.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_holds_to_the_slower_of_bytes_and_packets() {
        const MS: u64 = 1_000_000;
        // Beyond the 10 ms that may leave at once, 1,000 bytes take 1 ms, and a packet takes 10 ms.
        let cap = Cap::new(Some(1_000_000), Some(100)).unwrap();
        let departures: Vec<_> = (0..4).map(|_| cap.reserve(100 * MS, 0, 1) / MS).collect();
        assert_eq!(departures, [100, 100, 110, 120], "empty ones");
        let departures: Vec<_> = (0..3).map(|_| cap.reserve(500 * MS, 30_000, 1) / MS).collect();
        assert_eq!(departures, [500, 520, 550], "long ones");
        assert!(Cap::new(None, None).is_none());
    }

    #[test]
    fn a_turn_of_a_stream_is_of_whole_packets_and_holds_to_the_slower_of_bytes_and_packets() {
        let turn = |bytes, packets| Cap::new(bytes, packets).unwrap().turn_bytes();
        assert_eq!([1_000, 12_500_000, 125_000_000].map(|bytes| turn(Some(bytes), None)), [1_200, 1_200, 12_000]);
        assert_eq!([1, 15_000, 25_000].map(|packets| turn(None, Some(packets))), [1_200, 1_200, 2_400]);
        assert_eq!(turn(Some(125_000_000), Some(25_000)), 2_400);
        assert_eq!(turn(Some(u64::MAX), Some(u64::MAX)) % 1_200, 0);
    }

    const MS: u64 = 1_000_000;

    /// Returns a cap under which 1,000 bytes take 1 ms.
    fn cap() -> Arc<Cap> {
        Arc::new(Cap::new(Some(1_000_000), None).unwrap())
    }

    #[test]
    fn a_load_of_the_high_level_waits_only_for_its_own_level_and_postpones_the_low_one() {
        let cap = cap();
        let due_ms = |bytes, level| {
            let mut held = cap.hold(100 * MS, bytes, 1, level);
            let due_ns = held.due_ns();
            (held, due_ns / MS)
        };
        let (_first, at_ms) = due_ms(20_000, Level::Low);
        let (mut low, low_ms) = due_ms(1_000, Level::Low);
        assert_eq!((at_ms, low_ms), (100, 110));
        // The burst of 10 ms, and 5 ms more.
        let (_high, at_ms) = due_ms(15_000, Level::High);
        assert_eq!((at_ms, low.due_ns() / MS, low.due_ns() / MS), (100, 125, 125));
        let (high, at_ms) = due_ms(15_000, Level::High);
        assert_eq!((at_ms, due_ms(1_000, Level::Low).1), (105, 141), "the low level waits for all of the high one");
        drop(high);
        assert_eq!(low.due_ns() / MS, 125, "what does not leave postpones nothing");
    }

    #[test]
    fn both_levels_together_hold_to_the_rate() {
        let cap = cap();
        let mut held: [Option<Reservation>; 4] = Default::default();
        let mut left = [0; 2];
        for now_ns in (100..1_100).map(|now_ms| now_ms * MS) {
            // Three tunnels of the low level never run dry; the high level sends at half the rate.
            if (now_ns / MS).is_multiple_of(2) && held[3].is_none() {
                held[3] = Some(cap.hold(now_ns, 1_000, 1, Level::High));
            }
            held[..3].iter_mut().for_each(|low| {
                low.get_or_insert_with(|| cap.hold(now_ns, 1_000, 1, Level::Low));
            });
            for (at, held) in held.iter_mut().enumerate() {
                if let Some(due) = held.take_if(|held| held.due_ns() <= now_ns) {
                    due.spend();
                    left[at / 3] += 1;
                }
            }
        }
        assert_eq!(left[1], 500, "the high level waits for nothing");
        assert!((490..=515).contains(&left[0]), "{} loads of the low level in half of 1 s", left[0]);
    }

    #[test]
    fn the_low_level_gets_the_rest_if_bytes_and_packets_limit_the_high_one_in_turns() {
        // On average, both limits give such payloads 1 ms each.
        let cap = Arc::new(Cap::new(Some(1_000_000), Some(1_000)).unwrap());
        let (mut low, mut lows) = (None, 0);
        for step in 200..4_200_u64 {
            let now_ns = step * MS / 2;
            // Of every 5 ms, two pairs take 4.
            if let Some(bytes) =
                [Some(1_500), Some(500), Some(1_500), Some(500)].get((step % 10) as usize).copied().flatten()
            {
                cap.hold(now_ns, bytes, 1, Level::High).spend();
            }
            low.get_or_insert_with(|| cap.hold(now_ns, 1_000, 1, Level::Low));
            if let Some(due) = low.take_if(|low: &mut Reservation| low.due_ns() <= now_ns) {
                due.spend();
                lows += 1;
            }
        }
        assert!((350..=450).contains(&lows), "{lows} loads of the low level in a fifth of 2 s");
    }

    #[test]
    fn the_high_level_at_the_rate_leaves_nothing_to_the_low_one() {
        let cap = cap();
        let (mut low, mut lows, mut high) = (None, 0, None);
        for now_ns in (100..5_100).map(|now_ms| now_ms * MS) {
            for _ in 0..20 {
                high.get_or_insert_with(|| cap.hold(now_ns, 1_000, 1, Level::High));
                if let Some(due) = high.take_if(|high: &mut Reservation| high.due_ns() <= now_ns) {
                    due.spend();
                }
            }
            low.get_or_insert_with(|| cap.hold(now_ns, 1_000, 1, Level::Low));
            if let Some(due) = low.take_if(|low: &mut Reservation| low.due_ns() <= now_ns) {
                due.spend();
                lows += 1;
            }
        }
        assert!(lows <= 1, "{lows} loads of the low level");
    }
}
