//! Forwards over loopback.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use config::{
    forward::{Forward, TunnelMode},
    targets,
    uplink::{TrustSource, UplinkSettings},
};
use masque::{target::Target, template::Template};
use quic::{class::Membership, datagrams::Schedules, endpoint::Transport};
use relay_client::{access::Access, endpoint::Endpoint, error::ConnectError};
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use tokio::{
    net::UdpSocket,
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};
use uplink::{Uplink, UplinkResources};

use super::{
    LocalAddressCounters,
    connect::RelayAccess,
    local::{self, Local},
    roster::LocalEntrance,
};

mod crowded;
mod denied;
pub(crate) mod replaced;

/// Returns the access of a local address to a relay that is never reached.
pub(crate) fn unreached() -> RelayAccess {
    let access = Access {
        template: Template::default_at("127.0.0.1:9").unwrap(),
        trust: TrustSource::Pinned([0; 32]),
        token: None,
        identity: None,
    };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    access_to(endpoint, UplinkResources::default())
}

/// Returns the access of a local address to the relay of this endpoint. Its uplink has these resources, and does not run yet.
pub(crate) fn access_to(endpoint: Endpoint, resources: UplinkResources) -> RelayAccess {
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), resources);
    let counters = Arc::default();
    let (membership, entrance, told) =
        (Membership::default(), LocalEntrance::counted_by(&counters), Default::default());
    RelayAccess { uplink, membership, is_chosen: false, idle: PATIENCE, entrance, counters, told }
}

/// Starts the task of an uplink. For it, nothing changes on this host.
pub(crate) fn start(uplink: &Arc<Uplink>) -> JoinHandle<()> {
    let uplink = uplink.clone();
    tokio::spawn(async move { uplink.run(watch::Sender::default().subscribe()).await })
}

/// A forward to a relay, and an application that uses it.
struct Edge {
    address: SocketAddr,
    counters: Arc<LocalAddressCounters>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Edge {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Edge {
    async fn start(relay: &TestRelay, mode: TunnelMode, idle: Duration) -> Self {
        Self::with(relay, mode, (idle, idle)).await
    }

    async fn with(relay: &TestRelay, mode: TunnelMode, idle: (Duration, Duration)) -> Self {
        Self::of(&[relay], mode, idle, (Duration::from_millis(10), Duration::from_secs(60))).await
    }

    async fn of(
        relays: &[&TestRelay],
        mode: TunnelMode,
        (idle, idle_answered): (Duration, Duration),
        backoff: (Duration, Duration),
    ) -> Self {
        let accesses: Vec<_> = relays.iter().map(|relay| relay.access()).collect();
        let access = accesses[0].clone();
        let forward = Forward {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            protocol: targets::Protocol::Udp,
            uplink: UplinkSettings {
                relays: accesses.iter().map(|access| access.template.clone()).collect(),
                token_file: None,
                client: None,
                trust: access.trust.clone(),
                via: None,
                schedule: None,
                backoff,
            },
            target: Target::from_authority("192.0.2.1:9").unwrap(),
            mode,
            class: None,
            idle,
            idle_answered,
            max_connections: 1,
        };
        let counters = Arc::new(LocalAddressCounters::default());
        let endpoint =
            |access| Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
        let uplink =
            Uplink::new(accesses.into_iter().map(endpoint).collect(), None, backoff, UplinkResources::default());
        let moved = watch::Sender::default();
        let moves = moved.subscribe();
        let socket = local::bind(forward.listen).unwrap();
        let entrance = LocalEntrance::counted_by(&counters);
        let local = Local::new(socket, &forward, Membership::default(), uplink.clone(), entrance).unwrap();
        let address = local.address().unwrap();
        let tasks = vec![
            tokio::spawn(async move { uplink.run(moves).await }),
            tokio::spawn(async move { local.run().await.unwrap() }),
        ];
        Self { address, counters, tasks }
    }

    async fn application(&self) -> UdpSocket {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket
    }
}

async fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_536];
    let len = timeout(PATIENCE, socket.recv(&mut buffer)).await.expect("nothing came back").unwrap();
    buffer.truncate(len);
    buffer
}

#[tokio::test]
async fn payloads_wait_for_the_connection_and_come_back_in_order_to_their_senders() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let (one, two) = (edge.application().await, edge.application().await);
    for payload in [&b"first"[..], b"", &[7; 1_200]] {
        one.send(payload).await.unwrap();
    }
    two.send(b"mine").await.unwrap();
    for expected in [&b"first"[..], b"", &[7; 1_200]] {
        assert_eq!(receive(&one).await, expected);
    }
    assert_eq!(receive(&two).await, b"mine");
    assert_eq!(relay.seen.connections.load(Relaxed), 1, "senders share a connection");
    assert_eq!(relay.seen.requests.load(Relaxed), 2, "each sender has a tunnel");
    assert_eq!(relay.seen.capsules.load(Relaxed), 0);
    assert_eq!((edge.counters.packets_up.get(), edge.counters.packets_down.get()), (4, 4));
}

#[tokio::test]
async fn stream_mode_uses_no_datagrams_and_carries_what_they_cannot() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Stream, PATIENCE).await;
    let application = edge.application().await;
    application.send(&[1; 9_000]).await.unwrap();
    assert_eq!(receive(&application).await, [1; 9_000]);
    assert_eq!((relay.seen.datagrams.load(Relaxed), relay.seen.capsules.load(Relaxed)), (0, 1));
}

#[tokio::test]
async fn a_relay_without_datagrams_is_used_by_streams_unless_that_is_forbidden() {
    let relay = TestRelay::start(Does::Echo, false);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let application = edge.application().await;
    application.send(b"payload").await.unwrap();
    assert_eq!(receive(&application).await, b"payload");

    let edge = Edge::start(&relay, TunnelMode::Datagram, PATIENCE).await;
    edge.application().await.send(b"payload").await.unwrap();
    eventually(|| edge.counters.tunnels_refused.get() == 1).await;
    assert_eq!(edge.counters.tunnels_opened.get(), 0);
}

#[tokio::test]
async fn refusals_are_repeated_no_faster_than_the_back_off() {
    let relay = TestRelay::start(Does::Refuse, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let (application, begun) = (edge.application().await, Instant::now());
    while relay.seen.requests.load(Relaxed) < 5 {
        application.send(b"payload").await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Waits of 10, 20, 40 and 80 milliseconds; at least half of each is kept.
    assert!(begun.elapsed() >= Duration::from_millis(75));
    assert_eq!(relay.seen.connections.load(Relaxed), 1, "a refusal does not end the connection");
}

#[tokio::test]
async fn a_lost_connection_is_made_again_for_the_next_payload() {
    let relay = TestRelay::start(Does::EchoOnce, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, PATIENCE).await;
    let application = edge.application().await;
    let mut buffer = [0; 1];
    for round in 1..=3 {
        // Payloads that are sent before the edge has noticed are lost.
        while buffer != [round] {
            application.send(&[round]).await.unwrap();
            _ = timeout(Duration::from_millis(100), application.recv(&mut buffer)).await;
        }
    }
    assert!(relay.seen.connections.load(Relaxed) >= 3, "each of them echoes once");
}

#[tokio::test]
async fn the_tunnel_of_a_silent_sender_is_closed_properly() {
    let relay = TestRelay::start(Does::Echo, true);
    let edge = Edge::start(&relay, TunnelMode::Auto, Duration::from_millis(200)).await;
    let application = edge.application().await;
    application.send(b"payload").await.unwrap();
    receive(&application).await;
    eventually(|| relay.seen.finished.load(Relaxed) == 1).await;
    application.send(b"again").await.unwrap();
    assert_eq!(receive(&application).await, b"again");
    assert_eq!(relay.seen.requests.load(Relaxed), 2);
}

#[tokio::test]
async fn an_unknown_certificate_is_reported_with_what_it_takes_to_pin_it() {
    let relay = TestRelay::start(Does::Echo, true);
    let access = Access { trust: TrustSource::Pinned([0; 32]), ..relay.access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    match endpoint.connect().await.err() {
        Some(ConnectError::Untrusted { fingerprint, .. }) => assert_eq!(fingerprint, relay.fingerprint),
        other => panic!("{other:?}"),
    }
    let access = Access { trust: TrustSource::Pinned(relay.fingerprint), ..relay.access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    assert!(endpoint.connect().await.is_ok());
}

/// Asks one question from each of `questions` new ports, and gets an answer to each.
async fn ask(edge: &Edge, questions: u16) {
    for question in 0..questions {
        let application = edge.application().await;
        application.send(&question.to_be_bytes()).await.unwrap();
        assert_eq!(receive(&application).await, question.to_be_bytes());
    }
}

/// Sends payloads from one new port until one comes back.
async fn ask_until_answered(edge: &Edge) -> UdpSocket {
    let application = edge.application().await;
    let asking = async {
        let mut buffer = [0; 64];
        loop {
            application.send(b"anybody?").await.unwrap();
            if timeout(Duration::from_millis(100), application.recv(&mut buffer)).await.is_ok() {
                return;
            }
        }
    };
    timeout(PATIENCE, asking).await.expect("no relay answers");
    application
}

#[tokio::test]
async fn the_next_relay_takes_over_and_the_preferred_one_gets_new_senders_again_once_it_lasts() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let backoff = (Duration::from_millis(10), Duration::from_millis(300));
    let edge = Edge::of(&[&relays[0], &relays[1]], TunnelMode::Auto, (PATIENCE, PATIENCE), backoff).await;
    let requests = || relays.each_ref().map(|relay| relay.seen.requests.load(Relaxed));
    ask(&edge, 2).await;
    assert_eq!(requests(), [2, 0], "the first works");
    relays[0].shut();
    let moved = ask_until_answered(&edge).await;
    assert!(requests()[1] > 0, "the second has taken over");

    relays[0].open.store(true, Relaxed);
    let asking = async {
        while requests()[0] == 2 {
            drop(ask_until_answered(&edge).await);
        }
    };
    timeout(PATIENCE, asking).await.expect("the first is not used again");
    while moved.try_recv(&mut [0; 64]).is_ok() {}
    let (connections, asked) = (relays[1].seen.connections.load(Relaxed), requests()[1]);
    moved.send(b"still there?").await.unwrap();
    assert_eq!(receive(&moved).await, b"still there?");
    assert_eq!((relays[1].seen.connections.load(Relaxed), requests()[1]), (connections, asked), "open tunnels stay");
}

#[tokio::test]
async fn the_next_relay_is_tried_while_the_first_says_nothing() {
    let (mut silent, relay) = (TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true));
    let hole = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    silent.address = hole.local_addr().unwrap();
    let backoff = (Duration::from_millis(10), Duration::from_secs(60));
    let edge = Edge::of(&[&silent, &relay], TunnelMode::Auto, (PATIENCE, PATIENCE), backoff).await;
    ask(&edge, 3).await;
    assert_eq!(relay.seen.requests.load(Relaxed), 3);
}
