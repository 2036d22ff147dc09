//! How an endpoint orders what it sends.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use sched::stream::Discipline;

use super::{binding::Binding, class::Terms, clock::Clock};

/// How the connections of an endpoint order what they send.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Which stream or tunnel is served next.
    pub discipline: Discipline,
    /// How early the bytes of streams are handed to the transport.
    pub binding: Binding,
    /// Where time comes from.
    pub clock: Clock,
    /// The seed of random disciplines.
    pub seed: u64,
    /// The default terms of streams and flows.
    pub terms: Terms,
}

/// A connection that follows the schedule of its endpoint while it lives.
pub(super) trait Scheduled: Send + Sync {
    /// Follows another schedule, unless the connection has one of its own: the schedule decides what leaves next, and how
    /// much is handed over ahead. Bytes that were handed over already leave as before.
    fn follow(&self, schedule: &Schedule);
}

/// The schedule of the connections of an endpoint, which may be replaced. Clones share it. A connection that was given a
/// schedule of its own ([`Hub::set_schedule`](super::datagrams::Hub::set_schedule)) no longer follows it.
#[derive(Clone, Default)]
pub struct Schedules(Arc<Shared>);

#[derive(Default)]
struct Shared {
    current: ArcSwap<Schedule>,
    /// The connections that follow it. Connections that have ended are removed when the list is full.
    connections: Mutex<Vec<Weak<dyn Scheduled>>>,
}

impl Schedules {
    /// Returns the schedule of the next connection.
    #[must_use]
    pub fn get(&self) -> Arc<Schedule> {
        self.0.current.load_full()
    }

    /// Replaces the schedule: completely for new connections, and its discipline and binding for live connections.
    pub fn set(&self, schedule: Schedule) {
        let schedule = Arc::new(schedule);
        self.0.current.store(schedule.clone());
        let living: Vec<_> = self.connections().iter().filter_map(Weak::upgrade).collect();
        living.iter().for_each(|connection| connection.follow(&schedule));
    }

    /// Makes a connection that was created under the schedule `made_by` follow replacements, including one that came
    /// meanwhile.
    pub(super) fn attach(&self, connection: Arc<dyn Scheduled>, made_by: &Arc<Schedule>) {
        let mut connections = self.connections();
        if connections.len() == connections.capacity() {
            connections.retain(|connection| connection.strong_count() > 0);
            // Makes room for as many new connections as live now before the next clean-up.
            let living = connections.len();
            connections.reserve(living + 1);
        }
        connections.push(Arc::downgrade(&connection));
        drop(connections);
        let current = self.get();
        if !Arc::ptr_eq(&current, made_by) {
            connection.follow(&current);
        }
    }

    /// Whether another clone exists.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<dyn Scheduled>>> {
        // The list stays consistent even if the holder of the lock panics.
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

impl Schedule {
    /// Returns the schedule of a discipline by the machine's clock, with the default terms of streams and flows. At least
    /// `floor_packets` packets are handed over ahead; `None` adapts their number to the path's rate.
    #[must_use]
    pub fn late(discipline: Discipline, floor_packets: Option<u32>, terms: Terms) -> Self {
        Self {
            discipline,
            binding: Binding::Late { floor_packets },
            clock: Clock::system(),
            // Random choices have to be fair, not secret.
            seed: (Clock::system().now_ns)(),
            terms,
        }
    }
}
