//! Keeps the used bytes of users' quotas in the state folder, so that no user gets a new quota by a restart.
//!
//! The file is replaced as a whole, at most once per [`PAUSE`], and once more at the end. If paced is killed or the
//! machine stops, the usage since the last save is lost, to the user's benefit.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use role::kept::{SaveFailures, StateFile};
use state::StateFolder;
use tokio::{task::spawn_blocking, time::interval};

use super::accounts::{Accounts, QuotaGauges, Used};

/// How often changes are saved and the gauges updated.
pub const PAUSE: Duration = Duration::from_secs(10);

/// The file in the state folder.
pub const FILE: &str = "quotas.json";

/// The accounts and their file.
pub struct QuotaLedger {
    accounts: Arc<Accounts>,
    gauges: QuotaGauges,
    kept: StateFile<Used>,
}

impl QuotaLedger {
    /// Restores the accounts from the file, if there is one. If the file cannot be read, this is logged, the file is kept, and every user
    /// begins the month from zero. Failed saves will be counted in `failures`.
    #[must_use]
    pub fn open(
        folder: &StateFolder,
        accounts: Arc<Accounts>,
        gauges: QuotaGauges,
        failures: &SaveFailures,
    ) -> Arc<Self> {
        let (kept, used) = StateFile::open(folder, FILE, "the quota usage of this month", failures);
        let now = SystemTime::now();
        if let Some(used) = &used {
            accounts.restore(used, now);
        }
        accounts.show(&gauges, now);
        Arc::new(Self { accounts, gauges, kept })
    }

    /// Saves the usage and updates the gauges, until dropped.
    pub async fn keep(self: Arc<Self>) {
        let mut ticks = interval(PAUSE);
        loop {
            ticks.tick().await;
            let ledger = self.clone();
            // The task cannot be cancelled, and panics only with the runtime.
            _ = spawn_blocking(move || ledger.save(SystemTime::now())).await;
        }
    }

    /// Saves the usage as of `now` and updates the gauges. A failed save is logged and retried the next time.
    pub fn save(&self, now: SystemTime) {
        self.accounts.show(&self.gauges, now);
        self.kept.save(|saved| {
            let used = self.accounts.used(now);
            (saved.is_some() || !used.bytes.is_empty()).then_some(used)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, path::PathBuf};

    use config::quota::Quota;
    use role::holder::Holder;

    use super::*;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn folder(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("paced-ledger-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn open(folder: &Folder) -> (Arc<Accounts>, Arc<QuotaLedger>) {
        let accounts = Arc::<Accounts>::default();
        let quota = Quota { monthly_bytes: Some(1_000), ..Quota::default() };
        accounts.set_quotas(&BTreeMap::from([("alice".to_owned(), quota)]));
        let of = StateFolder::unclaimed(&folder.0);
        let ledger = QuotaLedger::open(&of, accounts.clone(), QuotaGauges::default(), &SaveFailures::default());
        (accounts, ledger)
    }

    fn use_up(accounts: &Accounts, bytes: u64) {
        let place = accounts.open(&Holder::User("alice".into()), 9, SystemTime::now()).unwrap();
        place.account.use_up(bytes);
    }

    #[test]
    fn quota_usage_is_restored_and_an_unchanged_file_is_not_written() {
        let folder = folder("again");
        let (accounts, ledger) = open(&folder);
        ledger.save(SystemTime::now());
        assert!(!folder.0.join(FILE).exists());
        use_up(&accounts, 600);
        ledger.save(SystemTime::now());
        let (again, ledger) = open(&folder);
        assert_eq!(again.used(SystemTime::now()), accounts.used(SystemTime::now()));
        use_up(&again, 400);
        fs::remove_file(folder.0.join(FILE)).unwrap();
        ledger.save(SystemTime::now());
        let (last, ledger) = open(&folder);
        assert!(last.open(&Holder::User("alice".into()), 9, SystemTime::now()).is_err(), "used up");
        fs::remove_file(folder.0.join(FILE)).unwrap();
        ledger.save(SystemTime::now());
        assert!(!folder.0.join(FILE).exists(), "nothing has changed since");
    }

    #[test]
    fn a_file_that_is_none_is_no_reason_not_to_start() {
        let folder = folder("none");
        fs::write(folder.0.join(FILE), "{\"month\":").unwrap();
        let (accounts, ledger) = open(&folder);
        use_up(&accounts, 1);
        ledger.save(SystemTime::now());
        let saved: Used = serde_json::from_slice(&fs::read(folder.0.join(FILE)).unwrap()).unwrap();
        assert_eq!(saved, accounts.used(SystemTime::now()));
    }
}
