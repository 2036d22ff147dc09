//! Departure times of classes with a rate: which names wait for one, and until when.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{cap::Reservation, class::Class};

/// When the next bytes of a tunnel or stream may leave, by its class. If they do not leave, the class gets their reservation back.
#[derive(Debug, Default)]
pub enum Departure {
    /// Not reserved yet.
    #[default]
    Unknown,
    /// Reserved, and waited for.
    At(u64, Reservation),
    /// The departure has come; without a reservation if the class has no rate.
    Due(Option<Reservation>),
}

impl Departure {
    /// Reserves a departure for `bytes` and `packets`, if there is none, and returns until when to wait for it; `None` if
    /// they may leave now.
    pub fn wait(&mut self, class: &Class, now_ns: u64, bytes: u64, packets: u64) -> Option<u64> {
        if matches!(self, Self::Unknown) {
            *self = match &class.to_peers {
                None => Self::Due(None),
                Some(cap) => {
                    let (at_ns, reservation) = cap.hold(now_ns, bytes, packets);
                    if at_ns > now_ns { Self::At(at_ns, reservation) } else { Self::Due(Some(reservation)) }
                }
            };
        }
        match self {
            Self::At(at_ns, _) => Some(*at_ns),
            _ => None,
        }
    }

    /// Whether the departure is still ahead.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        matches!(self, Self::At(..))
    }

    /// Notes that the time `at_ns` has come; returns whether it is the departure that was waited for.
    pub fn come(&mut self, at_ns: u64) -> bool {
        match std::mem::take(self) {
            Self::At(awaited_ns, reservation) if awaited_ns == at_ns => {
                *self = Self::Due(Some(reservation));
                true
            }
            other => {
                *self = other;
                false
            }
        }
    }

    /// Notes that `bytes` have left in `packets`; the class is charged for these, whatever was reserved.
    pub fn left(&mut self, now_ns: u64, bytes: u64, packets: u64) {
        if let Self::At(_, reservation) | Self::Due(Some(reservation)) = std::mem::take(self) {
            reservation.settle(now_ns, bytes, packets);
        }
    }

    /// Notes that the bytes it was reserved for will not leave.
    pub fn give_back(&mut self) {
        *self = Self::Unknown;
    }

    /// Gives back what another class, or the same class with another rate, reserved.
    pub fn follow(&mut self, class: &Class) {
        if let Self::At(_, reservation) | Self::Due(Some(reservation)) = self
            && !class.to_peers.as_ref().is_some_and(|cap| reservation.is_of(cap))
        {
            self.give_back();
        }
    }
}

/// The names that wait for their departures. A name that is gone may still be among them.
#[derive(Debug, Default)]
pub struct Departures(BinaryHeap<Reverse<(u64, u32)>>);

impl Departures {
    /// Makes `name` wait until `at_ns`.
    pub fn push(&mut self, at_ns: u64, name: u32) {
        self.0.push(Reverse((at_ns, name)));
    }

    /// Removes a name whose departure has come; returns the departure and the name.
    pub fn pop_due(&mut self, now_ns: u64) -> Option<(u64, u32)> {
        self.next_ns().filter(|at_ns| *at_ns <= now_ns)?;
        self.0.pop().map(|Reverse(due)| due)
    }

    /// Returns the next departure.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        self.0.peek().map(|Reverse((at_ns, _))| *at_ns)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sched::class::ClassSettings;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Returns a class of 1,000 bytes per second.
    fn slow() -> Arc<Class> {
        Arc::new(Class::of(ClassSettings { rate_down: Some(1_000), ..ClassSettings::named("x") }))
    }

    fn reserve(class: &Class, bytes: u64) -> (Departure, u64) {
        let mut departure = Departure::default();
        let at_ns = departure.wait(class, 0, bytes, 1).unwrap_or_default();
        (departure, at_ns / MS)
    }

    #[test]
    fn a_class_is_charged_for_what_leaves_and_for_nothing_else() {
        let class = slow();
        let (mut first, at_ms) = reserve(&class, 1_000);
        assert_eq!((at_ms, first.is_awaited()), (0, false));
        let (second, at_ms) = reserve(&class, 5_000);
        assert_eq!((at_ms, second.is_awaited()), (1_000, true));
        drop(second);
        let (mut third, at_ms) = reserve(&class, 1_000);
        assert_eq!(at_ms, 1_000, "what is given up is given back");
        first.left(0, 400, 1);
        let (mut fourth, at_ms) = reserve(&class, 1_000);
        assert_eq!(at_ms, 1_400, "what has not left is given back");
        assert!(!third.come(999 * MS) && third.come(1_000 * MS));
        third.left(1_000 * MS, 1_500, 2);
        assert_eq!(reserve(&class, 1).1, 2_900, "what has left beyond the reservation is charged");
        fourth.give_back();
        assert_eq!(reserve(&class, 1).1, 1_900);
    }

    #[test]
    fn a_departure_of_another_class_is_given_back_and_no_longer_waited_for() {
        let class = slow();
        let (_first, _) = reserve(&class, 1_000);
        let (mut departure, _) = reserve(&class, 1_000);
        departure.follow(&class);
        assert!(departure.is_awaited());
        departure.follow(&slow());
        assert!(!departure.is_awaited());
        assert_eq!(reserve(&class, 1).1, 1_000);
        let (mut departure, _) = reserve(&class, 1_000);
        departure.follow(&Class::default());
        assert!(!departure.is_awaited());
    }
}
