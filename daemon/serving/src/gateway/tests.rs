//! Requests by HTTP/1.1, over a pipe in place of a network.

use std::{convert::Infallible, time::Duration};

use bytes::{Bytes, BytesMut};
use config::{
    gateway::{Alias, GatewaySettings, Key, ModelSettings},
    policy::Policy,
    routing::Routing,
};
use engines::NO_ENGINE_PERMILLE;
use futures::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{Request, body::Frame, client, header::HeaderValue, server, service::service_fn};
use hyper_util::rt::TokioIo;
use openai::TokenUsage;
use pacing::path::PathStats;
use prometheus_client::{encoding::text::encode, registry::Registry};
use quic::class::{ClassMarks, ClassMetrics, PolicyRole};
use role::access::served::Served;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::mpsc,
    time::{Instant as TokioInstant, sleep},
};

use self::samples::{key, model};
use super::*;
use crate::{LOAD, departure::Departure, message};

mod aliases;
mod failing;
pub(crate) mod http3;
mod leaving;
mod refusing;
pub(crate) mod samples;
mod slow;
mod unreached;

type ToSend = UnsyncBoxBody<Bytes, Infallible>;

/// A client of a gateway with one model, whose engine has this address.
struct Client {
    gateway: Arc<Gateway>,
    spending: Arc<Spending>,
    requests: client::conn::http1::SendRequest<ToSend>,
    served: mpsc::UnboundedReceiver<Served>,
    /// The status of each answer, once it begins.
    begun: mpsc::UnboundedReceiver<u16>,
    /// What the gateway made of each answer, whatever of it HTTP/1.1 sends.
    contents: mpsc::UnboundedReceiver<Bytes>,
}

impl Client {
    async fn of(engine: &str) -> Self {
        Self::with(settings(&[engine])).await
    }

    async fn with(settings: GatewaySettings) -> Self {
        Self::under(settings, Policy::default()).await
    }

    /// Returns a client of a gateway with this policy.
    async fn under(settings: GatewaySettings, policy: Policy) -> Self {
        Self::holding(settings, policy, HoldLimits::default().time).await
    }

    /// Returns a client of a gateway that holds events before the first token back for this time.
    async fn holding(settings: GatewaySettings, policy: Policy, held_for: Duration) -> Self {
        let classes = Classes::new(policy, PolicyRole::Relay, &ClassMetrics::default(), |_| ClassMarks::default());
        let (shared, spending) = (Default::default(), Arc::<Spending>::default());
        let mut gateway = Gateway::new(&settings, &classes, (shared, &spending), (&Learned::default(), None)).unwrap();
        Arc::get_mut(&mut gateway).unwrap().hold_limits.time = held_for;
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let ((ended, served), (made, contents)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let (begins, begun) = mpsc::unbounded_channel();
        let (classes, serves) = (Arc::new(classes), gateway.clone());
        let answer = service_fn(move |request: Request<hyper::body::Incoming>| {
            let (gateway, classes, ended, made) = (serves.clone(), classes.clone(), ended.clone(), made.clone());
            let begins = begins.clone();
            async move {
                let (parts, body) = request.into_parts();
                let (head, (exchange, awaited)) = (message::head(&parts), TcpExchange::new(body, Departure::default()));
                let listener = ([127, 0, 0, 1], 80).into();
                let (tenant, path) = (gateway.tenant(&head), PathStats::default());
                let asker = Asker { user: None, tenant, listener, client: None, path, refusal: None };
                tokio::spawn(async move {
                    _ = ended.send(gateway.serve(Exchange::Tcp(exchange), head, &classes, &asker).await);
                });
                let (head, answer) = awaited.answer().await?;
                _ = begins.send(head.status);
                let content = answer.collect().await?.to_bytes();
                _ = made.send(content.clone());
                Ok::<_, std::io::Error>(message::response::<Full<Bytes>>(head, content.into()))
            }
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
        let (requests, connection) = client::conn::http1::handshake(TokioIo::new(ours)).await.unwrap();
        tokio::spawn(connection);
        Self { gateway, spending, requests, served, begun, contents }
    }

    /// Asks for a chat; returns the status and the body of the answer.
    async fn chat(&mut self, body: ToSend) -> (u16, Bytes) {
        let answer = self.requests.send_request(chat(body)).await.unwrap();
        (answer.status().as_u16(), answer.into_body().collect().await.unwrap().to_bytes())
    }
}

fn classes() -> Classes {
    Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| ClassMarks::default())
}

/// The metrics as their scraper sees them.
fn shown(metrics: &GatewayMetrics) -> String {
    let (mut registry, mut text) = (Registry::default(), String::new());
    metrics.register(&mut registry);
    encode(&mut text, &registry).unwrap();
    text
}

/// A gateway with one model, which has these engines.
fn settings(engines: &[&str]) -> GatewaySettings {
    let engines = engines.iter().map(|engine| engine.parse().unwrap()).collect();
    let model = ModelSettings { engines, affinity: false, ..model("large") };
    GatewaySettings { models: vec![model], ..GatewaySettings::default() }
}

fn chat(body: ToSend) -> Request<ToSend> {
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    request.header("authorization", "Bearer sk-1").body(body).unwrap()
}

/// Starts an engine that sends these bytes as the answer to each request, and then closes the connection; returns its address.
async fn engine(answer: impl Into<Bytes>) -> String {
    let (listener, answer) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), answer.into());
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut request = BytesMut::new();
                while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
                _ = stream.write_all(&answer).await;
            });
        }
    });
    address
}

/// The beginning of a streamed answer, with this content of its body.
fn events(content: &str) -> String {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    match content {
        "" => head.to_owned(),
        _ => format!("{head}{:x}\r\n{content}\r\n", content.len()),
    }
}

fn whole(body: String) -> ToSend {
    Full::from(body).boxed_unsync()
}

#[tokio::test]
async fn nothing_that_outlives_a_request_has_the_size_of_the_name_in_its_body() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    let (status, body) = client.chat(whole(format!(r#"{{"model":"{}"}}"#, "\u{7f}".repeat(1 << 20)))).await;
    assert!(status == 404 && body.len() < 4_096, "{status}, {} bytes", body.len());
    assert_eq!(client.served.recv().await.unwrap().asked, "\u{7f}".repeat(256));
}

#[tokio::test]
async fn engines_and_records_get_the_ids_of_clients_and_engines_get_none_twice() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client::of(&format!("http://{}/v1", listener.local_addr().unwrap())).await;
    let (heads, mut asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = BytesMut::new();
            while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
            _ = heads.send(String::from_utf8(request.to_vec()).unwrap());
            _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}").await;
        }
    });
    let (long, longest) = ("x".repeat(129), "x".repeat(128));
    let mut own = std::collections::HashSet::new();
    for (id, is_passed) in
        [("r-1", true), ("r-1", true), (&longest, true), (&long, false), ("", false), ("a b", false), ("\u{e4}", false)]
    {
        let mut request = chat(whole(r#"{"model":"large"}"#.into()));
        request.headers_mut().insert("x-request-id", HeaderValue::from_bytes(id.as_bytes()).unwrap());
        request.headers_mut().insert("traceparent", HeaderValue::from_static("00-1-2-01"));
        let answer = client.requests.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let answered = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
        _ = answer.into_body().collect().await;
        let served = client.served.recv().await.unwrap();
        assert_eq!(served.client_request.as_deref(), is_passed.then_some(id));
        let own_id = served.id;
        assert_eq!(answered, if is_passed { format!("{id}-{own_id}") } else { own_id.to_string() });
        let head = asked.recv().await.unwrap();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name));
        assert_eq!(field("traceparent: "), Some("00-1-2-01"));
        let passed = field("x-request-id: ").map(|passed| passed.rsplit_once('-').unwrap());
        assert_eq!(passed.map(|(client, _)| client), is_passed.then_some(id), "{head}");
        assert!(passed.is_none_or(|(_, number)| own.insert(number.parse::<u64>().unwrap())), "{head}");
    }
}

#[tokio::test]
async fn the_gateways_own_answers_have_the_id_of_their_request() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    let [large, other] = [r#"{"model":"large"}"#, r#"{"model":"other"}"#];
    for (method, path, body, status) in [
        ("POST", "/v1/chat/completions", large, 503),
        ("POST", "/v1/chat/completions", other, 404),
        ("DELETE", "/v1/models", "", 405),
        ("GET", "/v1/models", "", 200),
        ("HEAD", "/health", "", 200),
    ] {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.header("x-request-id", "r-1").body(whole(body.to_owned())).unwrap();
        let answer = client.requests.send_request(request).await.unwrap();
        let served = client.served.recv().await.unwrap();
        let ids: Vec<_> = answer.headers().get_all("x-request-id").iter().map(HeaderValue::as_bytes).collect();
        assert_eq!(answer.status().as_u16(), status, "{method} {path}");
        assert_eq!(ids, [format!("r-1-{}", served.id).as_bytes()], "{method} {path}");
        _ = answer.into_body().collect().await;
    }
}

#[tokio::test]
async fn an_engine_that_refuses_the_gateways_key_has_failed() {
    for status in [401, 407, 403] {
        let refusal = format!("HTTP/1.1 {status} No\r\ncontent-length: 2\r\n\r\n{{}}");
        let mut client = Client::of(&engine(refusal).await).await;
        let expected = if status == 403 { 403 } else { 502 };
        assert_eq!(client.chat(whole(r#"{"model":"large"}"#.into())).await.0, expected, "{status}");
    }
}

#[tokio::test]
async fn a_refusal_of_a_request_for_a_model_reports_the_load_of_its_engines() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    // The second request finds no engine to choose.
    let [large, other] = [r#"{"model":"large"}"#, r#"{"model":"other"}"#];
    for (body, load) in [(large, Some(NO_ENGINE_PERMILLE)), (large, Some(NO_ENGINE_PERMILLE)), (other, None)] {
        let answer = client.requests.send_request(chat(whole(body.into()))).await.unwrap();
        let told = answer.headers().get(LOAD).map(|load| load.to_str().unwrap().parse().unwrap());
        assert_eq!(told, load, "{}", answer.status());
        _ = answer.into_body().collect().await;
    }
}

#[tokio::test]
async fn a_refusal_says_which_model_was_chosen_and_how_long_its_answer_was_predicted_to_take() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    let curve = sched::route::Curve::new(sched::route::Cost { gpu_ns: 1e7, ..Default::default() });
    client.gateway.routes.recall(None, |_, _| Some(curve));
    let decided = ["x-paced-model", "x-paced-reason", "x-paced-predicted-ms"];
    for (model, values) in [("large", ["large", "named", "190"].map(Some)), ("other", [None; 3])] {
        let body = format!(r#"{{"model":"{model}","max_tokens":20}}"#);
        let answer = client.requests.send_request(chat(whole(body))).await.unwrap();
        let told = decided.map(|name| answer.headers().get(name).map(|value| value.to_str().unwrap()));
        assert_eq!(told, values, "{}", answer.status());
        _ = answer.into_body().collect().await;
    }
}

#[tokio::test]
async fn an_answer_is_counted_beside_its_prediction_and_not_at_all_without_one() {
    let answers = engine("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    for is_known in [true, false] {
        let mut client = Client::of(&answers).await;
        if is_known {
            let curve = sched::route::Curve::new(sched::route::Cost { gpu_ns: 1e7, ..Default::default() });
            client.gateway.routes.recall(None, |_, _| Some(curve));
        }
        let (status, _) = client.chat(whole(r#"{"model":"large","max_tokens":20}"#.into())).await;
        assert_eq!((status, client.served.recv().await.unwrap().reason), (200, "answered"));
        let text = shown(&client.gateway.metrics);
        for line in [
            "gateway_predicted_seconds_sum{model=\"large\"} 0.19\n",
            "gateway_predicted_seconds_bucket{le=\"0.16\",model=\"large\"} 0\n",
            "gateway_predicted_seconds_bucket{le=\"0.32\",model=\"large\"} 1\n",
            "gateway_actual_seconds_bucket{le=\"+Inf\",model=\"large\"} 1\n",
            "gateway_predicted_ratio_count{model=\"large\"} 1\n",
        ] {
            assert_eq!(text.contains(line), is_known, "{line}{text}");
        }
    }
}

#[tokio::test]
async fn a_refusal_after_the_last_model_of_an_alias_failed_says_which_model_that_was() {
    let names = ["large", "small"].map(str::to_owned).to_vec();
    let engines: Vec<_> = vec!["http://127.0.0.1:1/v1".parse().unwrap()];
    let of = |name: &String| ModelSettings { engines: engines.clone(), affinity: false, ..model(name) };
    let models = names.iter().map(of).collect();
    let aliases = vec![Alias { name: "auto".into(), models: names, policy: Routing::Rule, shadow: None }];
    let mut client = Client::with(GatewaySettings { models, aliases, ..GatewaySettings::default() }).await;
    // So that no model is left once the large one has failed.
    let small = &client.gateway.models[1].engines;
    // With checks, and none runs here: it does not come back by itself.
    small.expect(true, u64::MAX);
    small.failed(0, engines::health::Fault::OutOfReach, "");
    let answer = client.requests.send_request(chat(whole(r#"{"model":"auto"}"#.into()))).await.unwrap();
    let told = ["x-paced-model", "x-paced-reason"].map(|name| answer.headers()[name].to_str().unwrap());
    assert_eq!((answer.status().as_u16(), told), (503, ["large", "best-with-room"]));
}

#[tokio::test]
async fn a_refusal_of_head_has_no_content() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    for (method, is_empty) in [("HEAD", true), ("DELETE", false)] {
        let request = Request::builder().method(method).uri("/v1/models").body(whole(String::new())).unwrap();
        let answer = client.requests.send_request(request).await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers()["allow"].as_bytes()), (405, &b"GET"[..]));
        assert_eq!((answer.headers()["content-type"].as_bytes()), b"application/json");
        _ = answer.into_body().collect().await;
        assert_eq!(client.contents.recv().await.unwrap().is_empty(), is_empty, "{method}");
    }
}

#[tokio::test]
async fn a_model_can_be_asked_for_by_name_and_health_by_its_head() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    for (method, path, status, content) in [
        ("GET", "/v1/models/larg%65", 200, r#""id":"large""#),
        ("GET", "/v1/models/small", 404, "model_not_found"),
        ("GET", "/health", 200, "ok"),
        ("HEAD", "/health", 200, ""),
    ] {
        let request = Request::builder().method(method).uri(path).body(whole(String::new())).unwrap();
        let answer = client.requests.send_request(request).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{method} {path}");
        _ = answer.into_body().collect().await;
        let sent = String::from_utf8(client.contents.recv().await.unwrap().to_vec()).unwrap();
        assert!(sent.contains(content) && sent.is_empty() == content.is_empty(), "{method} {path}: {sent}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_comes_byte_by_byte_holds_its_place_for_half_a_minute() {
    let mut client = Client::of("http://127.0.0.1:1/v1").await;
    let pieces = stream::unfold((), |()| async {
        sleep(Duration::from_secs(9)).await;
        Some((Ok(Frame::data(Bytes::from_static(b" "))), ()))
    });
    let began = TokioInstant::now();
    let (status, _) = client.chat(StreamBody::new(Box::pin(pieces)).boxed_unsync()).await;
    assert_eq!((status, client.served.recv().await.unwrap().reason), (408, "body_timeout"));
    assert!((30..32).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
}

/// An event with a token.
const TOKEN: &str = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n";

#[tokio::test]
async fn an_engine_that_fails_before_its_answer_passes_costs_the_key_nothing() {
    for (content, status, is_paid) in [("", 502, false), (TOKEN, 200, true)] {
        let settings = GatewaySettings { keys: vec![key()], ..settings(&[&engine(events(content)).await]) };
        let mut client = Client::with(settings).await;
        let (answered, _) = client.chat(whole(r#"{"model":"large","stream":true}"#.into())).await;
        let served = client.served.recv().await.unwrap();
        assert_eq!((answered, served.usage.is_some()), (status, is_paid), "{}", served.reason);
        let spent = client.spending.of("ann", SystemTime::now());
        assert_eq!(spent, served.usage.map_or(0, |usage| usage.prompt_tokens + usage.completion_tokens));
    }
}

#[tokio::test]
async fn a_long_answer_without_streaming_counts_by_the_report_at_its_end_or_else_by_its_length() {
    let text = "x".repeat(3 << 20);
    for (report, tokens) in [(r#","usage":{"prompt_tokens":8,"completion_tokens":6}"#, 6), ("", (3 << 20) / 4)] {
        let body = format!(r#"{{"choices":[{{"text":"{text}"}}]{report}}}"#);
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        let mut client = Client::of(&engine(head + &body).await).await;
        let (status, received) = client.chat(whole(r#"{"model":"large"}"#.into())).await;
        assert!(status == 200 && received == body, "{status}, {} bytes", received.len());
        let counted = client.served.recv().await.unwrap().usage.unwrap().completion_tokens;
        assert!((tokens..tokens + 20).contains(&counted), "{counted}");
    }
}

#[tokio::test]
async fn an_engine_that_breaks_off_after_its_first_token_has_failed_and_not_answered() {
    let mut client = Client::of(&engine(events(TOKEN)).await).await;
    for _ in 0..3 {
        let (status, body) = client.chat(whole(r#"{"model":"large","stream":true}"#.into())).await;
        assert!(status == 200 && body.starts_with(TOKEN.as_bytes()), "{status}: {body:?}");
    }
    let engines = client.gateway.models[0].engines.status();
    assert_eq!((engines[0].answered, engines[0].failed), (0, 3));
}

#[tokio::test]
async fn an_engine_out_of_reach_takes_no_try_from_the_others() {
    let answers = engine("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}").await;
    let mut client = Client::with(settings(&["http://127.0.0.1:1/v1", &engine(events("")).await, &answers])).await;
    let (status, body) = client.chat(whole(r#"{"model":"large","stream":true}"#.into())).await;
    assert_eq!((status, &body[..]), (200, &b"{}"[..]), "{}", client.served.recv().await.unwrap().reason);
}

#[tokio::test]
async fn an_answer_that_is_done_is_complete_however_its_engine_ends() {
    let content = format!("{TOKEN}data: [DONE]\n\n");
    let mut client = Client::of(&engine(events(&content)).await).await;
    let (status, body) = client.chat(whole(r#"{"model":"large","stream":true}"#.into())).await;
    assert_eq!((status, body), (200, Bytes::from(content)));
    assert_eq!(client.served.recv().await.unwrap().reason, "answered");
    let engines = client.gateway.models[0].engines.status();
    assert_eq!((engines[0].answered, engines[0].failed), (1, 0));
}

#[tokio::test]
async fn the_record_of_a_second_model_says_that_it_is_about_the_same_request() {
    let answers = engine("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    let [failing, good] = [("large", "http://127.0.0.1:1/v1"), ("small", &answers)].map(|(name, engine)| {
        let engines = vec![engine.parse().unwrap()];
        ModelSettings { engines, affinity: false, ..model(name) }
    });
    let names = ["large", "small"].map(str::to_owned).to_vec();
    let alias = Alias { name: "auto".into(), models: names, policy: Routing::Rule, shadow: None };
    let (models, aliases) = (vec![failing, good], vec![alias]);
    let mut client =
        Client::with(GatewaySettings { models, aliases, decisions_bytes: 1 << 20, ..GatewaySettings::default() }).await;
    let mut request = chat(whole(r#"{"model":"auto"}"#.into()));
    request.headers_mut().insert("x-paced-budget-ms", 20_000.into());
    assert_eq!(client.requests.send_request(request).await.unwrap().status(), 200);
    client.served.recv().await.unwrap();
    let lines: String = client.gateway.decisions.take().into_iter().map(|record| record.line).collect();
    let (decisions, _) = routing::decision::read(&lines);
    let found: Vec<_> = decisions.iter().map(|one| (one.retry, one.models.len(), one.outcome.is_some())).collect();
    assert_eq!(found, [(false, 2, false), (true, 1, true)]);
}

#[tokio::test]
async fn the_metrics_show_engines_and_quotas_of_the_gateway_in_force_only() {
    let metrics = GatewayMetrics::default();
    let key = |name: &str| Key { name: name.into(), monthly_tokens: Some(1_000), ..key() };
    let show = |keys| {
        let settings = GatewaySettings { keys, ..settings(&["http://127.0.0.1:1/v1"]) };
        let shared = (metrics.clone(), Default::default(), Default::default());
        let gateway = Gateway::new(&settings, &classes(), (shared, &Arc::default()), (&Learned::default(), None));
        metrics.show(gateway.unwrap().shown());
        shown(&metrics)
    };
    let of = |text: &str| {
        ["engine_usable{", "quota_tokens{user=\"ann\"}", "quota_used_tokens{user=\"bob\"}"]
            .map(|name| text.contains(name))
    };
    assert_eq!(of(&show(vec![key("ann"), key("bob")])), [true; 3]);
    assert_eq!(of(&show(vec![key("ann")])), [true, true, false]);
    metrics.show(ShownGateway::default());
    assert_eq!(of(&shown(&metrics)), [false; 3]);
}

#[tokio::test]
async fn requests_that_wait_in_a_replaced_gateway_are_shown_too() {
    let client = Client::of("http://127.0.0.1:1/v1").await;
    // Gateways before and after a reload share their open requests.
    let open = ["large", "large", "other"].map(|model| {
        let open = client.gateway.live.enter(None);
        open.waits("normal", &model.into(), None);
        open
    });
    assert_eq!(client.gateway.engines()[0].waiting, 2);
    open[0].at_work();
    assert_eq!(client.gateway.engines()[0].waiting, 1);
}

#[tokio::test]
async fn a_prediction_takes_in_how_fast_the_class_may_leave() {
    let thin = "[class.thin]\nrate_down = \"8 kbit/s\"\n[[rule]]\nclass = \"thin\"\nasked_class = \"thin\"";
    let engine = engine(events(&format!("{TOKEN}data: [DONE]\n\n"))).await;
    let mut client = Client::under(settings(&[&engine]), Policy::from_toml(thin).unwrap()).await;
    // The first answer shows how fast the engine is. The way back takes longer: 220 ms for each token.
    for (class, predicted) in [("none", None), ("thin", Some("1100"))] {
        let mut request = chat(whole(r#"{"model":"large","stream":true,"max_tokens":5}"#.into()));
        request.headers_mut().insert("x-paced-class", class.parse().unwrap());
        let answer = client.requests.send_request(request).await.unwrap();
        let told = answer.headers().get("x-paced-predicted-ms").map(|ms| ms.to_str().unwrap());
        assert_eq!((answer.status().as_u16(), told), (200, predicted), "{class}");
        _ = answer.into_body().collect().await;
    }
}
