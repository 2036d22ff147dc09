//! What is open: connections and tunnels, as the control plane sees them.
//!
//! An entry lives as long as its tunnel, whose task owns it; the tables only point at it. What the data path touches of
//! an entry are atomics.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use config::{policy::Subject, targets::Protocol};
use tokio::sync::Notify;

use super::Caller;
use crate::quic::{
    class::{Class, Classes, Membership},
    h3,
};

/// Things with an ID that counts up, found by it.
pub struct Table<T>(Mutex<Rows<T>>);

struct Rows<T> {
    last: u64,
    open: BTreeMap<u64, Arc<T>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Mutex::new(Rows { last: 0, open: BTreeMap::new() }))
    }
}

impl<T> Table<T> {
    fn rows(&self) -> MutexGuard<'_, Rows<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what `make` makes with its ID; IDs are not used again.
    pub fn insert(&self, make: impl FnOnce(u64) -> T) -> Arc<T> {
        let mut rows = self.rows();
        rows.last += 1;
        let (id, entry) = (rows.last, Arc::new(make(rows.last)));
        rows.open.insert(id, entry.clone());
        entry
    }

    /// Lets go of an entry.
    pub fn remove(&self, id: u64) {
        self.rows().open.remove(&id);
    }

    /// Returns the entry of an ID.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Arc<T>> {
        self.rows().open.get(&id).cloned()
    }

    /// Returns at most `limit` entries behind the ID `after` that are `wanted`, by ID.
    #[must_use]
    pub fn page(&self, after: u64, limit: usize, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let rows = self.rows();
        let behind = rows.open.range((Bound::Excluded(after), Bound::Unbounded)).map(|(_, entry)| entry);
        behind.filter(|entry| wanted(entry)).take(limit).cloned().collect()
    }

    /// Returns how many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows().open.len()
    }

    /// Whether there is none.
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

/// What a tunnel was asked for with, by which rules judge it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The user, if listeners ask for one.
    pub user: Option<Arc<str>>,
    /// The target's name, if it was asked for by name.
    pub name: Option<Box<str>>,
    /// The target's address, which the relay is connected to.
    pub next_hop: SocketAddr,
    /// How the target is reached.
    pub protocol: Protocol,
    /// The listener's address, as configured.
    pub listener: SocketAddr,
}

impl Asked {
    /// What rules look at.
    #[must_use]
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            user: self.user.as_deref(),
            name: self.name.as_deref(),
            address: self.next_hop,
            protocol: self.protocol,
            listener: self.listener,
        }
    }
}

/// What went through a tunnel: UDP payloads, or what TCP carried, in bytes.
#[derive(Debug, Default)]
pub struct Traffic {
    /// To the target.
    pub up_bytes: AtomicU64,
    /// From the target.
    pub down_bytes: AtomicU64,
}

impl Traffic {
    /// What went to the target, and what came from it, in bytes.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.up_bytes.load(Relaxed), self.down_bytes.load(Relaxed))
    }
}

/// An open tunnel.
pub struct Tunnel {
    /// Its ID, of no meaning on the wire.
    pub id: u64,
    /// The client's end of it.
    pub caller: Arc<Caller>,
    /// What it was asked for with.
    pub asked: Asked,
    /// When it was opened.
    pub since: SystemTime,
    /// What went through it.
    pub traffic: Arc<Traffic>,
    /// The stream of its request, and so of it.
    pub stream_id: u64,
    class: Membership,
    /// The class that the operator gave it, whatever the rules say.
    pinned: Mutex<Option<String>>,
    client: h3::Client,
    closed: Notify,
}

impl Tunnel {
    /// Returns the entry of a tunnel that is of `class`.
    #[must_use]
    pub(super) fn new(
        id: u64,
        (caller, client): (Arc<Caller>, h3::Client),
        asked: Asked,
        stream_id: u64,
        class: Membership,
    ) -> Self {
        Self {
            id,
            caller,
            asked,
            since: SystemTime::now(),
            class,
            traffic: Arc::default(),
            pinned: Mutex::default(),
            client,
            stream_id,
            closed: Notify::new(),
        }
    }

    fn pinned(&self) -> MutexGuard<'_, Option<String>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class that the operator gave it, if any.
    #[must_use]
    pub fn pin(&self) -> Option<String> {
        self.pinned().clone()
    }

    /// Gives it a class whatever the rules say, until there is no class of this name any more; or has rules decide again.
    pub fn set_pin(&self, class: Option<String>, classes: &Classes) {
        let mut pinned = self.pinned();
        *pinned = class;
        self.reclass(pinned, classes);
    }

    /// Gives it the class that `classes` have for it, from its next turn on.
    pub fn follow(&self, classes: &Classes) {
        self.reclass(self.pinned(), classes);
    }

    /// Holding the pin, so that of two that reclass at once, the later is what stays.
    fn reclass(&self, pinned: MutexGuard<'_, Option<String>>, classes: &Classes) {
        let pinned = pinned.as_deref().and_then(|name| classes.get(name));
        let class = pinned.unwrap_or_else(|| classes.classify(&self.asked.subject()));
        if !Arc::ptr_eq(&self.class.get(), class) {
            self.class.set(class.clone());
            self.client.reclass(self.stream_id, class);
        }
    }

    /// Ends it.
    pub fn close(&self) {
        self.closed.notify_one();
    }

    /// Completes when it is to end.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// The class that it is of now.
    #[must_use]
    pub fn class(&self) -> Arc<Class> {
        self.class.get()
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
