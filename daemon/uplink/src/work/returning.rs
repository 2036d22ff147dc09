//! Tunnels that go back to a better path: once a path has taken tunnels for a while, the tunnels of other paths to the same relay are
//! asked, a few per second, whether they would gain by a move. The round trip of a path that nothing uses is measured meanwhile, because
//! new tunnels choose by it, too. A path that takes tunnels gets a connection to each of its relays at which tunnels of other paths are.

use std::{
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;
use tracing::info;

use super::{
    Work,
    slow::{ASK_SLOW, over},
};
use crate::{Path, line::Line};

/// How long a path must have taken tunnels without a break: an unstable path is no gain. Also the time until the second round, because the
/// estimates of the first may have kept tunnels from moving by chance. The time between two rounds doubles each time.
const STEADY: Duration = Duration::from_secs(15);

/// The longest of these times, after many breaks or rounds.
const STEADIEST: Duration = Duration::from_secs(600);

/// How long after tunnels came back a break no longer counts against the path.
const TRUSTED: Duration = Duration::from_secs(600);

/// How long a path's round trip is measured once it takes tunnels, and before tunnels are asked: that of a handshake, or the smoothed one
/// after an outage, may be hundreds of milliseconds too long, and stays so while nothing uses the path.
const MEASURED: Duration = Duration::from_secs(10);

/// The shortest time between two tunnels that are asked. It exceeds the time between two looks.
const ASK: Duration = Duration::from_millis(200);

/// How long a tunnel may take to move after it was asked, before moves are counted for listeners.
const MOVE: Duration = Duration::from_secs(2);

/// Returns the time between two tunnels that are asked, by the longest round trip of the connections. The second tunnel has to see whether
/// the first has moved, and a move takes a request to the relay.
fn pause(round_trip: Duration) -> Duration {
    ASK.max(2 * round_trip)
}

/// Which tunnels are to be asked.
#[derive(Default)]
pub(super) struct Returning {
    paths: Vec<Steadiness>,
    /// Connections, and how many of their tunnels are still to be asked.
    asked: Vec<(Weak<Line>, usize)>,
    /// When a path's round trip was last measured.
    pinged: Option<Instant>,
    /// When a tunnel was last asked, until moves are told.
    last: Option<Instant>,
}

/// Whether a path takes tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// Takes tunnels.
    Takes,
    /// Takes none on purpose: an operator has moved its tunnels, or its relay is shutting down, and there is no other connection yet.
    Pauses,
    /// Takes none, because it is silent or slow.
    Fails,
}

/// Whether a path has been steady for long enough. A path that tunnels have to leave again soon after they came back must be steady for
/// twice as long the next time, so that the tunnels of an unstable path do not move to and fro.
struct Steadiness {
    /// Since when it takes tunnels.
    since: Option<Instant>,
    /// How long it must take them without a break.
    required: Duration,
    /// When the tunnels of other paths were first asked, if it has taken tunnels ever since.
    asked: Option<Instant>,
    /// When they are asked again, and the time from then until the next round.
    again: Option<(Instant, Duration)>,
    /// Whether a connection has broken since the last look.
    has_broken: bool,
}

impl Default for Steadiness {
    fn default() -> Self {
        Self { since: None, required: STEADY, asked: None, again: None, has_broken: false }
    }
}

impl Steadiness {
    /// Notes at `now` whether the path takes tunnels; only a failure counts against it. Returns whether the tunnels of
    /// other paths are to be asked, which happens less and less often until the path fails again.
    fn look(&mut self, now: Instant, service: Service) -> bool {
        let has_failed = std::mem::take(&mut self.has_broken) || service == Service::Fails;
        let was_asked = self.asked.map(|asked| now.saturating_duration_since(asked));
        if was_asked.is_some_and(|since| since >= TRUSTED) {
            self.required = STEADY;
        }
        if service != Service::Takes {
            (self.since, self.asked, self.again) = (None, None, None);
            if has_failed && was_asked.is_some_and(|since| since < TRUSTED) {
                self.required = (2 * self.required).min(STEADIEST);
            }
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let (due, pause) = self.again.unwrap_or((since + self.required, STEADY));
        if now < due {
            return false;
        }
        self.asked.get_or_insert(now);
        self.again = Some((now + pause, (2 * pause).min(STEADIEST)));
        true
    }

    /// Whether the path's round trip matters: it has just begun to take tunnels, or the tunnels of other paths are to be asked soon.
    fn is_measured(&self, now: Instant) -> bool {
        let Some(since) = self.since else { return false };
        let due = self.again.map_or(since + self.required, |(again, _)| again);
        now < since + MEASURED || now + MEASURED >= due
    }
}

impl Returning {
    /// Notes at `now` the service of each path, and returns the paths to which tunnels may now go back.
    fn steady(&mut self, now: Instant, services: &[Service]) -> Vec<usize> {
        self.paths.resize_with(services.len(), Steadiness::default);
        let paths = self.paths.iter_mut().zip(services).enumerate();
        paths.filter_map(|(place, (path, service))| path.look(now, *service).then_some(place)).collect()
    }

    /// Notes that a connection of a path has ended with an error.
    pub(super) fn note_break(&mut self, path: usize) {
        if let Some(path) = self.paths.get_mut(path) {
            path.has_broken = true;
        }
    }
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
    use quic::h3;
    use test_relay::{Does, PATIENCE, TestRelay};

    use super::{
        Service::{Fails, Takes},
        *,
    };
    use crate::{SPARE, Uplink, UplinkResources, tests::paths_to, work::Step};

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

    /// Returns after how many breaks tunnels are asked, in an hour whose breaks last a second and begin this many seconds apart.
    fn rounds(returning: &mut Returning, begun: Instant, apart_s: u64) -> usize {
        let mut asked = false;
        let mut is_first = |at: u64| {
            let is_good = !(at + 1).is_multiple_of(apart_s);
            let service = if is_good { Takes } else { Fails };
            let is_asked = returning.steady(begun + Duration::from_secs(at), &[service]) == [0];
            let was_asked = asked;
            asked = is_good && (was_asked || is_asked);
            is_asked && !was_asked
        };
        (0..3_600).filter(|at| is_first(*at)).count()
    }

    #[test]
    fn tunnels_that_did_not_go_back_are_asked_again_and_less_and_less_often() {
        let (mut path, begun) = (Steadiness::default(), Instant::now());
        let asked: Vec<_> = (0..300).filter(|at| path.look(begun + Duration::from_secs(*at), Takes)).collect();
        assert_eq!(asked, [15, 30, 60, 120, 240]);
    }

    #[test]
    fn a_path_that_fails_again_and_again_gets_its_tunnels_back_less_and_less_often() {
        let begun = Instant::now();
        for (apart_s, expected) in [(20, 1), (60, 2), (300, 5), (650, 6)] {
            assert_eq!(rounds(&mut Returning::default(), begun, apart_s), expected, "{apart_s}");
        }
    }

    #[tokio::test]
    async fn a_path_whose_tunnels_left_as_planned_is_not_less_trusted_than_before() {
        type Event = fn(&mut Work<'_>, &Arc<Line>);
        let events: [(Event, bool); 6] = [
            (|_, line| line.leave(), false),
            (|_, line| line.retire(), false),
            (|work, line| work.lost(line, Some(&h3::Error::Closed)), false),
            (|_, line| line.doubt(true), true),
            (|_, line| line.note_slow(true), true),
            (|work, line| work.lost(line, None), true),
        ];
        let relay = TestRelay::start(Does::Echo, true);
        for (number, (event, counts)) in (0..).zip(events) {
            let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
            let lines = join_all((0..2).map(|path| uplink.connect(path))).await;
            let (mut work, begun) = (Work::new(&uplink), Instant::now());
            let look = |work: &mut Work<'_>, at: Duration| work.look_for_better(begun + at, &uplink.open_lines());
            look(&mut work, Duration::ZERO);
            look(&mut work, STEADY);
            event(&mut work, &lines[0]);
            look(&mut work, STEADY + ASK);
            let path = &work.returning.paths[0];
            assert!(path.since.is_none() && path.asked.is_none(), "{number}");
            assert_eq!(path.required, if counts { 2 * STEADY } else { STEADY }, "{number}");
        }
    }

    #[test]
    fn a_path_is_measured_for_some_seconds_once_it_takes_tunnels_and_before_tunnels_are_asked() {
        let (mut path, begun) = (Steadiness::default(), Instant::now());
        assert!(!path.is_measured(begun));
        let mut at = |seconds| {
            let now = begun + Duration::from_secs(seconds);
            (path.look(now, Takes), path.is_measured(now))
        };
        assert_eq!(
            [0, 9, 14, 15, 19, 20, 29, 30, 49, 50].map(&mut at),
            [
                (false, true),
                (false, true),
                (false, true),
                (true, false),
                (false, false),
                (false, true),
                (false, true),
                (true, false),
                (false, false),
                (false, true)
            ]
        );
    }

    #[test]
    fn a_path_that_was_good_for_long_after_many_breaks_is_trusted_again() {
        let (mut returning, begun) = (Returning::default(), Instant::now());
        rounds(&mut returning, begun, 60);
        assert!(returning.paths[0].required > STEADY);
        let calm = begun + Duration::from_secs(3_600);
        assert!(returning.steady(calm, &[Takes]).is_empty());
        assert_eq!(returning.steady(calm + STEADIEST, &[Takes]), [0]);
        assert!(returning.steady(calm + STEADIEST + TRUSTED, &[Fails]).is_empty());
        let again = calm + STEADIEST + TRUSTED + STEADY;
        assert!(returning.steady(again, &[Takes]).is_empty());
        assert_eq!(returning.steady(again + STEADY, &[Takes]), [0]);
    }

    #[test]
    fn a_tunnel_is_asked_once_the_one_before_may_have_moved() {
        assert_eq!([20, 100, 600].map(|ms| pause(Duration::from_millis(ms)).as_millis()), [200, 200, 1_200]);
    }

    #[test]
    fn each_path_has_its_own_rounds_after_each_failure() {
        let (mut returning, begun) = (Returning::default(), Instant::now());
        assert!(returning.steady(begun, &[Takes, Fails]).is_empty());
        assert!(returning.steady(begun + STEADY / 2, &[Takes, Takes]).is_empty());
        assert_eq!(returning.steady(begun + STEADY, &[Takes, Takes]), [0]);
        assert_eq!(
            returning.steady(begun + 2 * STEADY, &[Takes, Takes]),
            [0, 1],
            "the first again, the second after a while"
        );
        assert_eq!(returning.steady(begun + 3 * STEADY, &[Takes, Takes]), [1]);
        assert!(returning.steady(begun + 4 * STEADY, &[Fails, Takes]).is_empty());
        assert_eq!(returning.steady(begun + 5 * STEADY, &[Takes, Takes]), [1]);
        assert!(returning.steady(begun + 6 * STEADY, &[Takes, Takes]).is_empty(), "it failed soon");
        assert_eq!(returning.steady(begun + 7 * STEADY, &[Takes, Takes]), [0]);
    }
}
