//! Clients of a gateway's own listener.

use config::{
    gateway::{GatewaySettings, Key},
    policy::Policy,
};
use http_body_util::BodyExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use quic::class::{ClassMarks, ClassMetrics, PolicyRole};
use role::access::served::DISPLACED;
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::mpsc,
};

use super::*;
use crate::{
    gateway::tests::samples::{key, model},
    learned::Learned,
};

/// A listener of a gateway that knows the keys "sk-1" and "sk-3" of two users and takes bodies of up to 1000 bytes, and the records of
/// ended requests.
fn hall() -> (Arc<Hall>, mpsc::UnboundedReceiver<Served>) {
    let other = Key { name: "bob".into(), sha256: Sha256::digest("sk-3").into(), ..key() };
    hall_of(vec![key(), other])
}

fn hall_of(keys: Vec<Key>) -> (Arc<Hall>, mpsc::UnboundedReceiver<Served>) {
    let classes =
        Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| ClassMarks::default());
    let models = vec![model("large")];
    let settings = GatewaySettings { models, keys, max_body_bytes: 1_000, ..GatewaySettings::default() };
    let shared = (Default::default(), &Arc::default());
    let gateway = Gateway::new(&settings, &classes, shared, (&Learned::default(), None)).unwrap();
    let (classes, (ends, ending), (ended, served)) =
        (Arc::new(classes), watch::channel(false), mpsc::unbounded_channel());
    let hall = Hall {
        shown: ShownCertificate::new(None),
        listener: ([127, 0, 0, 1], 80).into(),
        idle: Duration::from_secs(60),
        pages: PageRules::new(&[], ([127, 0, 0, 1], 80).into(), false),
        source: Arc::new(move || Some((gateway.clone(), classes.clone()))),
        on_served: Arc::new(move |request| {
            // The listener goes on as long as the sender lives.
            _ = ends.receiver_count();
            _ = ended.send(request);
        }),
        metrics: GatewayMetrics::default(),
        ending,
        is_cut: Arc::default(),
        newcomers: Newcomers::new(4, 4, KnownClients::new(([127, 0, 0, 1], 80).into(), Box::new(|| {}))),
    };
    (Arc::new(hall), served)
}

/// Sends these bytes to a listener; returns all that it sends.
async fn converse(hall: Arc<Hall>, bytes: &[u8]) -> io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let mut client = TcpStream::connect(listener.local_addr()?).await?;
    let (stream, from) = listener.accept().await?;
    tokio::spawn(hall.welcome(stream, from, None));
    client.write_all(bytes).await?;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn a_page_of_another_site_may_use_no_gateway_without_keys_and_any_client_with_a_key() {
    let head = "GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n";
    let keyed = converse(hall().0, format!("{head}authorization: Bearer sk-1\r\n\r\n").as_bytes()).await.unwrap();
    assert!(keyed.starts_with("HTTP/1.1 200 "), "{keyed}");
    let (hall, mut served) = hall_of(Vec::new());
    let refused = converse(hall.clone(), format!("{head}\r\n").as_bytes()).await.unwrap();
    assert!(refused.starts_with("HTTP/1.1 403 ") && refused.contains("\"unknown_host\""), "{refused}");
    let own = head.replace("evil.example", "localhost");
    let refused = converse(hall.clone(), format!("{own}origin: http://evil.example\r\n\r\n").as_bytes()).await;
    assert!(refused.as_ref().is_ok_and(|refused| refused.contains("\"foreign_page\"")), "{refused:?}");
    assert_eq!(served.recv().await.map(|served| (served.status, served.reason)), Some((Some(403), "unknown_host")));
    let answer = converse(hall, format!("{own}\r\n").as_bytes()).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// Sends a request with these fields and, without waiting, these bytes of its body; returns all that the gateway sends.
async fn send(fields: &str, body: &[u8]) -> io::Result<String> {
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n");
    converse(hall().0, &[head.as_bytes(), body].concat()).await
}

#[tokio::test]
async fn a_request_for_nothing_is_accepted_without_a_key_and_leaves_no_record() {
    let (hall, mut served) = hall();
    let requests = "OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answers = converse(hall, requests.as_bytes()).await.unwrap();
    assert!(answers.starts_with("HTTP/1.1 204 No Content\r\n"), "{answers}");
    assert!(answers.contains("\r\n\r\nHTTP/1.1 200 OK\r\n") && answers.ends_with("ok\n"), "{answers}");
    assert_eq!(served.recv().await.map(|served| served.operation), Some("health"));
    assert!(served.try_recv().is_err());
}

#[tokio::test]
async fn a_client_that_waits_for_100_and_is_refused_gets_the_refusal_alone_and_the_end_of_the_connection() {
    let (bad, good) = ("authorization: Bearer sk-2", "authorization: Bearer sk-1");
    for (key, len, status) in [(bad, 100, "401"), (good, 2_000, "413")] {
        let answer = send(&format!("{key}\r\ncontent-length: {len}\r\nexpect: 100-continue"), b"").await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(answer.contains("connection: close") && answer.ends_with("}}"), "{answer}");
    }
    let begin = format!("{good}\r\nconnection: close\r\ncontent-length: 2\r\nexpect: 100-continue");
    let answer = send(&begin, b"{}").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_sends_its_body_without_waiting_for_100_reads_the_refusal() {
    let body = vec![b'x'; 512 << 10];
    for _ in 0..4 {
        let fields = format!("content-length: {}\r\nexpect: 100-continue", body.len());
        let answer = send(&fields, &body).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 401 ") && answer.ends_with("}}"), "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_sends_all_of_a_body_that_is_too_large_reads_the_refusal() {
    let body = vec![b'x'; 8 << 20];
    let answer =
        send(&format!("authorization: Bearer sk-1\r\nconnection: close\r\ncontent-length: {}", body.len()), &body)
            .await
            .unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[test]
fn of_a_strangers_head_only_a_beginning_of_the_path_and_the_clients_id_are_kept() {
    let request = hyper::Request::post(format!("/v1/models/{}", "m".repeat(1 << 10))).header("x-request-id", "r-1");
    let request = (0..90).fold(request, |request, _| request.header("x-a", "x".repeat(100)));
    let head = refused_head(message::head(&request.body(()).unwrap().into_parts().0));
    assert_eq!((&head.method[..], head.path.as_ref().map(Bytes::len)), (&b"POST"[..], Some(256)));
    assert_eq!(head.fields, [Field::new("x-request-id", "r-1")]);
}

/// Serves up to four connections at once. Returns the address, the counters, and the records of ended requests.
fn open() -> (SocketAddr, GatewayMetrics, mpsc::UnboundedReceiver<Served>) {
    let (hall, served) = hall();
    let door = Door::new(door::bind(([127, 0, 0, 1], 0).into()).unwrap(), 4, || {}).unwrap();
    let address = door.address().unwrap();
    let Hall { shown, listener, idle, pages, source, on_served, metrics, ending, is_cut, .. } = &*hall;
    let front = Front {
        door,
        shown: shown.clone(),
        listener: *listener,
        idle: *idle,
        pages: pages.clone(),
        source: source.clone(),
        on_served: on_served.clone(),
        metrics: metrics.clone(),
        ending: ending.clone(),
        is_cut: is_cut.clone(),
    };
    tokio::spawn(front.run());
    (address, metrics.clone(), served)
}

/// Connects and sends a head with a key and these fields, and nothing more. Returns the connection after the first line of an answer.
async fn connect(address: SocketAddr, line: &str, key: &str, fields: &str) -> (TcpStream, String) {
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = format!("{line} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{fields}\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    timeout(Duration::from_secs(30), client.read_exact(&mut status)).await.expect("a place").unwrap();
    (client, String::from_utf8_lossy(&status).into_owned())
}

/// Waits until the other end has closed a connection.
async fn closed(client: &mut TcpStream) {
    // Over TCP, it may be closed with bytes unread.
    _ = client.read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn a_user_that_keeps_all_connections_open_keeps_no_other_user_out() {
    let body = ("POST /v1/completions", "content-length: 100\r\nexpect: 100-continue\r\n", "HTTP/1.1 100");
    for (line, fields, status) in [("GET /v1/models", "", "HTTP/1.1 200"), body] {
        let (address, metrics, mut served) = open();
        let mut greedy = Vec::new();
        for _ in 0..4 {
            let (client, found) = connect(address, line, "sk-1", fields).await;
            assert_eq!(found, status);
            greedy.push(client);
        }
        if line == body.0 {
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(2)).await;
            tokio::time::resume();
        }
        let (mut modest, found) = connect(address, "GET /v1/models", "sk-3", "").await;
        assert_eq!(found, "HTTP/1.1 200");
        let mut first = greedy.remove(0);
        closed(&mut first).await;
        if line == body.0 {
            while served.recv().await.unwrap().reason != DISPLACED {}
        }
        // The next ones of the greedy user take places of its own.
        for _ in 0..3 {
            let (client, found) = connect(address, "GET /v1/models", "sk-1", "").await;
            assert_eq!(found, "HTTP/1.1 200");
            greedy.push(client);
        }
        modest.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut rest = String::new();
        modest.read_to_string(&mut rest).await.unwrap();
        assert!(rest.ends_with("\r\n\r\nok\n"), "{rest}");
        assert_eq!((metrics.displaced_so_far(), metrics.evicted_so_far()), (4, 0));
    }
}

#[tokio::test]
async fn a_connection_by_http_2_makes_room_once_its_client_has_had_time_to_take_the_end_of_its_answer() {
    let (address, metrics, _served) = open();
    let mut greedy = Vec::new();
    for _ in 0..4 {
        let client = TokioIo::new(TcpStream::connect(address).await.unwrap());
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(16);
        let (mut requests, connection) = builder.handshake(client).await.unwrap();
        tokio::spawn(connection);
        let asked = hyper::Request::get("http://x/v1/models").header("authorization", "Bearer sk-1");
        let answer = requests.send_request(asked.body(String::new()).unwrap()).await.unwrap();
        greedy.push((requests, answer));
    }
    let modest = || tokio::spawn(async move { connect(address, "GET /v1/models", "sk-3", "").await });
    let first_modest = modest();
    while metrics.displaced_so_far() == 0 {
        tokio::task::yield_now().await;
    }
    let (_requests, answer) = greedy.remove(0);
    assert!(answer.into_body().collect().await.unwrap().to_bytes().ends_with(b"}"));
    let (_first_modest, found) = first_modest.await.unwrap();
    assert_eq!((&found[..], metrics.displaced_so_far()), ("HTTP/1.1 200", 1));
    // The next one to leave takes nothing.
    let (_second_modest, found) = modest().await.unwrap();
    assert_eq!((&found[..], metrics.displaced_so_far()), ("HTTP/1.1 200", 2));
}
