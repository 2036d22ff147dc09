//! Histograms of departures by class: how late messages leave, and how many packets each has.

use std::sync::Arc;

use arc_swap::ArcSwap;
use prometheus_client::{metrics::family::Family, registry::Registry};

use super::{distribution::Distribution, message::MAX_SEGMENTS};
use crate::{class_key::ClassKey, pacer::Group};

/// Upper bounds of the buckets of lateness, in nanoseconds.
const LATENESS_NS: [u64; 10] =
    [0, 20_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000, 100_000_000];

/// Upper bounds of the buckets of message sizes, in packets.
const TRAINS: [u64; 7] = [1, 2, 4, 8, 16, 32, MAX_SEGMENTS as u64];

/// A packet that is later than this counts as late: twice the default quantum. A bucket ends here.
const LATE_NS: u64 = 250_000;

type Lateness = Distribution<10>;
type Trains = Distribution<7>;

/// The label of metrics; empty for packets of no class.
type Label = [(&'static str, String); 1];

/// Histograms by class. A message counts for the class of the first packet in it that has one.
#[derive(Debug)]
pub struct DepartureMetrics {
    /// How long after its departure each packet that has one was handed over: mostly 0.
    lateness: Family<Label, Lateness, fn() -> Lateness>,
    /// How many packets each message has.
    trains: Family<Label, Trains, fn() -> Trains>,
    /// The histograms of the current policy's classes, ordered by key; the histograms for no class come first.
    known: ArcSwap<Vec<Of>>,
}

#[derive(Clone, Debug)]
struct Of {
    key: Option<ClassKey>,
    class: String,
    lateness: Lateness,
    trains: Trains,
}

impl Default for DepartureMetrics {
    fn default() -> Self {
        let departures = Self {
            lateness: Family::new_with_constructor(|| Distribution::new(LATENESS_NS, 1e9)),
            trains: Family::new_with_constructor(|| Distribution::new(TRAINS, 1.0)),
            known: ArcSwap::default(),
        };
        departures.follow(&[]);
        departures
    }
}

impl DepartureMetrics {
    /// Counts by these classes from now on, and drops the counts of all others.
    pub fn follow(&self, classes: &[&str]) {
        let of = |(key, class): (Option<ClassKey>, &str)| Of {
            key,
            class: class.to_owned(),
            lateness: self.lateness.get_or_create_owned(&label(class)),
            trains: self.trains.get_or_create_owned(&label(class)),
        };
        let keyed = classes.iter().map(|class| (Some(ClassKey::of(class)), *class));
        let mut known: Vec<_> = [(None, "")].into_iter().chain(keyed).map(of).collect();
        known.sort_by_key(|of| of.key);
        let before = self.known.swap(Arc::new(known));
        for gone in before.iter().filter(|of| of.key.is_some() && !classes.contains(&of.class.as_str())) {
            self.lateness.remove(&label(&gone.class));
            self.trains.remove(&label(&gone.class));
        }
    }

    /// Returns how many packets of a class were handed over more than a quarter of a millisecond after their departure.
    #[must_use]
    pub fn late_packets(&self, class: &str) -> u64 {
        let known = self.known.load();
        known.iter().find(|of| of.class == class).map_or(0, |of| of.lateness.above(LATE_NS))
    }

    /// Registers the histograms.
    pub fn register(&self, registry: &mut Registry) {
        let help = "How long after their departure times QUIC packets were handed to the kernel; packets without one are not counted";
        registry.register("transport_lateness_seconds", help, self.lateness.clone());
        registry.register("transport_train_packets", "QUIC packets in one message", self.trains.clone());
    }

    /// Notes a message that is handed to the kernel at `now_ns`.
    pub(super) fn note(&self, class: Option<ClassKey>, group: &Group, now_ns: u64) {
        let known = self.known.load();
        // The policy may be newer than the packet.
        let place = known.binary_search_by_key(&class, |of| of.key).unwrap_or(0);
        let Some(of) = known.get(place) else { return };
        let packets = group.packets as u64;
        of.trains.add(packets, 1);
        if let Some(departure_ns) = group.departure_ns {
            of.lateness.add(now_ns.saturating_sub(departure_ns), packets);
        }
    }
}

fn label(class: &str) -> Label {
    [("class", class.to_owned())]
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    fn shown(departures: &DepartureMetrics) -> String {
        let mut registry = Registry::default();
        departures.register(&mut registry);
        let mut shown = String::new();
        text::encode(&mut shown, &registry).unwrap();
        shown
    }

    #[test]
    fn messages_count_for_their_class_while_the_policy_has_it() {
        let departures = DepartureMetrics::default();
        departures.follow(&["bulk", "voice"]);
        let [voice, gone] = ["voice", "gone"].map(|name| Some(ClassKey::of(name)));
        departures.note(voice, &Group::new(1_000, Some(5)), 30_005);
        departures.note(None, &Group::new(1_000, None), 7);
        departures.note(gone, &Group::new(1_000, None), 7);
        let found = shown(&departures);
        for line in [
            "transport_lateness_seconds_sum{class=\"voice\"} 0.00003",
            "transport_lateness_seconds_count{class=\"voice\"} 1",
            "transport_train_packets_count{class=\"voice\"} 1",
            "transport_train_packets_count{class=\"bulk\"} 0",
            "transport_train_packets_count{class=\"\"} 2",
            "transport_lateness_seconds_count{class=\"\"} 0",
        ] {
            assert!(found.lines().any(|found| found == line), "{line} in\n{found}");
        }
        departures.note(voice, &Group::new(1_000, Some(5)), 250_006);
        assert_eq!(["voice", "bulk", "none"].map(|class| departures.late_packets(class)), [1, 0, 0]);
        departures.follow(&["bulk"]);
        departures.note(voice, &Group::new(1_000, None), 7);
        let found = shown(&departures);
        assert!(!found.contains("voice") && found.contains("transport_train_packets_count{class=\"\"} 3"), "{found}");
    }
}
