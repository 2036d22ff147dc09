//! Tables of open things, which the control plane reads page by page.
//!
//! An entry lives as long as the task that owns it; a table only refers to it.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::{Mutex, MutexGuard};

/// Entries by an ID that counts up.
pub struct Table<T> {
    last: Arc<AtomicU64>,
    open: Mutex<BTreeMap<u64, Arc<T>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self::counting(Arc::default())
    }
}

impl<T> Table<T> {
    /// Creates an empty table whose IDs come from `last`, which other tables may share.
    #[must_use]
    pub fn counting(last: Arc<AtomicU64>) -> Self {
        Self { last, open: Mutex::default() }
    }

    /// Returns the counter of its IDs.
    #[must_use]
    pub fn count(&self) -> Arc<AtomicU64> {
        self.last.clone()
    }

    fn rows(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<T>>> {
        self.open.lock()
    }

    /// Inserts the entry that `make` creates from its ID; IDs are never reused.
    pub fn insert(&self, make: impl FnOnce(u64) -> T) -> Arc<T> {
        let mut rows = self.rows();
        let id = self.last.fetch_add(1, Relaxed) + 1;
        let entry = Arc::new(make(id));
        rows.insert(id, entry.clone());
        entry
    }

    /// Removes an entry.
    pub fn remove(&self, id: u64) {
        self.rows().remove(&id);
    }

    /// Returns the entry with an ID.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Arc<T>> {
        self.rows().get(&id).cloned()
    }

    /// Returns at most `limit` entries that are `wanted` with IDs above `after`, in order of ID.
    #[must_use]
    pub fn page(&self, after: u64, limit: usize, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let rows = self.rows();
        let behind = rows.range((Bound::Excluded(after), Bound::Unbounded)).map(|(_, entry)| entry);
        behind.filter(|entry| wanted(entry)).take(limit).cloned().collect()
    }

    /// Returns how many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows().len()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all entries.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<T>> {
        self.page(0, usize::MAX, |_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_by_id_and_skip_what_is_not_wanted() {
        let table = Table::default();
        let ids: Vec<u64> = (0..10).map(|_| *table.insert(|id| id)).collect();
        table.remove(ids[4]);
        let page = |after, limit| table.page(after, limit, |id| id % 2 == 1).iter().map(|id| **id).collect::<Vec<_>>();
        assert_eq!((page(0, 3), page(7, 3), page(9, 3)), (vec![1, 3, 7], vec![9], vec![]));
        assert_eq!((table.get(5), table.get(6).as_deref()), (None, Some(&6)));
        assert_eq!((*table.insert(|id| id), table.all().len()), (11, 10));
    }
}
