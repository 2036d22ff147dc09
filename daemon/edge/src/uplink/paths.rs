//! Operators' requests about paths and relays: how each path performs, and moving tunnels to another relay or path.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use relay_client::{endpoint::Endpoint, error::ConnectError};
use tokio::time::timeout;

use super::{
    Attempts, Uplink,
    state::{Choices, OperatorChoice, State},
};
use crate::path::{Path, PathView};

/// How long connecting to a relay may take after an operator has chosen it.
const MOVE_PATIENCE: Duration = Duration::from_secs(10);

/// Where an operator wants tunnels to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// At the relay with this host and port.
    Relay(String),
    /// On the path with this name.
    Path(String),
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Relay(relay) => f.write_str(relay),
            Self::Path(path) => write!(f, "the path {path}"),
        }
    }
}

/// Why tunnels do not move to a relay or a path.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotMoved {
    /// The configuration has no such relay or path.
    #[error("no {what} {name:?} is configured; there are {known}")]
    Unknown {
        /// "relay" or "path".
        what: &'static str,
        /// The requested host and port, or name.
        name: String,
        /// The relays' hosts and ports, or the paths' names.
        known: String,
    },
    /// The configuration has no paths.
    #[error("no path is configured; add [[path]] to have several uplinks")]
    WithoutPaths,
    /// It cannot be connected to.
    #[error("{0}; tunnels stay where they are")]
    Unreachable(Arc<ConnectError>),
    /// It cannot be reached, and there is no reason yet.
    #[error("no connection to {0} in time; tunnels stay where they are")]
    NoAnswer(String),
    /// The path has no connection that takes tunnels, and there is no reason yet.
    #[error("the path {0} took no tunnels in time; tunnels stay where they are")]
    Unused(String),
}

/// The state of a path.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Its name.
    pub name: String,
    /// The name of the hop that it leads through; empty without one.
    pub via: String,
    /// Whether it takes tunnels.
    pub condition: Condition,
    /// The relays that its connections lead to, each once.
    pub relays: Vec<String>,
    /// The IDs of its connections.
    pub connections: Vec<u64>,
    /// How many tunnels and requests are on it.
    pub tunnels: usize,
    /// Of these, requests for models.
    pub requests: usize,
    /// The smoothed round trip of its fastest connection; 0 without one.
    pub smoothed_rtt: Duration,
    /// The shortest round trip; 0 if it is not known.
    pub min_rtt: Duration,
    /// Its assumed rate, in bytes per second.
    pub bytes_per_sec: u64,
    /// Its present use, in bytes per second, in the direction with more traffic.
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
        self.bytes_per_sec = self.bytes_per_sec.max(other.bytes_per_sec);
        self.used_bytes_per_sec += other.used_bytes_per_sec;
        self.tunnels += other.tunnels;
        self.requests += other.requests;
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
        if self.paths.iter().all(|path| path.name.is_empty()) {
            return Vec::new();
        }
        let (state, views) = (self.state.borrow(), self.views.lock());
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
            PathReport {
                name: path.name.clone(),
                via: path.relays.first().and_then(Endpoint::via).unwrap_or_default().to_owned(),
                condition,
                relays: unique(lines.iter().map(|line| line.way().relay.to_string())),
                connections: lines.iter().map(|line| line.id).collect(),
                tunnels: lines.iter().map(|line| line.tunnels()).sum(),
                requests: lines.iter().map(|line| line.requests()).sum(),
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

    /// Restores the order of preference and the placement of classes, whatever relay and path were chosen before. Open tunnels stay.
    pub fn prefer(&self) {
        self.state.send_modify(|state| (state.chosen, state.pending) = (Choices::default(), Vec::new()));
        self.wanted.notify_one();
    }

    /// Returns the choice of a relay or a path of the configuration.
    fn choice_of(&self, to: &Destination) -> Result<OperatorChoice, NotMoved> {
        match to {
            Destination::Relay(relay) => {
                let leads_there = |path: &Path| path.relays.iter().any(|it| it.origin().to_string() == *relay);
                let paths = self.paths.iter().enumerate().filter(|(_, path)| leads_there(path));
                let paths: Vec<_> = paths.map(|(place, _)| place).collect();
                if paths.is_empty() {
                    return Err(NotMoved::Unknown { what: "relay", name: relay.clone(), known: self.names() });
                }
                Ok(OperatorChoice::Relay { relay: relay.clone(), paths })
            }
            Destination::Path(name) => {
                let known: Vec<_> =
                    self.paths.iter().map(|path| path.name.as_str()).filter(|name| !name.is_empty()).collect();
                if known.is_empty() {
                    return Err(NotMoved::WithoutPaths);
                }
                let unknown = || NotMoved::Unknown { what: "path", name: name.clone(), known: known.join(", ") };
                known.iter().position(|known| known == name).map(OperatorChoice::Path).ok_or_else(unknown)
            }
        }
    }

    /// Returns the results of attempts to connect to each relay of each path that a choice means.
    fn attempts_toward(&self, state: &State, choice: &OperatorChoice) -> Vec<Attempts> {
        let mut found = Vec::new();
        for (place, (path, attempts)) in self.paths.iter().zip(&state.attempts).enumerate() {
            let relays = path.relays.iter().zip(attempts);
            let meant = relays.filter(|(relay, _)| choice.means(place, &relay.origin().to_string()));
            found.extend(meant.map(|(_, attempts)| attempts.clone()));
        }
        found
    }

    /// Connects to a relay, or over a path, to move tunnels there. New tunnels go there as soon as there is a connection; open tunnels
    /// move when the caller [carries out](PreparedMove::carry_out) the move. If the move is dropped before, or this future is, nothing
    /// changes.
    ///
    /// # Errors
    /// There is no such relay or path, or it has no connection that takes tunnels and cannot get one.
    pub async fn prepare_move(self: Arc<Self>, to: &Destination) -> Result<PreparedMove, NotMoved> {
        let choice = self.choice_of(to)?;
        let attempts = |state: &State| self.attempts_toward(state, &choice);
        let before = attempts(&self.state.borrow());
        let failures = |state: &State| -> Vec<Option<Arc<ConnectError>>> {
            let since = attempts(state).into_iter().zip(&before);
            since.map(|(now, before)| now.failure.filter(|_| now.failures > before.failures)).collect()
        };
        let mut changes = self.state.subscribe();
        let prepared = PreparedMove::choose(self.clone(), choice.clone());
        let is_there = async {
            loop {
                {
                    let state = changes.borrow_and_update();
                    if state.usable().any(|line| choice.means(line.path_place, &line.way().relay)) {
                        return true;
                    }
                    // One path, or one relay of the path, may fail at once while another connects.
                    if failures(&state).iter().all(Option::is_some) {
                        return false;
                    }
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        if let Ok(true) = timeout(MOVE_PATIENCE, is_there).await {
            return Ok(prepared);
        }
        let failure = failures(&self.state.borrow()).into_iter().flatten().next();
        Err(match (failure, to) {
            (Some(failure), _) => NotMoved::Unreachable(failure),
            (None, Destination::Relay(relay)) => NotMoved::NoAnswer(relay.clone()),
            (None, Destination::Path(path)) => NotMoved::Unused(path.clone()),
        })
    }
}

/// A relay or a path that was chosen and has a connection, so that tunnels can move there.
pub struct PreparedMove {
    uplink: Arc<Uplink>,
    /// Tells it from other moves that choose the same.
    number: u64,
    choice: OperatorChoice,
}

impl PreparedMove {
    fn choose(uplink: Arc<Uplink>, choice: OperatorChoice) -> Self {
        let mut number = 0;
        uplink.state.send_modify(|state| {
            state.moves += 1;
            number = state.moves;
            state.pending.push((number, choice.clone()));
            state.is_urgent = true;
        });
        uplink.wanted.notify_one();
        Self { uplink, number, choice }
    }

    /// Moves UDP tunnels to the relay or the path; returns the IDs of the connections that they leave. TCP connections and requests for
    /// models stay where they are until they end.
    #[must_use]
    pub fn carry_out(self) -> Vec<u64> {
        let mut is_wanted = false;
        self.uplink.state.send_modify(|state| {
            // An operator may have restored the order of preference meanwhile.
            is_wanted = state.pending.iter().any(|(number, _)| *number == self.number);
            if is_wanted {
                state.chosen = state.chosen.with(&self.choice);
            }
        });
        if !is_wanted {
            return Vec::new();
        }
        let lines = self.uplink.open_lines();
        let others = lines.iter().filter(|line| !self.choice.means(line.path_place, &line.way().relay));
        others.inspect(|line| line.leave()).map(|line| line.id).collect()
    }
}

impl Drop for PreparedMove {
    fn drop(&mut self) {
        self.uplink.state.send_modify(|state| state.pending.retain(|(number, _)| *number != self.number));
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::{super::ConnectionCounters, *};
    use crate::tests::{Does, PATIENCE, TestRelay};

    #[tokio::test]
    async fn a_path_is_as_good_as_the_best_of_its_reports() {
        let path = Path { name: "a".to_owned(), ..Path::plain(Vec::new()) };
        let uplink = Uplink::over(vec![path], None, (PATIENCE, PATIENCE), Arc::default());
        let report = |condition| PathReport { condition, ..uplink.path_states().remove(0) };
        use Condition::{Down, Silent, Slow, Up};
        for (one, other, best) in [(Down, Silent, Silent), (Slow, Down, Slow), (Silent, Up, Up), (Down, Down, Down)] {
            let mut joined = report(one);
            joined.join(&report(other));
            assert_eq!(joined.condition, best);
        }
    }

    /// The choice of a relay to which no path leads.
    fn relay(name: &str) -> OperatorChoice {
        OperatorChoice::Relay { relay: name.to_owned(), paths: Vec::new() }
    }

    fn paths_to(relay: &TestRelay) -> Vec<Path> {
        ["a", "b"].map(|name| Path { name: name.to_owned(), ..Path::plain(vec![relay.endpoint()]) }).into()
    }

    #[tokio::test]
    async fn moved_tunnels_are_counted_by_the_path_that_they_left_also_over_a_reload() {
        let (relay, counters) = (TestRelay::start(Does::Echo, true), Arc::<ConnectionCounters>::default());
        let mut registry = Registry::default();
        counters.register(&mut registry);
        let told = |path: &str, count: u64| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let sample = format!("edge_path_moved_tunnels_total{{path=\"{path}\"}} {count}\n");
            assert!(text.contains(&sample), "{sample}{text}");
        };
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), counters.clone());
        let lines = [uplink.connect(0).await, uplink.connect(0).await, uplink.connect(1).await];
        uplink.note_move(&lines[0], &lines[1], false);
        uplink.note_move(&lines[0], &lines[2], false);
        let moved = |uplink: &Uplink| uplink.path_states().iter().map(|path| path.moved).collect::<Vec<_>>();
        assert_eq!(moved(&uplink), [1, 0], "the first stayed on its path");
        drop(uplink);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), counters);
        assert_eq!(moved(&uplink), [0, 0]);
        told("a", 1);
    }

    #[tokio::test]
    async fn of_moves_side_by_side_only_one_that_succeeds_leaves_its_relay_chosen() {
        let server = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), Arc::default());
        let chosen = || uplink.state.borrow().chosen().relay;
        let choose = |name| PreparedMove::choose(uplink.clone(), relay(name));
        let (first, second) = (choose("a.example:443"), choose("b.example:443"));
        drop(first);
        assert_eq!(chosen().as_deref(), Some("b.example:443"));
        drop(second);
        assert_eq!(chosen(), None);
        let (first, second) = (choose("a.example:443"), choose("b.example:443"));
        assert!(first.carry_out().is_empty());
        drop(second);
        assert_eq!(chosen().as_deref(), Some("a.example:443"));
        let line = uplink.connect(0).await;
        let late = choose("b.example:443");
        uplink.prefer();
        assert!(late.carry_out().is_empty() && !line.is_left(), "an operator wants its tunnels to stay");
        assert_eq!(chosen(), None);
    }

    #[tokio::test]
    async fn a_move_that_an_operator_took_back_does_not_end_a_later_one_to_the_same_relay() {
        let server = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), Arc::default());
        let line = uplink.connect(0).await;
        let choose = || PreparedMove::choose(uplink.clone(), relay("b.example:443"));
        let taken_back = [choose(), choose()];
        uplink.prefer();
        let later = choose();
        let [dropped, carried_out] = taken_back;
        drop(dropped);
        assert!(carried_out.carry_out().is_empty() && !line.is_left());
        assert_eq!(uplink.state.borrow().chosen().relay.as_deref(), Some("b.example:443"));
        assert_eq!(later.carry_out(), [7]);
    }

    #[tokio::test]
    async fn a_path_that_fails_at_once_does_not_end_a_move_to_a_relay_that_another_path_leads_to() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), Arc::default());
        let fail = |path: usize, port: u16| {
            let failure = ConnectError::NoAnswer(([192, 0, 2, 1], port).into());
            uplink.state.send_modify(|state| {
                let attempts = &mut state.attempts[path][0];
                (attempts.failures, attempts.failure) = (attempts.failures + 1, Some(Arc::new(failure)));
            });
        };
        let name = Destination::Relay(relay.endpoint().origin().to_string());
        let begin = || Box::pin(uplink.clone().prepare_move(&name));
        fail(0, 1);

        let mut moving = begin();
        assert!(futures::poll!(&mut moving).is_pending());
        fail(1, 2);
        assert!(futures::poll!(&mut moving).is_pending(), "the other path has only failed before");
        fail(0, 3);
        let failed = moving.await.err().unwrap();
        assert!(matches!(&failed, NotMoved::Unreachable(error) if error.to_string().contains(":3:")), "{failed}");

        let mut moving = begin();
        assert!(futures::poll!(&mut moving).is_pending());
        fail(0, 1);
        assert!(futures::poll!(&mut moving).is_pending());
        uplink.connect(1).await;
        assert!(moving.await.is_ok());
    }

    #[tokio::test]
    async fn tunnels_of_connections_that_take_no_others_move_as_well() {
        let server = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), Arc::default());
        let line = uplink.connect(0).await;
        line.retire();
        assert_eq!(PreparedMove::choose(uplink, relay("b.example:443")).carry_out(), [7]);
        assert!(line.is_left());
    }

    #[tokio::test]
    async fn a_move_to_a_path_leaves_the_connections_of_all_others() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), Arc::default());
        let lines = [uplink.connect(0).await, uplink.connect(1).await, uplink.connect(0).await];
        let move_to = async |name: &str| uplink.clone().prepare_move(&Destination::Path(name.to_owned())).await;
        let path = || uplink.state.borrow().chosen().path;
        let prepared = move_to("b").await.ok().unwrap();
        assert!(path() == Some(1) && lines.iter().all(|line| !line.is_left()), "new tunnels go there already");
        drop(prepared);
        assert_eq!(path(), None);
        assert_eq!(move_to("b").await.ok().unwrap().carry_out().len(), 2);
        assert_eq!((path(), lines.map(|line| line.is_left())), (Some(1), [true, false, true]));
        uplink.prefer();
        assert_eq!(path(), None);
    }

    #[tokio::test]
    async fn a_path_that_is_unknown_or_does_not_connect_is_refused_and_nothing_changes() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), Arc::default());
        let line = uplink.connect(0).await;
        let begin = |name: &str| {
            let (uplink, to) = (uplink.clone(), Destination::Path(name.to_owned()));
            Box::pin(async move { uplink.prepare_move(&to).await.map(drop) })
        };
        let refused = begin("c").await.unwrap_err();
        assert_eq!(refused.to_string(), "no path \"c\" is configured; there are a, b");
        let mut moving = begin("b");
        assert!(futures::poll!(&mut moving).is_pending());
        assert_eq!(uplink.state.borrow().chosen().path, Some(1));
        let fail = |path: usize| {
            let failure = Some(Arc::new(ConnectError::NoAnswer(([192, 0, 2, 1], 9).into())));
            uplink.state.send_modify(|state| {
                let attempts = &mut state.attempts[path][0];
                (attempts.failures, attempts.failure) = (attempts.failures + 1, failure);
            });
        };
        fail(0);
        assert!(futures::poll!(&mut moving).is_pending(), "another path has failed");
        fail(1);
        assert!(matches!(moving.await, Err(NotMoved::Unreachable(_))));
        assert_eq!((uplink.state.borrow().chosen(), line.is_left()), (Choices::default(), false));

        let plain = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), Arc::default());
        let refused = plain.prepare_move(&Destination::Path(String::new())).await.map(drop);
        assert!(matches!(refused, Err(NotMoved::WithoutPaths)));
    }

    #[test]
    fn a_relay_takes_the_place_of_a_chosen_path_only_if_that_does_not_lead_to_it() {
        let choice = |paths: &[usize]| OperatorChoice::Relay { relay: "a.example:443".to_owned(), paths: paths.into() };
        let on_second = Choices::default().with(&OperatorChoice::Path(1));
        assert_eq!(on_second, Choices { relay: None, path: Some(1) });
        let relay = Some("a.example:443".to_owned());
        assert_eq!(on_second.with(&choice(&[0, 1])), Choices { relay: relay.clone(), path: Some(1) });
        assert_eq!(on_second.with(&choice(&[0])), Choices { relay: relay.clone(), path: None });
        let at_relay = Choices { relay: relay.clone(), path: None };
        assert_eq!(at_relay.with(&OperatorChoice::Path(1)), Choices { relay, path: Some(1) });
    }
}
