//! A tunnel's flow, as other tasks see it.

use std::sync::Arc;

use masque::tunnel::{Form, IgnoredCounts};
use parking_lot::Mutex;

use super::inbox::Arrivals;
use crate::backlog::Losses;

/// A view of a tunnel's flow for tasks other than its owner, also after its end.
#[derive(Clone)]
pub struct FlowView {
    arrivals: Arc<Mutex<Arrivals>>,
    /// The losses of the flow.
    pub losses: Arc<Losses>,
}

impl FlowView {
    pub(super) fn new(arrivals: &Arc<Mutex<Arrivals>>, losses: &Arc<Losses>) -> Self {
        Self { arrivals: arrivals.clone(), losses: losses.clone() }
    }

    /// Returns the form in which the tunnel's payloads leave.
    #[must_use]
    pub fn form(&self) -> Form {
        self.arrivals.lock().state.form()
    }

    /// Returns the counts of the tunnel's ignored arrivals.
    #[must_use]
    pub fn ignored(&self) -> IgnoredCounts {
        self.arrivals.lock().state.ignored()
    }
}
