//! Log messages at a limited rate.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long a notice stays silent after it was given; counters show how often there was reason for
/// it.
const SILENCE: Duration = Duration::from_secs(60);

/// A notice that is given once a minute at most.
#[derive(Debug, Default)]
pub struct Notice(Mutex<Option<Instant>>);

impl Notice {
    /// Whether it is due at `now`; if so, it counts as given.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        let mut given = self.0.lock();
        let due = given.is_none_or(|given| now.saturating_duration_since(given) >= SILENCE);
        if due {
            *given = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_given_once_a_minute() {
        let (notice, now) = (Notice::default(), Instant::now());
        assert!(notice.is_due(now));
        assert!(!notice.is_due(now + SILENCE / 2));
        assert!(notice.is_due(now + SILENCE));
    }
}
