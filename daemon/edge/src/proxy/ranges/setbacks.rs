//! When a fetcher asks again after a failure, and when it gives up. No IO.

use std::{collections::HashMap, time::Duration};

use super::plan::FetcherId;

/// The first and the longest wait after a range that did not arrive.
const WAITS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));

/// The first and the longest time within which the answer to a request has to begin. A server that is slow to begin would otherwise be asked
/// again and again for what it is about to send.
const STALLS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(80));

/// How many failures in a row are too many. The waits between them take a quarter of a minute, in which a server may restart.
const FAILURES: usize = 7;

/// How a fetcher stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It fetches, or has not failed too often.
    Works,
    /// Its path does not work, or takes no tunnels now. The path may return.
    PathFails,
    /// The server has failed too often in a row.
    ServerFails,
}

/// How the fetchers of a download stand.
#[derive(Debug, Default)]
pub struct Standings(HashMap<FetcherId, Standing>);

impl Standings {
    /// Notes how a fetcher stands. Returns whether the download goes on: a fetcher works, or no fetcher has been failed by the server, so
    /// that only paths are missing.
    pub fn note(&mut self, fetcher: FetcherId, standing: Standing) -> bool {
        self.0.insert(fetcher, standing);
        let is_any = |wanted| self.0.values().any(|standing| *standing == wanted);
        is_any(Standing::Works) || !is_any(Standing::ServerFails)
    }

    /// Forgets a fetcher that has ended.
    pub fn remove(&mut self, fetcher: FetcherId) {
        self.0.remove(&fetcher);
    }
}

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

    /// Notes a failure of the server. Returns how the fetcher stands.
    pub fn failed(&mut self) -> Standing {
        self.failures += 1;
        if self.failures < FAILURES { Standing::Works } else { Standing::ServerFails }
    }

    /// Notes that the server has not begun to answer in time.
    pub fn stalled(&mut self) {
        self.stall = (2 * self.stall).min(STALLS.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_fails_a_fetcher_seven_times_in_a_row_but_not_while_bytes_arrive_or_the_path_fails() {
        let mut setbacks = Setbacks::default();
        let standings: Vec<_> = (0..8).map(|_| setbacks.failed()).collect();
        assert_eq!(standings, [[Standing::Works; 6].as_slice(), &[Standing::ServerFails; 2]].concat());
        let waits: Vec<_> = (0..7).map(|_| setbacks.pause().as_millis()).collect();
        assert_eq!(waits, [250, 500, 1_000, 2_000, 4_000, 8_000, 8_000]);
        setbacks.advanced();
        assert_eq!((setbacks.failed(), setbacks.pause()), (Standing::Works, WAITS.0));
    }

    #[test]
    fn a_download_ends_once_the_server_has_failed_all_fetchers_that_have_a_path() {
        let mut standings = Standings::default();
        assert!(standings.note(0, Standing::Works) && standings.note(1, Standing::PathFails));
        assert!(standings.note(0, Standing::PathFails), "the paths may return");
        assert!(standings.note(2, Standing::Works) && standings.note(0, Standing::ServerFails), "another one works");
        assert!(!standings.note(2, Standing::ServerFails));
        assert!(!standings.note(1, Standing::PathFails), "the fetcher without a path learns of it, too");
        assert!(standings.note(1, Standing::Works), "its path has returned");
        standings.remove(0);
        standings.remove(2);
        assert!(standings.note(1, Standing::PathFails));
    }

    #[test]
    fn a_server_that_is_slow_to_begin_gets_more_time_and_keeps_it() {
        let mut setbacks = Setbacks::default();
        setbacks.failed();
        assert_eq!(setbacks.stall(), STALLS.0, "a refusal is no reason to wait longer");
        let mut stalls = || {
            setbacks.stalled();
            setbacks.stall().as_secs()
        };
        assert_eq!(std::array::from_fn(|_| stalls()), [20, 40, 80, 80]);
        setbacks.advanced();
        assert_eq!(setbacks.stall(), STALLS.1);
    }
}
