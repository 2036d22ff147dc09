//! Callers over TCP that have not been identified yet, as during a TLS handshake, and which of them makes room for another.

use std::{collections::BTreeMap, net::IpAddr};

/// Callers without a name, known only by their addresses. Their number is limited in total, and per place.
#[derive(Debug)]
pub struct UnidentifiedCallers<T> {
    /// The oldest first.
    inside: Vec<(u64, IpAddr, T)>,
    /// How many there are of each place.
    counts: BTreeMap<IpAddr, usize>,
    next: u64,
    most: usize,
    most_from_one: usize,
}

impl<T> UnidentifiedCallers<T> {
    /// Creates an empty set for at most `most` callers, and at most `most_from_one` from one IPv4 address or one IPv6 /64.
    #[must_use]
    pub const fn new(most: usize, most_from_one: usize) -> Self {
        Self { inside: Vec::new(), counts: BTreeMap::new(), next: 0, most, most_from_one }
    }

    /// Adds a caller and returns its number. If there is no room, one caller is evicted and returned too: the oldest of the
    /// same place, or else of the place with the most callers. So callers that stay long make room for callers that do not,
    /// and no place keeps another out.
    pub fn enter(&mut self, address: IpAddr, caller: T) -> (u64, Option<T>) {
        let place = place(address);
        let evicted = self.crowded(place, |_| true).flatten().and_then(|at| self.remove(at));
        (self.push(place, caller), evicted)
    }

    /// Adds a caller and returns its number, like [`enter`](Self::enter), if there is room, or if the caller that would be evicted may
    /// leave. Otherwise changes nothing. `may_leave` is `None` for callers that are passed over.
    pub fn enter_if(
        &mut self,
        address: IpAddr,
        caller: T,
        may_leave: impl Fn(&T) -> Option<bool>,
    ) -> Option<(u64, Option<T>)> {
        let place = place(address);
        let leaves = |at: &usize| self.inside.get(*at).is_some_and(|(_, _, other)| may_leave(other) == Some(true));
        let evicted = match self.crowded(place, |other| may_leave(other).is_some()) {
            None => None,
            Some(at) => self.remove(at.filter(leaves)?),
        };
        Some((self.push(place, caller), evicted))
    }

    /// Makes a caller the newest one, and returns it, unless it is gone.
    pub fn renew(&mut self, number: u64) -> Option<&mut T> {
        let at = self.inside.iter().position(|(other, ..)| *other == number)?;
        let renewed = self.inside.remove(at);
        self.inside.push(renewed);
        self.inside.last_mut().map(|(_, _, caller)| caller)
    }

    /// Returns how many callers of the same place there are.
    #[must_use]
    pub fn count_at(&self, address: IpAddr) -> usize {
        self.counts.get(&place(address)).copied().unwrap_or(0)
    }

    /// Whether there are so many callers of the same place that a further one can only replace one of them.
    #[must_use]
    pub fn is_full_at(&self, address: IpAddr) -> bool {
        self.count_at(address) >= self.most_from_one
    }

    /// Returns the index of the caller that makes room for another one of a place, among those that `are_asked`; `None` if there is room.
    fn crowded(&self, place: IpAddr, are_asked: impl Fn(&T) -> bool) -> Option<Option<usize>> {
        let is_full = self.is_full_at(place);
        if !is_full && self.inside.len() < self.most {
            return None;
        }
        let may_be_of = |other: IpAddr| !is_full || other == place;
        let asked = self.inside.iter().enumerate().filter(|(_, (_, at, caller))| may_be_of(*at) && are_asked(caller));
        // Of several places, the one whose caller came first.
        Some(asked.rev().max_by_key(|(_, (_, place, _))| self.count_at(*place)).map(|(at, _)| at))
    }

    fn push(&mut self, place: IpAddr, caller: T) -> u64 {
        let number = self.next;
        self.next += 1;
        *self.counts.entry(place).or_default() += 1;
        self.inside.push((number, place, caller));
        number
    }

    fn remove(&mut self, at: usize) -> Option<T> {
        if at >= self.inside.len() {
            return None;
        }
        let (_, place, caller) = self.inside.remove(at);
        if let Some(count) = self.counts.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&place);
            }
        }
        Some(caller)
    }

    /// Removes a caller that has been identified or is gone; returns it unless it was evicted before.
    pub fn leave(&mut self, number: u64) -> Option<T> {
        self.remove(self.inside.iter().position(|(other, ..)| *other == number)?)
    }
}

/// Returns the unit of addresses that one caller may hold: an IPv4 address, or the /64 of an IPv6 address.
#[must_use]
pub fn place(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_oldest_caller_makes_room_and_no_address_keeps_another_out() {
        let mut callers = UnidentifiedCallers::new(4, 2);
        let mut enter = |from: &str, name: &'static str| callers.enter(address(from), name).1;
        assert_eq!((enter("192.0.2.1", "a"), enter("192.0.2.1", "b"), enter("192.0.2.2", "c")), (None, None, None));
        assert_eq!(enter("::ffff:192.0.2.1", "d"), Some("a"), "the oldest of the same address");
        assert_eq!(enter("192.0.2.3", "e"), None);
        assert_eq!(enter("192.0.2.4", "f"), Some("b"), "the oldest of the address with most");
        assert_eq!(enter("192.0.2.5", "g"), Some("c"), "the oldest where all have as many");
    }

    #[test]
    fn a_network_of_one_caller_is_one_place_and_those_who_leave_make_room() {
        let mut callers = UnidentifiedCallers::new(8, 1);
        let (first, _) = callers.enter(address("2001:db8:0:1::1"), "a");
        assert_eq!(callers.enter(address("2001:db8:0:2::1"), "b").1, None);
        assert_eq!(callers.enter(address("2001:db8:0:1:ffff::2"), "c").1, Some("a"));
        assert_eq!(callers.leave(first), None);
        assert_eq!(callers.inside.len(), 2, "it had gone already");
        let (last, _) = callers.enter(address("192.0.2.1"), "d");
        assert_eq!(callers.leave(last), Some("d"));
        assert_eq!(callers.enter(address("192.0.2.1"), "e").1, None);
    }

    #[test]
    fn a_caller_that_may_not_leave_makes_no_room() {
        let mut callers = UnidentifiedCallers::new(2, 1);
        let mut enter =
            |from: &str, name, leaves| callers.enter_if(address(from), name, |of: &&str| Some(*of == leaves));
        assert_eq!(enter("192.0.2.1", "a", ""), Some((0, None)));
        assert_eq!([enter("192.0.2.1", "b", ""), enter("192.0.2.1", "b", "a")], [None, Some((1, Some("a")))]);
        assert_eq!(enter("192.0.2.2", "c", ""), Some((2, None)));
        assert_eq!([enter("192.0.2.3", "d", "c"), enter("192.0.2.3", "d", "b")], [None, Some((3, Some("b")))]);
        let counts = [1, 2, 3].map(|last| callers.count_at([192, 0, 2, last].into()));
        assert_eq!((counts, callers.counts.len()), ([0, 1, 1], 2));
    }

    #[test]
    fn a_caller_that_is_passed_over_shields_no_other_and_one_that_is_renewed_is_the_newest() {
        let mut callers = UnidentifiedCallers::new(3, 3);
        for (last, name) in [(1, "a"), (1, "b"), (2, "c")] {
            callers.enter([192, 0, 2, last].into(), name);
        }
        let mut enter = |name, passed: &[&str]| {
            callers
                .enter_if(address("192.0.2.3"), name, |of| (!passed.contains(of)).then_some(true))
                .and_then(|(_, of)| of)
        };
        assert_eq!([enter("x", &["a", "b", "c"]), enter("d", &["a"])], [None, Some("b")]);
        assert_eq!((callers.inside.len(), callers.renew(0).copied(), callers.renew(1)), (3, Some("a"), None));
        assert_eq!([callers.leave(9), callers.enter(address("192.0.2.4"), "e").1], [None, Some("c")]);
    }
}
