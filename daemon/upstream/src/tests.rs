//! Requests to engines over real connections of the loopback device.

use std::{convert::Infallible, net::SocketAddr, path::PathBuf, sync::Arc};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::client::legacy::connect::dns::Name;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::ServerConfig;
use rustls_pki_types::PrivateKeyDer;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tower::Service;

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
    let model = ModelSettings::new("large", vec![url.parse().unwrap()]);
    ModelSettings { ca_file, max_in_flight: 4, max_waiting: 0, affinity: false, ..model }
}

async fn ask(upstream: &Upstream, url: &str) -> Result<String, Unanswered> {
    use http_body_util::BodyExt as _;
    let request = Request::get(format!("{url}/health")).body(RenamedBody::default()).unwrap();
    let body = upstream.ask(request, &mut Dispatch::default()).await?.into_body().collect().await.unwrap().to_bytes();
    Ok(String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn an_engine_is_asked_by_the_newest_protocol_that_it_offers() {
    for (alpn, version) in
        [(&["h2", "http/1.1"][..], "HTTP/2.0"), (&["http/1.1"], "HTTP/1.1"), (&[], "HTTP/1.1"), (&["h2"], "HTTP/2.0")]
    {
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

#[tokio::test(start_paused = true)]
async fn an_engine_whose_first_address_is_silent_is_reached_at_its_second() {
    // One connection that is not accepted fills its queue, and the kernel drops the next ones.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let silent = silent.listen(0).unwrap();
    let _first = TcpStream::connect(silent.local_addr().unwrap()).await.unwrap();
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [&silent, &engine].map(|listener| listener.local_addr().unwrap());
    let resolver = tower::service_fn(move |_: Name| async move { Ok::<_, Infallible>(addresses.into_iter()) });
    let began = Instant::now();
    let connecting = Service::call(&mut tcp(resolver, CONNECT_TIMEOUT), Uri::from_static("http://engine.example"));
    let connection = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.unwrap().unwrap();
    assert_eq!(connection.inner().peer_addr().unwrap(), addresses[1]);
    assert_eq!(began.elapsed(), CONNECT_TIMEOUT * 2 / 5, "half of the time for TCP");
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
    const KEPT: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    const LAST: &[u8] = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";
    async fn answer(stream: &mut TlsStream<TcpStream>, answer: &[u8]) {
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

/// The types of HTTP/2 frames (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// The flags of a frame that ends its stream, and of one that ends a block of fields.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `:status: 200` (RFC 7541, appendix A).
const OK: &[u8] = &[0x88];

/// The engine's end of an HTTP/2 connection, frame by frame.
struct EngineFrames(TlsStream<TcpStream>);

impl EngineFrames {
    async fn accept(listener: &TcpListener, acceptor: &TlsAcceptor) -> Self {
        let mut stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let mut engine = Self(stream);
        engine.send(SETTINGS, 0, 0, &[]).await;
        engine
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let frame = [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat();
        self.0.write_all(&frame).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// Waits for a frame of this type; returns its stream.
    async fn next(&mut self, kind: u8) -> u32 {
        loop {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.unwrap();
            let [high, middle, low, found, _, stream @ ..] = head;
            let length = u32::from_be_bytes([0, high, middle, low]);
            self.0.read_exact(&mut vec![0; length as usize]).await.unwrap();
            if found == kind {
                return u32::from_be_bytes(stream);
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_an_engine_has_not_processed_is_asked_once_more_on_a_new_connection_however_new_the_first() {
    let stops_before_it = (GOAWAY, 0, [[0; 4], [0; 4]].concat());
    let refused = (RST_STREAM, 1, vec![0, 0, 0, 7]);
    let may_have_read_it = (GOAWAY, 0, [[0, 0, 0, 1], [0; 4]].concat());
    let failed = (RST_STREAM, 1, vec![0, 0, 0, 2]);
    for (frame, is_repeated) in [(stops_before_it, true), (refused, true), (may_have_read_it, false), (failed, false)] {
        let (listener, acceptor, file) = tls_listener("localhost", &["h2"]).await;
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let upstream = Upstream::new(&model(&url, Some(file.clone()))).unwrap();
        let text = format!("{frame:?}");
        let engine = async {
            let mut first = EngineFrames::accept(&listener, &acceptor).await;
            assert_eq!(first.next(HEADERS).await, 1);
            let (kind, stream, payload) = frame;
            first.send(kind, 0, stream, &payload).await;
            drop(first);
            let mut second = EngineFrames::accept(&listener, &acceptor).await;
            let stream = second.next(HEADERS).await;
            second.send(HEADERS, END_HEADERS, stream, OK).await;
            second.send(DATA, END_STREAM, stream, b"ok").await;
            std::future::pending::<()>().await;
        };
        let asked = ask(&upstream, &url);
        tokio::select! {
            answer = asked => match is_repeated {
                true => assert_eq!(answer.as_deref(), Ok("ok"), "{text}"),
                false => assert!(matches!(answer, Err(Unanswered::Closed(_))), "{text}: {answer:?}"),
            },
            () = engine => {}
        }
        std::fs::remove_file(file).unwrap();
    }
}

#[tokio::test]
async fn clients_that_leave_at_once_do_not_end_the_answers_of_others_on_their_connection() {
    const CLIENTS: usize = 1_200;
    let (listener, acceptor, file) = tls_listener("localhost", &["h2"]).await;
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let model = ModelSettings { max_in_flight: CLIENTS as u32, ..model(&url, Some(file.clone())) };
    let upstream = Upstream::new(&model).unwrap();
    let engine = async {
        let mut engine = EngineFrames::accept(&listener, &acceptor).await;
        for _ in 0..CLIENTS {
            let stream = engine.next(HEADERS).await;
            engine.send(HEADERS, END_HEADERS, stream, OK).await;
        }
        let mut left = Vec::new();
        for _ in 1..CLIENTS {
            left.push(engine.next(RST_STREAM).await);
        }
        // Tokens that were on their way when the clients left.
        for stream in left {
            engine.send(DATA, 0, stream, b"x").await;
        }
        engine.send(DATA, END_STREAM, 1, b"ok").await;
        engine.next(GOAWAY).await
    };
    let clients = async {
        let begin = || async {
            let request = Request::get(format!("{url}/health")).body(RenamedBody::default()).unwrap();
            upstream.ask(request, &mut Dispatch::default()).await.unwrap().into_body()
        };
        let kept = begin().await;
        let left: Vec<_> = futures::future::join_all((1..CLIENTS).map(|_| begin())).await;
        drop(left);
        http_body_util::BodyExt::collect(kept).await.unwrap().to_bytes()
    };
    tokio::select! {
        answer = clients => assert_eq!(&answer[..], b"ok"),
        _ = engine => panic!("the connection ended before the answer was read"),
    }
    std::fs::remove_file(file).unwrap();
}

#[test]
fn authorities_that_cannot_be_used_are_named() {
    let missing = PathBuf::from("/nonexistent/ca.pem");
    let error = Upstream::new(&model("https://localhost:1", Some(missing))).unwrap_err();
    assert!(format!("{error:#}").contains("/nonexistent/ca.pem"), "{error:#}");
}

#[tokio::test]
async fn a_shortage_of_this_host_is_told_from_an_engine_out_of_reach_with_what_to_change() {
    let url = "http://127.0.0.1:1";
    for (code, change) in [
        (Errno::MFILE, Some("LimitNOFILE=")),
        (Errno::NFILE, Some("fs.file-max")),
        (Errno::ADDRNOTAVAIL, Some("net.ipv4.ip_local_port_range")),
        (Errno::NOBUFS, Some("memory")),
        (Errno::NOMEM, Some("memory")),
        (Errno::CONNREFUSED, None),
        (Errno::HOSTUNREACH, None),
    ] {
        let failing = tower::service_fn(move |_: Uri| async move { Err(BoxError::from(io::Error::from(code))) });
        let client = Client::builder(TokioExecutor::new()).build(Connector::new(failing));
        let upstream = Upstream { pooled: client.clone(), fresh: client };
        match (ask(&upstream, url).await, change) {
            (Err(Unanswered::Shortage(why)), Some(change)) => assert!(why.contains(change), "{why}"),
            (Err(Unanswered::OutOfReach(_)), None) => {}
            (answer, _) => panic!("{code}: {answer:?}"),
        }
    }
}
