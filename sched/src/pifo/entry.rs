//! An entry of the queue: a key with its rank, and the push that queued it.

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<R> {
    pub(super) rank: R,
    /// The push number in the high half, the key in the low half, so that the older of equal ranks has the smaller tag.
    tag: u64,
}

impl<R: Copy + Into<u64>> Entry<R> {
    pub(super) fn new(rank: R, push: u32, key: u32) -> Self {
        Self { rank, tag: u64::from(push) << 32 | u64::from(key) }
    }

    pub(super) const fn push(self) -> u32 {
        (self.tag >> 32) as u32
    }

    pub(super) const fn key(self) -> u32 {
        self.tag as u32
    }

    /// Rank and age in one number, so that a comparison has no branch that could be mispredicted.
    pub(super) fn order(self) -> u128 {
        u128::from(self.rank.into()) << 64 | u128::from(self.tag)
    }
}
