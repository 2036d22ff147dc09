//! Keeps a gateway's knowledge in the state folder: what it has learned of its engines and of the lengths of answers, so that after a
//! restart not every request goes to the best model, and the tokens used this month, so that a restart does not renew a quota.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use role::kept::{SaveFailures, StateFile};
use serving::{
    gateway::Gateway,
    in_force::GatewayInForce,
    learned::{self, Learned},
};
use state::StateFolder;
use tenants::spending::{self, Spending, Spent};
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

/// The earlier knowledge, and the gateway in force, which adds to it.
pub(super) struct Lessons {
    in_force: Arc<GatewayInForce>,
    kept: StateFile<Learned>,
    /// The knowledge before the gateway in force, or of the last gateway if there is none.
    before: Mutex<Learned>,
}

impl Lessons {
    /// Reads the earlier knowledge, if there is any. Failed saves will be counted in `failures`.
    pub(super) fn open(folder: &StateFolder, in_force: Arc<GatewayInForce>, failures: &SaveFailures) -> Arc<Self> {
        let (kept, before) = StateFile::open(folder, learned::FILE, "the measurements of engines", failures);
        Arc::new(Self { in_force, kept, before: Mutex::new(before.unwrap_or_default()) })
    }

    /// Puts another gateway in force, or none. Keeps what the previous one has learned, for the next one.
    pub(super) fn replace(&self, gateway: Option<Arc<Gateway>>) {
        let learned = self.learned();
        *self.before.lock() = learned;
        self.in_force.replace(gateway);
    }

    /// Returns what the gateway has learned by now; if there is none, what the last one had learned.
    pub(super) fn learned(&self) -> Learned {
        let Some(gateway) = self.in_force.gateway() else { return self.before.lock().clone() };
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

/// The tokens that each client's key has used this month.
pub(super) struct TokenLedger {
    spending: Arc<Spending>,
    kept: StateFile<Spent>,
}

impl TokenLedger {
    /// Restores the month's use that was saved earlier. Failed saves will be counted in `failures`.
    pub(super) fn open(folder: &StateFolder, spending: Arc<Spending>, failures: &SaveFailures) -> Arc<Self> {
        let (kept, spent) = StateFile::open(folder, spending::FILE, "the tokens that were used this month", failures);
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use config::{gateway::GatewaySettings, policy::Policy};
    use quic::class::PolicyRole;

    use super::*;
    use crate::parts::Parts;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn knowledge_outlives_the_gateway_that_gained_it_and_is_never_replaced_by_an_older_one() {
        let folder = Folder(std::env::temp_dir().join(format!("paced-lessons-{}", std::process::id())));
        fs::create_dir_all(&folder.0).unwrap();
        let settings = GatewaySettings::default();
        let [older, newer] = [100.0, 200.0].map(|tokens| Learned {
            averages: Some((tokens, 4.0)),
            classes: Vec::new(),
            engines: Vec::new(),
        });
        let parts = Parts::default();
        let classes = parts.classes_of(&Policy::default(), PolicyRole::Relay);
        let gateway = |learned| {
            let shared = (parts.gateway.clone(), parts.requests.clone(), parts.decisions.clone());
            Some(Gateway::new(&settings, &classes, (shared, &parts.spending), (learned, None)).unwrap())
        };
        let state = StateFolder::unclaimed(&folder.0);
        let open = || Lessons::open(&state, GatewayInForce::new(classes.clone()), &parts.saves);
        let lessons = open();
        lessons.replace(gateway(&older));
        lessons.save();
        let lessons = open();
        assert_eq!(lessons.learned(), older);
        // In place of a gateway that learns.
        lessons.replace(gateway(&newer));
        lessons.replace(None);
        assert_eq!(lessons.learned(), newer);
        lessons.save();
        assert_eq!(open().learned(), newer, "what was not saved yet is saved without a gateway as well");
        lessons.replace(gateway(&lessons.learned()));
        assert_eq!(lessons.learned(), newer);
    }
}
