//! A local address, as all its tunnels share it: its socket, its target, and the connections to relays that they may use.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use config::forward::TunnelMode;
use masque::{priority::Priority, target::Target};
use parking_lot::Mutex;
use quic::class::{Class, Membership};
use quinn_udp::UdpSocketState;
use relay_client::backoff::Backoff;
use tokio::{net::UdpSocket, sync::Notify, time::Instant};
use tracing::warn;
use uplink::Uplink;

use crate::{counters::LocalAddressCounters, notice::Notice, roster::LocalEntrance};

/// What the tunnels of a local address share.
pub(super) struct LocalAddress {
    pub(super) socket: UdpSocket,
    pub(super) state: UdpSocketState,
    pub(super) target: Target,
    pub(super) mode: TunnelMode,
    /// The class of payloads that leave for the relay.
    pub(super) membership: Membership,
    /// Whether the configuration chose the class. If not, the relay gets no priority signal for the data that it sends back.
    pub(super) is_chosen: bool,
    pub(super) uplink: Arc<Uplink>,
    /// When a tunnel may be opened again after a refusal.
    pub(super) backoff: Mutex<Backoff>,
    pub(super) first_wait: Duration,
    /// How many senders must leave so that others find a place.
    pub(super) crowding: AtomicUsize,
    pub(super) crowded: Notify,
    pub(super) notice: Notice,
    /// Where its tunnels are listed, and refusals are recorded.
    pub(super) entrance: Arc<LocalEntrance>,
    pub(super) counters: Arc<LocalAddressCounters>,
}

impl LocalAddress {
    /// Returns the priority signal that tells the relay how to rank payloads that it sends back.
    pub(super) fn signal(&self, class: &Class) -> Option<Priority> {
        self.is_chosen.then(|| class.signal())
    }

    /// Warns that a limit was reached, at a limited rate.
    pub(super) fn say(&self, what: &str) {
        if self.notice.is_due(Instant::now()) {
            warn!(relay = %self.uplink.names(), listen = %self.entrance.address, "{what}");
        }
    }
}
