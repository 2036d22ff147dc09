//! Why a client's request ends before its answer does, for the access log.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use role::{
    access::served::{CANCELLED, DISPLACED, UNSERVED, UNTAKEN},
    known_clients::ActiveRequest,
};

use crate::connection::OpenRequest;

/// Why a request over TCP ends before its answer does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Departure {
    /// Whether the listener has cut its connections.
    is_cut: Arc<AtomicBool>,
    /// Whether the client took nothing of the answer for too long.
    is_untaken: Arc<AtomicBool>,
    /// The request, for the choice of the connection that makes room.
    active: Option<Arc<ActiveRequest>>,
}

impl Departure {
    /// Returns the departure of a request on a connection that its listener cuts once `is_cut` is set.
    pub(crate) fn of(request: &OpenRequest, is_cut: &Arc<AtomicBool>) -> Self {
        Self { is_cut: is_cut.clone(), is_untaken: request.is_untaken(), active: Some(request.active()) }
    }

    /// Notes that the whole body of the request has arrived.
    pub(crate) fn note_complete(&self) {
        if let Some(active) = &self.active {
            active.is_complete();
        }
    }

    /// Notes that the client took nothing of the answer for too long. Returns whether that is news, so that an answer counts once.
    pub(crate) fn note_untaken(&self) -> bool {
        !self.is_untaken.swap(true, Relaxed)
    }

    /// Returns why the request, which ends now, has no complete answer, as a reason of the access log.
    pub(crate) fn reason(&self) -> &'static str {
        if self.is_cut.load(Relaxed) {
            UNSERVED
        } else if self.is_untaken.load(Relaxed) {
            UNTAKEN
        } else if self.active.as_ref().is_some_and(|active| active.is_displaced()) {
            DISPLACED
        } else {
            CANCELLED
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_blamed_for_what_it_did_not_take_unless_the_listener_cut_it() {
        let (is_cut, departure) = (Arc::<AtomicBool>::default(), Departure::default());
        let departure = Departure { is_cut: is_cut.clone(), ..departure };
        assert_eq!(departure.reason(), CANCELLED);
        assert_eq!([departure.note_untaken(), departure.note_untaken()], [true, false]);
        assert_eq!(departure.reason(), UNTAKEN);
        is_cut.store(true, Relaxed);
        assert_eq!(departure.reason(), UNSERVED);
    }
}
