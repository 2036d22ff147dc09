//! The payloads of one connection's flows that wait to leave, and the order in which they do.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use masque::datagram;
use pacing::{label, qlog::Tap};
use s2n_quic::provider::datagram as provider;
use sched::stream::{Expiry, Service};

use super::{Losses, proof::Proof};
use crate::{
    backlog::Backlog,
    class::Terms,
    departure::{Departure, Departures},
    ledger::Ledger,
    segments::Segments,
    turns::{TurnKind, Turns},
};

/// In how many packets a payload may fail to find room beside other frames before it counts as too big for the path.
///
/// s2n-quic writes an ACK frame into up to 11 packets after the last packet that it has received (`ack/ack_transmission_state.rs`): a
/// payload that fits into a packet of its own, but not beside that frame, leaves in the next one.
pub(super) const MAX_MISSES: u8 = 12;

/// By how many bytes packets without other frames differ in room: packet numbers take 1 to 4 bytes (RFC 9000 §17.1). A larger difference
/// is due to another frame: even an ACK takes 5.
const NUMBER_BYTES: usize = 3;

/// How many flows a search for the largest one may look at for each payload that it drops.
const LOOKS_PER_DROP: usize = 16;

/// The usual size of a DATAGRAM frame's type and length (RFC 9221 §4).
const FRAME_HEADER_BYTES: usize = 1 + 2;

/// The payloads that wait to leave.
#[derive(Default)]
pub(super) struct Outbox {
    pub(super) queues: Vec<Option<FlowQueue>>,
    free: Vec<u32>,
    /// What the waiting payloads count for (see [`Segments::charged_bytes`]).
    pub(super) charged_bytes: usize,
    /// How many flows were looked at in search of the largest one.
    #[cfg(test)]
    pub(super) looks: usize,
    /// How many flows have payloads, whether or not they take turns.
    pub(super) occupied: usize,
    /// The roomiest packet seen since the path last became narrower: a payload that does not fit into one as roomy never will.
    roomiest: usize,
    /// The largest packet of the path when this was last looked at, in bytes.
    full_packet_bytes: u64,
    /// The bytes of the longest quarter stream ID so far.
    id_bytes: usize,
    proof: Proof,
    /// Flows whose user or class may not send before a given time.
    capped: Departures,
}

pub(super) struct FlowQueue {
    pub(super) payloads: Backlog,
    stream_id: u64,
    terms: Terms,
    header: datagram::Header,
    /// How many packets in a row had no room for the oldest payload, even if another payload has become the oldest meanwhile.
    misses: u8,
    /// When the user and the class allow the oldest payload to leave.
    departure: Departure,
    losses: Arc<Losses>,
}

/// What happened to payloads in one packet.
#[derive(Default)]
pub(super) struct Filled {
    pub(super) sent: u64,
    pub(super) too_big: u64,
    pub(super) stale: u64,
    /// Whether a flow now waits for the departure time of its user or its class.
    pub(super) capped: bool,
    /// Whether a payload waits for a roomier packet, and nothing was written into this one.
    pub(super) missed: bool,
    /// Whether the packet was filled up with bytes that the peer ignores.
    pub(super) filled_up: bool,
}

impl Outbox {
    pub(super) fn open(
        &mut self,
        turns: &mut Turns,
        stream_id: u64,
        limit_bytes: usize,
        terms: Terms,
        losses: Arc<Losses>,
    ) -> u32 {
        let slot = self.free.pop().unwrap_or(self.queues.len() as u32);
        turns.set(TurnKind::Flow, slot, terms.service);
        let payloads = Backlog::new(limit_bytes, losses.clone());
        let header = datagram::header(stream_id);
        self.id_bytes = self.id_bytes.max(datagram::id_bytes(stream_id));
        let departure = Departure::default();
        let queue = FlowQueue { payloads, stream_id, terms, header, misses: 0, departure, losses };
        match self.queues.get_mut(slot as usize) {
            Some(free) => *free = Some(queue),
            None => self.queues.push(Some(queue)),
        }
        slot
    }

    pub(super) fn close(&mut self, turns: &mut Turns, slot: u32) {
        turns.remove(TurnKind::Flow, slot);
        if let Some(queue) = self.queues.get_mut(slot as usize).and_then(Option::take) {
            self.charged_bytes -= queue.payloads.charged_bytes();
            self.occupied -= usize::from(!queue.payloads.is_empty());
            self.free.push(slot);
        }
    }

    /// Returns how many bytes of payloads wait.
    pub(super) fn bytes(&self) -> usize {
        self.queues.iter().flatten().map(|queue| queue.payloads.bytes()).sum()
    }

    /// Returns the service of each flow that waits for a turn, and how many bytes its payloads have.
    pub(super) fn waiting(&self, turns: &Turns) -> impl Iterator<Item = (Service, u64)> {
        let queues = if turns.waiting(TurnKind::Flow) > 0 { &self.queues[..] } else { &[] };
        let queues = queues.iter().enumerate().filter_map(|(at, queue)| Some((at, queue.as_ref()?)));
        let waiting = queues.filter(|(at, _)| turns.contains(TurnKind::Flow, *at as u32));
        waiting.map(|(_, queue)| (queue.service(), queue.payloads.bytes() as u64))
    }

    fn queue(&mut self, slot: u32) -> Option<&mut FlowQueue> {
        self.queues.get_mut(slot as usize)?.as_mut()
    }

    pub(super) fn set_terms(&mut self, turns: &mut Turns, slot: u32, terms: impl FnOnce(&Terms) -> Terms) {
        if let Some(queue) = self.queue(slot) {
            queue.terms = terms(&queue.terms);
            queue.departure.follow(&queue.terms);
            // Its oldest payload may have waited for long, and another rule may apply.
            queue.payloads.judge_again();
            let service = queue.service();
            turns.set(TurnKind::Flow, slot, service);
            // It may have waited for a departure of its previous class, or under a previous rate.
            self.wake(turns, slot);
        }
    }

    /// Queues a payload of one flow; returns how many were dropped for it.
    pub(super) fn push(
        &mut self,
        turns: &mut Turns,
        slot: u32,
        connection_bytes: usize,
        payload: &[u8],
        now_ns: u64,
    ) -> usize {
        let Some(queue) = self.queues.get_mut(slot as usize).and_then(Option::as_mut) else { return 1 };
        let (before, was_empty) = (queue.payloads.charged_bytes(), queue.payloads.is_empty());
        let charge = Segments::charge(payload.len());
        self.occupied -= usize::from(!was_empty);
        let share = match self.charged_bytes + charge > connection_bytes {
            true => connection_bytes / (self.occupied + 1),
            false => usize::MAX,
        };
        let mut dropped = 0;
        while queue.payloads.charged_bytes() + charge > share && queue.payloads.pop() {
            dropped += 1;
        }
        dropped += if charge > share { 1 } else { queue.payloads.push(payload, now_ns) };
        self.charged_bytes = self.charged_bytes - before + queue.payloads.charged_bytes();
        self.occupied += usize::from(!queue.payloads.is_empty());
        queue.note_dropped(dropped);
        // A flow that waits already keeps its rank for as long as its oldest payload is the same.
        if was_empty || dropped > 0 {
            self.wake(turns, slot);
        }
        // A flow that has more than its share and receives nothing has to make room for the others.
        while self.charged_bytes > connection_bytes {
            match self.drop_from_largest(turns, connection_bytes) {
                0 => break,
                more => dropped += more,
            }
        }
        dropped
    }

    /// Drops the oldest payloads of the flow with the most bytes; returns how many. Among few flows it drops one payload. Among many, it
    /// drops more, so that not every payload costs a search, but leaves the flow its equal share.
    fn drop_from_largest(&mut self, turns: &mut Turns, connection_bytes: usize) -> usize {
        let of = |queue: &FlowQueue| queue.payloads.charged_bytes();
        let (most, share) = (1 + self.queues.len() / LOOKS_PER_DROP, connection_bytes / self.occupied.max(1));
        #[cfg(test)]
        (self.looks += self.queues.len());
        let flows = self.queues.iter_mut().zip(0..).filter_map(|(queue, slot)| Some((queue.as_mut()?, slot)));
        let Some((queue, slot)) = flows.max_by_key(|(queue, _)| of(queue)) else { return 0 };
        let (before, mut dropped) = (of(queue), 0);
        while dropped < most && (dropped == 0 || of(queue) > share) && queue.payloads.pop() {
            dropped += 1;
        }
        queue.note_dropped(dropped);
        self.charged_bytes -= before - of(queue);
        self.occupied -= usize::from(before > 0 && queue.payloads.is_empty());
        self.wake(turns, slot);
        dropped
    }

    /// Lets a flow take turns, if it has anything to send and neither its user nor its class makes it wait.
    fn wake(&self, turns: &mut Turns, slot: u32) {
        let Some(queue) = self.queues.get(slot as usize).and_then(Option::as_ref) else { return };
        if !queue.payloads.is_empty() && !queue.departure.is_awaited() {
            if queue.terms.deadline_ns.is_some() {
                turns.set(TurnKind::Flow, slot, queue.service());
            }
            turns.wake(TurnKind::Flow, slot);
        }
    }

    /// Whether a flow's oldest payload waits for the departure time of its user or class.
    pub(super) fn is_delayed(&mut self, slot: u32) -> bool {
        self.queue(slot).is_some_and(|queue| queue.departure.is_awaited())
    }

    /// Wakes the flows whose departure time has come; returns the next one.
    pub(super) fn release(&mut self, turns: &mut Turns, now_ns: u64) -> Option<u64> {
        while let Some((at_ns, slot)) = self.capped.pop_due(now_ns) {
            let Some(queue) = self.queue(slot) else { continue };
            if queue.departure.come(at_ns) {
                queue.payloads.judge_again();
                self.wake(turns, slot);
            }
        }
        self.capped.next_ns()
    }

    /// Follows the path's largest packet when it becomes smaller: the roomiest packet is smaller by as much.
    fn narrow(&mut self, full_packet_bytes: u64) {
        let less = self.full_packet_bytes.saturating_sub(full_packet_bytes);
        self.roomiest = self.roomiest.saturating_sub(usize::try_from(less).unwrap_or(usize::MAX));
        self.full_packet_bytes = full_packet_bytes;
    }

    /// Writes as many payloads as fit into `packet`, one turn each.
    pub(super) fn fill<P: provider::Packet>(
        &mut self,
        turns: &mut Turns,
        tap: &Tap,
        packet: &mut P,
        ledger: Option<&Ledger>,
        now_ns: u64,
    ) -> Filled {
        let mut last_stream_id = None;
        let mut filled = Filled::default();
        let room = packet.remaining_capacity();
        if let Some(ledger) = ledger {
            self.narrow(ledger.full_packet_bytes());
        }
        self.roomiest = self.roomiest.max(room);
        let (expiry, log) = (turns.expiry(), tap.log());
        while let Some((slot, _)) = turns.turn(TurnKind::Flow) {
            let Some(queue) = self.queues.get_mut(slot as usize).and_then(Option::as_mut) else {
                turns.remove(TurnKind::Flow, slot);
                continue;
            };
            let (waiting, charged_before) = (queue.payloads.len(), queue.payloads.charged_bytes());
            let Some(departure) = queue.depart(now_ns, expiry) else {
                // The flow was emptied since it was woken, or by its class's rule.
                filled.stale += waiting as u64;
                self.charged_bytes -= charged_before;
                self.occupied -= usize::from(waiting > 0);
                turns.end_turn(TurnKind::Flow, slot, 0, false);
                continue;
            };
            filled.stale += (waiting - queue.payloads.len()) as u64;
            self.charged_bytes -= charged_before - queue.payloads.charged_bytes();
            if let Err(at_ns) = departure {
                self.capped.push(at_ns, slot);
                filled.capped = true;
                turns.end_turn(TurnKind::Flow, slot, 0, false);
                continue;
            }
            let Some((payload, arrival_ns)) = queue.payloads.judged_front() else { break };
            let len = payload.len();
            let mut packets = 0;
            // An empty payload is charged as well: otherwise its flow would keep its turn.
            let mut charged_bytes = 0;
            match queue.write(packet, payload, self.id_bytes) {
                Ok(()) => {
                    label::carry(Some(queue.terms.class.key), queue.terms.class.marks.to_peers);
                    filled.sent += 1;
                    last_stream_id = Some(queue.stream_id);
                    (charged_bytes, packets) = (queue.frame_bytes(len), 1);
                    let (counters, sent_bytes) = (&queue.terms.class.counters, len as u64);
                    counters.sent_bytes.inc_by(sent_bytes);
                    let waited_ns = now_ns.saturating_sub(arrival_ns);
                    counters.note_sent(waited_ns, queue.terms.deadline_ns);
                    if let Some(log) = &log {
                        log.datagram_sent(queue.stream_id, queue.terms.class.key, sent_bytes, waited_ns);
                    }
                }
                Err(provider::WriteError::ExceedsPeerTransportLimits) => {
                    queue.losses.too_big.fetch_add(1, Relaxed);
                    filled.too_big += 1;
                }
                Err(_) => {
                    // It waits on.
                    queue.payloads.judge_again();
                    if filled.sent > 0 {
                        break;
                    }
                    // Other frames may have taken the room. If there are none, or if this happens repeatedly, the path
                    // is too narrow for this payload, which must not keep the others waiting.
                    queue.misses += 1;
                    let may_fit = queue.frame_bytes(len) <= (self.roomiest + NUMBER_BYTES) as u64;
                    if may_fit && room + NUMBER_BYTES < self.roomiest && queue.misses < MAX_MISSES {
                        filled.missed = true;
                        break;
                    }
                    queue.losses.too_big.fetch_add(1, Relaxed);
                    filled.too_big += 1;
                }
            }
            queue.misses = 0;
            queue.departure.left(now_ns, charged_bytes, packets);
            queue.payloads.pop();
            self.charged_bytes -= Segments::charge(len);
            let more = !queue.payloads.is_empty();
            self.occupied -= usize::from(!more);
            if more && queue.terms.deadline_ns.is_some() {
                turns.set(TurnKind::Flow, slot, queue.service());
            }
            turns.end_turn(TurnKind::Flow, slot, charged_bytes, more);
        }
        if let (Some(stream_id), Some(ledger)) = (last_stream_id, ledger) {
            filled.filled_up = self.proof.fill_up(packet, stream_id, ledger);
        }
        filled
    }
}

impl FlowQueue {
    /// Counts payloads that were dropped because a bound was reached. If none is left, gives back the departure that they waited for.
    fn note_dropped(&mut self, payloads: usize) {
        if payloads > 0 {
            self.terms.class.counters.dropped_queue.inc_by(payloads as u64);
            self.losses.send_queue.fetch_add(payloads as u64, Relaxed);
            if self.payloads.is_empty() {
                self.departure.give_back();
            }
        }
    }

    fn service(&self) -> Service {
        self.terms.service_since(self.payloads.oldest_ns().unwrap_or_default())
    }

    /// Drops payloads that are not worth sending. Returns `Ok` if the oldest of the others may leave, or else when to ask again, because
    /// its user or class does not allow it yet; `None` if no payload is left.
    fn depart(&mut self, now_ns: u64, expiry: Expiry) -> Option<Result<(), u64>> {
        let Some(len) = self.payloads.front(now_ns, &self.terms, expiry).map(|(payload, _)| payload.len()) else {
            self.departure.give_back();
            return None;
        };
        let bytes = self.frame_bytes(len);
        Some(self.departure.wait(&self.terms, now_ns, bytes, 1).map_or(Ok(()), Err))
    }

    /// Writes a payload. Its quarter stream ID takes `id_bytes`, so that packets with payloads of other flows are no larger, unless the
    /// payload fits only behind a shorter one.
    fn write<P: provider::Packet>(
        &self,
        packet: &mut P,
        payload: &[u8],
        id_bytes: usize,
    ) -> Result<(), provider::WriteError> {
        if datagram::id_bytes(self.stream_id) < id_bytes {
            let header = datagram::header_as_long(self.stream_id, id_bytes);
            if packet.write_datagram_vectored(&[&header, payload]).is_ok() {
                return Ok(());
            }
        }
        packet.write_datagram_vectored(&[&self.header, payload])
    }

    /// Returns how many bytes a payload of `payload_bytes` takes in a packet, without what makes its header as long as others.
    fn frame_bytes(&self, payload_bytes: usize) -> u64 {
        (payload_bytes + self.header.len() + FRAME_HEADER_BYTES) as u64
    }
}
