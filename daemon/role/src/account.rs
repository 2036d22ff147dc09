//! One user's account: its rates, and the bytes of the month.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use arc_swap::ArcSwapOption;
use config::quota::Quota;
use parking_lot::Mutex;
use quic::class::Cap;
use tokio::sync::Notify;

use crate::limits::Gauge;

/// No quota.
const UNLIMITED: u64 = u64::MAX;

/// One user's account, which all its tunnels share.
#[derive(Debug)]
pub struct UserAccount {
    /// The tunnels that are open on it.
    pub tunnels: Gauge,
    up: ArcSwapOption<Cap>,
    down: ArcSwapOption<Cap>,
    quota: Mutex<Quota>,
    monthly_bytes: AtomicU64,
    /// Bytes that were used this month.
    pub used_bytes: AtomicU64,
    used_up: Notify,
}

impl Default for UserAccount {
    /// One without limits.
    fn default() -> Self {
        Self {
            tunnels: Gauge::default(),
            up: ArcSwapOption::empty(),
            down: ArcSwapOption::empty(),
            quota: Mutex::default(),
            monthly_bytes: AtomicU64::new(UNLIMITED),
            used_bytes: AtomicU64::new(0),
            used_up: Notify::new(),
        }
    }
}

impl UserAccount {
    /// Puts another quota in force, for what is open as well. Rates that stay the same go on where they are.
    pub fn set(&self, quota: &Quota) {
        let mut old = self.quota.lock();
        if (old.rate_up, old.packets_up) != (quota.rate_up, quota.packets_up) {
            self.up.store(Cap::new(quota.rate_up, quota.packets_up).map(Arc::new));
        }
        if (old.rate_down, old.packets_down) != (quota.rate_down, quota.packets_down) {
            self.down.store(Cap::new(quota.rate_down, quota.packets_down).map(Arc::new));
        }
        self.monthly_bytes.store(quota.monthly_bytes.unwrap_or(UNLIMITED), Relaxed);
        *old = *quota;
        drop(old);
        self.use_up(0);
    }

    /// Whether what goes to targets is held to a rate.
    #[must_use]
    pub fn has_cap_up(&self) -> bool {
        self.up.load().is_some()
    }

    /// Whether what comes from targets is.
    #[must_use]
    pub fn has_cap_down(&self) -> bool {
        self.down.load().is_some()
    }

    /// Reserves a departure toward a target, if there is a rate.
    pub fn reserve_up(&self, now_ns: u64, bytes: u64, packets: u64) -> Option<u64> {
        self.up.load().as_ref().map(|cap| cap.reserve(now_ns, bytes, packets))
    }

    /// The same of what comes from a target.
    pub fn reserve_down(&self, now_ns: u64, bytes: u64, packets: u64) -> Option<u64> {
        self.down.load().as_ref().map(|cap| cap.reserve(now_ns, bytes, packets))
    }

    /// Counts bytes of the month if the user has a quota; wakes the tasks that wait for its end once it is used up.
    pub fn use_up(&self, bytes: u64) {
        let monthly_bytes = self.monthly_bytes.load(Relaxed);
        if monthly_bytes != UNLIMITED
            && self.used_bytes.fetch_add(bytes, Relaxed).saturating_add(bytes) >= monthly_bytes
        {
            self.used_up.notify_waiters();
        }
    }

    /// Whether nothing is left of the month's bytes.
    #[must_use]
    pub fn is_used_up(&self) -> bool {
        self.used_bytes.load(Relaxed) >= self.monthly_bytes.load(Relaxed)
    }

    /// Completes once nothing is left of the month's bytes.
    pub async fn used_up(&self) {
        loop {
            let mut notified = std::pin::pin!(self.used_up.notified());
            // From here on, none is missed.
            notified.as_mut().enable();
            if self.is_used_up() {
                return;
            }
            notified.await;
        }
    }
}
