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
//! | [`notice`] | when to say that something failed |
//!
//! The connections to relays, which local addresses share, are the crate [`uplink`].
//!
//! **Invariant:** a sender never waits for another, and no sender can make the edge hold more than a bounded number of bytes for
//! it; payloads that exceed a bound are dropped, oldest first, and counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use config::{Config, forward::Forward, path::PathSettings};
use futures::future::join_all;
use quic::{class::Membership, endpoint::Transport};
use relay_client::{
    access::Access,
    endpoint::{Endpoint, Via},
    exit::Exit,
};
use role::bind_error::BindError;
use serving::classes::RequestClasses;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tracing::info;
use uplink::{Path, PathTerms, Uplink, moves::HostNetwork};

pub mod balance;
pub mod classes;
pub mod connect;
pub mod counters;
pub mod hop;
pub mod local;
pub mod notice;
pub mod parting;
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
use hop::HopTunnels;
use local::Local;
use proxy::Entrance;
pub use resources::EdgeResources;
pub use schedules::NamedSchedules;
use serve::LastAnswers;
use socket::LocalSocket;
use tcp::Connections;
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

/// A local address that is served.
struct Served {
    wanted: Wanted,
    contents: [u8; 32],
    keys: Vec<SharingKey>,
    /// The keys of connections to the hops on the way.
    before: Vec<SharingKey>,
    socket: LocalSocket,
    task: AbortHandle,
}

/// A connection to a relay that local addresses share.
struct Shared {
    key: SharingKey,
    uplink: Arc<Uplink>,
    task: AbortHandle,
    /// Whether it may carry the last answers of a local address that has ended.
    may_answer: bool,
}

/// Local addresses that can be served: their files could be used and their sockets bound.
pub struct PreparedAddresses {
    places: Vec<Place>,
    /// The terms of the configuration's paths, by name.
    terms: BTreeMap<String, PathTerms>,
}

enum Place {
    /// A local address that is served already, by its place among the served ones.
    Same(usize),
    Other(Box<Other>),
}

/// The task that serves a local address, until it is dropped.
type Serving = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// A local address that is not served yet, or is served differently.
struct Other {
    wanted: Wanted,
    contents: [u8; 32],
    /// Several if requests are spread over several gateways.
    keys: Vec<(SharingKey, Arc<Uplink>)>,
    /// The connections to the hops on the way.
    before: Vec<(SharingKey, Arc<Uplink>)>,
    socket: LocalSocket,
    member: Member,
    serving: Serving,
}

impl Other {
    /// Returns the files whose change alone makes it replace `served`; empty if the configuration of the address has changed as well.
    fn changed_files(&self, served: &Served) -> Vec<String> {
        if served.wanted != self.wanted {
            return Vec::new();
        }
        let own = self.wanted.file().filter(|_| served.contents != self.contents);
        let keys = self.keys.iter().zip(&served.keys).flat_map(|((key, _), before)| key.changed_files(before));
        let files: BTreeSet<_> = own.into_iter().chain(keys).map(|file| file.display().to_string()).collect();
        files.into_iter().collect()
    }
}

/// The class or classes of a local address.
#[derive(Clone)]
enum Member {
    /// One class for all its traffic.
    Traffic(Membership),
    /// A class for each of its requests for models.
    Requests(RequestClasses),
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

    /// Prepares to serve exactly the local addresses of a configuration, without changing what is served now.
    ///
    /// # Errors
    /// A local address is taken or not ours, or a file that the configuration names is not usable. An unreachable relay is not
    /// an error: the edge tries again. Nor is a token that cannot be read before the first addresses are served: it may come later.
    pub fn prepare(&self, config: &Config) -> Result<PreparedAddresses> {
        let mut made: Vec<(SharingKey, Arc<Uplink>)> = Vec::new();
        let place = |wanted: Wanted| -> Result<Place> {
            let (keys, contents) = (wanted.sharing_keys(config), wanted.contents());
            let is_same = |of: &Served| of.wanted == wanted && of.keys == keys && of.contents == contents;
            Ok(match self.served.iter().position(is_same) {
                Some(place) => Place::Same(place),
                None => Place::Other(Box::new(self.prepare_one(wanted, contents, keys, &mut made)?)),
            })
        };
        let places = Wanted::all(config).map(place).collect::<Result<_>>()?;
        let terms = config.paths.iter().map(|path| {
            let PathSettings { name, cost, rate, .. } = path;
            (name.clone(), PathTerms { cost: *cost, rate: *rate })
        });
        Ok(PreparedAddresses { places, terms: terms.collect() })
    }

    fn prepare_one(
        &self,
        wanted: Wanted,
        contents: [u8; 32],
        keys: Vec<SharingKey>,
        made: &mut Vec<(SharingKey, Arc<Uplink>)>,
    ) -> Result<Other> {
        let (listen, name) = (wanted.listen(), wanted.name());
        let keys = keys.into_iter().map(|key| Ok((key.clone(), self.uplink(key, listen, made)?)));
        let keys: Vec<_> = keys.collect::<Result<_>>()?;
        let before = keys.iter().flat_map(|(key, _)| key.all_before());
        let before = before.map(|key| Ok((key.clone(), self.uplink(key, listen, made)?)));
        let before: Vec<_> = before.collect::<Result<_>>()?;
        let socket = match self.served.iter().find(|served| served.wanted.is_at(&wanted)) {
            // Payloads that wait in the socket go where the new address says.
            Some(served) => served.socket.try_clone().map_err(anyhow::Error::from),
            None => {
                let protocol = wanted.protocol();
                LocalSocket::bind(listen, protocol).map_err(|error| BindError::new(protocol, listen, error).into())
            }
        };
        let bind_failed = || format!("failed to serve {listen} ({name})");
        let socket = socket.with_context(bind_failed)?;
        let member = match &wanted {
            Wanted::Serve(serve) => Member::Requests(RequestClasses::at(serve)),
            _ => Member::Traffic(Membership::default()),
        };
        let own = socket.try_clone().with_context(bind_failed)?;
        let uplinks = keys.iter().map(|(_, uplink)| uplink.clone()).collect();
        let serving = self.serving(own, &wanted, member.clone(), uplinks).with_context(bind_failed)?;
        Ok(Other { wanted, contents, keys, before, socket, member, serving })
    }

    /// Returns the connections with this key, which local addresses share.
    fn uplink(
        &self,
        key: SharingKey,
        listen: SocketAddr,
        made: &mut Vec<(SharingKey, Arc<Uplink>)>,
    ) -> Result<Arc<Uplink>> {
        let known = self.uplinks.iter().map(|shared| (&shared.key, &shared.uplink));
        let mut known = known.chain(made.iter().map(|(key, uplink)| (key, uplink)));
        if let Some((_, uplink)) = known.find(|(known, _)| **known == key) {
            return Ok(uplink.clone());
        }
        let schedule = key.uplink.schedule.as_deref();
        let endpoint = |access: Access| {
            // After the start, a token may come later; but a reload must not replace what works by what cannot.
            if let Some(token) = access.token.as_ref().filter(|_| self.has_begun) {
                token.check()?;
            }
            let (counters, schedules) = (self.resources.metrics.datagrams.clone(), self.schedules.get(schedule));
            Endpoint::new(access, self.transport.clone(), counters, schedules)
        };
        let endpoints = |accesses: Vec<Access>| {
            let relays = accesses.into_iter().map(endpoint).collect::<Result<Vec<_>>>();
            relays.with_context(|| format!("failed to set up the connection from {listen} to the relay"))
        };
        let mut paths = Vec::new();
        for path in key.paths.iter().map(Some).chain(key.paths.is_empty().then_some(None)) {
            let name = path.map_or("", |path| path.name.as_str());
            let exit =
                path.map(|path| Exit::new(path.interface.clone(), path.address)).unwrap_or_default().of_path(name);
            let (exit, accesses) =
                (Arc::new(exit), path.map_or_else(|| Access::of(&key.uplink), |path| key.accesses(path)));
            let via = match key.before(path) {
                None => None,
                Some((name, before)) => {
                    let uplink = self.uplink(before, listen, made)?;
                    let EdgeResources { metrics, roster, .. } = &self.resources;
                    let tunnels = HopTunnels::new(name, uplink, roster.clone(), metrics.hop_withheld.clone());
                    Some(Arc::new(tunnels) as Arc<dyn Via>)
                }
            };
            let leaving = |relay: Endpoint| match &via {
                Some(via) => relay.through(via.clone(), &exit),
                None => relay.leaving_by(exit.clone()),
            };
            let relays = endpoints(accesses)?.into_iter().map(leaving).collect();
            paths.push(Path::new(name, relays).leaving(&exit));
        }
        let (schedule, backoff) = (key.uplink.schedule.clone(), key.uplink.backoff);
        let uplink = Uplink::over(paths, schedule, backoff, self.resources.uplinks.clone());
        made.push((key, uplink.clone()));
        Ok(uplink)
    }

    fn serving(&self, own: LocalSocket, wanted: &Wanted, member: Member, uplinks: Vec<Arc<Uplink>>) -> Result<Serving> {
        let first = uplinks.first().cloned().context("no relay is configured")?;
        let entrance = self.resources.entrance(wanted.listen(), wanted.name());
        Ok(match (own, wanted, member) {
            (LocalSocket::Udp(socket), Wanted::Forward(forward), Member::Traffic(member)) => {
                Box::pin(Local::new(socket, forward, member, first, entrance)?.run())
            }
            (LocalSocket::Tcp(socket), Wanted::Forward(forward), Member::Traffic(member)) => {
                let connections = Connections::new(socket, forward, member, first, entrance)?;
                Box::pin(async move {
                    connections.run().await;
                    Ok(())
                })
            }
            (LocalSocket::Tcp(socket), Wanted::Proxy(proxy), Member::Traffic(member)) => {
                let clients = Entrance::new(socket, proxy, member, first, entrance)?;
                Box::pin(async move {
                    clients.run().await;
                    Ok(())
                })
            }
            (LocalSocket::Tcp(socket), Wanted::Serve(serve), Member::Requests(classes)) => {
                let kept = (entrance, self.last_answers.clone());
                let clients = serve::Clients::new(socket, serve, classes, uplinks, kept)?;
                Box::pin(async move {
                    clients.run().await;
                    Ok(())
                })
            }
            _ => anyhow::bail!("it listens to TCP"),
        })
    }

    /// Serves exactly the addresses that were prepared last, each in the class that `classes` has for it.
    pub fn serve(&mut self, PreparedAddresses { places, terms }: PreparedAddresses, classes: &EntranceClasses) {
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
