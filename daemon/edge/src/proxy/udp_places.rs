//! The places for the UDP tunnels of a proxy's clients, and which tunnel makes room for another.
//!
//! While a place is free, any client gets it. Once all are taken, users, or else networks, have equal shares, and so have the associations
//! of each: a new tunnel of one with less than its share replaces one of the user, or the association, with the most. Otherwise, the
//! association's own targets make room. In each case, the target to which the client has sent nothing for longest goes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use role::holder::Holder;
use tokio::time::Instant;

/// How many targets one association may have tunnels to at once.
pub(super) const TARGETS: usize = 64;

/// The places of one proxy.
pub(super) struct UdpPlaces {
    most: usize,
    start: Instant,
    now: Mutex<PlacesNow>,
}

#[derive(Default)]
struct PlacesNow {
    /// The flows of each association, by the holder of the associations. None is empty.
    of: HashMap<Holder, BTreeMap<u64, Vec<Arc<Taken>>>>,
    taken: usize,
    associations: u64,
}

/// The owner of a tunnel.
pub(super) trait MakesRoom: Send + Sync {
    /// Ends the tunnel, because another one gets its place.
    fn make_room(&self);
}

/// A place that is taken.
struct Taken {
    /// When the client last sent to the target, in microseconds since the start of [`UdpPlaces`].
    heard_us: AtomicU64,
    /// The owner of the tunnel. It holds the [`UdpPlace`], whose drop gives the place back.
    owner: Weak<dyn MakesRoom>,
}

/// An association, as the choice takes it into account.
#[derive(Clone)]
pub(super) struct Seat {
    holder: Holder,
    number: u64,
}

/// A place, until dropped. Another flow may have taken it over meanwhile.
pub(super) struct UdpPlace {
    of: Arc<UdpPlaces>,
    seat: Seat,
    taken: Arc<Taken>,
}

impl UdpPlaces {
    /// Returns so many free places.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, start: Instant::now(), now: Mutex::default() })
    }

    /// Returns a seat for a new association of a holder.
    pub(super) fn seat(&self, holder: Holder) -> Seat {
        let mut now = self.now.lock();
        now.associations += 1;
        Seat { holder, number: now.associations }
    }

    /// Whether all places are taken.
    pub(super) fn is_full(&self) -> bool {
        self.now.lock().taken >= self.most
    }

    /// Returns the time at `now`, in microseconds since the start.
    fn us(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_micros() as u64
    }

    /// Gives a tunnel a place, whose client sends to its target `now`. If another tunnel has to make room, its owner is returned for the
    /// caller to tell. `None` if there are no places at all.
    pub(super) fn take(
        self: &Arc<Self>,
        seat: &Seat,
        owner: Weak<dyn MakesRoom>,
        now: Instant,
    ) -> Option<(UdpPlace, Option<Weak<dyn MakesRoom>>)> {
        let taken = Arc::new(Taken { heard_us: AtomicU64::new(self.us(now)), owner });
        let mut now = self.now.lock();
        let leaving = if now.count(seat) >= TARGETS {
            Some(seat.clone())
        } else if now.taken >= self.most {
            Some(now.leaving(seat)?)
        } else {
            None
        };
        let evicted = match leaving {
            Some(leaving) => Some(now.remove_oldest(&leaving)?),
            None => None,
        };
        now.of.entry(seat.holder.clone()).or_default().entry(seat.number).or_default().push(taken.clone());
        now.taken += 1;
        Some((UdpPlace { of: self.clone(), seat: seat.clone(), taken }, evicted))
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.most - self.now.lock().taken
    }
}

impl PlacesNow {
    /// How many flows an association has.
    fn count(&self, seat: &Seat) -> usize {
        self.of.get(&seat.holder).and_then(|of| of.get(&seat.number)).map_or(0, Vec::len)
    }

    /// Returns the association whose oldest flow makes room for one of `seat`, if all places are taken.
    fn leaving(&self, seat: &Seat) -> Option<Seat> {
        let held = |of: &BTreeMap<u64, Vec<Arc<Taken>>>| of.values().map(Vec::len).sum::<usize>();
        let own = self.of.get(&seat.holder);
        let count = own.map_or(0, held);
        let holders = self.of.len() + usize::from(own.is_none());
        let largest = self.of.values().map(held).max()?;
        // If there are more holders than places, a holder without a place takes another holder's, so that each has one in turn.
        let asked = if count < (self.taken / holders).max(1) {
            self.of.iter().filter(|(_, of)| held(of) == largest).collect()
        } else {
            let of = own?;
            let associations = of.len() + usize::from(!of.contains_key(&seat.number));
            if self.count(seat) >= (count / associations).max(1) {
                return Some(seat.clone());
            }
            vec![(&seat.holder, of)]
        };
        let seats =
            asked.into_iter().flat_map(|(holder, of)| of.iter().map(move |(number, flows)| (holder, number, flows)));
        let seats: Vec<_> = seats.collect();
        let largest = seats.iter().map(|(.., flows)| flows.len()).max()?;
        let of_largest = seats.into_iter().filter(|(.., flows)| flows.len() == largest);
        let (holder, number, _) =
            of_largest.min_by_key(|(.., flows)| flows.iter().map(|flow| flow.heard_us.load(Relaxed)).min())?;
        Some(Seat { holder: holder.clone(), number: *number })
    }

    /// Takes the flow that was silent for longest out of an association.
    fn remove_oldest(&mut self, seat: &Seat) -> Option<Weak<dyn MakesRoom>> {
        let flows = self.of.get(&seat.holder)?.get(&seat.number)?;
        let oldest = flows.iter().min_by_key(|flow| flow.heard_us.load(Relaxed))?.clone();
        self.remove(seat, &oldest);
        Some(oldest.owner.clone())
    }

    /// Takes a flow out, if it is there.
    fn remove(&mut self, seat: &Seat, flow: &Arc<Taken>) {
        let Some(of) = self.of.get_mut(&seat.holder) else { return };
        let Some(flows) = of.get_mut(&seat.number) else { return };
        let before = flows.len();
        flows.retain(|other| !Arc::ptr_eq(other, flow));
        self.taken -= before - flows.len();
        if flows.is_empty() {
            of.remove(&seat.number);
        }
        if of.is_empty() {
            self.of.remove(&seat.holder);
        }
    }
}

impl UdpPlace {
    /// Notes that the client sends to the target now.
    pub(super) fn hears(&self, now: Instant) {
        self.taken.heard_us.store(self.of.us(now), Relaxed);
    }
}

impl Drop for UdpPlace {
    fn drop(&mut self) {
        self.of.now.lock().remove(&self.seat, &self.taken);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The number of a tunnel, and where it notes that it makes room.
    struct Tunnel(usize, Arc<Mutex<Option<usize>>>);

    impl MakesRoom for Tunnel {
        fn make_room(&self) {
            *self.1.lock() = Some(self.0);
        }
    }

    /// Associations whose clients send to one new target a millisecond, in turn.
    struct Clients {
        places: Arc<UdpPlaces>,
        start: Instant,
        sent: u32,
        held: Vec<(Arc<Tunnel>, UdpPlace)>,
        evicted: Arc<Mutex<Option<usize>>>,
    }

    impl Clients {
        fn of(most: usize) -> Self {
            let (places, evicted) = (UdpPlaces::new(most), Arc::default());
            Self { places, start: Instant::now(), sent: 0, held: Vec::new(), evicted }
        }

        fn seat(&self, user: &str) -> Seat {
            self.places.seat(Holder::User(user.into()))
        }

        /// Opens a tunnel of an association. Returns the place, in the order of arrivals, of the tunnel that made room.
        fn open(&mut self, seat: &Seat) -> Option<usize> {
            self.sent += 1;
            let now = self.start + Duration::from_millis(self.sent.into());
            let tunnel = Arc::new(Tunnel(self.sent as usize, self.evicted.clone()));
            let owner: Arc<dyn MakesRoom> = tunnel.clone();
            let (place, evicted) = self.places.take(seat, Arc::downgrade(&owner), now).unwrap();
            self.held.push((tunnel, place));
            evicted?.upgrade().unwrap().make_room();
            let evicted = self.evicted.lock().take();
            // It gives back nothing: its place is the new tunnel's.
            self.held.retain(|(tunnel, _)| Some(tunnel.0) != evicted);
            evicted
        }

        fn counts<const N: usize>(&self, seats: [&Seat; N]) -> [usize; N] {
            seats.map(|seat| self.places.now.lock().count(seat))
        }
    }

    #[test]
    fn a_client_that_takes_all_tunnels_of_a_proxy_leaves_others_their_equal_share() {
        let mut clients = Clients::of(12);
        let [greedy, again, modest] = ["greedy", "greedy", "modest"].map(|user| clients.seat(user));
        for _ in 0..6 {
            assert_eq!([clients.open(&greedy), clients.open(&again)], [None; 2]);
        }
        assert_eq!(clients.open(&modest), Some(1), "the oldest one of the user with the most");
        for _ in 0..20 {
            clients.open(&modest);
        }
        assert_eq!(clients.counts([&greedy, &again, &modest]), [3, 3, 6]);
        for _ in 0..20 {
            clients.open(&greedy);
            clients.open(&again);
        }
        assert_eq!(clients.counts([&greedy, &again, &modest]), [3, 3, 6]);
        clients.held.clear();
        assert_eq!((clients.places.free(), clients.places.now.lock().of.len()), (12, 0));
    }

    #[test]
    fn associations_of_one_user_or_network_have_equal_shares_of_its_tunnels() {
        let mut clients = Clients::of(9);
        let [first, second, third] = [(); 3].map(|()| clients.seat("one"));
        for _ in 0..9 {
            clients.open(&first);
        }
        assert_eq!(clients.open(&second), Some(1));
        for _ in 0..20 {
            clients.open(&second);
            clients.open(&third);
        }
        assert_eq!(clients.counts([&first, &second, &third]), [3; 3]);
    }

    #[test]
    fn with_more_users_than_tunnels_the_one_that_was_silent_for_longest_makes_room() {
        let mut clients = Clients::of(2);
        let [first, second, third] = ["first", "second", "third"].map(|user| clients.seat(user));
        assert_eq!([clients.open(&first), clients.open(&second)], [None; 2]);
        assert_eq!([clients.open(&third), clients.open(&first), clients.open(&second)], [Some(1), Some(2), Some(3)]);
    }

    #[test]
    fn an_association_has_no_more_targets_than_its_maximum_however_many_places_there_are() {
        let mut clients = Clients::of(2 * TARGETS);
        let seat = clients.seat("one");
        for sent in 0..3 * TARGETS {
            assert_eq!(clients.open(&seat), (sent + 1).checked_sub(TARGETS).filter(|oldest| *oldest > 0));
        }
        assert_eq!(clients.places.free(), TARGETS);
        assert!(UdpPlaces::new(0).take(&seat, Weak::<Tunnel>::new(), clients.start).is_none());
    }
}
