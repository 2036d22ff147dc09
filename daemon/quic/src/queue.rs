//! What one stream has to send and the transport has not been given.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};
use masque::{capsule, h3};
use sched::stream::Expiry;

use super::{backlog::Backlog, class::Terms};

/// The type and the length of a DATA frame, at most (RFC 9114 §7.2.1).
const LONGEST_FRAME_HEADER: usize = 9;

/// Bytes in order, and behind them the payloads of a tunnel that become capsules when their turn comes: only then is it
/// settled which of them are still worth sending.
#[derive(Debug, Default)]
pub struct Queue {
    /// These were begun, so that they have to be sent whole.
    bytes: VecDeque<Bytes>,
    len: usize,
    /// When the oldest payload came of the frame that was begun.
    frame_ns: Option<u64>,
    payloads: Option<Box<Backlog>>,
}

impl Queue {
    /// Appends bytes.
    pub fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            self.bytes.push_back(bytes);
        }
    }

    /// Puts bytes back that were taken last.
    pub fn put_back(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            self.bytes.push_front(bytes);
        }
    }

    /// Appends a copy of a payload that is to leave in a capsule; returns how many payloads were dropped for it.
    pub fn push_payload(&mut self, payload: &[u8], limit_bytes: usize, now_ns: u64) -> usize {
        self.payloads.get_or_insert_with(|| Box::new(Backlog::new(limit_bytes))).push(payload, now_ns)
    }

    /// Takes up to `max` bytes, more than none if there are any; payloads that are not worth sending are dropped and
    /// counted.
    pub fn take(&mut self, max: usize, now_ns: u64, terms: &Terms, expiry: Expiry) -> Option<Bytes> {
        if self.bytes.is_empty()
            && let Some(payloads) = &mut self.payloads
        {
            let (frame, since_ns) = encode(payloads, max, now_ns, terms, expiry);
            self.frame_ns = since_ns;
            self.push(frame);
        }
        let front = self.bytes.front_mut()?;
        let taken = if front.len() > max { front.split_to(max.max(1)) } else { self.bytes.pop_front()? };
        self.len -= taken.len();
        Some(taken)
    }

    /// When the payload came that leaves next, of a tunnel.
    #[must_use]
    pub fn oldest_ns(&self) -> Option<u64> {
        let payloads = self.payloads.as_ref()?;
        if self.bytes.is_empty() { payloads.oldest_ns() } else { self.frame_ns }
    }

    /// Whether the stream is a tunnel that has carried payloads in capsules.
    #[must_use]
    pub fn is_tunnel(&self) -> bool {
        self.payloads.is_some()
    }

    /// How many bytes wait, those of payloads included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len + self.payloads.as_ref().map_or(0, |payloads| payloads.bytes())
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.payloads.as_ref().is_none_or(|payloads| payloads.is_empty())
    }

    /// Discards everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Takes payloads for at most `max` bytes, or one, and encodes them as DATAGRAM capsules in one DATA frame; returns it
/// with the first one's arrival. Empty if none was worth it.
fn encode(payloads: &mut Backlog, max: usize, now_ns: u64, terms: &Terms, expiry: Expiry) -> (Bytes, Option<u64>) {
    // The frame's header says how long it is, which is known at the end: it is written before the capsules then.
    let (mut frame, mut since_ns) = (BytesMut::new(), None);
    while let Some((payload, arrival_ns)) = payloads.front(now_ns, terms, expiry) {
        let header = capsule::datagram_header(payload.len());
        let len = frame.len() + header.len() + payload.len();
        if frame.is_empty() {
            frame.reserve(max.max(LONGEST_FRAME_HEADER + len));
            frame.put_bytes(0, LONGEST_FRAME_HEADER);
            since_ns = Some(arrival_ns);
        } else if len > max {
            break;
        }
        frame.put_slice(&header);
        frame.put_slice(payload);
        terms.class.counters.note_sent(now_ns.saturating_sub(arrival_ns), terms.deadline_ns);
        payloads.pop();
    }
    let Some(capsules_len) = frame.len().checked_sub(LONGEST_FRAME_HEADER) else { return (Bytes::new(), None) };
    let (header, header_len) = h3::data_frame_header(capsules_len as u64);
    let start = LONGEST_FRAME_HEADER - header_len;
    frame[start..LONGEST_FRAME_HEADER].copy_from_slice(&header[..header_len]);
    (frame.freeze().slice(start..), since_ns)
}
