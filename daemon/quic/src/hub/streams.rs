//! The streams of one connection whose bytes wait for their turns.

use std::{collections::HashMap, mem, sync::Arc};

use bytes::Bytes;
use s2n_quic::{application, stream::SendStream};
use sched::stream::{Discipline, Expiry, Level, Rank, Service};

use super::{
    State,
    slot::{Slot, StreamWriteError},
};
use crate::{
    class::Terms,
    departure::Departures,
    ledger::{Ledger, StreamLedger},
    turns::TurnKind,
};

/// The streams of a connection, by the names that its turns use.
#[derive(Default)]
pub(crate) struct Streams {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    names: HashMap<u64, u32>,
    /// Streams that the driver does not have yet.
    arrived: Vec<(u32, SendStream)>,
    /// Streams whose writers have requests for the driver.
    asked: Vec<u32>,
    /// Streams whose class may not send before a given time.
    capped: Departures,
    /// The driver is gone, and nothing will be sent any more.
    abandoned: bool,
    /// No more streams will be added.
    retired: bool,
}

/// What the driver does next.
pub(crate) enum Begun {
    /// A turn.
    Turn(Turn),
    /// A stream now waits for the departure time of its class.
    Capped,
    /// A stream has missed its deadline and needs a reset.
    Expired(u32),
}

/// A turn of one stream.
pub(crate) struct Turn {
    pub(crate) name: u32,
    rank: Rank,
    expiry: Expiry,
    now_ns: u64,
    quantum: u64,
    sent: u64,
    /// How many payloads of the tunnel the class's drop rule dropped during the turn.
    pub(crate) stale: u64,
}

/// How a turn ended.
pub(crate) enum End {
    /// The turn is used up, or the stream has no more bytes to send.
    Turn,
    /// The peer allows no more bytes for now.
    Blocked,
    /// The transport's buffer for the stream is full.
    Full,
    /// The stream has ended.
    Failed(s2n_quic::stream::Error),
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

/// What [`State::abandon`] returns.
type Abandoned = (usize, Vec<(u32, Option<application::Error>)>, Vec<(u32, SendStream)>);

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

impl State {
    /// Registers a stream under its reserved name. If the driver is gone, frees the name and returns the stream. The caller resets and
    /// drops it after releasing the lock.
    pub(crate) fn attach(
        &mut self,
        name: u32,
        stream: SendStream,
        ledger: Arc<StreamLedger>,
        terms: Terms,
    ) -> Option<SendStream> {
        if self.streams.abandoned {
            self.streams.free.push(name);
            return Some(stream);
        }
        self.turns.set(TurnKind::Stream, name, terms.service);
        self.streams.names.insert(stream.id(), name);
        if let Some(place) = self.streams.slots.get_mut(name as usize) {
            *place = Some(Slot::new(stream.id(), ledger, terms));
        }
        self.streams.arrived.push((name, stream));
        None
    }

    /// Changes the terms of a stream.
    pub(crate) fn set_stream_terms(&mut self, name: u32, change: impl FnOnce(&Terms) -> Terms) {
        if let Some(slot) = self.streams.slot(name) {
            slot.terms = change(&slot.terms);
            slot.ledger.set_class(&slot.terms.class);
            slot.departure.follow(&slot.terms.class);
            let service = slot.service();
            self.turns.set(TurnKind::Stream, name, service);
            // It may have waited for a departure of its previous class.
            self.wake_stream(name);
        }
    }

    /// Lets a stream take turns, if it is ready.
    pub(crate) fn wake_stream(&mut self, name: u32) {
        if let Some(slot) = self.streams.slot(name).filter(|slot| slot.is_ready()) {
            let service = slot.terms.deadline_ns.map(|_| slot.service());
            if let Some(service) = service {
                self.turns.set(TurnKind::Stream, name, service);
            }
            self.turns.wake(TurnKind::Stream, name);
        }
    }

    /// Returns how many bytes of other streams would leave before the stream's next queued byte. Under priorities and levels, streams of
    /// the same rank and above count. Under other disciplines, all streams count, because any of them may get turns in between.
    pub(crate) fn bytes_ahead(&self, name: u32) -> u64 {
        let slots = || self.streams.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        let Some((_, own)) = slots().find(|(at, _)| *at == name as usize) else { return 0 };
        let own = own.terms.service;
        let discipline = self.turns.discipline();
        let precedes = |other: &Service| match discipline {
            Discipline::Ml { .. } => own.level == Level::Low || other.level == Level::High,
            Discipline::Abs => other.priority >= own.priority,
            _ => true,
        };
        let others = slots().filter(|(at, slot)| *at != name as usize && precedes(&slot.terms.service));
        others.map(|(_, slot)| slot.queue.bytes() as u64).sum()
    }

    /// Wakes the streams whose departure time has come; returns the next one.
    pub(super) fn release_streams(&mut self, now_ns: u64) -> Option<u64> {
        while let Some((at_ns, name)) = self.streams.capped.pop_due(now_ns) {
            if self.streams.slot(name).is_some_and(|slot| slot.departure.come(at_ns)) {
                self.wake_stream(name);
            }
        }
        self.streams.capped.next_ns()
    }

    /// Whether a stream waits for a turn.
    pub(crate) fn has_turns(&self) -> bool {
        self.turns.turn(TurnKind::Stream).is_some()
    }

    /// Begins the next turn, of up to `quantum` bytes; `None` if no stream waits for one.
    pub(crate) fn begin_turn(&mut self, quantum: u64, now_ns: u64, ledger: &Ledger) -> Option<Begun> {
        loop {
            let (name, rank) = self.turns.turn(TurnKind::Stream)?;
            let (expiry, expired) = (self.turns.expiry(), self.turns.expired_stream(now_ns) == Some(name));
            let Some(slot) = self.streams.slot(name) else {
                self.turns.remove(TurnKind::Stream, name);
                continue;
            };
            if expired && !slot.is_tunnel {
                slot.terms.class.counters.expired_streams.inc();
                return Some(Begun::Expired(name));
            }
            let credit = slot.credit(ledger);
            if credit == 0 {
                // Do not charge the class for bytes that the peer does not allow yet. The ledger tells the driver when the peer allows
                // more.
                self.turns.end_turn(TurnKind::Stream, name, 0, false);
                continue;
            }
            if let Some(at_ns) = slot.depart(now_ns, quantum.min(credit)) {
                self.turns.end_turn(TurnKind::Stream, name, 0, false);
                self.streams.capped.push(at_ns, name);
                return Some(Begun::Capped);
            }
            return Some(Begun::Turn(Turn { name, rank, expiry, now_ns, quantum, sent: 0, stale: 0 }));
        }
    }

    /// Takes the next bytes of a turn, and notes them as handed over.
    ///
    /// # Errors
    /// The turn ends. The error says how.
    pub(crate) fn take(&mut self, turn: &mut Turn, ledger: &Ledger) -> Result<Bytes, End> {
        let Some(slot) = self.streams.slot(turn.name).filter(|slot| slot.error.is_none()) else {
            return Err(End::Turn);
        };
        let credit = slot.credit(ledger);
        let max = credit.min(turn.quantum.saturating_sub(turn.sent)) as usize;
        if max == 0 {
            return Err(if credit == 0 { End::Blocked } else { End::Turn });
        }
        let (bytes, stale) = slot.queue.take(max, turn.now_ns, &slot.terms, turn.expiry);
        turn.stale += stale;
        let bytes = bytes.ok_or(End::Turn)?;
        ledger.hand_over(bytes.len() as u64);
        Ok(bytes)
    }

    /// Notes that the transport took bytes.
    pub(crate) fn took(&mut self, turn: &mut Turn, len: u64) {
        turn.sent += len;
        if let Some(slot) = self.streams.slot(turn.name) {
            slot.handed += len;
        }
    }

    /// Puts taken bytes back, because the transport has no room for them.
    pub(crate) fn put_back(&mut self, turn: &Turn, bytes: Bytes, ledger: &Ledger) {
        ledger.give_back(bytes.len() as u64);
        if let Some(slot) = self.streams.slot(turn.name) {
            slot.buffer_full = true;
            if slot.error.is_none() {
                slot.queue.put_back(bytes);
            }
        }
    }

    /// Ends a turn. Returns whether the transport has to be told of the stream's end.
    pub(crate) fn end_turn(&mut self, turn: &Turn, end: &End, ledger: &Ledger) -> bool {
        let Some(slot) = self.streams.slot(turn.name) else { return false };
        slot.end_turn(turn.now_ns, turn.sent);
        if matches!(end, End::Failed(_)) {
            return false;
        }
        let more = matches!(end, End::Turn) && slot.is_ready();
        let service = slot.terms.deadline_ns.filter(|_| more).map(|_| slot.service());
        let (id, class, ends) = (slot.id, slot.terms.class.key, slot.ends());
        slot.ended |= ends;
        slot.leaving |= ends;
        if turn.sent > 0 {
            self.turns.handed_over(turn.rank, ledger);
        }
        if let Some(service) = service {
            self.turns.set(TurnKind::Stream, turn.name, service);
        }
        self.turns.end_turn(TurnKind::Stream, turn.name, turn.sent, more);
        if turn.sent > 0
            && let Some(log) = self.tap.log()
        {
            let waiting = [TurnKind::Stream, TurnKind::Flow].map(|kind| self.turns.waiting(kind));
            log.stream_turn(id, class, turn.sent, waiting);
        }
        ends
    }

    /// Gives up a stream without further callbacks. Returns whether the caller may forget it.
    pub(crate) fn fail(&mut self, name: u32, error: StreamWriteError, ledger: &Ledger) -> bool {
        let Some(slot) = self.streams.slot(name) else { return false };
        if !mem::replace(&mut slot.settled, true) {
            slot.ended = true;
            slot.fail(error);
            ledger.give_back(slot.handed.saturating_sub(slot.ledger.sent_bytes()));
        }
        let detached = slot.detached;
        self.turns.remove(TurnKind::Stream, name);
        detached
    }

    /// Makes the driver reset a stream; discards the queued bytes at once. Returns whether the stream had not ended before.
    pub(crate) fn cancel(&mut self, name: u32, code: application::Error) -> bool {
        let Some(slot) = self.streams.slot(name).filter(|slot| slot.error.is_none()) else { return false };
        slot.reset = Some(code);
        slot.fail(StreamWriteError::Cancelled);
        self.turns.remove(TurnKind::Stream, name);
        self.streams.ask(name);
        true
    }

    /// Forgets a stream; returns whether there was one.
    pub(crate) fn forget(&mut self, name: u32) -> bool {
        let Some(slot) = self.streams.slots.get_mut(name as usize).and_then(Option::take) else { return false };
        self.turns.remove(TurnKind::Stream, name);
        self.streams.names.remove(&slot.id);
        self.streams.free.push(name);
        true
    }

    /// Forgets all streams, because the driver is gone. Returns the number of streams; the names of incomplete streams, with the reset
    /// codes from their writers; and the streams that the driver did not have yet. The caller resets and drops streams after releasing the
    /// lock.
    pub(crate) fn abandon(&mut self) -> Abandoned {
        self.streams.abandoned = true;
        let (mut count, mut unended) = (0, Vec::new());
        for name in 0..self.streams.names() {
            if let Some(slot) = self.streams.slot(name) {
                slot.wake_all();
                // The transport finishes a dropped stream. This is right only if the transport has all bytes of the stream.
                let is_whole = slot.ended || slot.ends();
                unended.extend((!is_whole).then_some((name, slot.reset)));
                count += usize::from(self.forget(name));
            }
        }
        (count, unended, self.streams.take_arrived())
    }
}

#[cfg(test)]
mod tests;
