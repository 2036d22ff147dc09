//! Engines that fail in an answer that they have begun with success.

use tokio::{sync::Notify, time::timeout};

use super::{answer::HELD_EVENTS, *};
use crate::health::Found;

/// The end of a stream that failed, with this code.
fn error(code: u16) -> String {
    format!("data: {{\"error\":{{\"message\":\"a secret of the engine\",\"code\":{code}}}}}\n\ndata: [DONE]\n\n")
}

const ROLE: &str = ": ping\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

async fn failing(content: &str) -> String {
    // An engine that closes the connection before the end of its content would have failed in any case.
    engine(format!("{}0\r\n\r\n", events(content))).await
}

/// What engines have answered and failed.
fn counts(client: &Client) -> Vec<(u64, u64)> {
    let status = client.gateway.models[0].engines.status();
    status.into_iter().map(|engine| (engine.answered, engine.failed)).collect()
}

const STREAM: &str = r#"{"model":"large","stream":true}"#;

#[tokio::test]
async fn an_error_instead_of_tokens_is_a_failed_try_and_another_engine_answers() {
    let good = failing(&format!("{TOKEN}data: [DONE]\n\n")).await;
    let mut client = Client::with(settings(&[&failing(&error(500)).await, &good])).await;
    let (status, body) = client.chat(whole(STREAM.into())).await;
    assert!(status == 200 && body.starts_with(TOKEN.as_bytes()), "{status} {body:?}");
    assert_eq!((client.served.recv().await.unwrap().reason, counts(&client)), ("answered", vec![(0, 1), (1, 0)]));

    let settings = GatewaySettings { keys: vec![key()], ..settings(&[&failing(&error(500)).await]) };
    let mut client = Client::with(settings).await;
    let (status, body) = client.chat(whole(STREAM.into())).await;
    let served = client.served.recv().await.unwrap();
    assert_eq!((status, served.reason, served.usage), (502, "engine_failed", None), "{body:?}");
    assert!(!String::from_utf8_lossy(&body).contains("secret"), "{body:?}");
    assert_eq!((counts(&client), client.spending.of("ann", SystemTime::now())), (vec![(0, 1)], 0));
}

#[tokio::test]
async fn an_error_instead_of_tokens_that_refuses_the_request_is_the_answer() {
    let engines = [failing(&error(400)).await, failing(TOKEN).await];
    let settings = GatewaySettings { keys: vec![key()], ..settings(&[&engines[0], &engines[1]]) };
    let mut client = Client::with(settings).await;
    let answer = client.requests.send_request(chat(whole(STREAM.into()))).await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), answer.headers()["content-type"].as_bytes()),
        (400, &b"application/json"[..])
    );
    assert_eq!(answer.headers()["x-paced-model"], "large");
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["error"]["code"], 400, "{body}");
    let served = client.served.recv().await.unwrap();
    assert_eq!((served.status, served.reason, served.usage), (Some(400), "answered", None));
    assert_eq!((counts(&client), client.spending.of("ann", SystemTime::now())), (vec![(1, 0), (0, 0)], 0));
}

#[tokio::test]
async fn an_error_after_tokens_passes_once_and_the_engine_has_failed() {
    for code in [400, 500] {
        let content = format!("{ROLE}{TOKEN}{}", error(code));
        let mut client = Client::with(settings(&[&failing(&content).await])).await;
        let (status, body) = client.chat(whole(STREAM.into())).await;
        assert_eq!((status, body), (200, Bytes::from(content)));
        let served = client.served.recv().await.unwrap();
        assert_eq!((served.status, served.reason, served.output_tokens()), (Some(200), "engine_failed", 1));
        assert_eq!(counts(&client), [(0, 1)]);
    }
}

/// Starts an engine that sends each part of a streamed answer after its pause, and then waits for `end` before it closes the connection.
async fn slow(parts: Vec<(Duration, String)>, end: Arc<Notify>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = BytesMut::new();
            while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
            _ = stream.write_all(events("").as_bytes()).await;
            for (pause, part) in &parts {
                sleep(*pause).await;
                _ = stream.write_all(format!("{:x}\r\n{part}\r\n", part.len()).as_bytes()).await;
            }
            end.notified().await;
        }
    });
    address
}

const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn an_engine_that_breaks_off_before_its_first_token_is_replaced_by_another_whatever_it_has_sent() {
    let done = format!("{TOKEN}data: [DONE]\n\n");
    for before in [ROLE, ": ping\n\n", "data: {\"choices\":[]}\n\n"] {
        let engines = [engine(events(before)).await, failing(&done).await];
        let mut client = Client::with(settings(&[&engines[0], &engines[1]])).await;
        let (status, body) = client.chat(whole(STREAM.into())).await;
        assert_eq!((status, body), (200, Bytes::from(done.clone())), "{before}");
        assert_eq!(counts(&client), [(0, 1), (1, 0)]);
    }
}

#[tokio::test]
async fn events_before_the_first_token_are_held_for_a_while_and_up_to_a_size() {
    let many = ": ping\n\n".repeat(HELD_EVENTS.0 / 8 + 1);
    for before in [ROLE, &many] {
        let end = Arc::<Notify>::default();
        let mut client = Client::of(&slow(vec![(Duration::ZERO, before.to_owned())], end.clone()).await).await;
        let request = chat(whole(STREAM.into()));
        let answer = tokio::spawn(client.requests.send_request(request));
        // The answer begins although there is no token, so the failure that follows is an event.
        assert_eq!(timeout(LONG, client.begun.recv()).await.unwrap(), Some(200));
        end.notify_one();
        let body = answer.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes();
        assert!(body.starts_with(before.as_bytes()) && body.ends_with(b"}\n\n"), "{body:?}");
        assert_eq!((client.served.recv().await.unwrap().reason, counts(&client)), ("engine_failed", vec![(0, 1)]));
    }
    let empty = format!("{ROLE}data: [DONE]\n\n");
    let mut client = Client::of(&failing(&empty).await).await;
    assert_eq!(client.chat(whole(STREAM.into())).await, (200, Bytes::from(empty)), "an answer without tokens");
}

#[tokio::test]
async fn an_engine_may_be_silent_before_its_first_token_as_long_as_before_its_answer_and_then_for_less() {
    let (end, pause) = (Arc::<Notify>::default(), Duration::from_millis(300));
    let parts = vec![(Duration::ZERO, ROLE.to_owned()), (pause, TOKEN.to_owned())];
    let engine = slow(parts, end).await;
    let stall_timeout = Duration::from_millis(50);
    let mut client =
        Client::with(GatewaySettings { stall_timeout, answer_timeout: 2 * LONG, ..settings(&[&engine]) }).await;
    let (status, body) = timeout(LONG, client.chat(whole(STREAM.into()))).await.unwrap();
    assert!(status == 200 && body.starts_with(format!("{ROLE}{TOKEN}").as_bytes()), "{status} {body:?}");
    assert_eq!(client.served.recv().await.unwrap().reason, "engine_timeout", "after the token");
}

#[tokio::test]
async fn answers_without_streaming_that_take_too_long_take_no_engine_away_that_answers_its_checks() {
    for (stream, is_usable) in [("", true), (r#","stream":true"#, false)] {
        // The system accepts connections for it.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", silent.local_addr().unwrap());
        let answer_timeout = Duration::from_millis(20);
        let mut client = Client::with(GatewaySettings { answer_timeout, ..settings(&[&url, &url]) }).await;
        let engines = client.gateway.models[0].engines.clone();
        engines.expect(true, u64::MAX);
        engines.checked(0, Found::Ready, "");
        for _ in 0..5 {
            let (status, _) = client.chat(whole(format!(r#"{{"model":"large"{stream}}}"#))).await;
            assert_eq!((status, client.served.recv().await.unwrap().reason), (504, "engine_timeout"));
        }
        assert_eq!((engines.loads()[0].1, engines.status()[0].failed), (is_usable, 5), "{stream}");
    }
}
