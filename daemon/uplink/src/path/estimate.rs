//! How fast a path delivers, measured by its traffic.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// How long the best measured rate counts: about ten round trips of the slowest paths, as in BBR.
const WINDOW: Duration = Duration::from_secs(10);

/// How long a rate is measured before it counts: bursts are faster than the path.
const SAMPLE: Duration = Duration::from_millis(250);

/// The measured rates of a path, in the direction with more traffic.
#[derive(Debug, Default)]
pub(crate) struct Estimate {
    /// When the current sample began, with the bytes sent and received by then.
    begun: Option<(Instant, u64, u64)>,
    /// The rates of the window, each higher than all later ones; in bytes per second.
    best: VecDeque<(Instant, u64)>,
    /// The latest one.
    latest: u64,
}

impl Estimate {
    /// Notes how many bytes were sent and received in total. Lower counts than before start a new sample: a
    /// connection has ended.
    pub(crate) fn note(&mut self, now: Instant, sent: u64, received: u64) {
        while self.best.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW) {
            self.best.pop_front();
        }
        let Some((since, sent_before, received_before)) =
            self.begun.filter(|begun| sent >= begun.1 && received >= begun.2)
        else {
            self.begun = Some((now, sent, received));
            return;
        };
        let time = now.saturating_duration_since(since);
        if time < SAMPLE {
            return;
        }
        self.begun = Some((now, sent, received));
        let bytes = (sent - sent_before).max(received - received_before);
        self.latest = (bytes as f64 / time.as_secs_f64()) as u64;
        while self.best.back().is_some_and(|(_, rate)| *rate <= self.latest) {
            self.best.pop_back();
        }
        self.best.push_back((now, self.latest));
    }

    /// Begins a new sample, because the counts are of other connections from now on.
    pub(crate) fn restart(&mut self) {
        self.begun = None;
    }

    /// Returns the best rate within the window, in bytes per second; 0 if nothing is known.
    #[must_use]
    pub(crate) fn bytes_per_sec(&self) -> u64 {
        self.best.front().map_or(0, |(_, rate)| *rate)
    }

    /// Returns the latest rate, in bytes per second: how much the path is used.
    #[must_use]
    pub(crate) fn used_bytes_per_sec(&self) -> u64 {
        self.latest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_best_rate_counts_for_a_while() {
        let (mut estimate, start) = (Estimate::default(), Instant::now());
        estimate.note(start, 0, 0);
        for quarter in 1..=4 {
            estimate.note(start + 250 * MS * quarter, 0, 25_000 * u64::from(quarter));
        }
        assert_eq!((estimate.bytes_per_sec(), estimate.used_bytes_per_sec()), (100_000, 100_000));
        estimate.note(start + 1_250 * MS, 500, 100_000);
        assert_eq!((estimate.bytes_per_sec(), estimate.used_bytes_per_sec()), (100_000, 2_000));
        estimate.note(start + 1_000 * MS + WINDOW + 250 * MS, 500, 100_000);
        assert_eq!(estimate.bytes_per_sec(), 2_000, "a second is over since the best");
        estimate.note(start + 1_250 * MS + WINDOW + 250 * MS, 500, 100_000);
        assert_eq!(estimate.bytes_per_sec(), 0);
    }

    #[test]
    fn a_burst_is_no_rate_and_a_new_connection_begins_anew() {
        let (mut estimate, start) = (Estimate::default(), Instant::now());
        estimate.note(start, 1_000_000, 0);
        estimate.note(start + MS, 2_000_000, 0);
        assert_eq!(estimate.bytes_per_sec(), 0);
        estimate.note(start + 250 * MS, 10, 0);
        estimate.note(start + 500 * MS, 10, 0);
        assert_eq!(estimate.bytes_per_sec(), 0);
    }

    #[test]
    fn bytes_of_a_previous_connection_count_for_no_rate() {
        let (mut estimate, start) = (Estimate::default(), Instant::now());
        estimate.note(start, 0, 0);
        estimate.restart();
        estimate.note(start + 250 * MS, 2_000_000_000, 0);
        assert_eq!((estimate.bytes_per_sec(), estimate.used_bytes_per_sec()), (0, 0));
        estimate.note(start + 500 * MS, 2_000_025_000, 0);
        assert_eq!((estimate.bytes_per_sec(), estimate.used_bytes_per_sec()), (100_000, 100_000));
    }
}
