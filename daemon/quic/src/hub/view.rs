//! What can be known of one tunnel's flow from outside.

use std::sync::Arc;

use masque::tunnel::Form;
use parking_lot::Mutex;

use super::inbox::Arrivals;
use crate::backlog::Losses;

/// What can be known of a tunnel's flow by others than its owner, and after its end.
#[derive(Clone)]
pub struct FlowView {
    arrivals: Arc<Mutex<Arrivals>>,
    /// What it lost.
    pub losses: Arc<Losses>,
}

impl FlowView {
    pub(super) fn new(arrivals: &Arc<Mutex<Arrivals>>, losses: &Arc<Losses>) -> Self {
        Self { arrivals: arrivals.clone(), losses: losses.clone() }
    }

    /// The form in which the tunnel's payloads leave.
    #[must_use]
    pub fn form(&self) -> Form {
        self.arrivals.lock().state.form()
    }
}
