//! What can be known of one tunnel's flow from outside.

use std::sync::{Arc, atomic::AtomicU64};

use masque::tunnel::Form;
use parking_lot::Mutex;

use super::inbox::Arrivals;

/// Payloads of one tunnel that were dropped inside its connection.
#[derive(Debug, Default)]
pub struct Losses {
    /// On arrival: the reader fell behind.
    pub receive_queue: AtomicU64,
    /// Before leaving as datagrams: a bound was reached.
    pub send_queue: AtomicU64,
    /// Before leaving as datagrams: they were late, or had waited too long for their class.
    pub stale: AtomicU64,
    /// Before leaving as datagrams: no packet of the path can carry them.
    pub too_big: AtomicU64,
    /// In capsules: a bound was reached.
    pub capsules: AtomicU64,
}

/// What can be known of a tunnel's flow by others than its owner, and after its end.
#[derive(Clone)]
pub struct View {
    arrivals: Arc<Mutex<Arrivals>>,
    /// What it lost.
    pub losses: Arc<Losses>,
}

impl View {
    pub(super) fn new(arrivals: &Arc<Mutex<Arrivals>>, losses: &Arc<Losses>) -> Self {
        Self { arrivals: arrivals.clone(), losses: losses.clone() }
    }

    /// The form in which the tunnel's payloads leave.
    #[must_use]
    pub fn form(&self) -> Form {
        self.arrivals.lock().state.form()
    }
}
