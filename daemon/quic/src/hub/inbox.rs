//! Datagrams between arrival and reading.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::Waker,
};

use foldhash::fast::RandomState;
use masque::tunnel::{Tunnel, TunnelError};
use parking_lot::Mutex;

use super::{Losses, counters::DatagramCounters};
use crate::segments::Segments;

/// Bytes kept for all of a connection's requests that are not admitted yet, or have not even arrived: enough for the
/// first flights of a few inner QUIC handshakes sent along with their requests (RFC 9298 §5 lets a client do so).
pub(super) const EARLY_BYTES: usize = 64 * 1024;

/// Most datagrams kept for such requests.
pub(super) const EARLY_DATAGRAMS: usize = 128;

/// Datagrams that arrived for the flows of a connection.
#[derive(Default)]
pub(super) struct Inbox {
    /// Searched for each datagram. Peers choose stream IDs, but only among the IDs that they may open, and they do not know the
    /// hasher's seed.
    pub(super) flows: HashMap<u64, Entrance, RandomState>,
    pub(super) early: Vec<(u64, Box<[u8]>)>,
    pub(super) early_bytes: usize,
    /// Stream IDs below this have been accepted.
    accepted: u64,
}

/// Where datagrams of a flow go.
pub(super) struct Entrance {
    slot: u32,
    stage: Stage,
    arrivals: Arc<Mutex<Arrivals>>,
}

/// The fate of a flow's datagrams.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// They wait with the early arrivals: its request is not admitted yet.
    Early,
    /// They go to its reader.
    Admitted,
    /// They end its request, which has no use for them.
    Refused,
}

/// The payloads that arrived for one flow.
pub(super) struct Arrivals {
    pub(super) payloads: Segments,
    pub(super) state: Tunnel,
    /// The error that ends the tunnel, until its reader takes it.
    pub(super) violation: Option<TunnelError>,
    pub(super) reader: Option<Waker>,
    losses: Arc<Losses>,
}

impl Arrivals {
    /// Takes an HTTP Datagram. Returns how many payloads this dropped.
    fn push(&mut self, http_datagram: &[u8]) -> usize {
        match self.state.on_datagram(http_datagram) {
            Ok(Some(payload)) => {
                let dropped = self.payloads.push(payload);
                if dropped > 0 {
                    self.losses.receive_queue.fetch_add(dropped as u64, Relaxed);
                }
                dropped
            }
            Ok(None) => 0,
            Err(error) => {
                self.violation.get_or_insert(error);
                0
            }
        }
    }
}

impl Inbox {
    /// Opens the entrance of a stream's flow, whose number in the outbox is `slot`. Returns the place of its arrivals, and how many early
    /// datagrams this dropped: those of skipped streams, which nothing will ever read.
    pub(super) fn open(
        &mut self,
        stream_id: u64,
        slot: u32,
        limit_bytes: usize,
        losses: Arc<Losses>,
    ) -> (Arc<Mutex<Arrivals>>, usize) {
        let (payloads, state) = (Segments::new(limit_bytes), Tunnel::new(false));
        let arrivals = Arrivals { payloads, state, violation: None, reader: None, losses };
        let arrivals = Arc::new(Mutex::new(arrivals));
        let passed_over = self.accepted..stream_id;
        let dropped = self.take_early(|id| passed_over.contains(&id)).count();
        self.accepted = self.accepted.max(stream_id + 4);
        self.flows.insert(stream_id, Entrance { slot, stage: Stage::Early, arrivals: arrivals.clone() });
        (arrivals, dropped)
    }

    /// Admits datagrams, beginning with early arrivals. Returns how many payloads this dropped.
    pub(super) fn admit(&mut self, stream_id: u64) -> usize {
        let Some(entrance) = self.flows.get_mut(&stream_id) else { return 0 };
        entrance.stage = Stage::Admitted;
        let arrivals = entrance.arrivals.clone();
        let mut arrivals = arrivals.lock();
        self.take_early(|id| id == stream_id).map(|early| arrivals.push(&early)).sum()
    }

    /// Refuses datagrams. Returns how many have arrived; the first of them ends the request.
    pub(super) fn refuse(&mut self, stream_id: u64) -> usize {
        let Some(entrance) = self.flows.get_mut(&stream_id) else { return 0 };
        entrance.stage = Stage::Refused;
        self.take_early(|id| id == stream_id).count()
    }

    /// Closes the entrance of a stream's flow. Returns how many early datagrams this dropped.
    pub(super) fn close(&mut self, stream_id: u64) -> usize {
        match self.flows.remove(&stream_id) {
            Some(Entrance { stage: Stage::Early, .. }) => self.take_early(|id| id == stream_id).count(),
            _ => 0,
        }
    }

    /// Returns the number of a stream's flow in the outbox.
    pub(super) fn slot(&self, stream_id: u64) -> Option<u32> {
        self.flows.get(&stream_id).map(|entrance| entrance.slot)
    }

    /// Takes an HTTP Datagram for a stream, and counts what is dropped. Returns whether it ends the stream's request.
    pub(super) fn push(&mut self, stream_id: u64, http_datagram: &[u8], counters: &DatagramCounters) -> bool {
        let entrance = self.flows.get(&stream_id).filter(|entrance| entrance.stage != Stage::Early);
        let Some(entrance) = entrance else {
            if !self.keep_early(stream_id, http_datagram) {
                counters.dropped_unknown_stream.inc();
            }
            return false;
        };
        if entrance.stage == Stage::Refused {
            counters.dropped_unknown_stream.inc();
            return true;
        }
        let mut arrivals = entrance.arrivals.lock();
        let dropped = arrivals.push(http_datagram);
        if dropped > 0 {
            counters.dropped_receive_queue.inc_by(dropped as u64);
        }
        if let Some(reader) = arrivals.reader.take() {
            reader.wake();
        }
        false
    }

    /// Keeps an HTTP Datagram for a request that may still be admitted; returns whether it is kept. The first datagrams of a
    /// handshake are worth more than the later ones, and refusing costs less than making room.
    fn keep_early(&mut self, stream_id: u64, http_datagram: &[u8]) -> bool {
        let expected = stream_id >= self.accepted || self.flows.contains_key(&stream_id);
        let fits = self.early_bytes + http_datagram.len() <= EARLY_BYTES && self.early.len() < EARLY_DATAGRAMS;
        if expected && fits {
            self.early_bytes += http_datagram.len();
            self.early.push((stream_id, http_datagram.into()));
        }
        expected && fits
    }

    /// Takes the early datagrams of the streams that `wanted` selects.
    fn take_early(&mut self, wanted: impl Fn(u64) -> bool) -> impl Iterator<Item = Box<[u8]>> {
        let taken: Vec<_> = self.early.extract_if(.., |(stream_id, _)| wanted(*stream_id)).collect();
        self.early_bytes -= taken.iter().map(|(_, http_datagram)| http_datagram.len()).sum::<usize>();
        if self.early.is_empty() {
            self.early = Vec::new();
        }
        taken.into_iter().map(|(_, http_datagram)| http_datagram)
    }
}
