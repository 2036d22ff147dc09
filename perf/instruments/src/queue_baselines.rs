//! Queues to compare the product's with, and the thesis's measurement of the cost of managing streams.
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
    /// The name in results.
    const NAME: &'static str;

    /// Creates a queue of these keys and ranks, in the queue's fastest way.
    fn of(entries: &[(u32, u64)]) -> Self;

    /// Queues a key that is not queued yet.
    fn push(&mut self, key: u32, rank: u64);

    /// Removes and returns the key that leaves next, with its rank.
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

/// The base of the thesis (ch. 2, "PIFO Scalability Benchmarks"): a list in order, scanned from its head for the place of an
/// insertion. This is the best possible list: no element is allocated, and the head leaves in O(1).
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

/// [`SortedList`] that finds the place of an insertion by binary search: O(log n) comparisons, and then the shorter side moves. A
/// removal still scans from the head, because nothing records where a key is.
#[derive(Debug)]
pub struct SearchedList(SortedList);

impl Queue for SearchedList {
    const NAME: &'static str = "list-searched";

    fn of(entries: &[(u32, u64)]) -> Self {
        Self(SortedList::of(entries))
    }

    fn push(&mut self, key: u32, rank: u64) {
        let SortedList(list) = &mut self.0;
        let place = list.partition_point(|(queued, _)| *queued <= rank);
        list.insert(place, (rank, key));
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.0.pop()
    }

    fn remove(&mut self, keys: Range<u32>) {
        self.0.remove(keys);
    }
}

/// The thesis's replacement for the list, a binary heap: that of the standard library, with the age beside the rank so that equal
/// ranks keep their order. Removing keys rebuilds it.
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

/// [`Heap`] that re-ranks its head in place: the fastest turn that a heap allows.
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

/// A [`LazyHeap`] of fewer entries is not worth rebuilding.
const LEAST_REBUILT: usize = 64;

/// A binary heap with lazy removal: a removed key is only marked, and skipped when it reaches the head. Keys are small numbers. The
/// heap is rebuilt without the removed entries when these outnumber the others.
#[derive(Debug, Default)]
pub struct LazyHeap {
    queue: BinaryHeap<Reverse<(u64, u64, u32)>>,
    /// By key: the age of the valid entry.
    ages: Vec<Option<u64>>,
    /// How many entries are valid.
    queued: usize,
    pushes: u64,
}

impl Queue for LazyHeap {
    const NAME: &'static str = "heap-lazy";

    fn of(entries: &[(u32, u64)]) -> Self {
        let mut heap = Self::default();
        entries.iter().for_each(|(key, rank)| heap.push(*key, *rank));
        heap
    }

    fn push(&mut self, key: u32, rank: u64) {
        *place_of(&mut self.ages, key) = Some(self.pushes);
        self.queued += 1;
        self.queue.push(Reverse((rank, self.pushes, key)));
        self.pushes += 1;
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        while let Some(Reverse((rank, age, key))) = self.queue.pop() {
            let counts = place_of(&mut self.ages, key);
            if *counts == Some(age) {
                *counts = None;
                self.queued -= 1;
                return Some((key, rank));
            }
        }
        None
    }

    fn remove(&mut self, keys: Range<u32>) {
        for key in keys {
            self.queued -= usize::from(place_of(&mut self.ages, key).take().is_some());
        }
        if self.queue.len() > 2 * self.queued + LEAST_REBUILT {
            let Self { queue, ages, .. } = self;
            queue.retain(|Reverse((_, age, key))| *place_of(ages, *key) == Some(*age));
        }
    }
}

/// A binary heap with an index: it knows where each key is, and removes it in O(log n). Keys are small numbers.
#[derive(Debug, Default)]
pub struct IndexedHeap {
    /// Rank, age and key, in the order of a heap.
    entries: Vec<(u64, u64, u32)>,
    /// By key: its place in `entries`.
    places: Vec<Option<usize>>,
    pushes: u64,
}

impl IndexedHeap {
    fn put(&mut self, place: usize, entry: (u64, u64, u32)) {
        self.entries[place] = entry;
        *place_of(&mut self.places, entry.2) = Some(place);
    }

    /// Moves the entry at `place` toward the head, to where it belongs.
    fn rise(&mut self, mut place: usize) {
        let entry = self.entries[place];
        while place > 0 && self.entries[(place - 1) / 2] > entry {
            let above = (place - 1) / 2;
            self.put(place, self.entries[above]);
            place = above;
        }
        self.put(place, entry);
    }

    /// Moves the entry at `place` away from the head, to where it belongs.
    fn sink(&mut self, mut place: usize) {
        let entry = self.entries[place];
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            let Some(mut below) = self.entries.get(left).map(|_| left) else { break };
            if self.entries.get(right).is_some_and(|other| *other < self.entries[left]) {
                below = right;
            }
            if self.entries[below] >= entry {
                break;
            }
            self.put(place, self.entries[below]);
            place = below;
        }
        self.put(place, entry);
    }

    fn take(&mut self, place: usize) -> Option<(u32, u64)> {
        let last = self.entries.pop()?;
        let (rank, _, key) = self.entries.get(place).copied().unwrap_or(last);
        *place_of(&mut self.places, key) = None;
        if place < self.entries.len() {
            self.put(place, last);
            self.sink(place);
            if let Some(place) = *place_of(&mut self.places, last.2) {
                self.rise(place);
            }
        }
        Some((key, rank))
    }
}

impl Queue for IndexedHeap {
    const NAME: &'static str = "heap-indexed";

    fn of(entries: &[(u32, u64)]) -> Self {
        let mut heap = Self::default();
        entries.iter().for_each(|(key, rank)| heap.push(*key, *rank));
        heap
    }

    fn push(&mut self, key: u32, rank: u64) {
        self.entries.push((rank, self.pushes, key));
        self.pushes += 1;
        self.rise(self.entries.len() - 1);
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        self.take(0)
    }

    fn remove(&mut self, keys: Range<u32>) {
        for key in keys {
            if let Some(place) = *place_of(&mut self.places, key) {
                self.take(place);
            }
        }
    }

    /// Re-ranks the head in place.
    fn turn(&mut self, ranks: u64) {
        if let Some((rank, age, _)) = self.entries.first_mut() {
            *rank += ranks;
            *age = self.pushes;
            self.pushes += 1;
            self.sink(0);
        }
    }
}

/// Returns the slot of a key; the list grows as needed.
fn place_of<T: Clone>(kept: &mut Vec<Option<T>>, key: u32) -> &mut Option<T> {
    let key = key as usize;
    if key >= kept.len() {
        kept.resize(key + 1, None);
    }
    &mut kept[key]
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

/// How often [`manage_streams`] performed each operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Streams that were added.
    pub inserts: u64,
    /// Streams that were removed to send a quantum.
    pub extracts: u64,
    /// Streams that were put back, with more to send.
    pub reinserts: u64,
}

/// Performs the operations that the thesis timed for its Figure 2.11: adds 1,000 streams with priorities 1 to 10; then the stream of
/// the highest priority is removed, sends up to 1,200 bytes, and goes back behind its equals until it has sent 10 KB. Published:
/// 35.2 ms with a sorted list, 9.87 ms with a heap.
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
    use crate::random::Random;

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
        assert_eq!(order::<SearchedList>(), expected);
        assert_eq!(order::<LazyHeap>(), expected);
        assert_eq!(order::<IndexedHeap>(), expected);
        assert_eq!(order::<Pifo>(), expected);
    }

    /// Returns what leaves while random keys are pushed, removed, turned and popped.
    fn leaving<Q: Queue>() -> Vec<(u32, u64)> {
        let mut random = Random::new(7, 0);
        let (mut queue, mut queued, mut left) = (Q::of(&[]), Vec::new(), Vec::new());
        for step in 0..20_000_u32 {
            let key = step % 500;
            match random.below(4) {
                0 | 1 if !queued.contains(&key) => {
                    queue.push(key, random.below(50) as u64);
                    queued.push(key);
                }
                2 if queued.contains(&key) => {
                    queue.remove(key..key + 1);
                    queued.retain(|other| *other != key);
                }
                3 => {
                    queue.turn(random.below(20) as u64);
                    if let Some(head) = queue.pop() {
                        queued.retain(|other| *other != head.0);
                        left.push(head);
                    }
                }
                _ => {}
            }
        }
        left.extend(std::iter::from_fn(|| queue.pop()));
        left
    }

    #[test]
    fn all_queues_let_the_same_keys_leave_after_the_same_operations() {
        let expected = leaving::<SortedList>();
        assert!(expected.len() > 3_000, "{}", expected.len());
        assert_eq!(leaving::<SearchedList>(), expected);
        assert_eq!(leaving::<Heap>(), expected);
        assert_eq!(leaving::<LazyHeap>(), expected);
        assert_eq!(leaving::<IndexedHeap>(), expected);
        assert_eq!(leaving::<Pifo>(), expected);
    }

    #[test]
    fn the_experiment_counts_what_the_thesis_did() {
        let expected = Operations { inserts: 1_000, extracts: 9_000, reinserts: 8_000 };
        assert_eq!(manage_streams::<SortedList>(), expected);
        assert_eq!(manage_streams::<Heap>(), expected);
        assert_eq!(manage_streams::<Pifo>(), expected);
    }
}
