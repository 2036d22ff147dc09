//! The callbacks' side of a connection's books: what the transport sends, acknowledges and loses, and what the peer allows.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{
            Ordering::{Relaxed, SeqCst},
            fence,
        },
        mpsc,
    },
    time::Duration,
};

use foldhash::fast::RandomState;
use masque::h3::Role;
use pacing::{class_key::ClassKey, label};
use s2n_quic::provider::event::events::{Frame, TransportParameters};

use super::{BASE_PACKET_BYTES, Ledger, PACKET_OVERHEAD_BYTES, StreamLedger};
use crate::flow_control::stream_windows;

/// The callbacks' side of a connection's books.
#[derive(Debug)]
pub struct Account {
    ledger: Arc<Ledger>,
    /// Searched for each frame. Peers choose stream IDs, but only among the IDs that they may open, and they do not know the hasher's seed.
    streams: HashMap<u64, Arc<StreamLedger>, RandomState>,
    /// Limits of streams that the application has not accepted from the peer yet.
    early: HashMap<u64, u64>,
    /// The application has accepted the peer's streams below this ID.
    accepted: u64,
    is_server: bool,
    limit_own: u64,
    limit_peers: u64,
    growth: Growth,
    told: mpsc::Sender<u32>,
    listener: Option<mpsc::Receiver<u32>>,
}

/// How the congestion window grows.
#[derive(Debug, Default)]
struct Growth {
    /// When the current round trip began, and the window at that time.
    begun: Duration,
    window: u32,
    /// Whether the window grew fast in the current round trip or the previous one.
    is_fast: bool,
}

impl Growth {
    /// Notes the window. Returns whether it grew by more than an eighth and two packets within a round trip: slow start doubles it, and
    /// congestion avoidance adds about a packet.
    fn note(&mut self, window: u32, smoothed_rtt: Duration, now: Duration) -> bool {
        let grew = window > self.window.saturating_add(self.window / 8).saturating_add(2 * 1_500);
        if now >= self.begun + smoothed_rtt {
            *self = Self { begun: now, window, is_fast: grew };
        } else {
            self.is_fast |= grew;
        }
        self.is_fast
    }
}

impl Account {
    /// Opens the books of a connection.
    #[must_use]
    pub fn new(is_server: bool) -> Self {
        let (told, listener) = mpsc::channel();
        Self {
            ledger: Arc::new(Ledger::new(is_server)),
            streams: HashMap::default(),
            early: HashMap::new(),
            accepted: 0,
            is_server,
            limit_own: 0,
            limit_peers: 0,
            growth: Growth::default(),
            told,
            listener: Some(listener),
        }
    }

    /// Returns the connection's ledger and, only for the first caller, the names of streams that need attention: their limit grew, or the
    /// peer stopped reading.
    pub fn join(&mut self) -> (Arc<Ledger>, Option<mpsc::Receiver<u32>>) {
        (self.ledger.clone(), self.listener.take())
    }

    /// Opens the books of a bidirectional stream. The driver gets `name` when the stream needs attention.
    pub fn open(&mut self, stream_id: u64, name: u32) -> Arc<StreamLedger> {
        let opened_by_peer = self.opened_by_peer(stream_id);
        let limit = if opened_by_peer { self.limit_peers } else { self.limit_own };
        let limit = self.early.remove(&stream_id).map_or(limit, |early| early.max(limit));
        if opened_by_peer {
            self.accepted = self.accepted.max(stream_id + 4);
        }
        let ledger = StreamLedger::new(name, limit);
        self.streams.insert(stream_id, ledger.clone());
        ledger
    }

    /// Closes the books of a stream.
    pub fn close(&mut self, stream_id: u64) {
        self.streams.remove(&stream_id);
    }

    /// Returns the class of a stream whose books are open.
    #[must_use]
    pub fn class(&self, stream_id: u64) -> Option<ClassKey> {
        self.streams.get(&stream_id).and_then(|stream| ClassKey::from_number(stream.class.load(Relaxed)))
    }

    /// Returns how many streams have open books.
    #[must_use]
    pub fn open_streams(&self) -> usize {
        self.streams.len() + self.early.len()
    }

    fn opened_by_peer(&self, stream_id: u64) -> bool {
        // RFC 9000 §2.1: clients' streams are even.
        self.is_server == (stream_id & 1 == 0)
    }

    /// Notes the peer's initial limits.
    pub fn on_transport_parameters(&mut self, parameters: &TransportParameters<'_>) {
        self.limit_own = parameters.initial_max_stream_data_bidi_remote;
        self.limit_peers = parameters.initial_max_stream_data_bidi_local;
        // The transport does not tell the initial limit of all streams together. This is a relay's.
        let windows = u64::from(stream_windows(Role::Server));
        self.ledger.max_data.store(windows.saturating_mul(self.limit_own), Relaxed);
    }

    /// Notes a frame in the packet under construction.
    pub fn on_frame_sent(&mut self, frame: &Frame) {
        congestion::note_held_back(self.ledger.holds_back());
        let &Frame::Stream { id, offset, len, is_fin, .. } = frame else { return };
        let Some(stream) = self.streams.get(&id) else { return };
        let (class, mark) = (stream.class.load(Relaxed), stream.mark.load(Relaxed));
        label::carry(ClassKey::from_number(class), Some(mark).filter(|mark| *mark != 0));
        let (end, sent) = (offset + u64::from(len), stream.sent.load(Relaxed));
        // A frame holds new bytes or lost bytes, never both, and new bytes leave in order.
        if end > sent {
            stream.sent.store(end, Relaxed);
            self.ledger.sent.fetch_add(end - sent.max(offset), Relaxed);
        }
        if is_fin {
            stream.finished.store(true, Relaxed);
        }
    }

    /// Notes a burst of packets with new bytes.
    pub fn on_progress(&self) {
        // See `Ledger::wait_for_room`.
        fence(SeqCst);
        // Not earlier: in the middle of a burst, the woken task would find the connection locked.
        if self.ledger.hungry.load(Relaxed) && self.ledger.runs_low() {
            self.ledger.hungry.store(false, Relaxed);
            self.ledger.driver.wake();
        }
    }

    /// Notes that a frame arrived.
    pub fn on_frame_received(&mut self, frame: &Frame) {
        match *frame {
            Frame::MaxStreamData { id, value, .. } => match self.streams.get(&id) {
                Some(stream) => {
                    stream.max_data.fetch_max(value, Relaxed);
                    // See `StreamLedger::max_data`.
                    fence(SeqCst);
                    if stream.blocked.swap(false, Relaxed) {
                        self.tell(stream.name);
                    }
                }
                // The peer's limit of open streams bounds the entries.
                None if self.opened_by_peer(id) && id & 2 == 0 && id >= self.accepted => {
                    let limit = self.early.entry(id).or_default();
                    *limit = value.max(*limit);
                }
                None => {}
            },
            Frame::MaxData { value, .. } => _ = self.ledger.max_data.fetch_max(value, Relaxed),
            Frame::StopSending { id, .. } => {
                if let Some(stream) = self.streams.get(&id)
                    && !stream.stopped.swap(true, Relaxed)
                {
                    self.tell(stream.name);
                }
            }
            _ => {}
        }
    }

    fn tell(&self, name: u32) {
        // This fails once the driver is gone.
        _ = self.told.send(name);
        self.ledger.driver.wake();
    }

    /// Notes the path's state after a burst of packets or an acknowledgement. The time comes from any monotonic clock.
    pub fn on_recovery_metrics(
        &mut self,
        congestion_window: u32,
        bytes_in_flight: u32,
        smoothed_rtt: Duration,
        now: Duration,
    ) {
        let is_used = bytes_in_flight > congestion_window / 2;
        let grows = self.growth.note(congestion_window, smoothed_rtt, now);
        self.ledger.window_used.store(is_used, Relaxed);
        self.ledger.window_opens.store(is_used && grows, Relaxed);
        // Only the connection's endpoint writes.
        self.ledger.bursts.store(self.ledger.bursts.load(Relaxed).wrapping_add(1), Relaxed);
        self.ledger.congestion_window.store(congestion_window, Relaxed);
        self.ledger.smoothed_rtt_ns.store(u64::try_from(smoothed_rtt.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        self.ledger.update_low_mark();
    }

    /// Notes that the largest packet size changed.
    pub fn on_mtu(&self, packet_bytes: u16) {
        let payload_bytes = u64::from(packet_bytes).saturating_sub(PACKET_OVERHEAD_BYTES).max(1);
        self.ledger.packet_bytes.store(payload_bytes, Relaxed);
        self.ledger.update_low_mark();
    }

    /// Notes that a packet was declared lost.
    pub fn on_packet_lost(&self, packet_bytes: u16, is_mtu_probe: bool) {
        if is_mtu_probe {
            return;
        }
        self.ledger.lost.fetch_add(1, Relaxed);
        if u64::from(packet_bytes) > BASE_PACKET_BYTES {
            self.ledger.large_lost.fetch_add(1, Relaxed);
        }
    }

    /// Notes that the connection ended.
    pub fn on_closed(&self) {
        self.ledger.closed.store(true, Relaxed);
        self.ledger.driver.wake();
    }
}
