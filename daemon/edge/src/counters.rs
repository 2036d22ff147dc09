//! The counters of the edge role, by local address.

use std::{net::SocketAddr, sync::Arc};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use quic::datagrams::DatagramCounters;
use role::{labelled, traffic::Traffic};

type Labels<const N: usize> = [(&'static str, String); N];

/// The metrics of the edge role. "Up" is to the relay, "down" to local applications.
#[derive(Debug, Default)]
pub struct EdgeMetrics {
    open: Family<Labels<2>, Gauge>,
    tunnels_opened: Family<Labels<2>, Counter>,
    tunnels_refused: Family<Labels<2>, Counter>,
    refusals: Family<Labels<3>, Counter>,
    limit_hits: Family<Labels<3>, Counter>,
    ignored: Family<Labels<3>, Counter>,
    sources_evicted: Family<Labels<2>, Counter>,
    credit_waits: Family<Labels<2>, Counter>,
    place_waits: Family<Labels<2>, Counter>,
    limit_refusals: Family<Labels<2>, Counter>,
    tunnels_crowded_out: Family<Labels<2>, Counter>,
    packets_up: Family<Labels<2>, Counter>,
    packets_down: Family<Labels<2>, Counter>,
    bytes_up: Family<Labels<2>, Counter>,
    bytes_down: Family<Labels<2>, Counter>,
    dropped_waiting: Family<Labels<2>, Counter>,
    dropped_down: Family<Labels<2>, Counter>,
    answers_divided: Family<Labels<2>, Counter>,
    ranges_failed: Family<Labels<2>, Counter>,
    /// QUIC packets of more than 1,200 bytes for relays behind hops, dropped while capsules stood in for datagrams.
    pub hop_withheld: Counter,
    /// What happened to datagrams inside the connections to relays.
    pub datagrams: Arc<DatagramCounters>,
}

/// The counters of one local address.
#[derive(Debug, Default)]
pub struct LocalAddressCounters {
    /// Open tunnels.
    pub open: Gauge,
    /// Tunnels that relays opened, without tunnels that replaced others.
    pub tunnels_opened: Counter,
    /// Tunnels that relays refused, or ended at once.
    pub tunnels_refused: Counter,
    /// Senders that were removed for others, because there were too many.
    pub sources_evicted: Counter,
    /// Tunnels that had to wait because the relay's stream credit was used up.
    pub credit_waits: Counter,
    /// Tunnels that had to wait because all places on connections were taken.
    pub place_waits: Counter,
    /// Refusals by relays that allow no more tunnels.
    pub limit_refusals: Counter,
    /// Tunnels that were never opened, because there was no place for them.
    pub tunnels_crowded_out: Counter,
    /// Payloads handed to tunnels.
    pub packets_up: Counter,
    /// Payloads handed to local senders.
    pub packets_down: Counter,
    /// Bytes from applications.
    pub bytes_up: Counter,
    /// Bytes handed to applications.
    pub bytes_down: Counter,
    /// Payloads dropped while their tunnel was being opened.
    pub dropped_waiting: Counter,
    /// Payloads dropped because the local socket did not take them.
    pub dropped_down: Counter,
    /// Answers that were fetched in ranges over several paths.
    pub answers_divided: Counter,
    /// Ranges that did not arrive completely, so that their rest was requested again.
    pub ranges_failed: Counter,
    labels: Labels<2>,
    refusals: Family<Labels<3>, Counter>,
    limit_hits: Family<Labels<3>, Counter>,
    ignored: Family<Labels<3>, Counter>,
}

impl EdgeMetrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, family) in [
            ("edge_tunnels_opened", "Tunnels opened through relays", &self.tunnels_opened),
            ("edge_tunnels_refused", "Tunnels that relays refused, or ended at once", &self.tunnels_refused),
            ("edge_sources_evicted", "Local senders evicted to make room for others", &self.sources_evicted),
            ("edge_stream_credit_waits", "Tunnels that waited for a relay's stream credit", &self.credit_waits),
            ("edge_place_waits", "Tunnels that waited because all connections were full", &self.place_waits),
            ("edge_limit_refusals", "Refusals by relays that allow no more tunnels", &self.limit_refusals),
            ("edge_tunnels_crowded_out", "Tunnels that found no place", &self.tunnels_crowded_out),
            ("edge_packets_up", "UDP payloads handed to tunnels", &self.packets_up),
            ("edge_packets_down", "UDP payloads handed to local senders", &self.packets_down),
            ("edge_bytes_up", "Bytes of local applications handed to tunnels", &self.bytes_up),
            ("edge_bytes_down", "Bytes handed to local applications", &self.bytes_down),
            ("edge_dropped_waiting", "UDP payloads dropped while a tunnel was being opened", &self.dropped_waiting),
            ("edge_dropped_down", "UDP payloads that the local socket did not take", &self.dropped_down),
            ("edge_answers_divided", "Answers fetched in ranges over several paths", &self.answers_divided),
            ("edge_ranges_failed", "Ranges whose rest had to be requested again", &self.ranges_failed),
        ] {
            registry.register(name, help, family.clone());
        }
        let datagrams = &self.datagrams;
        labelled::register(
            registry,
            "edge_dropped_datagrams",
            "UDP payloads that tunnels dropped, by reason",
            &[
                ([("direction", "up"), ("reason", "queue_full")], &datagrams.dropped_send_queue),
                ([("direction", "up"), ("reason", "too_big")], &datagrams.dropped_too_big),
                ([("direction", "up"), ("reason", "stale")], &datagrams.dropped_stale),
                ([("direction", "up"), ("reason", "stream_queue_full")], &datagrams.dropped_capsules),
                ([("direction", "up"), ("reason", "closed")], &datagrams.dropped_unsent),
                ([("direction", "down"), ("reason", "queue_full")], &datagrams.dropped_receive_queue),
                ([("direction", "down"), ("reason", "closed")], &datagrams.dropped_unread),
                ([("direction", "down"), ("reason", "unknown_stream")], &datagrams.dropped_unknown_stream),
            ],
        );
        let help = "QUIC packets of more than 1200 bytes for relays behind hops, dropped while capsules stood in for datagrams";
        registry.register("edge_hop_withheld_packets", help, self.hop_withheld.clone());
        registry.register("edge_tunnels", "Open tunnels of local applications", self.open.clone());
        for (name, help, family) in [
            ("edge_refusals", "Connections and UDP senders that got no tunnel, by reason", &self.refusals),
            ("edge_limit_hits", "Times a configured limit of a local address was reached", &self.limit_hits),
            ("edge_ignored", "Datagrams of SOCKS clients that were ignored, by reason", &self.ignored),
        ] {
            registry.register(name, help, family.clone());
        }
    }

    /// Returns the counters of a local address that serves a protocol. For the same address and protocol, counting continues.
    #[must_use]
    pub fn of(&self, listen: SocketAddr, protocol: &str) -> Arc<LocalAddressCounters> {
        let labels = [("listen", listen.to_string()), ("protocol", protocol.to_owned())];
        let of = |family: &Family<Labels<2>, Counter>| family.get_or_create(&labels).clone();
        Arc::new(LocalAddressCounters {
            open: self.open.get_or_create(&labels).clone(),
            tunnels_opened: of(&self.tunnels_opened),
            tunnels_refused: of(&self.tunnels_refused),
            sources_evicted: of(&self.sources_evicted),
            credit_waits: of(&self.credit_waits),
            place_waits: of(&self.place_waits),
            limit_refusals: of(&self.limit_refusals),
            tunnels_crowded_out: of(&self.tunnels_crowded_out),
            packets_up: of(&self.packets_up),
            packets_down: of(&self.packets_down),
            bytes_up: of(&self.bytes_up),
            bytes_down: of(&self.bytes_down),
            dropped_waiting: of(&self.dropped_waiting),
            dropped_down: of(&self.dropped_down),
            answers_divided: of(&self.answers_divided),
            ranges_failed: of(&self.ranges_failed),
            refusals: self.refusals.clone(),
            limit_hits: self.limit_hits.clone(),
            ignored: self.ignored.clone(),
            labels,
        })
    }
}

impl LocalAddressCounters {
    /// Adds what a tunnel has moved since `counted`, which is brought up to date.
    pub fn count(&self, traffic: &Traffic, counted: &mut (u64, u64)) {
        let now = traffic.bytes();
        self.bytes_up.inc_by(now.0 - counted.0);
        self.bytes_down.inc_by(now.1 - counted.1);
        *counted = now;
    }

    /// Counts a connection or a UDP sender that got no tunnel, by reason. Not each reason is a refusal of the relay.
    pub fn refuse(&self, reason: &'static str) {
        self.refusals.get_or_create(&self.with("reason", reason)).inc();
    }

    /// Counts that a configured limit was reached.
    pub fn limit_hit(&self, limit: &'static str) {
        self.limit_hits.get_or_create(&self.with("limit", limit)).inc();
    }

    /// Returns how often this limit was reached.
    #[cfg(test)]
    pub(crate) fn limit_hits(&self, limit: &'static str) -> u64 {
        self.limit_hits.get_or_create(&self.with("limit", limit)).get()
    }

    /// Returns a function that counts each time a client has to wait for a place.
    pub fn when_full(self: &Arc<Self>) -> impl Fn() + Send + Sync + use<> {
        let counters = self.clone();
        move || counters.limit_hit("max_connections")
    }

    /// Counts an ignored datagram of a SOCKS client, by reason.
    pub fn ignore(&self, reason: &'static str) {
        self.ignored.get_or_create(&self.with("reason", reason)).inc();
    }

    fn with(&self, key: &'static str, value: &str) -> Labels<3> {
        let [listen, protocol] = self.labels.clone();
        [listen, protocol, (key, value.to_owned())]
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn payloads_that_stream_mode_drops_are_counted() {
        let (metrics, mut registry, mut text) = (EdgeMetrics::default(), Registry::default(), String::new());
        metrics.register(&mut registry);
        metrics.datagrams.dropped_capsules.inc_by(3);
        encode(&mut text, &registry).unwrap();
        let expected = "edge_dropped_datagrams_total{direction=\"up\",reason=\"stream_queue_full\"} 3\n";
        assert!(text.contains(expected), "{text}");
    }
}
