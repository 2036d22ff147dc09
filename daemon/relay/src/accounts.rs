//! The accounts of users: connections, open tunnels, rates, and the bytes used this month.
//!
//! Clients that need not authenticate share the account of their network ([`Holder`]), which has no quota.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::SystemTime,
};

use config::quota::Quota;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge as Shown},
    registry::Registry,
};
use quic::clock::Clock;
use role::{
    holder::Holder,
    limits::GaugePlace,
    month::{Month, MonthAmounts, OtherMonths},
    user_account::UserAccount,
    user_labels::UserLabels,
};

/// How many accounts are kept before unused ones are removed.
const KEPT: usize = 1024;

/// How many tunnels may share a place: one, and the one that continues it.
const SHARED: usize = 2;

/// A place for a tunnel or a connection, and its account. Released on drop, unless another tunnel shares it.
#[derive(Debug)]
pub struct UserPlace {
    /// The account.
    pub account: Arc<UserAccount>,
    place: Arc<GaugePlace>,
}

/// The place of an open tunnel, as a request that continues this tunnel finds it. It keeps nothing.
#[derive(Clone, Debug, Default)]
pub struct KeyedPlace {
    account: Weak<UserAccount>,
    place: Weak<GaugePlace>,
}

impl UserPlace {
    fn new(account: Arc<UserAccount>, place: GaugePlace) -> Self {
        Self { account, place: Arc::new(place) }
    }

    /// Returns the place as a request that continues its tunnel finds it.
    #[must_use]
    pub fn keyed(&self) -> KeyedPlace {
        KeyedPlace { account: Arc::downgrade(&self.account), place: Arc::downgrade(&self.place) }
    }

    /// Whether another tunnel has the same place.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.place) > 1
    }
}

impl KeyedPlace {
    /// Returns the same place for a tunnel on `account`; `None` if it is on another account, if its tunnel has ended, or if two have it.
    fn share(&self, account: &Arc<UserAccount>) -> Option<UserPlace> {
        let place = self.place.upgrade().filter(|place| Arc::strong_count(place) <= SHARED)?;
        let is_own = std::ptr::eq(self.account.as_ptr(), Arc::as_ptr(account));
        is_own.then(|| UserPlace { account: account.clone(), place })
    }
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The limit of open tunnels is reached.
    Tunnels,
    /// The monthly quota is used up; a new month begins in `seconds_left`.
    Quota {
        /// Seconds until the month ends.
        seconds_left: u64,
    },
}

/// The usage of all users in a month, as it is kept across restarts.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Used {
    /// The month, in UTC.
    pub month: Month,
    /// Bytes by user, for users with a quota.
    pub bytes: MonthAmounts,
    /// The usage in other months.
    #[serde(default, skip_serializing_if = "OtherMonths::is_empty")]
    pub other_months: OtherMonths,
}

/// The accounts of all users.
#[derive(Debug, Default)]
pub struct Accounts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    quotas: HashMap<Arc<str>, Quota>,
    accounts: HashMap<Holder, Arc<UserAccount>>,
    /// How many accounts trigger the next search for unused ones.
    sweep_at: usize,
    month: Option<Month>,
    other_months: OtherMonths,
}

impl Accounts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Puts quotas in force, by user; all other users lose theirs. Returns whether the rate of a user from targets has changed.
    pub fn set_quotas(&self, quotas: &BTreeMap<String, Quota>) -> bool {
        let mut state = self.state();
        state.quotas = quotas.iter().map(|(name, quota)| (name.as_str().into(), *quota)).collect();
        let set = |(holder, account): (&Holder, &Arc<UserAccount>)| account.set(&state.quota(holder));
        state.accounts.iter().fold(false, |has_changed, account| set(account) | has_changed)
    }

    /// Opens a place for a tunnel on an account that may have `tunnels` of them.
    ///
    /// # Errors
    /// [`Full`] if there is no place.
    pub fn open(&self, holder: &Holder, tunnels: usize, now: SystemTime) -> Result<UserPlace, Full> {
        self.open_after(None, (holder, tunnels), now)
    }

    /// Like [`open`](Self::open), for a tunnel that continues the one with the place `earlier`, and shares this place
    /// if there is no other: the client cannot end the earlier tunnel over a path that has failed.
    ///
    /// # Errors
    /// [`Full`] if there is no place.
    pub fn open_after(
        &self,
        earlier: Option<&KeyedPlace>,
        (holder, tunnels): (&Holder, usize),
        now: SystemTime,
    ) -> Result<UserPlace, Full> {
        let mut state = self.state();
        let month = state.turn(now);
        let account = state.account(holder);
        if account.is_used_up() {
            return Err(Full::Quota { seconds_left: month.seconds_left(now) });
        }
        match account.tunnels.take(tunnels) {
            Some(place) => Ok(UserPlace::new(account, place)),
            None => earlier.and_then(|earlier| earlier.share(&account)).ok_or(Full::Tunnels),
        }
    }

    /// Takes a place for a connection on an account that may have `connections` of them; `None` if there is no place.
    #[must_use]
    pub fn connect(&self, holder: &Holder, connections: usize) -> Option<UserPlace> {
        // The lock is held until the account has the place: an account without places could be forgotten.
        let mut state = self.state();
        let account = state.account(holder);
        let place = account.connections.take(connections)?;
        Some(UserPlace::new(account, place))
    }

    /// Returns the account without taking a place on it.
    #[must_use]
    pub fn of(&self, holder: &Holder) -> Arc<UserAccount> {
        self.state().account(holder)
    }

    /// Returns the usage in the month of `now`.
    #[must_use]
    pub fn used(&self, now: SystemTime) -> Used {
        let mut state = self.state();
        let month = state.turn(now);
        Used { month, bytes: state.used(), other_months: state.other_months.clone() }
    }

    /// Adds the usage that was saved earlier. If it belongs to another month than that of `now`, it is kept for that month; while the clock
    /// is not set, the saved month continues.
    pub fn restore(&self, used: &Used, now: SystemTime) {
        let mut state = self.state();
        (state.month, state.other_months) = (Some(used.month), used.other_months.clone());
        state.add(&used.bytes);
        state.turn(now);
    }

    /// Updates the gauges of all quotas and of their usage.
    pub fn show(&self, gauges: &QuotaGauges, now: SystemTime) {
        let mut state = self.state();
        state.turn(now);
        let used_bytes = |name: &Arc<str>| {
            let account = state.accounts.get(&Holder::User(name.clone()));
            account.map_or(0, |account| account.used_bytes.load(Relaxed))
        };
        let quotas = state.quotas.iter().filter_map(|(name, quota)| Some((name.clone(), quota.monthly_bytes?)));
        let quotas = quotas.map(|(name, monthly)| (name.clone(), [monthly, used_bytes(&name)])).collect();
        drop(state);
        gauges.set(&quotas);
    }
}

impl State {
    fn quota(&self, holder: &Holder) -> Quota {
        match holder {
            Holder::User(name) => self.quotas.get(name).copied().unwrap_or_default(),
            _ => Quota::default(),
        }
    }

    /// Turns to another month if it is due; returns the month.
    fn turn(&mut self, now: SystemTime) -> Month {
        let month = Month::after(self.month, now);
        if let Some(before) = self.month.replace(month).filter(|before| *before != month) {
            let used = self.amounts(|account| account.used_bytes.swap(0, Relaxed));
            let found = self.other_months.exchange((before, used), month, "the quotas of users");
            self.add(&found);
        }
        month
    }

    /// Returns the bytes that users have used this month.
    fn used(&self) -> MonthAmounts {
        self.amounts(|account| account.used_bytes.load(Relaxed))
    }

    /// Returns what `used_bytes` gives for the accounts, for users who have used something.
    fn amounts(&self, used_bytes: impl Fn(&UserAccount) -> u64) -> MonthAmounts {
        let amounts = self.accounts.iter().map(|(holder, account)| (holder, used_bytes(account)));
        let of_user = |(holder, bytes): (&Holder, u64)| match holder {
            Holder::User(name) if bytes > 0 => Some((name.to_string(), bytes)),
            _ => None,
        };
        amounts.filter_map(of_user).collect()
    }

    /// Adds bytes to those that users have used this month.
    fn add(&mut self, used: &MonthAmounts) {
        for (name, bytes) in used {
            let account = self.account(&Holder::User(name.as_str().into()));
            account.used_bytes.fetch_add(*bytes, Relaxed);
            // Open tunnels learn that a quota is used up.
            account.use_up(0);
        }
    }

    fn account(&mut self, holder: &Holder) -> Arc<UserAccount> {
        if let Some(account) = self.accounts.get(holder) {
            return account.clone();
        }
        if self.accounts.len() >= self.sweep_at.max(KEPT) {
            let now_ns = (Clock::system().now_ns)();
            self.accounts.retain(|_, account| {
                account.connections.count() + account.tunnels.count() > 0
                    || account.used_bytes.load(Relaxed) > 0
                    || !account.is_rested(now_ns)
            });
            // So that searching costs each new account only a few steps, however many are in use.
            self.sweep_at = self.accounts.len() * 2;
        }
        let account = Arc::new(UserAccount::default());
        account.set(&self.quota(holder));
        self.accounts.insert(holder.clone(), account.clone());
        account
    }
}

/// The quotas of users in the metrics: only users with a configured quota, up to a number of users ([`UserLabels`]). The quotas of all
/// others are added up.
#[derive(Clone, Debug, Default)]
pub struct QuotaGauges {
    labels: UserLabels,
    monthly_bytes: Family<[(&'static str, String); 1], Shown>,
    used_bytes: Family<[(&'static str, String); 1], Shown>,
    /// The labels that have gauges.
    shown: Arc<Mutex<HashSet<Arc<str>>>>,
}

impl QuotaGauges {
    /// Returns the gauges of users with these labels; none is shown yet.
    #[must_use]
    pub fn new(labels: UserLabels) -> Self {
        Self { labels, ..Self::default() }
    }

    /// Registers both metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Bytes that a user may move in a month";
        registry.register("user_quota_bytes", help, self.monthly_bytes.clone());
        let help = "Bytes of the quota that a user has used this month";
        registry.register("user_quota_used_bytes", help, self.used_bytes.clone());
    }

    /// Shows these quotas and their usage, and no others. A gauge that stays is never missing meanwhile.
    fn set(&self, quotas: &BTreeMap<Arc<str>, [u64; 2]>) {
        let mut sums = BTreeMap::<Arc<str>, [u64; 2]>::new();
        for (user, quota) in quotas {
            let sum = sums.entry(self.labels.of(user)).or_default();
            sum.iter_mut().zip(quota).for_each(|(sum, bytes)| *sum = sum.saturating_add(*bytes));
        }
        let (mut shown, families) = (self.shown.lock(), [&self.monthly_bytes, &self.used_bytes]);
        let labels = |user: &Arc<str>| [("user", user.to_string())];
        let before = std::mem::replace(&mut *shown, sums.keys().cloned().collect());
        for user in before.difference(&shown) {
            families.iter().for_each(|family| _ = family.remove(&labels(user)));
        }
        for (user, sum) in &sums {
            for (family, bytes) in families.iter().zip(sum) {
                family.get_or_create(&labels(user)).set(i64::try_from(*bytes).unwrap_or(i64::MAX));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// 2026-11-22.
    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + 20_779 * DAY
    }

    fn alice() -> Holder {
        Holder::User("alice".into())
    }

    fn in_november(bytes: u64) -> Used {
        let bytes = MonthAmounts::from([("alice".into(), bytes)]);
        Used { month: "2026-11".parse().unwrap(), bytes, other_months: OtherMonths::default() }
    }

    fn accounts(monthly_bytes: u64) -> Accounts {
        let accounts = Accounts::default();
        let quota = Quota { monthly_bytes: Some(monthly_bytes), ..Quota::default() };
        accounts.set_quotas(&BTreeMap::from([("alice".to_owned(), quota)]));
        accounts
    }

    #[test]
    fn one_user_at_the_limit_leaves_the_others_alone() {
        let (accounts, bob) = (Accounts::default(), Holder::User("bob".into()));
        let place = accounts.open(&alice(), 1, now()).unwrap();
        assert_eq!(accounts.open(&alice(), 1, now()).err(), Some(Full::Tunnels));
        assert!(accounts.open(&bob, 1, now()).is_ok());
        drop(place);
        assert!(accounts.open(&alice(), 1, now()).is_ok());
    }

    #[test]
    fn a_tunnel_that_continues_another_shares_its_place_if_there_is_no_other_and_the_last_one_releases_it() {
        let (accounts, bob) = (Accounts::default(), Holder::User("bob".into()));
        let after = |earlier: &UserPlace, most| accounts.open_after(Some(&earlier.keyed()), (&alice(), most), now());
        let taken = || accounts.of(&alice()).tunnels.count();
        let first = accounts.open(&alice(), 1, now()).unwrap();
        let beside = after(&first, 2).unwrap();
        assert!(!beside.is_shared() && taken() == 2, "there is room");
        drop(beside);
        let second = after(&first, 1).unwrap();
        assert!(first.is_shared() && second.is_shared() && taken() == 1);
        assert_eq!(after(&second, 1).err(), Some(Full::Tunnels), "two have it");
        let of_first = first.keyed();
        drop(first);
        assert!(!second.is_shared() && taken() == 1);
        let third = accounts.open_after(Some(&of_first), (&alice(), 1), now()).unwrap();
        drop(third);
        assert_eq!(taken(), 1, "a continuation that failed has changed nothing");
        accounts.open(&bob, 1, now()).map(|_place| ()).unwrap();
        let _full = accounts.open(&bob, 1, now()).unwrap();
        let of_alice = Some(second.keyed());
        assert_eq!(accounts.open_after(of_alice.as_ref(), (&bob, 1), now()).err(), Some(Full::Tunnels));
        drop(second);
        assert_eq!(taken(), 0);
        let _other = accounts.open(&alice(), 1, now()).unwrap();
        assert!(accounts.open_after(of_alice.as_ref(), (&alice(), 1), now()).is_err(), "its tunnel has ended");
    }

    #[test]
    fn a_user_with_a_used_up_quota_is_refused_until_the_month_ends() {
        let accounts = accounts(1_000);
        let place = accounts.open(&alice(), 9, now()).unwrap();
        place.account.use_up(999);
        assert!(accounts.open(&alice(), 9, now()).is_ok() && !place.account.is_used_up());
        place.account.use_up(1);
        let nine_days = Full::Quota { seconds_left: 9 * 86_400 };
        assert_eq!(accounts.open(&alice(), 9, now()).err(), Some(nine_days));
        assert!(accounts.open(&Holder::User("bob".into()), 9, now()).is_ok());
        assert!(accounts.open(&alice(), 9, now() + 9 * DAY).is_ok(), "in December");
    }

    #[tokio::test]
    async fn all_tunnels_of_a_user_learn_that_the_quota_is_used_up_or_was_lowered_by_a_reload() {
        let accounts = accounts(1_000);
        let places = [1, 2].map(|_| accounts.open(&alice(), 9, now()).unwrap());
        let mut used_up = Box::pin(places[0].account.used_up());
        assert!(futures::poll!(&mut used_up).is_pending());
        places[1].account.use_up(500);
        assert!(futures::poll!(&mut used_up).is_pending());
        let quota = Quota { monthly_bytes: Some(400), ..Quota::default() };
        accounts.set_quotas(&BTreeMap::from([("alice".to_owned(), quota)]));
        assert!(futures::poll!(&mut used_up).is_ready());
        places[1].account.used_up().await;
        accounts.set_quotas(&BTreeMap::new());
        assert!(!places[0].account.is_used_up(), "no quota, no end");
    }

    #[test]
    fn quota_usage_survives_a_restart_within_the_month_only() {
        let before = accounts(1_000);
        before.open(&alice(), 9, now()).unwrap().account.use_up(700);
        before.open(&Holder::Unknown, 9, now()).unwrap().account.use_up(700);
        let used = before.used(now());
        assert_eq!(used, in_november(700));
        let after = accounts(1_000);
        after.restore(&used, now() + DAY);
        let place = after.open(&alice(), 9, now() + DAY).unwrap();
        place.account.use_up(300);
        assert!(place.account.is_used_up());
        let later = accounts(1_000);
        later.restore(&used, now() + 9 * DAY);
        assert_eq!(later.used(now() + 9 * DAY).bytes, BTreeMap::new());
    }

    #[test]
    fn a_clock_that_is_wrong_once_takes_no_usage_away() {
        let (used, years) = (in_november(1_000), 1_100 * DAY);
        let accounts = accounts(1_000);
        accounts.restore(&used, now() + years);
        assert!(accounts.open(&alice(), 9, now() + years).is_ok(), "another month");
        // As it is saved and read again.
        let saved = serde_json::to_string(&accounts.used(now() + years)).unwrap();
        let read: Used = serde_json::from_str(&saved).unwrap();
        assert!(read.month > used.month && read.bytes.is_empty());
        let again = self::accounts(1_000);
        again.restore(&read, now());
        assert_eq!(again.used(now()), used);
        assert!(matches!(again.open(&alice(), 9, now()), Err(Full::Quota { .. })));
        // While it runs, forward and back.
        assert_eq!(again.used(now() + 40 * DAY).bytes, MonthAmounts::new());
        assert_eq!(again.used(now()), used);
        let without_others = r#"{"month":"2026-11","bytes":{"alice":1000}}"#;
        assert_eq!(serde_json::from_str::<Used>(without_others).unwrap(), used, "as earlier versions wrote it");
        assert!(serde_json::from_str::<Used>(&without_others.replace("-11", "-13")).is_err());
    }

    #[test]
    fn a_clock_that_has_not_been_set_yet_begins_no_month() {
        let used = in_november(1_000);
        let (accounts, unset) = (accounts(1_000), SystemTime::UNIX_EPOCH + DAY);
        accounts.restore(&used, unset);
        assert!(matches!(accounts.open(&alice(), 9, unset), Err(Full::Quota { .. })));
        assert_eq!(accounts.used(unset), used, "what is saved meanwhile is of the same month");
        assert!(accounts.open(&alice(), 9, now()).is_err(), "and so it is once the clock is set");
        assert!(accounts.open(&alice(), 9, now() + 9 * DAY).is_ok());
    }

    #[test]
    fn the_gauges_of_a_quota_stay_until_the_quota_goes() {
        let (accounts, gauges) = (accounts(1_000), QuotaGauges::default());
        let shown = || gauges.used_bytes.get(&[("user", "alice".to_owned())]).map(|gauge| gauge.clone());
        accounts.show(&gauges, now());
        let gauge = shown().unwrap();
        accounts.open(&alice(), 9, now()).unwrap().account.use_up(700);
        accounts.show(&gauges, now());
        assert_eq!(gauge.get(), 700, "a scrape meanwhile found it");
        accounts.set_quotas(&BTreeMap::new());
        accounts.show(&gauges, now());
        assert!(shown().is_none());
    }

    #[test]
    fn quotas_of_users_without_metrics_of_their_own_are_added_up() {
        let (accounts, labels) = (Accounts::default(), UserLabels::default());
        let gauges = QuotaGauges::new(labels.clone());
        let quotas = |users: &[(&str, u64)]| {
            let quota = |bytes| Quota { monthly_bytes: Some(bytes), ..Quota::default() };
            users.iter().map(|(user, bytes)| ((*user).to_owned(), quota(*bytes))).collect()
        };
        let shown = |user: &str| gauges.monthly_bytes.get(&[("user", user.to_owned())]).map(|gauge| gauge.get());
        labels.limit(1);
        accounts.set_quotas(&quotas(&[("alice", 100), ("bob", 20), ("carol", 3)]));
        accounts.show(&gauges, now());
        assert_eq!(["alice", "other", "bob", "carol"].map(shown), [Some(100), Some(23), None, None]);
        accounts.set_quotas(&quotas(&[("alice", 100)]));
        accounts.show(&gauges, now());
        assert_eq!(["alice", "other"].map(shown), [Some(100), None]);
    }

    #[test]
    fn an_account_with_a_recent_request_keeps_its_pace() {
        let accounts = Accounts::default();
        let account = accounts.of(&alice());
        // All turns of the next ten seconds.
        let wait_ns = 10_000_000_000;
        let now_ns = (Clock::system().now_ns)();
        while account.take_turn(now_ns, 1, wait_ns).is_some() {}
        (0..3 * KEPT).for_each(|number| _ = accounts.of(&Holder::User(format!("u{number}").into())));
        assert!(accounts.state().accounts.len() <= KEPT + 1, "the others are forgotten");
        assert_eq!(accounts.of(&alice()).take_turn(now_ns, 1, wait_ns), None);
    }

    #[test]
    fn an_account_with_a_connection_keeps_its_count() {
        let accounts = Accounts::default();
        let connection = accounts.connect(&alice(), 1).unwrap();
        (0..3 * KEPT).for_each(|number| _ = accounts.of(&Holder::User(format!("u{number}").into())));
        assert!(accounts.state().accounts.len() <= KEPT + 1, "the others are forgotten");
        assert!(accounts.connect(&alice(), 1).is_none());
        drop(connection);
        assert!(accounts.connect(&alice(), 1).is_some());
    }

    #[test]
    fn accounts_of_those_who_left_are_forgotten_unless_they_have_used_something() {
        let accounts = accounts(1_000);
        accounts.open(&alice(), 9, now()).unwrap().account.use_up(1);
        for number in 0..100_000 {
            let holder = Holder::User(format!("u{number}").into());
            drop(accounts.open(&holder, 1, now()).unwrap());
            assert!(accounts.state().accounts.len() <= KEPT + 1);
        }
        assert_eq!(accounts.used(now()).bytes["alice"], 1);
    }
}
