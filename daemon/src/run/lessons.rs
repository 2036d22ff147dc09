//! Keeps a gateway's knowledge in the state folder: what it has learned of its engines and of the lengths of answers, so that after a
//! restart not every request goes to the best model, and the tokens used this month, so that a restart does not renew a quota.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use role::kept::StateFile;
use serving::{
    in_force::GatewayInForce,
    learned::Learned,
    spending::{Spending, Spent},
};
use tokio::{task::spawn_blocking, time::interval};

/// Saves once per `pause`, until dropped.
async fn save_each(pause: Duration, save: impl Fn() + Clone + Send + 'static) {
    let mut ticks = interval(pause);
    loop {
        ticks.tick().await;
        // The blocking task cannot be cancelled, and panics only with the runtime.
        _ = spawn_blocking(save.clone()).await;
    }
}

/// How often changes are saved.
const PAUSE: Duration = Duration::from_secs(60);

/// The file in the state folder.
const FILE: &str = "engines.json";

/// The earlier knowledge, and the gateway in force, which adds to it.
pub(super) struct Lessons {
    in_force: Arc<GatewayInForce>,
    kept: StateFile<Learned>,
    before: Learned,
}

impl Lessons {
    /// Reads the earlier knowledge, if there is any.
    pub(super) fn open(state_dir: &Path, in_force: Arc<GatewayInForce>) -> Arc<Self> {
        let (kept, before) = StateFile::open(state_dir.join(FILE), "the measurements of engines");
        Arc::new(Self { in_force, kept, before: before.unwrap_or_default() })
    }

    /// Returns what the gateway has learned by now.
    pub(super) fn learned(&self) -> Learned {
        let Some(gateway) = self.in_force.gateway() else { return self.before.clone() };
        let (mut learned, classes) = (gateway.learned(), self.in_force.classes());
        learned.classes.retain(|learned| classes.get(&learned.class).is_some());
        learned
    }

    /// Saves the knowledge once per [`PAUSE`], until dropped.
    pub(super) async fn keep(self: Arc<Self>) {
        save_each(PAUSE, move || self.save()).await;
    }

    /// Saves the knowledge, if there is any about an engine.
    pub(super) fn save(&self) {
        self.kept.save(|_| Some(self.learned()).filter(|learned| *learned != Learned::default()));
    }
}

/// How often the tokens of the month are saved. If paced is killed, the use since the last save is lost, to the user's
/// benefit.
const TOKENS_PAUSE: Duration = Duration::from_secs(10);

/// The file of the tokens in the state folder.
const TOKENS_FILE: &str = "tokens.json";

/// The tokens that each client's key has used this month.
pub(super) struct TokenLedger {
    spending: Arc<Spending>,
    kept: StateFile<Spent>,
}

impl TokenLedger {
    /// Restores the month's use that was saved earlier.
    pub(super) fn open(state_dir: &Path, spending: Arc<Spending>) -> Arc<Self> {
        let (kept, spent) = StateFile::open(state_dir.join(TOKENS_FILE), "the tokens that were used this month");
        if let Some(spent) = &spent {
            spending.restore(spent, SystemTime::now());
        }
        Arc::new(Self { spending, kept })
    }

    /// Saves the use once per [`TOKENS_PAUSE`], until dropped.
    pub(super) async fn keep(self: Arc<Self>) {
        save_each(TOKENS_PAUSE, move || self.save(SystemTime::now())).await;
    }

    /// Saves the use, unless there has never been any.
    pub(super) fn save(&self, now: SystemTime) {
        self.kept.save(|saved| {
            let spent = self.spending.spent(now);
            (saved.is_some() || !spent.tokens.is_empty()).then_some(spent)
        });
    }
}
