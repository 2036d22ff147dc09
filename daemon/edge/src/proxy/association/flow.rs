//! The payloads of an association to one target, while they wait for its tunnel.

use std::{
    future::poll_fn,
    task::{Poll, Waker},
};

use masque::target::Target;
use parking_lot::{Mutex, MutexGuard};
use quic::segments::Segments;

use super::super::udp_places::{MakesRoom, UdpPlace};

/// How many bytes may wait for a tunnel, and how many may come out of one in one turn.
pub(super) const WAITING_BYTES: usize = 64 * 1024;

/// The access log's word for a tunnel that made room for the tunnel to another target.
pub(super) const EVICTED: &str = "evicted";

/// The payloads to and from one target.
pub(super) struct Flow {
    pub(super) target: Target,
    inbox: Mutex<Inbox>,
}

/// Payloads for a target that were not handed to its tunnel yet.
pub(super) struct Inbox {
    pub(super) payloads: Segments,
    /// The access log's word for the end of its tunnel, if the tunnel has to end or has ended.
    pub(super) closed: Option<&'static str>,
    /// Its place among the tunnels of all clients.
    pub(super) place: Option<UdpPlace>,
    /// The task that serves it.
    pub(super) waker: Waker,
}

impl Flow {
    /// Returns a flow without payloads, and without a place yet.
    pub(super) fn new(target: &Target) -> Self {
        let payloads = Segments::new(WAITING_BYTES);
        let inbox = Inbox { payloads, closed: None, place: None, waker: Waker::noop().clone() };
        Self { target: target.clone(), inbox: Mutex::new(inbox) }
    }

    pub(super) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Nothing under this lock panics.
        self.inbox.lock()
    }

    /// Ends the tunnel gracefully, for a reason. If it is not open yet, withdraws its request.
    pub(super) fn close(&self, reason: &'static str) {
        let mut inbox = self.inbox();
        inbox.closed = Some(reason);
        inbox.waker.wake_by_ref();
    }

    /// Completes when the flow is closed.
    pub(super) async fn closed(&self) {
        poll_fn(|cx| {
            let mut inbox = self.inbox();
            inbox.waker.clone_from(cx.waker());
            if inbox.closed.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl MakesRoom for Flow {
    fn make_room(&self) {
        self.close(EVICTED);
    }
}
