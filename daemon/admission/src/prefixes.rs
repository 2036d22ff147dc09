//! The prefixes of addresses, and a bounded memory of them. It counts prefixes, not time.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

/// The part of an address that is assumed to belong to one party: /24 of IPv4, /56 of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressPrefix {
    /// The first 24 bits.
    V4([u8; 3]),
    /// The first 56 bits.
    V6([u8; 7]),
}

impl AddressPrefix {
    /// Returns the prefix of an address; IPv4 addresses in IPv6 form count as IPv4 addresses.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => {
                let [a, b, c, _] = address.octets();
                Self::V4([a, b, c])
            }
            IpAddr::V6(address) => {
                let [a, b, c, d, e, f, g, ..] = address.octets();
                Self::V6([a, b, c, d, e, f, g])
            }
        }
    }
}

/// The maximum number of prefixes in one memory.
pub const REMEMBERED: usize = 4_096;

/// The prefixes that were inserted last, at most [`REMEMBERED`].
#[derive(Debug, Default)]
pub struct RememberedPrefixes {
    /// Each prefix, with its place in `order`.
    places: HashMap<AddressPrefix, u64>,
    /// The oldest prefix is in front.
    order: BTreeMap<u64, AddressPrefix>,
    /// How many prefixes have been inserted so far.
    inserted: u64,
}

impl RememberedPrefixes {
    /// Remembers a prefix as the newest. If that makes too many, forgets and returns the oldest.
    pub fn insert(&mut self, prefix: AddressPrefix) -> Option<AddressPrefix> {
        self.remove(prefix);
        self.places.insert(prefix, self.inserted);
        self.order.insert(self.inserted, prefix);
        self.inserted += 1;
        if self.order.len() <= REMEMBERED {
            return None;
        }
        let (_, oldest) = self.order.pop_first()?;
        self.places.remove(&oldest);
        Some(oldest)
    }

    /// Forgets a prefix.
    pub fn remove(&mut self, prefix: AddressPrefix) {
        if let Some(place) = self.places.remove(&prefix) {
            self.order.remove(&place);
        }
    }

    /// Whether a prefix is remembered.
    #[must_use]
    pub fn contains(&self, prefix: AddressPrefix) -> bool {
        self.places.contains_key(&prefix)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.places.len(), self.order.len());
        self.places.len()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn prefix(number: u16) -> AddressPrefix {
        let [b, c] = number.to_be_bytes();
        AddressPrefix::V4([10, b, c])
    }

    #[test]
    fn the_oldest_prefix_is_forgotten_and_one_that_comes_again_is_the_newest_even_if_it_was_removed_meanwhile() {
        for is_removed in [false, true] {
            let mut remembered = RememberedPrefixes::default();
            let most = REMEMBERED as u16;
            assert!((0..most).all(|number| remembered.insert(prefix(number)).is_none()));
            if is_removed {
                remembered.remove(prefix(0));
                assert!(!remembered.contains(prefix(0)) && remembered.len() == REMEMBERED - 1);
            }
            assert_eq!(remembered.insert(prefix(0)), None);
            let forgotten: Vec<_> = (most..2 * most).map(|number| remembered.insert(prefix(number))).collect();
            let expected: Vec<_> = (1..most).chain([0]).map(|number| Some(prefix(number))).collect();
            assert_eq!((forgotten, remembered.len()), (expected, REMEMBERED));
        }
    }

    #[test]
    fn addresses_of_one_party_have_one_prefix() {
        let of = |address: &str| AddressPrefix::of(address.parse().unwrap());
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.200"));
        assert_ne!(of("192.0.2.1"), of("192.0.3.1"));
        assert_eq!(of("2001:db8:0:1ff::1"), of("2001:db8:0:100::2"));
        assert_ne!(of("2001:db8:0:1ff::1"), of("2001:db8:0:200::1"));
    }
}
