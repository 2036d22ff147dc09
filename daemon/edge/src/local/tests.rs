//! Senders of one local address, without its event loop.

use std::net::Ipv4Addr;

use config::forward::TunnelMode;
use futures::future::{BoxFuture, join_all};
use masque::target::Target;
use prometheus_client::metrics::counter::Counter;
use role::traffic::Traffic;
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use tokio::{net::UdpSocket, sync::watch, task::JoinHandle, time::timeout};
use uplink::{Line, Path, PathTerms, UplinkResources};

use super::{source::Stage, *};
use crate::{LocalAddressCounters, connect::NoConnection, tests::start};

/// A local address whose tunnels go through `uplink`, with these waits after refusals.
fn local(uplink: Arc<Uplink>, counters: &Arc<LocalAddressCounters>, backoff: (Duration, Duration)) -> Local {
    let forward = Forward {
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        protocol: Protocol::Udp,
        uplink: config::uplink::UplinkSettings {
            via: None,
            schedule: None,
            relays: Vec::new(),
            token_file: None,
            client: None,
            trust: config::uplink::TrustSource::System,
            backoff,
        },
        target: Target::from_authority("192.0.2.1:9").unwrap(),
        mode: TunnelMode::Auto,
        class: None,
        idle: PATIENCE,
        idle_answered: PATIENCE,
        max_connections: 1,
    };
    let entrance = LocalEntrance::counted_by(counters);
    Local::new(bind(forward.listen).unwrap(), &forward, Membership::default(), uplink, entrance).unwrap()
}

/// A running uplink to a relay.
fn uplink_to(relay: &TestRelay) -> (Arc<Uplink>, JoinHandle<()>) {
    uplink_with(relay, UplinkResources::default())
}

/// A running uplink to a relay, with these resources.
fn uplink_with(relay: &TestRelay, resources: UplinkResources) -> (Arc<Uplink>, JoinHandle<()>) {
    let uplink = Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), resources);
    let running = start(&uplink);
    (uplink, running)
}

/// An uplink with a connection over each of two paths to a relay. Of its task only the connections go on: it neither makes others nor
/// watches these.
struct TwoPaths {
    uplink: Arc<Uplink>,
    lines: [Arc<Line>; 2],
    /// How many tunnels have moved.
    moved: Counter,
    /// The uplink's task, which owns the connections. Nothing polls it any more.
    _run: BoxFuture<'static, ()>,
}

impl TwoPaths {
    /// Connects over the paths `first` and `second`, of which the second costs `cost`.
    async fn to(relay: &TestRelay, cost: Duration) -> Self {
        let resources = UplinkResources::default();
        let paths = ["first", "second"].map(|name| Path::new(name, vec![relay.endpoint()]));
        let uplink = Uplink::over(paths.into(), None, (PATIENCE, PATIENCE), resources.clone());
        uplink.set_terms(&[("second".to_owned(), PathTerms { cost, rate: None })].into());
        let running = uplink.clone();
        let mut run = async move { running.run(watch::Sender::default().subscribe()).await }.boxed();
        let are_measured = || uplink.path_states().iter().all(|path| !path.smoothed_rtt.is_zero());
        tokio::select! {
            () = &mut run => unreachable!("it never ends"),
            () = eventually(are_measured) => {}
        }
        let mut lines = uplink.lines();
        lines.sort_by_key(|line| uplink.path_name(line).to_owned());
        let lines = lines.try_into().ok().unwrap();
        Self { uplink, lines, moved: resources.counters.moved_tunnels.clone(), _run: run }
    }
}

/// A local address without a relay: tunnels wait for ever.
fn lonely(counters: &Arc<LocalAddressCounters>) -> Local {
    local(
        Uplink::new(Vec::new(), None, (PATIENCE, PATIENCE), UplinkResources::default()),
        counters,
        (PATIENCE, PATIENCE),
    )
}

#[tokio::test]
async fn a_payload_that_comes_as_its_tunnel_ends_waits_for_the_next() {
    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = lonely(&counters);
    let application = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut meta = RecvMeta::default();
    meta.addr = application.local_addr().unwrap();
    let ended = local.source(&meta, Instant::now());
    assert!(ended.push(&local.shared, b"the first", 9));
    // Its task ends here, and the address has not joined it yet.
    assert!(ended.leave(&local.shared).is_none());
    assert_eq!(counters.dropped_waiting.get(), 1, "what waited is counted");
    application.send_to(b"the second", local.address().unwrap()).unwrap();
    local.shared.socket.readable().await.unwrap();
    local.receive(&mut vec![0; MESSAGES * MESSAGE_BYTES]).unwrap();
    let next = local.source(&meta, Instant::now());
    assert!(!Arc::ptr_eq(&ended, &next));
    assert!(matches!(&*next.stage.lock(), Stage::Waiting(queue) if queue.front() == Some(b"the second")));
    assert_eq!(counters.dropped_waiting.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn senders_that_made_room_for_others_leave_no_task_behind() {
    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = lonely(&counters);
    let mut meta = RecvMeta::default();
    for port in 1..=2_000 {
        meta.addr = (Ipv4Addr::LOCALHOST, port).into();
        local.source(&meta, Instant::now());
        tokio::task::yield_now().await;
    }
    assert_eq!(counters.sources_evicted.get(), 2_000 - MAX_SOURCES as u64);
    assert_eq!((local.sources.len(), local.tasks.len()), (MAX_SOURCES, MAX_SOURCES + 1));
}

#[tokio::test]
async fn a_relay_that_cannot_be_reached_is_not_called_crowded() {
    let counters = Arc::<LocalAddressCounters>::default();
    let local = lonely(&counters);
    let refused = local.shared.no_place();
    assert!(matches!(refused, NoConnection::NoAnswer), "{refused:?}");
    assert_eq!(counters.tunnels_crowded_out.get(), 0);
    let relay = TestRelay::start(Does::Echo, true);
    let (uplink, running) = uplink_to(&relay);
    let link = uplink.link().await.unwrap();
    let local = self::local(uplink, &counters, (PATIENCE, PATIENCE));
    assert!(matches!(local.shared.no_place(), NoConnection::Crowded));
    assert_eq!(counters.tunnels_crowded_out.get(), 1);
    link.line().doubt(true);
    assert!(matches!(local.shared.no_place(), NoConnection::NoAnswer));
    running.abort();
}

#[tokio::test]
async fn a_tunnel_whose_connection_came_back_is_opened_again_on_it_and_only_once() {
    let relay = TestRelay::start(Does::Echo, true);
    let (uplink, running) = uplink_to(&relay);
    let left = uplink.link().await.unwrap().id();
    let shared = local(uplink, &Arc::default(), (Duration::from_millis(10), PATIENCE)).shared.clone();
    // The connection came back before the tunnel was asked for.
    let class = shared.membership.get();
    let moving = shared.reopen(&left, &class, None);
    let (link, _opened) = timeout(PATIENCE, moving).await.expect("it moves");
    assert!(Arc::ptr_eq(link.line(), left.line()));
    assert_eq!((relay.requests(), relay.open()), (1, 1));
    running.abort();
}

#[tokio::test]
async fn only_a_sender_on_a_connection_that_takes_tunnels_has_a_place_for_another() {
    let relay = TestRelay::start(Does::Echo, true);
    let (uplink, running) = uplink_to(&relay);
    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = local(uplink.clone(), &counters, (PATIENCE, PATIENCE));
    let mut meta = RecvMeta::default();
    meta.addr = (Ipv4Addr::LOCALHOST, 9).into();
    let source = local.source(&meta, Instant::now());
    eventually(|| source.has_place()).await;
    uplink.lines()[0].leave();
    local.shared.crowding.store(1, Relaxed);
    local.make_room();
    assert_eq!(counters.sources_evicted.get(), 0, "its place is of no use");
    running.abort();
}

#[tokio::test]
async fn tunnels_that_cannot_move_ask_again_together_and_no_faster_than_the_back_off() {
    let relay = TestRelay::start(Does::Refuse, true);
    let (uplink, running) = uplink_to(&relay);
    let left = uplink.link().await.unwrap().id();
    left.line().leave();
    let counters = Arc::<LocalAddressCounters>::default();
    let shared = local(uplink, &counters, (Duration::from_millis(10), PATIENCE)).shared.clone();
    let (begun, class) = (Instant::now(), shared.membership.get());
    let moving = join_all((0..3).map(|_| shared.reopen(&left, &class, None)));
    tokio::select! {
        _ = moving => panic!("the relay refuses"),
        () = eventually(|| relay.requests() > 12) => {}
    }
    // After each three requests, waits of 10, 20, 40 and 80 milliseconds; at least half of each is kept.
    assert!(begun.elapsed() >= Duration::from_millis(75));
    assert!(counters.tunnels_refused.get() >= 10, "the last three requests may have no answer yet");
    running.abort();
}

#[tokio::test]
async fn bytes_that_the_socket_refuses_are_not_counted_as_handed_over() {
    let counters = Arc::<LocalAddressCounters>::default();
    let shared = lonely(&counters).shared.clone();
    let (traffic, mut downlink) = (Traffic::default(), Segments::new(DOWNLINK_BYTES));
    shared.socket.writable().await.unwrap();
    downlink.push(b"payload");
    // No socket for IPv4 reaches IPv6.
    Source::new((std::net::Ipv6Addr::LOCALHOST, 9).into(), None).send(&shared, &mut downlink, &traffic);
    assert_eq!((counters.dropped_down.get(), counters.bytes_down.get(), traffic.bytes()), (1, 0, (0, 0)));
    downlink.push(b"payload");
    Source::new((Ipv4Addr::LOCALHOST, 9).into(), None).send(&shared, &mut downlink, &traffic);
    assert_eq!((counters.packets_down.get(), counters.bytes_down.get(), traffic.bytes()), (1, 7, (0, 7)));
}

#[tokio::test]
async fn payloads_of_the_old_tunnel_reach_the_sender_after_a_move() {
    let (relay, resources) = (TestRelay::start(Does::EchoLate, true), UplinkResources::default());
    let (uplink, running) = uplink_with(&relay, resources.clone());
    let counters = Arc::<LocalAddressCounters>::default();
    let local = local(uplink.clone(), &counters, (PATIENCE, PATIENCE));
    let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    application.connect(local.address().unwrap()).await.unwrap();
    let serving = tokio::spawn(local.run());
    application.send(b"before the move").await.unwrap();
    eventually(|| relay.payloads() == 1).await;
    let line = uplink.lines().remove(0);
    assert_eq!(line.placed(Duration::ZERO).len(), 1);
    line.leave();
    eventually(|| resources.counters.moved_tunnels.get() == 1).await;
    assert!(line.placed(Duration::ZERO).is_empty(), "the old tunnel is no load");
    application.send(b"after the move").await.unwrap();
    let mut heard = Vec::new();
    for _ in 0..2 {
        let mut buffer = [0; 64];
        let len = timeout(PATIENCE, application.recv(&mut buffer)).await.expect("only one came back").unwrap();
        heard.push(buffer[..len].to_vec());
    }
    heard.sort();
    assert_eq!(heard, [&b"after the move"[..], b"before the move"]);
    eventually(|| {
        line.part();
        relay.open() == 1
    })
    .await;
    serving.abort();
    running.abort();
}

#[tokio::test]
async fn a_tunnel_for_which_the_relay_has_no_room_on_a_better_path_stays_and_takes_nothing_from_others() {
    let relay = TestRelay::start(Does::EchoIn(2), true);
    let paths = TwoPaths::to(&relay, Duration::from_secs(9)).await;
    let [first, second] = &paths.lines;
    let other = first.relay.open_udp(&Target::from_authority("192.0.2.1:10").unwrap()).await.unwrap();

    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = local(paths.uplink.clone(), &counters, (PATIENCE, PATIENCE));
    let mut meta = RecvMeta::default();
    meta.addr = (Ipv4Addr::LOCALHOST, 9).into();
    first.leave();
    let source = local.source(&meta, Instant::now());
    eventually(|| second.tunnels() == 1 && source.has_place()).await;
    first.come_back();

    // The relay has no room for a third tunnel.
    for requests in 3..=4 {
        eventually(|| {
            if relay.requests() < requests {
                second.recall();
            }
            relay.requests() >= requests && first.tunnels() == 0
        })
        .await;
    }
    let consequences = [&counters.limit_refusals, &counters.tunnels_refused, &counters.sources_evicted];
    assert_eq!(consequences.map(Counter::get), [0; 3]);
    assert!(first.has_room() && !second.is_left() && source.has_place());
    assert_eq!((local.shared.crowding.load(Relaxed), paths.moved.get()), (0, 0));
    assert_eq!(paths.uplink.lines().len(), 2, "there is no further connection");

    other.tunnel.finish();
    eventually(|| {
        second.recall();
        paths.moved.get() == 1
    })
    .await;
    assert_eq!(first.tunnels(), 1);
}

#[tokio::test]
async fn a_tunnel_that_only_receives_makes_room_when_the_relay_allows_no_more() {
    let relay = TestRelay::start(Does::EchoIn(2), true);
    let paths = TwoPaths::to(&relay, Duration::ZERO).await;
    let [first, second] = &paths.lines;
    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = local(paths.uplink.clone(), &counters, (PATIENCE, PATIENCE));
    second.leave();
    let mut sender = |port| {
        let mut meta = RecvMeta::default();
        meta.addr = (Ipv4Addr::LOCALHOST, port).into();
        local.source(&meta, Instant::now())
    };
    let moves = sender(9);
    eventually(|| moves.has_place()).await;
    second.come_back();
    first.leave();
    eventually(|| paths.moved.get() == 1).await;
    assert_eq!(relay.open(), 2);
    first.come_back();

    let begun = Instant::now();
    let other = sender(10);
    eventually(|| other.has_place()).await;
    assert!(begun.elapsed() < crate::parting::IN_TESTS * 2 / 3);
    assert!(moves.has_place() && counters.limit_refusals.get() > 0);
    assert_eq!((relay.open(), counters.sources_evicted.get()), (2, 0));
}
