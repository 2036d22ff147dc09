//! The streams of one connection whose bytes wait for their turns.

use std::{collections::HashMap, mem};

use s2n_quic::{application, stream::SendStream};

use super::slot::Slot;
use crate::departure::Departures;

/// The streams of a connection, by the names that its turns use.
#[derive(Default)]
pub(crate) struct Streams {
    pub(super) slots: Vec<Option<Slot>>,
    pub(super) free: Vec<u32>,
    pub(super) names: HashMap<u64, u32>,
    /// Streams that the driver does not have yet.
    pub(super) arrived: Vec<(u32, SendStream)>,
    /// Streams whose writers have requests for the driver.
    asked: Vec<u32>,
    /// Streams whose user or class may not send before a given time.
    pub(super) capped: Departures,
    /// The driver is gone, and nothing will be sent any more.
    pub(super) abandoned: bool,
    /// No more streams will be added.
    retired: bool,
}

/// What the driver has to do for a stream.
pub(crate) struct Asked {
    pub(crate) reset: Option<application::Error>,
    pub(crate) finish: bool,
    /// Whether to watch until the whole stream is acknowledged.
    pub(crate) flush: bool,
    /// Whether to forget it once the last byte has left.
    pub(crate) leave: bool,
}

impl Streams {
    /// Returns a stream.
    pub(crate) fn slot(&mut self, name: u32) -> Option<&mut Slot> {
        self.slots.get_mut(name as usize)?.as_mut()
    }

    /// Returns the name of a stream.
    pub(crate) fn name(&self, stream_id: u64) -> Option<u32> {
        self.names.get(&stream_id).copied()
    }

    /// Returns how many bytes wait for their turn.
    pub(crate) fn bytes(&self) -> u64 {
        self.slots.iter().flatten().map(|slot| slot.queue.bytes() as u64).sum()
    }

    /// Returns how many streams there are, including finished ones whose last byte has not left.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Notes that no more streams will be added.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
    }

    /// Whether no stream exists and none will be added.
    pub(crate) fn is_done(&self) -> bool {
        self.retired && self.len() == 0
    }

    /// Returns an exclusive upper bound for all names.
    pub(crate) fn names(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Reserves a name for a stream.
    pub(crate) fn reserve(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        })
    }

    /// Takes the streams that the driver does not have yet.
    pub(crate) fn take_arrived(&mut self) -> Vec<(u32, SendStream)> {
        mem::take(&mut self.arrived)
    }

    /// Takes the names of streams whose writers have requests.
    pub(crate) fn take_asked(&mut self) -> Vec<u32> {
        mem::take(&mut self.asked)
    }

    /// Notes that the driver has to look at a stream.
    pub(crate) fn ask(&mut self, name: u32) {
        if !self.abandoned {
            self.asked.push(name);
        }
    }

    /// Returns what the driver has to do for a stream, if there is one.
    pub(crate) fn answer(&mut self, name: u32) -> Option<Asked> {
        let slot = self.slot(name)?;
        let finish = slot.ends();
        slot.ended |= finish;
        let leave = !slot.leaving && (finish || (slot.detached && slot.has_left()));
        slot.leaving |= leave;
        Some(Asked { reset: slot.reset.take(), finish, flush: slot.asks_acknowledged.is_some(), leave })
    }
}
