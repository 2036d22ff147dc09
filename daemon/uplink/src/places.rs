//! How many tunnels one connection to a relay carries.

use std::time::Duration;

use tokio::time::Instant;

/// The maximum of tunnels over one connection. It is below a relay's default limit (`tunnels_per_connection`, 1,024),
/// so that closing tunnels do not block new ones.
pub const MOST: usize = 960;

/// The maximum of connections to one relay. All their tunnels together stay below a relay's default limit for one user
/// (`tunnels_per_user`, 4,096).
pub const CONNECTIONS: usize = 4;

/// The time after which a relay that allowed fewer is asked for more again: other tunnels of the same user may have
/// ended.
pub(crate) const FORGET: Duration = Duration::from_secs(5);

/// The places for tunnels on one connection.
#[derive(Debug)]
pub(crate) struct TunnelPlaces {
    taken: usize,
    most: usize,
    /// When the relay allowed no more than `most`.
    limited: Option<Instant>,
}

impl Default for TunnelPlaces {
    fn default() -> Self {
        Self { taken: 0, most: MOST, limited: None }
    }
}

impl TunnelPlaces {
    /// Returns how many places are taken.
    #[must_use]
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Whether one is free at `now`.
    #[must_use]
    pub(crate) fn has_room(&self, now: Instant) -> bool {
        self.taken < self.most(now)
    }

    /// Takes a place if one is free at `now`.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let free = self.has_room(now);
        self.taken += usize::from(free);
        free
    }

    /// Gives a place back.
    pub(crate) fn give_back(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }

    /// Notes that the relay refused a tunnel with a place. The relay's limit is then the number of the other tunnels.
    pub(crate) fn limit(&mut self, now: Instant) {
        self.most = self.taken.saturating_sub(1).min(self.most(now));
        self.limited = Some(now);
    }

    fn most(&self, now: Instant) -> usize {
        let holds = self.limited.is_some_and(|since| now.saturating_duration_since(since) < FORGET);
        if holds { self.most } else { MOST }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(count: usize, now: Instant) -> TunnelPlaces {
        let mut places = TunnelPlaces::default();
        (0..count).for_each(|_| assert!(places.take(now)));
        places
    }

    #[test]
    fn a_connection_has_fewer_places_than_a_relay_allows_tunnels() {
        let now = Instant::now();
        let mut places = taken(MOST, now);
        assert!(!places.take(now));
        assert!(MOST < config::relay::RelayLimits::default().tunnels_per_connection as usize);
        places.give_back();
        assert!(places.take(now));
    }

    #[test]
    fn the_relays_limit_holds_for_a_while() {
        let now = Instant::now();
        let mut places = taken(11, now);
        places.limit(now);
        places.give_back();
        assert_eq!((places.taken(), places.has_room(now)), (10, false));
        places.give_back();
        assert!(places.has_room(now));
        let later = now + FORGET;
        assert!((0..20).all(|_| places.take(later)));
    }
}
