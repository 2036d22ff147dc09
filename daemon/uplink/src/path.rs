//! The paths of an edge: the end of each path, its measurements, and the tunnels and requests on it.
//!
//! A path is one connection, or a few, to the relays at its end; a tunnel or request stays on the path that it was placed on.
//! [`sched::path`] chooses that path from the measurements of the live connections.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use pacing::path::PathState;
use quic::class::{Class, Terms};
use relay_client::{endpoint::Endpoint, exit::Exit};
use sched::{
    path::{self, Placed, Placement, StreamProfile, precedence::Precedence},
    stream::{Discipline, Level},
};
use tokio::time::Instant;

use super::{
    line::Line,
    sizes::{self, Sizes, TunnelLoad},
};

pub(crate) mod changes;
mod estimate;
mod idle;
pub(crate) mod pulse;

use estimate::Estimate;
use idle::LatestLoss;

/// How often connections are examined if there is another path, relay or gateway.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// How often the connections of a single path to a single relay are examined. Only the path's report depends on that.
pub(crate) const REPORT: Duration = Duration::from_secs(1);

/// A path, and the relays at its end.
pub struct Path {
    /// Its name; empty if the configuration has no paths.
    pub(crate) name: String,
    /// How its packets leave, for people; empty if the routes decide.
    pub(crate) exit: String,
    /// The relays, in order of preference.
    pub(crate) relays: Vec<Endpoint>,
    /// How many UDP tunnels moved from it to another path.
    pub(crate) moved: AtomicU64,
    /// How many UDP tunnels have come back to it, because it suits them better, since listeners were last told.
    pub(crate) returned: AtomicU64,
}

impl Path {
    /// Returns a path to these relays, which are in order of preference. Its name is empty if the configuration has no paths.
    #[must_use]
    pub fn new(name: &str, relays: Vec<Endpoint>) -> Self {
        let (moved, returned) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { name: name.to_owned(), exit: String::new(), relays, moved, returned }
    }

    /// Says that its packets leave by this exit.
    #[must_use]
    pub fn leaving(self, exit: &Exit) -> Self {
        Self { exit: exit.to_string(), ..self }
    }
}

/// The settings of a path that concern only placements. A change of them needs no new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathTerms {
    /// The gain that a tunnel needs to be placed on it.
    pub cost: Duration,
    /// Its rate in bytes per second, if it was configured; otherwise it is measured.
    pub rate: Option<u64>,
}

/// The requirements of a tunnel or a request on paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathDemand {
    /// How its path is chosen.
    pub(crate) placement: Placement,
    /// The known properties of the tunnel or request.
    pub(crate) request: StreamProfile,
}

impl PathDemand {
    /// Returns the demand of a tunnel of a class. It is expected to carry as much as earlier tunnels did.
    #[must_use]
    pub(crate) fn of(class: &Class, sizes: &Sizes) -> Self {
        let policy = class.policy();
        let request = StreamProfile {
            bytes: sizes.expected(&policy.name),
            weight: policy.weight.into(),
            precedence: sizes::precedence(class, None),
            is_urgent: policy.level == Level::High,
            // A tunnel is neither.
            is_idempotent: false,
            is_divisible: false,
        };
        Self { placement: policy.placement, request }
    }

    /// Like [`of`](Self::of), for an open tunnel, if its load is known.
    #[must_use]
    pub(crate) fn of_open(class: &Class, sizes: &Sizes, load: Option<TunnelLoad>) -> Self {
        let Self { placement, request } = Self::of(class, sizes);
        let bytes = load.map_or(request.bytes, |load| load.left());
        Self { placement, request: StreamProfile { bytes, ..request } }
    }

    /// Returns the demand of a request for a model with these terms and this size of its body. It may be sent twice, because an answer
    /// changes nothing at an engine.
    #[must_use]
    pub(crate) fn of_request(terms: &Terms, sizes: &Sizes, body_bytes: u64) -> Self {
        let Self { placement, request } = Self::of(&terms.class, sizes);
        let (bytes, signal) = (request.bytes.max(body_bytes), terms.signal.as_ref());
        let precedence = sizes::precedence(&terms.class, signal);
        Self { placement, request: StreamProfile { bytes, precedence, is_idempotent: true, ..request } }
    }

    /// Returns the tunnel or request as one on a path.
    #[must_use]
    pub(crate) fn placed(&self) -> Placed {
        self.request.part(self.request.bytes)
    }

    /// Returns the request and the paths for a placement: weights, levels, priorities and `i` count as far as the connections' discipline
    /// goes by them.
    #[must_use]
    pub(crate) fn as_served(
        &self,
        mut paths: Vec<path::CandidatePath>,
        discipline: Discipline,
    ) -> (StreamProfile, Vec<path::CandidatePath>) {
        let mut request = self.request;
        let serve = |weight: &mut u32, precedence: &mut Precedence| {
            *weight = sizes::share(*weight, *precedence, discipline);
            *precedence = precedence.under(discipline);
        };
        paths.iter_mut().flat_map(|path| &mut path.placed).for_each(|it| serve(&mut it.weight, &mut it.precedence));
        serve(&mut request.weight, &mut request.precedence);
        (request, paths)
    }
}

/// What is known of one path, brought up to date by [`PathView::refresh`].
#[derive(Debug, Default)]
pub(crate) struct PathView {
    /// What placements see, before [`PathDemand::as_served`] applies the discipline.
    pub(crate) path: path::CandidatePath,
    /// What went over it.
    pub(crate) estimate: Estimate,
    /// The IDs of the connections whose traffic the estimate counts.
    counted: Vec<u64>,
    loss: LatestLoss,
    terms: PathTerms,
    /// The measured rate in bytes per second, which counts if none is configured.
    measured: u64,
    looked: Option<Instant>,
}

/// The assumed rate of a path without measurements, so low that placements prefer other paths.
const UNKNOWN_BYTES_PER_SEC: u64 = 12_500;

impl PathView {
    /// Whether it was refreshed while it had a connection that answers.
    #[must_use]
    pub(crate) fn is_known(&self) -> bool {
        self.path.smoothed_rtt_ns > 0
    }

    /// Sets the terms of the path, which placements see at once.
    pub(crate) fn set_terms(&mut self, terms: PathTerms) {
        self.terms = terms;
        self.path.cost_ns = ns(terms.cost);
        self.path.bytes_per_sec = terms.rate.unwrap_or(self.measured);
    }

    /// Examines the open connections of the path. All of them count as its load, even while their tunnels move elsewhere.
    /// Round trips and windows come from the connections that take tunnels. If there are none, because the path is slow
    /// or tunnels leave it, they come from the connections that answer. The handshake of a connection counts as its
    /// round trip until there is a sample.
    pub(crate) fn refresh(&mut self, now: Instant, lines: &[&Arc<Line>]) {
        let since = self.looked.replace(now).map_or(LOOK, |looked| now.saturating_duration_since(looked));
        let counted = lines.iter().map(|line| line.id).collect();
        if std::mem::replace(&mut self.counted, counted) != self.counted {
            self.estimate.restart();
        }
        let states: Vec<_> = lines.iter().map(|line| line.path.get()).collect();
        let measured = |is_measured: fn(&Line) -> bool| {
            let lines = lines.iter().zip(&states).filter(move |(line, _)| is_measured(line));
            lines.map(|(line, path)| PathState { smoothed_rtt: path.smoothed_rtt.or(Some(line.handshake)), ..*path })
        };
        let mut measuring: Vec<_> = measured(Line::is_usable).collect();
        if measuring.is_empty() {
            measuring = measured(|line| !line.is_doubted()).collect();
        }
        let placed = lines.iter().flat_map(|line| line.placed(since)).collect();
        self.examine(now, (&states, &measuring), placed);
    }

    /// Takes over the bytes that `all` connections of the path have carried, the measurements of the connections in
    /// `paths`, and the tunnels and requests on the path.
    fn examine(&mut self, now: Instant, (all, paths): (&[PathState], &[PathState]), placed: Vec<Placed>) {
        let sum = |of: fn(&PathState) -> u64| all.iter().map(of).sum::<u64>();
        self.estimate.note(now, sum(|path| path.sent_bytes), sum(|path| path.received_bytes));
        self.loss.note(now, sum(|path| path.lost_packets));
        let shortest = |of: fn(&PathState) -> Option<Duration>| {
            let round_trips = paths.iter().filter_map(|path| of(path).map(|rtt| idle::without_ack_delay(rtt, path)));
            round_trips.min().map_or(0, ns)
        };
        let (smoothed_rtt_ns, min_rtt_ns) = (shortest(|path| path.smoothed_rtt), shortest(|path| path.min_rtt));
        // The rate at which one window per round trip passes.
        let window_bytes = paths.iter().map(|path| self.loss.window_bytes(now, path)).sum::<u64>();
        let window = u128::from(window_bytes) * 1_000_000_000 / u128::from(smoothed_rtt_ns.max(1));
        let window = if smoothed_rtt_ns == 0 { 0 } else { u64::try_from(window).unwrap_or(u64::MAX) };
        let measured = self.estimate.bytes_per_sec().max(window).max(UNKNOWN_BYTES_PER_SEC);
        self.path = path::CandidatePath {
            smoothed_rtt_ns,
            min_rtt_ns,
            window_bytes: 0,
            backlog_bytes: sum(|path| path.in_flight_bytes),
            // Traffic that enters at an edge consists of requests.
            lead_ns: smoothed_rtt_ns / 2,
            placed,
            ..path::CandidatePath::default()
        };
        self.measured = measured;
        self.set_terms(self.terms);
        // The edge does not know the relay's window. It allowed the measured rate, and begins as large as the edge's window. So the edge
        // assumes a window smaller than the path only if a rate is configured.
        let window_bytes = (u128::from(measured) * u128::from(self.path.shortest_rtt_ns())).div_ceil(1_000_000_000);
        self.path.window_bytes = u64::try_from(window_bytes).unwrap_or(u64::MAX);
    }
}

/// Returns a time in nanoseconds, at most [`u64::MAX`].
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use config::policy::Policy;
    use masque::priority::Priority;
    use quic::class::PolicyRole;
    use role::classes::Classes;
    use sched::{
        path::{CandidatePath, Placed, back, place},
        stream::Low,
    };

    use super::*;

    /// The only class of a policy, with these keys in TOML.
    fn class(keys: &str) -> Arc<Class> {
        let policy = Policy::from_toml(&format!("[class.models]\n{keys}")).unwrap();
        Classes::new(policy, PolicyRole::Edge, &Default::default(), |_| Default::default())
            .get("models")
            .unwrap()
            .clone()
    }

    /// The share of a request under absolute priority whose client asks for an urgency, if for any.
    fn share(class: &Arc<Class>, urgency: Option<u8>) -> u32 {
        demand(class, urgency).as_served(Vec::new(), Discipline::Abs).0.weight
    }

    fn demand(class: &Arc<Class>, urgency: Option<u8>) -> PathDemand {
        let signal = urgency.map(|_| Priority { urgency, ..Priority::default() });
        PathDemand::of_request(&class.terms(signal.as_ref()), &Sizes::default(), 0)
    }

    /// What a connection without losses has measured, in microseconds and bytes.
    fn measured(smoothed_us: u64, min_us: u64, lifetime_min_us: u64, window_bytes: u64) -> PathState {
        let us = |us| Some(Duration::from_micros(us));
        let (smoothed_rtt, min_rtt, lifetime_min_rtt) = (us(smoothed_us), us(min_us), us(lifetime_min_us));
        PathState { smoothed_rtt, min_rtt, lifetime_min_rtt, window_bytes, ..PathState::default() }
    }

    /// How placements see a path whose connection has measured this at each look for eleven seconds.
    fn seen(of: PathState) -> CandidatePath {
        let (mut view, start) = (PathView::default(), Instant::now());
        (0..220).for_each(|look| view.examine(start + look * LOOK, (&[of], &[of]), Vec::new()));
        view.path
    }

    #[test]
    fn an_idle_path_is_as_fast_as_without_the_delay_of_acknowledgements_also_after_an_outage() {
        let near = seen(measured(300, 300, 300, 12_000));
        assert_eq!((near.smoothed_rtt_ns, near.bytes_per_sec), (300_000, 40_000_000));
        assert_eq!(seen(measured(22_000, 300, 300, 12_000)), near, "only pings were acknowledged");
        let after = PathState { lost_packets: 9, ..measured(25_200, 25_100, 300, 2_400) };
        assert_eq!(seen(after), near, "an outage has reset the shortest round trip and the window");
    }

    #[test]
    fn tunnels_go_back_to_an_idle_path_that_costs_less() {
        let tunnel = StreamProfile { bytes: 64 * 1024, ..demand(&class(""), None).request };
        let mut present = seen(measured(1_000, 300, 300, 60_000));
        present.cost_ns = ns(50 * Duration::from_millis(1));
        let better = |idle| back::better(Placement::Paced, &tunnel, &[seen(idle), present.clone()], 1);
        assert_eq!(better(PathState { lost_packets: 9, ..measured(25_200, 25_100, 300, 2_400) }), Some(0));
        assert_eq!(better(measured(22_000, 300, 300, 12_000)), Some(0));
        assert_eq!(better(measured(225_000, 225_000, 300, 12_000)), None, "its round trip has become longer");
    }

    #[test]
    fn a_path_that_has_become_slower_or_loses_packets_does_not_look_good() {
        let slower = seen(measured(225_000, 225_000, 20_000, 12_000));
        assert_eq!(
            (slower.smoothed_rtt_ns, slower.min_rtt_ns, slower.bytes_per_sec),
            (200_000_000, 200_000_000, 60_000)
        );
        let queue = seen(measured(225_000, 20_000, 20_000, 12_000));
        assert_eq!((queue.smoothed_rtt_ns, queue.min_rtt_ns), (200_000_000, 20_000_000));
        let (mut view, start) = (PathView::default(), Instant::now());
        for look in 0..220 {
            // One packet in ten pings, which are sent four times a second.
            let lost_packets = u64::from(look) / 50;
            let lossy = PathState { lost_packets, ..measured(20_000, 20_000, 20_000, 2_400) };
            view.examine(start + look * LOOK, (&[lossy], &[lossy]), Vec::new());
        }
        assert_eq!(view.path.bytes_per_sec, 120_000);
    }

    #[test]
    fn by_priority_a_request_has_the_share_of_the_urgency_that_it_asks_for_within_its_class() {
        let class = class("placement = \"fstream\"\nweight = 3\n");
        let shares: Vec<_> = (0..8).map(|urgency| share(&class, Some(urgency))).collect();
        // Clients of this class may only lower its priority, which stands for u=3.
        assert!(shares[..4].iter().all(|found| *found == shares[3]), "{shares:?}");
        assert!(shares[3..].windows(2).all(|pair| pair[0] == 16 * pair[1]), "{shares:?}");
        assert_eq!((shares[7], share(&class, None)), (1, shares[3]), "the weight means nothing");
        let (tunnel, _) = PathDemand::of(&class, &Sizes::default()).as_served(Vec::new(), Discipline::Abs);
        assert_eq!(tunnel.weight, shares[3], "a tunnel has its class's");
    }

    #[test]
    fn a_placement_divides_a_path_as_its_discipline_does() {
        // Background traffic of a larger weight fills the faster path. Does an urgent class join it?
        let joins = |placement: &str, keys: &str, discipline| {
            let ask = PathDemand::of(&class(&format!("placement = \"{placement}\"\n{keys}")), &Sizes::default());
            let other = PathDemand::of(&class("priority = 31\nweight = 8\n"), &Sizes::default());
            let path = |bytes_per_sec| CandidatePath {
                smoothed_rtt_ns: 20_000_000,
                bytes_per_sec,
                ..CandidatePath::default()
            };
            let mut paths = vec![path(4_000_000), path(1_000_000)];
            paths[0].placed = vec![other.request.part(10_000_000)];
            let (request, paths) = ask.as_served(paths, discipline);
            place(ask.placement, &request, &paths, 0).unwrap().path() == 0
        };
        for placement in ["paced", "fstream"] {
            let urgent = |discipline| joins(placement, "priority = 255\n", discipline);
            for discipline in [Discipline::Wfq, Discipline::Lottery, Discipline::Ml { low: Low::Wfq }] {
                assert!(!urgent(discipline), "{placement}, {discipline:?}: it gets a ninth of the faster path");
                assert!(joins(placement, "weight = 8\n", discipline), "{placement}, {discipline:?}: it gets half");
            }
            assert!(urgent(Discipline::Abs) && urgent(Discipline::Rr), "{placement}: it gets all, or half");
            let high = |discipline| joins(placement, "level = \"high\"\n", discipline);
            assert!(high(Discipline::Ml { low: Low::Wfq }) && !high(Discipline::Wfq), "{placement}");
        }
    }

    #[test]
    fn an_urgent_request_takes_the_fast_path_beside_others_and_one_in_the_background_avoids_them() {
        let class = class("placement = \"fstream\"\npriorities = [0, 255]\n");
        let path =
            |bytes_per_sec| CandidatePath { smoothed_rtt_ns: 20_000_000, bytes_per_sec, ..CandidatePath::default() };
        let mut paths = vec![path(2_000_000), path(1_000_000)];
        paths[0].placed = vec![demand(&class, None).request.part(10_000_000); 3];
        let chosen = |urgency| {
            let ask = demand(&class, Some(urgency));
            let (request, paths) = ask.as_served(paths.clone(), Discipline::Abs);
            place(ask.placement, &request, &paths, 0).unwrap().path()
        };
        assert_eq!([1, 2, 3, 5].map(chosen), [0, 0, 1, 1], "three equals leave a quarter of the fast path");
    }

    #[test]
    fn a_demand_has_the_level_of_its_class_which_counts_only_under_a_schedule_with_levels() {
        let class = class("level = \"high\"\n");
        let ask = PathDemand::of(&class, &Sizes::default());
        let path =
            |bytes_per_sec| CandidatePath { smoothed_rtt_ns: 20_000_000, bytes_per_sec, ..CandidatePath::default() };
        let mut paths = vec![path(2_000_000), path(1_000_000)];
        paths[0].placed = vec![Placed::by_weight(10_000_000, 1); 3];
        let chosen = |discipline| {
            let (request, paths) = ask.as_served(paths.clone(), discipline);
            place(ask.placement, &request, &paths, 0).unwrap().path()
        };
        assert_eq!((chosen(Discipline::Ml { low: Low::Rr }), chosen(Discipline::Rr)), (0, 1));
    }

    #[test]
    fn the_priority_and_incremental_flag_of_a_request_count_only_if_the_discipline_ranks_by_them() {
        let class = class("priority = 160\npriorities = [0, 255]\n");
        let of = |signal: Option<&str>| {
            let signal = signal.map(|text| Priority::parse(text.as_bytes()).unwrap());
            PathDemand::of_request(&class.terms(signal.as_ref()), &Sizes::default(), 0)
        };
        let path =
            |bytes_per_sec| CandidatePath { smoothed_rtt_ns: 20_000_000, bytes_per_sec, ..CandidatePath::default() };
        // Beside another answer on the faster path: would a second one join it?
        let joins = |discipline, earlier: Option<&str>, later: Option<&str>| {
            let mut paths = vec![path(3_000_000), path(1_000_000)];
            paths[0].placed = vec![of(earlier).request.part(10_000_000)];
            let ask = of(later);
            let (request, paths) = ask.as_served(paths, discipline);
            place(ask.placement, &request, &paths, 0).unwrap().path() == 0
        };
        for (earlier, later, by_priority, by_arrival) in [
            (Some("i"), Some("i"), true, true),
            (Some("i"), None, true, true),
            (None, Some("i"), false, false),
            (None, None, false, false),
            (Some("u=2, i"), Some("u=3"), false, true),
            (Some("u=3"), Some("u=2, i"), true, false),
        ] {
            let found = [Discipline::Abs, Discipline::Fcfs].map(|discipline| joins(discipline, earlier, later));
            assert_eq!(found, [by_priority, by_arrival], "{earlier:?}, then {later:?}");
        }
        assert!(joins(Discipline::Rr, None, None), "answers take turns, whatever they ask for");
    }
}
