//! What the roles, the doors and the metrics of one daemon have in common, whichever of them run.

use std::sync::Arc;

use edge::EdgeMetrics;
use pacing::io::qdisc;
use quic::class::ClassMetrics;
use relay::{RelayMetrics, access::AccessLog};
use role::{accept, ready::Readiness};
use serving::{decisions::Decisions, live::Live, metrics::GatewayMetrics, spending::Spending};

use crate::enforcement::Tables;

/// The parts that all others count with or command. They begin at zero, with nothing in force.
pub struct Parts {
    /// Whether this daemon should be sent work.
    pub ready: Arc<Readiness>,
    /// Counters of callers that wanted to come in at doors other than the relay's.
    pub doors: accept::AcceptCounters,
    /// What the relay role counts.
    pub relay: Arc<RelayMetrics>,
    /// What the gateway role counts.
    pub gateway: GatewayMetrics,
    /// The requests that it serves, whichever gateway of a configuration they began with.
    pub requests: Arc<Live>,
    /// What the policies of its aliases decided, until it is written.
    pub decisions: Decisions,
    /// The tokens that keys of clients were used for this month, over all gateways.
    pub spending: Arc<Spending>,
    /// What the edge role counts.
    pub edge: Arc<EdgeMetrics>,
    /// What became of each class's traffic.
    pub classes: ClassMetrics,
    /// How QUIC packets reached the kernel, in either role.
    pub io: Arc<pacing::io::IoCounters>,
    /// What becomes of departure times at devices.
    pub qdiscs: qdisc::Gauges,
    /// What the kernel enforces, and counts.
    pub kernel: Arc<Tables>,
    /// The access log.
    pub access: Arc<AccessLog>,
}

impl Default for Parts {
    fn default() -> Self {
        let ready = Arc::<Readiness>::default();
        Self {
            edge: Arc::new(EdgeMetrics::new(ready.clone())),
            ready,
            doors: accept::AcceptCounters::default(),
            relay: Arc::default(),
            gateway: GatewayMetrics::default(),
            requests: Arc::default(),
            decisions: Decisions::default(),
            spending: Arc::default(),
            classes: ClassMetrics::default(),
            io: Arc::default(),
            qdiscs: qdisc::Gauges::default(),
            kernel: Arc::default(),
            access: Arc::default(),
        }
    }
}
