//! Engines that accept no connections, or none any more.

use std::sync::atomic::{AtomicUsize, Ordering};

use ::engines::{
    health::{Fault, Found, SILENCES},
    places::{Claim, EnginePlace, Engines, Turn},
};
use tokio::{task::yield_now, time::timeout};

use super::*;
use crate::message;

const CLOSED: &str = "http://127.0.0.1:1/v1";

const LARGE: &str = r#"{"model":"large"}"#;

const ALIAS: &str = r#"{"model":"auto"}"#;

const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";

/// Takes a place at an engine.
fn take(engines: &Arc<Engines>) -> EnginePlace {
    match engines.take(Claim::default(), &[]).unwrap() {
        Turn::Now(place) => place,
        Turn::Later(_) => panic!("no engine has room"),
    }
}

/// A gateway with a large and a small model with these engines, for each of which one request may wait, and an alias for both.
fn both(large: &[String], small: &[String]) -> GatewaySettings {
    let names = ["large", "small"].map(str::to_owned).to_vec();
    let models = [("large", large), ("small", small)].map(|(name, engines)| {
        let engines = engines.iter().map(|engine| engine.parse().unwrap()).collect();
        ModelSettings { engines, affinity: false, ..model(name) }
    });
    let alias = Alias { name: "auto".into(), models: names, policy: Routing::Rule, shadow: None };
    GatewaySettings { models: models.to_vec(), aliases: vec![alias], ..GatewaySettings::default() }
}

/// Waits for a condition that other tasks bring about.
async fn until(is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            yield_now().await;
        }
    };
    timeout(Duration::from_secs(30), waiting).await.unwrap();
}

/// Starts an engine whose first connection answers all requests but the last, and then ends. There is no other connection. Also returns how
/// many last requests it has read.
async fn crashing(read: Arc<AtomicUsize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        drop(listener);
        for answer in [&b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"[..], b""] {
            let mut request = BytesMut::new();
            while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
            read.fetch_add(usize::from(answer.is_empty() && !request.is_empty()), Ordering::Relaxed);
            stream.write_all(answer).await.unwrap();
        }
    });
    address
}

#[tokio::test]
async fn a_request_that_makes_engines_end_takes_two_of_them_at_most_and_none_of_the_aliass_other_models() {
    for (large, named, most) in [(3, LARGE, 2), (1, ALIAS, 1)] {
        let read = Arc::<AtomicUsize>::default();
        let mut urls = Vec::new();
        for _ in 0..=large {
            urls.push(crashing(read.clone()).await);
        }
        let (small, large) = (urls.split_off(large), urls);
        let mut client = Client::with(both(&large, &small)).await;
        for (at, name, engines) in [(0, "large", large.len()), (1, "small", 1)] {
            let known = client.gateway.models[at].engines.clone();
            let mut busy = Vec::new();
            for _ in 0..engines {
                let (status, _) = client.chat(whole(format!(r#"{{"model":"{name}"}}"#))).await;
                assert_eq!(status, 200, "each engine in turn");
                busy.push(take(&known));
            }
        }
        let (status, body) = client.chat(whole(named.into())).await;
        assert_eq!((status, read.load(Ordering::Relaxed)), (502, most), "{named}: {body:?}");
        let loads = client.gateway.models[0].engines.loads();
        assert_eq!(loads.iter().filter(|(_, is_usable)| !is_usable).count(), most, "they accept no connections");
    }
}

#[tokio::test]
async fn a_waiting_request_that_gets_an_engine_out_of_reach_waits_for_another() {
    let mut client = Client::with(settings(&[CLOSED, &engine(ANSWER).await])).await;
    let engines = client.gateway.models[0].engines.clone();
    // With checks, and none runs here: it does not come back by itself.
    engines.expect(true, u64::MAX);
    engines.failed(0, Fault::OutOfReach, "");
    let busy = take(&engines);
    let answer = tokio::spawn(client.requests.send_request(chat(whole(LARGE.into()))));
    for failed in 2..5 {
        until(|| engines.waiting() == 1).await;
        engines.checked(0, Found::Ready, "");
        assert_eq!(engines.waiting(), 0);
        until(|| engines.status()[0].failed == failed).await;
    }
    until(|| engines.waiting() == 1).await;
    drop(busy);
    assert_eq!(answer.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn a_request_that_an_engine_failed_and_none_else_can_get_has_failed_there() {
    let mut client = Client::with(both(&[engine("").await, CLOSED.into()], &[engine(ANSWER).await])).await;
    let (status, body) = client.chat(whole(ALIAS.into())).await;
    assert_eq!((status, client.served.recv().await.unwrap().reason), (502, "engine_failed"), "{body:?}");
}

#[tokio::test]
async fn a_request_is_retried_if_another_engine_or_model_takes_it_over_and_not_before() {
    let retries = |client: &Client| {
        let text = shown(&client.gateway.metrics);
        let of = |name: &str| text.contains(&format!("gateway_retries_total{{model=\"{name}\"}} 1\n"));
        assert_eq!(
            text.matches("gateway_retries_total{").count(),
            ["large", "small"].into_iter().filter(|name| of(name)).count()
        );
        ["large", "small"].map(of)
    };
    let unreached = [CLOSED.to_owned()];
    for (is_down, expected) in [(false, [true, false]), (true, [false; 2])] {
        let mut client = Client::with(both(&unreached, &unreached)).await;
        let small = client.gateway.models[1].engines.clone();
        small.expect(true, u64::MAX);
        if is_down {
            small.failed(0, Fault::OutOfReach, "");
        }
        assert_eq!(client.chat(whole(ALIAS.into())).await.0, 503);
        assert_eq!(retries(&client), expected);
    }
    for (is_busy, expected) in [(false, (200, [true, false])), (true, (502, [false; 2]))] {
        let mut client = Client::with(settings(&[&engine("").await, &engine(ANSWER).await])).await;
        let engines = client.gateway.models[0].engines.clone();
        let first = take(&engines);
        let second = is_busy.then(|| take(&engines));
        drop(first);
        let (status, _) = client.chat(whole(LARGE.into())).await;
        assert_eq!((status, retries(&client)), expected);
        drop(second);
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_second_model_does_not_include_that_for_the_first() {
    let unreached = [CLOSED.to_owned()];
    let mut client = Client::with(both(&unreached, &unreached)).await;
    let [large, small] = [0, 1].map(|model| client.gateway.models[model].engines.clone());
    // So that the large model is chosen first.
    let (_large, busy) = (take(&large), (take(&small), small.take(Claim::default(), &[]).unwrap()));
    let answer = tokio::spawn(client.requests.send_request(chat(whole(ALIAS.into()))));
    until(|| large.waiting() == 1).await;
    sleep(Duration::from_secs(60)).await;
    drop(busy);
    large.failed(0, Fault::OutOfReach, "");
    assert_eq!(answer.await.unwrap().unwrap().status(), 503);
    let text = shown(&client.gateway.metrics);
    assert!(text.contains("gateway_wait_seconds_sum{model=\"small\"} 0.0\n"), "{text}");
}

#[tokio::test]
async fn a_reload_keeps_what_is_known_of_engines_and_the_hashes_of_prompts() {
    let make = |urls: &[&str], keys, health_path: Option<&str>, before: Option<&Gateway>| {
        let mut settings = GatewaySettings { keys, ..settings(urls) };
        settings.models[0].health_path = health_path.map(|path| path.parse().unwrap());
        Gateway::new(&settings, &classes(), (Default::default(), &Arc::default()), (&Learned::default(), before))
            .unwrap()
    };
    let (hung, other) = ("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1");
    let before = make(&[hung, other], Vec::new(), Some("/health"), None);
    (0..SILENCES).for_each(|_| before.models[0].engines.checked(0, Found::Silent, ""));
    for (health_path, is_usable) in [(Some("/health"), false), (None, true)] {
        let after = make(&[other, hung], vec![key()], health_path, Some(&before));
        assert_eq!(after.models[0].engines.loads(), [(0, true), (0, is_usable)], "{health_path:?}");
        let head = message::head(&hyper::Request::post("/").body(()).unwrap().into_parts().0);
        let of = |gateway: &Gateway| gateway.prefixes.of(&head, None, [&[b'x'; 600], b""]);
        assert_eq!(of(&before), of(&after));
    }
}
