//! Callers over TCP that have not been identified yet, as during a TLS handshake, and which of them makes room for another.

use std::net::IpAddr;

/// Callers without a name, known only by their addresses. Their number is limited in total, and per place.
#[derive(Debug)]
pub struct UnidentifiedCallers<T> {
    /// The oldest first.
    inside: Vec<(u64, IpAddr, T)>,
    next: u64,
    most: usize,
    most_from_one: usize,
}

impl<T> UnidentifiedCallers<T> {
    /// Creates an empty set for at most `most` callers, and at most `most_from_one` from one IPv4 address or one IPv6 /64.
    #[must_use]
    pub const fn new(most: usize, most_from_one: usize) -> Self {
        Self { inside: Vec::new(), next: 0, most, most_from_one }
    }

    /// Adds a caller and returns its number. If there is no room, one caller is evicted and returned too: the oldest of the
    /// same place, or else of the place with the most callers. So callers that stay long make room for callers that do not,
    /// and no place keeps another out.
    pub fn enter(&mut self, address: IpAddr, caller: T) -> (u64, Option<T>) {
        let place = place(address);
        let of = |inside: &[(u64, IpAddr, T)], place| inside.iter().filter(|(_, other, _)| *other == place).count();
        let crowded = if of(&self.inside, place) >= self.most_from_one {
            Some(place)
        } else if self.inside.len() >= self.most {
            // Of several places, the one whose caller came first.
            let places = self.inside.iter().rev().map(|(_, place, _)| *place);
            places.max_by_key(|place| of(&self.inside, *place))
        } else {
            None
        };
        let at = crowded.and_then(|place| self.inside.iter().position(|(_, other, _)| *other == place));
        let evicted = at.map(|at| self.inside.remove(at).2);
        let number = self.next;
        self.next += 1;
        self.inside.push((number, place, caller));
        (number, evicted)
    }

    /// Removes a caller that has been identified or is gone; returns it unless it was evicted before.
    pub fn leave(&mut self, number: u64) -> Option<T> {
        let at = self.inside.iter().position(|(other, ..)| *other == number)?;
        Some(self.inside.remove(at).2)
    }
}

/// The unit of addresses that one caller may hold: an IPv4 address, or the /64 of an IPv6 address.
fn place(address: IpAddr) -> IpAddr {
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
}
