//! The edge role: local addresses whose traffic goes to a target through a relay.
//!
//! ```text
//! application → local UDP address → a tunnel per sender ────┐
//! application → local TCP address → a CONNECT per connection ┼ one connection per relay, credentials, schedule → relay → target
//! application → local HTTP address → a stream per request ──┘                                             or gateway → engine
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`local`] | a local UDP address and the tunnels of its senders |
//! | [`tcp`] | a local TCP address and its connections |
//! | [`proxy`] | a local proxy, whose clients choose targets by themselves |
//! | [`serve`] | a local address for clients of the OpenAI API |
//! | [`connect`] | how incoming traffic gets to its target: CONNECT, and how refusals are handled |
//! | [`balance`] | which of several gateways gets a request |
//! | [`classes`] | the class of each local address |
//! | [`schedules`] | the schedule that each connection to a relay follows |
//! | [`counters`] | counters by local address |
//! | [`hop`] | relays that are reached through others |
//! | [`parting`] | tunnels that others have replaced, which still receive for a while |
//! | [`roster`] | local addresses, open tunnels and connections, as the control plane and metrics see them |
//! | `socket` | the socket of a local address |
//! | `resources` | what the role shares with the rest of its process |
//! | [`sources`] | the table of senders |
//! | `wanted` | the local addresses that a configuration needs, and their connections |
//! | `prepared`, `preparing` | what is made before the addresses of a new configuration are served, and how |
//! | [`notice`] | when to say that something failed |
//!
//! The connections to relays, which local addresses share, are the crate [`uplink`].
//!
//! **Invariant:** a sender never waits for another, and no sender can make the edge hold more than a bounded number of bytes for
//! it; payloads that exceed a bound are dropped, oldest first, and counted.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use config::forward::Forward;
use futures::future::join_all;
use quic::endpoint::Transport;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tracing::info;
use uplink::{Uplink, moves::HostNetwork};

pub mod balance;
pub mod classes;
pub mod connect;
pub mod counters;
pub mod hop;
pub mod local;
pub mod notice;
pub mod parting;
mod prepared;
mod preparing;
pub mod proxy;
mod resources;
pub mod roster;
pub mod schedules;
pub mod serve;
mod socket;
pub mod sources;
pub mod tcp;
#[cfg(test)]
mod tests;
mod wanted;

pub use classes::EntranceClasses;
pub use counters::{EdgeMetrics, LocalAddressCounters};
pub use prepared::PreparedAddresses;
use prepared::{Member, Other, Place, Served};
pub use resources::EdgeResources;
pub use schedules::NamedSchedules;
use serve::LastAnswers;
use wanted::{SharingKey, Wanted};

/// The edge role: the served local addresses, and the connections to relays that they share.
///
/// Local addresses come as a list, and a later list replaces the one before. An address that is the same in both keeps its
/// senders and their tunnels; a new or different one begins again, on the same local socket if the address is the same.
pub struct Edge {
    transport: Transport,
    resources: EdgeResources,
    schedules: NamedSchedules,
    /// Reports changes of this host's addresses and devices.
    moves: watch::Receiver<HostNetwork>,
    served: Vec<Served>,
    uplinks: Vec<Shared>,
    locals: JoinSet<io::Result<()>>,
    /// The tasks that keep connections up, and close unused ones.
    connections: JoinSet<()>,
    /// Answers of local addresses that have ended.
    last_answers: LastAnswers,
    /// Whether it has begun to serve, so that all that follows is a reload.
    has_begun: bool,
}

/// A connection to a relay that local addresses share.
struct Shared {
    key: SharingKey,
    uplink: Arc<Uplink>,
    task: AbortHandle,
    /// Whether it may carry the last answers of a local address that has ended.
    may_answer: bool,
}

impl Edge {
    /// Returns a role without local addresses, whose connections have these settings. `schedules` order the traffic of one
    /// connection, and `moves` reports changes of this host's addresses and devices.
    #[must_use]
    pub fn new(
        transport: Transport,
        resources: EdgeResources,
        schedules: NamedSchedules,
        moves: watch::Receiver<HostNetwork>,
    ) -> Self {
        let (locals, connections, last_answers) = (JoinSet::new(), JoinSet::new(), LastAnswers::default());
        let (served, uplinks, has_begun) = (Vec::new(), Vec::new(), false);
        Self { transport, resources, schedules, moves, served, uplinks, locals, connections, last_answers, has_begun }
    }

    /// Serves exactly the addresses that were prepared last, each in the class that `classes` has for it.
    pub fn serve(
        &mut self,
        PreparedAddresses { places, terms, kept: _ }: PreparedAddresses,
        classes: &EntranceClasses,
    ) {
        self.has_begun = true;
        let mut before: Vec<Option<Served>> = self.served.drain(..).map(Some).collect();
        let (mut same, mut others) = (Vec::new(), Vec::new());
        for place in places {
            match place {
                Place::Same(place) => same.extend(before.get_mut(place).and_then(Option::take)),
                Place::Other(other) => others.push(other),
            }
        }
        self.served = same;
        self.uplinks.iter().for_each(|shared| shared.uplink.set_terms(&terms));
        for other in &others {
            let changed: Vec<_> = before.iter().flatten().flat_map(|served| other.changed_files(served)).collect();
            if !changed.is_empty() {
                info!(
                    listen = %other.wanted.listen(), protocol = other.wanted.name(), files = changed.join(", "),
                    "files have changed: restarting the local address"
                );
            }
        }
        let uses = |served: &Served, key: &SharingKey| served.keys.contains(key) || served.before.contains(key);
        let serves_models = |served: &&Served| matches!(served.wanted, Wanted::Serve(_));
        let ending: Vec<_> = before.iter().flatten().filter(serves_models).collect();
        for shared in &mut self.uplinks {
            shared.may_answer |= ending.iter().any(|served| uses(served, &shared.key));
        }
        for served in before.into_iter().flatten() {
            served.task.abort();
            if others.iter().all(|other| !other.wanted.is_at(&served.wanted)) {
                info!(listen = %served.wanted.listen(), protocol = served.wanted.name(), "no longer forwarding");
            }
        }
        for other in others {
            let Other { wanted, contents, keys, before, socket, member, serving } = *other;
            match &member {
                Member::Traffic(membership) => classes.enrol(wanted.class(), membership),
                Member::Requests(requests) => classes.enrol_requests(requests),
            }
            for (key, uplink) in before.iter().chain(&keys) {
                if self.uplinks.iter().any(|shared| shared.key == *key) {
                    continue;
                }
                uplink.set_terms(&terms);
                let (runner, moves) = (uplink.clone(), self.moves.clone());
                self.resources.roster.note_uplink(uplink);
                let task = self.connections.spawn(async move { runner.run(moves).await });
                self.uplinks.push(Shared { key: key.clone(), uplink: uplink.clone(), task, may_answer: false });
            }
            let [keys, before] = [keys, before].map(|keys| keys.into_iter().map(|(key, _)| key).collect::<Vec<_>>());
            let (listen, protocol, relay) = (wanted.listen(), wanted.name(), wanted.through());
            match &wanted {
                Wanted::Forward(Forward { target, .. }) => info!(%listen, protocol, %target, %relay, "forwarding"),
                Wanted::Proxy(_) => info!(%listen, %relay, "serving as a proxy"),
                Wanted::Serve(_) => info!(%listen, gateway = %relay, "serving models"),
            }
            let task = self.locals.spawn(serving);
            self.served.push(Served { wanted, contents, keys, before, socket, task });
        }
        while self.connections.try_join_next().is_some() {}
        let served = &self.served;
        let is_unused = |shared: &mut Shared| !served.iter().any(|served| uses(served, &shared.key));
        let unused = self.uplinks.extract_if(.., is_unused);
        let (answering, silent): (Vec<_>, Vec<_>) = unused.partition(|shared| shared.may_answer);
        self.close_uplinks(silent, None);
        self.close_uplinks(answering, Some(self.last_answers.clone()));
        self.link_gateways();
    }

    /// Tells each uplink to a gateway which other uplinks can take its requests: a local address spreads its requests over both.
    fn link_gateways(&self) {
        for Shared { key, uplink, .. } in &self.uplinks {
            let spread = self.served.iter().filter(|served| served.keys.contains(key)).flat_map(|served| &served.keys);
            let together: Vec<_> = spread.filter(|other| *other != key).collect();
            let others = self.uplinks.iter().filter(|other| together.contains(&&other.key));
            uplink.set_peers(others.map(|other| Arc::downgrade(&other.uplink)).collect());
        }
    }

    /// Closes connections gracefully after their tunnels were told to end, and after the last answers if there are any on them. A
    /// connection inside a tunnel closes before the connection that carries the tunnel.
    fn close_uplinks(&mut self, uplinks: Vec<Shared>, last_answers: Option<LastAnswers>) {
        let mut by_hops: BTreeMap<usize, Vec<Arc<Uplink>>> = BTreeMap::new();
        self.connections.spawn(async move {
            tokio::task::yield_now().await;
            if let Some(last_answers) = last_answers {
                last_answers.ended().await;
            }
            for Shared { key, uplink, task, .. } in uplinks {
                task.abort();
                by_hops.entry(key.hops.len()).or_default().push(uplink);
            }
            for uplinks in by_hops.into_values().rev() {
                join_all(uplinks.iter().map(|uplink| uplink.close())).await;
            }
        });
    }

    /// Completes when a local address cannot be served any more.
    ///
    /// # Errors
    /// Always: the local socket failed for good.
    pub async fn failed(&mut self) -> Result<()> {
        loop {
            match self.locals.join_next().await {
                // An address that is no longer served.
                Some(Err(error)) if error.is_cancelled() => {}
                Some(ended) => return ended.context("a local address ended")?.context("a local socket failed"),
                None => std::future::pending().await,
            }
        }
    }

    /// How long [`Edge::end`] may take; `None` if no local address serves models, and no answer of a previous one goes on.
    #[must_use]
    pub fn drain(&self) -> Option<Duration> {
        let serves_models = self.served.iter().any(|served| matches!(served.wanted, Wanted::Serve(_)));
        (serves_models || self.last_answers.go_on()).then_some(config::relay::DRAIN)
    }

    /// Cuts the answers that have not ended.
    pub fn cut(&self) {
        self.last_answers.cut();
    }

    /// Stops serving, and waits for answers that have begun.
    pub async fn end(&mut self) {
        self.served.clear();
        self.locals.shutdown().await;
        self.last_answers.ended().await;
    }

    /// Ends as [`Edge::end`] does, and closes the connections to relays gracefully.
    pub async fn close(&mut self) {
        self.end().await;
        let uplinks = std::mem::take(&mut self.uplinks);
        self.close_uplinks(uplinks, None);
        while self.connections.join_next().await.is_some() {}
    }
}
