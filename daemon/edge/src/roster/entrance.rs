//! A local address, as the roster and the access log know it.

use std::{fmt, net::SocketAddr, sync::Arc};

use config::targets::Protocol;
use masque::target::Target;
use quic::{class::Membership, datagrams::Losses};
use role::{
    access::{AccessLog, record::RefusedRequest},
    table::Table,
};
use uplink::Link;

use super::tunnel::{EdgeTunnel, LocalClient, RosterEntry, TunnelOwner, request_of};
use crate::counters::LocalAddressCounters;

/// A local address: where its traffic is counted, its tunnels are listed, and its refusals are recorded.
pub struct LocalEntrance {
    /// The local address.
    pub address: SocketAddr,
    /// What it serves: "udp", "tcp", "proxy" or "serve".
    pub protocol: &'static str,
    /// Its counters.
    pub counters: Arc<LocalAddressCounters>,
    /// The log of its tunnels, requests and refusals.
    pub access: Arc<AccessLog>,
    /// Where its tunnels are listed.
    pub(super) tunnels: Arc<Table<EdgeTunnel>>,
}

impl fmt::Debug for LocalEntrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, protocol, .. } = self;
        f.debug_struct("LocalEntrance").field("address", address).field("protocol", protocol).finish_non_exhaustive()
    }
}

impl LocalEntrance {
    /// Enters a tunnel for `client` to `target` that goes over `link`, on the stream with this ID, in the class of `membership`.
    /// `losses` are those of a UDP tunnel.
    #[must_use]
    pub fn enter(
        &self,
        client: &LocalClient,
        (protocol, target): (Protocol, &Target),
        (link, stream_id): (&Link, u64),
        (membership, losses): (&Membership, Option<Arc<Losses>>),
    ) -> RosterEntry {
        let (listen, client, class) = (self.address, client.clone(), membership.clone());
        let owner = TunnelOwner::Application { listen, client, membership: class };
        let entry = RosterEntry::new(&self.tunnels, owner, (protocol, target), (link, stream_id), losses);
        let entry = entry.of_application(&self.counters.open, &self.access);
        link.carries_traffic(entry.traffic.clone(), &membership.get(), None);
        entry
    }

    /// Records that a client was refused, and what it asked for, if that is known.
    pub(crate) fn record_refusal(
        &self,
        client: &LocalClient,
        asked: Option<(Protocol, &Target)>,
        refused: RefusedRequest,
    ) {
        if self.access.is_wanted() {
            self.access.refused(request_of(self.address, client, asked), refused);
        }
    }
}

#[cfg(test)]
impl LocalEntrance {
    /// Returns an entrance that counts in `counters`, and that no list has.
    pub(crate) fn counted_by(counters: &Arc<LocalAddressCounters>) -> Arc<Self> {
        Arc::new(Self {
            address: (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
            protocol: "udp",
            counters: counters.clone(),
            access: Arc::default(),
            tunnels: Arc::default(),
        })
    }
}
