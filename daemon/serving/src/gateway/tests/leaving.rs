//! Clients that leave before their answers are complete.

use super::*;

/// Starts an engine that begins each answer with these bytes and never completes it. Returns its address, and what tells that it has begun
/// an answer, and that the connection of one has ended.
async fn stalling(begin: String) -> (String, mpsc::UnboundedReceiver<()>, mpsc::UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    let ((asked, is_asked), (ended, is_ended)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (begin, asked, ended) = (begin.clone(), asked.clone(), ended.clone());
            tokio::spawn(async move {
                let mut request = BytesMut::new();
                while !request.ends_with(b"}") && stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
                _ = stream.write_all(begin.as_bytes()).await;
                _ = asked.send(());
                while stream.read_buf(&mut request).await.is_ok_and(|bytes| bytes > 0) {}
                _ = ended.send(());
            });
        }
    });
    (address, is_asked, is_ended)
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_pays_for_the_prompt_that_the_engine_read() {
    let (engine, mut is_asked, _) = stalling(String::new()).await;
    let mut client = Client::of(&engine).await;
    let body = format!(r#"{{"model":"large","messages":"{}"}}"#, "x".repeat(4_000));
    let prompt_tokens = body.len() as u64 / 4;
    let waiting = tokio::spawn(client.requests.send_request(chat(whole(body))));
    is_asked.recv().await.unwrap();
    waiting.abort();
    drop(client.requests);
    let served = client.served.recv().await.unwrap();
    assert_eq!((served.status, served.reason), (None, "cancelled"));
    assert_eq!(served.usage, Some(TokenUsage { prompt_tokens, completion_tokens: 0 }));
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_at_the_engine_without_any_delay_with_and_without_streaming() {
    for (begin, is_stream) in [(events(TOKEN), true), (String::new(), false)] {
        let (engine, mut is_asked, mut is_ended) = stalling(begin).await;
        let mut client = Client::of(&engine).await;
        let body = format!(r#"{{"model":"large","stream":{is_stream}}}"#);
        let waiting = tokio::spawn(client.requests.send_request(chat(whole(body))));
        is_asked.recv().await.unwrap();
        if is_stream {
            assert_eq!(client.begun.recv().await, Some(200));
        }
        // Time moves on only if nothing is left to do but to wait for a timer: work of the gateway that needs no timer takes no time.
        tokio::time::pause();
        let left = TokioInstant::now();
        waiting.abort();
        drop(client.requests);
        let served = client.served.recv().await.unwrap();
        assert_eq!((served.reason, left.elapsed()), ("cancelled", Duration::ZERO), "streaming: {is_stream}");
        tokio::time::resume();
        is_ended.recv().await.unwrap();
    }
}

/// An engine that takes TCP connections and leaves their TLS handshakes unanswered: for the gateway, that is like a host that drops
/// packets. Returns its URL, a file with authorities, and its socket.
async fn unreachable(name: &str) -> (String, std::path::PathBuf, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let rcgen::CertifiedKey { cert, .. } = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let file = std::env::temp_dir().join(format!("paced-leaving-{}-{name}.pem", std::process::id()));
    std::fs::write(&file, cert.pem()).unwrap();
    (format!("https://{}/v1", listener.local_addr().unwrap()), file, listener)
}

#[tokio::test]
async fn a_client_that_leaves_before_its_engine_is_reached_pays_nothing_and_after_a_while_the_engine_has_failed() {
    let (engine, authorities, _listener) = unreachable("left").await;
    for (waits_ms, failed) in [(1_000, 0), (2_000, 1)] {
        let mut settings = GatewaySettings { keys: vec![key()], ..settings(&[&engine]) };
        settings.models[0].ca_file = Some(authorities.clone());
        let mut client = Client::with(settings).await;
        let body = format!(r#"{{"model":"large","messages":"{}"}}"#, "x".repeat(4_000));
        tokio::time::pause();
        let waiting = tokio::spawn(client.requests.send_request(chat(whole(body))));
        sleep(Duration::from_millis(waits_ms)).await;
        waiting.abort();
        drop(client.requests);
        let served = client.served.recv().await.unwrap();
        tokio::time::resume();
        assert_eq!((served.status, served.reason, served.usage), (None, "cancelled", None), "{waits_ms} ms");
        assert_eq!(client.spending.of("ann", SystemTime::now()), 0);
        let engines = &client.gateway.models[0].engines;
        assert_eq!((engines.status()[0].failed, engines.is_alive()), (failed, failed == 0), "{waits_ms} ms");
    }
    std::fs::remove_file(authorities).unwrap();
}

#[tokio::test]
async fn an_engine_that_is_not_reached_within_the_time_for_an_answer_is_out_of_reach() {
    let (engine, authorities, _listener) = unreachable("late").await;
    let good = super::engine("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    let mut settings = GatewaySettings { answer_timeout: Duration::from_secs(1), ..settings(&[&engine, &good]) };
    settings.models[0].ca_file = Some(authorities.clone());
    let mut client = Client::with(settings).await;
    let (status, body) = client.chat(whole(r#"{"model":"large"}"#.into())).await;
    assert_eq!((status, &body[..]), (200, &b"{}"[..]), "{}", client.served.recv().await.unwrap().reason);
    let status = client.gateway.models[0].engines.status();
    assert_eq!(status.iter().map(|engine| engine.failed).collect::<Vec<_>>(), [1, 0]);
    std::fs::remove_file(authorities).unwrap();
}
