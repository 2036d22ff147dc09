//! What happens on one connection, as a qlog, while somebody wants it (draft-ietf-quic-qlog-main-schema).
//!
//! A connection has a [`Tap`]; as long as nobody listens there, it costs a relaxed load for each event of the transport
//! and each payload that has its turn. A [`Tracing`] listens for a while: events are kept as they are, and become text
//! only where they are read.
//!
//! ```text
//! events (what the transport tells) ──┐
//! dispatch, outbox (whose turn it is) ┼─► Tap → Log ─► Tracing::take → sequence::Text
//! io::queue (packets handed over) ────┘ Traces
//! ```
//!
//! The words are structs of our own: the `qlog` crate has owned strings for each event, no room for a namespace of ours,
//! and orders the keys of all JSON in the program (`preserve_order`).

use std::{
    num::NonZeroU32,
    ops::RangeInclusive,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use s2n_quic::provider::event::events::{
    self, ConnectionClosed, KeyUpdate, MtuUpdated, PacketLost, PacketReceived, PacketSent, RecoveryMetrics,
    TransportParameters,
};

pub use self::event::Traced;
use self::{
    event::{Closed, Departure, Event, Payload, Received, Sent, StreamTurn, ms},
    frame::{Acked, Frame},
};
use super::{class_key::ClassKey, monotonic, path::PacketSize};

mod event;
mod frame;
pub mod sequence;

/// Connections that are listened to at once, at most.
pub const TRACES: usize = 4;

/// Memory for the events of one, in bytes; later ones are lost and counted.
const LOG_BYTES: usize = 4 << 20;

/// Where a connection can be listened to. Clones are the same connection's.
#[derive(Clone, Debug, Default)]
pub struct Tap(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_on: AtomicBool,
    log: Mutex<Option<Arc<ConnectionLog>>>,
    parameters: OnceLock<event::Parameters>,
    packets: PacketSize,
}

impl Tap {
    /// Returns the tap of a connection that has just begun.
    #[must_use]
    pub fn new(packets: PacketSize) -> Self {
        Self(Arc::new(Shared { packets, ..Shared::default() }))
    }

    /// Keeps what the peer said of itself, for a later log.
    pub fn introduce(&self, parameters: &TransportParameters<'_>) {
        _ = self.0.parameters.set(parameters.into());
    }

    /// The log that is being written.
    #[must_use]
    pub fn log(&self) -> Option<Arc<ConnectionLog>> {
        if !self.0.is_on.load(Relaxed) {
            return None;
        }
        let mut log = self.0.log.lock();
        if log.as_ref().is_some_and(|log| log.is_over()) {
            // The reader may not even have noticed.
            *log = None;
            self.0.is_on.store(false, Relaxed);
        }
        log.clone()
    }

    /// Connects a log to the events; returns whether no other log is connected.
    fn connect(&self, log: &Arc<ConnectionLog>) -> bool {
        let mut current = self.0.log.lock();
        let is_free = current.as_ref().is_none_or(|log| log.is_over());
        if is_free {
            if let Some(parameters) = self.0.parameters.get() {
                log.note(Event::ParametersSet(parameters.clone()));
            }
            log.note(Event::MtuUpdated { new: self.0.packets.bytes(), done: false });
            *current = Some(log.clone());
            self.0.is_on.store(true, Relaxed);
        }
        is_free
    }

    fn disconnect(&self, log: &Arc<ConnectionLog>) {
        let mut current = self.0.log.lock();
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, log)) {
            *current = None;
            self.0.is_on.store(false, Relaxed);
        }
    }
}

/// All that are listened to: for the queues, which know packets and no connections.
#[derive(Debug, Default)]
pub struct Traces(Mutex<(u32, Vec<Arc<ConnectionLog>>)>);

impl Traces {
    /// Listens to a connection until it ends, the time is over, or what is returned is dropped. `None` while somebody else
    /// listens to it, or [`TRACES`] others are listened to.
    #[must_use]
    pub fn begin(self: &Arc<Self>, tap: &Tap, span: Duration) -> Option<Tracing> {
        let mut traces = self.0.lock();
        let (last, logs) = &mut *traces;
        if logs.len() >= TRACES {
            return None;
        }
        *last = last.wrapping_add(1);
        let log = Arc::new(ConnectionLog::new(NonZeroU32::MIN.saturating_add(*last), span));
        if !tap.connect(&log) {
            return None;
        }
        logs.push(log.clone());
        Some(Tracing { traces: self.clone(), tap: tap.clone(), log })
    }

    /// Notes that the kernel has taken a message of `train` packets, which it was `told` to send at a moment.
    pub fn departed(&self, packets: &[Departing], told_ns: Option<u64>, train: usize) {
        for &Departing { packet: Traced { log, header, decided_ns }, wanted_ns, place } in packets {
            let log = self.0.lock().1.iter().find(|open| open.id == log).cloned();
            if let Some(log) = log {
                let after = |ns: Option<u64>| ns.map(|ns| ms(ns.saturating_sub(log.begun_ns)));
                let (wanted, told) = (after(wanted_ns), after(told_ns));
                log.note(Event::Departure(Departure { header, decided: ms(decided_ns), wanted, told, place, train }));
            }
        }
    }
}

/// A packet of a connection that is listened to, in the queue.
#[derive(Clone, Copy, Debug)]
pub struct Departing {
    /// The packet.
    pub packet: Traced,
    /// When it should leave, if it has to wait at all, in nanoseconds of CLOCK_MONOTONIC.
    pub wanted_ns: Option<u64>,
    /// Which one of its message's packets it is.
    pub place: usize,
}

/// Somebody listens. Dropping it ends that.
#[derive(Debug)]
pub struct Tracing {
    traces: Arc<Traces>,
    tap: Tap,
    log: Arc<ConnectionLog>,
}

impl Tracing {
    /// Whether nothing more is to come: the time is over, or the connection has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.log.is_over() || self.log.state().has_ended
    }

    /// Takes what happened since the last time: all of it at the `end`, and else not the packet whose frames may still be
    /// looked at.
    fn take(&self, end: bool) -> Vec<Entry> {
        self.log.state().take(end)
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        self.tap.disconnect(&self.log);
        self.traces.0.lock().1.retain(|log| !Arc::ptr_eq(log, &self.log));
    }
}

/// Events of one connection, of which there is a bounded number.
#[derive(Debug)]
pub struct ConnectionLog {
    id: NonZeroU32,
    begun_ns: u64,
    until_ns: u64,
    state: Mutex<State>,
}

/// An event, and when it was, in nanoseconds after the log's beginning.
type Entry = (u64, Event);

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    bytes: usize,
    /// How many events there was no room for, and when the last of them was.
    lost: (u64, u64),
    /// Of the packet that is being written.
    frames: Vec<Frame>,
    payloads: Vec<Payload>,
    /// Which entry is the packet that is being read, and how many bytes those before it have.
    reading: Option<(usize, usize)>,
    metrics: Option<event::Metrics>,
    has_ended: bool,
}

impl ConnectionLog {
    fn new(id: NonZeroU32, span: Duration) -> Self {
        let begun_ns = monotonic::now_ns();
        let span_ns = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self { id, begun_ns, until_ns: begun_ns.saturating_add(span_ns), state: Mutex::default() }
    }

    fn is_over(&self) -> bool {
        monotonic::now_ns() >= self.until_ns
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Does something to the state at a moment that is not before those of earlier calls.
    fn at<T>(&self, change: impl FnOnce(&mut State, u64) -> T) -> T {
        let mut state = self.state();
        let now_ns = monotonic::now_ns().saturating_sub(self.begun_ns);
        change(&mut state, now_ns)
    }

    fn note(&self, event: Event) {
        self.at(|state, now_ns| state.push(now_ns, event));
    }

    /// A frame was put into the packet that is being written; `class` knows those of streams.
    pub fn frame_sent(&self, frame: &events::Frame, class: impl FnOnce(u64) -> Option<ClassKey>) {
        if let &events::Frame::Stream { id, len: len @ 1.., .. } = frame
            && let Some(class) = class(id)
        {
            self.payload("stream", id, class, len.into(), None);
        }
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Frame>(), now_ns) {
                state.frames.push(frame.into());
            }
        });
    }

    /// A payload of a tunnel had its turn and was put, in a DATAGRAM frame, into the packet that is being written.
    pub fn datagram_sent(&self, stream_id: u64, class: ClassKey, bytes: u64, waited_ns: u64) {
        self.payload("datagram", stream_id, class, bytes, Some(waited_ns));
    }

    fn payload(&self, form: &'static str, stream_id: u64, class: ClassKey, length: u64, waited_ns: Option<u64>) {
        let waited = waited_ns.map(ms);
        let payload = Payload { header: None, form, stream_id, class: Some(class), length, waited };
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Entry>(), now_ns) {
                state.payloads.push(payload);
            }
        });
    }

    /// Ranges of packet numbers of the ACK frame before, in the packet that is being written.
    pub fn acks_sent(&self, range: &RangeInclusive<u64>) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Acked>(), now_ns)
                && let Some(Frame::Ack { acked_ranges, .. }) = state.frames.last_mut()
            {
                acked_ranges.push(Acked(range.clone()));
            }
        });
    }

    /// A packet was written. Returns what follows it to the kernel.
    #[must_use]
    pub fn packet_sent(&self, event: &PacketSent) -> Traced {
        self.at(|state, now_ns| {
            state.reading = None;
            let frames = std::mem::take(&mut state.frames);
            let sent = Sent::new(event, frames);
            let header = sent.header;
            state.push(now_ns, Event::PacketSent(sent));
            // There is room for them, or they would not be here.
            let payloads = std::mem::take(&mut state.payloads).into_iter();
            let payloads = payloads.map(|payload| Payload { header: Some(header), ..payload });
            state.entries.extend(payloads.map(|payload| (now_ns, Event::Payload(payload))));
            Traced { log: self.id, header, decided_ns: now_ns }
        })
    }

    /// A packet was decrypted; its frames come next.
    pub fn packet_received(&self, event: &PacketReceived) {
        self.at(|state, now_ns| {
            state.reading = Some((state.entries.len(), state.bytes));
            state.push(now_ns, Event::PacketReceived(Received::from(event)));
        });
    }

    /// A frame was found in the packet that was decrypted last.
    pub fn frame_received(&self, frame: &events::Frame) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Frame>(), now_ns)
                && let Some(frames) = state.frames_received()
            {
                frames.push(frame.into());
            }
        });
    }

    /// Ranges of packet numbers of the ACK frame before, in the packet that was decrypted last.
    pub fn acks_received(&self, range: &RangeInclusive<u64>) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Acked>(), now_ns)
                && let Some(Frame::Ack { acked_ranges, .. }) = state.frames_received().and_then(|it| it.last_mut())
            {
                acked_ranges.push(Acked(range.clone()));
            }
        });
    }

    /// A packet is believed lost.
    pub fn packet_lost(&self, event: &PacketLost<'_>) {
        self.note(Event::PacketLost(event.into()));
    }

    /// The active path's state, which may be as it was.
    pub fn recovery_metrics(&self, event: &RecoveryMetrics<'_>) {
        let metrics = event.path.is_active.then(|| event::Metrics::from(event));
        self.at(|state, now_ns| {
            if let Some(metrics) = metrics.filter(|metrics| state.metrics.as_ref() != Some(metrics)) {
                state.metrics = Some(metrics.clone());
                state.push(now_ns, Event::RecoveryMetricsUpdated(metrics));
            }
        });
    }

    /// The largest packet changed, or the search for it is over.
    pub fn mtu_updated(&self, event: &MtuUpdated) {
        self.note(Event::MtuUpdated { new: event.mtu, done: event.search_complete });
    }

    /// The connection is further than it was.
    pub fn state_updated(&self, status: &events::HandshakeStatus) {
        let new = match status {
            events::HandshakeStatus::Complete { .. } => "handshake_complete",
            events::HandshakeStatus::Confirmed { .. } => "handshake_confirmed",
            _ => return,
        };
        self.note(Event::ConnectionStateUpdated { new });
    }

    /// There are new keys.
    pub fn key_updated(&self, event: &KeyUpdate) {
        self.note(Event::KeyUpdated((&event.key_type).into()));
    }

    /// The connection ended.
    pub fn closed(&self, event: &ConnectionClosed) {
        self.at(|state, now_ns| {
            state.push(now_ns, Event::ConnectionClosed(Closed::from(&event.error)));
            state.push(now_ns, Event::ConnectionStateUpdated { new: "closed" });
            state.has_ended = true;
        });
    }

    /// A stream had a turn while others waited: streams, and tunnels.
    pub fn stream_turn(&self, stream_id: u64, class: ClassKey, length: u64, waiting: [usize; 2]) {
        let [waiting_streams, waiting_tunnels] = waiting;
        let class = Some(class);
        self.note(Event::StreamTurn(StreamTurn { stream_id, class, length, waiting_streams, waiting_tunnels }));
    }
}

impl State {
    fn has_room(&mut self, bytes: usize, now_ns: u64) -> bool {
        let fits = self.bytes + bytes <= LOG_BYTES;
        if fits {
            self.bytes += bytes;
        } else {
            self.lost = (self.lost.0 + 1, now_ns);
        }
        fits
    }

    fn push(&mut self, now_ns: u64, event: Event) {
        if self.has_room(size_of::<Entry>(), now_ns) {
            self.entries.push((now_ns, event));
        }
    }

    fn frames_received(&mut self) -> Option<&mut Vec<Frame>> {
        match self.entries.get_mut(self.reading?.0) {
            Some((_, Event::PacketReceived(packet))) => Some(&mut packet.frames),
            _ => None,
        }
    }

    fn take(&mut self, end: bool) -> Vec<Entry> {
        let (count, last_ns) = std::mem::take(&mut self.lost);
        if end || count > 0 {
            self.reading = None;
        }
        let Some((reading, bytes)) = &mut self.reading else {
            // What is in the packet that is being written stays.
            self.bytes = self.frames.len() * size_of::<Frame>() + self.payloads.len() * size_of::<Entry>();
            let mut taken = std::mem::take(&mut self.entries);
            if count > 0 {
                // Small ones may have found room after it.
                let at_ns = taken.last().map_or(last_ns, |(at_ns, _)| last_ns.max(*at_ns));
                taken.push((at_ns, Event::EventsLost { count }));
            }
            return taken;
        };
        let rest = self.entries.split_off(*reading);
        self.bytes -= std::mem::take(bytes);
        *reading = 0;
        std::mem::replace(&mut self.entries, rest)
    }
}

#[cfg(test)]
pub(super) mod tests;
