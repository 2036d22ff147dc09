//! The state that all clients of a proxy share: its protocols, how it reaches relays, and its limits.

use std::{sync::Arc, time::Duration};

use config::{forward::TunnelMode, proxy::ProxyKind};
use tokio::sync::Semaphore;

use super::{udp_places::UdpPlaces, users::ProxyUsers};
use crate::connect::RelayAccess;

/// The reason for a tunnel that was not opened, because its client had left.
pub(super) const CLIENT_GONE: &str = "client_gone";

/// What all clients of a proxy share.
pub struct Shared {
    pub(super) access: RelayAccess,
    pub(super) protocols: Vec<ProxyKind>,
    /// `None` if all clients may use it.
    pub(super) users: Option<ProxyUsers>,
    pub(super) mode: TunnelMode,
    pub(super) udp_idle: Duration,
    /// The first and the longest wait between attempts to move a UDP tunnel. A target that was refused is not tried again for the first.
    pub(super) backoff: (Duration, Duration),
    /// The places of UDP tunnels.
    pub(super) tunnels: Arc<UdpPlaces>,
    /// The length from which answers are fetched in ranges, in bytes; `None` for never.
    pub(super) split_bytes: Option<u64>,
    /// A permit for each answer that may be fetched in ranges at once.
    pub(super) divided: Semaphore,
}

#[cfg(test)]
impl Shared {
    /// Returns what clients of a proxy without users share, whose traffic has this access to a relay.
    pub(super) fn with(access: RelayAccess, tunnels: usize) -> Arc<Self> {
        let idle = Duration::from_secs(60);
        Arc::new(Self {
            access,
            protocols: vec![ProxyKind::Socks5, ProxyKind::Http],
            users: None,
            mode: TunnelMode::default(),
            udp_idle: idle,
            backoff: (idle, idle),
            tunnels: UdpPlaces::new(tunnels),
            split_bytes: None,
            divided: Semaphore::new(0),
        })
    }
}
