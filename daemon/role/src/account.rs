//! One user's account: its rates, and the bytes of the month.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use arc_swap::ArcSwapOption;
use config::quota::Quota;
use parking_lot::Mutex;
use quic::class::Cap;
use sched::pace::Pace;
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
    /// Of one "byte" a request.
    requests: Mutex<Pace>,
}

/// How much time's worth of requests has its turn at once after a silence.
const REQUEST_BURST_NS: u64 = 1_000_000_000;

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
            requests: Mutex::new(Pace::new(0, REQUEST_BURST_NS)),
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

    /// Returns when a request that came at `now_ns` has its turn, of which there are `per_sec` a second, and takes the turn;
    /// `None`, and none is taken, if that is more than `longest_wait_ns` away.
    pub fn take_turn(&self, now_ns: u64, per_sec: u32, longest_wait_ns: u64) -> Option<u64> {
        let mut requests = self.requests.lock();
        // The limit may have changed since.
        requests.set(per_sec.into(), REQUEST_BURST_NS);
        let at_ns = requests.ready_at(now_ns);
        (at_ns - now_ns <= longest_wait_ns).then(|| {
            requests.sent(at_ns, 1);
            at_ns
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    /// How many of 1,000 requests that come at once have their turn within a second.
    fn served_of_a_thousand(account: &UserAccount, now_ns: u64, per_sec: u32) -> usize {
        (0..1_000).filter(|_| account.take_turn(now_ns, per_sec, SECOND_NS).is_some()).count()
    }

    #[test]
    fn requests_have_a_burst_and_then_their_rate_whatever_was_refused() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        let turns: Vec<_> = (0..30).filter_map(|_| account.take_turn(now_ns, 10, SECOND_NS)).collect();
        // Ten and one at once, and the others by the rate until the wait is too long.
        assert_eq!(turns.iter().filter(|at_ns| **at_ns == now_ns).count(), 11);
        assert_eq!(
            turns[11..].iter().map(|at_ns| (at_ns - now_ns) * 10 / SECOND_NS).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        );
        assert_eq!(account.take_turn(now_ns + SECOND_NS, 10, SECOND_NS), Some(now_ns + SECOND_NS + SECOND_NS / 10));
    }

    #[test]
    fn another_limit_holds_for_the_next_request() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        assert_eq!(served_of_a_thousand(&account, now_ns, 10), 21);
        assert_eq!(served_of_a_thousand(&account, now_ns + 3 * SECOND_NS, 100), 201);
    }
}
