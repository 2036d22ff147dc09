//! Statistics, and the bounds on watching them. Callers that watch share the results, because making them takes a walk through all
//! tunnels and classes.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use quic::class::PolicyRole;
use role::limits::{GaugePlace, PerUser};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::{Caller, Error};

/// How long statistics are shared: half the shortest interval, so that a caller that watches at this interval never
/// receives the same statistics twice.
const SHARED: Duration = Duration::from_millis(50);

/// How many streams of statistics and events a caller may watch at once.
const WATCHES: usize = 16;

/// The shortest and the longest interval between statistics.
const INTERVALS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(3600)];

/// Returns the ticks for a caller's statistics: at once, then at the `asked` interval, limited to 0.1 to 3600 seconds. The default is a
/// second.
pub(super) fn stats_ticks(asked: Option<Duration>) -> Interval {
    let interval = asked.unwrap_or(Duration::from_secs(1)).clamp(INTERVALS[0], INTERVALS[1]);
    let mut ticks = tokio::time::interval(interval);
    // A slow reader gets fewer messages, not later ones.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The traffic of a class in one role, since the start.
#[derive(Clone, Debug)]
pub struct ClassStats {
    /// The class.
    pub class: String,
    /// The role, as metrics name it.
    pub role: PolicyRole,
    /// Bytes of payloads that were sent.
    pub sent_bytes: u64,
    /// Payloads that were sent.
    pub sent_payloads: u64,
    /// How long these had waited in all, in nanoseconds.
    pub sojourn_ns: u64,
    /// Payloads that left after their deadline.
    pub late_payloads: u64,
    /// Payloads dropped because a bound was reached.
    pub dropped_full: u64,
    /// Payloads dropped because their deadline passed.
    pub dropped_late: u64,
    /// Payloads dropped because they had waited too long.
    pub dropped_sojourn: u64,
    /// Streams reset because their deadline passed.
    pub expired_streams: u64,
    /// Packets of the class, in both roles, that reached the kernel late.
    pub late_packets: u64,
    /// Open tunnels.
    pub tunnels: u64,
}

/// Statistics of one moment.
#[derive(Clone, Debug)]
pub struct Statistics {
    /// When they were made.
    pub time: SystemTime,
    /// The revision of the policy in force.
    pub revision: u64,
    /// Open connections.
    pub connections: u64,
    /// Open tunnels.
    pub tunnels: u64,
    /// Packets that left late since the start.
    pub late_packets: u64,
    /// The traffic of each class.
    pub classes: Vec<ClassStats>,
}

/// The latest statistics, and the places of callers that watch.
#[derive(Default)]
pub(super) struct Watching {
    latest: Mutex<Option<(Instant, Arc<Statistics>)>>,
    places: PerUser,
}

impl Watching {
    /// Returns the latest statistics if they are at most 50 ms old, or else makes new ones.
    pub(super) fn latest(&self, make: impl FnOnce() -> Statistics) -> Arc<Statistics> {
        let mut latest = self.latest.lock();
        if let Some((made, statistics)) = &*latest
            && made.elapsed() < SHARED
        {
            return statistics.clone();
        }
        let statistics = Arc::new(make());
        *latest = Some((Instant::now(), statistics.clone()));
        statistics
    }

    /// Takes a place for a stream of statistics or events, which is given back on drop.
    ///
    /// # Errors
    /// The caller has all the places that one may have.
    pub(super) fn take(&self, caller: &Caller) -> Result<GaugePlace, Error> {
        let place = self.places.take(&caller.name.as_str().into(), WATCHES);
        place.ok_or_else(|| Error::Watches { caller: caller.name.clone(), most: WATCHES })
    }
}
