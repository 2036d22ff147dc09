//! The registry of all counters and gauges, and the endpoint that serves them. Each part of the daemon keeps its own
//! counters.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::Registry,
};
use role::{
    accept::{AcceptCounters, Acceptor},
    labelled,
    ready::Readiness,
};
use tokio::{net::TcpListener, sync::Semaphore, task::AbortHandle, time::timeout};

use self::process::ProcessMetrics;
use crate::{certificates::Certificate, parts::Parts};

pub mod page;
mod process;

/// The registry of the counters of all parts of the daemon, and the endpoint that serves it.
pub struct Metrics {
    registry: Registry,
    /// Metrics with conventional names, without the prefix `paced`.
    conventional: Registry,
    reloads: Family<[(&'static str, &'static str); 1], Counter>,
    certificates: Family<Vec<(&'static str, String)>, Gauge>,
}

impl Metrics {
    /// Returns the metrics of these parts.
    #[must_use]
    pub fn new(parts: &Parts) -> Arc<Self> {
        let mut metrics = Self {
            registry: Registry::with_prefix("paced"),
            conventional: Registry::default(),
            reloads: Family::default(),
            certificates: Family::default(),
        };
        metrics.conventional.register_collector(Box::new(ProcessMetrics::new()));
        parts.gateway.register_conventional(&mut metrics.conventional);
        metrics.register_own();
        let registry = &mut metrics.registry;
        parts.relay.register(registry);
        parts.usages.register(registry);
        parts.gateway.register(registry);
        parts.decisions.register(registry);
        parts.edge.register(registry);
        let help = "Packets padded to their full size, to prove that the path still carries this size";
        let [relay, edge] = [&parts.relay.datagrams.filled_up, &parts.edge.metrics.datagrams.filled_up];
        labelled::register(
            registry,
            "filled_up_packets",
            help,
            &[([("role", "relay")], relay), ([("role", "edge")], edge)],
        );
        parts.classes.register(registry);
        parts.packets.register(registry);
        parts.qdiscs.register(registry);
        parts.kernel.register(registry);
        parts.doors.register(registry);
        parts.access.register(registry);
        Arc::new(metrics)
    }

    fn register_own(&mut self) {
        let registry = &mut self.registry;
        registry.register("build", "The version of this paced", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        let help = "Reloads of the configuration, or of files that it names, by result";
        registry.register("reloads", help, self.reloads.clone());
        // Created at zero: `increase` in a query does not count a series that first appears as 1.
        for result in ["applied", "refused"] {
            drop(self.reloads.get_or_create(&[("result", result)]));
        }
        let help = "When certificates expire, in seconds since 1970";
        registry.register("certificate_expires_timestamp_seconds", help, self.certificates.clone());
    }

    /// Counts a reload, which is applied or refused as a whole.
    pub fn reloaded(&self, is_applied: bool) {
        self.reloads.get_or_create(&[("result", if is_applied { "applied" } else { "refused" })]).inc();
    }

    /// Replaces the gauges of certificates' expiry times.
    pub fn set_certificates(&self, certificates: &[Certificate]) {
        self.certificates.clear();
        for Certificate { used_by, address, file, expires } in certificates {
            // The file tells hops apart that share a local address, and a forward of UDP from one of TCP.
            let [used_by, address, file] = [(*used_by).to_owned(), address.to_string(), file.display().to_string()];
            let labels = vec![("used_by", used_by), ("address", address), ("file", file)];
            let expires = expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            self.certificates.get_or_create(&labels).set(i64::try_from(expires).unwrap_or(i64::MAX));
        }
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

/// How long a scraper may take to send its request and receive the answer.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

/// How many scrapes run at once; further ones wait.
const SCRAPES: usize = 8;

/// The sources of the pages for scrapers and orchestrators.
#[derive(Clone)]
pub struct PageSources {
    /// The registry.
    pub metrics: Arc<Metrics>,
    /// Whether the daemon is ready for work.
    pub ready: Arc<Readiness>,
}

/// An address where metrics are served, until this is dropped.
pub struct MetricsPage {
    address: SocketAddr,
    task: AbortHandle,
}

impl MetricsPage {
    /// Serves pages at an address, on the current runtime. `doors` counts failures to accept scrapers.
    ///
    /// # Errors
    /// The address is taken, or is not an address of this machine.
    pub fn open(address: SocketAddr, sources: PageSources, doors: &AcceptCounters) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let acceptor = Acceptor::new("metrics", doors);
        let task = tokio::spawn(serve(TcpListener::from_std(listener)?, sources, acceptor)).abort_handle();
        Ok(Self { address, task })
    }

    /// Returns the address, as configured.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsPage {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves [`page`]s over HTTP/1.1, one request per connection, until dropped.
pub async fn serve(listener: TcpListener, sources: PageSources, mut acceptor: Acceptor) {
    let scrapes = Arc::new(Semaphore::new(SCRAPES));
    loop {
        let Ok(place) = scrapes.clone().acquire_owned().await else { return };
        let (stream, _) = acceptor.next(|| listener.accept()).await;
        let sources = sources.clone();
        tokio::spawn(async move {
            // An error here is the scraper's: it gave up or broke the rules of HTTP.
            _ = timeout(SCRAPE_TIMEOUT, page::answer(stream, &sources)).await;
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use masque::request::TunnelProtocol;
    use relay::udp_target::UplinkCounters;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    fn sources(parts: &Parts) -> PageSources {
        PageSources { metrics: Metrics::new(parts), ready: parts.ready.clone() }
    }

    async fn scrape(request: &str, sources: PageSources) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = Acceptor::new("metrics", &AcceptCounters::default());
        let server = tokio::spawn(serve(listener, sources, acceptor));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        server.abort();
        answer
    }

    #[tokio::test]
    async fn a_scrape_shows_what_was_counted() {
        let parts = Parts::default();
        let relay = &parts.relay;
        relay.refused("port_prohibited");
        relay.opened(TunnelProtocol::Udp, None);
        relay.add_uplink(&UplinkCounters { sent: 3, sent_bytes: 3600, messages: 1, ..UplinkCounters::default() });
        relay.handshakes.completed.inc();
        let asked = "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n";
        let answer = scrape(asked, sources(&parts)).await;
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

    #[test]
    fn certificates_at_one_address_each_have_their_own_gauge() {
        let metrics = Metrics::new(&Parts::default());
        let certificates = [("one", 100), ("two", 200)].map(|(file, seconds)| Certificate {
            used_by: "hop",
            address: "127.0.0.1:5353".parse().unwrap(),
            file: file.into(),
            expires: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        });
        metrics.set_certificates(&certificates);
        let page = metrics.encode().unwrap();
        for sample in ["file=\"one\"} 100", "file=\"two\"} 200"] {
            assert!(page.contains(sample), "{page}");
        }
    }

    #[tokio::test]
    async fn other_requests_get_what_http_says() {
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
            ("HEAD /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("GET http://relay.example/healthz?x HTTP/1.1\r\n\r\n", "HTTP/1.1 200"),
            ("garbage\r\n\r\n", "HTTP/1.1 400"),
        ] {
            let answer = scrape(request, sources(&Parts::default())).await;
            assert!(answer.starts_with(status), "{request:?}: {answer}");
        }
        // The head has the maximum length but does not end; and the request has more fields than allowed.
        let (long, many) =
            (format!("GET /{}", "a".repeat(8_187)), format!("GET / HTTP/1.1\r\n{}\r\n", "a:b\r\n".repeat(33)));
        for request in [long, many] {
            let answer = scrape(&request, sources(&Parts::default())).await;
            assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        }
    }

    #[tokio::test]
    async fn one_request_has_one_answer_even_from_a_scraper_that_closed_its_side() {
        let (mut scraper, ours) = tokio::io::duplex(1 << 16);
        scraper.write_all(b"HEAD /healthz HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n").await.unwrap();
        scraper.shutdown().await.unwrap();
        page::answer(ours, &sources(&Parts::default())).await.unwrap();
        let mut answer = String::new();
        scraper.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        assert!(
            answer.contains("\r\nContent-Length: 3\r\n") && answer.contains("\r\nConnection: close\r\n"),
            "{answer}"
        );
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    }

    #[tokio::test]
    async fn a_plain_scrape_is_the_older_format_and_readiness_says_what_is_missing() {
        let parts = Parts::default();
        let sources = sources(&parts);
        let answer = scrape("GET /metrics HTTP/1.1\r\nAccept: */*\r\n\r\n", sources.clone()).await;
        assert!(answer.contains("Content-Type: text/plain; version=0.0.4"), "{answer}");
        assert!(answer.contains("# TYPE paced_misdirected_packets_total counter") && !answer.contains("# EOF"));
        let ready = async || scrape("GET /readyz HTTP/1.1\r\n\r\n", sources.clone()).await;
        let answer = ready().await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("\r\n\r\nstarting\n"), "{answer}");
        parts.ready.reach(role::ready::LifeStage::Serving);
        assert!(ready().await.ends_with("\r\n\r\nready\n"));
        parts.ready.reach(role::ready::LifeStage::Draining);
        assert!(ready().await.ends_with("\r\n\r\ndraining\n"));
    }
}
