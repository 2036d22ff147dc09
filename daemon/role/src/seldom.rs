//! Log messages that would otherwise come with every request while a condition lasts: logged occasionally, with the
//! number suppressed.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The least time between two messages.
const PAUSE: Duration = Duration::from_secs(10);

/// A rate-limited message.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// Calls `say` with the number of messages suppressed since the last one, unless the last one is too recent.
    pub fn note(&self, say: impl FnOnce(u64)) {
        let unsaid = self.due(Instant::now());
        if let Some(unsaid) = unsaid {
            say(unsaid);
        }
    }

    /// Returns the number of suppressed messages if one may be logged now; otherwise counts this one as suppressed.
    fn due(&self, now: Instant) -> Option<u64> {
        let mut said = self.0.lock();
        if said.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            said.unsaid = said.unsaid.saturating_add(1);
            return None;
        }
        said.last = Some(now);
        Some(std::mem::take(&mut said.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_said_at_once_then_seldom_and_what_was_left_unsaid_is_counted() {
        let (message, began) = (Seldom::default(), Instant::now());
        assert_eq!(message.due(began), Some(0));
        for millisecond in 1..=100 {
            assert_eq!(message.due(began + Duration::from_millis(millisecond)), None);
        }
        assert_eq!(message.due(began + PAUSE), Some(100));
        assert_eq!(message.due(began + PAUSE), None);
        assert_eq!(message.due(began + 3 * PAUSE), Some(1));
    }
}
