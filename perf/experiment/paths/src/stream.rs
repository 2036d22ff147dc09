//! Streams of a simulation, packet by packet.

use std::collections::VecDeque;

use super::signal::Signal;

/// The part of a stream that one packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) stream: usize,
    pub(super) number: usize,
}

/// A stream to send.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// The index of the plan's stream that this is, entirely or in part.
    pub(super) of: usize,
    /// The number of packets.
    pub(super) packets: usize,
    pub(super) weight: u32,
    /// When its request arrives at the sender.
    pub(super) begins_ns: u64,
    /// The path of all its packets; `None` if each packet is placed separately.
    pub(super) path: Option<usize>,
    /// The priority of its request.
    pub(super) signal: Signal,
}

/// A stream that is being sent.
pub(super) struct Sending {
    pub(super) weight: u32,
    pub(super) begins_ns: u64,
    pub(super) path: Option<usize>,
    pub(super) signal: Signal,
    pub(super) packets: usize,
    pub(super) unsent: usize,
    /// Lost pieces, which have to be sent again.
    pub(super) again: VecDeque<usize>,
    pub(super) arrived: Vec<bool>,
    pub(super) missing: usize,
    /// How many packets have arrived without a gap, counted from the first one.
    pub(super) in_order: usize,
    pub(super) ended_ns: Option<u64>,
    /// By path: how many of its packets were sent there.
    pub(super) sent: Vec<u64>,
}

impl Sending {
    pub(super) fn new(stream: &Stream, paths: usize) -> Self {
        Self {
            weight: stream.weight,
            begins_ns: stream.begins_ns,
            path: stream.path,
            signal: stream.signal,
            packets: stream.packets,
            unsent: 0,
            again: VecDeque::new(),
            arrived: vec![false; stream.packets],
            missing: stream.packets,
            in_order: 0,
            ended_ns: None,
            sent: vec![0; paths],
        }
    }

    /// Records a packet that arrives; returns whether it was missing.
    pub(super) fn arrive(&mut self, now_ns: u64, number: usize) -> bool {
        if std::mem::replace(&mut self.arrived[number], true) {
            return false;
        }
        self.missing -= 1;
        while self.arrived.get(self.in_order) == Some(&true) {
            self.in_order += 1;
        }
        if self.missing == 0 {
            self.ended_ns = Some(now_ns);
        }
        true
    }

    pub(super) fn has_data(&self, now_ns: u64) -> bool {
        now_ns >= self.begins_ns && (self.unsent < self.packets || !self.again.is_empty())
    }

    /// Returns how many packets have not been sent, or have to be sent again.
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
