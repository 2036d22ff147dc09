//! Clients that may be evicted in favour of others, until they have shown what the listener asks of a client: at a gateway's own listener a
//! key, and at an edge a complete request. So connections that stay silent keep no other client out.

use std::{
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use role::accept::Strangers;
use tokio::sync::oneshot;

/// The maximum number of newcomers at a listener. They never have more than half of its connections.
const MOST: usize = 256;

/// The newcomers at one listener. Dropping a client's sender makes the client leave.
pub(crate) struct Newcomers(Mutex<Strangers<oneshot::Sender<Infallible>>>);

/// A client that may be evicted until it may stay. Its end frees its place.
pub(crate) struct Newcomer {
    of: Arc<Newcomers>,
    number: u64,
    /// Set once the client may stay.
    stay: OnceLock<oneshot::Sender<Infallible>>,
}

impl Newcomers {
    /// Returns an empty set for a listener with this maximum of connections. At most `most_from_one` of its newcomers come from one IPv4
    /// address, or one IPv6 /64.
    pub(crate) fn new(max_connections: usize, most_from_one: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Strangers::new((max_connections / 2).clamp(1, MOST), most_from_one))))
    }

    /// Adds a client from an address. If there is no room, evicts another one. The receiver closes when the client is evicted.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr) -> (Arc<Newcomer>, oneshot::Receiver<Infallible>) {
        let (stay, leave) = oneshot::channel();
        let (number, evicted) = self.0.lock().enter(from, stay);
        // An evicted client learns of it when its sender is dropped.
        drop(evicted);
        (Arc::new(Newcomer { of: self.clone(), number, stay: OnceLock::new() }), leave)
    }

    /// Evicts all newcomers, because the listener ends.
    pub(crate) fn evict_all(&self) {
        self.0.lock().clear();
    }
}

impl Newcomer {
    /// Lets a known client stay without a limit.
    pub(crate) fn may_stay_if(&self, is_known: impl FnOnce() -> bool) {
        // Once the client is out of the list, this is the only holder of its sender.
        if self.stay.get().is_none()
            && is_known()
            && let Some(stay) = self.of.0.lock().leave(self.number)
        {
            _ = self.stay.set(stay);
        }
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.of.0.lock().leave(self.number);
    }
}
