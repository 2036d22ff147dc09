//! The steadiness of paths: for how long each has taken tunnels, and which tunnels of other paths are then asked to go back to it.

use std::{sync::Weak, time::Duration};

use tokio::time::Instant;

use crate::line::Line;

/// How long a path must have taken tunnels without a break: an unstable path is no gain. Also the time until the second round, because the
/// estimates of the first may have kept tunnels from moving by chance. The time between two rounds doubles each time.
pub(super) const STEADY: Duration = Duration::from_secs(15);

/// The longest of these times, after many breaks or rounds.
const STEADIEST: Duration = Duration::from_secs(600);

/// How long after tunnels came back a break no longer counts against the path.
const TRUSTED: Duration = Duration::from_secs(600);

/// How long a path's round trip is measured once it takes tunnels, and before tunnels are asked: that of a handshake, or the smoothed one
/// after an outage, may be hundreds of milliseconds too long, and stays so while nothing uses the path.
const MEASURED: Duration = Duration::from_secs(10);

/// Which tunnels are to be asked.
#[derive(Default)]
pub(super) struct Returning {
    pub(super) paths: Vec<Steadiness>,
    /// Connections, and how many of their tunnels are still to be asked.
    pub(super) asked: Vec<(Weak<Line>, usize)>,
    /// When a path's round trip was last measured.
    pub(super) pinged: Option<Instant>,
    /// When a tunnel was last asked, until moves are told.
    pub(super) last: Option<Instant>,
}

/// Whether a path takes tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    /// Takes tunnels.
    Takes,
    /// Takes none on purpose: an operator has moved its tunnels, or its relay is shutting down, and there is no other connection yet.
    Pauses,
    /// Takes none, because it is silent or slow.
    Fails,
}

/// Whether a path has been steady for long enough. A path that tunnels have to leave again soon after they came back must be steady for
/// twice as long the next time, so that the tunnels of an unstable path do not move to and fro.
pub(super) struct Steadiness {
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
    pub(super) fn is_measured(&self, now: Instant) -> bool {
        let Some(since) = self.since else { return false };
        let due = self.again.map_or(since + self.required, |(again, _)| again);
        now < since + MEASURED || now + MEASURED >= due
    }
}

impl Returning {
    /// Notes at `now` the service of each path, and returns the paths to which tunnels may now go back.
    pub(super) fn steady(&mut self, now: Instant, services: &[Service]) -> Vec<usize> {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::future::join_all;
    use quic::h3;
    use test_relay::{Does, PATIENCE, TestRelay};

    use super::{
        Service::{Fails, Takes},
        *,
    };
    use crate::{
        Uplink, UplinkResources,
        tests::paths_to,
        work::{Work, returning::ASK},
    };

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
