//! Connections to the engines of a model: plain or with TLS 1.3, over HTTP/1.1 or, if TLS negotiates it (ALPN), HTTP/2.
//!
//! An engine may close an idle connection just when the gateway sends the next request on it. That is not a failure of the engine, so
//! the gateway tries the request once more on a new connection. RFC 9112 §9.3.1 and RFC 9110 §9.2.2 allow this if a client knows that
//! its request is idempotent, whatever the method: a POST for tokens changes nothing at an engine, and only unseen tokens are lost. An
//! idle connection need not have carried a request: if another connection becomes free first, the request that asked for a new one
//! does not use it. If the connection was made for the request and closes before the answer, that counts as a failure of the engine.

use std::{collections::HashMap, error::Error as _, fmt::Write as _, io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use config::gateway::ModelSettings;
use hyper::{Request, Response, Uri, body::Incoming};
use hyper_rustls::{HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection, HttpConnector, HttpInfo},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use openai::RenamedBody;
use parking_lot::Mutex;
use quic::tls::{self, Trust};
use tokio::{net::TcpStream, time::Instant};
use tower::{
    BoxError,
    timeout::Timeout,
    util::{BoxCloneSyncService, MapResponse},
};

/// How long a connection may take, including its TLS handshake, until it can carry requests.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection without requests is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// How often an engine that works on requests over HTTP/2 is probed (PING, RFC 9113 §6.7), and how long it may take to answer.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(10));

/// How many bytes of one answer an engine may send over HTTP/2 before the client has taken them. Over HTTP/1.1, the kernel's buffers
/// are that bound.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// The maximum size of an answer's head, in bytes.
const HEAD_BYTES: u32 = 64 << 10;

/// Makes connections.
type Connector = BoxCloneSyncService<Uri, MaybeHttpsStream<TokioIo<TcpStream>>, BoxError>;

/// The engines of a model, for requests by HTTP. All requests share the connections.
#[derive(Clone, Debug)]
pub struct Upstream {
    pooled: Client<Connector, RenamedBody>,
    /// Makes a new connection for each request.
    fresh: Client<Connector, RenamedBody>,
    made: Arc<Mutex<Made>>,
}

/// When connections were made, by their local addresses. A request that began later gets a second try if its connection ends.
#[derive(Debug, Default)]
struct Made(HashMap<SocketAddr, Instant>);

/// An address is not forgotten when its connection ends, so without this maximum there would finally be one for each port.
const MOST_MADE: usize = 4_096;

/// Why there is no answer, with the cause as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// There is no connection: no server listens there, or its certificate is not trusted.
    OutOfReach(String),
    /// The connection ended, or carried something other than HTTP.
    Closed(String),
}

impl Upstream {
    /// Prepares requests to the engines of a model. Connects only when a request is sent.
    ///
    /// # Errors
    /// An engine needs TLS, but `ca_file` or the system has no usable authorities.
    pub fn new(model: &ModelSettings) -> Result<Self> {
        Self::with_timeout(model, CONNECT_TIMEOUT)
    }

    fn with_timeout(model: &ModelSettings, connect_timeout: Duration) -> Result<Self> {
        let trust = match &model.ca_file {
            Some(file) => Trust::Authorities(tls::read_certificates(file)?),
            None if model.engines.iter().any(|engine| engine.is_tls) => Trust::System,
            // No engine uses TLS, so no certificate is ever checked against this.
            None => Trust::Pinned([0; 32]),
        };
        let config = tls::client_over_tcp(trust);
        let config = config.with_context(|| format!("failed to prepare TLS to the engines of {}", model.name))?;
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http()
            .enable_all_versions()
            .wrap_connector(tcp);
        // A client that stops reading its answer fills only the window of that answer. The connection's window has room for the windows of
        // all answers at once. Otherwise, such a client would block other clients' tokens on the same connection.
        let connection_window =
            STREAM_WINDOW_BYTES.saturating_mul(model.max_in_flight.saturating_add(1)).min(i32::MAX as u32);
        let made = Arc::<Mutex<Made>>::default();
        let connected = made.clone();
        let connector = MapResponse::new(connector, move |stream: MaybeHttpsStream<_>| {
            connected.lock().note(&stream);
            stream
        });
        let connector = Connector::new(Timeout::new(connector, connect_timeout));
        let mut client = Client::builder(TokioExecutor::new());
        client
            .pool_idle_timeout(IDLE_TIMEOUT)
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http1_max_buf_size(HEAD_BYTES as usize)
            .http2_max_header_list_size(HEAD_BYTES)
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(connection_window)
            .http2_keep_alive_interval(KEEP_ALIVE.0)
            .http2_keep_alive_timeout(KEEP_ALIVE.1);
        let pooled = client.build(connector.clone());
        let fresh = client.pool_max_idle_per_host(0).build(connector);
        Ok(Self { pooled, fresh, made })
    }

    /// Sends a request and waits for the head of the answer, without a limit in time. Dropping the future cancels the request. The
    /// request may be sent twice, if a connection that was made before ends without any answer.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn ask(&self, request: Request<RenamedBody>) -> Result<Response<Incoming>, Unanswered> {
        let began = Instant::now();
        // The body is reference-counted, not copied.
        let error = match self.pooled.request(request.clone()).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let address = error.connect_info().and_then(local_address);
        let made = address.and_then(|address| self.made.lock().0.get(&address).copied());
        if made.is_none_or(|made| made >= began) || !has_ended(&error) {
            return Err(unanswered(&error));
        }
        self.fresh.request(request).await.map_err(|error| unanswered(&error))
    }
}

impl Made {
    fn note(&mut self, stream: &impl Connection) {
        if self.0.len() >= MOST_MADE {
            // A request on a forgotten connection gets no second try.
            self.0.clear();
        }
        self.0.extend(local_address(&stream.connected()).map(|address| (address, Instant::now())));
    }
}

fn local_address(connected: &Connected) -> Option<SocketAddr> {
    let mut extras = hyper::http::Extensions::new();
    connected.get_extras(&mut extras);
    extras.get::<HttpInfo>().map(HttpInfo::local_addr)
}

/// Whether the connection ended before the head of the answer was complete.
fn has_ended(error: &hyper_util::client::legacy::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message) {
            return true;
        }
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        // The last one: TLS without a `close_notify` (RFC 8446 §6.1).
        let ends = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe, io::ErrorKind::UnexpectedEof];
        if kind.is_some_and(|kind| ends.contains(&kind)) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn unanswered(error: &hyper_util::client::legacy::Error) -> Unanswered {
    let why = causes(error);
    if error.is_connect() { Unanswered::OutOfReach(why) } else { Unanswered::Closed(why) }
}

impl Unanswered {
    /// Returns the cause as text.
    #[must_use]
    pub fn why(&self) -> &str {
        match self {
            Self::OutOfReach(why) | Self::Closed(why) => why,
        }
    }
}

/// Returns the texts of an error's causes, each once. hyper's own text about where the error happened does not help an operator.
fn causes(error: &hyper_util::client::legacy::Error) -> String {
    let (mut said, mut cause) = (String::new(), error.source());
    while let Some(error) = cause {
        let words = error.to_string();
        if !said.contains(&words) {
            // Writing to a string cannot fail.
            _ = write!(said, "{}{words}", if said.is_empty() { "" } else { ": " });
        }
        cause = error.source();
    }
    if said.is_empty() { error.to_string() } else { said }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, net::SocketAddr, path::PathBuf, sync::Arc};

    use bytes::Bytes;
    use http_body_util::Full;
    use hyper::{
        server::conn::{http1, http2},
        service::service_fn,
    };
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use rustls::ServerConfig;
    use rustls_pki_types::PrivateKeyDer;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// The socket of an engine with TLS, whose certificate names `name`, and which speaks the protocols of `alpn`. Also returns a file
    /// with its certificate.
    async fn tls_listener(name: &str, alpn: &[&str]) -> (TcpListener, TlsAcceptor, PathBuf) {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed([name.to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let file = std::env::temp_dir().join(format!("paced-engine-{}-{}.pem", std::process::id(), address.port()));
        std::fs::write(&file, cert.pem()).unwrap();
        (listener, TlsAcceptor::from(Arc::new(config)), file)
    }

    /// An engine that answers with the request's HTTP version. Returns its address, and a file with its certificate.
    async fn engine(name: &str, alpn: &[&str]) -> (SocketAddr, PathBuf) {
        let (listener, acceptor, file) = tls_listener(name, alpn).await;
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let answer = service_fn(async |request: Request<Incoming>| {
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(format!("{:?}", request.version())))))
                });
                let io = TokioIo::new(stream);
                tokio::spawn(async move {
                    match is_h2 {
                        true => _ = http2::Builder::new(TokioExecutor::new()).serve_connection(io, answer).await,
                        false => _ = http1::Builder::new().serve_connection(io, answer).await,
                    }
                });
            }
        });
        (address, file)
    }

    fn model(url: &str, ca_file: Option<PathBuf>) -> ModelSettings {
        ModelSettings {
            name: "large".into(),
            engine_name: "large".into(),
            engines: vec![url.parse().unwrap()],
            gpus: None,
            key_file: None,
            ca_file,
            health_path: None,
            metrics_path: None,
            max_in_flight: 4,
            max_waiting: 0,
            affinity: false,
            ask_usage: false,
            quality_percent: 100,
        }
    }

    async fn ask(upstream: &Upstream, url: &str) -> Result<String, Unanswered> {
        use http_body_util::BodyExt as _;
        let request = Request::get(format!("{url}/health")).body(RenamedBody::default()).unwrap();
        let body = upstream.ask(request).await?.into_body().collect().await.unwrap().to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn an_engine_is_asked_by_the_newest_protocol_that_it_offers() {
        for (alpn, version) in [
            (&["h2", "http/1.1"][..], "HTTP/2.0"),
            (&["http/1.1"], "HTTP/1.1"),
            (&[], "HTTP/1.1"),
            (&["h2"], "HTTP/2.0"),
        ] {
            let (address, file) = engine("localhost", alpn).await;
            let url = format!("https://localhost:{}", address.port());
            let upstream = Upstream::new(&model(&url, Some(file.clone()))).unwrap();
            assert_eq!(ask(&upstream, &url).await.as_deref(), Ok(version), "{alpn:?}");
            std::fs::remove_file(file).unwrap();
        }
    }

    #[tokio::test]
    async fn a_certificate_that_is_not_trusted_or_anothers_is_named_as_the_cause() {
        let (address, file) = engine("other.example", &["h2"]).await;
        let url = format!("https://localhost:{}", address.port());
        let why = async |ca_file| match ask(&Upstream::new(&model(&url, ca_file)).unwrap(), &url).await {
            Err(Unanswered::OutOfReach(why)) => why,
            other => panic!("{other:?}"),
        };
        let anothers = why(Some(file.clone())).await;
        assert!(anothers.contains("not valid for name") && anothers.contains("other.example"), "{anothers}");
        let (_, unrelated) = engine("localhost", &[]).await;
        let unknown = why(Some(unrelated.clone())).await;
        // If the authority has the same name, only the signature does not match.
        assert!(unknown.contains("UnknownIssuer") || unknown.contains("BadSignature"), "{unknown}");
        for file in [file, unrelated] {
            std::fs::remove_file(file).unwrap();
        }
    }

    #[tokio::test]
    async fn an_engine_that_takes_connections_and_says_nothing_is_out_of_reach_after_the_timeout() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://localhost:{}", silent.local_addr().unwrap().port());
        let (_, file) = engine("localhost", &[]).await;
        let upstream = Upstream::with_timeout(&model(&url, Some(file.clone())), Duration::from_millis(20)).unwrap();
        assert!(matches!(ask(&upstream, &url).await, Err(Unanswered::OutOfReach(_))));
        std::fs::remove_file(file).unwrap();
    }

    /// An engine whose connections each read the given number of requests and answer all but the last, on which they end. Also
    /// returns how many requests it has read.
    async fn forgetful(requests: &'static [usize]) -> (String, Arc<std::sync::atomic::AtomicUsize>) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let read = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = read.clone();
        tokio::spawn(async move {
            for requests in requests {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 4096];
                for left in (0..*requests).rev() {
                    if stream.read(&mut buffer).await.unwrap() == 0 {
                        break;
                    }
                    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if left > 0 {
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                    }
                }
            }
        });
        (url, read)
    }

    #[tokio::test]
    async fn a_connection_without_requests_is_closed_after_a_while() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let kept = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 4096];
            assert!(stream.read(&mut buffer).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            stream.read(&mut buffer).await.unwrap()
        });
        let upstream = Upstream::new(&model(&url, None)).unwrap();
        assert_eq!(ask(&upstream, &url).await.as_deref(), Ok("ok"));
        tokio::time::pause();
        let end = tokio::time::timeout(10 * IDLE_TIMEOUT, kept).await;
        assert_eq!(end.expect("the connection is closed").unwrap(), 0);
    }

    #[tokio::test]
    async fn a_request_on_a_kept_connection_that_ends_without_an_answer_is_asked_once_more_on_a_new_one() {
        let (url, read) = forgetful(&[2, 2, 1]).await;
        let upstream = Upstream::new(&model(&url, None)).unwrap();
        for requests in [1, 3] {
            assert_eq!(ask(&upstream, &url).await.as_deref(), Ok("ok"));
            // The pool has the connection back shortly after the answer.
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(read.load(std::sync::atomic::Ordering::Relaxed), requests);
        }
        assert!(
            matches!(ask(&upstream, &url).await, Err(Unanswered::Closed(_))),
            "a new connection that ends is the engine's"
        );
        assert_eq!(read.load(std::sync::atomic::Ordering::Relaxed), 4, "and nothing is asked twice for that");
    }

    #[tokio::test]
    async fn a_connection_that_no_request_has_used_may_end_too() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        const KEPT: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        const LAST: &[u8] = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";
        async fn answer(stream: &mut tokio_rustls::server::TlsStream<TcpStream>, answer: &[u8]) {
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(answer).await.unwrap();
        }
        let (listener, acceptor, file) = tls_listener("localhost", &[]).await;
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let (ended, mut has_ended) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let mut first = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
            // Two requests need two connections, but the first is free again before the second is ready.
            let (second, _) = listener.accept().await.unwrap();
            answer(&mut first, KEPT).await;
            answer(&mut first, KEPT).await;
            let mut second = acceptor.accept(second).await.unwrap();
            tokio::spawn(async move {
                assert!(second.read(&mut [0; 4096]).await.unwrap() > 0);
                ended.send(()).unwrap();
            });
            answer(&mut first, LAST).await;
            loop {
                let mut other = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
                answer(&mut other, LAST).await;
            }
        });
        let upstream = Upstream::new(&model(&url, Some(file.clone()))).unwrap();
        let (one, two) = tokio::join!(ask(&upstream, &url), ask(&upstream, &url));
        assert_eq!([one.as_deref(), two.as_deref()], [Ok("ok"); 2]);
        for _ in 0..1_000 {
            assert_eq!(ask(&upstream, &url).await.as_deref(), Ok("ok"));
            if has_ended.try_recv().is_ok() {
                return std::fs::remove_file(file).unwrap();
            }
        }
        panic!("no request was sent on the connection that none has used");
    }

    #[test]
    fn authorities_that_cannot_be_used_are_named() {
        let missing = PathBuf::from("/nonexistent/ca.pem");
        let error = Upstream::new(&model("https://localhost:1", Some(missing))).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/ca.pem"), "{error:#}");
    }
}
