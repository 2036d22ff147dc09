//! Counters and gauges, and the endpoint that shows them.
//!
//! What is counted per packet is a plain handle that costs a relaxed addition per batch; label sets are looked up only
//! where something is refused, opened or closed.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use masque::request::Protocol;
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::Registry,
};
use tokio::{net::TcpListener, sync::Semaphore, task::AbortHandle, time::timeout};

use self::process::Process;
use crate::{
    accept::{self, Acceptor},
    access::AccessLog,
    certificates::Certificate,
    edge, enforcement,
    quic::{self, class::ClassMetrics, datagrams::DatagramCounters, events::HandshakeCounters},
    ready::Readiness,
    relay::{
        accounts::QuotaGauges,
        usage::{Usage, Usages},
    },
    resolve::DnsCounters,
    udp_target::UplinkCounters,
};

pub mod page;
mod process;

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

const fn label(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Udp => "udp",
        Protocol::Tcp => "tcp",
    }
}

/// Everything that the daemon counts. "Up" is from client to target, "down" from target to client.
pub struct Metrics {
    registry: Registry,
    /// Of metrics that other programs have, too.
    conventional: Registry,
    /// Whether this daemon should be sent work.
    pub ready: Arc<Readiness>,
    /// Counters of callers that wanted to come in at doors other than the relay's.
    pub doors: accept::Counters,
    /// Open connections of clients.
    pub connections: Gauge,
    /// Handshake results.
    pub handshakes: Arc<HandshakeCounters>,
    /// Datagrams on the clients' side.
    pub datagrams: Arc<DatagramCounters>,
    /// What became of names to resolve.
    pub dns: Arc<DnsCounters>,
    /// What the edge role counts.
    pub edge: Arc<edge::EdgeMetrics>,
    /// What became of each class's traffic.
    pub classes: ClassMetrics,
    /// What users have used of their quotas.
    pub quotas: QuotaGauges,
    /// How QUIC packets reached the kernel, in either role.
    pub io: Arc<quic::io::Counters>,
    /// What becomes of departure times at devices.
    pub qdiscs: quic::io::qdisc::Gauges,
    /// What the kernel enforces, and counts.
    pub kernel: Arc<enforcement::Tables>,
    /// The access log.
    pub access: Arc<AccessLog>,
    /// What each user uses.
    pub users: Usages,
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
    tcp_bytes_up: Counter,
    tcp_bytes_down: Counter,
    too_big_up: Counter,
    by_host_up: Counter,
    capsules_dropped: Counter,
    gso_refused: Counter,
    /// Packets that reached another worker than their connection ID names.
    pub misdirected_packets: Counter,
    /// Packets under connection IDs that are not answered with a stateless reset.
    pub unanswered_packets: Counter,
    ignored: Counters<1>,
    reloads: Counters<1>,
    certificates: Family<Vec<(&'static str, String)>, Gauge>,
}

impl Metrics {
    /// Creates all metrics at zero.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let ready = Arc::<Readiness>::default();
        let mut metrics = Self {
            registry: Registry::with_prefix("paced"),
            conventional: Registry::default(),
            ready: ready.clone(),
            doors: accept::Counters::default(),
            connections: Gauge::default(),
            handshakes: Arc::default(),
            datagrams: Arc::default(),
            dns: Arc::default(),
            edge: Arc::new(edge::EdgeMetrics::new(ready)),
            classes: ClassMetrics::default(),
            quotas: QuotaGauges::default(),
            io: Arc::default(),
            qdiscs: Default::default(),
            kernel: Arc::default(),
            access: Arc::default(),
            users: Usages::default(),
            tunnels: Family::default(),
            opened: Family::default(),
            closed: Family::default(),
            refused: Family::default(),
            limits: Family::default(),
            packets_up: Counter::default(),
            packets_down: Counter::default(),
            messages_up: Counter::default(),
            udp_bytes_up: Counter::default(),
            udp_bytes_down: Counter::default(),
            tcp_bytes_up: Counter::default(),
            tcp_bytes_down: Counter::default(),
            too_big_up: Counter::default(),
            by_host_up: Counter::default(),
            capsules_dropped: Counter::default(),
            gso_refused: Counter::default(),
            misdirected_packets: Counter::default(),
            unanswered_packets: Counter::default(),
            ignored: Family::default(),
            reloads: Family::default(),
            certificates: Family::default(),
        };
        metrics.register();
        Arc::new(metrics)
    }

    fn register(&mut self) {
        self.conventional.register_collector(Box::new(Process::new()));
        let registry = &mut self.registry;
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Which paced this is", build);
        registry.register("connections", "Open connections of clients", self.connections.clone());
        registry.register("tunnels", "Open tunnels", self.tunnels.clone());
        registry.register("tunnels_opened", "Tunnels opened", self.opened.clone());
        registry.register("tunnels_closed", "Tunnels closed, by what ended them", self.closed.clone());
        registry.register("refused_requests", "Requests refused, by reason", self.refused.clone());
        registry.register("limit_hits", "Times a configured limit was reached", self.limits.clone());
        registry.register("ignored", "Well-formed things of no meaning to a relay", self.ignored.clone());
        registry.register(
            "misdirected_packets",
            "Packets that reached another worker than their connection ID names",
            self.misdirected_packets.clone(),
        );
        registry.register(
            "unanswered_packets",
            "Packets under connection IDs that are not answered with a stateless reset: never issued, or too many asked",
            self.unanswered_packets.clone(),
        );
        let help = "Times that the configuration, or files that it names, were read again, by what became of it";
        registry.register("reloads", help, self.reloads.clone());
        // Shown before there is one: `increase` cannot see a series begin at 1.
        for result in ["applied", "refused"] {
            drop(self.reloads.get_or_create(&[("result", result)]));
        }
        let help = "When certificates cease to be valid, in seconds since 1970";
        registry.register("certificate_expires_timestamp_seconds", help, self.certificates.clone());
        registry.register("gso_refused", "Target sockets whose device cannot segment", self.gso_refused.clone());
        registry.register(
            "messages",
            "Messages that carried the UDP payloads sent to targets",
            self.messages_up.clone(),
        );

        self.edge.register(registry);
        labelled(
            registry,
            "edge_dropped_datagrams",
            "UDP payloads in datagrams that forwards dropped, by reason",
            &[
                ([("direction", "up"), ("reason", "queue_full")], &self.edge.datagrams.dropped_send_queue),
                ([("direction", "up"), ("reason", "too_big")], &self.edge.datagrams.dropped_too_big),
                ([("direction", "up"), ("reason", "stale")], &self.edge.datagrams.dropped_stale),
                ([("direction", "down"), ("reason", "queue_full")], &self.edge.datagrams.dropped_receive_queue),
                ([("direction", "down"), ("reason", "unknown_stream")], &self.edge.datagrams.dropped_unknown_stream),
            ],
        );
        self.classes.register(registry);
        self.quotas.register(registry);
        self.io.register(registry);
        self.qdiscs.register(registry);
        self.kernel.register(registry);
        self.users.register(registry);
        let records = self.access.counters().map(|(result, counter)| ([("result", result)], counter));
        labelled(registry, "access_records", "Records for the access log, by what became of them", &records);
        self.doors.register(registry);
        let handshakes = self.handshakes.clone();
        labelled(
            registry,
            "handshakes",
            "QUIC handshakes, by what became of them",
            &[
                ([("result", "started")], &handshakes.started),
                ([("result", "completed")], &handshakes.completed),
                ([("result", "failed")], &handshakes.failed),
                ([("result", "retried")], &handshakes.retried),
                ([("result", "refused")], &handshakes.refused),
            ],
        );
        labelled(
            registry,
            "packets",
            "UDP payloads relayed",
            &[([("direction", "up")], &self.packets_up), ([("direction", "down")], &self.packets_down)],
        );
        labelled(
            registry,
            "bytes",
            "Bytes relayed",
            &[
                ([("protocol", "udp"), ("direction", "up")], &self.udp_bytes_up),
                ([("protocol", "udp"), ("direction", "down")], &self.udp_bytes_down),
                ([("protocol", "tcp"), ("direction", "up")], &self.tcp_bytes_up),
                ([("protocol", "tcp"), ("direction", "down")], &self.tcp_bytes_down),
            ],
        );
        let dns = self.dns.clone();
        registry.register("dns_names", "Names to resolve", dns.names.clone());
        let help = "Names to resolve that took no lookup of their own, or failed, by what became of them";
        labelled(
            registry,
            "dns_results",
            help,
            &[
                ([("result", "cached")], &dns.cached),
                ([("result", "joined")], &dns.joined),
                ([("result", "negative")], &dns.negative),
                ([("result", "timeout")], &dns.timeouts),
                ([("result", "overloaded")], &dns.overloaded),
                ([("result", "failed")], &dns.failed),
            ],
        );
        let datagrams = self.datagrams.clone();
        registry.register("streams", "Streams with bytes that may still have to leave", datagrams.streams.clone());
        labelled(
            registry,
            "datagrams",
            "HTTP Datagrams in QUIC packets",
            &[([("direction", "up")], &datagrams.received), ([("direction", "down")], &datagrams.sent)],
        );
        let help = "Packets filled up to prove that the path still carries full ones";
        let [relay, edge] = [&datagrams.filled_up, &self.edge.datagrams.filled_up];
        let filled_up = [([("role", "relay")], relay), ([("role", "edge")], edge)];
        labelled(registry, "filled_up_packets", help, &filled_up);
        labelled(
            registry,
            "dropped_packets",
            "UDP payloads dropped, by reason",
            &[
                ([("direction", "up"), ("reason", "queue_full")], &datagrams.dropped_receive_queue),
                ([("direction", "up"), ("reason", "unknown_stream")], &datagrams.dropped_unknown_stream),
                ([("direction", "up"), ("reason", "too_big")], &self.too_big_up),
                ([("direction", "up"), ("reason", "refused_by_host")], &self.by_host_up),
                ([("direction", "down"), ("reason", "queue_full")], &datagrams.dropped_send_queue),
                ([("direction", "down"), ("reason", "too_big")], &datagrams.dropped_too_big),
                ([("direction", "down"), ("reason", "stale")], &datagrams.dropped_stale),
                ([("direction", "down"), ("reason", "stream_queue_full")], &self.capsules_dropped),
            ],
        );
    }

    /// Counts a request that was refused for `reason` (see [`masque::request::Refusal::label`]).
    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a reload, which was applied or refused as a whole.
    pub fn reloaded(&self, is_applied: bool) {
        self.reloads.get_or_create(&[("result", if is_applied { "applied" } else { "refused" })]).inc();
    }

    /// Shows when these certificates expire, and no others.
    pub fn set_certificates(&self, certificates: &[Certificate]) {
        self.certificates.clear();
        for Certificate { used_by, address, expires, .. } in certificates {
            let labels = vec![("used_by", (*used_by).to_owned()), ("address", address.to_string())];
            let expires = expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            self.certificates.get_or_create(&labels).set(i64::try_from(expires).unwrap_or(i64::MAX));
        }
    }

    /// Counts that a configured limit was reached.
    pub fn limit_hit(&self, limit: &'static str) {
        self.limits.get_or_create(&[("limit", limit)]).inc();
    }

    /// Counts a tunnel that opens, of a user whose usage this is.
    pub fn opened(&self, protocol: Protocol, usage: Option<&Usage>) {
        let labels = [("protocol", label(protocol))];
        self.opened.get_or_create(&labels).inc();
        self.tunnels.get_or_create(&labels).inc();
        if let Some(usage) = usage {
            usage.opened.inc();
            usage.tunnels.inc();
        }
    }

    /// Counts a tunnel that closes, and for what reason.
    pub fn closed(&self, protocol: Protocol, reason: &'static str, usage: Option<&Usage>) {
        self.tunnels.get_or_create(&[("protocol", label(protocol))]).dec();
        self.closed.get_or_create(&[("reason", reason)]).inc();
        if let Some(usage) = usage {
            usage.tunnels.dec();
        }
    }

    /// Counts what a UDP tunnel ignored or dropped in its life.
    pub fn add_tunnel_losses(&self, ignored: masque::tunnel::Ignored, dropped: u64) {
        for (what, count) in
            [("context", ignored.contexts), ("capsule", ignored.capsules), ("oversize_capsule", ignored.oversize)]
        {
            if count > 0 {
                self.ignored.get_or_create(&[("what", what)]).inc_by(count);
            }
        }
        self.capsules_dropped.inc_by(dropped);
    }

    /// Adds what a flush toward a target did.
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

    /// Adds UDP payloads that came from a target, and their bytes.
    pub fn add_downlink(&self, packets: u64, bytes: u64) {
        if packets > 0 {
            self.packets_down.inc_by(packets);
            self.udp_bytes_down.inc_by(bytes);
        }
    }

    /// Adds bytes that a TCP tunnel moved.
    pub fn add_tcp(&self, up: u64, down: u64) {
        self.tcp_bytes_up.inc_by(up);
        self.tcp_bytes_down.inc_by(down);
    }

    /// Writes all metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// Writing to memory fails.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode_registry(&mut text, &self.conventional)?;
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Registers counters that exist already as one family.
fn labelled<const N: usize>(registry: &mut Registry, name: &str, help: &str, counters: &[(Labels<N>, &Counter)]) {
    registry.register(
        name,
        help,
        Fixed(counters.iter().map(|(labels, counter)| (*labels, (*counter).clone())).collect()),
    );
}

/// A family whose members are known from the start.
#[derive(Debug)]
struct Fixed<const N: usize>(Vec<(Labels<N>, Counter)>);

impl<const N: usize> prometheus_client::encoding::EncodeMetric for Fixed<N> {
    fn encode(&self, mut encoder: prometheus_client::encoding::MetricEncoder<'_>) -> fmt::Result {
        for (labels, counter) in &self.0 {
            let encoder = encoder.encode_family(labels)?;
            prometheus_client::encoding::EncodeMetric::encode(counter, encoder)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> prometheus_client::metrics::MetricType {
        prometheus_client::metrics::MetricType::Counter
    }
}

/// How long a scraper may take for its request and for the answer.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

/// How many scrapes run at once; more wait.
const SCRAPES: usize = 8;

/// A place where metrics are served, until this is dropped.
pub struct Page {
    address: SocketAddr,
    task: AbortHandle,
}

impl Page {
    /// Serves metrics at an address, on the runtime this is called in.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub fn open(address: SocketAddr, metrics: Arc<Metrics>) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let task = tokio::spawn(serve(TcpListener::from_std(listener)?, metrics)).abort_handle();
        Ok(Self { address, task })
    }

    /// Where they are served, as configured.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves [`page`]s over HTTP/1.1, one request per connection, until dropped.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) {
    let scrapes = Arc::new(Semaphore::new(SCRAPES));
    let mut acceptor = Acceptor::new("metrics", &metrics.doors);
    loop {
        let Ok(place) = scrapes.clone().acquire_owned().await else { return };
        let (stream, _) = acceptor.next(|| listener.accept()).await;
        let metrics = metrics.clone();
        tokio::spawn(async move {
            // A scraper that gives up or breaks the rules is no concern of ours.
            _ = timeout(SCRAPE_TIMEOUT, page::answer(stream, &metrics)).await;
            drop(place);
        });
    }
}

/// Binds the endpoint's socket.
///
/// # Errors
/// The address is taken or not ours.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    async fn scrape(request: &str, metrics: Arc<Metrics>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve(listener, metrics));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        server.abort();
        answer
    }

    #[tokio::test]
    async fn a_scrape_shows_what_was_counted() {
        let metrics = Metrics::new();
        metrics.refused("port_prohibited");
        metrics.opened(Protocol::Udp, None);
        metrics.add_uplink(&UplinkCounters { sent: 3, sent_bytes: 3600, messages: 1, ..UplinkCounters::default() });
        metrics.handshakes.completed.inc();
        let asked = "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n";
        let answer = scrape(asked, metrics).await;
        for line in [
            "HTTP/1.1 200 OK",
            "paced_refused_requests_total{reason=\"port_prohibited\"} 1",
            "paced_tunnels{protocol=\"udp\"} 1",
            "paced_packets_total{direction=\"up\"} 3",
            "paced_bytes_total{protocol=\"udp\",direction=\"up\"} 3600",
            "paced_handshakes_total{result=\"completed\"} 1",
            "paced_dropped_packets_total{direction=\"down\",reason=\"too_big\"} 0",
            "Content-Type: application/openmetrics-text; version=1.0.0",
            "paced_build_info{version=\"",
            "process_open_fds ",
            "process_resident_memory_bytes ",
            "process_cpu_seconds_total ",
            "# EOF",
        ] {
            assert!(answer.contains(line), "{line} is not in\n{answer}");
        }
    }

    #[tokio::test]
    async fn other_requests_get_what_http_says() {
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
            ("HEAD /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("garbage\r\n\r\n", "HTTP/1.1 400"),
        ] {
            let answer = scrape(request, Metrics::new()).await;
            assert!(answer.starts_with(status), "{request:?}: {answer}");
        }
        // As long as a head may be, and no end in sight; and more fields than there may be.
        let (long, many) =
            (format!("GET /{}", "a".repeat(4_091)), format!("GET / HTTP/1.1\r\n{}\r\n", "a:b\r\n".repeat(33)));
        for request in [long, many] {
            let answer = scrape(&request, Metrics::new()).await;
            assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_plain_scrape_is_the_older_format_and_readiness_says_what_is_missing() {
        let metrics = Metrics::new();
        let answer = scrape("GET /metrics HTTP/1.1\r\nAccept: */*\r\n\r\n", metrics.clone()).await;
        assert!(answer.contains("Content-Type: text/plain; version=0.0.4"), "{answer}");
        assert!(answer.contains("# TYPE paced_misdirected_packets_total counter") && !answer.contains("# EOF"));
        let ready = async || scrape("GET /readyz HTTP/1.1\r\n\r\n", metrics.clone()).await;
        let answer = ready().await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("\r\n\r\nstarting\n"), "{answer}");
        metrics.ready.reach(crate::ready::Stage::Serving);
        assert!(ready().await.ends_with("\r\n\r\nready\n"));
        metrics.ready.reach(crate::ready::Stage::Draining);
        assert!(ready().await.ends_with("\r\n\r\ndraining\n"));
    }
}
