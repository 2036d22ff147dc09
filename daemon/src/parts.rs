//! State that the roles, the doors and the metrics of one daemon share, whichever of them run.

use std::sync::Arc;

use config::{policy::Policy, transport::TransportSettings};
use edge::EdgeResources;
use enforcement::Tables;
use pacing::io::{PacketObservers, qdisc};
use prometheus_client::metrics::counter::Counter;
use quic::class::{ClassMetrics, PolicyRole};
use relay::{RelayMetrics, usage::Usages};
use role::{
    accept, access::AccessLog, classes::Classes, kept::SaveFailures, ready::Readiness, user_labels::UserLabels,
};
use serving::{decisions::Decisions, live::Live, metrics::GatewayMetrics};
use tenants::spending::Spending;
use uplink::UplinkResources;

/// Counters and tables that all parts of the daemon share. They start at zero, and no policy is in force.
pub struct Parts {
    /// Whether this daemon is ready for work.
    pub ready: Arc<Readiness>,
    /// Counters of callers at doors other than the relay's.
    pub doors: accept::AcceptCounters,
    /// Counters of the relay role.
    pub relay: Arc<RelayMetrics>,
    /// The usage of each of its users.
    pub usages: Arc<Usages>,
    /// The users with metrics of their own, in all roles: as many as `users` of `[metrics]` allows.
    pub users: UserLabels,
    /// Counters of the gateway role.
    pub gateway: GatewayMetrics,
    /// The requests that the gateway role serves, whichever gateway of a configuration they began with.
    pub requests: Arc<Live>,
    /// Decisions of the aliases' policies that are not yet written.
    pub decisions: Decisions,
    /// The tokens that each client's key has used this month, over all gateways.
    pub spending: Arc<Spending>,
    /// Counters of the edge role, and what it has open.
    pub edge: EdgeResources,
    /// Counters of each class's traffic.
    pub classes: ClassMetrics,
    /// Where QUIC packets are counted and recorded on their way to the kernel, in either role.
    pub packets: PacketObservers,
    /// Gauges of the departure times that devices keep.
    pub qdiscs: qdisc::Gauges,
    /// The tables that the kernel enforces and counts in.
    pub kernel: Arc<Tables>,
    /// Counts how often busy threads that move packets let events gather.
    pub rests: Counter,
    /// The access log.
    pub access: Arc<AccessLog>,
    /// Counters of failed saves in the state folder.
    pub saves: SaveFailures,
}

impl Default for Parts {
    fn default() -> Self {
        let (ready, access) = (Arc::<Readiness>::default(), Arc::<AccessLog>::default());
        let users = UserLabels::default();
        let uplinks = UplinkResources { ready: ready.clone(), ..UplinkResources::default() };
        Self {
            edge: EdgeResources { access: access.clone(), uplinks, ..EdgeResources::default() },
            ready,
            doors: accept::AcceptCounters::default(),
            relay: Arc::new(RelayMetrics::new(users.clone())),
            usages: Arc::new(Usages::new(users.clone())),
            gateway: GatewayMetrics::new(users.clone()),
            users,
            requests: Arc::default(),
            decisions: Decisions::default(),
            spending: Arc::default(),
            classes: ClassMetrics::default(),
            packets: PacketObservers::default(),
            qdiscs: qdisc::Gauges::default(),
            kernel: Arc::default(),
            rests: Counter::default(),
            access,
            saves: SaveFailures::default(),
        }
    }
}

impl Parts {
    /// Returns how the threads that move packets wait for events.
    pub(crate) fn waits(&self, transport: &TransportSettings) -> turns::Waits {
        turns::Waits { coalesce: transport.coalesce, busy_poll: transport.busy_poll, rests: self.rests.clone() }
    }

    /// Returns the classes of a policy in one role, with the kernel's marks.
    pub(crate) fn classes_of(&self, policy: &Policy, role: PolicyRole) -> Arc<Classes> {
        let marks = self.kernel.marks();
        let of_class = |class: &str| marks.as_ref().map(|marks| marks.of_class(class, role)).unwrap_or_default();
        Arc::new(Classes::new(policy.clone(), role, &self.classes, of_class))
    }
}
