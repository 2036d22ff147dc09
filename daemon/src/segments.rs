//! A bounded queue of payloads in one piece of memory.
//!
//! UDP payloads move through the relay in batches, and both ends of the relay like them back to back: a GSO message is
//! a run of equal-sized payloads without gaps, and a copy into a warm buffer costs less than an allocation. An empty
//! queue that has not been used for a while holds no memory, so that an idle tunnel costs none.

use std::collections::VecDeque;

/// A buffer no larger than this survives becoming empty; a larger one goes back to the allocator.
const KEPT_BYTES: usize = 4096;

/// Payloads in the order of their arrival, at most `limit` bytes of them; the oldest is dropped for the newest.
#[derive(Debug, Default)]
pub struct Segments {
    buffer: Vec<u8>,
    /// Where the oldest payload begins in `buffer`.
    head: usize,
    lens: VecDeque<u16>,
    limit: usize,
}

impl Segments {
    /// Returns an empty queue that holds at most `limit` bytes of payload.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Appends a copy of `payload`, which may be empty; returns how many payloads were dropped for it.
    ///
    /// A payload that alone exceeds the bound, or 65,535 bytes, is itself what is dropped.
    pub fn push(&mut self, payload: &[u8]) -> usize {
        let Ok(len) = u16::try_from(payload.len()) else { return 1 };
        if !self.holds(payload.len()) {
            return 1;
        }
        let mut dropped = 0;
        // An empty payload takes no bytes; its length takes memory all the same, so it counts as one.
        while self.bytes() + payload.len() > self.limit || self.lens.len() >= self.limit {
            self.pop();
            dropped += 1;
        }
        if self.head > 0 && self.buffer.len() + payload.len() > self.buffer.capacity() {
            self.buffer.drain(..self.head);
            self.head = 0;
        }
        self.buffer.extend_from_slice(payload);
        self.lens.push_back(len);
        dropped
    }

    /// Whether the queue, were it empty, could hold a payload of `len` bytes.
    #[must_use]
    pub fn holds(&self, len: usize) -> bool {
        len <= self.limit && len <= usize::from(u16::MAX)
    }

    /// The oldest payload.
    #[must_use]
    pub fn front(&self) -> Option<&[u8]> {
        let len = usize::from(*self.lens.front()?);
        self.buffer.get(self.head..self.head + len)
    }

    /// Removes the oldest payload; returns whether there was one.
    pub fn pop(&mut self) -> bool {
        let Some(len) = self.lens.pop_front() else { return false };
        self.head += usize::from(len);
        if self.lens.is_empty() {
            self.clear();
        }
        true
    }

    /// Walks the payloads, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut at = self.head;
        self.lens.iter().map_while(move |len| {
            let start = at;
            at += usize::from(*len);
            self.buffer.get(start..at)
        })
    }

    /// The longest run from the front that one GSO message can carry: payloads of equal length, the last of which may
    /// be shorter, at most `max_segments` and `max_bytes` of them. Returns the run's bytes, the length of its
    /// segments and their number; an empty payload runs alone.
    #[must_use]
    pub fn run(&self, max_segments: usize, max_bytes: usize) -> Option<(&[u8], usize, usize)> {
        let segment = usize::from(*self.lens.front()?);
        let (mut bytes, mut count) = (0, 0);
        for len in self.lens.iter().map(|len| usize::from(*len)).take(max_segments.max(1)) {
            let fits = count == 0 || (len > 0 && len <= segment && bytes + len <= max_bytes);
            if !fits {
                break;
            }
            bytes += len;
            count += 1;
            if len < segment {
                break;
            }
        }
        Some((self.buffer.get(self.head..self.head + bytes)?, segment, count))
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.lens.clear();
        self.buffer.clear();
        self.head = 0;
        if self.buffer.capacity() > KEPT_BYTES {
            self.buffer = Vec::new();
            self.lens = VecDeque::new();
        }
    }

    /// How many bytes of payload wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer.len() - self.head
    }

    /// How many payloads wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_leave_in_the_order_they_came_empty_ones_too() {
        let mut queue = Segments::new(100);
        for payload in [&b"one"[..], b"", b"three"] {
            assert_eq!(queue.push(payload), 0);
        }
        assert_eq!(queue.iter().collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        assert_eq!(queue.front(), Some(&b"one"[..]));
        assert!(queue.pop());
        assert_eq!(queue.front(), Some(&b""[..]));
        assert!(queue.pop() && queue.pop() && !queue.pop());
        assert!(queue.front().is_none());
    }

    #[test]
    fn the_oldest_make_room_for_the_newest_and_the_bound_holds() {
        let mut queue = Segments::new(10);
        assert_eq!(queue.push(b"aaaa") + queue.push(b"bbbb"), 0);
        assert_eq!(queue.push(b"cccccccc"), 2);
        assert_eq!(queue.iter().collect::<Vec<_>>(), [b"cccccccc"]);
        assert_eq!(queue.push(&[0; 11]), 1);
        assert_eq!(queue.bytes(), 8);
        let flood: usize = (0..1000).map(|_| queue.push(b"")).sum();
        assert!(queue.len() <= 10 && flood >= 990, "empty payloads are bounded too");
    }

    #[test]
    fn memory_does_not_grow_with_what_passed_through_and_none_is_kept_when_idle() {
        let mut queue = Segments::new(64 * 1024);
        queue.push(&[1; 1200]);
        for _ in 0..10_000 {
            queue.push(&[2; 1200]);
            queue.pop();
        }
        assert!(queue.buffer.capacity() < 16 * 1024, "{}", queue.buffer.capacity());
        for _ in 0..50 {
            queue.push(&[3; 1200]);
        }
        queue.clear();
        assert_eq!(queue.buffer.capacity(), 0);
    }

    #[test]
    fn a_run_is_what_one_gso_message_can_carry() {
        let mut queue = Segments::new(1000);
        for len in [4, 4, 2, 4, 0, 3, 5] {
            queue.push(&vec![len; usize::from(len)]);
        }
        let mut runs = Vec::new();
        while let Some((bytes, segment, count)) = queue.run(64, 65_000) {
            runs.push((bytes.len(), segment, count));
            (0..count).for_each(|_| _ = queue.pop());
        }
        assert_eq!(runs, [(10, 4, 3), (4, 4, 1), (0, 0, 1), (3, 3, 1), (5, 5, 1)]);
    }
}
