//! Keys that name classes in records of single packets.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    num::NonZeroU64,
};

/// A class's name as a number, for places where the name itself would be in the way. It is derived from the name alone:
/// there is no table to bound, and a class has the same key under every policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassKey(NonZeroU64);

impl ClassKey {
    /// Returns the key of the class `name`.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self(NonZeroU64::MIN | hasher.finish())
    }

    /// Returns the key as a number, never 0.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// Returns the key with this number; `None` for 0.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}
