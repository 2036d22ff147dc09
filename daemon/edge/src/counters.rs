//! The counters of the edge role, by local address.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv6Addr, SocketAddr},
    sync::{Arc, Weak},
};

use config::targets::Protocol;
use masque::target::Target;
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Registry,
};
use quic::{
    class::Membership,
    datagrams::{DatagramCounters, Losses},
};
use role::{
    access::{AccessLog, record::RefusedRequest},
    labelled,
    ready::Readiness,
    traffic::Traffic,
};

use super::{
    link::Link,
    roster::{self, LocalClient, Roster, RosterEntry, TunnelOwner},
    uplink::{Condition, ConnectionCounters, PathReport},
};

type Labels<const N: usize> = [(&'static str, String); N];

/// The metrics of the edge role. "Up" is to the relay, "down" to local applications.
#[derive(Debug, Default)]
pub struct EdgeMetrics {
    /// The open tunnels and relays.
    pub roster: Arc<Roster>,
    entrances: Mutex<Vec<Weak<LocalAddressCounters>>>,
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
    /// QUIC packets of more than 1,200 bytes for relays behind hops, dropped while capsules stood in for datagrams.
    pub hop_withheld: Counter,
    /// What happened to datagrams inside the connections to relays.
    pub datagrams: Arc<DatagramCounters>,
    /// Counters of those connections, and of moves between paths.
    pub connections: Arc<ConnectionCounters>,
    access: Arc<AccessLog>,
}

/// A local address.
#[derive(Debug)]
struct LocalAddress(SocketAddr);

impl Default for LocalAddress {
    /// Returns the unspecified address, for counters without a local address.
    fn default() -> Self {
        Self((Ipv6Addr::UNSPECIFIED, 0).into())
    }
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
    /// Answers of relays that they allow no more tunnels.
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
    roster: Arc<Roster>,
    pub(super) access: Arc<AccessLog>,
    address: LocalAddress,
    labels: Labels<2>,
    refusals: Family<Labels<3>, Counter>,
    limit_hits: Family<Labels<3>, Counter>,
    ignored: Family<Labels<3>, Counter>,
}

impl EdgeMetrics {
    /// Creates all metrics at zero. Through `ready`, the daemon's readiness depends on this edge. `access` records its tunnels and
    /// refusals.
    #[must_use]
    pub fn new(ready: Arc<Readiness>, access: Arc<AccessLog>) -> Self {
        let connections = Arc::new(ConnectionCounters { ready, ..ConnectionCounters::default() });
        Self { connections, access, ..Self::default() }
    }

    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, family) in [
            ("edge_tunnels_opened", "Tunnels opened through relays", &self.tunnels_opened),
            ("edge_tunnels_refused", "Tunnels that relays refused, or ended at once", &self.tunnels_refused),
            ("edge_sources_evicted", "Local senders that had to leave for others", &self.sources_evicted),
            ("edge_stream_credit_waits", "Tunnels that waited for a relay's stream credit", &self.credit_waits),
            ("edge_place_waits", "Tunnels that waited because all connections were full", &self.place_waits),
            ("edge_limit_refusals", "Answers of relays that they allow no more tunnels", &self.limit_refusals),
            ("edge_tunnels_crowded_out", "Tunnels that found no place", &self.tunnels_crowded_out),
            ("edge_packets_up", "UDP payloads handed to tunnels", &self.packets_up),
            ("edge_packets_down", "UDP payloads handed to local senders", &self.packets_down),
            ("edge_bytes_up", "Bytes of local applications handed to tunnels", &self.bytes_up),
            ("edge_bytes_down", "Bytes handed to local applications", &self.bytes_down),
            ("edge_dropped_waiting", "UDP payloads dropped while a tunnel was being opened", &self.dropped_waiting),
            ("edge_dropped_down", "UDP payloads that the local socket did not take", &self.dropped_down),
        ] {
            registry.register(name, help, family.clone());
        }
        self.connections.register(registry);
        let datagrams = &self.datagrams;
        labelled::register(
            registry,
            "edge_dropped_datagrams",
            "UDP payloads in datagrams that forwards dropped, by reason",
            &[
                ([("direction", "up"), ("reason", "queue_full")], &datagrams.dropped_send_queue),
                ([("direction", "up"), ("reason", "too_big")], &datagrams.dropped_too_big),
                ([("direction", "up"), ("reason", "stale")], &datagrams.dropped_stale),
                ([("direction", "down"), ("reason", "queue_full")], &datagrams.dropped_receive_queue),
                ([("direction", "down"), ("reason", "unknown_stream")], &datagrams.dropped_unknown_stream),
            ],
        );
        let help = "QUIC packets of more than 1200 bytes for relays behind hops, dropped while capsules stood in for datagrams";
        registry.register("edge_hop_withheld_packets", help, self.hop_withheld.clone());
        registry.register("edge_tunnels", "Open tunnels of local applications", self.open.clone());
        registry.register_collector(Box::new(Uplinks(self.roster.clone())));
        registry.register_collector(Box::new(PathGauges(self.roster.clone())));
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
        let counters = Arc::new(LocalAddressCounters {
            open: self.open.get_or_create(&labels).clone(),
            roster: self.roster.clone(),
            access: self.access.clone(),
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
            refusals: self.refusals.clone(),
            limit_hits: self.limit_hits.clone(),
            ignored: self.ignored.clone(),
            address: LocalAddress(listen),
            labels,
        });
        roster::note(&self.entrances, &counters);
        counters
    }

    /// Returns the served local addresses.
    #[must_use]
    pub fn entrances(&self) -> Vec<Arc<LocalAddressCounters>> {
        roster::living(&self.entrances)
    }
}

impl LocalAddressCounters {
    /// Returns the local address, as in metrics.
    #[must_use]
    pub fn listen(&self) -> &str {
        &self.labels[0].1
    }

    /// Returns the local address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address.0
    }

    /// Returns what it serves: "udp", "tcp", "proxy" or "serve".
    #[must_use]
    pub fn protocol(&self) -> &str {
        &self.labels[1].1
    }

    /// Enters a tunnel for `client` to `target` that goes over `link`, on the stream with this ID, in the class of `membership`.
    /// `losses` are those of a UDP tunnel.
    #[must_use]
    pub fn enter(
        &self,
        client: &LocalClient,
        (protocol, target): (Protocol, &Target),
        (link, stream_id): (&Link, u64),
        (membership, losses): (&Membership, Option<Arc<Losses>>),
    ) -> RosterEntry {
        let (listen, client, class) = (self.address(), client.clone(), membership.clone());
        let owner = TunnelOwner::Application { listen, client, membership: class };
        let entry = self.roster.enter(owner, (protocol, target), (link, stream_id), losses);
        let entry = entry.of_application(&self.open, &self.access);
        link.carries_traffic(entry.traffic.clone(), &membership.get(), None);
        entry
    }

    /// Records that a client was refused, and what it asked for, if that is known.
    pub(crate) fn record_refusal(
        &self,
        client: &LocalClient,
        asked: Option<(Protocol, &Target)>,
        refused: RefusedRequest,
    ) {
        if self.access.is_wanted() {
            self.access.refused(roster::request_of(self.address(), client, asked), refused);
        }
    }

    /// Adds what a tunnel has moved since `counted`, which is brought up to date.
    pub fn count(&self, traffic: &Traffic, counted: &mut (u64, u64)) {
        let now = traffic.bytes();
        self.bytes_up.inc_by(now.0 - counted.0);
        self.bytes_down.inc_by(now.1 - counted.1);
        *counted = now;
    }

    /// Counts a connection that leads nowhere, by reason.
    pub fn refuse(&self, reason: &'static str) {
        self.tunnels_refused.inc();
        self.count_reason(reason);
    }

    /// Counts that a UDP sender got no tunnel, by reason alone, since not each reason is a refusal of the relay.
    pub(crate) fn count_reason(&self, reason: &'static str) {
        self.refusals.get_or_create(&self.with("reason", reason)).inc();
    }

    /// Counts that a configured limit was reached.
    pub fn limit_hit(&self, limit: &'static str) {
        self.limit_hits.get_or_create(&self.with("limit", limit)).inc();
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

/// The open connections to each relay that the edge uses, as a metric that is computed when it is scraped.
#[derive(Debug)]
struct Uplinks(Arc<Roster>);

impl Collector for Uplinks {
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
            ("edge_path_rtt_seconds", "Smoothed round trip of a path; 0 without a connection", |of| {
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
