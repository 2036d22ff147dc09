//! When a fetcher asks again after a failure, and when it gives up. No IO.

use std::time::Duration;

/// The first and the longest wait after a range that did not arrive.
const WAITS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));

/// The first and the longest time within which the answer to a request has to begin. A server that is slow to begin would otherwise be asked
/// again and again for what it is about to send.
const STALLS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(80));

/// How many failures in a row are too many. The waits between them take a quarter of a minute, in which a server may restart.
const FAILURES: usize = 7;

/// The failures of a server in a row, as a fetcher has seen them: it was not reached, broke its connection, fell silent or was busy. Failures
/// of the path do not count: the path may return.
#[derive(Debug)]
pub struct Setbacks {
    failures: usize,
    wait: Duration,
    stall: Duration,
}

impl Default for Setbacks {
    fn default() -> Self {
        Self { failures: 0, wait: WAITS.0, stall: STALLS.0 }
    }
}

impl Setbacks {
    /// Returns within which time the answer to the next request has to begin.
    #[must_use]
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// Notes that bytes of a range have arrived.
    pub fn advanced(&mut self) {
        // A server that needed a long time to begin may need it again.
        (self.failures, self.wait) = (0, WAITS.0);
    }

    /// Returns how long to wait before the next request, and doubles the next wait.
    pub fn pause(&mut self) -> Duration {
        let next = (2 * self.wait).min(WAITS.1);
        std::mem::replace(&mut self.wait, next)
    }

    /// Notes a failure of the server. Returns how long to wait before the next request; `None` if there have been too many failures.
    pub fn failed(&mut self) -> Option<Duration> {
        self.failures += 1;
        self.stall = (2 * self.stall).min(STALLS.1);
        (self.failures < FAILURES).then(|| self.pause())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetcher_gives_up_after_seven_failures_in_a_row_but_not_while_bytes_arrive_or_the_path_fails() {
        let mut setbacks = Setbacks::default();
        let waits: Vec<_> = std::iter::from_fn(|| setbacks.failed()).collect();
        assert_eq!(waits.iter().map(Duration::as_millis).collect::<Vec<_>>(), [250, 500, 1_000, 2_000, 4_000, 8_000]);
        setbacks.advanced();
        assert_eq!(setbacks.failed(), Some(WAITS.0));
        assert!((0..100).all(|_| setbacks.pause() <= WAITS.1));
        assert_eq!(setbacks.failed(), Some(WAITS.1), "the failures of the path do not count");
    }

    #[test]
    fn a_server_that_is_slow_to_begin_gets_more_time_and_keeps_it() {
        let mut setbacks = Setbacks::default();
        let mut stalls = || {
            setbacks.failed();
            setbacks.stall().as_secs()
        };
        assert_eq!(std::array::from_fn(|_| stalls()), [20, 40, 80, 80]);
        setbacks.advanced();
        assert_eq!(setbacks.stall(), STALLS.1);
    }
}
