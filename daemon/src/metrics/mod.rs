//! What the daemon counts, and the endpoint that shows it.
//!
//! | item | what it does |
//! |---|---|
//! | [`Metrics`] | every counter and gauge, as handles; a clone shares them; one relaxed atomic operation each |
//! | [`Metrics::uplink`], [`Metrics::downlink`] | add what a batch did, once per batch |
//! | [`serve`] | `GET /metrics` in the OpenMetrics text format |
//!
//! Every series exists from the start, at 0, so that a rate can be computed over its first increment.

mod endpoint;
mod labels;

pub use endpoint::serve;
pub use labels::{Direction, DnsResult, DropReason, HandshakeResult, Label, Limit, PerLabel, RefusalReason};

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::target::{Received, UplinkCounters};

/// All counters and gauges. Cheap to clone; the clones count together.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// `paced_connections`: QUIC connections that are up.
    pub connections: Gauge,
    /// `paced_handshakes_total{result}`.
    pub handshakes: PerLabel<HandshakeResult>,
    /// `paced_tunnels`: tunnels that are open.
    pub tunnels: Gauge,
    /// `paced_tunnels_opened_total`.
    pub tunnels_opened: Counter,
    /// `paced_refused_requests_total{reason}`.
    pub refused_requests: PerLabel<RefusalReason>,
    /// `paced_packets_total{direction}`: UDP payloads that were passed on.
    pub packets: PerLabel<Direction>,
    /// `paced_bytes_total{direction}`: their bytes, without any header.
    pub bytes: PerLabel<Direction>,
    /// `paced_dropped_packets_total{direction="up",reason}`.
    pub dropped_up: PerLabel<DropReason>,
    /// `paced_dropped_packets_total{direction="down",reason}`.
    pub dropped_down: PerLabel<DropReason>,
    /// `paced_gso_refused_total`: target sockets whose device cannot segment.
    pub gso_refused: Counter,
    /// `paced_limit_hits_total{limit}`.
    pub limit_hits: PerLabel<Limit>,
    /// `paced_dns_lookups_total{result}`.
    pub dns_lookups: PerLabel<DnsResult>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Makes and registers all metrics, each at 0.
    #[must_use]
    pub fn new() -> Self {
        let mut r = Registry::with_prefix("paced");
        let connections = gauge(&mut r, "connections", "QUIC connections that are up");
        let handshakes = PerLabel::register(&mut r, "handshakes", "QUIC handshakes by how they ended");
        let tunnels = gauge(&mut r, "tunnels", "Tunnels that are open");
        let tunnels_opened = counter(&mut r, "tunnels_opened", "Tunnels opened");
        let refused_requests = PerLabel::register(&mut r, "refused_requests", "Requests refused");
        let packets = PerLabel::register(&mut r, "packets", "UDP payloads passed on");
        let bytes = PerLabel::register(&mut r, "bytes", "Bytes of UDP payloads passed on");
        let (dropped_up, dropped_down) = labels::register_drops(&mut r, "dropped_packets", "UDP payloads dropped");
        let gso_refused = counter(&mut r, "gso_refused", "Target sockets whose device cannot segment");
        let limit_hits = PerLabel::register(&mut r, "limit_hits", "Times that a limit refused or dropped something");
        let dns_lookups = PerLabel::register(&mut r, "dns_lookups", "Name look-ups by how they ended");
        Self {
            registry: Arc::new(r),
            connections,
            handshakes,
            tunnels,
            tunnels_opened,
            refused_requests,
            packets,
            bytes,
            dropped_up,
            dropped_down,
            gso_refused,
            limit_hits,
            dns_lookups,
        }
    }

    /// Adds what flushes toward targets did since the last call, and clears `counters`.
    pub fn uplink(&self, counters: &mut UplinkCounters) {
        let done = std::mem::take(counters);
        self.packets.add(Direction::Up, done.sent);
        self.bytes.add(Direction::Up, done.sent_bytes);
        self.dropped_up.add(DropReason::TooBig, done.dropped_too_big);
        self.dropped_up.add(DropReason::Host, done.dropped_by_host);
        if done.gso_refused > 0 {
            self.gso_refused.inc_by(done.gso_refused);
        }
    }

    /// Adds `received` from a target, less the payloads and bytes that were `dropped` before the client got them.
    pub fn downlink(&self, received: Received, dropped: Received) {
        self.packets.add(Direction::Down, received.payloads.saturating_sub(dropped.payloads) as u64);
        self.bytes.add(Direction::Down, received.bytes.saturating_sub(dropped.bytes) as u64);
    }

    /// Returns all metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string fails only if a metric itself does, and none of ours can.
        if let Err(error) = prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            tracing::error!(%error, "metrics could not be encoded");
        }
        text
    }
}

fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_exists_at_zero() {
        let text = Metrics::new().text();
        for series in [
            "paced_connections 0",
            "paced_tunnels 0",
            "paced_tunnels_opened_total 0",
            "paced_handshakes_total{result=\"completed\"} 0",
            "paced_packets_total{direction=\"up\"} 0",
            "paced_bytes_total{direction=\"down\"} 0",
            "paced_dropped_packets_total{direction=\"down\",reason=\"queue_full\"} 0",
            "paced_refused_requests_total{reason=\"unauthenticated\"} 0",
            "paced_limit_hits_total{limit=\"tunnels_per_user\"} 0",
            "paced_dns_lookups_total{result=\"timed_out\"} 0",
        ] {
            assert!(text.lines().any(|line| line == series), "{series} is missing in\n{text}");
        }
    }

    #[test]
    fn a_batch_is_added_once() {
        let metrics = Metrics::new();
        let mut counters = UplinkCounters { sent: 3, sent_bytes: 30, dropped_too_big: 2, ..Default::default() };
        metrics.uplink(&mut counters);
        metrics.uplink(&mut counters);
        let received = |payloads, bytes| Received { payloads, bytes, ..Received::default() };
        metrics.downlink(received(5, 50), received(1, 10));
        let (up, down) = (Direction::Up, Direction::Down);
        assert_eq!((metrics.packets.get(up), metrics.bytes.get(up)), (3, 30));
        assert_eq!((metrics.packets.get(down), metrics.bytes.get(down)), (4, 40));
        assert_eq!(metrics.dropped_up.get(DropReason::TooBig), 2);
        assert_eq!(metrics.dropped_down.get(DropReason::TooBig), 0);
    }
}
