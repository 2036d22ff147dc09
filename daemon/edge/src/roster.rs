//! What the edge role has open, as the control plane and metrics see it.
//!
//! An entry lives as long as its tunnel, whose task owns it; the table only points to it.

use std::{
    net::SocketAddr,
    sync::{Arc, Weak},
};

use config::targets::Protocol;
use masque::target::Target;
use parking_lot::Mutex;
use quic::datagrams::Losses;
use role::{access::AccessLog, table::Table};
use uplink::{Line, Link, Uplink};

use super::counters::LocalAddressCounters;

mod entrance;
mod gauges;
mod tunnel;

pub use entrance::LocalEntrance;
pub(super) use tunnel::UNSERVED;
pub use tunnel::{EdgeTunnel, LocalClient, RosterEntry, TunnelOwner};

/// The tunnels, relays and local addresses of the edge role.
#[derive(Default)]
pub struct Roster {
    /// Open tunnels. The relay's IDs come from the same count.
    pub tunnels: Arc<Table<EdgeTunnel>>,
    uplinks: Mutex<Vec<Weak<Uplink>>>,
    entrances: Mutex<Vec<Weak<LocalEntrance>>>,
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

/// Returns the objects of a list that still exist.
fn living<T>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    list.lock().iter().filter_map(Weak::upgrade).collect()
}

impl Roster {
    /// Enters a local address, which is listed while it is served, and returns it. Its tunnels count in `counters`; `access` records
    /// them, and refusals.
    #[must_use]
    pub fn note_entrance(
        &self,
        (address, protocol): (SocketAddr, &'static str),
        counters: Arc<LocalAddressCounters>,
        access: Arc<AccessLog>,
    ) -> Arc<LocalEntrance> {
        let entrance = Arc::new(LocalEntrance { address, protocol, counters, access, tunnels: self.tunnels.clone() });
        note(&self.entrances, &entrance);
        entrance
    }

    /// Returns the served local addresses.
    #[must_use]
    pub fn entrances(&self) -> Vec<Arc<LocalEntrance>> {
        living(&self.entrances)
    }

    /// Notes the connections to a relay, which are listed while they are used.
    pub fn note_uplink(&self, uplink: &Arc<Uplink>) {
        note(&self.uplinks, uplink);
    }

    /// Returns the relays in use.
    #[must_use]
    pub fn uplinks(&self) -> Vec<Arc<Uplink>> {
        living(&self.uplinks)
    }

    /// Enters a tunnel to `target` that goes over `link`, on the stream with this ID. `losses` are those of a UDP tunnel of an application.
    #[must_use]
    pub(super) fn enter(
        &self,
        owner: TunnelOwner,
        target: (Protocol, &Target),
        stream: (&Link, u64),
        losses: Option<Arc<Losses>>,
    ) -> RosterEntry {
        RosterEntry::new(&self.tunnels, owner, target, stream, losses)
    }

    /// The open connections with an ID above `after`, by ID, each with its relay.
    #[must_use]
    pub fn connections(&self, after: u64) -> Vec<(Arc<Uplink>, Arc<Line>)> {
        let of = |uplink: Arc<Uplink>| uplink.open_lines().into_iter().map(move |line| (uplink.clone(), line));
        let mut lines: Vec<_> = self.uplinks().into_iter().flat_map(of).filter(|(_, line)| line.id > after).collect();
        lines.sort_by_key(|(_, line)| line.id);
        lines
    }
}

#[cfg(test)]
mod tests {
    use test_relay::{Does, PATIENCE, TestRelay, eventually};
    use uplink::UplinkResources;

    use super::*;
    use crate::tests::start;

    #[tokio::test]
    async fn a_connection_that_takes_no_tunnels_is_listed_while_it_is_open() {
        let (relay, roster) = (TestRelay::start(Does::Echo, true), Roster::default());
        let uplink = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default());
        roster.note_uplink(&uplink);
        let running = start(&uplink);
        let line = uplink.link().await.unwrap().line().clone();
        eventually(|| line.relay.is_let_in()).await;
        let listed = || roster.connections(0).iter().map(|(_, line)| line.id).collect::<Vec<_>>();
        line.doubt(true);
        assert_eq!(listed(), [line.id], "it may have tunnels, and be recorded");
        relay.shut();
        eventually(|| listed().is_empty()).await;
        running.abort();
    }
}
