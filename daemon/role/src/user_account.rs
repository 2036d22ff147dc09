//! One user's account: its rates, and the bytes used this month.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use admission::strangers::UserFrames;
use config::quota::Quota;
use parking_lot::Mutex;
use quic::cap::{Cap, UserRate};
use sched::pace::Pace;
use tokio::sync::Notify;

use crate::limits::Gauge;

/// No quota.
const UNLIMITED: u64 = u64::MAX;

/// One user's account, shared by all its tunnels.
#[derive(Debug)]
pub struct UserAccount {
    /// The connections on which a request of the user was admitted.
    pub connections: Gauge,
    /// The open tunnels.
    pub tunnels: Gauge,
    /// The frames of its connections.
    pub frames: Arc<UserFrames>,
    up: UserRate,
    down: Arc<UserRate>,
    quota: Mutex<Quota>,
    monthly_bytes: AtomicU64,
    /// Bytes used this month.
    pub used_bytes: AtomicU64,
    /// Wakes the tasks of all tunnels: the rate to targets has changed, or the quota is used up.
    changed: Notify,
    /// The rate limit of requests. Each request counts as one byte.
    requests: Mutex<Pace>,
}

/// How many requests may have their turn at once after a silence, as a time at the rate.
const REQUEST_BURST_NS: u64 = 1_000_000_000;

impl Default for UserAccount {
    /// Creates an account without limits.
    fn default() -> Self {
        Self {
            connections: Gauge::default(),
            tunnels: Gauge::default(),
            frames: Arc::default(),
            up: UserRate::default(),
            down: Arc::default(),
            quota: Mutex::default(),
            monthly_bytes: AtomicU64::new(UNLIMITED),
            used_bytes: AtomicU64::new(0),
            changed: Notify::new(),
            requests: Mutex::new(Pace::new(0, REQUEST_BURST_NS)),
        }
    }
}

impl UserAccount {
    /// Puts another quota in force, for open tunnels as well. Unchanged rates keep their state. Returns whether the rate from targets has
    /// changed: what waits under the former one must then be told.
    pub fn set(&self, quota: &Quota) -> bool {
        let mut old = self.quota.lock();
        let of = |quota: &Quota| [(quota.rate_up, quota.packets_up), (quota.rate_down, quota.packets_down)];
        let ([old_up, old_down], [up, down]) = (of(&old), of(quota));
        if old_up != up {
            self.up.set(up.0, up.1);
        }
        if old_down != down {
            self.down.set(down.0, down.1);
        }
        self.monthly_bytes.store(quota.monthly_bytes.unwrap_or(UNLIMITED), Relaxed);
        *old = *quota;
        drop(old);
        if old_up != up {
            // Loads that wait for the old rate wait no more.
            self.changed.notify_waiters();
        }
        self.use_up(0);
        old_down != down
    }

    /// Returns the rate to targets, if there is one.
    #[must_use]
    pub fn cap_up(&self) -> Option<Arc<Cap>> {
        self.up.cap()
    }

    /// Returns the rate toward clients, under which payloads and streams take turns on their connections.
    #[must_use]
    pub fn rate_down(&self) -> &Arc<UserRate> {
        &self.down
    }

    /// Takes a turn for a request that arrived at `now_ns`, and returns its time. Returns `None`, and takes no turn, if that
    /// is more than `longest_wait_ns` away. There are `per_sec` turns per second, unless the user's quota names another number.
    pub fn take_turn(&self, now_ns: u64, per_sec: u32, longest_wait_ns: u64) -> Option<u64> {
        let per_sec = self.quota.lock().requests_per_second.unwrap_or(per_sec);
        let mut requests = self.requests.lock();
        // The limit may have changed.
        requests.set(per_sec.into(), REQUEST_BURST_NS);
        let at_ns = requests.ready_at(now_ns);
        (at_ns - now_ns <= longest_wait_ns).then(|| {
            requests.sent(at_ns, 1);
            at_ns
        })
    }

    /// Whether the account has its whole burst at `now_ns`, as a new account has.
    #[must_use]
    pub fn is_rested(&self, now_ns: u64) -> bool {
        self.requests.lock().ready_at(0) <= now_ns.saturating_sub(REQUEST_BURST_NS)
    }

    /// Counts bytes against the monthly quota, if the user has one; wakes the tasks that wait for its exhaustion.
    pub fn use_up(&self, bytes: u64) {
        let monthly_bytes = self.monthly_bytes.load(Relaxed);
        if monthly_bytes != UNLIMITED
            && self.used_bytes.fetch_add(bytes, Relaxed).saturating_add(bytes) >= monthly_bytes
        {
            self.changed.notify_waiters();
        }
    }

    /// Whether the monthly quota is used up.
    #[must_use]
    pub fn is_used_up(&self) -> bool {
        self.used_bytes.load(Relaxed) >= self.monthly_bytes.load(Relaxed)
    }

    /// Completes once the monthly quota is used up.
    pub async fn used_up(&self) {
        loop {
            // Each change of the rate to targets ends this wait, too, so that the task of the tunnel runs and finds the new rate.
            let mut notified = std::pin::pin!(self.changed.notified());
            // From here on no notification is missed.
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
    use std::{pin::pin, task::Context};

    use futures::task::{noop_waker, waker};
    use quic::stirred::Stirred;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    /// How many of 1,000 simultaneous requests have their turn within a second.
    fn served_of_a_thousand(account: &UserAccount, now_ns: u64, per_sec: u32) -> usize {
        (0..1_000).filter(|_| account.take_turn(now_ns, per_sec, SECOND_NS).is_some()).count()
    }

    #[test]
    fn requests_have_a_burst_and_then_their_rate_even_after_refusals() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        let turns: Vec<_> = (0..30).filter_map(|_| account.take_turn(now_ns, 10, SECOND_NS)).collect();
        // Eleven at once (ten and one more), and the others at the rate until the wait is too long.
        assert_eq!(turns.iter().filter(|at_ns| **at_ns == now_ns).count(), 11);
        assert_eq!(
            turns[11..].iter().map(|at_ns| (at_ns - now_ns) * 10 / SECOND_NS).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        );
        assert_eq!(account.take_turn(now_ns + SECOND_NS, 10, SECOND_NS), Some(now_ns + SECOND_NS + SECOND_NS / 10));
    }

    #[test]
    fn an_account_is_rested_as_soon_as_it_has_its_burst_again() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        assert!(account.is_rested(0), "it has had no request");
        // Two seconds' worth, including one for the burst.
        assert_eq!(served_of_a_thousand(&account, now_ns, 10), 21);
        assert!(!account.is_rested(now_ns + 2 * SECOND_NS));
        assert!(account.is_rested(now_ns + 2 * SECOND_NS + SECOND_NS / 10));
    }

    #[test]
    fn the_tasks_of_a_users_tunnels_run_when_the_rate_to_targets_changes_and_the_caller_learns_of_the_other() {
        let (account, task) = (UserAccount::default(), Arc::<Stirred>::default());
        let mut used_up = pin!(account.used_up());
        let mut is_woken_by = |quota: Quota| {
            assert!(used_up.as_mut().poll(&mut Context::from_waker(&waker(task.clone()))).is_pending());
            task.take(&noop_waker());
            (account.set(&quota), task.take(&noop_waker()))
        };
        let (up, down) =
            (Quota { rate_up: Some(1), ..Quota::default() }, Quota { packets_down: Some(1), ..Quota::default() });
        assert_eq!(
            [up, up, down, Quota::default(), Quota::default()].map(&mut is_woken_by),
            [(false, true), (false, false), (true, true), (true, false), (false, false)]
        );
    }

    #[test]
    fn another_limit_holds_for_the_next_request() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        assert_eq!(served_of_a_thousand(&account, now_ns, 10), 21);
        assert_eq!(served_of_a_thousand(&account, now_ns + 3 * SECOND_NS, 100), 201);
    }

    #[test]
    fn a_users_own_limit_comes_before_that_of_all_until_a_reload_takes_it_away() {
        let (account, now_ns) = (UserAccount::default(), 10 * SECOND_NS);
        account.set(&Quota { requests_per_second: Some(100), ..Quota::default() });
        assert_eq!(served_of_a_thousand(&account, now_ns, 10), 201);
        account.set(&Quota { requests_per_second: Some(10), ..Quota::default() });
        assert_eq!(served_of_a_thousand(&account, now_ns + 3 * SECOND_NS, 100), 21);
        account.set(&Quota::default());
        assert_eq!(served_of_a_thousand(&account, now_ns + 6 * SECOND_NS, 100), 201);
    }
}
