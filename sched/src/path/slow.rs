//! Whether a path, or one relay of a path, has become so slow that its tunnels should move to another path or relay.
//!
//! A distant path is not slow: placements know its round trip and choose it where that pays. A slow path takes several
//! times its own shortest round trip, because something on the way, or the host at its end, is overloaded. It is slow only
//! in comparison: without another path or relay there is nowhere to go.

/// A slow path's smoothed round trip is at least this many times its shortest one.
const SHORTEST: u64 = 4;

/// By how much a slow path's round trip exceeds that of another path, in nanoseconds: the gain has to be worth the cost of
/// a move, which is a new request and another source address toward the target.
const EXCESS_NS: u64 = 200_000_000;

/// How long both conditions must hold before tunnels leave, in nanoseconds: a burst fills a queue for a second or two.
const SLOW_FOR_NS: u64 = 3_000_000_000;

/// How long round trips must have been long before another relay is worth a connection to compare with, in nanoseconds.
const LONG_FOR_NS: u64 = 1_000_000_000;

/// How long the path must have been normal again, in nanoseconds, before it takes tunnels again. Once the load has left,
/// every path is fast.
const GOOD_FOR_NS: u64 = 15_000_000_000;

/// The round trips of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTrips {
    /// The smoothed one (RFC 9002 §5.3), in nanoseconds.
    pub smoothed_ns: u64,
    /// The shortest one since the path's connections began, in nanoseconds. The transport's own (RFC 9002 §5.2) may
    /// hold the delay of a queue.
    pub shortest_ns: u64,
}

/// The result of one look at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlownessChange {
    /// No change.
    None,
    /// It has become slow: tunnels that can move should move.
    Slow,
    /// It is no longer slow, or there is no other path.
    Good,
}

/// The slowness of one path. Initially, the path is not slow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slowness {
    is_slow: bool,
    /// Since when the measurements contradict `is_slow`.
    since_ns: Option<u64>,
    /// Since when round trips are as long as a slow path's, whatever others have.
    long_since_ns: Option<u64>,
}

impl RoundTrips {
    /// Whether they are long beside the shortest one.
    fn are_long(&self, times: u64) -> bool {
        self.smoothed_ns >= self.shortest_ns.saturating_mul(times)
    }
}

impl Slowness {
    /// Whether it currently counts as slow.
    #[must_use]
    pub fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Whether round trips were long at the last call of [`needs_other`](Self::needs_other), however long before they had been.
    #[must_use]
    pub fn is_long(&self) -> bool {
        self.long_since_ns.is_some()
    }

    /// Whether measurements contradict the judgement, so that it changes soon unless they change.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Whether there should be a connection to compare the path with, at `now_ns`: it is slow, or its round trips have been long for a
    /// second, by the margins that make a path slow, measured against its own shortest round trip.
    pub fn needs_other(&mut self, now_ns: u64, path: Option<RoundTrips>) -> bool {
        let exceeds = |path: &RoundTrips| path.smoothed_ns >= path.shortest_ns.saturating_add(EXCESS_NS);
        if !path.is_some_and(|path| path.are_long(SHORTEST) && exceeds(&path)) {
            self.long_since_ns = None;
            return self.is_slow;
        }
        let since_ns = *self.long_since_ns.get_or_insert(now_ns);
        self.is_slow || now_ns.saturating_sub(since_ns) >= LONG_FOR_NS
    }

    /// Judges a path at `now_ns` against the lowest smoothed round trip of the other paths that could take its tunnels, if
    /// there are any. A path without round trips keeps its state.
    pub fn look(&mut self, now_ns: u64, path: Option<RoundTrips>, other_ns: Option<u64>) -> SlownessChange {
        let Some(other_ns) = other_ns else {
            self.since_ns = None;
            return if std::mem::take(&mut self.is_slow) { SlownessChange::Good } else { SlownessChange::None };
        };
        let Some(path) = path else { return SlownessChange::None };
        let (limit, excess_ns) = if self.is_slow { (SHORTEST / 2, EXCESS_NS / 2) } else { (SHORTEST, EXCESS_NS) };
        let is_slow = path.are_long(limit) && path.smoothed_ns >= other_ns.saturating_add(excess_ns);
        if is_slow == self.is_slow {
            self.since_ns = None;
            return SlownessChange::None;
        }
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        let needed_ns = if is_slow { SLOW_FOR_NS } else { GOOD_FOR_NS };
        if now_ns.saturating_sub(since_ns) < needed_ns {
            return SlownessChange::None;
        }
        (self.is_slow, self.since_ns) = (is_slow, None);
        if is_slow { SlownessChange::Slow } else { SlownessChange::Good }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn path(smoothed_ms: u64, shortest_ms: u64) -> Option<RoundTrips> {
        Some(RoundTrips { smoothed_ns: smoothed_ms * MS, shortest_ns: shortest_ms * MS })
    }

    /// Looks every 50 ms from `from` until `until`, in ms, and returns the changes and their times.
    fn look(
        of: &mut Slowness,
        (from, until): (u64, u64),
        see: impl Fn(u64) -> (Option<RoundTrips>, Option<u64>),
    ) -> Vec<(u64, SlownessChange)> {
        let times = (from..until).step_by(50);
        let seen = times.map(|ms| {
            let (path, other) = see(ms);
            (ms, of.look(ms * MS, path, other.map(|ms| ms * MS)))
        });
        seen.filter(|(_, change)| *change != SlownessChange::None).collect()
    }

    #[test]
    fn a_path_is_slow_after_3_s_at_four_times_its_shortest_round_trip_and_good_after_15_s() {
        let mut slowness = Slowness::default();
        let seen = look(&mut slowness, (0, 30_000), |ms| match ms {
            0..1_000 => (path(30, 20), Some(40)),
            1_000..10_000 => (path(400, 20), Some(40)),
            _ => (path(30, 20), Some(40)),
        });
        assert_eq!(seen, [(4_000, SlownessChange::Slow), (25_000, SlownessChange::Good)]);
    }

    #[test]
    fn a_path_that_is_far_away_is_not_slow_and_neither_is_one_that_all_others_are_no_better_than() {
        let mut slowness = Slowness::default();
        assert_eq!(look(&mut slowness, (0, 60_000), |_| (path(650, 600), Some(20))), [], "a satellite");
        assert_eq!(look(&mut slowness, (0, 60_000), |_| (path(900, 20), Some(800))), [], "the queue is before both");
        assert_eq!(look(&mut slowness, (0, 60_000), |_| (path(150, 5), Some(10))), [], "not worth a move");
        assert_eq!(look(&mut slowness, (0, 60_000), |_| (None, Some(10))), [], "nothing is known");
    }

    #[test]
    fn bursts_change_nothing_in_either_direction() {
        let mut slowness = Slowness::default();
        let bursts = |ms: u64| (if ms % 3_000 < 2_500 { path(500, 20) } else { path(25, 20) }, Some(40));
        assert_eq!(look(&mut slowness, (0, 60_000), bursts), []);
        assert_eq!(
            look(&mut slowness, (60_000, 64_000), |_| (path(500, 20), Some(40))),
            [(63_000, SlownessChange::Slow)]
        );
        let calms = |ms: u64| (if ms % 10_000 < 9_000 { path(25, 20) } else { path(500, 20) }, Some(40));
        assert_eq!(look(&mut slowness, (70_000, 200_000), calms), []);
        // Between the two limits it keeps its state.
        assert_eq!(look(&mut slowness, (200_000, 300_000), |_| (path(150, 20), Some(40))), []);
        assert!(slowness.is_slow());
    }

    #[test]
    fn another_relay_is_needed_after_a_second_of_long_round_trips_and_while_the_path_is_slow() {
        let mut slowness = Slowness::default();
        let mut needs = |ms: u64, path| slowness.needs_other(ms * MS, path);
        assert_eq!([0, 950, 1_000].map(|ms| needs(ms, path(400, 20))), [false, false, true]);
        assert!(!needs(1_050, path(30, 20)) && !needs(1_100, path(400, 20)), "the next second counts from zero");
        assert!(!needs(9_000, path(700, 600)) && !needs(9_000, path(190, 5)), "neither far nor short is long");
        assert!(!needs(9_000, None));
        look(&mut slowness, (10_000, 14_000), |_| (path(400, 20), Some(40)));
        assert!(
            slowness.is_slow() && slowness.needs_other(14_000 * MS, path(30, 20)),
            "it is compared until it is good"
        );
    }

    #[test]
    fn round_trips_are_long_from_the_first_look_and_a_judgement_is_in_doubt_until_it_changes() {
        let mut slowness = Slowness::default();
        slowness.needs_other(0, path(400, 20));
        assert!(slowness.is_long() && !slowness.is_in_doubt());
        slowness.look(0, path(400, 20), Some(40 * MS));
        assert!(slowness.is_in_doubt() && !slowness.is_slow());
        slowness.look(SLOW_FOR_NS, path(400, 20), Some(40 * MS));
        assert!(slowness.is_slow() && !slowness.is_in_doubt());
        slowness.needs_other(SLOW_FOR_NS, path(30, 20));
        slowness.look(SLOW_FOR_NS, path(30, 20), Some(40 * MS));
        assert!(!slowness.is_long() && slowness.is_in_doubt());
    }

    #[test]
    fn the_only_path_that_is_left_is_good_at_once() {
        let mut slowness = Slowness::default();
        let seen = look(&mut slowness, (0, 6_000), |ms| (path(500, 20), (ms < 5_000).then_some(40)));
        assert_eq!(seen, [(3_000, SlownessChange::Slow), (5_000, SlownessChange::Good)]);
    }
}
