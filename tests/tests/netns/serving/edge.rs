//! What an edge does with requests before a gateway has them.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use lab::site::Family;
use socket2::Socket;
use tokio::task::JoinHandle;

use super::*;

/// Requests at once on one connection of HTTP/2, as the edge allows them.
const STREAMS: usize = 128;

#[test]
fn rules_of_the_edge_give_requests_their_classes_and_tell_the_gateway_of_deadlines() {
    lab::ring!(Netns);
    // The gateway lets clients ask for deadlines, and has no rules.
    let mut desk = Desk::with_large(1, 1, "", "", "[class.default]\nshortest_deadline_ms = 1");
    with_sections(
        &mut desk,
        "[class.urgent]\ndeadline_ms = 9000\n[class.small]\n[class.asked]\n\
         [[rule]]\nclass = \"urgent\"\nservice_tier = \"priority\"\n\
         [[rule]]\nclass = \"small\"\nmodel = \"opt-125m\"\n\
         [[rule]]\nclass = \"asked\"\nasked_class = \"batch\"",
    );
    let sent = |class: &str| {
        let counts = Counts::read(&desk.site.chain.client, METRICS).unwrap();
        counts.of(&format!(r#"class_bytes_total{{class="{class}",role="edge"}}"#))
    };
    let with_deadline = || desk.counts().sum("gateway_deadlines_total");
    let tier = |tier: &str| json!({ "model": "large", "prompt": "x", "service_tier": tier }).to_string();
    let path = "/v1/completions";
    for (options, class) in [
        (vec!["--json", &tier("default")], "default"),
        (vec!["--json", &tier("priority")], "urgent"),
        (vec!["--json", r#"{"model":"opt-125m","prompt":"x"}"#], "small"),
        (vec!["--json", &tier("default"), "-H", "x-paced-class: batch"], "asked"),
    ] {
        let (before, deadlines) = (sent(class), with_deadline());
        let (status, _, body) = desk.ask(path, &options);
        assert_eq!(status, 200, "{body}");
        assert!(sent(class) > before, "{class}");
        assert_eq!(with_deadline() - deadlines, i64::from(class == "urgent"), "{class}");
    }
    assert!(desk.large[0].last().unwrap().body.contains("service_tier"), "bodies pass as they are");
}

#[test]
fn the_key_of_a_client_gives_its_requests_their_class_and_deadline_at_the_edge() {
    lab::ring!(Netns);
    // The gateway accepts both keys, lets clients ask for deadlines, and has no rules.
    let [ann, bob] = ["ann", "bob"].map(|name| {
        let (key, hash) = generate_token().unwrap();
        (format!("authorization: Bearer {key}"), format!("name = \"{name}\"\nsha256 = \"{}\"\n", hex(&hash)))
    });
    let keys = format!("[[gateway.key]]\n{}[[gateway.key]]\n{}", ann.1, bob.1);
    let mut desk = Desk::with_large(1, 1, "", "", &format!("{keys}[class.default]\nshortest_deadline_ms = 1"));
    let rule = "[class.urgent]\ndeadline_ms = 9000\n[[rule]]\nclass = \"urgent\"\nuser = \"ann\"";
    with_sections(&mut desk, &format!("[[serve.key]]\n{}{rule}", ann.1));
    let sent = |class: &str| {
        let counts = Counts::read(&desk.site.chain.client, METRICS).unwrap();
        counts.of(&format!(r#"class_bytes_total{{class="{class}",role="edge"}}"#))
    };
    let with_deadline = || desk.counts().sum("gateway_deadlines_total");
    for (key, class, status) in
        [(&ann.0[..], "urgent", 200), (&bob.0, "default", 200), ("authorization: Bearer sk-x", "default", 401)]
    {
        let (before, deadlines) = (sent(class), with_deadline());
        let body = json!({ "model": "large", "prompt": "x" }).to_string();
        let (got, _, body) = desk.ask("/v1/completions", &["--json", &body, "-H", key]);
        assert_eq!(got, status, "{body}");
        assert!(sent(class) > before, "{class}");
        assert_eq!(with_deadline() - deadlines, i64::from(class == "urgent"), "{class}");
    }
}

#[test]
fn clients_speak_http_2_to_an_edge_with_the_same_answers_and_errors() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let ask = |options: &[&str]| {
        let mut curl = desk.site.chain.client.command("curl").unwrap();
        curl.args(["-sS", "-N", "--max-time", "20", "--http2-prior-knowledge", "-w", "\n%{http_code} %{http_version}"]);
        let output = curl.arg(format!("{SERVE}/v1/chat/completions")).args(options).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let (body, written) = said.rsplit_once('\n').unwrap();
        (written.to_owned(), body.to_owned())
    };
    let (written, body) = ask(&["--json", &chat("large", "a b c", true)]);
    assert_eq!((&written[..], tokens(&body)), ("200 2", ("0 1 2 3 4 ".into(), true)));
    let (written, body) = ask(&["--json", &chat("large", "a b c", false)]);
    let whole: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&written[..], &whole["choices"][0]["message"]["content"]), ("200 2", &json!("0 1 2 3 4 ")));
    let (written, body) = ask(&["--json", &chat("largest", "x", false)]);
    assert_eq!((&written[..], error(&body)), ("404 2", "model_not_found".to_owned()));
    assert_eq!(desk.chat("large", "x", true).0, 200, "HTTP/1.1 is as it was");
    // What begins like HTTP/2 and is none gets no answer, and takes nothing from others.
    let mut wrong = desk.site.chain.client.run(|| TcpStream::connect("127.0.0.1:8100").unwrap()).unwrap();
    wrong.set_read_timeout(Some(SOON)).unwrap();
    wrong.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nno frame at all").unwrap();
    _ = wrong.read_to_end(&mut Vec::new());
    assert_eq!(desk.chat("large", "x", true).0, 200);
}

/// A connection of HTTP/2 to the edge.
struct Two(http2::SendRequest<Full<Bytes>>);

impl Two {
    async fn connect(desk: &Desk) -> Self {
        let stream = desk.site.chain.client.run(|| TcpStream::connect("127.0.0.1:8100").unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let stream = TokioIo::new(tokio::net::TcpStream::from_std(stream).unwrap());
        let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    /// Begins a chat; aborted, its stream is reset.
    fn begin(&self, body: &str) -> JoinHandle<Bytes> {
        let (mut sender, body) = (self.0.clone(), Full::new(Bytes::copy_from_slice(body.as_bytes())));
        tokio::spawn(async move {
            let request = hyper::Request::post(format!("{SERVE}/v1/chat/completions")).body(body).unwrap();
            sender.ready().await.unwrap();
            sender.send_request(request).await.unwrap().into_body().collect().await.unwrap().to_bytes()
        })
    }
}

#[test]
fn heads_of_requests_to_an_edge_have_a_bound_by_either_version_of_http() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let large = "x".repeat(70_000);
    // Over HTTP/1.1, bytes from one read count as a whole, so only twice the bound is refused for certain.
    let fields: Vec<_> = (0..3).flat_map(|at| ["-H".to_owned(), format!("x-large-{at}: {large}")]).collect();
    let fields: Vec<_> = fields.iter().map(String::as_str).collect();
    assert_eq!(desk.ask("/v1/models", &fields).0, 431);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let Two(mut sender) = Two::connect(&desk).await;
        // Far more than the bound would end the connection.
        for (head, status) in [(&large[..20_000], 431), ("x", 200)] {
            let request = hyper::Request::get(format!("{SERVE}/v1/models")).header("x-large", head);
            let answer = sender.send_request(request.body(Full::default()).unwrap()).await.unwrap();
            assert_eq!(answer.status(), status);
        }
    });
}

#[test]
fn a_stream_that_is_reset_ends_its_engines_work_and_no_other_and_streams_have_a_bound() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "max_in_flight = 1000", "stall_timeout_seconds = 60");
    let asked = |count: usize| {
        wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] == count as u64).then_some(())).unwrap();
    };
    let left = |count: u64| {
        wait_for("the engine to be left alone", SOON, || (desk.large[0].counts()[2] == count).then_some(())).unwrap();
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let two = Two::connect(&desk).await;
        let stalled: Vec<_> = (0..STREAMS).map(|at| two.begin(&chat("large", "stall 1", at % 2 == 0))).collect();
        tokio::task::block_in_place(|| asked(STREAMS));
        // The request has to wait, because the maximum of streams is open. Another client's later request does not.
        let next = two.begin(&chat("large", "a b c", true));
        assert_eq!(tokio::task::block_in_place(|| desk.chat("large", "x", true).0), 200);
        assert_eq!(desk.large[0].counts()[0], STREAMS as u64 + 1, "the engine was asked by the other client alone");
        // With and without streaming, and nothing else ends.
        stalled[0].abort();
        tokio::task::block_in_place(|| left(1));
        let answer = next.await.unwrap();
        assert_eq!(tokens(std::str::from_utf8(&answer).unwrap()), ("0 1 2 3 4 ".into(), true));
        stalled[1].abort();
        tokio::task::block_in_place(|| left(2));
        assert!(stalled[2..].iter().all(|stream| !stream.is_finished()));
    });
    drop(runtime);
    left(STREAMS as u64);
    desk.site.wait_for_counts("no request to be left", |counts| counts.of("gateway_in_flight") == 0).unwrap();
}

#[test]
fn a_client_that_stops_reading_loses_its_answer_and_costs_no_other_client_anything() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "");
    let folder = desk.site.path("").display().to_string();
    let strict = format!(
        "[[serve]]\nlisten = \"127.0.0.1:8101\"\nrelay = \"{}\"\nca = \"{folder}/authority.pem\"\n\
         token_file = \"{folder}/edge.token\"\nstall_timeout_seconds = 5",
        desk.site.template(Family::V4)
    );
    with_sections(&mut desk, &strict);
    // The answer has some four megabytes. The client takes a few kilobytes, and then its window is closed.
    let body = json!({ "model": "large", "input": vec![""; 60_000] }).to_string();
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let connect = || {
        let socket = Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(4_096).unwrap();
        socket.connect(&SocketAddr::from(([127, 0, 0, 1], 8101)).into()).unwrap();
        TcpStream::from(socket)
    };
    let mut client = desk.site.chain.client.run(connect).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.write_all(request.as_bytes()).unwrap();
    client.read_exact(&mut [0; 12]).unwrap();

    let ended = |count: i64| {
        let hits =
            "edge_limit_hits_total{listen=\"127.0.0.1:8101\",protocol=\"serve\",limit=\"stall_timeout_seconds\"}";
        let read = || Counts::read(&desk.site.chain.client, METRICS).ok().filter(|counts| counts.of(hits) == count);
        wait_for("the edge to end an answer", SOON, read).unwrap();
    };
    ended(1);
    let mut rest = Vec::new();
    // The edge may end the connection with a reset.
    _ = client.read_to_end(&mut rest);
    assert!(rest.len() < 1 << 20, "{} bytes of an answer that was ended", rest.len());
    desk.site.wait_for_counts("no request to be left", |counts| counts.of("gateway_in_flight") == 0).unwrap();

    // A client that reads gets the same answer whole.
    let mut client = desk.site.chain.client.run(connect).unwrap();
    client.set_read_timeout(Some(SOON)).unwrap();
    client.write_all(request.replace("host: localhost", "host: localhost\r\nconnection: close").as_bytes()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!((&answer[..12], answer.matches("\"index\":").count()), ("HTTP/1.1 200", 60_000));
    ended(1);
}

#[test]
fn embeddings_pass_from_engine_to_client_and_are_counted() {
    lab::ring!(Netns);
    let desk = Desk::new(1, "", "");
    let body = |model: &str| json!({ "model": model, "input": ["a b c", "d"], "dimensions": 2 }).to_string();
    let (status, head, answer) = desk.ask("/v1/embeddings", &["--json", &body("large")]);
    assert!(status == 200 && head.contains("x-paced-model: large") && head.contains("application/json"), "{head}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let vectors: Vec<_> = answer["data"].as_array().unwrap().iter().map(|of| &of["embedding"]).collect();
    assert_eq!((&answer["object"], vectors), (&json!("list"), vec![&json!([0.0, 3.0]), &json!([1.0, 1.0])]));
    let asked = desk.large[0].last().unwrap();
    assert_eq!((&asked.path[..], asked.body), ("/v1/embeddings", body("opt-6.7b")));
    let counts = desk.settled();
    assert_eq!(counts.of(r#"gateway_tokens_total{model="large",kind="input",user="edge",class="default"}"#), 4);
    assert_eq!(counts.sum(r#"gateway_tokens_total{model="large",kind="output""#), 0);
    assert_eq!(
        counts.of(r#"gateway_requests_total{operation="embeddings",model="large",outcome="answered"}"#),
        1,
        "{counts:#?}"
    );
}

#[test]
fn each_request_at_an_edge_is_a_line_of_its_access_log_with_the_gateway_that_got_it() {
    lab::ring!(Netns);
    let mut desk = Desk::new(1, "", "");
    with_sections(&mut desk, "[log]\naccess = \"json\"\n");
    let (stream, plain) = (chat("large", "x", true), chat("largest", "x", false));
    assert_eq!(desk.chat("large", "x", true).0, 200);
    assert_eq!(desk.chat("largest", "x", false).0, 404);
    let mut begun = desk.begin_chat(&chat("large", "stall 1", true));
    begun.stdout.as_mut().unwrap().read_exact(&mut [0; 16]).unwrap();
    begun.kill().unwrap();
    begun.wait().unwrap();
    let lines = || Some(desk.edge.records("model")).filter(|records| records.len() == 3);
    let lines = wait_for("three lines", SOON, lines).unwrap();
    let shown: Vec<_> = lines
        .iter()
        .map(|of| {
            ["listener", "operation", "asked", "relay", "status", "reason", "up_bytes"].map(|key| of[key].clone())
        })
        .collect();
    let expected = |asked: &str, status: u16, reason: &str, up_bytes: usize| {
        let (listener, relay) = ("127.0.0.1:8100", "10.0.1.2:443");
        [json!(listener), json!("chat"), json!(asked), json!(relay), json!(status), json!(reason), json!(up_bytes)]
    };
    assert_eq!(shown[0], expected("large", 200, "answered", stream.len()));
    assert_eq!(shown[1], expected("largest", 404, "answered", plain.len()), "with a length, the answer is complete");
    assert_eq!(shown[2], expected("large", 200, "cancelled", chat("large", "stall 1", true).len()));
    assert!(lines.iter().all(|line| line["client"].is_null() && line["down_bytes"].as_u64() > Some(0)), "{lines:?}");
}
