//! The peer of one connection, as the tasks of the connection share it.

use std::sync::{OnceLock, atomic::AtomicU64};

use futures::task::AtomicWaker;
use masque::h3::Settings;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::{error::Error, signal::Signals};

/// What an end of an HTTP/3 connection, in either role, knows about its peer and still has to send to it.
pub(super) struct Peer {
    pub(super) settings: OnceLock<Settings>,
    pub(super) changed: Notify,
    /// Request streams from this ID on are not processed by the peer.
    pub(super) goaway: AtomicU64,
    /// Why the connection ended, once it has.
    pub(super) ended: OnceLock<Error>,
    /// Priorities that have not been sent to it yet.
    pub(super) signals: Mutex<Signals>,
    /// Wakes the task that drives the connection, which sends these priorities.
    pub(super) signalled: AtomicWaker,
}

impl Peer {
    pub(super) fn signals(&self) -> MutexGuard<'_, Signals> {
        self.signals.lock()
    }
}
