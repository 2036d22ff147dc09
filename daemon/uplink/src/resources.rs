//! What uplinks share with each other and with the rest of the process. It outlives them: a reload may replace uplinks.

use std::sync::{Arc, atomic::AtomicU64};

use role::ready::Readiness;

use super::counters::ConnectionCounters;
use crate::path::changes::PathChanges;

/// What all uplinks of a process share. Clones share it, too.
#[derive(Clone, Debug, Default)]
pub struct UplinkResources {
    /// Counters of connections, and of moves between paths.
    pub counters: Arc<ConnectionCounters>,
    /// What happened to paths and relays, for listeners.
    pub changes: Arc<PathChanges>,
    /// Whether the daemon is ready; each living uplink is a part of this.
    pub ready: Arc<Readiness>,
    /// The last connection ID, including IDs of the relay role's clients.
    pub ids: Arc<AtomicU64>,
}
