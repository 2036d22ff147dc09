//! Priorities on their way between a client and the streams that they change.

use std::collections::VecDeque;

use masque::priority::Priority;

/// How many streams' priorities are kept. They are advice: beyond that, the oldest are forgotten.
const MOST: usize = 64;

/// The latest priority of each stream, the one given first at the front.
#[derive(Debug, Default)]
pub(super) struct Signals(VecDeque<(u64, Priority)>);

impl Signals {
    /// Keeps a stream's priority in place of its previous one. Returns whether another stream's priority was forgotten
    /// to make room.
    pub(super) fn put(&mut self, stream_id: u64, signal: Priority) -> bool {
        self.take(stream_id);
        let full = self.0.len() == MOST;
        if full {
            self.0.pop_front();
        }
        self.0.push_back((stream_id, signal));
        full
    }

    /// Takes a stream's priority.
    pub(super) fn take(&mut self, stream_id: u64) -> Option<Priority> {
        let place = self.0.iter().position(|(kept, _)| *kept == stream_id)?;
        self.0.remove(place).map(|(_, signal)| signal)
    }

    /// Takes the priority that was given first.
    pub(super) fn pop(&mut self) -> Option<(u64, Priority)> {
        self.0.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urgency(urgency: u8) -> Priority {
        Priority { urgency: Some(urgency), incremental: None, deadline_ms: None }
    }

    #[test]
    fn the_latest_signal_of_a_stream_and_the_latest_streams_are_kept() {
        let mut signals = Signals::default();
        assert!(!signals.put(0, urgency(1)) && !signals.put(0, urgency(2)));
        assert_eq!((signals.take(0), signals.take(0)), (Some(urgency(2)), None));
        let forgotten = (0..MOST as u64 + 2).filter(|stream_id| signals.put(*stream_id, urgency(3))).count();
        assert_eq!((forgotten, signals.take(1), signals.pop()), (2, None, Some((2, urgency(3)))));
    }
}
