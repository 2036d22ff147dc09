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
