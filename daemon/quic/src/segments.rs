//! A bounded queue of payloads in one piece of memory.
//!
//! UDP payloads move through the relay in batches, and both ends of the relay prefer them back to back: a GSO message is a
//! run of equal-sized payloads without gaps, and a copy into a warm buffer costs less than an allocation. A queue that runs
//! empty leaves its buffer to its thread, whose next queue takes it: an idle tunnel holds no memory, and a steady flow of
//! payloads allocates none.
//!
//! Payloads leave at the front and the buffer grows at the back. Waiting payloads are moved to the front only when no more
//! bytes wait than have left since the last move: each byte that leaves pays for moving at most one, whatever the sizes of
//! payloads. So the buffer may be twice as large as the bound, and a push costs the same at the bound as far below it.

use std::{cell::RefCell, collections::VecDeque};

/// The smallest and the largest buffer that a thread keeps: a smaller one would soon grow, and a larger one goes back to the
/// allocator.
const KEPT_BYTES: std::ops::RangeInclusive<usize> = 4 * 1024..=256 * 1024;

/// How much memory a thread's unused buffers may take together, in bytes.
const SPARE_BYTES: usize = 4 << 20;

thread_local! {
    static SPARE: RefCell<Spare> = const { RefCell::new(Spare { buffers: Vec::new(), bytes: 0 }) };
}

/// The unused buffers of a thread. The buffer that was left last is taken first, because it may still be in a cache.
#[derive(Debug)]
struct Spare {
    buffers: Vec<Buffer>,
    bytes: usize,
}

/// The memory of payloads: their bytes and their lengths.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    lens: VecDeque<u16>,
}

impl Buffer {
    /// Returns how much memory it takes, in bytes.
    fn size(&self) -> usize {
        self.bytes.capacity() + self.lens.capacity() * size_of::<u16>()
    }

    /// Returns the unused buffer that was left last if it holds no more than `most_bytes`, else one without memory.
    fn spare(most_bytes: usize) -> Self {
        let take = |spare: &RefCell<Spare>| {
            let mut spare = spare.borrow_mut();
            let buffer = spare.buffers.pop_if(|buffer| buffer.bytes.capacity() <= most_bytes)?;
            spare.bytes -= buffer.size();
            Some(buffer)
        };
        // A thread that is ending has no buffers any more.
        SPARE.try_with(take).ok().flatten().unwrap_or_default()
    }

    /// Leaves it to the thread, if it has a size to keep and there is room.
    fn leave(mut self) {
        let size = self.size();
        if !KEPT_BYTES.contains(&size) {
            return;
        }
        self.bytes.clear();
        self.lens.clear();
        _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.bytes + size <= SPARE_BYTES {
                spare.bytes += size;
                spare.buffers.push(self);
            }
        });
    }
}

/// The most payload bytes of one message: 65,535 less the headers of IPv4 and UDP. GSO counts all segments against it.
pub const MAX_MESSAGE_BYTES: usize = 65_507;

/// The smallest buffer, in bytes.
const LEAST_BYTES: usize = 64;

/// Payloads in the order of their arrival; the oldest are dropped for the newest. At most `limit` bytes wait, with
/// [`PAYLOAD_OVERHEAD_BYTES`](Self::PAYLOAD_OVERHEAD_BYTES) for each payload.
#[derive(Debug, Default)]
pub struct Segments {
    buffer: Buffer,
    /// Where the oldest payload begins in `buffer`.
    head: usize,
    limit: usize,
    /// How many bytes were moved or copied, other than into the queue.
    #[cfg(test)]
    moved_bytes: usize,
}

impl Segments {
    /// What a payload counts for besides its bytes, wherever a bound of a queue is checked: even an empty one has a length, and while it
    /// waits for a turn a time of arrival, in memory that grows by doubling.
    pub const PAYLOAD_OVERHEAD_BYTES: usize = 16;

    /// Returns an empty queue that holds payloads up to a charge of `limit` bytes (see [`charged_bytes`](Self::charged_bytes)).
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let mut queue = Self::default();
        queue.limit = limit;
        queue
    }

    /// Appends a copy of `payload`, which may be empty; returns how many payloads were dropped for it.
    ///
    /// A payload that alone exceeds the bound, or 65,535 bytes, is itself dropped.
    pub fn push(&mut self, payload: &[u8]) -> usize {
        let Ok(len) = u16::try_from(payload.len()) else { return 1 };
        if !self.holds(payload.len()) {
            return 1;
        }
        let mut dropped = 0;
        while self.charged_bytes() + Self::charge(payload.len()) > self.limit {
            self.pop();
            dropped += 1;
        }
        if self.buffer.lens.is_empty() && self.buffer.bytes.capacity() == 0 {
            self.buffer = Buffer::spare(2 * self.limit);
        }
        if self.buffer.bytes.len() + payload.len() > self.buffer.bytes.capacity() {
            self.make_room(payload.len());
        }
        self.buffer.bytes.extend_from_slice(payload);
        self.buffer.lens.push_back(len);
        dropped
    }

    /// Makes room for `len` more bytes in a full buffer, in time that the bytes that left since the last call have paid for.
    fn make_room(&mut self, len: usize) {
        let (live, capacity) = (self.bytes(), self.buffer.bytes.capacity());
        #[cfg(test)]
        (self.moved_bytes += if live <= self.head { live } else { self.buffer.bytes.len() });
        if live <= self.head {
            self.buffer.bytes.drain(..self.head);
            self.head = 0;
            if capacity > *KEPT_BYTES.start() && live + len <= capacity / 4 {
                self.buffer.bytes.shrink_to((capacity / 2).max(*KEPT_BYTES.start()));
            }
        }
        if self.buffer.bytes.len() + len > self.buffer.bytes.capacity() {
            // At twice the limit, more bytes have left than wait whenever the buffer is full. A new buffer is large enough to
            // be kept: otherwise each payload that comes alone would cost an allocation.
            let most = (2 * self.limit).max(LEAST_BYTES);
            let wanted = (2 * capacity).clamp(most.min(*KEPT_BYTES.start()), most);
            self.buffer.bytes.reserve_exact(wanted.max(self.buffer.bytes.len() + len) - self.buffer.bytes.len());
        }
    }

    /// Whether the queue could hold a payload of `len` bytes if it were empty; a queue with a bound of 0 holds none.
    #[must_use]
    pub fn holds(&self, len: usize) -> bool {
        Self::charge(len) <= self.limit && len <= usize::from(u16::MAX)
    }

    /// Returns what a payload of `len` bytes counts for where a bound is checked.
    #[must_use]
    pub const fn charge(len: usize) -> usize {
        len.saturating_add(Self::PAYLOAD_OVERHEAD_BYTES)
    }

    /// Returns what the waiting payloads count for where a bound is checked: their bytes, and the overhead of each.
    #[must_use]
    pub fn charged_bytes(&self) -> usize {
        self.bytes() + self.len() * Self::PAYLOAD_OVERHEAD_BYTES
    }

    /// Swaps the payloads of two queues. Each keeps its bound, which the payloads that it receives may exceed.
    pub fn swap(&mut self, other: &mut Self) {
        std::mem::swap(self, other);
        std::mem::swap(&mut self.limit, &mut other.limit);
    }

    /// Returns the oldest payload.
    #[must_use]
    pub fn front(&self) -> Option<&[u8]> {
        let len = usize::from(*self.buffer.lens.front()?);
        self.buffer.bytes.get(self.head..self.head + len)
    }

    /// Removes the oldest payload; returns whether there was one.
    pub fn pop(&mut self) -> bool {
        let Some(len) = self.buffer.lens.pop_front() else { return false };
        self.head += usize::from(len);
        if self.buffer.lens.is_empty() {
            self.clear();
        }
        true
    }

    /// Walks the payloads, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut at = self.head;
        self.buffer.lens.iter().map_while(move |len| {
            let start = at;
            at += usize::from(*len);
            self.buffer.bytes.get(start..at)
        })
    }

    /// Returns the longest run from the front that fits one GSO message: at most `max_segments` payloads of equal length; only the last may
    /// be shorter. The result is the run's bytes, the length of its segments and their
    /// number; an empty payload runs alone.
    #[must_use]
    pub fn run(&self, max_segments: usize) -> Option<(&[u8], usize, usize)> {
        let segment = usize::from(*self.buffer.lens.front()?);
        let (mut bytes, mut count) = (0, 0);
        for len in self.buffer.lens.iter().map(|len| usize::from(*len)).take(max_segments.max(1)) {
            let fits = count == 0 || (len > 0 && len <= segment && bytes + len <= MAX_MESSAGE_BYTES);
            if !fits {
                break;
            }
            bytes += len;
            count += 1;
            if len < segment {
                break;
            }
        }
        Some((self.buffer.bytes.get(self.head..self.head + bytes)?, segment, count))
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.head = 0;
        std::mem::take(&mut self.buffer).leave();
    }

    /// Returns how many bytes of payload wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffer.bytes.len() - self.head
    }

    /// How many payloads wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffer.lens.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.lens.is_empty()
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        self.clear();
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
        let mut queue = Segments::new(42);
        assert_eq!(queue.push(b"aaaa") + queue.push(b"bbbb"), 0);
        assert_eq!(queue.push(b"cccccccc"), 2);
        assert_eq!(queue.iter().collect::<Vec<_>>(), [b"cccccccc"]);
        assert_eq!(queue.push(&[0; 27]), 1);
        assert_eq!(queue.bytes(), 8);
        let flood: usize = (0..1000).map(|_| queue.push(b"")).sum();
        assert_eq!((queue.len(), flood), (2, 999), "empty payloads are bounded too");
    }

    #[test]
    fn the_memory_of_a_full_queue_is_in_proportion_to_its_bound_however_small_payloads_are() {
        const BOUND: usize = 256 * 1024;
        for len in [0, 1, 16, 100, 1_200] {
            let mut queue = Segments::new(BOUND);
            while queue.push(&vec![0; len]) == 0 {}
            assert!(
                queue.buffer.size() <= 2 * BOUND + BOUND / 4,
                "{} bytes for payloads of {len}",
                queue.buffer.size()
            );
        }
    }

    #[test]
    fn a_queue_without_room_refuses_every_payload_also_an_empty_one() {
        let mut queue = Segments::new(0);
        assert_eq!((queue.push(b""), queue.push(b"x"), queue.len()), (1, 1, 0));
    }

    #[test]
    fn queues_that_swap_their_payloads_keep_their_bounds() {
        let (mut small, mut large) = (Segments::new(4), Segments::new(100));
        large.push(&[1; 50]);
        small.swap(&mut large);
        assert_eq!((small.front(), large.len()), (Some(&[1; 50][..]), 0));
        assert_eq!((small.push(&[2; 5]), large.push(&[2; 5])), (1, 0));
    }

    #[test]
    fn memory_does_not_grow_with_what_passed_through_and_none_is_kept_when_idle() {
        let mut queue = Segments::new(64 * 1024);
        queue.push(&[1; 1200]);
        for _ in 0..10_000 {
            queue.push(&[2; 1200]);
            queue.pop();
        }
        assert!(queue.buffer.bytes.capacity() < 16 * 1024, "{}", queue.buffer.bytes.capacity());
        for _ in 0..50 {
            queue.push(&[3; 1200]);
        }
        queue.clear();
        assert_eq!(queue.buffer.bytes.capacity(), 0);
    }

    #[test]
    fn queues_that_fill_and_run_empty_in_turns_share_one_buffer() {
        let spare = || SPARE.with_borrow(|spare| (spare.buffers.len(), spare.bytes));
        let before = spare();
        let mut queues = [(); 3].map(|()| Segments::new(64 * 1024));
        let mut memory = None;
        for round in 0..300 {
            let queue = &mut queues[round % 3];
            (0..20).for_each(|_| _ = queue.push(&[round as u8; 1_200]));
            // As large as it gets after the first.
            let at = (queue.buffer.bytes.as_ptr(), queue.buffer.bytes.capacity());
            assert_eq!(*memory.get_or_insert(at), at, "round {round}");
            match round % 2 {
                0 => queue.clear(),
                _ => while queue.pop() {},
            }
        }
        assert_eq!(spare().0, before.0.max(1), "one buffer is left");
        queues[0].push(b"x");
        drop(queues);
        assert_eq!(spare().0, before.0.max(1), "also by a queue that ends");
    }

    #[test]
    fn payloads_that_come_alone_for_many_queues_are_not_allocated_for() {
        let mut queues: Vec<_> = (0..100).map(|_| Segments::new(256 * 1024)).collect();
        let mut memory = |_| {
            queues.iter_mut().for_each(|queue| assert_eq!(queue.push(&[7; 1_200]), 0));
            let at = |queue: &Segments| (queue.buffer.bytes.as_ptr(), queue.buffer.bytes.capacity());
            let mut memory: Vec<_> = queues.iter().map(at).collect();
            queues.iter_mut().for_each(|queue| assert!(queue.pop()));
            memory.sort_unstable();
            memory
        };
        let [first, second] = [0, 1].map(&mut memory);
        assert_eq!(first, second);
        drop(queues);
        SPARE.with_borrow_mut(|spare| *spare = Spare { buffers: Vec::new(), bytes: 0 });
    }

    #[test]
    fn a_thread_keeps_no_more_memory_than_its_bound_and_no_buffer_that_is_small_or_huge() {
        let fill = |bytes| {
            let mut queue = Segments::new(bytes);
            while queue.push(&vec![0; 1_000.min(bytes - Segments::PAYLOAD_OVERHEAD_BYTES)]) == 0 {}
            queue
        };
        drop([fill(1_000), fill(1 << 20)]);
        SPARE.with_borrow(|spare| assert!(spare.buffers.is_empty()));
        drop((0..200).map(|_| fill(100_000)).collect::<Vec<_>>());
        SPARE.with_borrow(|spare| {
            let sum: usize = spare.buffers.iter().map(Buffer::size).sum();
            assert_eq!(sum, spare.bytes);
            assert!((SPARE_BYTES / 2..=SPARE_BYTES).contains(&sum), "{sum}");
        });
    }

    #[test]
    fn at_its_bound_a_queue_moves_no_more_bytes_than_pass_through_it() {
        for (len, limit) in [(1, 256 * 1024), (1, 4096), (7, 4096), (1200, 256 * 1024), (3000, 4096)] {
            let (mut queue, payload) = (Segments::new(limit), vec![7; len]);
            // The queue is full, so every further payload drops the oldest.
            let pushes = 8 * limit / len;
            (0..pushes).for_each(|_| _ = queue.push(&payload));
            assert!(queue.charged_bytes() > limit - Segments::charge(len), "the queue is full");
            // Growing to this size has copied up to as many bytes again.
            let most = pushes * len + 2 * limit;
            assert!(queue.moved_bytes <= most, "{} bytes moved for {} pushed", queue.moved_bytes, pushes * len);
            assert!(queue.buffer.bytes.capacity() <= 2 * limit, "{} for {limit}", queue.buffer.bytes.capacity());
        }
    }

    #[test]
    fn a_queue_that_was_long_gives_its_memory_back_while_a_little_still_waits() {
        let mut queue = Segments::new(256 * 1024);
        while queue.push(&[1; 1200]) == 0 {}
        let most = queue.buffer.bytes.capacity();
        while queue.len() > 2 {
            queue.pop();
        }
        for _ in 0..4000 {
            queue.push(&[2; 1200]);
            queue.pop();
        }
        assert!(queue.buffer.bytes.capacity() < most / 16, "{} of {most} are kept", queue.buffer.bytes.capacity());
        assert_eq!(queue.iter().map(<[u8]>::len).collect::<Vec<_>>(), [1200; 2]);
    }

    #[test]
    fn a_run_is_what_one_gso_message_can_carry() {
        let mut queue = Segments::new(1000);
        for len in [4, 4, 2, 4, 0, 3, 5] {
            queue.push(&vec![len; usize::from(len)]);
        }
        let mut runs = Vec::new();
        while let Some((bytes, segment, count)) = queue.run(64) {
            runs.push((bytes.len(), segment, count));
            (0..count).for_each(|_| _ = queue.pop());
        }
        assert_eq!(runs, [(10, 4, 3), (4, 4, 1), (0, 0, 1), (3, 3, 1), (5, 5, 1)]);
    }

    #[test]
    fn a_run_is_no_longer_than_a_message_may_be() {
        let mut queue = Segments::new(100_000);
        (0..64).for_each(|_| _ = queue.push(&[0; 1_200]));
        assert_eq!(queue.run(64).map(|(bytes, _, count)| (bytes.len(), count)), Some((54 * 1_200, 54)));
        assert_eq!(queue.run(10).map(|(_, _, count)| count), Some(10));
    }
}
