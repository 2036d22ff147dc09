//! The connected clients, by prefix, and which clients may connect.
//!
//! A prefix is known while one of its users is connected, and then for as long as it is among the last
//! [`REMEMBERED`](crate::prefixes::REMEMBERED) prefixes whose users have left. This counts prefixes, not time: the module reads no clock.

use std::collections::HashMap;

use crate::{
    limits::{AdmissionLimits, Limit},
    prefixes::{AddressPrefix, RememberedPrefixes},
};

/// The decision about an attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionVerdict {
    /// It may go on.
    Admit,
    /// It may go on once it has proven its address.
    Prove,
    /// It may not go on, because this limit is reached.
    Refuse(Limit),
}

/// Whether the prefix of a connection had a user when the connection began; the connection counts as of this kind until
/// its client is a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Unknown,
    Known,
}

/// The connections of one prefix.
#[derive(Debug, Default)]
struct Neighbours {
    handshakes: u32,
    strangers: u32,
    known: u32,
    remembered: bool,
}

impl Neighbours {
    fn is_known(&self) -> bool {
        self.known > 0 || self.remembered
    }
}

/// All connections.
#[derive(Debug, Default)]
pub(super) struct Census {
    open: u32,
    /// How many of them are in their handshake.
    handshakes: u32,
    /// How many of them belong to no user and came from a prefix without one.
    unknown: u32,
    prefixes: HashMap<AddressPrefix, Neighbours>,
    /// Prefixes whose last user has left.
    remembered: RememberedPrefixes,
}

impl Census {
    pub(super) fn judge(&self, prefix: AddressPrefix, proven: bool, limits: &AdmissionLimits) -> AdmissionVerdict {
        const NONE: Neighbours = Neighbours { handshakes: 0, strangers: 0, known: 0, remembered: false };
        let neighbours = self.prefixes.get(&prefix).unwrap_or(&NONE);
        let most = limits.strangers_per_prefix;
        if self.open >= limits.connections {
            return AdmissionVerdict::Refuse("connections");
        }
        if !neighbours.is_known() && self.unknown >= limits.places_for_strangers {
            return AdmissionVerdict::Refuse("strangers");
        }
        // Addresses in handshakes may be forged. So handshakes do not count against clients that prove their address,
        // unless there are so many proofs that the prefix floods us itself.
        if neighbours.strangers >= most || (proven && neighbours.handshakes >= most.saturating_mul(2)) {
            return AdmissionVerdict::Refuse("strangers_per_prefix");
        }
        if !proven && neighbours.handshakes >= most { AdmissionVerdict::Prove } else { AdmissionVerdict::Admit }
    }

    fn neighbours(&mut self, prefix: AddressPrefix) -> &mut Neighbours {
        self.prefixes.entry(prefix).or_default()
    }

    pub(super) fn enter(&mut self, prefix: AddressPrefix) -> Origin {
        let neighbours = self.neighbours(prefix);
        neighbours.handshakes += 1;
        let origin = if neighbours.is_known() { Origin::Known } else { Origin::Unknown };
        self.open += 1;
        self.handshakes += 1;
        self.unknown += u32::from(origin == Origin::Unknown);
        origin
    }

    pub(super) fn leave_handshake(&mut self, prefix: AddressPrefix, origin: Origin) {
        self.neighbours(prefix).handshakes -= 1;
        self.handshakes -= 1;
        self.leave(prefix, origin);
    }

    pub(super) fn enter_stranger(&mut self, prefix: AddressPrefix, origin: Origin) {
        self.neighbours(prefix).strangers += 1;
        self.open += 1;
        self.unknown += u32::from(origin == Origin::Unknown);
    }

    pub(super) fn leave_stranger(&mut self, prefix: AddressPrefix, origin: Origin) {
        self.neighbours(prefix).strangers -= 1;
        self.leave(prefix, origin);
    }

    pub(super) fn enter_known(&mut self, prefix: AddressPrefix) {
        self.neighbours(prefix).known += 1;
        self.open += 1;
    }

    pub(super) fn leave_known(&mut self, prefix: AddressPrefix) {
        let neighbours = self.neighbours(prefix);
        neighbours.known -= 1;
        let mut forgotten = None;
        if neighbours.known == 0 {
            neighbours.remembered = true;
            forgotten = self.remembered.insert(prefix);
        }
        self.leave(prefix, Origin::Known);
        if let Some(oldest) = forgotten {
            self.neighbours(oldest).remembered = false;
            self.forget(oldest);
        }
    }

    fn leave(&mut self, prefix: AddressPrefix, origin: Origin) {
        self.open -= 1;
        self.unknown -= u32::from(origin == Origin::Unknown);
        self.forget(prefix);
    }

    /// Removes the entry of a prefix about which nothing is known.
    fn forget(&mut self, prefix: AddressPrefix) {
        let empty =
            |neighbours: &Neighbours| neighbours.handshakes + neighbours.strangers == 0 && !neighbours.is_known();
        if self.prefixes.get(&prefix).is_some_and(empty) {
            self.prefixes.remove(&prefix);
        }
    }

    pub(super) fn handshakes(&self) -> u32 {
        self.handshakes
    }

    #[cfg(test)]
    pub(super) fn open(&self) -> u32 {
        self.open
    }

    #[cfg(test)]
    pub(super) fn prefixes(&self) -> usize {
        self.prefixes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefixes::{REMEMBERED, tests::prefix};

    fn limits(connections: u32, places_for_strangers: u32, strangers_per_prefix: u32) -> AdmissionLimits {
        AdmissionLimits { connections, places_for_strangers, strangers_per_prefix, ..AdmissionLimits::default() }
    }

    /// Lets strangers of a prefix connect until one may not; returns how many came, and why no more.
    fn crowd(census: &mut Census, prefix: AddressPrefix, limits: &AdmissionLimits) -> (u32, Limit) {
        let mut came = 0;
        loop {
            if let AdmissionVerdict::Refuse(limit) = census.judge(prefix, true, limits) {
                return (came, limit);
            }
            let origin = census.enter(prefix);
            census.leave_handshake(prefix, origin);
            census.enter_stranger(prefix, origin);
            came += 1;
        }
    }

    #[test]
    fn one_prefix_gets_a_few_places_and_strangers_together_leave_some_to_users() {
        let (mut census, limits) = (Census::default(), limits(100, 70, 20));
        census.enter_known(prefix(0));
        census.leave_known(prefix(0));
        assert_eq!(crowd(&mut census, prefix(1), &limits), (20, "strangers_per_prefix"));
        assert_eq!(crowd(&mut census, prefix(2), &limits), (20, "strangers_per_prefix"));
        assert_eq!(crowd(&mut census, prefix(3), &limits), (20, "strangers_per_prefix"));
        assert_eq!(crowd(&mut census, prefix(4), &limits), (10, "strangers"));
        assert_eq!(crowd(&mut census, prefix(5), &limits), (0, "strangers"));
        // Neighbours of a user have the same limit as any other prefix.
        assert_eq!(crowd(&mut census, prefix(0), &limits), (20, "strangers_per_prefix"));
        for number in 0..10 {
            assert_eq!(
                census.judge(prefix(0), true, &limits),
                AdmissionVerdict::Refuse("strangers_per_prefix"),
                "{number}"
            );
            census.enter_known(prefix(6));
        }
        assert_eq!(census.judge(prefix(6), true, &limits), AdmissionVerdict::Refuse("connections"));
    }

    #[test]
    fn forged_handshakes_of_a_prefix_cost_others_of_it_a_proof_and_no_place() {
        let (mut census, limits) = (Census::default(), limits(100, 70, 10));
        while census.judge(prefix(1), false, &limits) == AdmissionVerdict::Admit {
            _ = census.enter(prefix(1));
        }
        assert_eq!(census.open, 10);
        assert_eq!(census.judge(prefix(1), false, &limits), AdmissionVerdict::Prove);
        assert_eq!(census.judge(prefix(2), false, &limits), AdmissionVerdict::Admit);
        let mut proven = 0;
        while census.judge(prefix(1), true, &limits) == AdmissionVerdict::Admit {
            _ = census.enter(prefix(1));
            proven += 1;
        }
        assert_eq!(proven, 10, "proofs have an end as well");
    }

    #[test]
    fn prefixes_of_users_are_remembered_and_no_more_than_so_many() {
        let mut census = Census::default();
        for number in 0..REMEMBERED as u16 + 10 {
            census.enter_known(prefix(number));
            census.leave_known(prefix(number));
        }
        assert_eq!((census.prefixes.len(), census.remembered.len(), census.open), (REMEMBERED, REMEMBERED, 0));
        assert_eq!((census.enter(prefix(9)), census.enter(prefix(10))), (Origin::Unknown, Origin::Known));
    }

    #[test]
    fn a_prefix_that_its_user_leaves_again_is_remembered_anew() {
        let mut census = Census::default();
        let mut visit = |number: u16| {
            census.enter_known(prefix(number));
            census.leave_known(prefix(number));
        };
        (0..REMEMBERED as u16).for_each(&mut visit);
        visit(0);
        (0..REMEMBERED as u16 - 1).for_each(|number| visit(10_000 + number));
        assert_eq!((census.prefixes.len(), census.remembered.len()), (REMEMBERED, REMEMBERED));
        assert_eq!((census.enter(prefix(0)), census.enter(prefix(1))), (Origin::Known, Origin::Unknown));
    }
}
