//! Clients that may be evicted in favour of others, until they have shown what the listener asks of a client: at a gateway's own listener a
//! key, and at an edge a complete request. So connections that stay silent keep no other client out.

use std::{
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use role::unidentified_callers::UnidentifiedCallers;
use tokio::sync::oneshot;

/// The maximum number of newcomers at a listener. They never have more than half of its connections.
const MOST: usize = 256;

/// The newcomers at one listener; `None` once it ends. Dropping a client's sender makes the client leave.
pub(crate) struct Newcomers(Mutex<Option<UnidentifiedCallers<oneshot::Sender<Infallible>>>>);

/// A client that may be evicted until it may stay. Its end frees its place.
pub(crate) struct Newcomer {
    of: Arc<Newcomers>,
    /// `None` if it entered after the end.
    number: Option<u64>,
    /// Set once the client may stay.
    stay: OnceLock<oneshot::Sender<Infallible>>,
}

impl Newcomers {
    /// Returns an empty set for a listener with this maximum of connections. At most `most_from_one` of its newcomers come from one IPv4
    /// address, or one IPv6 /64.
    pub(crate) fn new(max_connections: usize, most_from_one: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(UnidentifiedCallers::new((max_connections / 2).clamp(1, MOST), most_from_one)))))
    }

    /// Adds a client from an address. If there is no room, evicts another one. The receiver closes when the client is evicted, at once if
    /// the listener has ended.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr) -> (Arc<Newcomer>, oneshot::Receiver<Infallible>) {
        let (stay, leave) = oneshot::channel();
        let number = self.0.lock().as_mut().map(|clients| {
            // An evicted client learns of it when its sender is dropped.
            let (number, _evicted) = clients.enter(from, stay);
            number
        });
        (Arc::new(Newcomer { of: self.clone(), number, stay: OnceLock::new() }), leave)
    }

    /// Evicts all newcomers, because the listener ends. A client that it has accepted is also evicted if it enters later.
    pub(crate) fn evict_all(&self) {
        *self.0.lock() = None;
    }

    /// Takes a client out of the set. Returns its sender if it was in it.
    fn leave(&self, number: Option<u64>) -> Option<oneshot::Sender<Infallible>> {
        self.0.lock().as_mut()?.leave(number?)
    }
}

impl Newcomer {
    /// Lets a known client stay without a limit.
    pub(crate) fn may_stay_if(&self, is_known: impl FnOnce() -> bool) {
        // Once the client is out of the list, this is the only holder of its sender.
        if self.stay.get().is_none()
            && is_known()
            && let Some(stay) = self.of.leave(self.number)
        {
            _ = self.stay.set(stay);
        }
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.of.leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_end_of_a_listener_evicts_newcomers_and_clients_that_enter_after_it_but_no_known_ones() {
        let newcomers = Newcomers::new(16, 16);
        let [known, new] = [1, 2].map(|last| newcomers.enter(Ipv4Addr::new(10, 0, 0, last).into()));
        known.0.may_stay_if(|| true);
        newcomers.evict_all();
        let late = newcomers.enter(Ipv4Addr::new(10, 0, 0, 3).into());
        late.0.may_stay_if(|| true);
        let is_evicted = [known, new, late]
            .map(|(_client, mut leave)| leave.try_recv().is_err_and(|e| e == oneshot::error::TryRecvError::Closed));
        assert_eq!(is_evicted, [false, true, true]);
    }
}
