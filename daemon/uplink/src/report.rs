//! How each path of an uplink performs.

use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::Duration};

use relay_client::endpoint::Endpoint;

use super::Uplink;
use crate::path::{Path, PathView};

/// The state of a path.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Its name.
    pub name: String,
    /// The name of the hop that it leads through; empty without one.
    pub via: String,
    /// Whether it takes tunnels.
    pub condition: Condition,
    /// Whether an operator has chosen it, so that new tunnels take it while it has room.
    pub is_chosen: bool,
    /// The relays that its connections lead to, each once; without a connection, those of the configuration.
    pub relays: Vec<String>,
    /// The IDs of its connections.
    pub connections: Vec<u64>,
    /// How many tunnels and requests are on it.
    pub tunnels: usize,
    /// Of these, requests for models.
    pub requests: usize,
    /// Of the tunnels and requests that are open, how many are of each class: the class in which they took their place.
    pub classes: BTreeMap<String, usize>,
    /// The smoothed round trip of its fastest connection that takes tunnels, or else of its fastest one that answers, without the time for
    /// which the relay may have held back acknowledgements; 0 if none answers.
    pub smoothed_rtt: Duration,
    /// The shortest round trip, without that time; 0 if it is not known.
    pub min_rtt: Duration,
    /// Its assumed rate, in bytes per second.
    pub bytes_per_sec: u64,
    /// Its current use by all connections, in bytes per second, in the direction with more traffic.
    pub used_bytes_per_sec: u64,
    /// QUIC packets that its connections sent.
    pub sent_packets: u64,
    /// Of these, the lost packets.
    pub lost_packets: u64,
    /// UDP tunnels that moved to another path, since the uplink was made: a reload that changes relays, credentials, schedule, or paths in
    /// more than their terms makes a new uplink.
    pub moved: u64,
}

/// Whether a path takes tunnels, from the best state to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// It takes tunnels.
    Up,
    /// Its round trips are several times as long as they can be, and another path's are not: it takes no tunnels until they are shorter.
    Slow,
    /// It has a connection that does not answer, and that is probed until it does.
    Silent,
    /// It has no connection.
    Down,
}

/// Returns names without repetitions, in order of their first occurrence.
fn unique(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut unique = Vec::new();
    for name in names {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    unique
}

impl PathReport {
    /// Adds the report of the same path from the connections of other local addresses.
    pub fn join(&mut self, other: &Self) {
        let shorter = |ours: Duration, theirs: Duration| match (ours.is_zero(), theirs.is_zero()) {
            (true, _) => theirs,
            (_, true) => ours,
            _ => ours.min(theirs),
        };
        self.smoothed_rtt = shorter(self.smoothed_rtt, other.smoothed_rtt);
        self.min_rtt = shorter(self.min_rtt, other.min_rtt);
        self.condition = self.condition.min(other.condition);
        self.is_chosen |= other.is_chosen;
        self.bytes_per_sec = self.bytes_per_sec.max(other.bytes_per_sec);
        self.used_bytes_per_sec += other.used_bytes_per_sec;
        self.tunnels += other.tunnels;
        self.requests += other.requests;
        other.classes.iter().for_each(|(class, count)| *self.classes.entry(class.clone()).or_default() += count);
        self.sent_packets += other.sent_packets;
        self.lost_packets += other.lost_packets;
        self.moved += other.moved;
        self.relays = unique(self.relays.drain(..).chain(other.relays.iter().cloned()));
        self.connections.extend_from_slice(&other.connections);
    }
}

impl Condition {
    /// Returns its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Slow => "slow",
            Self::Silent => "silent",
            Self::Down => "down",
        }
    }
}

impl Uplink {
    /// Returns the state of each path, in the order of the configuration; empty if the configuration has no paths.
    #[must_use]
    pub fn path_states(&self) -> Vec<PathReport> {
        if !self.has_paths() {
            return Vec::new();
        }
        let (state, views) = (self.state.borrow(), self.views.lock());
        let chosen = state.chosen().path;
        let of = |(place, (path, view)): (usize, (&Path, &PathView))| {
            let lines: Vec<_> =
                state.lines.iter().filter(|line| line.path_place == place && !line.is_closed()).collect();
            let usable = lines.iter().filter(|line| line.is_usable()).count();
            let condition = match (usable, lines.iter().any(|line| line.is_doubted())) {
                (1.., _) => Condition::Up,
                (0, _) if lines.iter().any(|line| line.is_slow() && !line.is_doubted()) => Condition::Slow,
                (0, true) => Condition::Silent,
                (0, false) => Condition::Down,
            };
            let path_of = lines.iter().map(|line| line.path.get());
            let (sent, lost) =
                path_of.fold((0, 0), |(sent, lost), it| (sent + it.sent_packets, lost + it.lost_packets));
            let mut classes = BTreeMap::new();
            lines.iter().for_each(|line| line.count_classes(&mut classes));
            PathReport {
                name: path.name.clone(),
                via: path.relays.first().and_then(Endpoint::via).unwrap_or_default().to_owned(),
                condition,
                is_chosen: chosen == Some(place),
                relays: match lines.is_empty() {
                    true => unique(path.relays.iter().map(|relay| relay.origin().to_string())),
                    false => unique(lines.iter().map(|line| line.way().relay.to_string())),
                },
                connections: lines.iter().map(|line| line.id).collect(),
                tunnels: lines.iter().map(|line| line.tunnels()).sum(),
                requests: lines.iter().map(|line| line.requests()).sum(),
                classes,
                smoothed_rtt: Duration::from_nanos(view.path.smoothed_rtt_ns),
                min_rtt: Duration::from_nanos(view.path.min_rtt_ns),
                bytes_per_sec: view.path.bytes_per_sec,
                used_bytes_per_sec: view.estimate.used_bytes_per_sec(),
                sent_packets: sent,
                lost_packets: lost,
                moved: path.moved.load(Relaxed),
            }
        };
        self.paths.iter().zip(&*views).enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prometheus_client::registry::Registry;
    use quic::class::Membership;
    use test_relay::{Does, PATIENCE, TestRelay};
    use tokio::time::Instant;

    use super::{
        super::{Destination, UplinkResources},
        *,
    };
    use crate::{line::Line, path::LOOK, tests::paths_to, work::Work};

    #[tokio::test]
    async fn a_path_is_as_good_as_the_best_of_its_reports() {
        let path = Path::new("a", Vec::new());
        let uplink = Uplink::over(vec![path], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let report = |condition| PathReport { condition, ..uplink.path_states().remove(0) };
        use Condition::{Down, Silent, Slow, Up};
        for (one, other, best) in [(Down, Silent, Silent), (Slow, Down, Slow), (Silent, Up, Up), (Down, Down, Down)] {
            let mut joined = report(one);
            joined.join(&report(other));
            assert_eq!(joined.condition, best);
        }
    }

    #[tokio::test]
    async fn a_path_names_the_relays_of_the_configuration_until_it_has_a_connection() {
        let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
        let path = Path::new("a", relays.iter().map(TestRelay::endpoint).collect());
        let uplink = Uplink::over(vec![path], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let named = || uplink.path_states()[0].relays.clone();
        let [first, second] = [0, 1].map(|relay: usize| relays[relay].address.to_string());
        assert_eq!(named(), [first.clone(), second]);
        let _line = uplink.connect(0).await;
        assert_eq!(named(), [first]);
    }

    #[tokio::test]
    async fn the_path_that_an_operator_has_chosen_is_reported_until_placements_hold_again() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let chosen = || uplink.path_states().iter().map(|path| path.is_chosen).collect::<Vec<_>>();
        assert_eq!(chosen(), [false, false]);
        let _line = uplink.connect(1).await;
        _ = uplink.clone().prepare_move(&Destination::Path("b".to_owned())).await.unwrap().carry_out();
        assert_eq!(chosen(), [false, true]);
        let mut joined = uplink.path_states().remove(0);
        joined.join(&uplink.path_states()[1]);
        assert!(joined.is_chosen, "other local addresses use it");
        uplink.prefer();
        assert_eq!(chosen(), [false, false]);
    }

    #[tokio::test]
    async fn open_tunnels_are_counted_by_their_class_until_they_end() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let lines = [uplink.connect(0).await, uplink.connect(1).await];
        let classes = |path: usize| uplink.path_states()[path].classes.clone();
        let links: Vec<_> = [0, 0, 1].into_iter().map(|line: usize| lines[line].link().unwrap()).collect();
        assert!(classes(0).is_empty(), "they are opening");
        links.iter().for_each(|link| link.carries_traffic(Arc::default(), &Membership::default().get(), None));
        let default = |count| BTreeMap::from([("default".to_owned(), count)]);
        assert_eq!([classes(0), classes(1)], [default(2), default(1)]);
        let mut joined = uplink.path_states().remove(0);
        joined.join(&uplink.path_states()[1]);
        assert_eq!(joined.classes, default(3), "of all local addresses");
        drop(links);
        assert!(classes(0).is_empty() && classes(1).is_empty());
    }

    #[tokio::test]
    async fn a_path_that_tunnels_leave_or_that_is_slow_still_has_a_round_trip_and_its_load() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let lines = [uplink.connect(0).await, uplink.connect(1).await];
        let link = lines[0].link().unwrap();
        link.carries_traffic(Arc::default(), &Membership::default().get(), None);
        // Nothing waits from here on, so the connections measure nothing themselves.
        let ms = Duration::from_millis;
        lines[0].path.measured(ms(425), ms(425));
        let shown = |uplink: &Uplink| {
            let placed = uplink.views.lock()[0].path.placed.len();
            (uplink.path_states()[0].smoothed_rtt, placed)
        };
        let mut work = Work::new(&uplink);
        work.look();
        assert_eq!(shown(&uplink), (ms(400), 1));
        lines[0].leave();
        work.look();
        assert_eq!(shown(&uplink), (ms(400), 1), "an operator has chosen the other path");
        let refresh = |lines: &[&Arc<Line>]| uplink.views.lock()[0].refresh(Instant::now(), lines);
        lines[0].note_slow(true);
        refresh(&[&lines[0]]);
        assert_eq!(shown(&uplink), (ms(400), 1));
        lines[1].path.measured(ms(925), ms(925));
        refresh(&[&lines[0], &lines[1]]);
        assert_eq!(shown(&uplink), (ms(900), 1), "the one that takes tunnels counts");
        lines.iter().for_each(|line| line.doubt(true));
        refresh(&[&lines[0], &lines[1]]);
        assert_eq!(shown(&uplink), (Duration::ZERO, 1), "none answers");
    }

    #[tokio::test]
    async fn a_single_path_has_a_round_trip_and_a_rate_too() {
        let relay = TestRelay::start(Does::Echo, true);
        let path = Path::new("a", vec![relay.endpoint()]);
        let uplink = Uplink::over(vec![path], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let (_moves, moves) = tokio::sync::watch::channel(Default::default());
        let running = uplink.clone();
        let running = tokio::spawn(async move { running.run(moves).await });
        let is_known = |path: &PathReport| !path.smoothed_rtt.is_zero() && path.bytes_per_sec > 0;
        let known = async {
            while !is_known(&uplink.path_states()[0]) {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(PATIENCE, known).await.expect("it is examined");
        let mut work = Work::new(&uplink);
        work.look();
        assert!(work.look_at > Instant::now() + 10 * LOOK, "seldom");
        running.abort();
    }

    #[tokio::test]
    async fn bytes_from_before_a_break_do_not_count_as_use_of_the_path_afterwards() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let (line, begun) = (uplink.connect(0).await, Instant::now());
        assert!(line.path.get().received_bytes > 0);
        let mut views = uplink.views.lock();
        for (look, lines) in (1..).zip([&[&line][..], &[], &[], &[&line], &[&line]]) {
            views[0].refresh(begun + 10 * look * LOOK, lines);
            assert_eq!(views[0].estimate.bytes_per_sec(), 0);
        }
    }

    #[tokio::test]
    async fn moved_tunnels_are_counted_by_the_path_that_they_left_also_over_a_reload() {
        let (relay, resources) = (TestRelay::start(Does::Echo, true), UplinkResources::default());
        let mut registry = Registry::default();
        resources.counters.register(&mut registry);
        let told = |path: &str, count: u64| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let sample = format!("edge_path_moved_tunnels_total{{path=\"{path}\"}} {count}\n");
            assert!(text.contains(&sample), "{sample}{text}");
        };
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), resources.clone());
        let lines = [uplink.connect(0).await, uplink.connect(0).await, uplink.connect(1).await];
        uplink.note_move(&lines[0], &lines[1], false);
        uplink.note_move(&lines[0], &lines[2], false);
        let moved = |uplink: &Uplink| uplink.path_states().iter().map(|path| path.moved).collect::<Vec<_>>();
        assert_eq!(moved(&uplink), [1, 0], "the first stayed on its path");
        drop(uplink);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), resources);
        assert_eq!(moved(&uplink), [0, 0]);
        told("a", 1);
    }
}
