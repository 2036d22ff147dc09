//! Clients that take their answers so slowly that engines wait for them.

use engines::places::PrefixHashes;
use masque::h3::{Field, RequestHead};
use openai::{Operation, RoutingFields};
use role::holder::Holder;
use routes::{RouteQuery, Wanted};
use sched::route::ClientPath;
use tokio::{io::DuplexStream, time::timeout};

use super::*;

/// The longest time that a test waits for what has to happen.
const LONG: Duration = Duration::from_secs(60);

/// Begins a request to a gateway, over a connection that holds a kilobyte. Returns the client's end, and its record once it has ended.
async fn begin(gateway: &Arc<Gateway>, content: &str) -> (DuplexStream, mpsc::UnboundedReceiver<Served>) {
    let (mut ours, theirs) = tokio::io::duplex(1 << 10);
    let ((ended, served), gateway) = (mpsc::unbounded_channel(), gateway.clone());
    let answer = service_fn(move |request: Request<hyper::body::Incoming>| {
        let (ended, gateway) = (ended.clone(), gateway.clone());
        async move {
            let (parts, body) = request.into_parts();
            let (head, (exchange, awaited)) = (message::head(&parts), TcpExchange::new(body, Departure::default()));
            let (listener, path) = (([127, 0, 0, 1], 80).into(), PathStats::default());
            let asker = Asker { user: None, tenant: Ok(None), listener, client: None, path, refusal: None };
            tokio::spawn(async move {
                _ = ended.send(gateway.serve(Exchange::Tcp(exchange), head, &classes(), &asker).await);
            });
            let (head, answer) = awaited.answer().await?;
            Ok::<_, std::io::Error>(message::response(head, answer))
        }
    });
    tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), answer));
    let fields = "host: x\r\nconnection: close\r\ncontent-type: application/json";
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\ncontent-length: {}\r\n\r\n", content.len());
    ours.write_all(format!("{head}{content}").as_bytes()).await.unwrap();
    (ours, served)
}

/// A gateway with one engine, which works on one request at once and sends this answer.
async fn gateway(answer: String, stall_timeout: Duration) -> Arc<Gateway> {
    gateway_of(&engine(answer).await, stall_timeout)
}

/// The same with the engine at this address.
fn gateway_of(engine: &str, stall_timeout: Duration) -> Arc<Gateway> {
    let mut settings = settings(&[engine]);
    settings.models[0].max_in_flight = 1;
    settings.stall_timeout = stall_timeout;
    // Only decisions of an alias have records.
    let alias = Alias { name: "auto".into(), models: vec!["large".into()], policy: Routing::Rule, shadow: None };
    (settings.aliases, settings.decisions_bytes) = (vec![alias], 1 << 20);
    let (shared, spending) = (Default::default(), Arc::default());
    Gateway::new(&settings, &classes(), (shared, &spending), (&Learned::default(), None)).unwrap()
}

/// Starts an engine whose answer to its first request is what is sent here, each part as soon as it comes. Returns its address.
async fn engine_by_parts() -> (String, mpsc::UnboundedSender<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/v1", listener.local_addr().unwrap());
    let (parts, mut made) = mpsc::unbounded_channel::<String>();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = BytesMut::new();
        while !request.ends_with(b"}") && stream.read_buf(&mut request).await.unwrap() > 0 {}
        while let Some(part) = made.recv().await {
            stream.write_all(part.as_bytes()).await.unwrap();
        }
    });
    (address, parts)
}

/// The next chunk of a streamed answer, with this content.
fn chunk(content: &str) -> String {
    format!("{:x}\r\n{content}\r\n", content.len())
}

/// The last chunk of a streamed answer.
fn done() -> String {
    chunk("data: [DONE]\n\n") + "0\r\n\r\n"
}

/// An event with a token of 50 kB.
fn long_token() -> String {
    format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n", "x".repeat(50_000))
}

/// Waits for what has to happen.
async fn until(happens: impl Fn() -> bool) {
    let waits = async {
        while !happens() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, waits).await.expect("it happens");
}

/// Whether the engine has a request.
fn is_at_work(gateway: &Gateway) -> bool {
    gateway.models[0].engines.status()[0].in_flight > 0
}

/// Takes 40 KiB of an answer in each `pause`. Returns the answer's record.
async fn take_slowly(mut client: DuplexStream, mut served: mpsc::UnboundedReceiver<Served>, pause: Duration) -> Served {
    loop {
        if let Ok(served) = timeout(pause, served.recv()).await {
            return served.unwrap();
        }
        _ = client.read_exact(&mut [0; 40 << 10]).await;
    }
}

#[tokio::test]
async fn a_client_that_takes_a_stream_slowly_loses_it_to_a_request_that_waits_for_the_engine() {
    let (patience, pause) = (Duration::from_secs(1), Duration::from_millis(250));
    let gateway = gateway(events(&long_token().repeat(400)), patience).await;
    let (slow, slow_served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    let slow = tokio::spawn(take_slowly(slow, slow_served, pause));
    until(|| is_at_work(&gateway)).await;
    let (mut other, _served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    timeout(LONG, other.read_exact(&mut [0; 12])).await.expect("an answer").unwrap();
    let record = timeout(LONG, slow).await.unwrap().unwrap();
    assert_eq!(record.reason, "untaken");
}

#[tokio::test]
async fn a_slow_client_that_does_not_hold_its_engine_up_keeps_its_answer_though_another_request_waits() {
    let (engine, parts) = engine_by_parts().await;
    let gateway = gateway_of(&engine, LONG);
    let (mut slow, mut slow_served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    until(|| is_at_work(&gateway)).await;
    let (_other, _served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    until(|| gateway.engines()[0].waiting == 1).await;
    parts.send(events(&long_token().repeat(40))).unwrap();
    until(|| gateway.bodies.counted().1 > 1 << 20).await;
    // The engine goes on for longer than its client's patience, while the client still takes what came first. The engine sends nothing
    // meanwhile, so no socket has a part in this.
    tokio::time::pause();
    for _ in 0..20 {
        sleep(LONG / 6).await;
        slow.read_exact(&mut [0; 40 << 10]).await.unwrap();
    }
    tokio::time::resume();
    assert_eq!(gateway.engines()[0].waiting, 1, "the other request waits all the time");
    parts.send(chunk(TOKEN) + &done()).unwrap();
    timeout(LONG, slow.read_to_end(&mut Vec::new())).await.unwrap().unwrap();
    let record = slow_served.recv().await.unwrap();
    assert_eq!((record.reason, record.passed_tokens), ("answered", 41));
}

#[tokio::test]
async fn the_time_that_a_client_takes_for_a_comment_counts_as_no_silence_of_the_engine() {
    // Each part has its own chunk, so that the gateway gets no token in one piece with the comment.
    let (first, comment) = (long_token().repeat(20), format!(": {}\n\n", "x".repeat(500_000)));
    let gateway = gateway(events(&first) + &chunk(&comment) + &chunk(TOKEN) + &done(), LONG).await;
    let (mut slow, served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    timeout(LONG, slow.read_exact(&mut [0; 12])).await.unwrap().unwrap();
    until(|| !is_at_work(&gateway)).await;
    // All of the answer is read ahead, so no socket has a part in this.
    tokio::time::pause();
    let record = take_slowly(slow, served, LONG / 2).await;
    assert_eq!((record.reason, record.passed_tokens), ("answered", 21));
    assert_eq!(gateway.models[0].engines.status()[0].failed, 0);
}

#[tokio::test]
async fn a_client_that_takes_a_whole_answer_slowly_keeps_no_place_at_the_engine_and_gets_all_of_it() {
    let length = 800 << 10;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let gateway = gateway(format!("{head}content-length: {length}\r\n\r\n\"{}\"", "x".repeat(length - 2)), LONG).await;
    let (mut slow, _served) = begin(&gateway, r#"{"model":"large"}"#).await;
    timeout(LONG, slow.read_exact(&mut [0; 12])).await.unwrap().unwrap();
    let (mut other, _other_served) = begin(&gateway, r#"{"model":"large"}"#).await;
    timeout(LONG, other.read_exact(&mut [0; 12])).await.expect("an answer").unwrap();
    let mut rest = Vec::new();
    timeout(LONG, slow.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.ends_with(b"x\"") && rest.len() > length, "{}", rest.len());
}

#[tokio::test]
async fn a_stream_is_read_ahead_of_a_slow_client_and_keeps_its_place_no_longer_than_its_engine_needs() {
    let content = format!("{}data: [DONE]\n\n", long_token().repeat(40));
    let gateway = gateway(events(&content), LONG).await;
    let (mut slow, mut served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    timeout(LONG, slow.read_exact(&mut [0; 12])).await.unwrap().unwrap();
    let (mut other, _other_served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    timeout(LONG / 2, other.read_exact(&mut [0; 12])).await.expect("an answer").unwrap();
    let mut rest = Vec::new();
    timeout(LONG, slow.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.ends_with(b"\r\n0\r\n\r\n") && rest.len() > content.len(), "{}", rest.len());
    let record = served.recv().await.unwrap();
    assert_eq!((record.reason, record.passed_tokens), ("answered", 40));
}

#[tokio::test]
async fn what_is_read_ahead_of_a_client_counts_among_bodies_only_until_the_client_has_caught_up() {
    let (engine, parts) = engine_by_parts().await;
    let gateway = gateway_of(&engine, LONG);
    let (mut slow, _served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    until(|| is_at_work(&gateway)).await;
    let before = gateway.bodies.counted();
    parts.send(events(&long_token().repeat(40)) + &chunk(TOKEN)).unwrap();
    until(|| gateway.bodies.counted().1 > 1 << 20).await;
    let mut taken = BytesMut::new();
    while !taken.ends_with(chunk(TOKEN).as_bytes()) {
        assert!(timeout(LONG, slow.read_buf(&mut taken)).await.unwrap().unwrap() > 0, "the answer goes on");
        // Less than that is left of the answer then.
        assert!(taken.len() < 1 << 20 || gateway.bodies.counted().1 < 1 << 20, "it falls as the client catches up");
    }
    assert_eq!(gateway.bodies.counted(), before);
    assert!(is_at_work(&gateway), "the answer has not ended");
}

#[tokio::test]
async fn an_answer_is_read_on_as_soon_as_other_bodies_leave_room_though_its_client_takes_nothing() {
    let (engine, parts) = engine_by_parts().await;
    let gateway = gateway_of(&engine, 2 * LONG);
    let (mut slow, mut served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    until(|| is_at_work(&gateway)).await;
    let (bodies, bytes) = gateway.bodies.counted();
    let mut others = gateway.bodies.begin(Holder::User("other".into()));
    others.grow(gateway.settings.bodies_bytes as usize - bytes).unwrap();
    parts.send(events(&long_token().repeat(40)) + &done()).unwrap();
    // The answer has begun a share, for which there is no room.
    until(|| gateway.bodies.counted().0 == bodies + 2).await;
    drop(others);
    until(|| !is_at_work(&gateway)).await;
    timeout(LONG, slow.read_to_end(&mut Vec::new())).await.unwrap().unwrap();
    assert_eq!(served.recv().await.unwrap().reason, "answered");
}

#[tokio::test]
async fn a_prediction_does_not_count_a_request_whose_engine_has_ended_though_its_client_takes_the_answer_slowly() {
    let owed = |gateway: &Gateway| {
        let fields = vec![Field::new("x-paced-budget-ms", "60000")];
        let (scheme, authority, path, protocol) = (None, None, None, None);
        let head = RequestHead { method: "POST".into(), scheme, authority, path, protocol, fields };
        let asked = RoutingFields::read(br#"{"model":"auto"}"#).unwrap();
        let wanted = Wanted::of(&head, None, (Operation::ChatCompletions, &asked), 20).unwrap();
        let prefix = PrefixHashes::default();
        let (models, alias, class) = (&[0][..], Some(0), "default");
        let query = RouteQuery { models, alias, class, prefix: &prefix, is_retry: false, refuses_late: false };
        gateway.routes.route(query, &wanted, ClientPath::default()).unwrap().decision.unwrap().engines[0]
            .outstanding_tokens
    };
    let (engine, parts) = engine_by_parts().await;
    let gateway = gateway_of(&engine, LONG);
    let (mut slow, _served) = begin(&gateway, r#"{"model":"large","stream":true}"#).await;
    parts.send(events(&long_token().repeat(40))).unwrap();
    timeout(LONG, slow.read_exact(&mut [0; 12])).await.unwrap().unwrap();
    assert!(owed(&gateway) > 0, "the engine has not ended");
    parts.send(done()).unwrap();
    until(|| !is_at_work(&gateway)).await;
    assert_eq!(owed(&gateway), 0);
}
