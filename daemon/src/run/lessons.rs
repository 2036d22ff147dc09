//! Keeps what a gateway knows in the state folder: what it has learned of its engines, so that a restart does not begin with
//! the best model for every request, and the tokens of the month, so that a restart gives nobody a new one.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use relay::Relay;
use role::kept::StateFile;
use serving::{
    learned::Learned,
    spending::{Spending, Spent},
};
use tokio::{task::spawn_blocking, time::interval};

/// How often what has changed is saved.
const PAUSE: Duration = Duration::from_secs(60);

/// The file in the state folder.
const FILE: &str = "engines.json";

/// What was learned before, and by the gateway that runs.
pub(super) struct Lessons {
    relay: Arc<Relay>,
    kept: StateFile<Learned>,
    before: Learned,
}

impl Lessons {
    /// Reads what was learned before, if anything was.
    pub(super) fn open(state_dir: &Path, relay: Arc<Relay>) -> Arc<Self> {
        let (kept, before) = StateFile::open(state_dir.join(FILE), "what was learned of engines");
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

/// How often the tokens of the month are saved. What was used since then is lost when paced is killed, to the user's benefit.
const TOKENS_PAUSE: Duration = Duration::from_secs(10);

/// Their file in the state folder.
const TOKENS_FILE: &str = "tokens.json";

/// The tokens that keys of clients were used for this month.
pub(super) struct TokenLedger {
    spending: Arc<Spending>,
    kept: StateFile<Spent>,
}

impl TokenLedger {
    /// Takes over what was used this month before.
    pub(super) fn open(state_dir: &Path, spending: Arc<Spending>) -> Arc<Self> {
        let (kept, spent) = StateFile::open(state_dir.join(TOKENS_FILE), "the tokens that were used this month");
        if let Some(spent) = &spent {
            spending.restore(spent, SystemTime::now());
        }
        Arc::new(Self { spending, kept })
    }

    /// Saves what was used, until dropped.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut ticks = interval(TOKENS_PAUSE);
        loop {
            ticks.tick().await;
            let ledger = self.clone();
            // It cannot be cancelled, and panics only with the runtime.
            _ = spawn_blocking(move || ledger.save(SystemTime::now())).await;
        }
    }

    /// Saves what was used, if anything ever was.
    pub(super) fn save(&self, now: SystemTime) {
        let spent = self.spending.spent(now);
        if !(self.kept.is_empty() && spent.tokens.is_empty()) {
            self.kept.save(spent);
        }
    }
}
