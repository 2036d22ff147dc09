//! The bytes that one stream has to send and that were not handed to the transport yet.

use std::{collections::VecDeque, sync::Arc};

use bytes::{BufMut, Bytes, BytesMut};
use masque::{capsule, h3};
use sched::stream::Expiry;

use super::{
    backlog::{Backlog, Losses},
    class::Terms,
};

/// The most that the type and the length of a DATA frame take, in bytes (RFC 9114 §7.2.1).
const LONGEST_FRAME_HEADER: usize = 9;

/// Bytes in order, and behind them the payloads of a tunnel, which become capsules when their turn comes: only then is it
/// known which of them are still worth sending.
#[derive(Debug, Default)]
pub struct Queue {
    /// Bytes of messages that have begun and so must be sent whole. `behind` is empty if `front` is: a tunnel's response is one piece, so a
    /// tunnel needs no memory for more.
    front: Option<Bytes>,
    behind: VecDeque<Bytes>,
    len: usize,
    /// When the oldest payload of the frame that was begun arrived.
    frame_ns: Option<u64>,
    payloads: Option<Box<Backlog>>,
}

impl Queue {
    /// Appends bytes.
    pub fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            match self.front {
                None => self.front = Some(bytes),
                Some(_) => self.behind.push_back(bytes),
            }
        }
    }

    /// Puts back the bytes that were taken last.
    pub fn put_back(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            if let Some(second) = self.front.replace(bytes) {
                self.behind.push_front(second);
            }
        }
    }

    /// Appends a copy of a payload that will leave in a capsule, for the tunnel with these `losses`; returns how many
    /// payloads were dropped for it.
    pub fn push_payload(&mut self, payload: &[u8], limit_bytes: usize, losses: &Arc<Losses>, now_ns: u64) -> usize {
        let payloads = self.payloads.get_or_insert_with(|| Box::new(Backlog::new(limit_bytes, losses.clone())));
        payloads.push(payload, now_ns)
    }

    /// Takes up to `max` bytes, at least one if any wait, and returns how many payloads before them were dropped because
    /// they are no longer worth sending. These are counted in the class and in the tunnel's losses.
    pub fn take(&mut self, max: usize, now_ns: u64, terms: &Terms, expiry: Expiry) -> (Option<Bytes>, u64) {
        let mut stale = 0;
        if self.front.is_none()
            && let Some(payloads) = &mut self.payloads
        {
            let frame = encode(payloads, max, now_ns, terms, expiry);
            self.frame_ns = frame.since_ns;
            stale = frame.stale;
            self.push(frame.bytes);
        }
        (self.take_bytes(max), stale)
    }

    fn take_bytes(&mut self, max: usize) -> Option<Bytes> {
        let front = self.front.as_mut()?;
        let taken = match front.len() > max {
            true => front.split_to(max.max(1)),
            false => std::mem::replace(&mut self.front, self.behind.pop_front())?,
        };
        self.len -= taken.len();
        Some(taken)
    }

    /// Returns the arrival time of the tunnel's payload that leaves next.
    #[must_use]
    pub fn oldest_ns(&self) -> Option<u64> {
        let payloads = self.payloads.as_ref()?;
        if self.front.is_none() { payloads.oldest_ns() } else { self.frame_ns }
    }

    /// Returns how many bytes wait, including payloads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len + self.payloads.as_ref().map_or(0, |payloads| payloads.bytes())
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.front.is_none() && self.payloads.as_ref().is_none_or(|payloads| payloads.is_empty())
    }

    /// Discards everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// A DATA frame of whole DATAGRAM capsules.
struct Frame {
    /// Empty if no payload was worth sending.
    bytes: Bytes,
    /// When the first of its payloads arrived.
    since_ns: Option<u64>,
    /// How many payloads were dropped because they were no longer worth sending.
    stale: u64,
}

/// Takes payloads for at most `max` bytes, or one payload, and encodes them as DATAGRAM capsules in one DATA frame.
fn encode(payloads: &mut Backlog, max: usize, now_ns: u64, terms: &Terms, expiry: Expiry) -> Frame {
    let (waiting, payloads_bytes, mut taken) = (payloads.len(), payloads.charged_bytes(), 0);
    // The frame's header contains the length, which is known only at the end; the header is then written in front of the
    // capsules.
    let (mut frame, mut since_ns) = (BytesMut::new(), None);
    while let Some((payload, arrival_ns)) = payloads.front(now_ns, terms, expiry) {
        let header = capsule::datagram_header(payload.len());
        let len = frame.len() + header.len() + payload.len();
        if frame.is_empty() {
            // Not for a whole turn if less waits: the transport keeps the frame's memory until the peer acknowledges it, and a target
            // decides how small its payloads are. Their charge is more than their capsules' headers.
            let waiting_bytes = LONGEST_FRAME_HEADER + payloads_bytes;
            frame.reserve(waiting_bytes.min(max).max(LONGEST_FRAME_HEADER + len));
            frame.put_bytes(0, LONGEST_FRAME_HEADER);
            since_ns = Some(arrival_ns);
        } else if len > max {
            break;
        }
        frame.put_slice(&header);
        frame.put_slice(payload);
        terms.class.counters.note_sent(now_ns.saturating_sub(arrival_ns), terms.deadline_ns);
        payloads.pop();
        taken += 1;
    }
    let stale = (waiting - taken - payloads.len()) as u64;
    let Some(capsules_len) = frame.len().checked_sub(LONGEST_FRAME_HEADER) else {
        return Frame { bytes: Bytes::new(), since_ns: None, stale };
    };
    let (header, header_len) = h3::data_frame_header(capsules_len as u64);
    let start = LONGEST_FRAME_HEADER - header_len;
    frame[start..LONGEST_FRAME_HEADER].copy_from_slice(&header[..header_len]);
    Frame { bytes: frame.freeze().slice(start..), since_ns, stale }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_frame_takes_the_memory_of_what_is_in_it() {
        let terms = Terms::default();
        let mut payloads = Backlog::new(1 << 20, Arc::default());
        let capacity = |payloads: &mut Backlog| {
            let frame = encode(payloads, 256 << 10, 0, &terms, Expiry::Soft);
            (frame.bytes.len(), frame.bytes.try_into_mut().unwrap().capacity())
        };
        payloads.push(b"x", 0);
        let (len, held) = capacity(&mut payloads);
        assert!(len >= 3 && held < 64, "{held} bytes for {len}");
        (0..1_000).for_each(|_| _ = payloads.push(&[1; 100], 0));
        let (len, held) = capacity(&mut payloads);
        assert!(len > 100_000 && held < len + 1_000 * 16, "{held} bytes for {len}");
    }

    #[test]
    fn pieces_leave_in_order_and_a_single_one_needs_no_memory_of_its_own() {
        let mut queue = Queue::default();
        for _ in 0..3 {
            queue.push(Bytes::from_static(b"response"));
            assert_eq!(queue.take_bytes(100).as_deref(), Some(&b"response"[..]));
        }
        assert!(queue.is_empty() && queue.behind.capacity() == 0);
        for piece in [b"one", b"two", b"six"] {
            queue.push(Bytes::from_static(piece));
        }
        let part = queue.take_bytes(2).unwrap();
        assert_eq!((&part[..], queue.bytes()), (&b"on"[..], 7));
        queue.put_back(part);
        let mut taken = Vec::new();
        while let Some(bytes) = queue.take_bytes(3) {
            taken.extend_from_slice(&bytes);
        }
        assert_eq!((&taken[..], queue.bytes(), queue.is_empty()), (&b"onetwosix"[..], 0, true));
    }
}
