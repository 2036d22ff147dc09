//! Which stream has the next turn.
//!
//! A discipline is a rank on one [`Pifo`], nothing more; equal ranks take turns in the order they asked.
//!
//! | discipline | rank | a stream with more to send |
//! |---|---|---|
//! | [`Rr`](Discipline::Rr) | 0 | ties with all others: goes to the back |

use crate::pifo::Pifo;

/// How streams that have something to send are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discipline {
    /// Round robin: one turn each, in the order in which they asked for one.
    #[default]
    Rr,
}

impl Discipline {
    const fn rank(self) -> u64 {
        match self {
            Self::Rr => 0,
        }
    }
}

/// The streams of one connection that have something to send, in the order in which they may.
///
/// Streams are named by small integers (see [`Pifo`] for what that costs). What a turn is worth, a packet or a
/// quantum of bytes, is up to the caller.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    discipline: Discipline,
    queue: Pifo,
}

impl Streams {
    /// Creates an empty set of streams served by `discipline`.
    #[must_use]
    pub const fn new(discipline: Discipline) -> Self {
        Self { discipline, queue: Pifo::new() }
    }

    /// Notes that `stream` has something to send. A stream that already waits keeps its place.
    pub fn wake(&mut self, stream: u32) {
        if !self.queue.contains(stream) {
            self.queue.push(stream, self.discipline.rank());
        }
    }

    /// Returns the stream whose turn it is. Asking again gives the same answer until that turn ends.
    #[must_use]
    pub fn turn(&self) -> Option<u32> {
        self.queue.peek().map(|(stream, _)| stream)
    }

    /// Ends the turn of `stream`: with `more` to send it goes where the discipline puts it, otherwise it leaves until
    /// it is woken. A stream that was removed during its turn stays away.
    pub fn end_turn(&mut self, stream: u32, more: bool) {
        if !more {
            self.queue.remove(stream);
        } else if self.queue.contains(stream) {
            self.queue.push(stream, self.discipline.rank());
        }
    }

    /// Forgets `stream`, which may be reused for another at once. Returns whether it was waiting.
    pub fn remove(&mut self, stream: u32) -> bool {
        self.queue.remove(stream)
    }

    /// Returns how many streams have something to send.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether no stream has anything to send.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Serves until nothing is left and returns who had each turn; `backlog[stream]` is how many turns it wants.
    fn serve(backlog: &[usize]) -> Vec<u32> {
        let mut left = backlog.to_vec();
        let mut streams = Streams::new(Discipline::Rr);
        for (stream, _) in left.iter().enumerate().filter(|(_, wanted)| **wanted > 0) {
            streams.wake(stream as u32);
        }
        let mut turns = Vec::new();
        while let Some(stream) = streams.turn() {
            turns.push(stream);
            left[stream as usize] -= 1;
            streams.end_turn(stream, left[stream as usize] > 0);
        }
        turns
    }

    #[test]
    fn round_robin_gives_one_turn_each_in_waking_order() {
        assert_eq!(serve(&[3, 1, 2]), [0, 1, 2, 0, 2, 0]);
    }

    #[test]
    fn waking_a_waiting_stream_does_not_cost_it_its_place() {
        let mut streams = Streams::default();
        streams.wake(4);
        streams.wake(9);
        streams.wake(4);
        assert_eq!((streams.turn(), streams.len()), (Some(4), 2));
    }

    #[test]
    fn a_stream_removed_during_its_turn_stays_away() {
        let mut streams = Streams::default();
        streams.wake(1);
        assert_eq!(streams.turn(), Some(1));
        assert!(streams.remove(1));
        streams.end_turn(1, true);
        assert!(streams.is_empty());
        assert!(!streams.remove(1));
    }

    proptest! {
        #[test]
        fn no_stream_is_more_than_one_turn_ahead_of_another_that_waits(
            backlog in prop::collection::vec(0..20usize, 1..20),
        ) {
            let turns = serve(&backlog);
            prop_assert_eq!(turns.len(), backlog.iter().sum::<usize>());
            let mut had = vec![0; backlog.len()];
            for stream in turns {
                let stream = stream as usize;
                let waiting = backlog.iter().zip(&had).filter(|(wanted, had)| had < wanted).map(|(_, had)| *had);
                prop_assert_eq!(Some(had[stream]), waiting.min());
                had[stream] += 1;
            }
        }
    }
}
