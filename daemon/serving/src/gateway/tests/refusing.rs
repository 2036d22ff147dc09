//! Engines that refuse a request with a status of their own, or send something other than an answer.

use ::engines::{
    health::FAULTS,
    places::{Claim, Turn},
};

use super::{failing::counts, *};

const GOOD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

const WHOLE: &str = r#"{"model":"large"}"#;

const STREAM: &str = r#"{"model":"large","stream":true}"#;

/// An answer with this status and with a text of the engine.
fn refusal(status: u16) -> String {
    format!("HTTP/1.1 {status} No\r\ncontent-type: text/plain\r\nretry-after: 7\r\ncontent-length: 3\r\n\r\nbad")
}

#[tokio::test]
async fn a_status_that_may_be_about_the_engine_itself_is_a_failed_try_and_ejects_no_engine() {
    let good = engine(GOOD).await;
    for status in [403, 404, 405, 408] {
        let mut client = Client::with(settings(&[&engine(refusal(status)).await, &good])).await;
        for answered in 1..=2 * FAULTS {
            let request = if answered % 2 == 0 { WHOLE } else { STREAM };
            assert_eq!(client.chat(whole(request.into())).await, (200, Bytes::from("{}")), "{status}");
            assert_eq!(counts(&client), [(0, answered.into()), (answered.into(), 0)]);
        }
        let trouble = client.gateway.models[0].engines.status()[0].trouble.clone().unwrap();
        assert!(trouble.contains(&status.to_string()), "{trouble}");
    }
    for status in [400, 413, 422] {
        let mut client = Client::with(settings(&[&engine(refusal(status)).await, &good])).await;
        assert_eq!(client.chat(whole(STREAM.into())).await, (status, Bytes::from("bad")), "the request is at fault");
        assert_eq!(counts(&client), [(1, 0), (0, 0)]);
    }
}

/// The field of an answer with when to ask again, in seconds.
fn retry_after_s(answer: &hyper::Response<hyper::body::Incoming>) -> u64 {
    answer.headers()["retry-after"].to_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn an_engine_that_refuses_for_its_load_gets_no_new_requests_and_is_not_ejected() {
    let good = engine(GOOD).await;
    for status in [429, 503] {
        let mut client = Client::with(settings(&[&engine(refusal(status)).await, &good])).await;
        for answered in 1..=2 * FAULTS {
            assert_eq!(client.chat(whole(WHOLE.into())).await, (200, Bytes::from("{}")), "{status}");
            assert_eq!(counts(&client), [(0, 1), (answered.into(), 0)]);
        }
        let view = &client.gateway.engines()[0];
        let trouble = view.trouble.clone().unwrap();
        assert_eq!((view.health.name(), view.health.ejected_for_ns()), ("refusing", 0));
        let why = format!("Z: the engine failed: it refused the request with {status}");
        assert!(trouble.starts_with("it refuses requests until 20") && trouble.ends_with(&why), "{trouble}");
        client.gateway.metrics.show(client.gateway.shown());
        let text = shown(&client.gateway.metrics);
        let of = |name: &str, engine: u32| format!("gateway_engine_{name}{{model=\"large\",engine=\"{engine}\"}} ");
        for line in [of("usable", 1) + "1\n", of("refuses_seconds", 2) + "0\n"] {
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(!text.contains(&(of("refuses_seconds", 1) + "0\n")), "{text}");
    }
}

#[tokio::test]
async fn requests_for_a_model_whose_only_engine_refuses_them_wait_and_do_not_reach_it() {
    let mut client = Client::of(&engine(refusal(429).replace(": 7", ": 60")).await).await;
    assert_eq!(client.chat(whole(WHOLE.into())).await, (429, Bytes::from("bad")), "its own refusal passes");
    let engines = client.gateway.models[0].engines.clone();
    let waiting = tokio::spawn(client.requests.send_request(chat(whole(WHOLE.into()))));
    let is_waiting = async {
        while engines.waiting() < 1 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), is_waiting).await.unwrap();
    assert_eq!((engines.in_flight(0), counts(&client)), (0, vec![(0, 1)]), "the engine does not get it");
    // Without checks: the engine gets no requests for a while, and the waiting one is told at once.
    engines.failed(0, ::engines::health::Fault::OutOfReach, "");
    assert_eq!(waiting.await.unwrap().unwrap().status(), 503);
}

#[tokio::test]
async fn a_request_that_another_engine_failed_is_answered_although_all_others_refuse_new_ones() {
    let mut client = Client::with(settings(&[&engine(refusal(500)).await, &engine(GOOD).await])).await;
    client.gateway.models[0].engines.refused(1, None);
    assert_eq!(client.chat(whole(WHOLE.into())).await, (200, Bytes::from("{}")));
    assert_eq!(counts(&client), [(0, 1), (1, 0)]);
}

#[tokio::test]
async fn a_model_that_refuses_requests_for_longer_than_they_have_leaves_them_to_another_or_to_a_later_try() {
    let good = engine(GOOD).await;
    let names = ["large", "small"].map(str::to_owned).to_vec();
    let of = |name: &String| ModelSettings { name: name.clone(), ..settings(&[&good]).models.remove(0) };
    let models = names.iter().map(of).collect();
    let aliases = vec![Alias { name: "auto".into(), models: names, policy: Routing::Rule, shadow: None }];
    let urgent = "[class.urgent]\ndeadline_ms = 3000\nlate = \"refuse\"\n[[rule]]\nclass = \"urgent\"\nmodel = [\"auto\", \"large\"]";
    let settings = GatewaySettings { models, aliases, ..GatewaySettings::default() };
    let mut client = Client::under(settings, Policy::from_toml(urgent).unwrap()).await;
    client.gateway.models[0].engines.refused(0, Some(60_000_000_000));
    for (model, status, by) in [("auto", 200, "small"), ("large", 503, "large")] {
        let answer = client.requests.send_request(chat(whole(format!(r#"{{"model":"{model}"}}"#)))).await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers()["x-paced-model"].as_bytes()), (status, by.as_bytes()));
        if status == 503 {
            assert!((50..=60).contains(&retry_after_s(&answer)), "{answer:?}");
        }
        _ = answer.into_body().collect().await;
    }
    client.served.recv().await.unwrap();
    assert_eq!(client.served.recv().await.unwrap().reason, "deadline_unreachable");
}

#[tokio::test]
async fn an_engines_own_refusal_passes_if_no_other_engine_is_left() {
    let [refusing, also, full] = [engine(refusal(404)).await, engine(refusal(429)).await, engine(refusal(503)).await];
    let (good, unreached) = (engine(GOOD).await, "http://127.0.0.1:1/v1");
    for (engines, is_busy, status, failed) in [
        (&[&refusing[..]][..], false, 404, vec![1]),
        (&[&refusing, &also], false, 429, vec![1, 1]),
        (&[&also, &full], false, 503, vec![1, 1]),
        (&[&refusing, unreached], false, 404, vec![1, 1]),
        (&[&refusing, &good], true, 404, vec![1, 0]),
    ] {
        for body in [WHOLE, STREAM] {
            let mut client = Client::with(GatewaySettings { keys: vec![key()], ..settings(engines) }).await;
            let take = || match client.gateway.models[0].engines.take(Claim::default(), &[]).unwrap() {
                Turn::Now(place) => place,
                Turn::Later(_) => panic!("no engine has room"),
            };
            let busy = is_busy.then(|| [take(), take()].into_iter().last());
            let answer = client.requests.send_request(chat(whole(body.into()))).await.unwrap();
            let field = |name: &str| answer.headers().get(name).map(|value| value.to_str().unwrap());
            assert_eq!((answer.status().as_u16(), field("content-type")), (status, Some("text/plain")));
            assert_eq!(["retry-after", "x-paced-model"].map(field), [Some("7"), Some("large")]);
            assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "bad");
            let served = client.served.recv().await.unwrap();
            assert_eq!((served.status, served.reason, served.usage), (Some(status), "answered", None));
            assert_eq!(counts(&client), failed.iter().map(|failed| (0, *failed)).collect::<Vec<_>>());
            assert_eq!(client.spending.of("ann", SystemTime::now()), 0);
            drop(busy);
        }
    }
    // An engine that fails contradicts the refusal.
    let mut client = Client::with(settings(&[&refusing, &engine(refusal(500)).await])).await;
    assert_eq!(client.chat(whole(WHOLE.into())).await.0, 502);
}

#[tokio::test]
async fn a_redirect_an_empty_answer_and_a_page_instead_of_events_are_failed_tries() {
    let page = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>";
    let encoded = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x0b";
    let empty = GOOD.replace("length: 2\r\n\r\n{}", "length: 0\r\n\r\n");
    let good = engine(GOOD).await;
    for (request, answer) in [
        (WHOLE, "HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"),
        (STREAM, "HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"),
        (WHOLE, "HTTP/1.1 204 No Content\r\n\r\n"),
        (STREAM, "HTTP/1.1 204 No Content\r\n\r\n"),
        (WHOLE, &empty),
        (STREAM, &empty),
        (STREAM, page),
        (STREAM, encoded),
        (WHOLE, encoded),
    ] {
        let failing = engine(answer.to_owned()).await;
        let mut client = Client::with(settings(&[&failing, &good])).await;
        assert_eq!(client.chat(whole(request.into())).await, (200, Bytes::from("{}")), "{request} {answer}");
        assert_eq!(counts(&client), [(0, 1), (1, 0)], "{request} {answer}");

        let mut client = Client::with(GatewaySettings { keys: vec![key()], ..settings(&[&failing]) }).await;
        let mut asked = chat(whole(request.into()));
        asked.headers_mut().insert("x-paced-budget-ms", 60_000.into());
        let status = client.requests.send_request(asked).await.unwrap().status();
        let served = client.served.recv().await.unwrap();
        assert_eq!((status.as_u16(), served.reason, served.usage), (502, "engine_failed", None), "{request} {answer}");
        assert_eq!(client.spending.of("ann", SystemTime::now()), 0);
        let text = shown(&client.gateway.metrics);
        assert!(text.contains("result=\"missed\"} 1\n") && !text.contains("result=\"met\""), "{text}");
    }
}

#[tokio::test]
async fn a_whole_answer_keeps_its_encoding_although_the_engine_is_asked_for_none() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client::of(&format!("http://{}/v1", listener.local_addr().unwrap())).await;
    let (heads, mut asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = BytesMut::new();
        while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
        _ = heads.send(String::from_utf8(request.to_vec()).unwrap());
        let head = GOOD.replace("\r\n\r\n{}", "\r\ncontent-encoding: gzip\r\n\r\n");
        _ = stream.write_all(&[head.as_bytes(), b"\x1f\x8b"].concat()).await;
    });
    let mut request = chat(whole(WHOLE.into()));
    request.headers_mut().insert("accept-encoding", HeaderValue::from_static("gzip, br"));
    let answer = client.requests.send_request(request).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers()["content-encoding"].as_bytes()), (200, &b"gzip"[..]));
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), &b"\x1f\x8b"[..]);
    let head = asked.recv().await.unwrap();
    let encodings: Vec<_> = head.lines().filter_map(|line| line.strip_prefix("accept-encoding: ")).collect();
    assert_eq!(encodings, ["identity"]);
}

#[test]
fn a_file_without_a_key_is_no_key() {
    let file = std::env::temp_dir().join(format!("paced-refusing-{}.key", std::process::id()));
    for (text, key) in [(" sk-1\n", Some("Bearer sk-1")), ("", None), (" \n", None), ("a\u{7f}b", None)] {
        std::fs::write(&file, text).unwrap();
        match (read_key(&file), key) {
            (Ok(read), Some(key)) => assert_eq!(read.as_bytes(), key.as_bytes()),
            (Err(error), None) => assert_eq!(error.to_string(), format!("{} holds no key", file.display())),
            (read, _) => panic!("{text:?}: {read:?}"),
        }
        let mut settings = settings(&["http://127.0.0.1:1/v1"]);
        settings.models[0].key_file = Some(file.clone());
        let gateway =
            Gateway::new(&settings, &classes(), (Default::default(), &Arc::default()), (&Learned::default(), None));
        assert_eq!(gateway.is_ok(), key.is_some(), "{text:?}");
    }
    std::fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn an_encoded_body_is_refused_with_the_remedy() {
    let good = engine(GOOD).await;
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("Identity", 200)] {
        let mut client = Client::of(&good).await;
        let mut asked = chat(whole(WHOLE.into()));
        asked.headers_mut().insert("content-encoding", HeaderValue::from_static(encoding));
        let answer = client.requests.send_request(asked).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{encoding}");
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let is_told = String::from_utf8_lossy(&body).contains("send the body without content-encoding");
        assert_eq!(is_told, status == 415, "{body:?}");
    }
}
