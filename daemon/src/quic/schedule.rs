//! How an endpoint orders what it sends.

use std::sync::Arc;

use arc_swap::ArcSwap;
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

/// The schedule of the connections that an endpoint makes, which may be replaced. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Schedules(Arc<ArcSwap<Schedule>>);

impl Schedules {
    /// Returns the schedule of the next connection.
    #[must_use]
    pub fn get(&self) -> Arc<Schedule> {
        self.0.load_full()
    }

    /// Gives connections from the next one on another schedule.
    pub fn set(&self, schedule: Schedule) {
        self.0.store(Arc::new(schedule));
    }
}

impl From<Schedule> for Schedules {
    fn from(schedule: Schedule) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(schedule)))
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
