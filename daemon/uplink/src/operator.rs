//! Operators' requests to move tunnels to another relay or path.

use std::{fmt, sync::Arc, time::Duration};

use relay_client::error::ConnectError;
use tokio::time::timeout;

use super::{
    Attempts, Uplink,
    choice::{Choices, OperatorChoice},
    state::State,
};
use crate::path::Path;

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
    /// It works, but it is slow.
    #[error("{0} is slow now, so tunnels would leave it again; they stay where they are")]
    Slow(Destination),
}

impl Uplink {
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
                let place = self.paths.iter().position(|path| path.name == *name);
                place.map(OperatorChoice::Path).ok_or_else(unknown)
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
    /// There is no such relay or path, or it has no connection that takes tunnels and cannot get one. A slow relay or path takes none.
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
                    let mut meant = state.lines.iter().filter(|line| choice.means(line.path_place, &line.way().relay));
                    if meant.clone().any(|line| line.is_usable()) {
                        return Ok(());
                    }
                    // A further connection would be as slow.
                    if meant.any(|line| line.stands_by()) {
                        return Err(Some(NotMoved::Slow(to.clone())));
                    }
                    // One path, or one relay of the path, may fail at once while another connects.
                    if failures(&state).iter().all(Option::is_some) {
                        return Err(None);
                    }
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        match timeout(MOVE_PATIENCE, is_there).await {
            Ok(Ok(())) => return Ok(prepared),
            Ok(Err(Some(refused))) => return Err(refused),
            Ok(Err(None)) | Err(_) => {}
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
    /// Distinguishes it from other moves with the same choice.
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
    use test_relay::{Does, PATIENCE, TestRelay};
    use tokio::time::Instant;

    use super::*;
    use crate::{UplinkResources, tests::paths_to};

    /// The choice of a relay to which no path leads.
    fn relay(name: &str) -> OperatorChoice {
        OperatorChoice::Relay { relay: name.to_owned(), paths: Vec::new() }
    }

    /// Notes that an attempt to connect to the first relay of a path has failed at this port.
    fn note_failure(uplink: &Uplink, path: usize, port: u16) {
        let failure = ConnectError::NoAnswer(([192, 0, 2, 1], port).into());
        uplink.state.send_modify(|state| {
            let attempts = &mut state.attempts[path][0];
            (attempts.failures, attempts.failure) = (attempts.failures + 1, Some(Arc::new(failure)));
        });
    }

    #[tokio::test]
    async fn only_a_successful_one_of_concurrent_moves_leaves_its_relay_chosen() {
        let server = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
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
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let line = uplink.connect(0).await;
        let choose = || PreparedMove::choose(uplink.clone(), relay("b.example:443"));
        let taken_back = [choose(), choose()];
        uplink.prefer();
        let later = choose();
        let [dropped, carried_out] = taken_back;
        drop(dropped);
        assert!(carried_out.carry_out().is_empty() && !line.is_left());
        assert_eq!(uplink.state.borrow().chosen().relay.as_deref(), Some("b.example:443"));
        assert_eq!(later.carry_out(), [line.id]);
    }

    #[tokio::test]
    async fn a_path_that_fails_at_once_does_not_end_a_move_to_a_relay_that_another_path_leads_to() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let fail = |path, port| note_failure(&uplink, path, port);
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
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let line = uplink.connect(0).await;
        line.retire();
        assert_eq!(PreparedMove::choose(uplink, relay("b.example:443")).carry_out(), [line.id]);
        assert!(line.is_left());
    }

    #[tokio::test]
    async fn a_connection_that_a_move_left_is_closed_as_soon_as_it_has_no_tunnels() {
        let server = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::new(vec![server.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let lines = [uplink.connect(0).await, uplink.connect(0).await, uplink.connect(0).await];
        let tunnel = lines[0].link().unwrap();
        assert_eq!(PreparedMove::choose(uplink.clone(), relay("b.example:443")).carry_out().len(), lines.len());
        // It may answer again.
        lines[2].doubt(true);
        let closed = || lines.each_ref().map(|line| line.is_closed());
        uplink.close_spare(Instant::now());
        assert_eq!(closed(), [false, true, false]);
        drop(tunnel);
        uplink.close_spare(Instant::now());
        assert_eq!(closed(), [true, true, false]);
    }

    #[tokio::test]
    async fn a_move_to_a_path_leaves_the_connections_of_all_others() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
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
    async fn a_slow_relay_or_path_takes_no_tunnels_until_it_is_good() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
        let line = uplink.connect(1).await;
        let (path, at) = (Destination::Path("b".to_owned()), Destination::Relay(line.way().relay.to_string()));
        line.note_slow(true);
        for to in [&path, &at] {
            let refused = uplink.clone().prepare_move(to).await.map(drop).unwrap_err();
            let expected = format!("{to} is slow now, so tunnels would leave it again; they stay where they are");
            assert_eq!(refused.to_string(), expected);
        }
        assert_eq!(uplink.state.borrow().chosen(), Choices::default());
        line.note_slow(false);
        assert!(uplink.clone().prepare_move(&path).await.is_ok());
        line.note_slow(true);
        let _other = uplink.connect(0).await;
        assert!(uplink.clone().prepare_move(&at).await.is_ok(), "another path to it is good");
    }

    #[tokio::test]
    async fn a_path_that_is_unknown_or_does_not_connect_is_refused_and_nothing_changes() {
        let relay = TestRelay::start(Does::Echo, true);
        let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
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
        let fail = |path| note_failure(&uplink, path, 9);
        fail(0);
        assert!(futures::poll!(&mut moving).is_pending(), "another path has failed");
        fail(1);
        assert!(matches!(moving.await, Err(NotMoved::Unreachable(_))));
        assert_eq!((uplink.state.borrow().chosen(), line.is_left()), (Choices::default(), false));

        let plain = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let refused = plain.prepare_move(&Destination::Path(String::new())).await.map(drop);
        assert!(matches!(refused, Err(NotMoved::WithoutPaths)));
    }
}
