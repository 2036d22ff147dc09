//! How an endpoint orders what it sends.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use sched::stream::Discipline;

use super::{
    class::{Classes, Terms},
    clock::Clock,
    ledger::Binding,
};

/// How the connections of an endpoint order what they send.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Which stream or tunnel is served next.
    pub discipline: Discipline,
    /// How early the bytes of streams are handed to the transport.
    pub binding: Binding,
    /// Where time comes from.
    pub clock: Clock,
    /// What random disciplines draw from.
    pub seed: u64,
    /// The terms of whatever was given no others.
    pub terms: Terms,
}

/// A connection that follows its schedule while it lives.
pub(super) trait Scheduled: Send + Sync {
    /// Makes another discipline decide what leaves next; bytes that were handed over already leave as they were.
    fn reorder(&self, schedule: &Schedule);
}

/// The schedule of the connections of an endpoint, which may be replaced. Clones are the same.
#[derive(Clone, Default)]
pub struct Schedules(Arc<Shared>);

#[derive(Default)]
struct Shared {
    current: ArcSwap<Schedule>,
    /// The connections that follow it. Some may have ended, though never more than half of them.
    connections: Mutex<Vec<Weak<dyn Scheduled>>>,
}

impl Schedules {
    /// Returns the schedule of the next connection.
    #[must_use]
    pub fn get(&self) -> Arc<Schedule> {
        self.0.current.load_full()
    }

    /// Puts another schedule in force: all of it for connections to come, and its discipline for live connections.
    pub fn set(&self, schedule: Schedule) {
        let schedule = Arc::new(schedule);
        self.0.current.store(schedule.clone());
        let living: Vec<_> = self.connections().iter().filter_map(Weak::upgrade).collect();
        living.iter().for_each(|connection| connection.reorder(&schedule));
    }

    /// Makes a connection that was made by a schedule follow its replacement, even if the replacement came meanwhile.
    pub(super) fn attach(&self, connection: Arc<dyn Scheduled>, made_by: &Arc<Schedule>) {
        let mut connections = self.connections();
        if connections.len() == connections.capacity() {
            connections.retain(|connection| connection.strong_count() > 0);
            // So that as many may come as there are before this is looked at again.
            let living = connections.len();
            connections.reserve(living + 1);
        }
        connections.push(Arc::downgrade(&connection));
        drop(connections);
        let current = self.get();
        if !Arc::ptr_eq(&current, made_by) {
            connection.reorder(&current);
        }
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<dyn Scheduled>>> {
        // A list of the connections to tell stays whole even if its holder panics.
        self.0.connections.lock()
    }
}

impl fmt::Debug for Schedules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schedules").field(&self.get()).finish()
    }
}

impl From<Schedule> for Schedules {
    fn from(schedule: Schedule) -> Self {
        Self(Arc::new(Shared { current: ArcSwap::from_pointee(schedule), connections: Mutex::default() }))
    }
}

impl From<&Classes> for Schedule {
    /// What the policy of `classes` says, by the machine's clock.
    fn from(classes: &Classes) -> Self {
        let policy = classes.schedule();
        Self {
            discipline: policy.discipline,
            binding: Binding::Late { floor_packets: policy.low_mark_packets },
            clock: Clock::system(),
            // Lots have to be fair, not secret.
            seed: (Clock::system().now_ns)(),
            terms: classes.named(None).terms(None),
        }
    }
}
