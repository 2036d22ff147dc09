//! Tunnels that go back to a better path: once a path has taken tunnels for a while, the tunnels of other paths to the same relay are
//! asked, a few per second, whether they would gain by a move. The round trip of a path that nothing uses is measured meanwhile, because
//! new tunnels choose by it, too. A path that takes tunnels gets a connection to each of its relays at which tunnels of other paths are.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;
use tracing::info;

use super::{
    Work,
    slow::{ASK_SLOW, over},
    steadiness::Service,
};
use crate::{Path, line::Line};

/// The shortest time between two tunnels that are asked. It exceeds the time between two looks.
pub(super) const ASK: Duration = Duration::from_millis(200);

/// How long a tunnel may take to move after it was asked, before moves are counted for listeners.
const MOVE: Duration = Duration::from_secs(2);

/// Returns the time between two tunnels that are asked, by the longest round trip of the connections. The second tunnel has to see whether
/// the first has moved, and a move takes a request to the relay.
fn pause(round_trip: Duration) -> Duration {
    ASK.max(2 * round_trip)
}

/// Returns whether the path at index `place` takes tunnels on one of these connections.
fn service_of(place: usize, lines: &[Arc<Line>]) -> Service {
    let has = |is_so: fn(&Line) -> bool| lines.iter().any(|line| line.path_place == place && is_so(line));
    match has(Line::is_usable) {
        true => Service::Takes,
        false if has(|line| line.is_doubted() || line.is_slow()) => Service::Fails,
        false => Service::Pauses,
    }
}

/// Whether tunnels of the connection `from` can go back to the path of `to`. That path has to lead to the same relay: at another
/// relay, the targets would see another source address.
fn may_return(from: &Line, to: &Line) -> bool {
    let are_usable = from.is_usable() && to.is_usable();
    are_usable && from.path_place != to.path_place && to.leads_to(&from.way().relay) && from.recallable() > 0
}

impl Work<'_> {
    /// Notes to which relays each path needs a connection because tunnels of other paths are there: at another relay,
    /// their targets would see another source address. Tunnels use the connection when their path fails, or when this
    /// path is better. A path that takes no tunnels needs none. Also notes which relay may take the tunnels of a slow
    /// one.
    pub(super) fn follow_tunnels(&mut self) {
        let state = self.uplink.state.borrow();
        for (place, (path, failover)) in self.uplink.paths.iter().zip(&mut self.failovers).enumerate() {
            // A path with one relay has no other to connect to.
            if path.relays.len() < 2 {
                continue;
            }
            let takes_tunnels = state.usable().any(|line| line.path_place == place);
            for (relay, endpoint) in path.relays.iter().enumerate() {
                let is_awaited = takes_tunnels && state.may_come(place, &endpoint.origin().to_string());
                failover.need(relay, is_awaited || state.is_compared(place, relay));
            }
        }
    }

    /// Asks tunnels whether another path would suit them better, once a path has become steady.
    pub(super) fn look_for_better(&mut self, now: Instant, lines: &[Arc<Line>]) {
        if !self.uplink.has_several_paths() {
            return;
        }
        let services: Vec<_> = (0..self.uplink.paths.len()).map(|place| service_of(place, lines)).collect();
        let returning = &mut self.returning;
        for place in returning.steady(now, &services) {
            let better = || lines.iter().filter(|line| line.path_place == place);
            for line in lines.iter().filter(|line| better().any(|to| may_return(line, to))) {
                let known = Arc::downgrade(line);
                returning.asked.retain(|(asked, _)| !asked.ptr_eq(&known));
                returning.asked.push((known, line.recallable()));
            }
        }
        // Tunnels that have ended or moved meanwhile take no turn.
        returning.asked.retain_mut(|(line, left)| {
            let line = line.upgrade().filter(|line| line.is_usable());
            *left = line.map_or(0, |line| line.recallable()).min(*left);
            *left > 0
        });
        if returning.pinged.is_none_or(|pinged| now.saturating_duration_since(pinged) >= ASK_SLOW) {
            returning.pinged = Some(now);
            self.measure(now, lines);
        }
        let returning = &mut self.returning;
        let since_last = returning.last.map(|last| now.saturating_duration_since(last));
        let round_trips = lines.iter().filter(|line| line.is_usable()).map(|line| line.round_trip());
        let pause = pause(round_trips.max().unwrap_or_default());
        if since_last.is_none_or(|since| since >= pause)
            && let Some((line, left)) = returning.asked.last_mut()
        {
            *left -= 1;
            if let Some(line) = line.upgrade() {
                line.recall();
            }
            returning.last = Some(now);
            return;
        }
        if since_last.is_some_and(|since| since >= MOVE.max(pause)) {
            returning.last = None;
            self.tell_returned();
        }
    }

    /// Pings each relay over the paths whose round trips matter, on the connection with the shortest one, which counts.
    fn measure(&self, now: Instant, lines: &[Arc<Line>]) {
        let paths = self.returning.paths.iter().zip(&self.uplink.paths).enumerate();
        for (path, (_, Path { relays, .. })) in paths.filter(|(_, (path, _))| path.is_measured(now)) {
            for relay in 0..relays.len() {
                let usable = over((path, relay), lines).filter(|line| line.is_usable());
                if let Some(line) = usable.min_by_key(|line| line.round_trip()) {
                    line.ping();
                }
            }
        }
    }

    /// Tells listeners how many tunnels have come back to each path.
    fn tell_returned(&self) {
        for path in &self.uplink.paths {
            let tunnels = path.returned.swap(0, Relaxed);
            if tunnels > 0 {
                let path = &path.name;
                info!(path, tunnels, "tunnels went back to a better path");
                self.uplink.changes.tell(format!("{tunnels} tunnels went back to the path {path}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{future::join_all, poll};
    use test_relay::{Does, PATIENCE, TestRelay};

    use super::super::steadiness::STEADY;
    use super::*;
    use crate::{Uplink, UplinkResources, task::SPARE, work::Step};

    #[tokio::test]
    async fn a_path_has_a_connection_to_each_relay_at_which_tunnels_of_another_path_are() {
        let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
        let endpoints = || relays.iter().map(TestRelay::endpoint).collect();
        let path = |name: &str| Path::new(name, endpoints());
        let uplink = Uplink::over(vec![path("a"), path("b")], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let mut work = Work::new(&uplink);
        let connect = async |work: &mut Work<'_>, at| {
            let (at, connected) = uplink.attempt(at).await;
            work.attempted(at, connected);
            uplink.lines().pop().unwrap()
        };
        let first = connect(&mut work, (0, 0)).await;
        let far = connect(&mut work, (1, 1)).await;
        connect(&mut work, (1, 0)).await;
        assert!(matches!(work.next(), Step::Nothing), "no tunnel is at the other relay");

        let (_place, mut tunnel) = (far.link().unwrap(), Box::pin(far.recalled()));
        assert!(poll!(&mut tunnel).is_pending());
        first.note_slow(true);
        assert!(matches!(work.next(), Step::Nothing), "a slow path takes no tunnels");
        first.note_slow(false);
        uplink.state.send_modify(|state| state.chosen.path = Some(1));
        assert!(matches!(work.next(), Step::Connect((0, 1))), "the path that an operator has chosen may fail");
        uplink.state.send_modify(|state| state.chosen.path = None);
        let near = connect(&mut work, (0, 1)).await;
        assert!(matches!(work.next(), Step::Nothing), "one connection is enough");
        assert!(may_return(&far, &near));

        let late = Instant::now() + 2 * SPARE;
        uplink.close_spare(late);
        assert!(!near.is_closed() && !far.is_closed(), "tunnels may come");
        far.doubt(true);
        uplink.close_spare(late);
        assert!(!near.is_closed(), "they are about to come");
        far.doubt(false);
        let lines = uplink.lines();
        work.look_for_better(late, &lines);
        work.look_for_better(late + STEADY, &lines);
        assert!(poll!(&mut tunnel).is_ready());
        drop(tunnel);
        uplink.close_spare(late);
        assert!(near.is_closed() && !first.is_closed(), "no tunnel can come");
    }

    #[tokio::test]
    async fn only_tunnels_that_can_go_back_to_a_path_to_their_relay_are_asked() {
        let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
        let path = |relay: usize| Path::new(&relay.to_string(), vec![relays[relay].endpoint()]);
        let uplink = Uplink::over([0, 0, 1].map(path).into(), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let lines = join_all((0..3).map(|path| uplink.connect(path))).await;
        let mut work = Work::new(&uplink);
        let (mut second, mut third) = (Box::pin(lines[1].recalled()), Box::pin(lines[2].recalled()));
        let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(lines[1].recalled())).collect();
        assert!(poll!(&mut second).is_pending() && poll!(&mut third).is_pending());
        for tunnel in &mut waiting {
            assert!(poll!(tunnel).is_pending());
        }
        assert!(may_return(&lines[1], &lines[0]) && !may_return(&lines[0], &lines[1]), "the first has no tunnel");
        assert!(!may_return(&lines[2], &lines[0]), "it leads to another relay");

        let begun = Instant::now();
        work.look_for_better(begun, &lines);
        assert!(work.returning.asked.is_empty() && poll!(&mut second).is_pending());
        work.look_for_better(begun + STEADY, &lines);
        assert!(poll!(&mut second).is_ready() && poll!(&mut third).is_pending());
        let left = |work: &Work<'_>| work.returning.asked.iter().map(|(_, left)| *left).collect::<Vec<_>>();
        assert_eq!(left(&work), [9]);
        waiting.truncate(4);
        work.look_for_better(begun + STEADY, &lines);
        assert_eq!(left(&work), [4], "five have ended");
        lines[1].leave();
        work.look_for_better(begun + STEADY, &lines);
        assert!(left(&work).is_empty(), "all leave the path");
    }

    #[tokio::test]
    async fn a_path_without_tunnels_does_not_keep_the_long_round_trip_that_it_began_with() {
        let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
        let path = |relay: usize| Path::new(&relay.to_string(), vec![relays[relay].endpoint()]);
        let uplink = Uplink::over([0, 1].map(path).into(), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let lines = join_all((0..2).map(|path| uplink.connect(path))).await;
        let mut work = Work::new(&uplink);
        let long = Duration::from_secs(10);
        lines[0].path.measured(long, long);
        work.look_for_better(Instant::now(), &lines);
        tokio::time::timeout(PATIENCE, async {
            while lines[0].round_trip() >= long {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    }

    #[test]
    fn a_tunnel_is_asked_once_the_one_before_may_have_moved() {
        assert_eq!([20, 100, 600].map(|ms| pause(Duration::from_millis(ms)).as_millis()), [200, 200, 1_200]);
    }
}
