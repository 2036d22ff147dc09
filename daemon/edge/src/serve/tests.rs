//! Requests of local clients on their way to gateways.

use std::time::Duration;

use futures::FutureExt as _;
use masque::h3::Field;
use quic::{class::Class, datagrams::Schedules, endpoint::Transport};
use relay_client::{
    access::{Access, TokenSource},
    endpoint::Endpoint,
};
use serving::entrance::GatewayAccess as _;
use test_relay::{Does, TestRelay, eventually};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use uplink::UplinkResources;

use super::*;
use crate::tests::{access_to, replaced::serve_on, start, unreached};

/// The head of a request.
fn head() -> RequestHead {
    let (scheme, authority, path, protocol) = (Some("https".into()), None, Some("/v1/models".into()), None);
    RequestHead { method: "GET".into(), scheme, authority, path, protocol, fields: Vec::new() }
}

#[test]
fn bytes_of_requests_and_answers_count_at_their_local_address() {
    let counters = LocalAddressCounters::default();
    let traffic = Traffic::of([Some(moved(&counters)), None]);
    traffic.add_up(3, 0);
    traffic.add_down(5, 0);
    assert_eq!((counters.bytes_up.get(), counters.bytes_down.get()), (3, 5));
}

#[tokio::test]
async fn an_answer_counts_at_its_path_with_the_length_that_its_head_names() {
    let relay = TestRelay::start(Does::SayNothing, true);
    let access = access_to(relay.endpoint(), UplinkResources::default());
    let (uplink, health) = (access.uplink.clone(), Arc::new(Mutex::new(vec![GatewayHealth::default()])));
    let running = start(&uplink);
    let gateways = ToGateways { moved: Arc::default(), accesses: vec![access], health };
    let link = uplink.link().await.unwrap();
    let line = link.line().clone();
    let left = || line.placed(Duration::from_secs(1)).iter().map(|placed| placed.bytes).collect::<Vec<_>>();
    let terms = Arc::<Class>::default().terms(None);
    let (_request, place) = gateways.send(link, || terms, gateways.count(0, 0), head).await.unwrap();
    place.traffic.add_up(100, 0);
    let usual = left();
    let answer = |length: &str| {
        let fields = vec![Field::new("content-length", length.to_owned())];
        gateways.answered(&place, Some(&ResponseHead { status: 200, fields }));
        left()
    };
    assert_eq!(answer("many"), usual, "its class's");
    assert_eq!(answer("9000000"), [9_000_000]);
    place.traffic.add_down(8_000_000, 0);
    assert_eq!((left(), left()), (vec![8_000_000], vec![1_000_000]), "a second later, its rate is zero");
    running.abort();
}

#[tokio::test]
async fn a_request_that_waits_for_its_turn_has_the_head_and_terms_of_the_time_at_which_it_leaves() {
    let relay = TestRelay::start(Does::SayNothing, true);
    let access = access_to(relay.endpoint(), UplinkResources::default());
    let (uplink, health) = (access.uplink.clone(), Arc::new(Mutex::new(vec![GatewayHealth::default()])));
    let running = start(&uplink);
    let gateways = ToGateways { moved: Arc::default(), accesses: vec![access], health };
    let reads = std::sync::atomic::AtomicUsize::new(0);
    let read = || reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let terms = || {
        read();
        Arc::<Class>::default().terms(None)
    };
    let head = || {
        read();
        head()
    };
    let link = uplink.link().await.unwrap();
    let mut unanswered = vec![gateways.send(link, terms, gateways.count(0, 0), head).await.unwrap()];
    let mut waiting = loop {
        assert!(unanswered.len() < 1_000, "a stranger's requests have a bound");
        let link = uplink.link().await.unwrap();
        let mut sending = Box::pin(gateways.send(link, terms, gateways.count(0, 0), head));
        match (&mut sending).now_or_never() {
            Some(sent) => unanswered.push(sent.unwrap()),
            None => break sending,
        }
    };
    assert_eq!(reads.load(std::sync::atomic::Ordering::Relaxed), 2 * unanswered.len());
    assert!((&mut waiting).now_or_never().is_none());
    unanswered.pop();
    waiting.await.unwrap();
    assert_eq!(reads.load(std::sync::atomic::Ordering::Relaxed), 2 * (unanswered.len() + 2));
    running.abort();
}

#[tokio::test]
async fn a_client_that_leaves_before_its_request_is_sent_costs_the_gateway_nothing() {
    let health = Arc::new(Mutex::new(vec![GatewayHealth::default(); 2]));
    let gateways = ToGateways { moved: Arc::default(), accesses: vec![unreached(), unreached()], health };
    let terms = Arc::<Class>::default().terms(None);
    let is_read = std::sync::atomic::AtomicBool::new(false);
    for _ in 0..3 {
        let mut tried = Vec::new();
        let head = || {
            is_read.store(true, std::sync::atomic::Ordering::Relaxed);
            head()
        };
        assert!(gateways.ask(head, || terms.clone(), 0, 0, &mut tried).now_or_never().is_none());
        assert_eq!(tried, [0], "both are as good, so it is the first");
    }
    assert!(!is_read.into_inner(), "what a head says of the time left is read once there is a connection");
}

/// Returns the access to a gateway whose first attempt to connect has failed. The next is due after `backoff` at most, and is never made.
async fn without_token(backoff: Duration) -> RelayAccess {
    let token = Some(TokenSource::File("/nowhere/token".into()));
    let access = Access { token, ..TestRelay::start(Does::SayNothing, true).access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    let uplink = Uplink::new(vec![endpoint], None, (backoff, backoff), UplinkResources::default());
    let running = start(&uplink);
    eventually(|| uplink.unreached().flatten().is_some()).await;
    running.abort();
    RelayAccess { uplink, ..unreached() }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_connection_is_told_why_and_at_once_if_no_attempt_to_connect_comes_in_time() {
    let hour = Duration::from_secs(3_600);
    let access = without_token(hour).await;
    let (counters, health) = (access.counters.clone(), Arc::new(Mutex::new(vec![GatewayHealth::default()])));
    let gateways = ToGateways { moved: Arc::default(), accesses: vec![access], health };
    for takes in [Duration::ZERO, ANSWER_TIMEOUT] {
        let begun = Instant::now();
        let asked = gateways.ask(head, || Arc::<Class>::default().terms(None), 0, 0, &mut Vec::new()).await;
        let Some(NotAsked::NoGateway(why)) = asked.err() else { panic!("there is no gateway") };
        assert!(why.starts_with("failed to read the token from /nowhere/token"), "{why}");
        assert_eq!(begun.elapsed().as_secs(), takes.as_secs());
        tokio::time::sleep(hour).await;
    }
    assert_eq!(counters.tunnels_refused.get(), 0, "no relay has refused it");
}

#[tokio::test(start_paused = true)]
async fn the_next_attempt_to_connect_is_that_to_the_gateway_that_is_tried_first() {
    let minute = Duration::from_secs(60);
    let mut gateways = ToGateways {
        moved: Arc::default(),
        accesses: vec![without_token(10 * minute).await, without_token(minute).await],
        health: Arc::default(),
    };
    let next = gateways.next_attempt_in().unwrap();
    assert!((minute / 2..=minute).contains(&next), "{next:?}");
    sleep(Duration::from_secs(20)).await;
    assert_eq!(gateways.next_attempt_in(), Some(next.saturating_sub(Duration::from_secs(20))));
    sleep(minute).await;
    assert_eq!(gateways.next_attempt_in(), Some(Duration::ZERO), "it is due");
    gateways.accesses.push(unreached());
    assert_eq!(gateways.next_attempt_in(), None, "one was never tried");
}

#[tokio::test]
async fn bodies_beyond_bodies_bytes_are_refused_before_a_gateway_is_asked() {
    let relay = TestRelay::start(Does::SayNothing, true);
    let serve = Serve { max_body_bytes: 4 << 10, bodies_bytes: 1 << 10, ..serve_on(&[&relay], 1) };
    let (classes, counters) = (RequestClasses::at(&serve), Arc::default());
    let entrance = (LocalEntrance::counted_by(&counters), LastAnswers::default());
    let listener = door::bind(serve.listen).unwrap();
    let clients = Clients::new(listener, &serve, classes, vec![unreached().uplink], entrance).unwrap();
    let mut client = TcpStream::connect(clients.address().unwrap()).await.unwrap();
    let serving = tokio::spawn(clients.run());
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2048\r\n\r\n";
    client.write_all(format!("{head}{}", " ".repeat(2_048)).as_bytes()).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("within bodies_bytes of this edge"), "{answer}");
    serving.abort();
}
