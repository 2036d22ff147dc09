//! The metrics of the relay role.
//!
//! Per-packet counters are plain handles that cost one relaxed addition per batch; label sets are looked up only when
//! something is refused, opened or closed.

use std::sync::Arc;

use masque::{request::TunnelProtocol, tunnel::IgnoredCounts};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use quic::{datagrams::DatagramCounters, events::HandshakeCounters};
use role::{labelled, traffic::UserTraffic, user_labels::UserLabels};

use super::{accounts::QuotaGauges, continuable::ContinuationCounters};
use crate::{resolve::DnsCounters, udp_target::UplinkCounters};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

const fn label(protocol: TunnelProtocol) -> &'static str {
    match protocol {
        TunnelProtocol::Udp => "udp",
        TunnelProtocol::Tcp => "tcp",
    }
}

/// The metrics of the relay role. "Up" is from client to target, "down" from target to client.
#[derive(Debug, Default)]
pub struct RelayMetrics {
    /// Open connections of clients.
    pub connections: Gauge,
    /// Handshake results.
    pub handshakes: Arc<HandshakeCounters>,
    /// Datagrams on the client side.
    pub datagrams: Arc<DatagramCounters>,
    /// Results of name resolution.
    pub dns: Arc<DnsCounters>,
    /// Users' quotas and their usage.
    pub quotas: QuotaGauges,
    /// Requests that may continue a tunnel.
    pub continuations: ContinuationCounters,
    /// The traffic of all TCP tunnels.
    pub tcp: Arc<UserTraffic>,
    /// Target sockets that could not be given the mark of their class.
    pub unmarked_sockets: Counter,
    /// Packets that reached a worker other than the one in their connection ID.
    pub misdirected_packets: Counter,
    /// Packets under connection IDs that are not answered with a stateless reset.
    pub unanswered_packets: Counter,
    tunnels: Family<Labels<1>, Gauge>,
    opened: Counters<1>,
    closed: Counters<1>,
    refused: Counters<1>,
    limits: Counters<1>,
    packets_up: Counter,
    packets_down: Counter,
    messages_up: Counter,
    udp_bytes_up: Counter,
    udp_bytes_down: Counter,
    too_big_up: Counter,
    by_host_up: Counter,
    gso_refused: Counter,
    ignored: Counters<1>,
}

impl RelayMetrics {
    /// Returns metrics that name users by these labels.
    #[must_use]
    pub fn new(labels: UserLabels) -> Self {
        Self { quotas: QuotaGauges::new(labels), ..Self::default() }
    }

    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("connections", "Open connections of clients", self.connections.clone());
        registry.register("tunnels", "Open tunnels", self.tunnels.clone());
        registry.register("tunnels_opened", "Tunnels opened", self.opened.clone());
        registry.register("tunnels_closed", "Tunnels closed, by what ended them", self.closed.clone());
        registry.register("refused_requests", "Requests refused, by reason", self.refused.clone());
        registry.register("limit_hits", "Times a configured limit was reached", self.limits.clone());
        registry.register("ignored", "Valid arrivals that a relay ignores, by kind", self.ignored.clone());
        registry.register(
            "misdirected_packets",
            "Packets that reached a worker other than the one in their connection ID",
            self.misdirected_packets.clone(),
        );
        registry.register(
            "unanswered_packets",
            "Packets without a stateless reset: paced never issued their connection ID, or it caused too many resets",
            self.unanswered_packets.clone(),
        );
        let help = "Target sockets that could not be given the mark of their class";
        registry.register("kernel_unmarked_sockets", help, self.unmarked_sockets.clone());
        registry.register("gso_refused", "Target sockets whose device cannot segment", self.gso_refused.clone());
        registry.register(
            "messages",
            "Messages that carried the UDP payloads sent to targets",
            self.messages_up.clone(),
        );
        self.continuations.register(registry);
        self.quotas.register(registry);
        self.dns.register(registry);
        let handshakes = &self.handshakes;
        labelled::register(
            registry,
            "handshakes",
            "QUIC handshakes, by result",
            &[
                ([("result", "started")], &handshakes.started),
                ([("result", "completed")], &handshakes.completed),
                ([("result", "failed")], &handshakes.failed),
                ([("result", "retried")], &handshakes.retried),
                ([("result", "refused")], &handshakes.refused),
            ],
        );
        registry.register(
            "refused_certificates",
            "Certificates of clients that were not accepted, by reason",
            handshakes.refused_certificates.clone(),
        );
        labelled::register(
            registry,
            "packets",
            "UDP payloads sent to targets (up), and received from them (down), even if dropped later",
            &[([("direction", "up")], &self.packets_up), ([("direction", "down")], &self.packets_down)],
        );
        labelled::register(
            registry,
            "bytes",
            "Bytes of UDP payloads and TCP, sent to targets (up), and received from them (down)",
            &[
                ([("protocol", "udp"), ("direction", "up")], &self.udp_bytes_up),
                ([("protocol", "udp"), ("direction", "down")], &self.udp_bytes_down),
                ([("protocol", "tcp"), ("direction", "up")], &self.tcp.up.bytes),
                ([("protocol", "tcp"), ("direction", "down")], &self.tcp.down.bytes),
            ],
        );
        let datagrams = &self.datagrams;
        registry.register("streams", "Streams that may have bytes left to send", datagrams.streams.clone());
        labelled::register(
            registry,
            "datagrams",
            "HTTP Datagrams in QUIC packets",
            &[([("direction", "up")], &datagrams.received), ([("direction", "down")], &datagrams.sent)],
        );
        labelled::register(
            registry,
            "dropped_packets",
            "UDP payloads dropped, by reason",
            &[
                ([("direction", "up"), ("reason", "queue_full")], &datagrams.dropped_receive_queue),
                ([("direction", "up"), ("reason", "unknown_stream")], &datagrams.dropped_unknown_stream),
                ([("direction", "up"), ("reason", "closed")], &datagrams.dropped_unread),
                ([("direction", "up"), ("reason", "too_big")], &self.too_big_up),
                ([("direction", "up"), ("reason", "refused_by_host")], &self.by_host_up),
                ([("direction", "down"), ("reason", "queue_full")], &datagrams.dropped_send_queue),
                ([("direction", "down"), ("reason", "too_big")], &datagrams.dropped_too_big),
                ([("direction", "down"), ("reason", "stale")], &datagrams.dropped_stale),
                ([("direction", "down"), ("reason", "stream_queue_full")], &datagrams.dropped_capsules),
                ([("direction", "down"), ("reason", "closed")], &datagrams.dropped_unsent),
            ],
        );
    }

    /// Counts a request that was refused for `reason` (see [`masque::request::Refusal::label`]).
    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts that a limit was reached; the caller logs it.
    pub fn limit_hit(&self, limit: &'static str) {
        self.limits.get_or_create(&[("limit", limit)]).inc();
    }

    /// Counts a tunnel that opens; `usage` is that of its user.
    pub fn opened(&self, protocol: TunnelProtocol, usage: Option<&UserTraffic>) {
        let labels = [("protocol", label(protocol))];
        self.opened.get_or_create(&labels).inc();
        self.tunnels.get_or_create(&labels).inc();
        if let Some(usage) = usage {
            usage.opened.inc();
            usage.tunnels.inc();
        }
    }

    /// Counts a tunnel that closes, by reason.
    pub fn closed(&self, protocol: TunnelProtocol, reason: &'static str, usage: Option<&UserTraffic>) {
        self.tunnels.get_or_create(&[("protocol", label(protocol))]).dec();
        self.closed.get_or_create(&[("reason", reason)]).inc();
        if let Some(usage) = usage {
            usage.tunnels.dec();
        }
    }

    /// Counts the arrivals that a UDP tunnel ignored over its lifetime.
    pub fn add_ignored(&self, ignored: IgnoredCounts) {
        for (what, count) in
            [("context", ignored.contexts), ("capsule", ignored.capsules), ("oversize_capsule", ignored.oversize)]
        {
            if count > 0 {
                self.ignored.get_or_create(&[("what", what)]).inc_by(count);
            }
        }
    }

    /// Adds the counters of a flush toward a target.
    pub fn add_uplink(&self, counters: &UplinkCounters) {
        if *counters == UplinkCounters::default() {
            return;
        }
        self.packets_up.inc_by(counters.sent);
        self.udp_bytes_up.inc_by(counters.sent_bytes);
        self.messages_up.inc_by(counters.messages);
        if counters.dropped_too_big + counters.dropped_by_host + counters.gso_refused > 0 {
            self.too_big_up.inc_by(counters.dropped_too_big);
            self.by_host_up.inc_by(counters.dropped_by_host);
            self.gso_refused.inc_by(counters.gso_refused);
        }
    }

    /// Adds UDP payloads received from a target, and their bytes. Payloads that are dropped before they leave for the client count here,
    /// too, and among the dropped ones.
    pub fn add_downlink(&self, packets: u64, bytes: u64) {
        if packets > 0 {
            self.packets_down.inc_by(packets);
            self.udp_bytes_down.inc_by(bytes);
        }
    }
}
