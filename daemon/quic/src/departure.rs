//! Departure times of classes with a rate: which names wait for one, and until when.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::class::Class;

/// When a class allows the next bytes of one of its tunnels or streams to leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Departure {
    /// Not reserved yet.
    #[default]
    Unknown,
    /// Reserved, and waited for.
    At(u64),
    /// The departure has come.
    Due,
}

impl Departure {
    /// Reserves a departure for `bytes` and `packets`, if there is none, and returns until when to wait for it; `None` if
    /// they may leave now.
    pub fn wait(&mut self, class: &Class, now_ns: u64, bytes: u64, packets: u64) -> Option<u64> {
        if *self == Self::Unknown {
            let at_ns = class.to_peers.as_ref().map_or(now_ns, |cap| cap.reserve(now_ns, bytes, packets));
            *self = if at_ns > now_ns { Self::At(at_ns) } else { Self::Due };
        }
        match *self {
            Self::At(at_ns) => Some(at_ns),
            _ => None,
        }
    }

    /// Whether the departure is still ahead.
    #[must_use]
    pub fn is_awaited(self) -> bool {
        matches!(self, Self::At(_))
    }

    /// Notes that the time `at_ns` has come; returns whether it is the departure that was waited for.
    pub fn come(&mut self, at_ns: u64) -> bool {
        let awaited = *self == Self::At(at_ns);
        if awaited {
            *self = Self::Due;
        }
        awaited
    }

    /// Notes that the bytes it was reserved for have left.
    pub fn left(&mut self) {
        *self = Self::Unknown;
    }
}

/// The names that wait for their departures. A name that is gone may still be among them.
#[derive(Debug, Default)]
pub struct Departures(BinaryHeap<Reverse<(u64, u32)>>);

impl Departures {
    /// Makes `name` wait until `at_ns`.
    pub fn push(&mut self, at_ns: u64, name: u32) {
        self.0.push(Reverse((at_ns, name)));
    }

    /// Removes a name whose departure has come; returns the departure and the name.
    pub fn pop_due(&mut self, now_ns: u64) -> Option<(u64, u32)> {
        self.next_ns().filter(|at_ns| *at_ns <= now_ns)?;
        self.0.pop().map(|Reverse(due)| due)
    }

    /// Returns the next departure.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        self.0.peek().map(|Reverse((at_ns, _))| *at_ns)
    }
}
