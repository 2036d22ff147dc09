use admission::stopped::StoppedReaders;
use config::{Config, hash::hex};
use futures::{StreamExt as _, stream};
use http_body_util::StreamBody;
use hyper::{body::Frame, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use masque::h3::ResponseHead;
use quic::h3::Request;
use role::{
    access::{record::What, way::Way},
    traffic::Traffic,
};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::{Semaphore, mpsc},
    task::JoinHandle,
};

use super::*;
use crate::{LOAD, gateway::tests::http3};

mod heads;
mod losing;
mod making_room;
mod pages;
mod refused;
mod unread;

#[test]
fn time_that_passed_at_the_edge_is_subtracted_from_the_budget_in_each_field() {
    let left = |name: &'static str, value: &'static str, elapsed_ms| {
        let fields = vec![Field::new("accept", "200"), Field::new(name, value)];
        let (scheme, authority, path, protocol) = (None, None, None, None);
        let head = RequestHead { method: "POST".into(), scheme, authority, path, protocol, fields };
        let fields = budgeted(&head, Duration::from_millis(elapsed_ms)).fields;
        assert_eq!(fields[0].value, "200");
        String::from_utf8(fields[1].value.to_vec()).unwrap()
    };
    for name in ["x-paced-budget-ms", "x-slo-ttft-ms"] {
        assert_eq!(left(name, "200", 30), "170");
        assert_eq!(left(name, " 20", 30), "0");
        assert_eq!(left(name, "99999999999999999999", 30), (u64::MAX - 30).to_string());
    }
    assert_eq!(left("x-slo-tpot-ms", "200", 30), "200", "the time for each further token is as it was");
    assert_eq!(left("priority", "u=1, i, dl=200", 30), "u=1, i, dl=170");
    assert_eq!(left("priority", "dl=20", 30), "dl=0");
    assert_eq!(left("priority", "u=1, other=2", 30), "u=1, other=2", "without a deadline, it stays as it is");
    let class = RequestClass { class: Arc::default(), is_chosen: false };
    let signal = Priority::parse(b"u=5, dl=200");
    let terms = terms(&class, signal, Duration::from_millis(30));
    assert_eq!(terms.signal.and_then(|signal| signal.deadline_ms), Some(170));
}

#[tokio::test]
async fn a_copy_that_is_refused_because_its_original_was_admitted_does_not_end_the_original() {
    let answered = |status| Outcome::Answered(ResponseHead { status, fields: Vec::new() });
    let won = |(outcome, of): (Outcome, &'static str)| match outcome {
        Outcome::Answered(head) => (head.status, of),
        other => panic!("{other:?}"),
    };
    for (original, copy, expected) in [(200, 429, 200), (429, 200, 200), (429, 429, 429), (502, 200, 200)] {
        for is_copy_first in [true, false] {
            let later = |is_later: bool| async move {
                if is_later {
                    tokio::task::yield_now().await;
                }
            };
            let original = async {
                later(is_copy_first).await;
                (answered(original), "original")
            };
            let copy = async {
                later(!is_copy_first).await;
                Some((answered(copy), "copy"))
            };
            let (outcome, is_copy) = winner(original, copy).await;
            let (status, of) = won(outcome);
            assert_eq!((status, is_copy), (expected, of == "copy"), "{is_copy_first}");
        }
    }
    let (outcome, is_copy) = winner(std::future::pending(), async { Some((answered(200), "copy")) }).await;
    assert_eq!((won(outcome), is_copy), ((200, "copy"), true), "an answer is not held up by the other path");
    let (outcome, is_copy) = winner(async { (answered(429), "original") }, async { None }).await;
    assert_eq!((won(outcome), is_copy), ((429, "original"), false));
}

/// The way to gateways of an edge that has none.
enum Nowhere {
    /// It says so at once.
    Refused,
    /// It tells that it was asked, and never answers.
    Silent(mpsc::UnboundedSender<()>),
    /// A connection takes a second. Then it tells the head and the terms that would leave now.
    Late(mpsc::UnboundedSender<(RequestHead, Terms)>),
}

impl GatewayAccess for Nowhere {
    type Place = ();
    type OtherPath = ();

    async fn ask(
        &self,
        head: impl FnOnce() -> RequestHead + Send,
        terms: impl Fn() -> Terms + Send + Sync,
        _: u64,
        body_bytes: usize,
        _: &mut Vec<usize>,
    ) -> Result<Asked<Self>, NotAsked> {
        match self {
            Self::Refused => {}
            Self::Silent(asked) => {
                _ = asked.send(());
                std::future::pending::<()>().await;
            }
            Self::Late(sent) => {
                tokio::time::pause();
                tokio::time::advance(Duration::from_secs(1)).await;
                tokio::time::resume();
                _ = sent.send((head(), terms()));
            }
        }
        Err(NotAsked::NoGateway(format!("for {body_bytes} bytes")))
    }

    async fn copy(&self, (): (), _: impl FnOnce() -> RequestHead + Send) -> Option<(Request, ())> {
        None
    }

    fn copy_was_first(&self, (): &()) {}

    fn readers(&self, (): &()) -> Arc<StoppedReaders> {
        StoppedReaders::at_edge(64)
    }

    fn traffic(&self, (): &()) -> Arc<Traffic> {
        Arc::default()
    }

    fn way(&self, (): &()) -> Option<Way> {
        None
    }

    fn has_others(&self, _: &[usize]) -> bool {
        false
    }

    fn has_ready(&self, _: &[usize]) -> bool {
        false
    }

    async fn lost(&self, (): &()) {}

    fn next_attempt_in(&self) -> Option<Duration> {
        Some(Duration::from_millis(6_001))
    }

    fn accepted(&self, (): &()) {}

    fn answered(&self, (): &(), _: Option<&ResponseHead>) {}
}

/// Limits with this maximum of connections. Evicted clients are counted.
fn limits(max_requests: usize, evicted: Arc<AtomicU64>) -> ClientLimits {
    let idle = Duration::from_secs(60);
    let patience = Patience { time: idle, on_end: Arc::new(|| ()) };
    let on_evicted = Arc::new(move || _ = evicted.fetch_add(1, Relaxed));
    let on_displaced = Arc::new(|| ());
    ClientLimits {
        max_body_bytes: 1_000,
        bodies_bytes: 1 << 20,
        max_requests,
        idle,
        patience,
        pages: PageRules::default(),
        on_evicted,
        on_displaced,
    }
}

/// Connects to an entrance, which serves the connection in a task, and sends it these bytes.
async fn begin<W: GatewayAccess>(entrance: &Arc<ModelEntrance<W>>, bytes: &str) -> (TcpStream, JoinHandle<()>) {
    begin_at(entrance, None, bytes).await
}

/// Does so with a place among the connections.
async fn begin_at<W: GatewayAccess>(
    entrance: &Arc<ModelEntrance<W>>,
    place: Option<OwnedSemaphorePermit>,
    bytes: &str,
) -> (TcpStream, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, from) = listener.accept().await.unwrap();
    let task = tokio::spawn(entrance.clone().serve(stream, from, place));
    client.write_all(bytes.as_bytes()).await.unwrap();
    (client, task)
}

const REQUEST: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n";

#[tokio::test]
async fn a_client_of_an_edge_without_a_gateway_learns_when_the_edge_will_next_attempt_to_connect() {
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits(4, Arc::default()), Arc::default());
    let request = format!("{}{{}}", REQUEST.replace("host", "connection: close\r\nhost"));
    let (mut client, _) = begin(&entrance, &request).await;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nretry-after: 7\r\n"), "{answer}");
}

#[tokio::test]
async fn the_record_of_an_answer_that_its_edge_cuts_does_not_blame_the_client() {
    for (is_cut, reason) in [(false, "cancelled"), (true, "unserved")] {
        let (access, (asked, mut is_asked)) = (Arc::<AccessLog>::default(), mpsc::unbounded_channel());
        let mut records = access.listen();
        let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
        let entrance = ModelEntrance::new(Nowhere::Silent(asked), classes, limits(4, Arc::default()), access);
        let (_client, task) = begin(&entrance, &format!("{REQUEST}{{}}")).await;
        is_asked.recv().await.unwrap();
        entrance.end();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(!task.is_finished(), "a request that has begun goes on");
        if is_cut {
            entrance.cut();
        }
        task.abort();
        let record = records.recv().await.unwrap();
        let What::Model(served) = &record.what else { panic!("{record:?}") };
        assert_eq!(served.reason, reason);
    }
}

/// Sends a request to an edge that reads bodies of up to 1,000 bytes, then `body_bytes`, and returns the edge's whole answer.
async fn send(fields: &str, body_bytes: usize) -> std::io::Result<String> {
    send_to(|address| RequestClasses::new(None, address), Arc::default(), fields, body_bytes).await
}

/// Does so at an edge with these classes and this access log.
async fn send_to(
    classes: impl FnOnce(SocketAddr) -> RequestClasses,
    access: Arc<AccessLog>,
    fields: &str,
    body_bytes: usize,
) -> std::io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let mut client = TcpStream::connect(address).await?;
    let (stream, from) = listener.accept().await?;
    let entrance = ModelEntrance::new(Nowhere::Refused, classes(address), limits(1, Arc::default()), access);
    tokio::spawn(entrance.serve(stream, from, None));
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n\r\n");
    client.write_all(head.as_bytes()).await?;
    client.write_all(&vec![b'x'; body_bytes]).await?;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn a_record_names_the_user_whose_key_the_request_shows_even_if_its_body_is_refused() {
    let text = format!(
        "[[serve]]\nlisten = \"127.0.0.1:8100\"\nrelay = \"https://gateway.example/{{target_host}}/{{target_port}}/\"\n\
         [[serve.key]]\nname = \"ann\"\nsha256 = \"{}\"",
        hex(&Sha256::digest("sk-ann"))
    );
    let config = Config::from_toml(&text).unwrap();
    let access = Arc::<AccessLog>::default();
    let mut records = access.listen();
    for (key, body_bytes, expected) in [
        ("sk-ann", 1_000, (Some("ann"), "no_gateway")),
        ("sk-ann", 1_001, (Some("ann"), "body_too_large")),
        ("sk-bob", 1_000, (None, "no_gateway")),
    ] {
        let fields = format!("content-length: {body_bytes}\r\nauthorization: Bearer {key}");
        let classes = |_| RequestClasses::at(&config.serves[0]);
        send_to(classes, access.clone(), &fields, body_bytes).await.unwrap();
        let record = records.recv().await.unwrap();
        let What::Model(served) = &record.what else { panic!("{record:?}") };
        assert_eq!((served.user.as_deref(), served.reason), expected, "{key} {body_bytes}");
    }
}

#[tokio::test]
async fn the_wait_for_a_connection_is_subtracted_from_a_requests_time() {
    let (sent, mut leaves) = mpsc::unbounded_channel();
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let entrance = ModelEntrance::new(Nowhere::Late(sent), classes, limits(4, Arc::default()), Arc::default());
    let fields = "x-paced-budget-ms: 600000\r\nx-slo-ttft-ms: 600000\r\npriority: dl=600000\r\ncontent-length: 2";
    let (_client, _) = begin(&entrance, &format!("{}{{}}", REQUEST.replace("content-length: 2", fields))).await;
    let (head, terms) = leaves.recv().await.unwrap();
    let left_ms = |name| String::from_utf8_lossy(head.field(name).unwrap()).trim_start_matches("dl=").parse().unwrap();
    let left_ms = ["x-paced-budget-ms", "x-slo-ttft-ms", "priority"].map(left_ms);
    let of_terms = terms.signal.and_then(|signal| signal.deadline_ms).unwrap();
    assert!(left_ms.iter().all(|left_ms: &u64| *left_ms <= 599_000) && of_terms <= 599_000, "{left_ms:?}, {of_terms}");
}

/// Two gateways. The first answers with 503 and its load; the other is out of reach, fails when it is asked, or answers with 200.
struct Pair {
    client: quic::h3::Client,
    is_ready: bool,
    answers: bool,
    asked: mpsc::UnboundedSender<usize>,
}

impl GatewayAccess for Pair {
    type Place = usize;
    type OtherPath = ();

    async fn ask(
        &self,
        head: impl FnOnce() -> RequestHead + Send,
        _: impl Fn() -> Terms + Send + Sync,
        _: u64,
        _: usize,
        tried: &mut Vec<usize>,
    ) -> Result<Asked<Self>, NotAsked> {
        let place = tried.len();
        tried.push(place);
        _ = self.asked.send(place);
        if place > 0 && !self.answers {
            return Err(NotAsked::NoGateway("it is down".into()));
        }
        let head = RequestHead { authority: Some("x".into()), ..head() };
        let request = self.client.request(&head).await.unwrap();
        Ok(Asked { request, place, other_path: None })
    }

    async fn copy(&self, (): (), _: impl FnOnce() -> RequestHead + Send) -> Option<(Request, usize)> {
        None
    }

    fn copy_was_first(&self, _: &usize) {}

    fn readers(&self, _: &usize) -> Arc<StoppedReaders> {
        self.client.stopped_readers().clone()
    }

    fn traffic(&self, _: &usize) -> Arc<Traffic> {
        Arc::default()
    }

    fn way(&self, _: &usize) -> Option<Way> {
        None
    }

    fn has_others(&self, tried: &[usize]) -> bool {
        tried.len() < 2
    }

    fn has_ready(&self, tried: &[usize]) -> bool {
        self.is_ready && self.has_others(tried)
    }

    async fn lost(&self, _: &usize) {
        std::future::pending().await
    }

    fn next_attempt_in(&self) -> Option<Duration> {
        None
    }

    fn accepted(&self, _: &usize) {}

    fn answered(&self, _: &usize, _: Option<&ResponseHead>) {}
}

#[tokio::test]
async fn a_gateways_refusal_is_the_answer_if_no_other_gateway_has_one_and_waits_for_none_that_is_down() {
    for (name, is_ready, answers, status, expected) in [
        ("out-of-reach", false, true, 503, &[0][..]),
        ("fails", true, false, 503, &[0, 1]),
        ("answers", true, true, 200, &[0, 1]),
    ] {
        let (client, mut requests, _kept) = http3::connect(name).await;
        tokio::spawn(async move {
            for (status, load) in [(503, "700"), (200, "100")] {
                let Some(mut request) = requests.recv().await else { return };
                let fields = [(LOAD, load), ("retry-after", "9"), ("content-length", "0")];
                let fields = fields.map(|(name, value)| Field::new(name, value)).to_vec();
                request.send.respond(&ResponseHead { status, fields }).await.unwrap();
                request.send.finish();
            }
            std::future::pending::<()>().await;
        });
        let (asked, mut asks) = mpsc::unbounded_channel();
        let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
        let pair = Pair { client, is_ready, answers, asked };
        let entrance = ModelEntrance::new(pair, classes, limits(4, Arc::default()), Arc::default());
        let request = format!("{}{{}}", REQUEST.replace("host", "connection: close\r\nhost"));
        let (mut client, _) = begin(&entrance, &request).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains("retry-after: 9"),
            "{name}: {answer}"
        );
        let mut places = Vec::new();
        while let Ok(place) = asks.try_recv() {
            places.push(place);
        }
        assert_eq!(places, expected, "{name}");
    }
}

/// Pieces of a body of HTTP/2, and how long the client waits before each of them.
type Pieces = (usize, usize, Duration);

/// Sends requests with such bodies over one HTTP/2 connection to an edge, the first one first, and returns the statuses of their answers.
async fn by_http_2(limits: ClientLimits, bodies: &[Pieces]) -> Vec<u16> {
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let from = ([127, 0, 0, 1], 80).into();
    let classes = RequestClasses::new(None, from);
    let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits, Arc::default());
    let (newcomer, ..) = entrance.newcomers.enter(from.ip(), None, true).await.unwrap();
    tokio::spawn(entrance.talk(theirs, HttpVersion::Two, from, newcomer));
    let (mut requests, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(ours)).await.unwrap();
    tokio::spawn(connection);
    let mut answers = Vec::new();
    for (pieces, piece_bytes, pause) in bodies.iter().copied() {
        let piece = move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; piece_bytes])))
        };
        let body = StreamBody::new(Box::pin(stream::iter(0..pieces).then(piece)));
        let request = hyper::Request::post("http://x/v1/completions").body(body).unwrap();
        answers.push(tokio::spawn(requests.send_request(request)));
        tokio::task::yield_now().await;
    }
    let mut statuses = Vec::new();
    for answer in answers {
        statuses.push(answer.await.unwrap().unwrap().status().as_u16());
    }
    statuses
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_for_a_place_do_not_hold_up_the_body_of_one_on_their_http_2_connection() {
    let limits = ClientLimits { max_body_bytes: 1 << 20, ..limits(1, Arc::default()) };
    // There is one place. The client sends the first body last.
    let bodies = [&[(1, 100_000, Duration::from_secs(5))][..], &[(1, 100_000, Duration::ZERO); 6]].concat();
    assert_eq!(by_http_2(ClientLimits { bodies_bytes: 2 << 20, ..limits }, &bodies).await, [503; 7]);
}

#[tokio::test(start_paused = true)]
async fn a_large_body_may_take_longer_than_half_a_minute() {
    let limits = ClientLimits { max_body_bytes: 4 << 20, bodies_bytes: 4 << 20, ..limits(1, Arc::default()) };
    let second = Duration::from_secs(1);
    assert_eq!(by_http_2(limits.clone(), &[(50, 64 << 10, second)]).await, [503], "it came in time");
    assert_eq!(by_http_2(limits, &[(50, 1 << 10, second)]).await, [408]);
}

#[tokio::test]
async fn bodies_beyond_the_bound_on_all_of_them_are_refused_and_the_reason_names_it() {
    let (asked, mut is_asked) = mpsc::unbounded_channel();
    let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
    let limits = ClientLimits { bodies_bytes: 1 << 10, ..limits(4, Arc::default()) };
    let entrance = ModelEntrance::new(Nowhere::Silent(asked), classes, limits, Arc::default());
    let request = format!("{}{{}}", REQUEST.replace("host", "connection: close\r\nhost"));
    let (_first, first) = begin(&entrance, &request).await;
    is_asked.recv().await.unwrap();
    let (mut second, _) = begin(&entrance, &request).await;
    let mut answer = String::new();
    second.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("retry-after: 1\r\n"), "{answer}");
    assert!(answer.contains("within bodies_bytes of this edge") && answer.contains("overloaded"), "{answer}");
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let (_third, _) = begin(&entrance, &request).await;
    is_asked.recv().await.unwrap();
}

#[tokio::test]
async fn the_record_of_a_client_that_leaves_within_its_body_says_so_and_names_the_operation_and_the_clients_id() {
    for body in ["{", "1\r\n{\r\n"] {
        let access = Arc::<AccessLog>::default();
        let mut records = access.listen();
        let classes = RequestClasses::new(None, ([127, 0, 0, 1], 80).into());
        let entrance = ModelEntrance::new(Nowhere::Refused, classes, limits(4, Arc::default()), access);
        let is_sized = body.len() == 1;
        let head = if is_sized { REQUEST } else { &REQUEST.replace("content-length: 2", "transfer-encoding: chunked") };
        let head = head.replace("host", "x-request-id: r-1\r\nhost");
        let (client, task) = begin(&entrance, &format!("{head}{body}")).await;
        drop(client);
        task.await.unwrap();
        let record = records.recv().await.unwrap();
        let What::Model(served) = &record.what else { panic!("{record:?}") };
        assert_eq!((served.status, served.reason, served.operation), (None, "cancelled", "text_completion"));
        assert_eq!(served.client_request.as_deref(), Some("r-1"));
    }
}
