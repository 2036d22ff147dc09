//! Observers of packets on their way to the kernel: counters, lateness, recordings and traces.

use std::sync::Arc;

use prometheus_client::{metrics::counter::Counter, registry::Registry};

use super::{departure_metrics::DepartureMetrics, recorder::Recorder};
use crate::qlog::Traces;

/// Counters of packets on their way to the kernel.
#[derive(Debug, Default)]
pub struct IoCounters {
    /// Messages that left.
    pub messages: Counter,
    /// Packets in them, including packets that the kernel refused.
    pub packets: Counter,
    /// Packets handed over before their departure.
    pub ahead: Counter,
    /// Packets handed over more than a quantum after their departure.
    pub late: Counter,
    /// Messages that waited in this process, because the kernel would not have kept their departure.
    pub held: Counter,
    /// Packets that the kernel refused.
    pub refused: Counter,
    /// Peers toward which messages of several packets were refused, at most once in ten minutes.
    pub segmentation_refused: Counter,
}

/// Where packets are noted on their way to the kernel. Clones note in the same places.
#[derive(Clone, Debug, Default)]
pub struct PacketObservers {
    /// Counters of messages and packets.
    pub counters: Arc<IoCounters>,
    /// How late messages leave, and how many packets each has.
    pub departures: Arc<DepartureMetrics>,
    /// Records of single packets, while a caller asks for them.
    pub recorder: Arc<Recorder>,
    /// The connections being traced.
    pub traces: Arc<Traces>,
}

impl PacketObservers {
    /// Registers everything that is counted.
    pub fn register(&self, registry: &mut Registry) {
        self.counters.register(registry);
        self.departures.register(registry);
    }
}

impl IoCounters {
    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("transport_messages", "Messages of QUIC packets that the kernel took", &self.messages),
            ("transport_packets", "QUIC packets handed to the kernel, or held until they depart", &self.packets),
            ("transport_packets_ahead", "QUIC packets handed to the kernel before their departure time", &self.ahead),
            (
                "transport_packets_late",
                "QUIC packets handed to the kernel more than a quantum after their departure time",
                &self.late,
            ),
            ("transport_packets_refused", "QUIC packets that the kernel refused", &self.refused),
            ("transport_messages_held", "Messages held until they depart, where the device has no fq", &self.held),
            (
                "transport_gso_refused",
                "Peers toward which the kernel refuses to segment QUIC packets",
                &self.segmentation_refused,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}
