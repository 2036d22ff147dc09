//! The work of an uplink's task: it decides when to connect to which relay over which path, checks which paths are alive, and moves
//! tunnels away from connections that end.

use std::{
    net::IpAddr,
    pin::pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, pending},
};
use masque::h3::Code;
use quic::h3;
use relay_client::{
    backoff::random,
    credentials::CredentialsRefused,
    drive,
    endpoint::{ANSWER_TIMEOUT, Connected, Endpoint, Inside},
    error::ConnectError,
    failover::{Failover, Next},
};
use sched::path::slow::Slowness;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};
use tracing::{debug, info, warn};

use super::{CONNECTIONS, Uplink};
use crate::{
    line::Line,
    path::{LOOK, Path, REPORT, pulse::Pulse},
};

mod addresses;
mod ending;
mod returning;
mod silence;
mod slow;
mod steadiness;

use steadiness::Returning;

/// If a connection lasted longer than this and ended without an error, the next attempt need not wait.
const PEACE: Duration = Duration::from_secs(1);

/// What to do next.
pub(crate) enum Step {
    /// Connect to a relay, by the indices of its path and of the relay.
    Connect((usize, usize)),
    /// Nothing before this time, unless something happens.
    Wait(Instant),
    /// Nothing unless something happens.
    Nothing,
}

/// What the task of an uplink works with.
pub(crate) struct Work<'a> {
    uplink: &'a Uplink,
    /// By path.
    failovers: Vec<Failover>,
    /// Each task completes with a connection and its error, or `None` if the tunnel that carried the connection has ended.
    pub(crate) connections: JoinSet<(Arc<Line>, Option<h3::Error>)>,
    /// Each task completes with a connection and whether its relay is shutting down; if not, the connection has ended.
    pub(crate) departures: JoinSet<(Arc<Line>, bool)>,
    /// Each task completes with a connection and, if the relay refuses the credentials as it did not before, the refusal.
    pub(crate) introductions: JoinSet<(Arc<Line>, Option<CredentialsRefused>)>,
    /// By path and relay: whether it fell silent and has not yet answered for long enough.
    suspects: Vec<Vec<bool>>,
    /// By path and relay: whether it is slow, and when its round trip was last probed.
    slowness: Vec<Vec<(Slowness, Option<Instant>)>>,
    /// Which tunnels are to look for a better path.
    returning: Returning,
    /// The origin of the times of `slowness`.
    start: Instant,
    /// When to [look](Self::look) next.
    pub(crate) look_at: Instant,
    /// Which connections answer, if there is another path, relay or gateway.
    pulses: Vec<(Arc<Line>, Pulse)>,
    /// By path and relay: the address that packets to the relay left from at the last change of this host's addresses.
    sources: Vec<Vec<Option<IpAddr>>>,
    /// By path and relay: the last index of the device that sockets are bound to, if they are and it was seen.
    devices: Vec<Vec<Option<u32>>>,
    /// The [additions](crate::moves::HostNetwork::additions) to this host's network that were handled.
    additions: u64,
    /// When attempts to connect to relays whose names were never resolved last began again.
    begun_anew: Option<Instant>,
    /// Whether a tunnel waits for a place.
    pub(crate) wanted: bool,
    /// Connections whose address has changed, or that have lost their route or device: how many packets each had received before, and when
    /// it must have received more.
    pub(crate) proofs: Vec<(Arc<Line>, u64, Instant)>,
    /// Connections that are closed once their UDP tunnels have moved, and when they are closed at the latest.
    ending: Vec<(Arc<Line>, Instant)>,
}

impl<'a> Work<'a> {
    /// Begins without a connection.
    pub(crate) fn new(uplink: &'a Uplink) -> Self {
        let failover = |path: &Path| Failover::new(path.relays.len(), CONNECTIONS, uplink.backoff);
        Self {
            uplink,
            failovers: uplink.paths.iter().map(failover).collect(),
            connections: JoinSet::new(),
            departures: JoinSet::new(),
            introductions: JoinSet::new(),
            suspects: uplink.paths.iter().map(|path| vec![false; path.relays.len()]).collect(),
            slowness: uplink.paths.iter().map(|path| vec![Default::default(); path.relays.len()]).collect(),
            returning: Returning::default(),
            start: Instant::now(),
            look_at: Instant::now(),
            pulses: Vec::new(),
            sources: uplink.paths.iter().map(|path| path.relays.iter().map(Endpoint::source).collect()).collect(),
            devices: uplink.paths.iter().map(|path| vec![None; path.relays.len()]).collect(),
            additions: 0,
            begun_anew: None,
            wanted: true,
            proofs: Vec::new(),
            ending: Vec::new(),
        }
    }
}

/// Returns whether a relay, by the places of its path and of itself, fell silent and is not trusted again.
fn is_suspect(suspects: &[Vec<bool>], (path, place): (usize, usize)) -> bool {
    suspects.get(path).and_then(|relays| relays.get(place)) == Some(&true)
}

impl Work<'_> {
    /// Decides what to do next; if that is to connect, notes the attempt.
    pub(crate) fn next(&mut self) -> Step {
        let now = Instant::now();
        self.end_left(now);
        let mut is_urgent = false;
        self.uplink.state.send_if_modified(|state| {
            is_urgent = std::mem::take(&mut state.is_urgent);
            false
        });
        self.follow_choice(is_urgent);
        self.follow_tunnels();
        self.uplink.state.send_if_modified(|state| {
            let may_grow = |(path, (failover, suspects)): (usize, (&Failover, &Vec<bool>))| {
                failover.may_bring_room(now, &state.availability(now, path, suspects))
            };
            let may_grow: Vec<_> = self.failovers.iter().zip(&self.suspects).enumerate().map(may_grow).collect();
            // New tunnels no longer wait for a connection that does not come if another relay has room.
            std::mem::replace(&mut state.may_grow, may_grow) != state.may_grow
        });
        let step = self.step(now);
        let is_idle = self.failovers.iter().all(Failover::is_idle);
        let next_attempt = if let Step::Wait(until) = step { Some(until).filter(|_| is_idle) } else { None };
        self.uplink.state.send_if_modified(|state| {
            state.next_attempt = next_attempt;
            // A task that waits for a place was there before.
            false
        });
        match (step, now + LOOK) {
            (step, _) if self.ending.is_empty() => step,
            (Step::Connect(at), _) => Step::Connect(at),
            (Step::Wait(until), look) => Step::Wait(until.min(look)),
            (Step::Nothing, look) => Step::Wait(look),
        }
    }

    /// Uses the relay that an operator has chosen, if there is one; an urgent choice of a relay or a path is tried at once.
    fn follow_choice(&mut self, is_urgent: bool) {
        let choices = self.uplink.state.borrow().chosen();
        let is_chosen = |relay: &Endpoint| choices.relay.as_ref().is_some_and(|it| relay.origin().to_string() == *it);
        for (place, (path, failover)) in self.uplink.paths.iter().zip(&mut self.failovers).enumerate() {
            let chosen = path.relays.iter().position(is_chosen);
            failover.choose(chosen);
            let is_due = |relay: &usize| is_urgent && (choices.path == Some(place) || chosen == Some(*relay));
            (0..path.relays.len()).filter(is_due).for_each(|relay| failover.hurry(relay));
        }
    }

    fn step(&mut self, now: Instant) -> Step {
        let several = self.uplink.has_several_paths();
        let state = self.uplink.state.borrow();
        let has_room = state.has_room(now);
        self.wanted &= !has_room;
        // Tunnels leave relays that are shutting down as soon as there is room elsewhere, and worn connections only for others to the same
        // relay over the same path: until the address changes again, nothing is wrong there.
        let is_replaced = |line: &Line| {
            let is_same = |other: &Line| (other.path_place, other.place) == (line.path_place, line.place);
            line.is_worn() && state.lines.iter().any(|other| is_same(other) && other.has_room())
        };
        if has_room {
            let leaves = |line: &&Arc<Line>| !line.is_left() && (line.goes() || is_replaced(line));
            state.lines.iter().filter(leaves).for_each(|line| line.leave());
        }
        // If there are several paths, all are kept up while one is.
        let wanted = self.wanted || several && state.usable().next().is_some();
        let mut earliest: Option<Instant> = None;
        for (path, (failover, suspects)) in self.failovers.iter_mut().zip(&self.suspects).enumerate() {
            failover.beside(state.usable().any(|line| line.path_place != path));
            match failover.next(now, wanted, &state.availability(now, path, suspects)) {
                Next::Connect(place) => {
                    failover.begun(place, now);
                    return Step::Connect((path, place));
                }
                Next::Wait(until) => earliest = Some(earliest.map_or(until, |earliest| earliest.min(until))),
                Next::Nothing => {}
            }
        }
        earliest.map_or(Step::Nothing, Step::Wait)
    }

    pub(crate) fn attempted(&mut self, (path, place): (usize, usize), connected: Result<Connected, ConnectError>) {
        let Some(relay) = self.uplink.endpoint_at((path, place)) else { return };
        let origin = relay.origin();
        let name = self.uplink.paths.get(path).map(|path| path.name.as_str()).filter(|name| !name.is_empty());
        let is_watched = self.uplink.has_alternatives();
        let Some(failover) = self.failovers.get_mut(path) else { return };
        self.uplink.counters.note_attempt(origin, connected.is_ok());
        match connected {
            Ok(connected) => {
                info!(relay = %origin, path = name, address = %connected.address, "connected");
                failover.connected(place);
                let id = self.uplink.ids.fetch_add(1, Relaxed) + 1;
                let line =
                    Line::new(&connected, (id, path, place), self.uplink.freed.clone(), self.uplink.sizes.clone());
                let driven = line.clone();
                let (ended, left, kept) = match connected.inside {
                    Some(Inside { fate, client, carrying }) => (fate.ended, fate.left, Some((client, carrying))),
                    None => (pending().boxed(), pending().boxed(), None),
                };
                self.connections.spawn(async move {
                    let error = drive_until(&driven, connected.connection, ended).await;
                    drop(kept);
                    (driven, error)
                });
                introduce(&mut self.introductions, line.clone());
                let leaving = line.clone();
                self.departures.spawn(async move {
                    let goes = tokio::select! {
                        goes = leaving.relay.http().goes_away() => goes,
                        () = left => true,
                    };
                    (leaving, goes)
                });
                if is_watched {
                    let mut pulse = Pulse::new(line.heard());
                    if is_suspect(&self.suspects, (path, place)) {
                        // One answer is not enough. Until there are more, the back-off keeps further attempts apart.
                        failover.failed(place, Instant::now(), random());
                        pulse.silence(Instant::now());
                        line.doubt(true);
                    }
                    self.pulses.push((line.clone(), pulse));
                }
                // A connection that did not answer from its new address is given up: its tunnels move. If there is another path or relay,
                // the connection is probed until it answers; the new one, too, shows when its path or relay is back, so that a silent one
                // without tunnels is no longer needed. Otherwise each new one would add to them.
                let state = self.uplink.state.borrow();
                let is_spare = |line: &Line| (line.path_place, line.place) == (path, place) && line.tunnels() == 0;
                let is_over = |line: &&Arc<Line>| line.is_doubted() && (!is_watched || is_spare(line));
                let given_up: Vec<_> = state.lines.iter().filter(is_over).cloned().collect();
                drop(state);
                given_up.iter().for_each(|line| self.end(line));
                self.uplink.state.send_modify(|state| {
                    state.lines.push(line);
                    if let Some(attempts) = state.attempts.get_mut(path).and_then(|relays| relays.get_mut(place)) {
                        attempts.connects += 1;
                        attempts.failure = None;
                    }
                    state.failure = None;
                    state.is_expected = true;
                });
            }
            Err(error) => {
                let now = Instant::now();
                failover.failed(place, now, random());
                failover.note_unanswered(place, error.is_unanswered());
                let wait = failover.wait(place, now);
                let told = {
                    let state = self.uplink.state.borrow();
                    let attempts = state.attempts.get(path).and_then(|relays| relays.get(place));
                    attempts.and_then(|attempts| attempts.failure.as_ref().map(ToString::to_string))
                };
                // A reason that lasts is told once. Over many paths, there may be an attempt each second; status and metrics show all
                // attempts.
                if told.is_some_and(|told| told == error.to_string()) {
                    debug!(relay = %origin, path = name, "no connection, for the same reason; next attempt in {wait:.1?} at the earliest");
                } else {
                    warn!(relay = %origin, path = name, "{error}; next attempt in {wait:.1?} at the earliest");
                }
                if relay.exit().is_chosen() {
                    relay.renew();
                }
                let is_over = {
                    let state = self.uplink.state.borrow();
                    let is_over = |(path, (failover, suspects)): (usize, (&Failover, &Vec<bool>))| {
                        let next = failover.next(now, true, &state.availability(now, path, suspects));
                        failover.is_idle() && !matches!(next, Next::Connect(_))
                    };
                    self.failovers.iter().zip(&self.suspects).enumerate().all(is_over)
                };
                let error = Arc::new(error);
                self.uplink.state.send_modify(|state| {
                    if let Some(attempts) = state.attempts.get_mut(path).and_then(|relays| relays.get_mut(place)) {
                        attempts.failures += 1;
                        attempts.failure = Some(error.clone());
                    }
                    state.failures += u64::from(is_over);
                    state.failure = Some(error);
                    state.is_expected = false;
                });
            }
        }
    }

    /// Asks relays that refuse the credentials whether they still do, on connections on which they have accepted a request before.
    /// Relays close all other connections themselves.
    pub(crate) fn introduce_again(&mut self) {
        let is_refused = |line: &&Arc<Line>| line.relay.is_let_in() && line.relay.credentials().refused().is_some();
        let lines: Vec<_> = self.uplink.state.borrow().usable().filter(is_refused).cloned().collect();
        lines.into_iter().for_each(|line| introduce(&mut self.introductions, line));
    }

    pub(crate) fn lost(&mut self, line: &Arc<Line>, error: Option<&h3::Error>) {
        let is_idle = error.is_some_and(h3::Error::is_timeout);
        // Without keep-alives, both sides forget a connection that nothing uses.
        let is_unused = is_idle && !self.uplink.endpoint_of(line).is_some_and(Endpoint::keeps_alive);
        let is_silent = is_idle && !is_unused;
        self.uplink.state.send_modify(|state| {
            state.lines.retain(|known| !Arc::ptr_eq(known, line));
            if line.is_doubted() || is_silent {
                state.ended_in_silence();
            }
        });
        self.proofs.retain(|(known, ..)| !Arc::ptr_eq(known, line));
        self.pulses.retain(|(known, _)| !Arc::ptr_eq(known, line));
        self.ending.retain(|(known, _)| !Arc::ptr_eq(known, line));
        if line.is_closed() {
            return;
        }
        // A new connection shows that the relay is back before a tunnel needs it.
        self.wanted |= is_silent;
        let (peaceful, mut lasted) = (is_unused || matches!(error, Some(h3::Error::Closed)), line.since.elapsed());
        let path = Some(self.uplink.path_name(line)).filter(|name| !name.is_empty());
        let (relay, via) = (&line.way().relay, self.uplink.via_of(line));
        match error {
            Some(_) if is_unused => info!(%relay, path, "the connection was unused and has timed out"),
            Some(_) if peaceful => info!(%relay, path, "the relay closed the connection"),
            Some(error) => warn!(%relay, path, "connection lost: {error}"),
            None => warn!(%relay, path, "connection lost: the tunnel through [hop.{via}] has ended"),
        }
        // Counted when it announced its end.
        if line.is_retired() {
            return;
        }
        // A relay closes unused connections soon. If it refuses the credentials, it would do the same again.
        let is_refused = self.uplink.refused((line.path_place, line.place)).is_some();
        if peaceful && lasted > PEACE && !is_refused {
            lasted = Duration::MAX;
        }
        if !peaceful {
            self.returning.note_break(line.path_place);
        }
        if let Some(failover) = self.failovers.get_mut(line.path_place) {
            failover.lost(line.place, (lasted, is_silent), Instant::now(), random());
        }
    }

    /// Handles a relay that takes no new requests on a connection: the connection ends soon. Its tunnels move before that, to an
    /// existing connection or else to one that is made now. A relay that does this to each new connection is tried less and less often.
    pub(crate) fn goes_away(&mut self, line: &Arc<Line>) {
        let is_known = self.uplink.state.borrow().lines.iter().any(|known| Arc::ptr_eq(known, line));
        if !is_known || line.is_closed() {
            return;
        }
        self.uplink.announce(line, "or its hop is shutting down: moving tunnels to another connection");
        line.retire();
        if let Some(failover) = self.failovers.get_mut(line.path_place) {
            // The relay has said so, or the tunnel through the hop has ended.
            failover.lost(line.place, (line.since.elapsed(), false), Instant::now(), random());
        }
        if line.tunnels() == 0 {
            line.close();
        }
        // The next step makes its tunnels leave if there is room elsewhere.
        self.wanted = true;
        self.uplink.state.send_modify(|_| {});
    }

    /// Measures what the paths carry and, if there is another path, relay or gateway, checks which connections are alive. The next look is
    /// then due when a connection will count as silent, but at the latest after [`LOOK`], and otherwise after [`REPORT`].
    pub(crate) fn look(&mut self) {
        let now = Instant::now();
        if !self.uplink.has_alternatives() {
            let lines = self.uplink.state.borrow().lines.clone();
            self.refresh(now, &lines);
            self.look_at = now + REPORT;
            return;
        }
        let mut changed = self.look_for_silent(now);
        let lines = self.uplink.state.borrow().lines.clone();
        self.leave_silent(&lines);
        changed |= self.give_up(now, &lines);
        changed |= self.look_for_slow(now, &lines);
        self.refresh(now, &lines);
        self.look_for_better(now, &lines);
        let silent = self.pulses.iter().filter_map(|(_, pulse)| pulse.silent_at()).min();
        self.look_at = silent.map_or(now + LOOK, |at| at.min(now + LOOK));
        if changed {
            self.uplink.state.send_modify(|_| {});
        }
    }

    /// Brings up to date what is known of each path.
    fn refresh(&self, now: Instant, lines: &[Arc<Line>]) {
        for (place, view) in self.uplink.views.lock().iter_mut().enumerate() {
            let of_path: Vec<_> = lines.iter().filter(|line| line.path_place == place && !line.is_closed()).collect();
            view.refresh(now, &of_path);
        }
    }
}

/// Sends an authentication request on a connection, and checks by which device its packets leave.
fn introduce(introductions: &mut JoinSet<(Arc<Line>, Option<CredentialsRefused>)>, line: Arc<Line>) {
    introductions.spawn(async move {
        let before = line.relay.credentials().refused();
        // A connection that was lost is no longer of interest.
        let (answer, ()) =
            tokio::join!(timeout(ANSWER_TIMEOUT, line.relay.introduce()), line.exit().check_device(line.address));
        let refused = answer.ok().and_then(Result::ok).flatten();
        (line, refused.filter(|refused| before.as_ref() != Some(refused)))
    });
}

/// Drives a connection until it ends, and returns its error. Returns `None` if the tunnel that carries it ends first.
async fn drive_until(line: &Line, connection: h3::HttpConnection, ended: BoxFuture<'static, ()>) -> Option<h3::Error> {
    let mut driving = pin!(drive(connection));
    tokio::select! {
        error = &mut driving => Some(error),
        () = ended => {
            // The peer can no longer receive this, but tasks with a stream on the connection learn of it.
            line.relay.http().close(Code::NoError);
            _ = driving.await;
            None
        }
    }
}

#[cfg(test)]
mod tests;
