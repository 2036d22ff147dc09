//! What is open: connections and tunnels, as the control plane sees them.
//!
//! An entry lives as long as its tunnel, whose task owns it; the tables only point at it. What the data path touches of
//! an entry are atomics.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use config::{policy::Subject, targets::Protocol};
use masque::target::{Host, Target};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::{Caller, usage::Usage};
use crate::{
    access::record::{self, Moved},
    quic::{
        class::{Class, Classes, Membership},
        datagrams::View,
        h3,
    },
};

/// Things with an ID that counts up, found by it.
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
    /// Returns an empty table whose IDs `last` counts, maybe for others as well.
    #[must_use]
    pub fn counting(last: Arc<AtomicU64>) -> Self {
        Self { last, open: Mutex::default() }
    }

    /// Returns an empty table that has no ID in common with `other`.
    #[must_use]
    pub fn beside<U>(other: &Table<U>) -> Self {
        Self::counting(other.last.clone())
    }

    fn rows(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<T>>> {
        self.open.lock()
    }

    /// Takes in what `make` makes with its ID; IDs are not used again.
    pub fn insert(&self, make: impl FnOnce(u64) -> T) -> Arc<T> {
        let mut rows = self.rows();
        let id = self.last.fetch_add(1, Relaxed) + 1;
        let entry = Arc::new(make(id));
        rows.insert(id, entry.clone());
        entry
    }

    /// Lets go of an entry.
    pub fn remove(&self, id: u64) {
        self.rows().remove(&id);
    }

    /// Returns the entry of an ID.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Arc<T>> {
        self.rows().get(&id).cloned()
    }

    /// Returns at most `limit` entries behind the ID `after` that are `wanted`, by ID.
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

/// What went through a tunnel, as its pump counts it.
#[derive(Debug, Default)]
pub struct Traffic {
    up_bytes: AtomicU64,
    up_packets: AtomicU64,
    down_bytes: AtomicU64,
    down_packets: AtomicU64,
    too_big: AtomicU64,
    refused_by_host: AtomicU64,
    /// Of the user, if there is one.
    usage: Option<Arc<Usage>>,
}

impl Traffic {
    /// Returns that of a tunnel of the user whose usage this is, which counts the same.
    #[must_use]
    pub fn of(usage: Option<Arc<Usage>>) -> Self {
        Self { usage, ..Self::default() }
    }

    /// Adds what went to the target: bytes, and UDP payloads if it was such.
    pub fn add_up(&self, bytes: u64, packets: u64) {
        self.up_bytes.fetch_add(bytes, Relaxed);
        self.up_packets.fetch_add(packets, Relaxed);
        if let Some(usage) = &self.usage {
            usage.up.add(bytes, packets);
        }
    }

    /// Adds what came from the target, as [`Traffic::add_up`].
    pub fn add_down(&self, bytes: u64, packets: u64) {
        self.down_bytes.fetch_add(bytes, Relaxed);
        self.down_packets.fetch_add(packets, Relaxed);
        if let Some(usage) = &self.usage {
            usage.down.add(bytes, packets);
        }
    }

    /// Adds UDP payloads that could not be sent to the target: too big for the path, or refused by this host.
    pub fn add_unsent(&self, too_big: u64, refused_by_host: u64) {
        self.too_big.fetch_add(too_big, Relaxed);
        self.refused_by_host.fetch_add(refused_by_host, Relaxed);
    }

    /// What went to the target, and what came from it.
    #[must_use]
    pub fn moved(&self) -> (Moved, Moved) {
        let of = |bytes: &AtomicU64, packets: &AtomicU64| Moved {
            bytes: bytes.load(Relaxed),
            packets: packets.load(Relaxed),
        };
        (of(&self.up_bytes, &self.up_packets), of(&self.down_bytes, &self.down_packets))
    }

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
    view: View,
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
        (stream_id, view): (u64, View),
        (class, usage): (Membership, Option<Arc<Usage>>),
    ) -> Self {
        Self {
            id,
            caller,
            asked,
            since: SystemTime::now(),
            class,
            traffic: Arc::new(Traffic::of(usage)),
            view,
            pinned: Mutex::default(),
            client,
            stream_id,
            closed: Notify::new(),
        }
    }

    /// What is recorded of it when it has ended, for `reason`.
    #[must_use]
    pub fn ended(&self, reason: &'static str) -> (record::Request, record::Ended) {
        let Asked { user, name, next_hop, protocol, listener } = &self.asked;
        let (up, down) = self.traffic.moved();
        let host = name.as_ref().map_or(Host::Ip(next_hop.ip()), |name| Host::Name(name.to_string()));
        let request = record::Request {
            connection: self.caller.id,
            listener: *listener,
            client: self.caller.address,
            user: user.clone(),
            protocol: Some(*protocol),
            target: Some(Target { host, port: next_hop.port() }),
        };
        let ended = record::Ended {
            tunnel: self.id,
            next_hop: *next_hop,
            class: self.class().policy().name.clone(),
            form: (*protocol == Protocol::Udp).then(|| self.view.form()),
            up,
            down,
            drops: self.drops().to_vec(),
            duration: self.since.elapsed().unwrap_or_default(),
            reason,
        };
        (request, ended)
    }

    /// The payloads of it that were dropped, by direction and reason.
    #[must_use]
    pub fn drops(&self) -> [(&'static str, u64); 7] {
        let (traffic, losses) = (&self.traffic, &self.view.losses);
        [
            ("dropped_up_queue_full", &losses.receive_queue),
            ("dropped_up_too_big", &traffic.too_big),
            ("dropped_up_refused_by_host", &traffic.refused_by_host),
            ("dropped_down_queue_full", &losses.send_queue),
            ("dropped_down_too_big", &losses.too_big),
            ("dropped_down_stale", &losses.stale),
            ("dropped_down_stream_queue_full", &losses.capsules),
        ]
        .map(|(reason, count)| (reason, count.load(Relaxed)))
    }

    fn pinned(&self) -> MutexGuard<'_, Option<String>> {
        self.pinned.lock()
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
