//! Streams of a simulation, packet by packet.

use std::collections::VecDeque;

/// One packet's worth of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) stream: usize,
    pub(super) number: usize,
}

/// What is to be sent.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// The stream of the plan that it is all or a part of.
    pub(super) of: usize,
    /// How many packets it takes.
    pub(super) packets: usize,
    pub(super) weight: u32,
    /// When the request for it has arrived.
    pub(super) begins_ns: u64,
}

/// A stream on its way.
pub(super) struct Sending {
    pub(super) weight: u32,
    pub(super) begins_ns: u64,
    pub(super) packets: usize,
    pub(super) unsent: usize,
    /// Pieces that were lost.
    pub(super) again: VecDeque<usize>,
    pub(super) arrived: Vec<bool>,
    pub(super) missing: usize,
    pub(super) ended_ns: Option<u64>,
    /// By path: how many of its packets were sent.
    pub(super) sent: Vec<u64>,
}

impl Sending {
    pub(super) fn has_data(&self, now_ns: u64) -> bool {
        now_ns >= self.begins_ns && (self.unsent < self.packets || !self.again.is_empty())
    }

    /// How many packets have not been sent, or have to be sent again.
    pub(super) fn waiting(&self) -> usize {
        self.packets - self.unsent + self.again.len()
    }

    pub(super) fn next(&mut self) -> Option<usize> {
        if let Some(number) = self.again.pop_front() {
            return Some(number);
        }
        let number = self.unsent;
        (number < self.packets).then(|| {
            self.unsent += 1;
            number
        })
    }

    pub(super) fn lose(&mut self, number: usize) {
        if self.arrived.get(number) == Some(&false) {
            self.again.push_back(number);
        }
    }
}
