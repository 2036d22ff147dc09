//! Counts of one connection, which only its endpoint changes, on one thread; other threads may read them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Adds to a count.
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Relaxed).wrapping_add(more), Relaxed);
}

/// Takes one from a count, unless it is zero.
pub(super) fn take(count: &AtomicU64) {
    count.store(count.load(Relaxed).saturating_sub(1), Relaxed);
}
