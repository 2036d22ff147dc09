//! Changes of paths and relays, for listeners at the control plane.

use std::time::SystemTime;

use tokio::sync::broadcast;

/// How many changes wait for a slow listener; beyond, the listener misses some and learns how many.
const QUEUE: usize = 256;

/// A change of a path, or of a relay.
#[derive(Clone, Debug)]
pub struct PathChange {
    /// When it was noticed.
    pub time: SystemTime,
    /// What happened, as text for people.
    pub message: String,
}

/// Notifies listeners of changes.
#[derive(Debug)]
pub struct PathChanges(broadcast::Sender<PathChange>);

impl Default for PathChanges {
    fn default() -> Self {
        Self(broadcast::Sender::new(QUEUE))
    }
}

impl PathChanges {
    /// Notifies listeners of a change.
    pub fn tell(&self, message: String) {
        // There may be no listener.
        _ = self.0.send(PathChange { time: SystemTime::now(), message });
    }

    /// Listens to changes from now on.
    #[must_use]
    pub fn listen(&self) -> broadcast::Receiver<PathChange> {
        self.0.subscribe()
    }
}
