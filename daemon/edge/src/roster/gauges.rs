//! The connections and paths of the edge as metrics that are computed when they are scraped.

use std::{collections::BTreeMap, fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
    registry::Registry,
};
use uplink::{Condition, PathReport};

use super::Roster;

impl Roster {
    /// Registers metrics of the relays and paths in use.
    pub fn register(self: &Arc<Self>, registry: &mut Registry) {
        registry.register_collector(Box::new(UplinkGauges(self.clone())));
        registry.register_collector(Box::new(PathGauges(self.clone())));
    }
}

/// The open connections to each relay that the edge uses.
#[derive(Debug)]
struct UplinkGauges(Arc<Roster>);

impl Collector for UplinkGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // Several uplinks may lead to the same relay, with different credentials.
        let mut relays = BTreeMap::<String, usize>::new();
        for standpoint in self.0.uplinks().iter().flat_map(|uplink| uplink.standpoints()) {
            *relays.entry(standpoint.relay).or_default() += standpoint.lines.len();
        }
        let help = "Open connections to relays; without any, the relay cannot be used";
        let mut family = encoder.encode_descriptor("edge_uplink_connections", help, None, MetricType::Gauge)?;
        for (relay, open) in &relays {
            let of = [("relay", relay.as_str())];
            ConstGauge::new(i64::try_from(*open).unwrap_or(i64::MAX)).encode(family.encode_family(&of)?)?;
        }
        Ok(())
    }
}

/// The name of a gauge, its help, and its value for a path.
type PathGauge = (&'static str, &'static str, fn(&PathReport) -> f64);

/// The paths of the edge as metrics, at most eight names. If local addresses do not share connections, a path is as fast as its
/// fastest connection, and their traffic is added up.
#[derive(Debug)]
struct PathGauges(Arc<Roster>);

impl Collector for PathGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut paths = BTreeMap::<String, PathReport>::new();
        for state in self.0.uplinks().iter().flat_map(|uplink| uplink.path_states()) {
            paths.entry(state.name.clone()).and_modify(|known| known.join(&state)).or_insert(state);
        }
        let gauges: [PathGauge; 7] = [
            ("edge_path_up", "Whether a path takes tunnels", |of| f64::from(u8::from(of.condition == Condition::Up))),
            ("edge_path_chosen", "Whether an operator has chosen a path", |of| f64::from(u8::from(of.is_chosen))),
            ("edge_path_rtt_seconds", "Smoothed round trip of a path; 0 without a connection that answers", |of| {
                of.smoothed_rtt.as_secs_f64()
            }),
            ("edge_path_rate_bytes", "Bytes per second that a path is taken to carry", |of| of.bytes_per_sec as f64),
            ("edge_path_used_bytes", "Bytes per second that go over a path", |of| of.used_bytes_per_sec as f64),
            ("edge_path_lost_ratio", "Share of the packets of open connections that were lost", |of| {
                if of.sent_packets == 0 { 0.0 } else { of.lost_packets as f64 / of.sent_packets as f64 }
            }),
            ("edge_path_tunnels", "Tunnels and requests on a path", |of| of.tunnels as f64),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (path, state) in &paths {
                ConstGauge::new(value(state)).encode(family.encode_family(&[("path", path.as_str())])?)?;
            }
        }
        Ok(())
    }
}
