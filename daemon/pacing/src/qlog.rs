//! The events of one connection as a qlog, while a caller listens (draft-ietf-quic-qlog-main-schema).
//!
//! A connection has a [`Tap`]; while nothing listens there, it costs a relaxed load for each event of the transport and
//! each payload that has its turn. A [`Tracing`] listens for a limited time: events are kept as they are, and become text
//! only when they are read.
//!
//! ```text
//! events (what the transport tells) ──┐
//! dispatch, outbox (whose turn it is) ┼─► Tap → Log ─► Tracing::take → sequence::Text
//! io::queue (packets handed over) ────┘ Traces
//! ```
//!
//! The events are structs of our own: the `qlog` crate has owned strings for each event, no room for a namespace of ours,
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

/// Most connections that are traced at once.
pub const TRACES: usize = 4;

/// Memory for one connection's events, in bytes; later events are dropped and counted.
const LOG_BYTES: usize = 4 << 20;

/// The point at which a connection can be traced. Clones belong to the same connection. Why it shares no type with the
/// [`Recorder`](crate::io::recorder::Recorder), which ends in the same way: see there.
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

    /// Keeps the peer's transport parameters for a later log.
    pub fn introduce(&self, parameters: &TransportParameters<'_>) {
        _ = self.0.parameters.set(parameters.into());
    }

    /// Returns the log that is being written, if there is one.
    #[must_use]
    pub fn log(&self) -> Option<Arc<ConnectionLog>> {
        if !self.0.is_on.load(Relaxed) {
            return None;
        }
        let mut log = self.0.log.lock();
        if log.as_ref().is_some_and(|log| log.is_over()) {
            // Its time is over, and its reader may not have noticed.
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

/// All traced connections, for the queues, which know packets but no connections.
#[derive(Debug, Default)]
pub struct Traces(Mutex<(u32, Vec<Arc<ConnectionLog>>)>);

impl Traces {
    /// Traces a connection until it ends, `span` is over, or the returned `Tracing` is dropped. Returns `None` while the
    /// connection is already traced, or [`TRACES`] connections are.
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

    /// Notes that the kernel has taken a message of `train` packets, to be sent at `told_ns` if that was given.
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

/// A packet of a traced connection, in the queue.
#[derive(Clone, Copy, Debug)]
pub struct Departing {
    /// The packet.
    pub packet: Traced,
    /// When it should leave, if it has to wait at all, in nanoseconds of CLOCK_MONOTONIC.
    pub wanted_ns: Option<u64>,
    /// Its index among the packets of its message.
    pub place: usize,
}

/// A running trace of a connection. Dropping it ends the trace.
#[derive(Debug)]
pub struct Tracing {
    traces: Arc<Traces>,
    tap: Tap,
    log: Arc<ConnectionLog>,
}

impl Tracing {
    /// Whether no more events will come: the time is over, or the connection has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.log.is_over() || self.log.state().has_ended
    }

    /// Takes the events since the last call: all of them at the `end`, otherwise all but the packet whose frames may still
    /// be read.
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

/// The events of one connection, bounded in bytes.
#[derive(Debug)]
pub struct ConnectionLog {
    id: NonZeroU32,
    begun_ns: u64,
    until_ns: u64,
    state: Mutex<State>,
}

/// An event and its time, in nanoseconds after the log's beginning.
type Entry = (u64, Event);

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    bytes: usize,
    /// How many events were dropped for lack of room, and the time of the last of them.
    lost: (u64, u64),
    /// The frames of the packet that is being written.
    frames: Vec<Frame>,
    payloads: Vec<Payload>,
    /// The index of the packet that is being read, and how many bytes the entries before it take.
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

    /// Changes the state at a time that is never before that of an earlier call.
    fn at<T>(&self, change: impl FnOnce(&mut State, u64) -> T) -> T {
        let mut state = self.state();
        let now_ns = monotonic::now_ns().saturating_sub(self.begun_ns);
        change(&mut state, now_ns)
    }

    fn note(&self, event: Event) {
        self.at(|state, now_ns| state.push(now_ns, event));
    }

    /// Notes a frame in the packet that is being written; `class` finds the class of a stream.
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

    /// Notes that a tunnel's payload had its turn and was put, in a DATAGRAM frame, into the packet that is being written.
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

    /// Notes a range of packet numbers of the last ACK frame in the packet that is being written.
    pub fn acks_sent(&self, range: &RangeInclusive<u64>) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Acked>(), now_ns)
                && let Some(Frame::Ack { acked_ranges, .. }) = state.frames.last_mut()
            {
                acked_ranges.push(Acked(range.clone()));
            }
        });
    }

    /// Notes that a packet was written. Returns the identity that follows it to the kernel.
    #[must_use]
    pub fn packet_sent(&self, event: &PacketSent) -> Traced {
        self.at(|state, now_ns| {
            state.reading = None;
            let frames = std::mem::take(&mut state.frames);
            let sent = Sent::new(event, frames);
            let header = sent.header;
            state.push(now_ns, Event::PacketSent(sent));
            // Their room was reserved when they were noted.
            let payloads = std::mem::take(&mut state.payloads).into_iter();
            let payloads = payloads.map(|payload| Payload { header: Some(header), ..payload });
            state.entries.extend(payloads.map(|payload| (now_ns, Event::Payload(payload))));
            Traced { log: self.id, header, decided_ns: now_ns }
        })
    }

    /// Notes that a packet was decrypted; its frames come next.
    pub fn packet_received(&self, event: &PacketReceived) {
        self.at(|state, now_ns| {
            state.reading = Some((state.entries.len(), state.bytes));
            state.push(now_ns, Event::PacketReceived(Received::from(event)));
        });
    }

    /// Notes a frame in the packet that was decrypted last.
    pub fn frame_received(&self, frame: &events::Frame) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Frame>(), now_ns)
                && let Some(frames) = state.frames_received()
            {
                frames.push(frame.into());
            }
        });
    }

    /// Notes a range of packet numbers of the last ACK frame in the packet that was decrypted last.
    pub fn acks_received(&self, range: &RangeInclusive<u64>) {
        self.at(|state, now_ns| {
            if state.has_room(size_of::<Acked>(), now_ns)
                && let Some(Frame::Ack { acked_ranges, .. }) = state.frames_received().and_then(|it| it.last_mut())
            {
                acked_ranges.push(Acked(range.clone()));
            }
        });
    }

    /// Notes that a packet was declared lost.
    pub fn packet_lost(&self, event: &PacketLost<'_>) {
        self.note(Event::PacketLost(event.into()));
    }

    /// Notes the metrics of the active path, if they changed.
    pub fn recovery_metrics(&self, event: &RecoveryMetrics<'_>) {
        let metrics = event.path.is_active.then(|| event::Metrics::from(event));
        self.at(|state, now_ns| {
            if let Some(metrics) = metrics.filter(|metrics| state.metrics.as_ref() != Some(metrics)) {
                state.metrics = Some(metrics.clone());
                state.push(now_ns, Event::RecoveryMetricsUpdated(metrics));
            }
        });
    }

    /// Notes that the largest packet size changed, or that the search for it is over.
    pub fn mtu_updated(&self, event: &MtuUpdated) {
        self.note(Event::MtuUpdated { new: event.mtu, done: event.search_complete });
    }

    /// Notes the progress of the handshake.
    pub fn state_updated(&self, status: &events::HandshakeStatus) {
        let new = match status {
            events::HandshakeStatus::Complete { .. } => "handshake_complete",
            events::HandshakeStatus::Confirmed { .. } => "handshake_confirmed",
            _ => return,
        };
        self.note(Event::ConnectionStateUpdated { new });
    }

    /// Notes new keys.
    pub fn key_updated(&self, event: &KeyUpdate) {
        self.note(Event::KeyUpdated((&event.key_type).into()));
    }

    /// Notes that the connection ended.
    pub fn closed(&self, event: &ConnectionClosed) {
        self.at(|state, now_ns| {
            state.push(now_ns, Event::ConnectionClosed(Closed::from(&event.error)));
            state.push(now_ns, Event::ConnectionStateUpdated { new: "closed" });
            state.has_ended = true;
        });
    }

    /// Notes a stream's turn, and how many streams and tunnels were waiting.
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
            // The frames and payloads of the packet that is being written stay.
            self.bytes = self.frames.len() * size_of::<Frame>() + self.payloads.len() * size_of::<Entry>();
            let mut taken = std::mem::take(&mut self.entries);
            if count > 0 {
                // Smaller events may have found room after it.
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
