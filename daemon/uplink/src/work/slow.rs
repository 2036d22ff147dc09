//! Paths, and relays of a list, that have become slow: their tunnels move to others until the round trip is short again.
//!
//! The connections over one path to one relay are judged together, against the other paths and against the relay that would be used
//! instead. To compare with that relay, a connection to it is made once round trips are long, if no other path works. What is judged is
//! probed as well: an idle connection would keep the long round trips that its last load has left.

use std::{sync::Arc, time::Duration};

use sched::path::slow::{RoundTrips, Slowness, SlownessChange};
use tokio::time::Instant;

use super::Work;
use crate::{line::Line, path::ns};

/// The time between two pings on a slow path. Each round trip changes the smoothed one by an eighth (RFC 9002 §5.3), so it takes
/// about thirty of them to get from seconds to milliseconds.
pub(super) const ASK_SLOW: Duration = Duration::from_millis(250);

/// The time between two pings on a path that is about to count as slow. That takes three seconds, of which a load that has just ended may
/// have taken two. The ten pings of the last second bring a smoothed round trip below a third of its excess.
const ASK_IN_DOUBT: Duration = Duration::from_millis(100);

/// Returns the lowest smoothed round trip and the lowest shortest one of connections that answer, if they have any.
fn round_trips<'a>(lines: impl Iterator<Item = &'a Arc<Line>>) -> Option<RoundTrips> {
    let paths: Vec<_> = lines.map(|line| line.path.get()).collect();
    let smoothed_ns = paths.iter().filter_map(|path| path.smoothed_rtt).min().map(ns)?;
    // A queue that overflows is persistent congestion, after which its delay would count as the path's shortest round trip.
    let shortest_ns = paths.iter().filter_map(|path| path.lifetime_min_rtt).min().map(ns)?;
    Some(RoundTrips { smoothed_ns, shortest_ns })
}

/// Returns the connections over a path to one of its relays.
pub(super) fn over((path, place): (usize, usize), lines: &[Arc<Line>]) -> impl Iterator<Item = &Arc<Line>> {
    lines.iter().filter(move |line| (line.path_place, line.place) == (path, place) && !line.is_closed())
}

impl Work<'_> {
    /// Moves tunnels away from paths and relays that have become slow.
    pub(super) fn look_for_slow(&mut self, now: Instant, lines: &[Arc<Line>]) -> bool {
        let (mut changed, mut compared) = (false, Vec::with_capacity(self.slowness.len()));
        for path in 0..self.slowness.len() {
            let mut of_path = None;
            for place in 0..self.slowness.get(path).map_or(0, Vec::len) {
                changed |= self.judge((path, place), now, lines);
                if self.is_to_be_compared((path, place), now, lines) {
                    of_path = of_path.or(self.instead_of((path, place), now, lines));
                }
            }
            compared.push(of_path);
        }
        self.uplink.state.send_if_modified(|state| {
            state.compared = compared;
            false
        });
        changed
    }

    /// Judges the connections over a path to one of its relays, and probes them if they are slow or seem to be. Returns
    /// whether the judgement has changed.
    fn judge(&mut self, at: (usize, usize), now: Instant, lines: &[Arc<Line>]) -> bool {
        let seen = round_trips(over(at, lines).filter(|line| !line.is_doubted()));
        let usable = || lines.iter().filter(|line| line.is_usable());
        let other_paths =
            usable().filter(|line| line.path_place != at.0).filter_map(|line| line.path.get().smoothed_rtt);
        // Tunnels move to the first of the other relays that works.
        let others = usable().filter(|line| line.path_place == at.0 && line.place != at.1);
        let next = others.map(|line| line.place).min().and_then(|place| {
            let of_next = usable().filter(|line| (line.path_place, line.place) == (at.0, place));
            of_next.filter_map(|line| line.path.get().smoothed_rtt).min()
        });
        let other_ns = other_paths.chain(next).min().map(ns);
        let now_ns = ns(now.saturating_duration_since(self.start));
        let may_be_compared = self.may_be_compared(at, lines);
        let Some((slowness, asked)) = self.slowness_of(at) else { return false };
        let change = slowness.look(now_ns, seen, other_ns);
        let is_slow = slowness.is_slow();
        let every = match slowness.is_in_doubt() && !is_slow {
            true => Some(ASK_IN_DOUBT),
            false => (is_slow || slowness.is_long() && may_be_compared).then_some(ASK_SLOW),
        };
        let is_due = every.is_some_and(|every| asked.is_none_or(|asked| now.saturating_duration_since(asked) >= every));
        if is_due {
            *asked = Some(now);
        }
        if let Some(line) = over(at, lines).next() {
            match change {
                SlownessChange::None => {}
                SlownessChange::Slow => {
                    self.uplink.announce(line, "is slow: moving its tunnels");
                    self.uplink.counters.slow.inc();
                }
                SlownessChange::Good => self.uplink.announce(line, "is no longer slow, or has no alternative now"),
            }
        }
        for line in over(at, lines) {
            // Includes connections that were made meanwhile.
            if line.is_slow() != is_slow {
                line.note_slow(is_slow);
            }
            if is_due {
                line.ping();
            }
        }
        change != SlownessChange::None
    }

    /// Whether another relay of this path may suit tunnels over a path to one of its relays better.
    fn is_to_be_compared(&mut self, at: (usize, usize), now: Instant, lines: &[Arc<Line>]) -> bool {
        let seen = round_trips(over(at, lines).filter(|line| !line.is_doubted()));
        let may_be_compared = self.may_be_compared(at, lines);
        let now_ns = ns(now.saturating_duration_since(self.start));
        let Some((slowness, _)) = self.slowness_of(at) else { return false };
        slowness.needs_other(now_ns, seen) && may_be_compared
    }

    /// Whether a path has tunnels at one of its relays that could use another relay of this path. If another path works, they move to that:
    /// a connection over a slow path would never know the short round trips.
    fn may_be_compared(&self, at: (usize, usize), lines: &[Arc<Line>]) -> bool {
        let has_others = self.slowness.get(at.0).is_some_and(|relays| relays.len() > 1)
            && !lines.iter().any(|line| line.path_place != at.0 && line.is_usable());
        has_others && over(at, lines).any(|line| line.tunnels() > 0)
    }

    /// Returns the relay that is used if this one is slow, by its index on the path: the first that works, or else the first that may be
    /// tried now. Probes it if it works, because its round trip may be from its handshake.
    fn instead_of(&mut self, at: (usize, usize), now: Instant, lines: &[Arc<Line>]) -> Option<usize> {
        let (path, place) = at;
        let works = |other: &usize| over((path, *other), lines).any(|line| line.is_usable());
        let relays = || (0..self.slowness.get(path).map_or(0, Vec::len)).filter(|other| *other != place);
        let Some(working) = relays().find(works) else {
            let failover = self.failovers.get(path)?;
            return relays().find(|other| failover.wait(*other, now).is_zero());
        };
        if let Some((_, asked)) = self.slowness_of((path, working))
            && asked.is_none_or(|asked| now.saturating_duration_since(asked) >= ASK_SLOW)
        {
            *asked = Some(now);
            over((path, working), lines).for_each(|line| line.ping());
        }
        Some(working)
    }

    fn slowness_of(&mut self, (path, place): (usize, usize)) -> Option<&mut (Slowness, Option<Instant>)> {
        self.slowness.get_mut(path)?.get_mut(place)
    }
}

#[cfg(test)]
mod tests {
    use test_relay::{Does, PATIENCE, TestRelay, eventually};

    use super::*;
    use crate::{Uplink, UplinkResources, task::SPARE, work::Step};

    /// Starts two relays, and an uplink to them over one path.
    fn two_relays() -> ([TestRelay; 2], Arc<Uplink>) {
        let relays = [(); 2].map(|()| TestRelay::start(Does::Echo, true));
        let endpoints = relays.iter().map(TestRelay::endpoint).collect();
        let uplink = Uplink::new(endpoints, None, (PATIENCE, PATIENCE), UplinkResources::default());
        (relays, uplink)
    }

    /// Makes a connection to a relay of the only path, and returns it.
    async fn connect(work: &mut Work<'_>, place: usize) -> Arc<Line> {
        let (at, connected) = work.uplink.attempt((0, place)).await;
        work.attempted(at, connected);
        work.uplink.lines().into_iter().find(|line| line.place == place).unwrap()
    }

    #[tokio::test]
    async fn tunnels_leave_a_slow_relay_for_the_next_one_and_new_ones_take_it_again_once_it_is_good() {
        let (_relays, uplink) = two_relays();
        let mut work = Work::new(&uplink);
        let (ms, seconds, now) = (Duration::from_millis, Duration::from_secs, Instant::now());
        let first = connect(&mut work, 0).await;
        let tunnel = first.link().unwrap();
        // Nothing waits where a round trip is set, so the connections measure nothing themselves.
        first.path.measured(ms(500), ms(20));
        assert!(!work.look_for_slow(now, &uplink.open_lines()));
        assert!(matches!(work.next(), Step::Nothing), "it may be a burst");
        assert!(!work.look_for_slow(now + seconds(1), &uplink.open_lines()), "there is nothing to compare with");
        assert!(matches!(work.next(), Step::Connect((0, 1))));

        let second = connect(&mut work, 1).await;
        first.path.measured(ms(500), ms(20));
        second.path.measured(ms(450), ms(20));
        let lines = uplink.open_lines();
        for at in [2, 9] {
            assert!(!work.look_for_slow(now + seconds(at), &lines), "the next relay is no better");
        }
        uplink.close_spare(Instant::now() + 2 * SPARE);
        assert!(!second.is_closed(), "it may become better");
        second.path.measured(ms(20), ms(20));
        assert!(!work.look_for_slow(now + seconds(10), &lines));
        assert!(work.look_for_slow(now + seconds(13), &lines));
        assert!(first.is_left() && second.is_usable());
        assert_eq!(uplink.link().await.unwrap().line().place, 1, "new tunnels take the next relay");
        assert!(matches!(work.next(), Step::Nothing), "a further connection to the slow relay would not be faster");
        drop(tunnel);
        uplink.close_spare(Instant::now() + 2 * SPARE);
        assert!(!first.is_closed(), "it is probed");

        first.path.measured(ms(30), ms(20));
        assert!(!work.look_for_slow(now + seconds(20), &lines));
        assert!(work.look_for_slow(now + seconds(35), &lines));
        assert!(!first.is_left() && !second.is_left(), "open tunnels stay");
        assert_eq!(uplink.link().await.unwrap().line().place, 0);
    }

    #[tokio::test]
    async fn long_round_trips_that_a_load_has_left_at_an_idle_relay_do_not_make_it_slow() {
        let (_relays, uplink) = two_relays();
        let mut work = Work::new(&uplink);
        let (ms, mut now) = (Duration::from_millis, Instant::now());
        let first = connect(&mut work, 0).await;
        let tunnel = first.link().unwrap();
        let long = || first.path.get().smoothed_rtt == Some(ms(500));
        // What the handshake has left may bring the first round trips, but not all of them.
        for _ in 0..5 {
            first.path.measured(ms(500), ms(20));
            for _ in 0..2 {
                assert!(!work.look_for_slow(now, &uplink.open_lines()));
                now += ms(250);
            }
            eventually(|| !long()).await;
            work.look_for_slow(now, &uplink.open_lines());
        }
        assert!(matches!(work.next(), Step::Nothing), "a relay that is fast is compared with none");

        // Without a tunnel, it is judged only because there is another connection.
        drop(tunnel);
        let second = connect(&mut work, 1).await;
        for _ in 0..5 {
            first.path.measured(ms(500), ms(20));
            second.path.measured(ms(20), ms(20));
            now += ms(100);
            work.look_for_slow(now, &uplink.open_lines());
            eventually(|| !long()).await;
        }
        now += ms(3_000);
        assert!(!work.look_for_slow(now, &uplink.open_lines()) && !first.is_slow());
    }

    #[tokio::test]
    async fn a_slow_relay_without_tunnels_is_not_compared_and_the_only_one_that_works_is_used_again_at_once() {
        let (_relays, uplink) = two_relays();
        let mut work = Work::new(&uplink);
        let (ms, seconds, now) = (Duration::from_millis, Duration::from_secs, Instant::now());
        let first = connect(&mut work, 0).await;
        first.path.measured(ms(500), ms(20));
        for at in [0, 5] {
            work.look_for_slow(now + seconds(at), &uplink.open_lines());
        }
        assert!(matches!(work.next(), Step::Nothing));

        let second = connect(&mut work, 1).await;
        first.path.measured(ms(500), ms(20));
        second.path.measured(ms(20), ms(20));
        for at in [6, 9] {
            work.look_for_slow(now + seconds(at), &uplink.open_lines());
        }
        assert!(first.is_slow());
        second.doubt(true);
        assert!(work.look_for_slow(now + seconds(10), &uplink.open_lines()));
        assert!(first.is_usable());
    }
}
