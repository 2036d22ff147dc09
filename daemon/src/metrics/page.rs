//! The endpoint for scrapers, orchestrators and people, and its pages: one request per connection, of bounded length.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | all metrics, as OpenMetrics if requested, else as text 0.0.4 |
//! | `/healthz` | 200 while the daemon answers at all |
//! | `/readyz` | 200 while it is ready for work, else 503 with a line for each missing part |

use std::{
    convert::Infallible,
    fmt::{self, Write as _},
    io,
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use hyper::{
    Method, Request, Response, StatusCode,
    header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, VARY},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use role::{
    accept::{AcceptCounters, Acceptor},
    ready::Readiness,
    unidentified_callers::UnidentifiedCallers,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::oneshot,
    task::{AbortHandle, yield_now},
    time::timeout,
};

use super::Metrics;

/// The longest request head that is read; hyper takes no smaller bound.
const REQUEST_BYTES: usize = 8192;

/// How many header fields a request may have.
const FIELDS: usize = 32;

/// How long a scraper may take to send its request and receive the answer.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

/// How many connections there are at once, and from one address or /64. A further one displaces the oldest of its address, or of the address
/// with the most, so that connections without a request hold up no scrape.
const SCRAPES: (usize, usize) = (64, 32);

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
        let serving = serve(TcpListener::from_std(listener)?, sources, (acceptor, doors.clone()));
        let task = tokio::spawn(serving).abort_handle();
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

/// Serves the pages over HTTP/1.1, one request per connection, until dropped. `doors` counts connections that others displace.
pub async fn serve(listener: TcpListener, sources: PageSources, (mut acceptor, doors): (Acceptor, AcceptCounters)) {
    let scrapes = Arc::new(Mutex::new(UnidentifiedCallers::<oneshot::Sender<Infallible>>::new(SCRAPES.0, SCRAPES.1)));
    loop {
        let (stream, from) = acceptor.next(|| listener.accept()).await;
        let (stay, leave) = oneshot::channel();
        // Dropping the sender ends the task of a displaced connection.
        let (number, displaced) = scrapes.lock().enter(from.ip(), stay);
        if displaced.is_some() {
            doors.displaced_scrape();
        }
        let (sources, scrapes) = (sources.clone(), scrapes.clone());
        tokio::spawn(async move {
            tokio::select! {
                // A request that has arrived is answered, whatever came after it.
                biased;
                // An error here is the scraper's: it gave up or broke the rules of HTTP.
                _ = timeout(SCRAPE_TIMEOUT, answer(stream, &sources)) => {}
                _ = leave => {}
            }
            scrapes.lock().leave(number);
        });
        // Many may connect at once. Each gets a turn to be answered before the next ones displace it.
        yield_now().await;
    }
}

/// Reads a request and answers it. The caller must bound the time.
///
/// # Errors
/// The peer is gone, or broke the rules of HTTP and received an error response.
pub async fn answer(stream: impl AsyncRead + AsyncWrite + Unpin, sources: &PageSources) -> hyper::Result<()> {
    http1::Builder::new()
        .keep_alive(false)
        .half_close(true)
        .max_headers(FIELDS)
        .max_buf_size(REQUEST_BYTES)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), service_fn(|request| std::future::ready(page(&request, sources))))
        .await
}

fn page<B>(request: &Request<B>, sources: &PageSources) -> Result<Response<String>, fmt::Error> {
    const PLAIN: &str = "text/plain; charset=utf-8";
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut refusal = response(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "");
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return Ok(refusal);
    }
    Ok(match request.uri().path() {
        "/metrics" => {
            let accepts = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
            let text = sources.metrics.encode()?;
            let (kind, body) = match prefers_open_metrics(accepts) {
                true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", text),
                false => ("text/plain; version=0.0.4; charset=utf-8", to_text(&text)),
            };
            let mut page = response(StatusCode::OK, kind, body);
            page.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
            page
        }
        "/healthz" => response(StatusCode::OK, PLAIN, "ok\n"),
        "/readyz" => match sources.ready.missing() {
            missing if missing.is_empty() => response(StatusCode::OK, PLAIN, "ready\n"),
            missing => response(StatusCode::SERVICE_UNAVAILABLE, PLAIN, missing.join("\n") + "\n"),
        },
        _ => response(StatusCode::NOT_FOUND, PLAIN, "try /metrics, /healthz or /readyz\n"),
    })
}

fn response(status: StatusCode, kind: &'static str, body: impl Into<String>) -> Response<String> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns whether `Accept` names OpenMetrics 1.0.0 and prefers it at least as much as any other text (RFC 9110
/// §12.5.1).
fn prefers_open_metrics<'a>(accepts: impl Iterator<Item = &'a str>) -> bool {
    let (mut open, mut text) = (0.0_f32, 0.0_f32);
    for range in accepts.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let (mut quality, mut is_known) = (1.0, true);
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match (name.trim().to_ascii_lowercase().as_str(), value.trim().trim_matches('"')) {
                ("q", value) => quality = value.parse().unwrap_or(0.0),
                ("version", value) => is_known = matches!(value, "1.0.0" | "0.0.4"),
                _ => {}
            }
        }
        match kind.as_str() {
            "application/openmetrics-text" if is_known => open = open.max(quality),
            "text/plain" | "text/*" | "*/*" if is_known => text = text.max(quality),
            _ => {}
        }
    }
    open > 0.0 && open >= text
}

/// Converts OpenMetrics to the older text format, version 0.0.4: there, the names of counters and infos in comments
/// have the suffix of their samples, and there are neither units nor an end marker.
fn to_text(open_metrics: &str) -> String {
    let (mut text, mut help) = (String::with_capacity(open_metrics.len()), None);
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        // Writing to a string cannot fail.
        _ = match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), words) => {
                help = Some((name, words.unwrap_or_default()));
                Ok(())
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (ending, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                match help.take().filter(|(helped, _)| *helped == name) {
                    Some((_, words)) => writeln!(text, "# HELP {name}{ending} {words}\n# TYPE {name}{ending} {kind}"),
                    None => writeln!(text, "# TYPE {name}{ending} {kind}"),
                }
            }
            (Some("#"), ..) => Ok(()),
            _ => writeln!(text, "{line}"),
        };
    }
    text
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
    use crate::parts::Parts;

    fn sources(parts: &Parts) -> PageSources {
        PageSources { metrics: Metrics::new(parts), ready: parts.ready.clone() }
    }

    async fn scrape(request: &str, sources: PageSources) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let doors = AcceptCounters::default();
        let server = tokio::spawn(serve(listener, sources, (Acceptor::new("metrics", &doors), doors)));
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

    #[tokio::test]
    async fn silent_connections_make_room_for_a_request_and_hold_it_up_for_no_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, doors) = (listener.local_addr().unwrap(), AcceptCounters::default());
        let acceptor = Acceptor::new("metrics", &doors);
        let server = tokio::spawn(serve(listener, sources(&Parts::default()), (acceptor, doors.clone())));
        let mut silent = Vec::new();
        for _ in 0..200 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut prober = TcpStream::connect(address).await.unwrap();
        prober.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        // Less than the time after which a silent connection ends by itself.
        timeout(SCRAPE_TIMEOUT / 2, prober.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.ends_with("\r\n\r\nok\n"), "{answer}");
        // 32 of the 201 had room.
        assert_eq!(doors.displaced_scrapes(), 169);
        let mut first = silent.remove(0);
        assert_eq!(timeout(SCRAPE_TIMEOUT / 2, first.read(&mut [0])).await.unwrap().unwrap(), 0, "the oldest");
        server.abort();
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
        answer(ours, &sources(&Parts::default())).await.unwrap();
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

    #[test]
    fn open_metrics_is_for_those_who_name_it_and_like_nothing_better() {
        for (accept, expected) in [
            ("", false),
            ("*/*", false),
            ("text/html,application/xhtml+xml,*/*;q=0.8", false),
            ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", false),
            ("application/openmetrics-text", true),
            ("application/openmetrics-text;version=0.0.1", false),
            // The `Accept` of Prometheus 2.
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                 text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                true,
            ),
            ("application/openmetrics-text; version=\"1.0.0\"; q=0.2, text/plain; q=0.9", false),
            ("application/openmetrics-text;q=0", false),
            ("APPLICATION/OpenMetrics-Text;Version=1.0.0", true),
            (",;=,q=1;;", false),
        ] {
            assert_eq!(prefers_open_metrics([accept].into_iter()), expected, "{accept}");
        }
        assert!(prefers_open_metrics(["text/plain;q=0.1", "application/openmetrics-text"].into_iter()));
    }

    #[test]
    fn the_older_format_names_counters_as_their_samples_are_named() {
        let open = "# HELP a_bytes Bytes of \\\\ things.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
                    a_bytes_total{x=\"1 # HELP\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# HELP c C.\n# TYPE c info\n\
                    c_info{v=\"1\"} 1\n# HELP d D.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n# EOF\n";
        assert_eq!(
            to_text(open),
            "# HELP a_bytes_total Bytes of \\\\ things.\n# TYPE a_bytes_total counter\n\
             a_bytes_total{x=\"1 # HELP\"} 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# HELP c_info C.\n# TYPE c_info gauge\n\
             c_info{v=\"1\"} 1\n# HELP d D.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n"
        );
    }
}
