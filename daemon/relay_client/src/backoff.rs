//! When to retry after failures.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

/// Exponential back-off with jitter: each failure in a row doubles the wait, and the second half of each wait is
/// random, so that clients of a restarted relay do not all return at once.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
    not_before: Option<Instant>,
    /// When the next attempt may be made if the caller wants [short waits](Self::short_wait).
    soon: Option<Instant>,
}

/// The longest of the [short waits](Backoff::short_wait).
pub const SHORT: Duration = Duration::from_secs(2);

impl Backoff {
    /// Returns a back-off without failures, whose waits double from `first` up to `longest`.
    #[must_use]
    pub fn new((first, longest): (Duration, Duration)) -> Self {
        Self { first, longest, failures: 0, not_before: None, soon: None }
    }

    /// Returns how long to wait at `now` before the next attempt.
    #[must_use]
    pub fn wait(&self, now: Instant) -> Duration {
        self.not_before.map_or(Duration::ZERO, |instant| instant.saturating_duration_since(now))
    }

    /// Like [`wait`](Self::wait), but never longer than [`SHORT`], however many attempts have failed.
    #[must_use]
    pub fn short_wait(&self, now: Instant) -> Duration {
        let soon = self.soon.map_or(Duration::ZERO, |instant| instant.saturating_duration_since(now));
        self.wait(now).min(soon)
    }

    /// Notes a failure and returns the wait that follows. Returns `None` if a wait has not passed yet: attempts in
    /// parallel fail together, and count once.
    pub fn failed(&mut self, now: Instant, random: u64) -> Option<Duration> {
        let jittered = |full: Duration| full / 2 + (full / 2).mul_f64(random as f64 / u64::MAX as f64);
        if !self.wait(now).is_zero() {
            // This was an attempt after a short wait.
            if self.short_wait(now).is_zero() {
                self.soon = Some(now + jittered(SHORT));
            }
            return None;
        }
        let full = self.first.saturating_mul(1_u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(self.longest);
        self.failures = self.failures.saturating_add(1);
        let wait = jittered(full);
        (self.not_before, self.soon) = (Some(now + wait), Some(now + jittered(full.min(SHORT))));
        Some(wait)
    }

    /// Allows the next attempt at once. If it fails, too, the wait is as long as without this.
    pub fn hurry(&mut self) {
        (self.not_before, self.soon) = (None, None);
    }

    /// Whether an attempt has failed, or a connection ended too soon, since the last success.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// Notes a success: the next failure counts as the first again.
    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.hurry();
    }

    /// Returns the longest wait. A connection that lasted longer counts as a success.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.longest
    }
}

/// Returns random bits that are good enough for jitter only.
#[must_use]
pub fn random() -> u64 {
    // The keys come from the system's randomness; each new state has its own.
    RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn waits_double_from_the_first_to_the_longest_and_start_over_after_a_success() {
        let mut backoff = Backoff::new((SECOND, 10 * SECOND));
        let mut now = Instant::now();
        assert_eq!(backoff.wait(now), Duration::ZERO);
        for expected_seconds in [1, 2, 4, 8, 10, 10] {
            let wait = backoff.failed(now, u64::MAX).unwrap();
            assert_eq!((wait, backoff.wait(now)), (expected_seconds * SECOND, wait));
            now += wait;
        }
        backoff.succeeded();
        assert_eq!(backoff.wait(now), Duration::ZERO);
        assert_eq!(backoff.failed(now, u64::MAX), Some(SECOND));
    }

    #[test]
    fn half_of_a_wait_is_random() {
        let wait = |random| Backoff::new((SECOND, SECOND)).failed(Instant::now(), random).unwrap();
        assert_eq!((wait(0), wait(u64::MAX)), (SECOND / 2, SECOND));
        assert!((SECOND * 7 / 10..SECOND * 8 / 10).contains(&wait(u64::MAX / 2)));
    }

    #[test]
    fn failures_side_by_side_count_once() {
        let mut backoff = Backoff::new((SECOND, 10 * SECOND));
        let now = Instant::now();
        assert_eq!(backoff.failed(now, u64::MAX), Some(SECOND));
        assert_eq!(backoff.failed(now + SECOND / 2, u64::MAX), None);
        assert_eq!(backoff.failed(now + SECOND, u64::MAX), Some(2 * SECOND));
    }

    #[test]
    fn a_short_wait_is_bounded_and_follows_each_failure() {
        let mut backoff = Backoff::new((SECOND, 30 * SECOND));
        let now = Instant::now();
        backoff.failed(now, u64::MAX);
        assert_eq!(backoff.short_wait(now), SECOND, "it is no longer than the other wait");
        for _ in 0..10 {
            backoff.hurry();
            backoff.failed(now, u64::MAX);
        }
        assert_eq!((backoff.wait(now), backoff.short_wait(now)), (30 * SECOND, SHORT));
        let later = now + SHORT;
        assert_eq!(backoff.short_wait(later), Duration::ZERO);
        assert_eq!(backoff.failed(later, u64::MAX), None, "the long wait goes on");
        assert_eq!((backoff.wait(later), backoff.short_wait(later)), (28 * SECOND, SHORT));
        backoff.hurry();
        assert_eq!(backoff.short_wait(later), Duration::ZERO);
    }

    #[test]
    fn any_number_of_failures_is_survived() {
        let mut backoff = Backoff::new((SECOND, 30 * SECOND));
        let mut now = Instant::now();
        for _ in 0..100 {
            now += backoff.failed(now, random()).unwrap();
        }
        assert_eq!(backoff.failed(now, u64::MAX), Some(30 * SECOND));
    }
}
