//! Log messages that would come with every request while something lasts: said now and then, with how many were not.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long after one of its messages the next may be said.
const PAUSE: Duration = Duration::from_secs(10);

/// A message that is said seldom.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// Makes `say` say the message, and how many were left unsaid since the last one, unless the last one is too
    /// recent.
    pub fn note(&self, say: impl FnOnce(u64)) {
        let unsaid = self.due(Instant::now());
        if let Some(unsaid) = unsaid {
            say(unsaid);
        }
    }

    /// Returns how many were left unsaid, if one may be said now; counts it among them otherwise.
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
