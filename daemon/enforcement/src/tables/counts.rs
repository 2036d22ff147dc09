//! The metrics of the kernel's programs: what they counted, read at each scrape, and the updates that the kernel refused.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bpf::{
    egress::KernelCounters,
    ingress::{Arrivals, Guard, GuardReason},
    mark::Direction,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
    registry::Registry,
};

use super::{Loaded, Tables};

impl Tables {
    /// Registers the daemon's counters of its updates, and the kernel's counters, which are read at each scrape.
    pub fn register(self: &Arc<Self>, registry: &mut Registry) {
        let help = "Updates of the kernel's tables that the kernel refused";
        registry.register("kernel_refused_updates", help, self.refused_updates.clone());
        self.in_force.register(registry);
        registry.register_collector(Box::new(self.clone()));
    }
}

/// A metric family by class: its name, its help text, and its value.
type ByClass = (&'static str, &'static str, fn(&KernelCounters) -> u64);

const BY_CLASS: [ByClass; 4] = [
    ("kernel_packets", "Packets that left with the mark of their class", |of| of.packets),
    ("kernel_bytes", "Bytes of packets that left with the mark of their class, with all headers", |of| of.bytes),
    ("kernel_delayed_packets", "Packets, or messages of several packets, that the rate of their class delayed", |of| {
        of.delayed_packets
    }),
    (
        "kernel_dropped_packets",
        "Packets dropped, because the rate of their class would have delayed them by more than a second",
        |of| of.dropped_packets,
    ),
];

/// The same for arrivals at listeners.
type Arrived = (&'static str, &'static str, fn(&Arrivals) -> u64);

const ARRIVED: [Arrived; 3] = [
    (
        "kernel_arrived_packets",
        "Packets that arrived at listeners, by the class of their connection or else of the listener; of dropped \
         packets, only shed ones count",
        |of| of.packets,
    ),
    ("kernel_arrived_bytes", "Bytes of UDP payload in these packets (kernel_arrived_packets)", |of| of.bytes),
    ("kernel_shed_packets", "Packets dropped beyond arrivals_per_second, because their class was too low", |of| {
        of.shed_packets
    }),
];

impl Collector for Tables {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.in_force.encode(&mut encoder)?;
        let loaded = self.loaded();
        if let Loaded { classes: Some(classes), marks: Some(marks), .. } = &*loaded {
            let of = |direction| {
                // Classes whose counters cannot be read are left out.
                marks.all(direction).filter_map(|(class, mark)| Some((class, classes.counters(mark).ok()?)))
            };
            let mut counted = BTreeMap::<_, KernelCounters>::new();
            for (direction, label) in [(Direction::Down, "down"), (Direction::Up, "up"), (Direction::UpToRelay, "up")] {
                of(direction).for_each(|(class, counters)| *counted.entry((label, class)).or_default() += counters);
            }
            for (name, help, number) in BY_CLASS {
                let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                for ((direction, class), counters) in &counted {
                    let labels = [("class", *class), ("direction", *direction)];
                    ConstCounter::new(number(counters)).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        if let Loaded { guard: Some(guard), numbers, .. } = &*loaded {
            let arrived: Vec<_> =
                numbers.all().filter_map(|(class, number)| Some((class, guard.arrivals(number).ok()?))).collect();
            for (name, help, number) in ARRIVED {
                let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                for (class, arrivals) in &arrived {
                    ConstCounter::new(number(arrivals)).encode(family.encode_family(&[("class", *class)])?)?;
                }
            }
        }
        if let Some(Ok(counts)) = loaded.guard.as_ref().map(Guard::counts) {
            let help = "Packets to listeners, by the verdict of the guard and its reason";
            let mut family = encoder.encode_descriptor("kernel_guarded_packets", help, None, MetricType::Counter)?;
            for (reason, count) in counts {
                let verdict = if reason.passes() { "passed" } else { "dropped" };
                let labels = [("verdict", verdict), ("reason", label(reason))];
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

const fn label(reason: GuardReason) -> &'static str {
    match reason {
        GuardReason::Connection => "connection",
        GuardReason::Initial => "initial",
        GuardReason::InitialToken => "initial_token",
        GuardReason::InitialKnown => "initial_known",
        GuardReason::InitialId => "initial_id",
        GuardReason::Version => "version",
        GuardReason::UnknownId => "unknown_id",
        GuardReason::Fragment => "fragment",
        GuardReason::Malformed => "malformed",
        GuardReason::ShortInitial => "short_initial",
        GuardReason::ShortId => "short_id",
        GuardReason::VersionNegotiation => "version_negotiation",
        GuardReason::ShortVersion => "short_version",
        GuardReason::ForgedId => "forged_id",
        GuardReason::FirstFragment => "first_fragment",
        GuardReason::Hidden => "extension_headers",
        GuardReason::PrefixLimit => "prefix_limit",
        GuardReason::TotalLimit => "total_limit",
        GuardReason::IdLimit => "id_limit",
        GuardReason::ResetLimit => "reset_limit",
        GuardReason::FragmentLimit => "fragment_limit",
        GuardReason::ArrivalsLimit => "arrivals_limit",
    }
}
