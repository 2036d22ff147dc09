//! Chooses which of several relays to connect to, and when: the first that works, and a preferred one again once it is
//! back.
//!
//! Relays are in order of preference. While there is no connection, the edge tries one relay after another: it tries
//! the next once the one before has not answered for [`STAGGER`], or has failed. While there is a connection, the edge
//! tries the preferred relays in the background, as often as the back-off allows. A relay that an operator has chosen
//! counts as the most preferred one. The edge also connects to relays that hold tunnels of another path, and to the relay that a slow one
//! is compared with. While a slow relay stands by, the edge uses the next one.
//!
//! The back-off spares relays that are overloaded. While another path works, a relay that does not answer is more likely to be out of reach
//! than overloaded, and waits no longer than [`SHORT`](super::backoff::SHORT).

use std::time::Duration;

use tokio::time::Instant;

use super::backoff::Backoff;

/// How long a relay may be silent before the next one is tried as well.
pub const STAGGER: Duration = Duration::from_secs(1);

/// The state of one relay.
#[derive(Clone, Copy, Debug, Default)]
pub struct RelayAvailability {
    /// Connections to it that take new tunnels.
    pub usable: usize,
    /// Whether one of them has a place for a tunnel.
    pub has_room: bool,
    /// Whether a new connection to it has yet to show that the relay answers.
    pub is_on_trial: bool,
    /// Whether it is slow: connections to it work, but tunnels use another relay.
    pub stands_by: bool,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Connect to the relay with this index.
    Connect(usize),
    /// Nothing before this time, unless something happens.
    Wait(Instant),
    /// Nothing unless something happens.
    Nothing,
}

/// How connecting to each relay has gone.
#[derive(Debug)]
pub struct Failover {
    relays: Vec<Attempts>,
    /// Connections to one relay at once, at most.
    connections: usize,
    /// The relay that an operator has chosen, whatever the order of preference.
    chosen: Option<usize>,
    /// Whether another path works.
    has_other_path: bool,
}

#[derive(Debug)]
struct Attempts {
    backoff: Backoff,
    /// When the attempt in progress began.
    since: Option<Instant>,
    /// Whether the last attempt failed for lack of an answer.
    is_unanswered: bool,
    /// Whether there should be a connection to this relay besides that in use.
    is_needed: bool,
}

impl Failover {
    /// Starts with `relays` relays, all untried.
    #[must_use]
    pub fn new(relays: usize, connections: usize, backoff: (Duration, Duration)) -> Self {
        let untried =
            || Attempts { backoff: Backoff::new(backoff), since: None, is_unanswered: false, is_needed: false };
        Self { relays: (0..relays).map(|_| untried()).collect(), connections, chosen: None, has_other_path: false }
    }

    /// Uses this relay, as long as it works, rather than relays preferred to it; `None` restores the order of
    /// preference.
    pub fn choose(&mut self, relay: Option<usize>) {
        self.chosen = relay;
    }

    /// Notes whether another path works.
    pub fn beside(&mut self, has_other_path: bool) {
        self.has_other_path = has_other_path;
    }

    /// Notes whether there should be a connection to a relay, however much it is preferred, while another one works. Tunnels of another path
    /// are at this relay, so that they can come over and stay at it; or the relay in use may be slow, and is compared with this one.
    pub fn need(&mut self, relay: usize, is_needed: bool) {
        if let Some(relay) = self.relays.get_mut(relay) {
            relay.is_needed = is_needed;
        }
    }

    /// Notes whether the last attempt to connect to a relay failed for lack of an answer.
    pub fn note_unanswered(&mut self, relay: usize, is_unanswered: bool) {
        if let Some(relay) = self.relays.get_mut(relay) {
            relay.is_unanswered = is_unanswered;
        }
    }

    /// Returns how long to wait at `now` before a relay is tried again while none works.
    #[must_use]
    pub fn wait(&self, relay: usize, now: Instant) -> Duration {
        let Some(relay) = self.relays.get(relay) else { return Duration::ZERO };
        let is_short = self.has_other_path && relay.is_unanswered;
        if is_short { relay.backoff.short_wait(now) } else { relay.backoff.wait(now) }
    }

    /// Allows an attempt to connect to a relay at once: an operator asks for it, or the relay may have come within reach.
    pub fn hurry(&mut self, relay: usize) {
        if let Some(relay) = self.relays.get_mut(relay) {
            relay.backoff.hurry();
        }
    }

    /// Returns what to do at `now`; `wanted` says whether a tunnel waits for a place.
    #[must_use]
    pub fn next(&self, now: Instant, wanted: bool, availability: &[RelayAvailability]) -> Next {
        match self.used(availability) {
            None if wanted => self.first(now, availability),
            None => Next::Nothing,
            Some(used) => self.better(now, wanted, used, availability),
        }
    }

    /// Whether another connection may soon bring places once the current connections are full. A relay that failed before counts only
    /// while a connection to it works.
    #[must_use]
    pub fn may_bring_room(&self, now: Instant, availability: &[RelayAvailability]) -> bool {
        let Some(used) = self.used(availability) else { return self.relays.iter().any(|it| !it.backoff.has_failed()) };
        let is_soon = |it: &Attempts| it.since.is_some() || it.backoff.wait(now).is_zero();
        availability[used].usable < self.connections && self.relays.get(used).is_some_and(is_soon)
    }

    /// Returns the relay whose connections are used, if one works.
    fn used(&self, availability: &[RelayAvailability]) -> Option<usize> {
        let works = |relay: usize| availability.get(relay).is_some_and(|relay| relay.usable > 0);
        let used = self.chosen.filter(|chosen| works(*chosen));
        used.or_else(|| (0..availability.len()).find(|relay| works(*relay)))
    }

    /// Returns the next step while no relay works: connect to the first relay that may be tried, once the attempts
    /// before it have had their time. The chosen relay comes before all others.
    fn first(&self, now: Instant, availability: &[RelayAvailability]) -> Next {
        let mut earliest: Option<Instant> = None;
        let others = (0..self.relays.len()).filter(|place| Some(*place) != self.chosen);
        let places = self.chosen.into_iter().chain(others).filter(|place| !is_on_trial(availability, *place));
        for (place, relay) in places.filter_map(|place| Some((place, self.relays.get(place)?))) {
            match relay.since {
                Some(since) if now < since + STAGGER => return Next::Wait(since + STAGGER),
                Some(_) => {}
                None => match self.wait(place, now) {
                    Duration::ZERO => return Next::Connect(place),
                    wait => earliest = Some(earliest.map_or(now + wait, |earliest| earliest.min(now + wait))),
                },
            }
        }
        earliest.map_or(Next::Nothing, Next::Wait)
    }

    /// Returns the next step while the relay at index `used` works. The edge tries all relays before it, and all relays that are
    /// [needed](Self::need). If the relay in use is full, it gets one more connection.
    fn better(&self, now: Instant, wanted: bool, used: usize, availability: &[RelayAvailability]) -> Next {
        // A connection to another relay is there for tunnels that are at that relay.
        let may_have_more = |relay: &RelayAvailability| !relay.has_room && relay.usable < self.connections;
        let more = wanted && availability.get(used).is_some_and(may_have_more);
        let is_tried = |relay: usize| match self.chosen {
            Some(chosen) => relay == chosen && relay != used,
            None => relay < used,
        };
        let is_missing = |relay: usize| availability.get(relay).is_some_and(|relay| relay.usable == 0);
        let is_due =
            |relay: usize, it: &Attempts| is_tried(relay) || it.is_needed && is_missing(relay) || more && relay == used;
        // A further connection to a slow relay would not be faster.
        let stands_by = |relay: usize| availability.get(relay).is_some_and(|relay| relay.stands_by);
        let is_open = |relay: usize| !is_on_trial(availability, relay) && !stands_by(relay);
        let relays = self.relays.iter().enumerate().filter(|(relay, _)| is_open(*relay));
        let idle = relays.filter(|(relay, it)| it.since.is_none() && is_due(*relay, it));
        let next = idle.map(|(place, relay)| (relay.backoff.wait(now), place)).min();
        match next {
            Some((Duration::ZERO, place)) => Next::Connect(place),
            Some((wait, _)) => Next::Wait(now + wait),
            None => Next::Nothing,
        }
    }

    /// Notes that an attempt to connect to a relay begins.
    pub fn begun(&mut self, relay: usize, now: Instant) {
        if let Some(relay) = self.relays.get_mut(relay) {
            relay.since = Some(now);
        }
    }

    /// Notes that the attempt succeeded: the relay answers.
    pub fn connected(&mut self, relay: usize) {
        if let Some(relay) = self.relays.get_mut(relay) {
            (relay.since, relay.is_unanswered) = (None, false);
        }
    }

    /// Notes that the attempt failed, and returns the time after which the relay may be tried again.
    pub fn failed(&mut self, relay: usize, now: Instant, random: u64) -> Duration {
        let Some(relay) = self.relays.get_mut(relay) else { return Duration::ZERO };
        relay.since = None;
        relay.backoff.failed(now, random).unwrap_or_default()
    }

    /// Notes the loss of a connection that had lasted for `lasted`, and whether the relay did not answer any more.
    pub fn lost(&mut self, relay: usize, (lasted, is_unanswered): (Duration, bool), now: Instant, random: u64) {
        let Some(relay) = self.relays.get_mut(relay) else { return };
        relay.is_unanswered = is_unanswered;
        if lasted > relay.backoff.longest() {
            relay.backoff.succeeded();
        } else {
            relay.backoff.failed(now, random);
        }
    }

    /// Whether no attempt is in progress.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.relays.iter().all(|relay| relay.since.is_none())
    }
}

/// Whether a relay has a new connection that has yet to show that the relay answers: another attempt would show no more.
fn is_on_trial(availability: &[RelayAvailability], relay: usize) -> bool {
    availability.get(relay).is_some_and(|relay| relay.is_on_trial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backoff::SHORT;

    const SECOND: Duration = Duration::from_secs(1);
    const NONE: RelayAvailability =
        RelayAvailability { usable: 0, has_room: false, is_on_trial: false, stands_by: false };
    const UP: RelayAvailability = RelayAvailability { usable: 1, has_room: true, ..NONE };
    const FULL: RelayAvailability = RelayAvailability { usable: 1, ..NONE };

    fn of(relays: usize) -> Failover {
        Failover::new(relays, 2, (SECOND, 8 * SECOND))
    }

    #[test]
    fn the_edge_connects_to_no_relay_unless_a_tunnel_needs_it() {
        assert_eq!(of(2).next(Instant::now(), false, &[NONE, NONE]), Next::Nothing);
    }

    #[test]
    fn the_next_relay_is_tried_when_the_one_before_fails_or_is_silent() {
        let (mut relays, now) = (of(2), Instant::now());
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Connect(0));
        relays.begun(0, now);
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Wait(now + STAGGER));
        assert_eq!(relays.next(now + STAGGER, true, &[NONE; 2]), Next::Connect(1));
        relays.failed(0, now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Connect(1));
        relays.begun(1, now);
        relays.failed(1, now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Wait(now + SECOND));
        assert_eq!(relays.next(now + SECOND, true, &[NONE; 2]), Next::Connect(0));
    }

    #[test]
    fn a_preferred_relay_is_tried_while_another_works_no_faster_than_the_back_off() {
        let (mut relays, now) = (of(3), Instant::now());
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Nothing);
        assert_eq!(relays.next(now, false, &[NONE, UP, NONE]), Next::Connect(0));
        relays.begun(0, now);
        assert_eq!(relays.next(now, false, &[NONE, UP, NONE]), Next::Nothing);
        let mut now = now;
        for seconds in [1, 2, 4, 8, 8] {
            let wait = relays.failed(0, now, u64::MAX);
            assert_eq!(wait, seconds * SECOND);
            assert_eq!(relays.next(now, false, &[NONE, UP, NONE]), Next::Wait(now + wait));
            now += wait;
            assert_eq!(relays.next(now, false, &[NONE, UP, NONE]), Next::Connect(0));
            relays.begun(0, now);
        }
    }

    #[test]
    fn a_full_relay_gets_another_connection_as_far_as_it_may_have_more() {
        let (relays, now) = (of(2), Instant::now());
        assert_eq!(relays.next(now, true, &[FULL, NONE]), Next::Connect(0));
        assert_eq!(relays.next(now, false, &[FULL, NONE]), Next::Nothing);
        assert_eq!(relays.next(now, true, &[UP, NONE]), Next::Nothing);
        assert_eq!(relays.next(now, true, &[RelayAvailability { usable: 2, ..NONE }, NONE]), Next::Nothing);
    }

    #[test]
    fn a_full_relay_gets_another_connection_though_one_to_another_relay_has_room() {
        let (mut relays, now) = (of(3), Instant::now());
        relays.need(2, true);
        assert_eq!(relays.next(now, true, &[FULL, NONE, UP]), Next::Connect(0));
        assert_eq!(relays.next(now, true, &[RelayAvailability { usable: 2, ..NONE }, NONE, UP]), Next::Nothing);
    }

    #[test]
    fn a_relay_whose_new_connection_has_yet_to_answer_gets_no_other_one() {
        const TRIED: RelayAvailability = RelayAvailability { is_on_trial: true, ..NONE };
        let (relays, now) = (of(2), Instant::now());
        assert_eq!(of(1).next(now, true, &[TRIED]), Next::Nothing);
        assert_eq!(relays.next(now, true, &[TRIED, NONE]), Next::Connect(1));
        assert_eq!(relays.next(now, false, &[TRIED, UP]), Next::Nothing);
        assert_eq!(relays.next(now, false, &[NONE, UP]), Next::Connect(0));
    }

    #[test]
    fn a_slow_relay_that_stands_by_gets_no_other_connection_and_the_next_one_is_used() {
        const SLOW: RelayAvailability = RelayAvailability { stands_by: true, ..NONE };
        let (mut relays, now) = (of(2), Instant::now());
        assert_eq!(relays.next(now, true, &[SLOW, UP]), Next::Nothing);
        assert_eq!(relays.next(now, true, &[SLOW, FULL]), Next::Connect(1));
        relays.choose(Some(0));
        relays.need(0, true);
        assert_eq!(relays.next(now, true, &[SLOW, UP]), Next::Nothing);
    }

    #[test]
    fn only_another_connection_to_the_relay_in_use_or_a_first_attempt_brings_room() {
        let (mut relays, now) = (of(2), Instant::now());
        assert!(relays.may_bring_room(now, &[NONE; 2]), "nothing was tried");
        relays.failed(0, now, u64::MAX);
        assert!(relays.may_bring_room(now, &[NONE, FULL]), "the relay in use was not tried again");
        assert!(
            !relays.may_bring_room(now, &[NONE, RelayAvailability { usable: 2, ..NONE }]),
            "it has all it may have"
        );
        relays.failed(1, now, u64::MAX);
        assert!(!relays.may_bring_room(now, &[NONE, FULL]));
        assert!(!relays.may_bring_room(now + SECOND, &[NONE; 2]), "both failed");
        assert!(relays.may_bring_room(now + SECOND, &[NONE, FULL]));
        relays.begun(1, now + SECOND);
        assert!(relays.may_bring_room(now + SECOND, &[NONE, FULL]), "it is on its way");
    }

    #[test]
    fn a_relay_with_tunnels_of_another_path_is_connected_to_though_a_preferred_one_works() {
        let (mut relays, now) = (of(3), Instant::now());
        relays.need(2, true);
        assert_eq!(relays.next(now, false, &[NONE; 3]), Next::Nothing, "no relay works over this path");
        assert_eq!(relays.next(now, true, &[NONE; 3]), Next::Connect(0), "the first relay comes first");
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Connect(2));
        relays.begun(2, now);
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Nothing);
        let wait = relays.failed(2, now, u64::MAX);
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Wait(now + wait), "no faster than the back-off");
        assert_eq!(relays.next(now + wait, false, &[UP, NONE, NONE]), Next::Connect(2));
        assert_eq!(relays.next(now + wait, false, &[UP, NONE, FULL]), Next::Nothing, "one connection is enough");
        relays.need(2, false);
        assert_eq!(relays.next(now + wait, false, &[UP, NONE, NONE]), Next::Nothing);
    }

    #[test]
    fn a_relay_that_was_chosen_is_connected_to_though_a_preferred_one_works() {
        let (mut relays, now) = (of(3), Instant::now());
        relays.choose(Some(2));
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Connect(2));
        assert_eq!(relays.next(now, false, &[UP, NONE, UP]), Next::Nothing, "it works");
        assert_eq!(
            relays.next(now, true, &[UP, NONE, FULL]),
            Next::Connect(2),
            "it is used rather than another with room"
        );
        relays.choose(None);
        assert_eq!(relays.next(now, false, &[NONE, NONE, UP]), Next::Connect(0));
        relays.choose(Some(2));
        relays.failed(2, now, u64::MAX);
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Wait(now + SECOND));
        relays.hurry(2);
        assert_eq!(relays.next(now, false, &[UP, NONE, NONE]), Next::Connect(2));
        assert_eq!(relays.failed(2, now, u64::MAX), 2 * SECOND, "it is still the second failure");
    }

    #[test]
    fn while_no_relay_works_the_chosen_one_is_tried_first_and_the_others_after_it() {
        let (mut relays, now) = (of(2), Instant::now());
        relays.choose(Some(1));
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Connect(1));
        relays.begun(1, now);
        assert_eq!(relays.next(now, true, &[NONE; 2]), Next::Wait(now + STAGGER));
        assert_eq!(relays.next(now + STAGGER, true, &[NONE; 2]), Next::Connect(0));
    }

    #[test]
    fn a_path_without_an_answer_is_tried_again_soon_while_another_works() {
        let (mut relays, mut now) = (Failover::new(1, 1, (SECOND, 30 * SECOND)), Instant::now());
        relays.note_unanswered(0, true);
        for _ in 0..6 {
            now += relays.failed(0, now, u64::MAX);
        }
        relays.failed(0, now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + 30 * SECOND), "there is no other path");
        relays.beside(true);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + SHORT));
        relays.note_unanswered(0, false);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + 30 * SECOND), "the relay has refused");
        relays.note_unanswered(0, true);
        relays.connected(0);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + 30 * SECOND), "the relay has answered");
        relays.lost(0, (SECOND, true), now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + SHORT));
        relays.lost(0, (SECOND, false), now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + 30 * SECOND), "the relay said that it goes");
    }

    #[test]
    fn only_a_connection_that_lasted_counts_as_a_success() {
        let (mut relays, now) = (of(1), Instant::now());
        relays.lost(0, (7 * SECOND, false), now, u64::MAX);
        assert_eq!(relays.next(now, true, &[NONE]), Next::Wait(now + SECOND));
        relays.lost(0, (9 * SECOND, false), now + SECOND, u64::MAX);
        assert_eq!(relays.next(now + SECOND, true, &[NONE]), Next::Connect(0));
    }
}
