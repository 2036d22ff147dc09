//! Contention on a connection: the bytes ahead of a stream's next byte, and the stream's share of the rate.

use super::{
    clock::{Order, order, weight},
    discipline::{Discipline, Service},
};

/// The bytes ahead of a stream's next byte, and the stream's share of the rate from then on, as long as the queues of the other streams
/// stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contention {
    /// The bytes of other streams that leave first.
    pub bytes_ahead: u64,
    /// Whether any other stream has bytes to send, even if all of them leave later.
    pub is_contended: bool,
    weight: u64,
    weights: u64,
}

/// When another stream, which has bytes to send, gets turns.
enum Relation {
    /// Until it has nothing left.
    Before,
    /// In between, by its weight; at most so many turns come first.
    Beside { weight: u64, turns: u64 },
    /// For one turn.
    Once,
    /// Later.
    After,
}

impl Contention {
    /// Returns the contention of a stream of the `own` service, which begins to wait now, with `others`: their services, and how many bytes
    /// each has queued. A turn has `turn_bytes`; where turns are shorter, fewer bytes are ahead under disciplines with turns. Under
    /// [`Discipline::Lottery`], the bytes ahead are the expected number.
    #[must_use]
    pub fn of(
        discipline: Discipline,
        own: &Service,
        others: impl IntoIterator<Item = (Service, u64)>,
        turn_bytes: u64,
    ) -> Self {
        let weight = match order(discipline, own).1 {
            Order::Share | Order::Draw => weight(own),
            _ => 1,
        };
        let mut contention = Self { bytes_ahead: 0, is_contended: false, weight, weights: weight };
        for (other, bytes) in others.into_iter().filter(|(_, bytes)| *bytes > 0) {
            contention.is_contended = true;
            let ahead = match relation(discipline, own, &other) {
                Relation::Before => bytes,
                Relation::Beside { weight, turns } => {
                    contention.weights += weight;
                    bytes.min(turn_bytes.saturating_mul(turns))
                }
                Relation::Once => bytes.min(turn_bytes),
                Relation::After => 0,
            };
            contention.bytes_ahead = contention.bytes_ahead.saturating_add(ahead);
        }
        contention
    }

    /// Returns the stream's share of a rate, rounded up: it is 0 only if the rate is 0.
    #[must_use]
    pub fn share_of(&self, bytes_per_sec: u64) -> u64 {
        let share = (u128::from(bytes_per_sec) * u128::from(self.weight)).div_ceil(u128::from(self.weights));
        u64::try_from(share).unwrap_or(bytes_per_sec)
    }
}

fn relation(discipline: Discipline, own: &Service, other: &Service) -> Relation {
    let ((own_band, own_order), (band, other_order)) = (order(discipline, own), order(discipline, other));
    let first = |first: bool| if first { Relation::Before } else { Relation::After };
    if own_band != band {
        return first(band < own_band);
    }
    match (own_order, other_order) {
        (Order::Turns, _) => Relation::Beside { weight: 1, turns: 1 },
        (Order::Deadline(own_ns), Order::Deadline(ns)) if own_ns != ns => first(ns < own_ns),
        (Order::Priority, _) if own.priority != other.priority => first(other.priority > own.priority),
        (Order::Share, _) => Relation::Beside { weight: weight(other), turns: 1 },
        (Order::Draw, _) => Relation::Beside { weight: weight(other), turns: weight(other).div_ceil(weight(own)) },
        // The other stream arrived earlier.
        (Order::Deadline(_), _) => Relation::Before,
        (Order::Arrival | Order::Priority, _) if !other.incremental => Relation::Before,
        (Order::Arrival | Order::Priority, _) if own.incremental => Relation::Beside { weight: 1, turns: 1 },
        (Order::Arrival | Order::Priority, _) => Relation::Once,
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Expiry, Level, Low},
        *,
    };

    const TURN: u64 = 1_200;
    const PLAIN: Service = Service { level: Level::Low, priority: 3, weight: 2, deadline_ns: None, incremental: false };
    const TURNS: Service = Service { incremental: true, ..PLAIN };
    const HEAVY: Service = Service { weight: 6, ..PLAIN };
    const HIGH: Service = Service { level: Level::High, priority: 7, ..PLAIN };

    /// The bytes ahead of a stream of this service, and its share of a rate of 1000, beside another one with 10,000 bytes.
    fn with(discipline: Discipline, own: Service, other: Service) -> (u64, u64) {
        let contention = Contention::of(discipline, &own, [(other, 10_000), (HEAVY, 0)], TURN);
        (contention.bytes_ahead, contention.share_of(1_000))
    }

    const fn due(service: Service, deadline_ns: u64) -> Service {
        Service { deadline_ns: Some(deadline_ns), ..service }
    }

    #[test]
    fn a_stream_waits_for_those_before_it_and_shares_with_those_beside_it() {
        let (edf, ml) = (Discipline::Edf { expiry: Expiry::Soft }, |low| Discipline::Ml { low });
        let (alone, behind) = ((0, 1_000), (10_000, 1_000));
        for (discipline, own, other, expected) in [
            (Discipline::Rr, PLAIN, HEAVY, (TURN, 500)),
            (Discipline::Fcfs, PLAIN, PLAIN, behind),
            (Discipline::Fcfs, PLAIN, TURNS, (TURN, 1_000)),
            (Discipline::Fcfs, TURNS, PLAIN, behind),
            (Discipline::Fcfs, TURNS, TURNS, (TURN, 500)),
            (edf, due(PLAIN, 5), due(PLAIN, 9), alone),
            (edf, due(PLAIN, 9), due(PLAIN, 5), behind),
            (edf, due(PLAIN, 9), due(PLAIN, 9), behind),
            (edf, due(PLAIN, 9), PLAIN, alone),
            (edf, PLAIN, due(PLAIN, 9), behind),
            (edf, PLAIN, PLAIN, behind),
            (Discipline::Abs, HIGH, PLAIN, alone),
            (Discipline::Abs, PLAIN, HIGH, behind),
            (Discipline::Abs, PLAIN, PLAIN, behind),
            (Discipline::Abs, TURNS, TURNS, (TURN, 500)),
            (ml(Low::Rr), HIGH, PLAIN, alone),
            (ml(Low::Rr), PLAIN, HIGH, behind),
            (ml(Low::Rr), PLAIN, HEAVY, (TURN, 500)),
            (ml(Low::Fcfs), PLAIN, PLAIN, behind),
            (ml(Low::Edf), due(PLAIN, 5), PLAIN, alone),
            (ml(Low::Wfq), PLAIN, HEAVY, (TURN, 250)),
            (ml(Low::Wfq), HIGH, HIGH, behind),
            (Discipline::Wfq, HEAVY, PLAIN, (TURN, 750)),
            (Discipline::Lottery, PLAIN, HEAVY, (3 * TURN, 250)),
            (Discipline::Lottery, HEAVY, PLAIN, (TURN, 750)),
        ] {
            assert_eq!(with(discipline, own, other), expected, "{own:?} with {other:?} under {discipline:?}");
        }
    }

    #[test]
    fn queues_shorter_than_a_turn_count_as_they_are_and_empty_ones_not_at_all() {
        let contention = Contention::of(Discipline::Rr, &PLAIN, [(PLAIN, 100), (PLAIN, 0), (HIGH, 9_000)], TURN);
        assert_eq!((contention.bytes_ahead, contention.share_of(3_000)), (100 + TURN, 1_000));
        let alone = Contention::of(Discipline::Wfq, &HEAVY, [], TURN);
        assert_eq!((alone.bytes_ahead, alone.share_of(u64::MAX), alone.share_of(0)), (0, u64::MAX, 0));
        let first = Contention::of(Discipline::Abs, &HIGH, [(PLAIN, 100)], TURN);
        assert!(contention.is_contended && first.is_contended && !alone.is_contended);
    }

    #[test]
    fn a_share_of_something_is_never_nothing() {
        let many = (0..1_000).map(|_| (Service { weight: u16::MAX, ..PLAIN }, u64::MAX));
        let contention = Contention::of(Discipline::Lottery, &Service { weight: 0, ..PLAIN }, many, u64::MAX);
        assert_eq!((contention.bytes_ahead, contention.share_of(1)), (u64::MAX, 1));
    }
}
