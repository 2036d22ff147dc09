//! Keeps what a gateway has learned of its engines in the state folder, so that a restart does not begin with the best model
//! for every request.

use std::{path::Path, sync::Arc, time::Duration};

use relay::Relay;
use role::kept::Kept;
use serving::learned::Learned;
use tokio::{task::spawn_blocking, time::interval};

/// How often what has changed is saved.
const PAUSE: Duration = Duration::from_secs(60);

/// The file in the state folder.
const FILE: &str = "engines.json";

/// What was learned before, and by the gateway that runs.
pub(super) struct Lessons {
    relay: Arc<Relay>,
    kept: Kept<Learned>,
    before: Learned,
}

impl Lessons {
    /// Reads what was learned before, if anything was.
    pub(super) fn open(state_dir: &Path, relay: Arc<Relay>) -> Arc<Self> {
        let (kept, before) = Kept::open(state_dir.join(FILE), "what was learned of engines");
        Arc::new(Self { relay, kept, before: before.unwrap_or_default() })
    }

    /// What is known now.
    pub(super) fn learned(&self) -> Learned {
        self.relay.gateway().map_or_else(|| self.before.clone(), |gateway| gateway.learned())
    }

    /// Saves what was learned, until dropped.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut ticks = interval(PAUSE);
        loop {
            ticks.tick().await;
            let lessons = self.clone();
            // It cannot be cancelled, and panics only with the runtime.
            _ = spawn_blocking(move || lessons.save()).await;
        }
    }

    /// Saves what was learned. Of no engine is nothing saved.
    pub(super) fn save(&self) {
        let learned = self.learned();
        if learned != Learned::default() {
            self.kept.save(learned);
        }
    }
}
