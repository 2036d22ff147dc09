//! The service of a connection's streams, from the first byte of each to its end: whose turn it is, and how many bytes it takes.

use std::{mem, sync::Arc};

use bytes::Bytes;
use masque::datagram;
use s2n_quic::{application, stream::SendStream};
use sched::stream::{Contention, Expiry, Rank};

use super::{
    slot::{Slot, StreamWriteError},
    state::State,
};
use crate::{
    class::Terms,
    ledger::{Ledger, StreamLedger},
    turns::TurnKind,
};

/// What the driver does next.
pub(crate) enum Begun {
    /// A turn.
    Turn(Turn),
    /// A stream now waits for the departure time of its user or its class.
    Capped,
    /// A stream has missed its deadline and needs a reset.
    Expired(u32),
}

/// A turn of one stream.
pub(crate) struct Turn {
    pub(crate) name: u32,
    /// Its rank, and how many [changes](crate::turns::Turns::changes) of the discipline there were before.
    rank: (Rank, u64),
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

/// What [`State::abandon`] returns.
type Abandoned = (usize, Vec<(u32, Option<application::Error>)>, Vec<(u32, SendStream)>);

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
            slot.departure.follow(&slot.terms);
            let service = slot.service();
            self.turns.set(TurnKind::Stream, name, service);
            // It may have waited for a departure of its previous class, or under a previous rate.
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

    /// Returns the contention of the stream's next byte with bytes of other streams that were not handed over yet, and with payloads of
    /// tunnels, unless they wait for their peer's permission or for the departure time of their user or class. `None` if there is no such
    /// stream.
    pub(crate) fn contention(&self, name: u32, turn_bytes: u64, now_ns: u64) -> Option<Contention> {
        let own = self.streams.slots.get(name as usize)?.as_ref()?.service_from(now_ns);
        let slots = self.streams.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        let others = slots.filter(|(at, slot)| {
            *at != name as usize && (slot.buffer_full || self.turns.contains(TurnKind::Stream, *at as u32))
        });
        let others = others.map(|(_, slot)| (slot.service(), slot.queue.bytes() as u64));
        let flows = self.outbox.waiting(&self.turns);
        Some(Contention::of(self.turns.discipline(), &own, others.chain(flows), turn_bytes))
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
            let quantum = slot.turn_bytes(quantum);
            if let Some(at_ns) = slot.depart(now_ns, quantum.min(credit)) {
                self.turns.end_turn(TurnKind::Stream, name, 0, false);
                self.streams.capped.push(at_ns, name);
                return Some(Begun::Capped);
            }
            let rank = (rank, self.turns.changes());
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

    /// Ends a request for which a datagram arrived, but which has no use for datagrams.
    pub(super) fn end_request(&mut self, stream_id: u64) {
        // Codes are far below 2^62.
        let code = application::Error::new(datagram::WITHOUT_USE.value()).unwrap_or(application::Error::UNKNOWN);
        if let Some(name) = self.streams.name(stream_id)
            && self.cancel(name, code)
            && let Some(ledger) = &self.ledger
        {
            ledger.driver().wake();
        }
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
