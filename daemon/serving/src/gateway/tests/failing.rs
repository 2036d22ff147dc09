//! Engines that report a failure within an answer that they begin with success, as vLLM does.

use super::*;

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
