//! Entries whose turn is near.

use super::entry::Entry;

/// A sorted lane for entries that arrive nearly in order, and a heap for the others.
#[derive(Clone, Debug)]
pub(super) struct Near<R> {
    /// Sorted from `first` on; the entries before it have left.
    lane: Vec<Entry<R>>,
    first: usize,
    /// Each entry goes before its four children.
    heap: Vec<Entry<R>>,
}

/// How far from the lane's end an entry may enter it.
const LANE_INSERT: usize = 16;

/// The heap is kept below this size if it can be.
const HEAP_MOST: usize = 256;

impl<R: Copy + Into<u64>> Near<R> {
    pub(super) const fn new() -> Self {
        Self { lane: Vec::new(), first: 0, heap: Vec::new() }
    }

    #[inline]
    pub(super) fn head(&self) -> Option<Entry<R>> {
        match (self.lane.get(self.first), self.heap.first()) {
            (Some(lane), Some(heap)) => Some(if lane.order() < heap.order() { *lane } else { *heap }),
            (lane, heap) => lane.or(heap).copied(),
        }
    }

    /// Drops the head.
    #[inline]
    pub(super) fn behead(&mut self) {
        match (self.lane.get(self.first), self.heap.first()) {
            (Some(lane), Some(heap)) if heap.order() < lane.order() => self.pop_root(),
            (None, _) => self.pop_root(),
            _ => self.first += 1,
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, entry: Entry<R>) {
        let waiting = &self.lane[self.first..];
        if waiting.len() >= LANE_INSERT && entry.order() < waiting[waiting.len() - LANE_INSERT].order() {
            return self.insert_into_heap(entry);
        }
        if self.lane.len() == self.lane.capacity() {
            self.reserve(1);
        }
        self.lane.push(entry);
        let waiting = &mut self.lane[self.first..];
        let mut place = waiting.len() - 1;
        while place > 0 && entry.order() < waiting[place - 1].order() {
            waiting[place] = waiting[place - 1];
            place -= 1;
        }
        waiting[place] = entry;
    }

    /// Appends all entries of a sorted list, which keeps its memory.
    pub(super) fn append(&mut self, sorted: &mut Vec<Entry<R>>) {
        match (self.lane[self.first..].last(), sorted.first()) {
            (Some(last), Some(first)) if first.order() < last.order() => {
                sorted.drain(..).for_each(|entry| self.insert(entry));
            }
            _ => {
                self.reserve(sorted.len());
                self.lane.append(sorted);
            }
        }
    }

    /// Returns whether the heap holds so many entries that the far part should take them.
    #[inline]
    pub(super) const fn is_crowded(&self) -> bool {
        self.heap.len() > HEAP_MOST
    }

    /// Returns the smallest rank in the heap.
    pub(super) fn least_in_heap(&self) -> Option<u64> {
        self.heap.first().map(|entry| entry.rank.into())
    }

    /// Takes all entries of the heap, and those after `rank` in the lane unless these are more; returns them in
    /// order.
    pub(super) fn take_crowd(&mut self, rank: u64) -> Vec<Entry<R>> {
        let mut crowd = std::mem::take(&mut self.heap);
        let after = self.first + self.lane[self.first..].partition_point(|entry| entry.rank.into() <= rank);
        if self.lane.len() - after <= crowd.len() {
            crowd.extend(self.lane.drain(after..));
        }
        crowd.sort_unstable_by_key(|entry| entry.order());
        crowd
    }

    /// Removes the entry of a push if it is near the lane's end, where every entry of a short queue is. Returns
    /// whether it was removed.
    pub(super) fn remove(&mut self, push: u32) -> bool {
        let from = self.first.max(self.lane.len().saturating_sub(LANE_INSERT));
        let place = self.lane[from..].iter().position(|entry| entry.push() == push);
        place.map(|place| self.lane.remove(from + place)).is_some()
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Entry<R>) -> bool) {
        self.lane.drain(..self.first);
        self.first = 0;
        self.lane.retain(&keep);
        self.heap.retain(&keep);
        // A sorted list is a heap.
        self.heap.sort_unstable_by_key(|entry| entry.order());
    }

    pub(super) const fn capacity(&self) -> usize {
        self.lane.capacity() + self.heap.capacity()
    }

    /// Makes room in the lane; drops its consumed front when that is more than half of it.
    #[cold]
    #[inline(never)]
    fn reserve(&mut self, more: usize) {
        if 2 * self.first > self.lane.len() {
            self.lane.drain(..self.first);
            self.first = 0;
        }
        self.lane.reserve(more);
    }

    #[inline(never)]
    fn insert_into_heap(&mut self, entry: Entry<R>) {
        let mut place = self.heap.len();
        self.heap.push(entry);
        while place > 0 {
            let parent = (place - 1) / 4;
            if self.heap[parent].order() < entry.order() {
                break;
            }
            self.heap[place] = self.heap[parent];
            place = parent;
        }
        self.heap[place] = entry;
    }

    #[inline(never)]
    fn pop_root(&mut self) {
        let Some(entry) = self.heap.pop() else { return };
        let heap = self.heap.as_mut_slice();
        let mut place = 0;
        while let Some(child) = smallest_child(heap, place)
            && heap[child].order() < entry.order()
        {
            heap[place] = heap[child];
            place = child;
        }
        if let Some(hole) = heap.get_mut(place) {
            *hole = entry;
        }
    }
}

fn smallest_child<R: Copy + Into<u64>>(heap: &[Entry<R>], parent: usize) -> Option<usize> {
    let first = 4 * parent + 1;
    let smaller = |a: usize, b: usize| if heap[b].order() < heap[a].order() { b } else { a };
    match heap.len().saturating_sub(first) {
        0 => None,
        children @ 1..4 => (first..first + children).reduce(smaller),
        _ => Some(smaller(smaller(first, first + 1), smaller(first + 2, first + 3))),
    }
}

#[cfg(test)]
impl<R> Near<R> {
    pub(super) const fn bytes(&self) -> usize {
        (self.lane.capacity() + self.heap.capacity()) * size_of::<Entry<R>>()
    }
}
