//! The connections of an edge to its relays, which its local addresses share: made on demand, and made again when lost.
//!
//! ```text
//! a tunnel, a request → Uplink: over which path, on which connection → Link: its place → Line: the connection → relay
//! ```
//!
//! There may be several relays; [`failover`](relay_client::failover) chooses among them. One connection carries [`places::MOST`] tunnels,
//! or fewer if the relay allows fewer. Another connection is made only when these places are taken, up to [`CONNECTIONS`].
//!
//! There may be several paths to relays. Then the uplink keeps connections over each, places every tunnel on one path, and moves the
//! tunnels of a silent path to another. They stay at their relay if they can.
//!
//! | module | what it holds |
//! |---|---|
//! | `placing` | which connection, over which path, a tunnel or request gets a place on |
//! | `line`, [`places`] | one connection to a relay, and the places for tunnels on it |
//! | `path` | the paths to relays: what each is estimated to carry, and whether it answers |
//! | `sizes` | how much a tunnel or request of a class will carry |
//! | `task`, `work` | what an uplink's task waits for, and what it does: it makes connections, watches them, and has tunnels moved |
//! | `state` | the open connections, and the attempts to make more |
//! | [`moves`] | changes of this host's addresses and devices, and which of them a connection survives |
//! | `operator`, `choice` | the relay and the path that an operator has chosen |
//! | `standpoint`, `report` | how each relay is reached, and how each path performs, for operators |
//! | `counters`, `resources` | the metrics of uplinks, and what uplinks share; both outlive a reload |
//!
//! **Invariant:** an uplink knows connections and places, but no local address and no payload, and it moves no tunnel. It notifies the
//! tunnel's task that the connection is to be left ([`Line::left`]) or that another path is better ([`Uplink::better_tunnel`]). The task
//! opens another tunnel, and then ends the old one.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::future::join_all;
use parking_lot::Mutex;
use relay_client::{credentials::CredentialsRefused, endpoint::Endpoint};
use role::ready;
use sched::stream::Discipline;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

mod choice;
mod counters;
mod line;
pub mod moves;
mod operator;
mod path;
pub mod places;
mod placing;
mod report;
mod resources;
mod sizes;
mod standpoint;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod work;

pub use counters::ConnectionCounters;
pub use line::{Line, Link, LinkId, NoDatagrams};
pub use operator::{Destination, NotMoved, PreparedMove};
use path::PathView;
pub use path::{
    Path, PathTerms,
    changes::{PathChange, PathChanges},
};
pub use places::CONNECTIONS;
pub use placing::{OpenTunnel, PathBeside};
pub use report::{Condition, PathReport};
pub use resources::UplinkResources;
use sizes::Sizes;
pub use standpoint::Standpoint;
pub use state::Attempts;
use state::State;

/// The connections to a relay. Callers request a place with [`Uplink::link`]; [`Uplink::run`] keeps the connections up.
pub struct Uplink {
    paths: Vec<Path>,
    /// What is known of each path.
    views: Mutex<Vec<PathView>>,
    /// How much tunnels of each class carry.
    sizes: Arc<Sizes>,
    /// How many tunnels were placed.
    turn: AtomicU64,
    /// The name of the schedule that the connections follow, if it has one.
    pub schedule: Option<String>,
    backoff: (Duration, Duration),
    counters: Arc<ConnectionCounters>,
    changes: Arc<PathChanges>,
    ids: Arc<AtomicU64>,
    wanted: Notify,
    freed: Arc<Notify>,
    /// How many senders need a place for which no sender of their own local address can leave.
    crowding: watch::Sender<usize>,
    state: watch::Sender<State>,
    /// The uplinks to other gateways, which can take this gateway's requests.
    peers: Mutex<Vec<Weak<Uplink>>>,
}

impl Uplink {
    /// Returns an uplink to these relays, without a connection. The first relay is preferred. `schedule` is the name of the
    /// endpoints' schedule, and `backoff` the first and the longest wait between attempts to connect.
    #[must_use]
    pub fn new(
        relays: Vec<Endpoint>,
        schedule: Option<String>,
        backoff: (Duration, Duration),
        resources: UplinkResources,
    ) -> Arc<Self> {
        Self::over(vec![Path::new("", relays)], schedule, backoff, resources)
    }

    /// Like [`new`](Self::new), but over several paths.
    #[must_use]
    pub fn over(
        paths: Vec<Path>,
        schedule: Option<String>,
        backoff: (Duration, Duration),
        resources: UplinkResources,
    ) -> Arc<Self> {
        let UplinkResources { counters, changes, ready, ids } = resources;
        let attempts = paths.iter().map(|path| vec![Attempts::default(); path.relays.len()]).collect();
        let state = watch::Sender::new(State { settling: backoff.1, attempts, ..State::default() });
        let views = Mutex::new(paths.iter().map(|_| PathView::default()).collect());
        let (wanted, freed) = (Notify::new(), Arc::default());
        let (sizes, turn, peers) = (Arc::default(), AtomicU64::new(0), Mutex::default());
        let uplink = Arc::new(Self {
            paths,
            views,
            sizes,
            turn,
            schedule,
            backoff,
            counters,
            changes,
            ids,
            wanted,
            freed,
            crowding: watch::Sender::default(),
            state,
            peers,
        });
        let weak = Arc::downgrade(&uplink);
        ready.require(move || match weak.upgrade() {
            None => ready::PartReady::Gone,
            Some(uplink) if !uplink.is_within_reach() => {
                ready::PartReady::Missing(format!("no connection to {}", uplink.names()))
            }
            Some(uplink) => match uplink.refused_everywhere() {
                Some(refused) => ready::PartReady::Missing(format!("{}: {refused}", uplink.names())),
                None => ready::PartReady::Ready,
            },
        });
        uplink
    }

    /// Sets the terms of the paths, by name; paths without an entry get the default. Placements use them at once for new tunnels and
    /// requests, and for open UDP tunnels when these are next asked whether another path is better.
    pub fn set_terms(&self, terms: &BTreeMap<String, PathTerms>) {
        for (path, view) in self.paths.iter().zip(&mut *self.views.lock()) {
            view.set_terms(terms.get(&path.name).copied().unwrap_or_default());
        }
    }

    /// Returns the hosts and ports of the relays.
    #[must_use]
    pub fn names(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for name in self.paths.iter().flat_map(|path| &path.relays).map(|relay| relay.origin().to_string()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(", ")
    }

    /// Whether there is a connection, or there was one that did not end in silence, and no attempt to make another has failed since:
    /// relays end unused connections. Without a connection, this requests one. If there are other gateways, a silent gateway is out of
    /// reach.
    #[must_use]
    pub fn is_within_reach(&self) -> bool {
        let state = self.state.borrow();
        if state.usable().next().is_some() {
            return true;
        }
        self.wanted.notify_one();
        let is_silent = self.has_peers() && state.lines.iter().any(|line| line.is_doubted());
        state.is_expected && !is_silent
    }

    /// Returns how the credentials are refused, if each relay to which there was a connection refuses them. That a relay has no place for
    /// another connection matters only while none works.
    #[must_use]
    pub(crate) fn refused_everywhere(&self) -> Option<CredentialsRefused> {
        let state = self.state.borrow();
        let mut refused = None;
        for (path, relays) in state.attempts.iter().enumerate() {
            for place in (0..relays.len()).filter(|place| relays[*place].connects > 0) {
                let refusal = self.refused((path, place))?;
                if refusal.is_of_one_connection() && state.usable().any(|line| line.relay.is_let_in()) {
                    return None;
                }
                refused = Some(refusal);
            }
        }
        refused
    }

    /// Returns the refusal of the credentials by a relay. `at` holds the index of the path, and the relay's index on it.
    fn refused(&self, at: (usize, usize)) -> Option<CredentialsRefused> {
        self.endpoint_at(at)?.credentials().refused()
    }

    /// Returns all open connections, also connections that take no new tunnels.
    #[must_use]
    pub fn open_lines(&self) -> Vec<Arc<Line>> {
        self.state.borrow().lines.iter().filter(|line| !line.is_closed()).cloned().collect()
    }

    /// Returns the open connections that take tunnels.
    #[must_use]
    pub fn lines(&self) -> Vec<Arc<Line>> {
        self.state.borrow().usable().cloned().collect()
    }

    /// Returns the name of the hop that a connection leads through; empty without one.
    #[must_use]
    pub fn via_of(&self, line: &Line) -> String {
        self.endpoint_of(line).and_then(Endpoint::via).unwrap_or_default().to_owned()
    }

    /// Logs that a relay refuses the credentials. Later answers of the same kind are no news (see
    /// [`CredentialsStanding::note`](relay_client::credentials::CredentialsStanding::note)).
    pub fn tell_refusal(&self, line: &Line, refused: &CredentialsRefused) {
        let (relay, path) = (&line.way().relay, self.path_name(line));
        let remedy = self.endpoint_of(line).map(Endpoint::remedy).unwrap_or_default();
        warn!(%relay, path = (!path.is_empty()).then_some(path), "{refused}: {remedy}");
    }

    fn endpoint_of(&self, line: &Line) -> Option<&Endpoint> {
        self.paths.get(line.path_place)?.relays.get(line.place)
    }

    /// Whether tunnels and requests may take different paths.
    #[must_use]
    pub fn has_several_paths(&self) -> bool {
        self.paths.len() > 1
    }

    /// Whether the configuration has paths, which are then reported.
    fn has_paths(&self) -> bool {
        self.paths.iter().any(|path| !path.name.is_empty())
    }

    /// Returns the discipline of the connections.
    fn discipline(&self) -> Discipline {
        self.paths.iter().flat_map(|path| &path.relays).next().map(Endpoint::discipline).unwrap_or_default()
    }

    /// Whether tunnels can leave a silent connection: for another path, another relay, or another gateway.
    fn has_alternatives(&self) -> bool {
        self.has_several_paths() || self.has_several_relays() || self.has_peers()
    }

    fn has_several_relays(&self) -> bool {
        self.paths.iter().any(|path| path.relays.len() > 1)
    }

    /// Sets the connections to other gateways that can take the requests of this one.
    pub fn set_peers(&self, peers: Vec<Weak<Self>>) {
        *self.peers.lock() = peers;
    }

    /// Whether there are connections to other gateways that can take the requests of this one.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.peers.lock().iter().any(|peer| peer.strong_count() > 0)
    }

    /// Whether another gateway can take this gateway's requests now.
    fn has_working_peer(&self) -> bool {
        let peers: Vec<_> = self.peers.lock().iter().filter_map(Weak::upgrade).collect();
        peers.iter().any(|peer| peer.state.borrow().usable().next().is_some())
    }

    /// Counts a tunnel that moved away from one connection to another; `is_return` says that it was asked whether that path suits it
    /// better.
    pub fn note_move(&self, from: &Line, to: &Line, is_return: bool) {
        self.counters.moved_tunnels.inc();
        if let Some(path) = self.paths.get(from.path_place).filter(|_| from.path_place != to.path_place) {
            path.moved.fetch_add(1, Relaxed);
            self.counters.of_path(&path.name).inc();
        }
        if let Some(path) = self.paths.get(to.path_place).filter(|_| is_return) {
            self.counters.returned_tunnels.inc();
            path.returned.fetch_add(1, Relaxed);
        }
    }

    /// Notes that a relay has no room for the tunnel with this place beside the others. Tunnels to it that were
    /// replaced and only receive end at once.
    pub fn limit(&self, link: &Link) {
        link.limit();
        let relay = &link.line().way().relay;
        self.state.borrow().lines.iter().filter(|line| line.leads_to(relay)).for_each(|line| line.part());
    }

    /// Counts a copy of a request.
    pub fn note_copy(&self) {
        self.counters.copies.inc();
    }

    /// Counts a copy whose answer came first.
    pub fn note_copy_first(&self) {
        self.counters.copies_first.inc();
    }

    /// Returns the name of a connection's path; empty if there are no paths.
    #[must_use]
    pub fn path_name(&self, line: &Line) -> &str {
        self.paths.get(line.path_place).map_or("", |path| path.name.as_str())
    }

    /// Returns how a connection's packets leave, for people; empty if the routes decide.
    #[must_use]
    pub fn exit_of(&self, line: &Line) -> &str {
        self.paths.get(line.path_place).map_or("", |path| path.exit.as_str())
    }

    /// Logs a change of a path and its relay, and notifies listeners of it.
    fn announce(&self, line: &Line, what: &str) {
        let said = self.say(line, what);
        self.changes.tell(said);
    }

    /// Logs what happens to a connection's path, or to its relay if there are no paths, and returns the message.
    fn say(&self, line: &Line, what: &str) -> String {
        let (path, relay) = (self.path_name(line), &line.way().relay);
        let requests = line.requests();
        let tunnels = line.tunnels().saturating_sub(requests);
        let path = Some(path).filter(|path| !path.is_empty());
        let said = match path {
            Some(path) => format!("the path {path} to {relay} {what}"),
            None => format!("the relay {relay} {what}"),
        };
        info!(path, %relay, tunnels, requests, "{said}");
        said
    }

    /// Handles a connection that does not answer: other connections take its tunnels. `is_known` says that another connection over
    /// the same path to the same relay is silent already, so that listeners were told.
    fn fall_silent(&self, line: &Line, is_known: bool) {
        if !is_known {
            // Another gateway takes requests, but no tunnels.
            let what = match self.has_several_paths() || self.has_several_relays() {
                true => "does not answer: moving its tunnels",
                false => "does not answer: sending its requests to another gateway",
            };
            self.announce(line, what);
            self.counters.silent.inc();
        }
        line.doubt(true);
    }

    fn endpoint_at(&self, (path, place): (usize, usize)) -> Option<&Endpoint> {
        self.paths.get(path)?.relays.get(place)
    }

    /// Closes all connections gracefully. The caller must drop [`Uplink::run`] first.
    pub async fn close(&self) {
        let lines = self.state.borrow().lines.clone();
        // All at once, because each waits for its last packets.
        join_all(lines.iter().filter_map(|line| Some(self.endpoint_of(line)?.close(&line.relay)))).await;
    }
}
