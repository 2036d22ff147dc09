//! Why a client's requests end before their answers do, for the access log.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use role::access::served::{CANCELLED, UNSERVED, UNTAKEN};

use crate::connection::Patience;

/// Why the requests on one connection end before their answers do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Departure {
    /// Whether the listener has cut its connections.
    is_cut: Arc<AtomicBool>,
    /// Whether the client took nothing of an answer for too long.
    is_untaken: Arc<AtomicBool>,
}

impl Departure {
    /// Returns the departure of a connection that its listener cuts once `is_cut` is set.
    pub(crate) fn at(is_cut: &Arc<AtomicBool>) -> Self {
        Self { is_cut: is_cut.clone(), is_untaken: Arc::default() }
    }

    /// Returns a patience that also notes here when it ends an answer.
    pub(crate) fn noting_untaken(&self, Patience { time, on_end }: Patience) -> Patience {
        let is_untaken = self.is_untaken.clone();
        let on_end = Arc::new(move || {
            is_untaken.store(true, Relaxed);
            on_end();
        });
        Patience { time, on_end }
    }

    /// Returns why a request that ends now has no complete answer, as a reason of the access log.
    pub(crate) fn reason(&self) -> &'static str {
        if self.is_cut.load(Relaxed) {
            UNSERVED
        } else if self.is_untaken.load(Relaxed) {
            UNTAKEN
        } else {
            CANCELLED
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_client_is_blamed_only_for_what_it_did_on_its_own_connection() {
        let is_cut = Arc::default();
        let [slow, other] = [Departure::at(&is_cut), Departure::at(&is_cut)];
        let patience = Patience { time: Duration::ZERO, on_end: Arc::new(|| ()) };
        (slow.noting_untaken(patience).on_end)();
        assert_eq!((slow.reason(), other.reason()), (UNTAKEN, CANCELLED));
        is_cut.store(true, Relaxed);
        assert_eq!((slow.reason(), other.reason()), (UNSERVED, UNSERVED));
    }
}
