//! The way of a tunnel or a request from an edge.

use std::sync::Arc;

/// The relay or gateway of a tunnel or a request, and the path to it.
#[derive(Clone, Debug)]
pub struct Way {
    /// The host and port of the relay or gateway.
    pub relay: Arc<str>,
    /// The name of the path to it; empty without one.
    pub path: Arc<str>,
}

impl Way {
    /// Returns its memory beyond the struct, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.relay.len() + self.path.len()
    }
}
