//! Entries whose turn is far off: buckets by the digits of their ranks.

use super::{entry::Entry, near::Near};

/// Ranks beyond `reach`, in buckets.
///
/// A rank is a number of eleven digits of six bits. An entry waits in the bucket of the highest digit in which its rank
/// differs from `reach`. So all entries of one bucket share the digits above it, all entries of a lower level go before
/// all of a higher one, and all entries of one rank are in one bucket.
#[derive(Clone, Debug)]
pub(super) struct Far<R> {
    levels: Vec<Level<R>>,
    /// The levels that hold entries, one bit each.
    occupied: u64,
    reach: u64,
}

#[derive(Clone, Debug)]
struct Level<R> {
    buckets: [Vec<Entry<R>>; 1 << DIGIT_BITS],
    /// The buckets that hold entries, one bit each.
    occupied: u64,
}

const DIGIT_BITS: u32 = 6;

/// A bucket of at most this many entries is sorted; a larger one is spread over buckets of lower levels.
const SORTED_MOST: usize = 64;

impl<R: Copy + Into<u64>> Far<R> {
    pub(super) const fn new() -> Self {
        Self { levels: Vec::new(), occupied: 0, reach: u64::MAX }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.occupied == 0
    }

    /// Returns whether an entry belongs here.
    #[inline]
    pub(super) fn is_beyond(&self, entry: Entry<R>) -> bool {
        entry.rank.into() > self.reach
    }

    /// Inserts an entry that [is beyond reach](Self::is_beyond).
    pub(super) fn insert(&mut self, entry: Entry<R>) {
        let level = level_of(entry.rank.into() ^ self.reach);
        if level >= self.levels.len() {
            self.levels.resize_with(level + 1, Level::new);
        }
        let digit = entry.rank.into() >> (level as u32 * DIGIT_BITS) & ((1 << DIGIT_BITS) - 1);
        self.levels[level].buckets[digit as usize].push(entry);
        self.levels[level].occupied |= 1 << digit;
        self.occupied |= 1 << level;
    }

    /// Moves the lowest bucket, or its first entries, to the near part. There must be a bucket.
    #[inline(never)]
    pub(super) fn refill(&mut self, near: &mut Near<R>) {
        let lowest = self.occupied.trailing_zeros();
        let level = &mut self.levels[lowest as usize];
        let bucket = &mut level.buckets[level.occupied.trailing_zeros() as usize];
        level.occupied &= level.occupied - 1;
        if level.occupied == 0 {
            self.occupied &= self.occupied - 1;
        }
        let Some(least) = bucket.iter().map(|entry| entry.rank.into()).min() else { return };
        if bucket.len() <= SORTED_MOST {
            // All ranks that share the bucket's digits; no lower level is occupied.
            self.reach = least | ((1 << (lowest * DIGIT_BITS)) - 1);
            bucket.sort_unstable_by_key(|entry| entry.order());
            near.append(bucket);
        } else {
            self.reach = least;
            let spread = std::mem::take(bucket);
            self.sort_out(spread, near);
        }
    }

    /// Takes over the entries that crowd the near part, except the first, if no entry here has to move for that.
    #[cold]
    pub(super) fn relieve(&mut self, near: &mut Near<R>) {
        let Some(least) = near.least_in_heap() else { return };
        let lower_levels = (1 << level_of(least ^ self.reach)) - 1;
        if least < self.reach && self.occupied & lower_levels == 0 {
            self.reach = least;
            self.sort_out(near.take_crowd(least), near);
        }
    }

    /// Leaves all entries to the near part as long as none waits here.
    pub(super) const fn withdraw(&mut self) {
        self.reach = u64::MAX;
    }

    fn sort_out(&mut self, entries: Vec<Entry<R>>, near: &mut Near<R>) {
        for entry in entries {
            if self.is_beyond(entry) {
                self.insert(entry);
            } else {
                near.insert(entry);
            }
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Entry<R>) -> bool) {
        for level in &mut self.levels {
            level.buckets.iter_mut().for_each(|bucket| bucket.retain(&keep));
        }
    }
}

impl<R> Level<R> {
    const fn new() -> Self {
        Self { buckets: [const { Vec::new() }; 1 << DIGIT_BITS], occupied: 0 }
    }
}

const fn level_of(difference: u64) -> usize {
    ((difference | 1).ilog2() / DIGIT_BITS) as usize
}

#[cfg(test)]
impl<R> Far<R> {
    pub(super) fn bytes(&self) -> usize {
        let buckets = self.levels.iter().flat_map(|level| &level.buckets);
        self.levels.capacity() * size_of::<Level<R>>()
            + buckets.map(|bucket| bucket.capacity() * size_of::<Entry<R>>()).sum::<usize>()
    }
}
