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
mod tests;
