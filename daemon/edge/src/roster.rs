//! What the edge role has open, as the control plane and metrics see it.
//!
//! An entry lives as long as its tunnel, whose task owns it; the table only points to it.

use std::{
    net::SocketAddr,
    ops::Deref,
    sync::{Arc, Weak},
    time::SystemTime,
};

use config::targets::Protocol;
use masque::target::Target;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use quic::class::{Class, Membership};
use role::{table::Table, traffic::Traffic};
use tokio::sync::Notify;

use super::{
    LocalAddressCounters,
    link::{Line, Link},
    uplink::Uplink,
};

/// The tunnels, local addresses and relays of the edge role.
#[derive(Default)]
pub struct Roster {
    /// Open tunnels. The relay's IDs come from the same count.
    pub tunnels: Table<EdgeTunnel>,
    entrances: Mutex<Vec<Weak<LocalAddressCounters>>>,
    uplinks: Mutex<Vec<Weak<Uplink>>>,
}

impl std::fmt::Debug for Roster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Roster").field("tunnels", &self.tunnels.len()).finish_non_exhaustive()
    }
}

/// Adds an object that is owned elsewhere to a list, and forgets dropped objects.
fn note<T>(list: &Mutex<Vec<Weak<T>>>, new: &Arc<T>) {
    let mut list = list.lock();
    list.retain(|known| known.strong_count() > 0);
    list.push(Arc::downgrade(new));
}

fn living<T>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    list.lock().iter().filter_map(Weak::upgrade).collect()
}

impl Roster {
    /// Notes a local address, which is listed while it is served.
    pub(super) fn note_entrance(&self, counters: &Arc<LocalAddressCounters>) {
        note(&self.entrances, counters);
    }

    /// Notes the connections to a relay, which are listed while they are used.
    pub fn note_uplink(&self, uplink: &Arc<Uplink>) {
        note(&self.uplinks, uplink);
    }

    /// Returns the served local addresses.
    #[must_use]
    pub fn entrances(&self) -> Vec<Arc<LocalAddressCounters>> {
        living(&self.entrances)
    }

    /// Returns the relays in use.
    #[must_use]
    pub fn uplinks(&self) -> Vec<Arc<Uplink>> {
        living(&self.uplinks)
    }

    /// Enters a tunnel to `target` that goes over `link`, on the stream with this ID.
    #[must_use]
    pub(super) fn enter(
        self: &Arc<Self>,
        owner: TunnelOwner,
        (protocol, target): (Protocol, &Target),
        (link, stream_id): (&Link, u64),
    ) -> RosterEntry {
        let tunnel = self.tunnels.insert(|id| EdgeTunnel {
            id,
            connection: link.connection(),
            path: link.line().exit().path().clone(),
            stream_id,
            owner,
            protocol,
            target: target.clone(),
            since: SystemTime::now(),
            traffic: Arc::default(),
            closed: Notify::new(),
        });
        RosterEntry { tunnel, roster: self.clone(), open: None }
    }

    /// The open connections with an ID above `after`, by ID, each with its relay.
    #[must_use]
    pub fn connections(&self, after: u64) -> Vec<(Arc<Uplink>, Arc<Line>)> {
        let of = |uplink: Arc<Uplink>| uplink.lines().into_iter().map(move |line| (uplink.clone(), line));
        let mut lines: Vec<_> = self.uplinks().into_iter().flat_map(of).filter(|(_, line)| line.id > after).collect();
        lines.sort_by_key(|(_, line)| line.id);
        lines
    }
}

/// The owner of a tunnel.
pub enum TunnelOwner {
    /// An application that sent to a local address.
    Application {
        /// The local address.
        listen: String,
        /// The application's address.
        sender: SocketAddr,
        /// The tunnel's class.
        membership: Membership,
    },
    /// A hop: the tunnel carries the connection to the relay behind the hop, with the tunnels of applications in it. It has no class.
    Hop {
        /// The hop's name.
        name: String,
    },
}

/// A tunnel through a relay.
pub struct EdgeTunnel {
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// The ID of the connection that it goes over.
    pub connection: u64,
    /// The name of that connection's path; empty without one.
    pub path: Arc<str>,
    /// The ID of its request's stream there.
    pub stream_id: u64,
    /// Its owner.
    pub owner: TunnelOwner,
    /// What it carries.
    pub protocol: Protocol,
    /// Its target.
    pub target: Target,
    /// When it was opened.
    pub since: SystemTime,
    /// What went through it.
    pub traffic: Arc<Traffic>,
    closed: Notify,
}

impl EdgeTunnel {
    /// Returns the tunnel's present class; `None` for a hop.
    #[must_use]
    pub fn class(&self) -> Option<Arc<Class>> {
        match &self.owner {
            TunnelOwner::Application { membership, .. } => Some(membership.get()),
            TunnelOwner::Hop { .. } => None,
        }
    }

    /// Ends it.
    pub fn close(&self) {
        self.closed.notify_one();
    }

    /// Completes when the tunnel has to end.
    pub async fn closed(&self) {
        self.closed.notified().await;
    }
}

/// A tunnel's place in the roster, given back when dropped.
pub struct RosterEntry {
    tunnel: Arc<EdgeTunnel>,
    roster: Arc<Roster>,
    /// The gauge of open tunnels, for an application's tunnel.
    open: Option<Gauge>,
}

impl RosterEntry {
    /// Returns the tunnel, which may outlive its place in the list.
    #[must_use]
    pub fn tunnel(&self) -> Arc<EdgeTunnel> {
        self.tunnel.clone()
    }
}

impl Deref for RosterEntry {
    type Target = EdgeTunnel;

    fn deref(&self) -> &EdgeTunnel {
        &self.tunnel
    }
}

impl Drop for RosterEntry {
    fn drop(&mut self) {
        self.roster.tunnels.remove(self.tunnel.id);
        if let Some(open) = &self.open {
            open.dec();
        }
    }
}

impl LocalAddressCounters {
    /// Enters a tunnel for `sender` to `target` that goes over `link`, on the stream with this ID, in the class of `membership`.
    #[must_use]
    pub fn enter(
        &self,
        sender: SocketAddr,
        (protocol, target): (Protocol, &Target),
        (link, stream_id): (&Link, u64),
        membership: &Membership,
    ) -> RosterEntry {
        let owner =
            TunnelOwner::Application { listen: self.listen().to_owned(), sender, membership: membership.clone() };
        let mut entry = self.roster.enter(owner, (protocol, target), (link, stream_id));
        self.open.inc();
        entry.open = Some(self.open.clone());
        link.carries_traffic(entry.traffic.clone(), &membership.get(), None);
        entry
    }

    /// Adds what a tunnel has moved since `counted`, which is brought up to date.
    pub fn count(&self, traffic: &Traffic, counted: &mut (u64, u64)) {
        let now = traffic.bytes();
        self.bytes_up.inc_by(now.0 - counted.0);
        self.bytes_down.inc_by(now.1 - counted.1);
        *counted = now;
    }
}
