//! How records of single packets name a class.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    num::NonZeroU64,
};

/// Stands for a class where its name would be in the way. It is made of the name alone: there is no table of them to be
/// bounded, and a class has the same under all policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassKey(NonZeroU64);

impl ClassKey {
    /// The key of the class of a name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self(NonZeroU64::MIN | hasher.finish())
    }

    /// The key as a number, which is not 0.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The key of a number; there is none for 0.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}
