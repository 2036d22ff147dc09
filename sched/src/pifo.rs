//! A push-in-first-out queue: entries enter anywhere, by rank, and leave only at the head ("Programmable Packet
//! Scheduling at Line Rate", SIGCOMM 2016).
//!
//! Ranks are exact; nothing is quantised. Entries wait in two parts, as in a ladder queue (Tang, Goh, Thng: "Ladder
//! Queue", ACM TOMACS 2005):
//!
//! ```text
//!            ranks up to `reach`          ranks beyond it
//!   pop ◀── near: a sorted lane ◀─────── far: buckets by the digits of the rank,
//!           and a small heap    refill        found by the lowest bit set, as in Eiffel (NSDI 2019)
//! ```
//!
//! A push beyond reach appends to a bucket, at the same cost however many entries wait. Only the bucket whose turn has
//! come is sorted, when it is small enough to stay in the fastest cache. A few entries, or entries that arrive in order
//! of rank, as in round robin, never leave the lane.

mod entry;
mod far;
mod near;
#[cfg(test)]
mod tests;

use entry::Entry;
use far::Far;
use near::Near;

/// A queue of keys ordered by rank; the smallest rank leaves first, and equal ranks leave in push order.
///
/// Ranks are compared by the number they convert to. Keys are small integers below `u32::MAX`, such as slab indices.
///
/// Memory is 4 bytes for each key up to the largest, and 16 bytes (with slack at most 64) for each queued key; a queue
/// that becomes empty after it was large releases its memory. A change costs O(1) on average, whatever the ranks, as
/// long as most entries enter behind the head; the rest cost O(log n). Occasionally one change spreads a bucket, in
/// time proportional to its size. A removed key leaves its entry behind; the entry is dropped when it is met, or when
/// such entries outnumber the others.
#[derive(Clone, Debug)]
pub struct Pifo<R = u64> {
    near: Near<R>,
    far: Far<R>,
    /// For each key, the number of the push that queued it.
    pushed: Vec<u32>,
    pushes: u32,
    len: usize,
    /// Entries whose key was since removed or pushed again.
    stale: usize,
}

/// In `pushed`: not queued.
const OUT: u32 = u32::MAX;

/// Stale entries may outnumber the others by this many before they are dropped.
const STALE_MOST: usize = 64;

/// An empty queue keeps memory for this many entries, and for keys up to `KEPT_KEYS`.
const KEPT: usize = 1024;
const KEPT_KEYS: usize = 16 * 1024;

impl<R: Copy + Into<u64>> Pifo<R> {
    /// Creates an empty queue without allocating.
    #[must_use]
    pub const fn new() -> Self {
        Self { near: Near::new(), far: Far::new(), pushed: Vec::new(), pushes: 0, len: 0, stale: 0 }
    }

    /// Queues `key` behind every entry of the same or a smaller rank. A key that is already queued moves there.
    pub fn push(&mut self, key: u32, rank: R) {
        if self.pushes == OUT || key as usize >= self.pushed.len() {
            self.make_room(key);
        }
        let entry = Entry::new(rank, self.pushes, key);
        self.pushes += 1;
        match std::mem::replace(&mut self.pushed[key as usize], entry.push()) {
            OUT => self.len += 1,
            before if self.near.head().is_some_and(|head| head.push() == before) => self.near.behead(),
            before => self.drop_entry(before),
        }
        if self.far.is_beyond(entry) {
            self.far.insert(entry);
        } else {
            self.near.insert(entry);
            if self.near.is_crowded() {
                self.far.relieve(&mut self.near);
            }
        }
        self.settle();
    }

    /// Returns the key that leaves next, and its rank.
    #[must_use]
    pub fn peek(&self) -> Option<(u32, R)> {
        self.near.head().map(|head| (head.key(), head.rank))
    }

    /// Removes and returns the key that leaves next, and its rank.
    pub fn pop(&mut self) -> Option<(u32, R)> {
        let head = self.near.head()?;
        self.near.behead();
        self.pushed[head.key() as usize] = OUT;
        self.len -= 1;
        self.settle();
        Some((head.key(), head.rank))
    }

    /// Removes `key` wherever it is in the queue. Returns whether it was queued.
    pub fn remove(&mut self, key: u32) -> bool {
        if !self.contains(key) {
            return false;
        }
        let push = std::mem::replace(&mut self.pushed[key as usize], OUT);
        self.len -= 1;
        self.drop_entry(push);
        self.settle();
        true
    }

    /// Returns whether `key` is queued.
    #[must_use]
    pub fn contains(&self, key: u32) -> bool {
        self.pushed.get(key as usize).is_some_and(|push| *push != OUT)
    }

    /// Returns how many keys are queued.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no key is queued.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the near part's head the queue's head: within reach, and not stale.
    #[inline]
    fn settle(&mut self) {
        let settled = self.near.head().is_some_and(|head| !self.far.is_beyond(head));
        if !settled || self.stale > 0 {
            self.find_head();
        }
    }

    #[inline(never)]
    fn find_head(&mut self) {
        if self.stale > self.len + STALE_MOST {
            self.drop_stale();
        }
        loop {
            match self.near.head() {
                Some(head) if !self.far.is_beyond(head) => {
                    if self.pushed[head.key() as usize] == head.push() {
                        return;
                    }
                    self.stale -= 1;
                    self.near.behead();
                }
                _ if !self.far.is_empty() => self.far.refill(&mut self.near),
                Some(_) => self.far.withdraw(),
                None => return self.rest(),
            }
        }
    }

    /// Drops the entry of a superseded push, now or later.
    fn drop_entry(&mut self, push: u32) {
        self.stale += usize::from(!self.near.remove(push));
    }

    #[cold]
    fn drop_stale(&mut self) {
        let pushed = &self.pushed;
        self.near.retain(|entry| pushed[entry.key() as usize] == entry.push());
        self.far.retain(|entry| pushed[entry.key() as usize] == entry.push());
        self.stale = 0;
    }

    /// Resets an empty queue.
    fn rest(&mut self) {
        if self.near.capacity() > KEPT || self.pushed.len() > KEPT_KEYS {
            *self = Self::new();
        } else {
            self.far = Far::new();
            self.pushes = 0;
        }
    }

    /// Makes room for `key`, and for one more push number: a queue that is never empty has to renumber once in four
    /// billion pushes.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self, key: u32) {
        if self.pushes == OUT {
            let waiting: Vec<_> = std::iter::from_fn(|| self.pop()).collect();
            for (key, rank) in waiting {
                self.push(key, rank);
            }
        }
        if key as usize >= self.pushed.len() {
            self.pushed.resize(key as usize + 1, OUT);
        }
    }
}

impl<R: Copy + Into<u64>> Default for Pifo<R> {
    fn default() -> Self {
        Self::new()
    }
}
