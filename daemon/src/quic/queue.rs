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
            let frame = encode(payloads, max, now_ns, terms, expiry);
            self.push(frame);
        }
        let front = self.bytes.front_mut()?;
        let taken = if front.len() > max { front.split_to(max.max(1)) } else { self.bytes.pop_front()? };
        self.len -= taken.len();
        Some(taken)
    }

    /// When the oldest payload came, if the queue holds nothing that was begun.
    #[must_use]
    pub fn oldest_ns(&self) -> Option<u64> {
        self.payloads.as_ref().filter(|_| self.bytes.is_empty()).and_then(|payloads| payloads.oldest_ns())
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

/// Takes payloads for about `max` bytes, at least one, and encodes them as DATAGRAM capsules in one DATA frame. Empty if
/// none was worth it.
fn encode(payloads: &mut Backlog, max: usize, now_ns: u64, terms: &Terms, expiry: Expiry) -> Bytes {
    // The frame's header says how long it is, which is known at the end: it is written before the capsules then.
    let mut frame = BytesMut::new();
    while let Some((payload, arrival_ns)) = payloads.front(now_ns, terms, expiry) {
        let header = capsule::datagram_header(payload.len());
        let len = frame.len() + header.len() + payload.len();
        if frame.is_empty() {
            frame.reserve(LONGEST_FRAME_HEADER + max.max(len));
            frame.put_bytes(0, LONGEST_FRAME_HEADER);
        } else if len - LONGEST_FRAME_HEADER > max {
            break;
        }
        frame.put_slice(&header);
        frame.put_slice(payload);
        terms.class.counters.note_sent(now_ns.saturating_sub(arrival_ns), terms.deadline_ns);
        payloads.pop();
    }
    let Some(capsules_len) = frame.len().checked_sub(LONGEST_FRAME_HEADER) else { return Bytes::new() };
    let (header, header_len) = h3::data_frame_header(capsules_len as u64);
    let start = LONGEST_FRAME_HEADER - header_len;
    frame[start..LONGEST_FRAME_HEADER].copy_from_slice(&header[..header_len]);
    frame.freeze().slice(start..)
}
