//! The state of the connections to a relay. Tasks watch it while they wait for a place.

use std::{sync::Arc, time::Duration};

use relay_client::{credentials::CredentialsRefused, error::ConnectError, failover::RelayAvailability};
use tokio::time::Instant;

use super::choice::{Choices, OperatorChoice};
use crate::line::Line;

/// How long a new connection to a relay that was silent may take to show that the relay answers.
const TRIAL: Duration = Duration::from_secs(5);

/// The results of attempts to connect to a relay.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// How many connections were made.
    pub connects: u64,
    /// How often connecting failed.
    pub failures: u64,
    /// The error of the last attempt, if it failed.
    pub failure: Option<Arc<ConnectError>>,
    /// Set if the relay refused the credentials, on whichever connection, and has accepted no request since.
    pub refused: Option<CredentialsRefused>,
}

/// The open connections, and the results of attempts to make more.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) lines: Vec<Arc<Line>>,
    /// Indexed by path, then by relay.
    pub(crate) attempts: Vec<Vec<Attempts>>,
    /// The relay and the path that operators have chosen.
    pub(crate) chosen: Choices,
    /// The numbers and the choices of operators' moves. The last choice is used until its move is carried out or dropped.
    pub(crate) pending: Vec<(u64, OperatorChoice)>,
    /// How many moves operators have begun.
    pub(crate) moves: u64,
    /// Whether the relay or the path that is chosen may be tried at once, whatever its back-off.
    pub(crate) is_urgent: bool,
    /// How many attempts have failed, and the error of the last attempt, if it failed.
    pub(crate) failures: u64,
    pub(crate) failure: Option<Arc<ConnectError>>,
    /// When the next attempt is due, unless one is in progress.
    pub(crate) next_attempt: Option<Instant>,
    /// By path: whether a further connection to its own relay, which new tunnels use, may soon bring more places. Empty until that is known.
    pub(crate) may_grow: Vec<bool>,
    /// By path: the relay that the one in use, which may be slow, is compared with.
    pub(crate) compared: Vec<Option<usize>>,
    /// Whether another connection will probably be made: the last attempt succeeded, and that connection did not end in silence.
    pub(crate) is_expected: bool,
    /// How long a connection to a preferred relay must last before it takes tunnels from a working connection: an unstable relay is no
    /// gain.
    pub(crate) settling: Duration,
}

impl State {
    /// Returns the relay and the path to use, whatever the order of preference and placements say.
    pub(crate) fn chosen(&self) -> Choices {
        self.pending.last().map_or_else(|| self.chosen.clone(), |(_, choice)| self.chosen.with(choice))
    }

    pub(crate) fn usable(&self) -> impl Iterator<Item = &Arc<Line>> {
        self.lines.iter().filter(|line| line.is_usable())
    }

    /// Notes that a connection ended without an answer from its relay.
    pub(crate) fn ended_in_silence(&mut self) {
        let is_replaced = self.usable().next().is_some();
        self.is_expected &= is_replaced;
    }

    /// Whether a new tunnel gets a place.
    pub(crate) fn has_room(&self, now: Instant) -> bool {
        !self.with_room(now, None).is_empty()
    }

    /// Returns the connections that take tunnels, in their order for new tunnels: by [rank](Choices::rank), and then by the order of
    /// preference of relays. A new connection to a better relay than the other connections have comes last.
    pub(crate) fn in_order(&self, now: Instant) -> Vec<&Arc<Line>> {
        let (chosen, mut lines) = (self.chosen(), self.usable().collect::<Vec<_>>());
        // The states of connections may change meanwhile, so each key is made once.
        lines.sort_by_cached_key(|line| {
            let settles = !chosen.has_relay_of(line) && self.settles(line, now);
            (chosen.rank(line, None), settles, line.place)
        });
        lines
    }

    /// Returns the connections that have a place for a new tunnel, or for a tunnel that leaves the connection `left`, by their rank for this
    /// tunnel and then [in order](Self::in_order). On each path, new tunnels use one relay, the path's own. Connections to its other relays are
    /// there for tunnels that are at these already. New tunnels get a place on them only once no further connection to the own relay can be
    /// expected.
    pub(crate) fn with_room(&self, now: Instant, left: Option<&Line>) -> Vec<&Arc<Line>> {
        let (chosen, order) = (self.chosen(), self.in_order(now));
        let is_own = |line: &Line| {
            let first = order.iter().find(|first| first.path_place == line.path_place);
            // A better relay is not the first one only while its connection is too new, or while an operator has chosen another.
            first.is_none_or(|first| {
                line.place == first.place || line.place < first.place && !chosen.has_relay_of(first)
            })
        };
        let may_grow = |line: &Line| self.may_grow.get(line.path_place) == Some(&true);
        let stays = |line: &Line| left.is_some_and(|left| left.is_continued_by(line));
        let is_open = |line: &&Arc<Line>| line.has_room() && (is_own(line) || stays(line) || !may_grow(line));
        let mut open: Vec<_> = order.iter().copied().filter(is_open).collect();
        if left.is_some() {
            open.sort_by_cached_key(|line| chosen.rank(line, left));
        }
        open
    }

    /// Whether no further connection will soon bring more places.
    pub(crate) fn is_alone(&self) -> bool {
        !self.may_grow.contains(&true)
    }

    /// Whether a connection leads to a better relay than others of its path, and is too new to take their place.
    pub(crate) fn settles(&self, line: &Line, now: Instant) -> bool {
        let is_worse = |other: &Line| other.path_place == line.path_place && other.place > line.place;
        now.saturating_duration_since(line.since) < self.settling
            && self.usable().any(|other| is_worse(other) && other.since < line.since)
    }

    /// Whether UDP tunnels of other paths are at this relay, and could come over to this path if it had a connection to the relay: their path
    /// may fail, whatever their placement is and whichever path an operator has chosen.
    pub(crate) fn may_come(&self, path: usize, relay: &str) -> bool {
        let is_elsewhere = |line: &Line| line.path_place != path && line.leads_to(relay);
        // The tunnels of a silent connection leave soon.
        let has_tunnels = |line: &Line| !line.goes() && !line.is_closed() && line.recallable() > 0;
        self.lines.iter().any(|line| is_elsewhere(line) && has_tunnels(line))
    }

    /// Whether another relay of a path, which may be slow, is compared with this one.
    pub(crate) fn is_compared(&self, path: usize, relay: usize) -> bool {
        self.compared.get(path) == Some(&Some(relay))
    }

    /// Returns the state of each relay of a path; `suspects` says which relays fell silent and are not trusted again.
    pub(crate) fn availability(&self, now: Instant, path: usize, suspects: &[bool]) -> Vec<RelayAvailability> {
        let mut availability = vec![RelayAvailability::default(); suspects.len()];
        let is_used = self.usable().any(|line| line.path_place == path);
        for line in self.lines.iter().filter(|line| line.path_place == path) {
            // Three answers show that a relay that was silent is back.
            let is_young = now.saturating_duration_since(line.since) < TRIAL;
            if let Some(relay) = availability.get_mut(line.place) {
                relay.is_on_trial |= suspects[line.place] && is_young && line.is_doubted() && !line.is_closed();
            }
            // A further connection over a slow path would not be faster. If another relay of the path is used instead, that may need more.
            let stands_by = line.stands_by();
            let Some(relay) = availability.get_mut(line.place) else { continue };
            if stands_by && is_used {
                relay.stands_by = true;
            } else if stands_by || line.is_usable() {
                relay.usable += 1;
                relay.has_room |= stands_by || line.has_room();
            }
        }
        availability
    }
}
