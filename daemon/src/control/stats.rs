//! Statistics: sums over open connections and tunnels, and the traffic of classes. Callers that watch them share the
//! results, because making them takes a walk through all tunnels and classes.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use quic::class::PolicyRole;
use relay::Relay;
use role::limits::{GaugePlace, PerUser};
use sched::class::ClassSettings;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::{Caller, Control, Error};

/// How long statistics are shared: half the shortest interval, so that a caller that watches at this interval never
/// receives the same statistics twice.
const SHARED: Duration = Duration::from_millis(50);

/// How many streams of statistics and events a caller may watch at once.
const WATCHES: usize = 16;

/// How many callers on a bus may watch statistics at once, with one watch each.
pub(super) const MAX_WATCHERS: usize = 32;

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

impl Control {
    /// Returns statistics that are at most 50 ms old.
    #[must_use]
    pub fn statistics(&self) -> Arc<Statistics> {
        let mut latest = self.watching.latest.lock();
        if let Some((made, statistics)) = &*latest
            && made.elapsed() < SHARED
        {
            return statistics.clone();
        }
        let (connections, tunnels) = self.counts();
        let statistics = Arc::new(Statistics {
            time: SystemTime::now(),
            revision: self.in_force().revision.number,
            connections,
            tunnels,
            late_packets: self.late_packets(),
            classes: self.classes(),
        });
        *latest = Some((Instant::now(), statistics.clone()));
        statistics
    }

    /// Takes a place for a stream of statistics or events, which is given back on drop.
    ///
    /// # Errors
    /// The caller has all the places that one may have.
    pub(super) fn watch(&self, caller: &Caller) -> Result<GaugePlace, Error> {
        let place = self.watching.places.take(&caller.name.as_str().into(), WATCHES);
        place.ok_or_else(|| Error::Watches { caller: caller.name.clone(), most: WATCHES })
    }

    /// Returns how many connections and tunnels are open.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let of = |relay: &Arc<Relay>| (relay.connections.len() as u64, relay.tunnels.len() as u64);
        let (connections, tunnels) = self.relay.as_ref().map(of).unwrap_or_default();
        (connections + self.edge().connections(0).len() as u64, tunnels + self.edge().tunnels.len() as u64)
    }

    /// Returns each class's counters.
    #[must_use]
    pub fn classes(&self) -> Vec<ClassStats> {
        let mut tunnels = HashMap::<(PolicyRole, String), u64>::new();
        for tunnel in self.relay.iter().flat_map(|relay| relay.tunnels.all()) {
            *tunnels.entry((PolicyRole::Relay, tunnel.class().policy().name.clone())).or_default() += 1;
        }
        for class in self.edge().tunnels.all().iter().filter_map(|tunnel| tunnel.class()) {
            *tunnels.entry((PolicyRole::Edge, class.policy().name.clone())).or_default() += 1;
        }
        let facts = self.facts();
        // A gateway's own listeners belong to the role of the relay.
        let is_relay = self.relay.is_some() || !facts.gateway_listeners.is_empty();
        let roles = [is_relay.then_some(PolicyRole::Relay), (!facts.forwards.is_empty()).then_some(PolicyRole::Edge)];
        let policy = self.policies.current();
        let classes = policy.policy.classes.iter();
        let of = |(role, class): (PolicyRole, &ClassSettings)| {
            let counters = self.parts.classes.of(role, &class.name);
            ClassStats {
                class: class.name.clone(),
                role,
                sent_bytes: counters.sent_bytes.get(),
                sent_payloads: counters.sent_payloads.get(),
                sojourn_ns: counters.sojourn.sum(),
                late_payloads: counters.late_payloads.get(),
                dropped_full: counters.dropped_queue.get(),
                dropped_late: counters.dropped_expired.get(),
                dropped_sojourn: counters.dropped_sojourn.get(),
                expired_streams: counters.expired_streams.get(),
                late_packets: self.parts.packets.departures.late_packets(&class.name),
                tunnels: tunnels.get(&(role, class.name.clone())).copied().unwrap_or(0),
            }
        };
        roles.into_iter().flatten().flat_map(|role| classes.clone().map(move |class| (role, class))).map(of).collect()
    }

    /// Returns how many packets left late.
    #[must_use]
    pub fn late_packets(&self) -> u64 {
        self.parts.packets.counters.late.get()
    }
}
