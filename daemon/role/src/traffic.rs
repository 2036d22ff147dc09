//! What goes through tunnels, as their pumps count it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

/// What went through a tunnel in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of UDP payloads, or of what TCP carried.
    pub bytes: u64,
    /// UDP payloads.
    pub packets: u64,
}

/// What went in one direction.
#[derive(Clone, Debug, Default)]
pub struct Volume {
    /// Bytes of UDP payloads, and of what TCP carried.
    pub bytes: Counter,
    /// UDP payloads.
    pub packets: Counter,
}

impl Volume {
    /// Adds to both.
    pub fn add(&self, bytes: u64, packets: u64) {
        self.bytes.inc_by(bytes);
        self.packets.inc_by(packets);
    }
}

/// What one user uses, over all connections.
#[derive(Debug, Default)]
pub struct UserTraffic {
    /// To targets.
    pub up: Volume,
    /// From targets.
    pub down: Volume,
    /// Tunnels that are open.
    pub tunnels: Gauge,
    /// Tunnels that were opened.
    pub opened: Counter,
    /// Requests that were refused.
    pub refused: Counter,
}

/// What went through a tunnel, as its pump counts it.
#[derive(Debug, Default)]
pub struct Traffic {
    up_bytes: AtomicU64,
    up_packets: AtomicU64,
    down_bytes: AtomicU64,
    down_packets: AtomicU64,
    /// UDP payloads that were too big for the path to the target.
    pub too_big: AtomicU64,
    /// UDP payloads that this host refused to send to the target.
    pub refused_by_host: AtomicU64,
    /// Of the user, if there is one.
    usage: Option<Arc<UserTraffic>>,
}

impl Traffic {
    /// Returns that of a tunnel of the user whose usage this is, which counts the same.
    #[must_use]
    pub fn of(usage: Option<Arc<UserTraffic>>) -> Self {
        Self { usage, ..Self::default() }
    }

    /// Adds what went to the target: bytes, and UDP payloads if it was such.
    pub fn add_up(&self, bytes: u64, packets: u64) {
        self.up_bytes.fetch_add(bytes, Relaxed);
        self.up_packets.fetch_add(packets, Relaxed);
        if let Some(usage) = &self.usage {
            usage.up.add(bytes, packets);
        }
    }

    /// Adds what came from the target, as [`Traffic::add_up`].
    pub fn add_down(&self, bytes: u64, packets: u64) {
        self.down_bytes.fetch_add(bytes, Relaxed);
        self.down_packets.fetch_add(packets, Relaxed);
        if let Some(usage) = &self.usage {
            usage.down.add(bytes, packets);
        }
    }

    /// Adds UDP payloads that could not be sent to the target: too big for the path, or refused by this host.
    pub fn add_unsent(&self, too_big: u64, refused_by_host: u64) {
        self.too_big.fetch_add(too_big, Relaxed);
        self.refused_by_host.fetch_add(refused_by_host, Relaxed);
    }

    /// What went to the target, and what came from it.
    #[must_use]
    pub fn moved(&self) -> (Moved, Moved) {
        let of = |bytes: &AtomicU64, packets: &AtomicU64| Moved {
            bytes: bytes.load(Relaxed),
            packets: packets.load(Relaxed),
        };
        (of(&self.up_bytes, &self.up_packets), of(&self.down_bytes, &self.down_packets))
    }

    /// What went to the target, and what came from it, in bytes.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.up_bytes.load(Relaxed), self.down_bytes.load(Relaxed))
    }
}
