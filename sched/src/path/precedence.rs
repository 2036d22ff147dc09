//! Which of two streams on a path is sent first: what a new stream waits for, and what it shares the path with.

use std::cmp::Ordering;

use crate::stream::{Discipline, Level, Low};

/// A stream's place in the order in which its path sends. The path's discipline decides which parts count ([`under`](Self::under)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precedence {
    /// Its level: the high level goes first.
    pub level: Level,
    /// Its priority within its level; higher goes first.
    pub priority: u8,
    /// Whether it shares the path with incremental streams of its level and priority. Other streams are sent to their end, one after
    /// another, before incremental ones (the `i` parameter of RFC 9218 §4.2, and §10).
    pub is_incremental: bool,
}

/// When an earlier stream is sent, as a later stream sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EarlierStream {
    /// All of it before the later stream.
    GoesFirst,
    /// In turns with the later stream, by weight.
    Shares,
    /// After the later stream.
    Waits,
}

impl Precedence {
    /// The place of streams that share a path by weight alone.
    pub const SHARED: Self = Self { level: Level::Low, priority: 0, is_incremental: true };

    /// Returns the parts that `discipline` ranks by; in the others, all streams are alike. Deadlines are unknown here, so streams that are
    /// served by deadline count as sharing.
    #[must_use]
    pub const fn under(self, discipline: Discipline) -> Self {
        let Self { level, priority, is_incremental } = self;
        match (discipline, level) {
            (Discipline::Abs, _) => Self { level: Level::Low, priority, is_incremental },
            (Discipline::Fcfs, _) | (Discipline::Ml { low: Low::Fcfs }, Level::Low) => {
                Self { is_incremental, ..Self::SHARED }
            }
            (Discipline::Ml { .. }, _) => Self { level, ..Self::SHARED },
            (Discipline::Rr | Discipline::Edf { .. } | Discipline::Wfq | Discipline::Lottery, _) => Self::SHARED,
        }
    }

    /// Ranks streams that arrive together: the highest is sent first.
    pub(super) const fn rank(&self) -> (bool, u8, bool) {
        (matches!(self.level, Level::High), self.priority, !self.is_incremental)
    }

    /// Returns when this stream is sent, as a stream that comes later sees it.
    pub(super) fn before(&self, later: &Self) -> EarlierStream {
        let urgency = |of: &Self| (of.level == Level::High, of.priority);
        match urgency(self).cmp(&urgency(later)) {
            Ordering::Greater => EarlierStream::GoesFirst,
            Ordering::Less => EarlierStream::Waits,
            Ordering::Equal if !self.is_incremental => EarlierStream::GoesFirst,
            Ordering::Equal if !later.is_incremental => EarlierStream::Waits,
            Ordering::Equal => EarlierStream::Shares,
        }
    }
}
