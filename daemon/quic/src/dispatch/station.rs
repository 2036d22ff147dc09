//! A connection's hub and ledger, which its dispatcher, its driver and the writers of its streams share.

use std::sync::Arc;

use crate::{hub::Hub, ledger::Ledger};

/// The queues of one connection, with the books of what the transport got from them. Clones share the connection.
#[derive(Clone)]
pub(super) struct Station {
    pub(super) hub: Arc<Hub>,
    pub(super) ledger: Arc<Ledger>,
}

impl Station {
    /// Returns the time, by the clock of the connection's schedule.
    pub(super) fn now_ns(&self) -> u64 {
        (self.hub.clock().now_ns)()
    }

    /// Wakes the driver, after an event that the callbacks do not report.
    pub(super) fn wake(&self) {
        self.ledger.driver().wake();
    }
}
