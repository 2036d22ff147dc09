//! Requests by HTTP/1.1, over a pipe in place of a network.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use config::{
    gateway::{GatewaySettings, ModelSettings},
    policy::Policy,
};
use futures::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{Request, Response, body::Frame, client, server, service::service_fn};
use hyper_util::rt::TokioIo;
use pacing::path::PathStats;
use quic::class::{ClassMarks, ClassMetrics, PolicyRole};
use role::access::served::TokenUsage;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    time::{Instant as TokioInstant, sleep},
};

use super::*;
use crate::{departure::Departure, message, routes::tests::model};

type ToSend = UnsyncBoxBody<Bytes, Infallible>;

/// A client of a gateway with one model, whose engine has this address.
struct Client {
    requests: client::conn::http1::SendRequest<ToSend>,
    served: mpsc::UnboundedReceiver<Served>,
    /// What the gateway made of each answer, whatever of it HTTP/1.1 sends.
    contents: mpsc::UnboundedReceiver<Bytes>,
}

impl Client {
    async fn of(engine: &str) -> Self {
        let engines = vec![engine.parse().unwrap()];
        let model = ModelSettings { engines, affinity: false, ..model("large", 100, None) };
        let settings = GatewaySettings { models: vec![model], ..GatewaySettings::default() };
        let classes =
            Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| ClassMarks::default());
        let (shared, spending) = (Default::default(), Default::default());
        let gateway = Gateway::new(&settings, &classes, (shared, &spending), (&Learned::default(), None)).unwrap();
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let ((ended, served), (made, contents)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let classes = Arc::new(classes);
        let answer = service_fn(move |request: Request<hyper::body::Incoming>| {
            let (gateway, classes, ended, made) = (gateway.clone(), classes.clone(), ended.clone(), made.clone());
            async move {
                let (parts, body) = request.into_parts();
                let (head, (exchange, awaited)) = (message::head(&parts), TcpExchange::new(body, Departure::default()));
                let listener = ([127, 0, 0, 1], 80).into();
                let asker = Asker { user: None, listener, client: None, path: PathStats::default() };
                tokio::spawn(async move {
                    _ = ended.send(gateway.serve(Exchange::Tcp(exchange), &head, &classes, &asker).await);
                });
                let (head, answer) = awaited.answer().await?;
                let content = answer.collect().await?.to_bytes();
                _ = made.send(content.clone());
                Ok::<_, std::io::Error>(message::response::<Full<Bytes>>(head, content.into()))
            }
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
        let (requests, connection) = client::conn::http1::handshake(TokioIo::new(ours)).await.unwrap();
        tokio::spawn(connection);
        Self { requests, served, contents }
    }

    /// Asks for a chat; returns the status and the body of the answer.
    async fn chat(&mut self, body: ToSend) -> (u16, Bytes) {
        let answer = self.requests.send_request(chat(body)).await.unwrap();
        (answer.status().as_u16(), answer.into_body().collect().await.unwrap().to_bytes())
    }
}

fn chat(body: ToSend) -> Request<ToSend> {
    Request::post("/v1/chat/completions").header("content-type", "application/json").body(body).unwrap()
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

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_pays_for_the_prompt_that_the_engine_read() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = listener.local_addr().unwrap();
    let (asked, mut is_asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let asked = asked.clone();
            let silence = service_fn(move |request: Request<hyper::body::Incoming>| {
                let asked = asked.clone();
                async move {
                    _ = request.into_body().collect().await;
                    _ = asked.send(());
                    std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>().await
                }
            });
            tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), silence));
        }
    });
    let mut client = Client::of(&format!("http://{engine}/v1")).await;
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
