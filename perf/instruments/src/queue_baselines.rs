//! Queues to hold the product's against, and the thesis's measurement of what managing streams costs.
//!
//! All keep the contract of [`Pifo`]: the smallest rank leaves first, equal ranks in push order, and a key can be
//! removed wherever it is.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    ops::Range,
};

use sched::pifo::Pifo;

/// A queue of keys by rank.
pub trait Queue {
    /// What results call it.
    const NAME: &'static str;

    /// Creates a queue of these keys and ranks, in the way that is fastest for it.
    fn of(entries: &[(u32, u64)]) -> Self;

    /// Queues a key that is not queued yet.
    fn push(&mut self, key: u32, rank: u64);

    /// Removes and returns the key that leaves next, and its rank.
    fn pop(&mut self) -> Option<(u32, u64)>;

    /// Removes `keys`, all of which are queued.
    fn remove(&mut self, keys: Range<u32>);

    /// Moves the key that leaves next back by `ranks`, as fair queueing does after a turn.
    fn turn(&mut self, ranks: u64) {
        if let Some((key, rank)) = self.pop() {
            self.push(key, rank + ranks);
        }
    }
}

/// The base of the thesis (ch. 2, "PIFO Scalability Benchmarks"): a list in order, scanned from its head for the place
/// of what is inserted. The best list there is: no element is allocated, and the head leaves in O(1).
#[derive(Debug)]
pub struct SortedList(VecDeque<(u64, u32)>);

impl Queue for SortedList {
    const NAME: &'static str = "list";

    fn of(entries: &[(u32, u64)]) -> Self {
        let mut list: Vec<_> = entries.iter().map(|(key, rank)| (*rank, *key)).collect();
        list.sort_by_key(|(rank, _)| *rank);
        Self(list.into())
    }

    fn push(&mut self, key: u32, rank: u64) {
        let place = self.0.iter().position(|(queued, _)| *queued > rank).unwrap_or(self.0.len());
        self.0.insert(place, (rank, key));
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.0.pop_front().map(|(rank, key)| (key, rank))
    }

    fn remove(&mut self, keys: Range<u32>) {
        for key in keys {
            if let Some(place) = self.0.iter().position(|(_, queued)| *queued == key) {
                self.0.remove(place);
            }
        }
    }
}

/// What the thesis put in its place, a binary heap: that of the standard library, with the age beside the rank so that
/// equal ranks keep their order. To remove keys it has to be built anew.
#[derive(Debug)]
pub struct Heap {
    queue: BinaryHeap<Reverse<(u64, u64, u32)>>,
    pushes: u64,
}

impl Queue for Heap {
    const NAME: &'static str = "heap";

    fn of(entries: &[(u32, u64)]) -> Self {
        let queue = (0..).zip(entries).map(|(age, (key, rank))| Reverse((*rank, age, *key))).collect();
        Self { queue, pushes: entries.len() as u64 }
    }

    fn push(&mut self, key: u32, rank: u64) {
        self.queue.push(Reverse((rank, self.pushes, key)));
        self.pushes += 1;
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.queue.pop().map(|Reverse((rank, _, key))| (key, rank))
    }

    fn remove(&mut self, keys: Range<u32>) {
        self.queue.retain(|Reverse((_, _, key))| !keys.contains(key));
    }
}

/// [`Heap`], whose head is ranked anew where it is: the best that a heap can make of a turn.
#[derive(Debug)]
pub struct HeapInPlace(Heap);

impl Queue for HeapInPlace {
    const NAME: &'static str = "heap-in-place";

    fn of(entries: &[(u32, u64)]) -> Self {
        Self(Heap::of(entries))
    }

    fn push(&mut self, key: u32, rank: u64) {
        self.0.push(key, rank);
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.0.pop()
    }

    fn remove(&mut self, keys: Range<u32>) {
        self.0.remove(keys);
    }

    fn turn(&mut self, ranks: u64) {
        if let Some(mut head) = self.0.queue.peek_mut() {
            let Reverse((rank, age, _)) = &mut *head;
            *rank += ranks;
            *age = self.0.pushes;
            self.0.pushes += 1;
        }
    }
}

impl Queue for Pifo {
    const NAME: &'static str = "pifo";

    fn of(entries: &[(u32, u64)]) -> Self {
        let mut queue = Self::new();
        for (key, rank) in entries {
            queue.push(*key, *rank);
        }
        queue
    }

    fn push(&mut self, key: u32, rank: u64) {
        self.push(key, rank);
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.pop()
    }

    fn remove(&mut self, keys: Range<u32>) {
        for key in keys {
            self.remove(key);
        }
    }

    /// As [`Streams::end_turn`](sched::stream::Streams::end_turn) does: pushes the head again.
    fn turn(&mut self, ranks: u64) {
        if let Some((key, rank)) = self.peek() {
            self.push(key, rank + ranks);
        }
    }
}

/// How often [`manage_streams`] did what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Streams that were added.
    pub inserts: u64,
    /// Streams that were taken out to send a quantum.
    pub extracts: u64,
    /// Streams that were put back, with more to send.
    pub reinserts: u64,
}

/// Does to a queue what the thesis timed for its Figure 2.11: 1,000 streams with priorities 1 to 10 are added; then the
/// one of the highest priority is taken out, sends up to 1,200 bytes, and goes back behind its equals until it has sent
/// 10 KB. Published: 35.2 ms with a sorted list, 9.87 ms with a heap.
pub fn manage_streams<Q: Queue>() -> Operations {
    const STREAMS: u32 = 1_000;
    const STREAM_BYTES: u64 = 10_000;
    const QUANTUM_BYTES: u64 = 1_200;
    const PRIORITIES: u64 = 10;

    let mut queue = Q::of(&[]);
    let mut left = vec![STREAM_BYTES; STREAMS as usize];
    let mut operations = Operations::default();
    for stream in 0..STREAMS {
        queue.push(stream, u64::from(stream) % PRIORITIES);
        operations.inserts += 1;
    }
    while let Some((stream, rank)) = queue.pop() {
        operations.extracts += 1;
        let left = &mut left[stream as usize];
        *left = left.saturating_sub(QUANTUM_BYTES);
        if *left > 0 {
            queue.push(stream, rank);
            operations.reinserts += 1;
        }
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order<Q: Queue>() -> Vec<(u32, u64)> {
        let mut queue = Q::of(&[(0, 5), (1, 3), (2, 5), (3, 9), (4, 3)]);
        queue.turn(2);
        queue.push(5, 5);
        queue.remove(2..4);
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn all_queues_keep_one_order() {
        let expected = [(4, 3), (0, 5), (1, 5), (5, 5)];
        assert_eq!(order::<SortedList>(), expected);
        assert_eq!(order::<Heap>(), expected);
        assert_eq!(order::<HeapInPlace>(), expected);
        assert_eq!(order::<Pifo>(), expected);
    }

    #[test]
    fn the_experiment_counts_what_the_thesis_did() {
        let expected = Operations { inserts: 1_000, extracts: 9_000, reinserts: 8_000 };
        assert_eq!(manage_streams::<SortedList>(), expected);
        assert_eq!(manage_streams::<Heap>(), expected);
        assert_eq!(manage_streams::<Pifo>(), expected);
    }
}
