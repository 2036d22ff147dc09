//! The connections to a relay that the forwards share: made when they are needed, and made again when lost. There may be
//! several relays to choose from; [`failover`](super::failover) chooses.
//!
//! One connection carries [`MOST`](super::places::MOST) tunnels, or as many as the relay allows; only when they are
//! taken is another one made, up to [`CONNECTIONS`].

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use quic::h3;
use role::ready::{self, Readiness};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tracing::{info, warn};

use super::{
    backoff::random,
    failover::{Failover, Next, Standing},
    link::{Line, Link},
    moves::Verdict,
};
use crate::client::{
    drive,
    endpoint::{ConnectError, Connected, Endpoint},
};

/// Connections to one relay at once: together, their tunnels stay below what a relay allows one user if its
/// configuration says nothing (`tunnels_per_user`, 4,096).
pub const CONNECTIONS: usize = 4;

/// After how long the end of a connection without an error is no reason to wait before the next.
const PEACE: Duration = Duration::from_secs(1);

/// For how long a connection that others make up for may be without tunnels before it is closed.
const SPARE: Duration = Duration::from_secs(30);

/// How soon after a change of this host's address the relay has to be heard, or a new connection is made; where the
/// handshake took long, twice as long as that.
const PROOF: Duration = Duration::from_millis(400);

/// What became of connections when this host's addresses changed, and how many there were.
#[derive(Debug, Default)]
pub struct ConnectionCounters {
    /// Connections that went on from another address of this host.
    pub moved: Counter,
    /// Connections that were given up because the relay does not hear them from there.
    pub left: Counter,
    /// Of which each uplink is a part, for as long as it lives.
    pub ready: Arc<Readiness>,
    /// The last ID of a connection, those of the relay role's clients included.
    pub ids: Arc<AtomicU64>,
}

impl ConnectionCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("edge_connections_moved", "Connections that went on from another address", &self.moved),
            ("edge_connections_left", "Connections given up after a change of address", &self.left),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

/// The connections to a relay. Callers ask for one with [`Uplink::link`]; [`Uplink::run`] keeps the connections up.
pub struct Uplink {
    /// In the order of preference.
    relays: Vec<Endpoint>,
    /// The name of the schedule that the connections go by, if it has one.
    pub schedule: Option<String>,
    backoff: (Duration, Duration),
    counters: Arc<ConnectionCounters>,
    wanted: Notify,
    freed: Arc<Notify>,
    state: watch::Sender<State>,
}

/// One relay of an uplink, and how it is reached.
#[derive(Clone)]
pub struct Standpoint {
    /// Its host and port.
    pub relay: String,
    /// The connections to it that are open.
    pub lines: Vec<Arc<Line>>,
    /// What became of attempts to connect.
    pub attempts: Attempts,
}

/// What became of attempts to connect to a relay.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// How many connections were made.
    pub connects: u64,
    /// How often connecting failed.
    pub failures: u64,
    /// How it failed, if the last attempt did.
    pub failure: Option<Arc<ConnectError>>,
}

#[derive(Default)]
struct State {
    lines: Vec<Arc<Line>>,
    /// By the place of the relay.
    attempts: Vec<Attempts>,
    /// How often connecting has failed, and how it did last.
    failures: u64,
    failure: Option<Arc<ConnectError>>,
    /// Whether the last attempt to connect failed.
    is_alone: bool,
    /// Whether any attempt has succeeded.
    was_reached: bool,
    /// How long a connection to a preferred relay has to last before it takes tunnels from one that works: a relay that
    /// comes and goes is no gain.
    settling: Duration,
}

impl State {
    fn usable(&self) -> impl Iterator<Item = &Arc<Line>> {
        self.lines.iter().filter(|line| line.is_usable())
    }

    fn has_room(&self) -> bool {
        self.lines.iter().any(|line| line.has_room())
    }

    /// Returns the connections in the order in which they are to be filled: connections to the first relay first. A
    /// connection that has just been made to a better relay than the others' comes last.
    fn in_order(&self, now: Instant) -> Vec<&Arc<Line>> {
        let is_new = |line: &Line| {
            now.saturating_duration_since(line.since) < self.settling
                && self.usable().any(|other| other.place > line.place && other.since < line.since)
        };
        let mut lines: Vec<_> = self.usable().collect();
        lines.sort_by_key(|line| (is_new(line), line.place));
        lines
    }

    fn standings(&self, relays: usize) -> Vec<Standing> {
        let mut standings = vec![Standing::default(); relays];
        for line in self.usable() {
            if let Some(standing) = standings.get_mut(line.place) {
                standing.usable += 1;
                standing.has_room |= line.has_room();
            }
        }
        standings
    }
}

/// What the task of an uplink works with.
struct Work<'a> {
    uplink: &'a Uplink,
    failover: Failover,
    connections: JoinSet<(Arc<Line>, h3::Error)>,
    /// Whether somebody waits for a place.
    wanted: bool,
    /// Connections whose address has changed, what had been heard of them before, and when more has to have been.
    proofs: Vec<(Arc<Line>, u64, Instant)>,
}

impl Uplink {
    /// Returns an uplink to these relays, of which the first is preferred, without a connection. `schedule` is what the
    /// endpoints' schedule is called, and `backoff` the first and the longest wait between attempts to connect.
    #[must_use]
    pub fn new(
        relays: Vec<Endpoint>,
        schedule: Option<String>,
        backoff: (Duration, Duration),
        counters: Arc<ConnectionCounters>,
    ) -> Arc<Self> {
        let attempts = vec![Attempts::default(); relays.len()];
        let state = watch::Sender::new(State { settling: backoff.1, attempts, ..State::default() });
        let (wanted, freed, ready) = (Notify::new(), Arc::default(), counters.ready.clone());
        let uplink = Arc::new(Self { relays, schedule, backoff, counters, wanted, freed, state });
        let weak = Arc::downgrade(&uplink);
        ready.require(move || match weak.upgrade() {
            None => ready::Verdict::Gone,
            Some(uplink) if uplink.is_within_reach() => ready::Verdict::Ready,
            Some(uplink) => ready::Verdict::Missing(format!("no connection to {}", uplink.names())),
        });
        uplink
    }

    /// The hosts and ports of the relays.
    #[must_use]
    pub fn names(&self) -> String {
        self.relays.iter().map(|relay| relay.origin().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Whether there is a connection, or was one and no attempt to make another has failed since: a relay ends those
    /// over which nothing is asked. One is asked for if there is none.
    #[must_use]
    pub fn is_within_reach(&self) -> bool {
        let state = self.state.borrow();
        if state.usable().next().is_some() {
            return true;
        }
        self.wanted.notify_one();
        state.was_reached && !state.is_alone
    }

    /// The connections that are open.
    #[must_use]
    pub fn lines(&self) -> Vec<Arc<Line>> {
        self.state.borrow().usable().cloned().collect()
    }

    /// How each relay is reached, in the order of preference.
    #[must_use]
    pub fn standpoints(&self) -> Vec<Standpoint> {
        let state = self.state.borrow();
        let of = |(place, (relay, attempts)): (usize, (&Endpoint, &Attempts))| Standpoint {
            relay: relay.origin().to_string(),
            lines: state.usable().filter(|line| line.place == place).cloned().collect(),
            attempts: attempts.clone(),
        };
        self.relays.iter().zip(&state.attempts).enumerate().map(of).collect()
    }

    /// The host and port of the relay that a connection leads to.
    #[must_use]
    pub fn relay_of(&self, line: &Line) -> String {
        self.relays.get(line.place).map(|relay| relay.origin().to_string()).unwrap_or_default()
    }

    /// Returns a place for a tunnel, on a connection that takes requests. Waits for one if there is none: for a
    /// connection, back-off included, or for the end of another tunnel.
    ///
    /// # Errors
    /// There is no connection, and the attempt to make one that was waited for failed.
    pub async fn link(&self) -> Result<Link, Arc<ConnectError>> {
        let mut changes = self.state.subscribe();
        let failures = changes.borrow().failures;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            {
                let state = changes.borrow_and_update();
                if let Some(link) = state.in_order(Instant::now()).into_iter().find_map(Line::link) {
                    return Ok(link);
                }
                let failed = state.failures > failures && state.usable().next().is_none();
                if let Some(failure) = state.failure.as_ref().filter(|_| failed) {
                    return Err(failure.clone());
                }
            }
            self.wanted.notify_one();
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    // The sender is a part of `self`.
                    std::future::pending::<()>().await;
                },
                () = freed => {}
            }
        }
    }

    /// Whether all places are taken, and no further connection will bring more soon: one of the tunnels has to end
    /// before another can be opened.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = self.state.borrow();
        let connections = state.usable().count();
        connections > 0 && !state.has_room() && (connections >= CONNECTIONS || state.is_alone)
    }

    /// Connects whenever a connection is wanted and there is none with room, at first at once; never returns. Whenever
    /// this host's addresses change, `moves` tells.
    pub async fn run(&self, mut moves: watch::Receiver<()>) {
        let failover = Failover::new(self.relays.len(), CONNECTIONS, self.backoff);
        let mut work = Work { uplink: self, failover, connections: JoinSet::new(), wanted: true, proofs: Vec::new() };
        let mut attempts = FuturesUnordered::new();
        let mut tidy = interval(SPARE / 4);
        tidy.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let until = loop {
                match work.next() {
                    Next::Connect(place) => attempts.push(self.attempt(place)),
                    Next::Wait(until) => break Some(until),
                    Next::Nothing => break None,
                }
            };
            let until = work.proofs.iter().map(|(_, _, due)| *due).chain(until).min();
            tokio::select! {
                Some(ended) = work.connections.join_next() => {
                    if let Ok((line, error)) = ended {
                        work.lost(&line, &error);
                    }
                }
                Some((place, connected)) = attempts.next() => work.attempted(place, connected),
                () = self.wanted.notified() => work.wanted = true,
                Ok(()) = moves.changed() => work.moved(),
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => work.prove(),
                _ = tidy.tick() => self.close_spare(),
            }
        }
    }

    async fn attempt(&self, place: usize) -> (usize, Result<Connected, ConnectError>) {
        match self.relays.get(place) {
            Some(relay) => (place, relay.connect().await),
            None => std::future::pending().await,
        }
    }

    /// Closes connections without tunnels that others make up for.
    fn close_spare(&self) {
        self.state.send_if_modified(|state| {
            let now = Instant::now();
            let first = state.in_order(now).first().map(|line| Arc::clone(line));
            let before = state.lines.len();
            state.lines.retain(|line| {
                let is_spare = line.tunnels() == 0 && now.saturating_duration_since(line.since) > SPARE;
                let is_kept = !is_spare || first.as_ref().is_none_or(|first| Arc::ptr_eq(first, line));
                if !is_kept {
                    line.close();
                }
                is_kept
            });
            state.lines.len() < before
        });
    }

    /// Closes all connections properly. [`Uplink::run`] has to be dropped before.
    pub async fn close(&self) {
        let lines = self.state.borrow().lines.clone();
        for line in lines {
            if let Some(relay) = self.relays.get(line.place) {
                relay.close(&line.relay).await;
            }
        }
    }
}

impl Work<'_> {
    /// Decides what to do next, and notes if it is to connect.
    fn next(&mut self) -> Next {
        let now = Instant::now();
        let standings = {
            let state = self.uplink.state.borrow();
            self.wanted &= !state.has_room();
            state.standings(self.uplink.relays.len())
        };
        let next = self.failover.next(now, self.wanted, &standings);
        if let Next::Connect(place) = next {
            self.failover.begun(place, now);
        }
        next
    }

    fn attempted(&mut self, place: usize, connected: Result<Connected, ConnectError>) {
        let Some(origin) = self.uplink.relays.get(place).map(Endpoint::origin) else { return };
        match connected {
            Ok(connected) => {
                info!(relay = %origin, address = %connected.address, "connected");
                self.failover.connected(place);
                let id = self.uplink.counters.ids.fetch_add(1, Relaxed) + 1;
                let line = Line::new(&connected, (id, place), self.uplink.freed.clone());
                let driven = line.clone();
                self.connections.spawn(async { (driven, drive(connected.connection).await) });
                self.uplink.state.send_modify(|state| {
                    // What did not answer from its new address is given up: its tunnels are opened anew.
                    state.lines.iter().filter(|line| line.is_doubted()).for_each(|line| line.close());
                    state.lines.push(line);
                    if let Some(attempts) = state.attempts.get_mut(place) {
                        *attempts =
                            Attempts { connects: attempts.connects + 1, failures: attempts.failures, failure: None };
                    }
                    state.is_alone = false;
                    state.was_reached = true;
                });
            }
            Err(error) => {
                let now = Instant::now();
                let wait = self.failover.failed(place, now, random());
                warn!(relay = %origin, "{error}; next attempt in {wait:.1?} at the earliest");
                let standings = self.uplink.state.borrow().standings(self.uplink.relays.len());
                let is_over =
                    self.failover.is_idle() && !matches!(self.failover.next(now, true, &standings), Next::Connect(_));
                let error = Arc::new(error);
                self.uplink.state.send_modify(|state| {
                    if let Some(attempts) = state.attempts.get_mut(place) {
                        attempts.failures += 1;
                        attempts.failure = Some(error.clone());
                    }
                    state.failures += u64::from(is_over);
                    state.failure = Some(error);
                    state.is_alone = true;
                });
            }
        }
    }

    fn lost(&mut self, line: &Arc<Line>, error: &h3::Error) {
        self.uplink.state.send_modify(|state| state.lines.retain(|known| !Arc::ptr_eq(known, line)));
        self.proofs.retain(|(known, ..)| !Arc::ptr_eq(known, line));
        if line.is_closed() {
            return;
        }
        // A relay keeps no connection for long over which nothing is asked.
        let (peaceful, mut lasted) = (matches!(error, h3::Error::Closed), line.since.elapsed());
        match self.uplink.relays.get(line.place) {
            Some(relay) if peaceful => info!(relay = %relay.origin(), "the relay closed the connection"),
            Some(relay) => warn!(relay = %relay.origin(), "connection lost: {error}"),
            None => {}
        }
        if peaceful && lasted > PEACE {
            lasted = Duration::MAX;
        }
        self.failover.lost(line.place, lasted, Instant::now(), random());
    }

    /// This host's addresses have changed: has connections go on from the new ones.
    fn moved(&mut self) {
        let lines = self.uplink.state.borrow().lines.clone();
        for line in lines {
            let heard = line.heard();
            let relay = line.address;
            match line.follow() {
                Verdict::Stays => continue,
                Verdict::Follows => {
                    info!(%relay, "this host's address changed: the connection continues from the new address")
                }
                Verdict::Wears => {
                    info!(%relay, "this host's address changed again: new tunnels get a new connection");
                    self.wanted = true;
                }
                Verdict::Ends => {
                    info!(%relay, "this host's address changed too often for one connection: making a new one");
                    self.uplink.counters.left.inc();
                    line.close();
                    self.wanted = true;
                    continue;
                }
            }
            self.uplink.counters.moved.inc();
            self.proofs.retain(|(known, ..)| !Arc::ptr_eq(known, &line));
            let patience = PROOF.max(2 * line.handshake);
            self.proofs.push((line, heard, Instant::now() + patience));
        }
        self.uplink.state.send_modify(|_| {});
    }

    /// Looks whether the relays of connections that moved are heard. Until they are, others take the new tunnels.
    fn prove(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.proofs.extract_if(.., |(_, _, due)| *due <= now).collect();
        for (line, before, _) in due {
            let (was_doubted, is_silent) = (line.is_doubted(), line.heard() == before);
            line.doubt(is_silent);
            if !is_silent {
                continue;
            }
            if !was_doubted {
                info!(relay = %line.address, "no answer since this host's address changed: trying a new connection");
                self.uplink.counters.left.inc();
            }
            self.wanted = true;
            self.proofs.push((line, before, now + PROOF));
        }
        // Not before all were asked: connections move together.
        if self.uplink.state.borrow().has_room() {
            self.proofs.iter().filter(|(line, ..)| line.is_doubted()).for_each(|(line, ..)| line.close());
        }
        // Tasks that wait for a place look again.
        self.uplink.state.send_modify(|_| {});
    }
}
