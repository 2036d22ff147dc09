//! What the edge role shares with the rest of its process. It outlives the local addresses, which a reload may replace.

use std::{net::SocketAddr, sync::Arc};

use prometheus_client::registry::Registry;
use role::access::AccessLog;
use uplink::UplinkResources;

use super::{
    counters::EdgeMetrics,
    roster::{LocalEntrance, Roster},
};

/// The resources of an edge that live outside it. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct EdgeResources {
    /// The metrics by local address.
    pub metrics: Arc<EdgeMetrics>,
    /// The open tunnels, and the relays and local addresses in use.
    pub roster: Arc<Roster>,
    /// The log of tunnels and requests.
    pub access: Arc<AccessLog>,
    /// What the connections to relays share.
    pub uplinks: UplinkResources,
}

impl EdgeResources {
    /// Registers all metrics of the role.
    pub fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
        self.uplinks.counters.register(registry);
        self.roster.register(registry);
    }

    /// Enters a local address that serves `protocol`. For the same address and protocol, counting continues.
    #[must_use]
    pub fn entrance(&self, address: SocketAddr, protocol: &'static str) -> Arc<LocalEntrance> {
        let counters = self.metrics.of(address, protocol);
        self.roster.note_entrance((address, protocol), counters, self.access.clone())
    }
}
