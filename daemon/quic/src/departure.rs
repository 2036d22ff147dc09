//! Departure times of classes and users with a rate: which names wait for one, and until when.

use std::{cmp::Reverse, collections::BinaryHeap, mem, sync::Arc};

use sched::stream::Level;

use super::{
    cap::{Cap, Reservation},
    class::Terms,
};

/// When the next bytes of a tunnel or stream may leave, by its user and by its class. If they do not leave, both get their reservations
/// back.
///
/// The class's departure is reserved when the user's has come: bytes that their user's rate holds back for long would otherwise delay the
/// class's other users at once.
#[derive(Debug, Default)]
pub struct Departure(
    /// Made with the first rate and then kept: most tunnels have none.
    Option<Box<Held>>,
);

#[derive(Debug, Default)]
struct Held {
    reservations: [Option<Reservation>; 2],
    /// The time that is waited for.
    awaited_ns: Option<u64>,
    /// Whether something was waited for since [`Departure::was_awaited`] was last called.
    was_awaited: bool,
}

impl Departure {
    /// Reserves departures for `bytes` in `packets`, of the user and of the class in `terms`, as far as they have rates and there is none
    /// yet. Returns until when to wait; `None` if the bytes may leave now.
    pub fn wait(&mut self, terms: &Terms, now_ns: u64, bytes: u64, packets: u64) -> Option<u64> {
        let user = terms.user_cap();
        self.wait_for([user.as_ref(), terms.class.to_peers.as_ref()], terms.service.level, now_ns, bytes, packets)
    }

    /// As [`wait`](Self::wait), under the rates `caps` of the user and of the class.
    pub fn wait_for(
        &mut self,
        caps: [Option<&Arc<Cap>>; 2],
        level: Level,
        now_ns: u64,
        bytes: u64,
        packets: u64,
    ) -> Option<u64> {
        if self.0.is_none() && caps.iter().all(Option::is_none) {
            return None;
        }
        let Held { reservations, awaited_ns, was_awaited } = &mut **self.0.get_or_insert_default();
        if awaited_ns.is_none() {
            let due_ns = |(held, cap): (&mut Option<Reservation>, Option<&Arc<Cap>>)| {
                if held.is_none() {
                    *held = cap.map(|cap| cap.hold(now_ns, bytes, packets, level));
                }
                held.as_mut().map(Reservation::due_ns).filter(|due_ns| *due_ns > now_ns)
            };
            *awaited_ns = reservations.iter_mut().zip(caps).find_map(due_ns);
            *was_awaited |= awaited_ns.is_some();
        }
        *awaited_ns
    }

    /// Whether the departure is still ahead.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.0.as_ref().is_some_and(|held| held.awaited_ns.is_some())
    }

    /// Whether a departure was ahead at any time since the last call.
    pub fn was_awaited(&mut self) -> bool {
        self.0.as_mut().is_some_and(|held| mem::replace(&mut held.was_awaited, held.awaited_ns.is_some()))
    }

    /// Notes that the time `at_ns` has come; returns whether it was waited for. The next [`wait`](Self::wait) says whether the departure
    /// has come: the high level may have postponed it, and the class's comes after the user's.
    pub fn come(&mut self, at_ns: u64) -> bool {
        let awaited = self.0.as_mut().and_then(|held| held.awaited_ns.take_if(|awaited_ns| *awaited_ns == at_ns));
        awaited.is_some()
    }

    /// Notes that `bytes` have left in `packets`; user and class are charged for these, whatever was reserved.
    pub fn left(&mut self, now_ns: u64, bytes: u64, packets: u64) {
        for held in self.take().into_iter().flatten() {
            held.settle(now_ns, bytes, packets);
        }
    }

    /// Notes that the bytes it was reserved for will not leave.
    pub fn give_back(&mut self) {
        drop(self.take());
    }

    /// Empties it, and returns what it held.
    fn take(&mut self) -> [Option<Reservation>; 2] {
        let Some(held) = &mut self.0 else { return Default::default() };
        held.awaited_ns = None;
        mem::take(&mut held.reservations)
    }

    /// Gives back what another class or user, or the same one with another rate or level, reserved.
    pub fn follow(&mut self, terms: &Terms) {
        let user = terms.user_cap();
        self.follow_caps([user.as_ref(), terms.class.to_peers.as_ref()], terms.service.level);
    }

    /// As [`follow`](Self::follow), to the rates `caps` of the user and of the class.
    pub fn follow_caps(&mut self, caps: [Option<&Arc<Cap>>; 2], level: Level) {
        let is_of = |(held, cap): (&Option<Reservation>, Option<&Arc<Cap>>)| {
            held.as_ref().is_none_or(|held| cap.is_some_and(|cap| held.is_of(cap, level)))
        };
        if !self.0.iter().flat_map(|held| held.reservations.iter().zip(caps)).all(is_of) {
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
    use sched::class::ClassSettings;

    use super::*;
    use crate::{cap::UserRate, class::Class};

    const MS: u64 = 1_000_000;

    /// Returns the terms of a class of 1,000 bytes per second.
    fn slow() -> Terms {
        Arc::new(Class::of(ClassSettings { rate_down: Some(1_000), ..ClassSettings::named("x") })).terms(None)
    }

    fn reserve(terms: &Terms, bytes: u64) -> (Departure, u64) {
        let mut departure = Departure::default();
        let at_ns = departure.wait(terms, 0, bytes, 1).unwrap_or_default();
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
        departure.follow(&Terms::default());
        assert!(!departure.is_awaited());
    }

    #[test]
    fn bytes_wait_for_their_user_and_only_then_take_a_departure_of_their_class() {
        let (user, other) = (Arc::<UserRate>::default(), slow());
        user.set(Some(1_000), None);
        let terms = Terms { user: Some(user.clone()), ..other.clone() };
        let (mut first, at_ms) = reserve(&terms, 1_000);
        assert_eq!(at_ms, 0);
        first.left(0, 1_000, 1);
        let (mut second, at_ms) = reserve(&terms, 1_000);
        assert_eq!(at_ms, 1_000);
        assert_eq!(reserve(&other, 1).1, 1_000, "another user of the class waits for nothing of it");
        assert!(second.come(1_000 * MS) && !second.is_awaited());
        let (mut third, at_ms) = reserve(&other, 5_000);
        third.left(0, 5_000, 1);
        assert_eq!((at_ms, second.wait(&terms, 1_000 * MS, 1_000, 1)), (1_000, Some(6_000 * MS)), "now for its class");
        user.set(None, None);
        second.follow(&terms);
        assert!(!second.is_awaited());
    }
}
