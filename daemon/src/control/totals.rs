//! Totals of what the daemon carries: open connections and tunnels, and the traffic of classes.

use std::{collections::HashMap, sync::Arc, time::SystemTime};

use quic::class::PolicyRole;
use relay::Relay;
use role::limits::GaugePlace;
use sched::class::ClassSettings;

use super::{Caller, ClassStats, Control, Error, Statistics};

impl Control {
    /// Returns statistics that are at most 50 ms old.
    #[must_use]
    pub fn statistics(&self) -> Arc<Statistics> {
        self.watching.latest(|| {
            let (connections, tunnels) = self.counts();
            Statistics {
                time: SystemTime::now(),
                revision: self.in_force().revision.number,
                connections,
                tunnels,
                late_packets: self.late_packets(),
                classes: self.classes(),
            }
        })
    }

    /// Takes a place for a stream of statistics or events, which is given back on drop.
    ///
    /// # Errors
    /// The caller has all the places that one may have.
    pub(super) fn watch(&self, caller: &Caller) -> Result<GaugePlace, Error> {
        self.watching.take(caller)
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
