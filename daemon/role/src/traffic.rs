//! The traffic of tunnels, as counted by their pumps.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

/// The traffic of a tunnel in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of UDP payloads, or of the TCP stream.
    pub bytes: u64,
    /// UDP payloads.
    pub packets: u64,
}

/// Counters of the traffic in one direction.
#[derive(Clone, Debug, Default)]
pub struct Volume {
    /// Bytes of UDP payloads, and of TCP streams.
    pub bytes: Counter,
    /// UDP payloads.
    pub packets: Counter,
}

impl Volume {
    /// Adds to both counters.
    pub fn add(&self, bytes: u64, packets: u64) {
        self.bytes.inc_by(bytes);
        self.packets.inc_by(packets);
    }
}

/// The usage of one user, over all connections.
#[derive(Debug, Default)]
pub struct UserTraffic {
    /// Traffic to targets.
    pub up: Volume,
    /// Traffic received from targets, also payloads that were dropped afterwards.
    pub down: Volume,
    /// Open tunnels.
    pub tunnels: Gauge,
    /// Tunnels opened.
    pub opened: Counter,
    /// Requests refused.
    pub refused: Counter,
}

/// The traffic of a tunnel, as counted by its pump.
#[derive(Debug, Default)]
pub struct Traffic {
    up_bytes: AtomicU64,
    up_packets: AtomicU64,
    down_bytes: AtomicU64,
    down_packets: AtomicU64,
    /// UDP payloads too big for the path to the target.
    pub too_big: AtomicU64,
    /// UDP payloads that this host refused to send to the target, or at an edge to the local client.
    pub refused_by_host: AtomicU64,
    /// The totals that count the same traffic, if there are any.
    totals: [Option<Arc<UserTraffic>>; 2],
}

impl Traffic {
    /// Creates the counters of a tunnel or request. `totals` count the same traffic, for example for its user or its local address.
    #[must_use]
    pub fn of(totals: [Option<Arc<UserTraffic>>; 2]) -> Self {
        Self { totals, ..Self::default() }
    }

    /// Adds traffic to the target: bytes, and the number of UDP payloads (0 for TCP).
    pub fn add_up(&self, bytes: u64, packets: u64) {
        self.up_bytes.fetch_add(bytes, Relaxed);
        self.up_packets.fetch_add(packets, Relaxed);
        self.totals.iter().flatten().for_each(|total| total.up.add(bytes, packets));
    }

    /// Adds traffic from the target, like [`Traffic::add_up`], when it is received: payloads may still be dropped.
    pub fn add_down(&self, bytes: u64, packets: u64) {
        self.down_bytes.fetch_add(bytes, Relaxed);
        self.down_packets.fetch_add(packets, Relaxed);
        self.totals.iter().flatten().for_each(|total| total.down.add(bytes, packets));
    }

    /// Adds UDP payloads that could not be sent to the target, or at an edge to the local client: too big for the path, or refused
    /// by this host.
    pub fn add_unsent(&self, too_big: u64, refused_by_host: u64) {
        self.too_big.fetch_add(too_big, Relaxed);
        self.refused_by_host.fetch_add(refused_by_host, Relaxed);
    }

    /// Returns the traffic to the target, and from it.
    #[must_use]
    pub fn moved(&self) -> (Moved, Moved) {
        let of = |bytes: &AtomicU64, packets: &AtomicU64| Moved {
            bytes: bytes.load(Relaxed),
            packets: packets.load(Relaxed),
        };
        (of(&self.up_bytes, &self.up_packets), of(&self.down_bytes, &self.down_packets))
    }

    /// Returns the bytes to the target, and from it.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.up_bytes.load(Relaxed), self.down_bytes.load(Relaxed))
    }
}
