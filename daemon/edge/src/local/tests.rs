//! Senders of one local address, without its event loop.

use std::net::{Ipv4Addr, Ipv6Addr};

use config::forward::TunnelMode;
use futures::future::{BoxFuture, join_all};
use masque::target::Target;
use prometheus_client::metrics::counter::Counter;
use quinn_udp::Transmit;
use role::traffic::Traffic;
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, ip_mtu_discover};
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

/// An uplink with a connection over each of several paths. Unless a test polls its task, only the connections go on: the task neither makes
/// others nor watches these.
struct SeveralPaths<const N: usize> {
    uplink: Arc<Uplink>,
    lines: [Arc<Line>; N],
    /// How many tunnels have moved.
    moved: Counter,
    /// The uplink's task, which owns the connections.
    run: BoxFuture<'static, ()>,
}

impl<const N: usize> SeveralPaths<N> {
    /// Connects over paths to these relays, each with its cost.
    async fn to(paths: [(&TestRelay, Duration); N]) -> Self {
        let (resources, names) = (UplinkResources::default(), ["a", "b", "c"]);
        let over = names.iter().zip(&paths).map(|(name, (relay, _))| Path::new(name, vec![relay.endpoint()]));
        let uplink = Uplink::over(over.collect(), None, (PATIENCE, PATIENCE), resources.clone());
        let terms = |cost| PathTerms { cost, rate: None };
        uplink
            .set_terms(&names.iter().zip(&paths).map(|(name, (_, cost))| ((*name).to_owned(), terms(*cost))).collect());
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
        Self { uplink, lines, moved: resources.counters.moved_tunnels.clone(), run }
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
    let (link, _opened) = timeout(PATIENCE, moving).await.expect("it moves").unwrap();
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
    let begun = Instant::now();
    let moving = join_all((0..3).map(|_| shared.replace(&left, None)));
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
async fn payloads_that_are_too_long_for_a_packet_reach_their_sender_in_fragments() {
    let local = lonely(&Arc::default());
    assert_eq!(ip_mtu_discover(&local.shared.socket).unwrap(), Ipv4PathMtuDiscovery::DONT);
    let Ok(socket) = bind((Ipv6Addr::LOCALHOST, 0).into()) else { return };
    let socket = UdpSocket::from_std(socket).unwrap();
    let state = UdpSocketState::new(UdpSockRef::from(&socket)).unwrap();
    allow_fragments(&socket).unwrap();
    // With the headers, this is longer than a packet of the loopback device.
    let (application, contents) = (UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap(), [7; 65_520]);
    let destination = application.local_addr().unwrap();
    let transmit = Transmit { destination, ecn: None, contents: &contents, segment_size: None, src_ip: None };
    state.try_send(UdpSockRef::from(&socket), &transmit).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let len = timeout(PATIENCE, application.recv(&mut buffer)).await.unwrap().unwrap();
    assert!(buffer[..len] == contents);
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
    let paths = SeveralPaths::to([(&relay, Duration::ZERO), (&relay, Duration::from_secs(9))]).await;
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
    let paths = SeveralPaths::to([(&relay, Duration::ZERO); 2]).await;
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

/// Returns a local address with one sender. Its tunnel has to leave the first of `paths`, and the relay `second` has refused the move:
/// its `Retry-After` is an hour.
async fn put_off<const N: usize>(paths: &SeveralPaths<N>, second: &TestRelay) -> Local {
    let counters = Arc::<LocalAddressCounters>::default();
    let mut local = local(paths.uplink.clone(), &counters, (Duration::from_millis(10), PATIENCE));
    let mut meta = RecvMeta::default();
    meta.addr = (Ipv4Addr::LOCALHOST, 9).into();
    let (first, others) = paths.lines.split_first().unwrap();
    others.iter().for_each(|line| line.leave());
    let source = local.source(&meta, Instant::now());
    eventually(|| source.has_place()).await;
    assert_eq!(first.tunnels(), 1);
    others[0].come_back();
    first.leave();
    eventually(|| counters.tunnels_refused.get() == 1).await;
    assert_eq!(second.requests(), 1);
    local
}

#[tokio::test]
async fn a_tunnel_that_one_relay_puts_off_moves_as_soon_as_there_is_a_connection_to_another() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::SayUsedUp, true)];
    let mut paths = SeveralPaths::to([(&relays[0], Duration::ZERO), (&relays[1], Duration::ZERO)]).await;
    let _local = put_off(&paths, &relays[1]).await;
    let begun = Instant::now();
    // The task connects to the first relay again.
    tokio::select! {
        () = &mut paths.run => unreachable!("it never ends"),
        () = eventually(|| paths.moved.get() == 1) => {}
    }
    assert!(begun.elapsed() < PATIENCE / 2);
    assert_eq!(relays.each_ref().map(TestRelay::requests), [2, 1]);
}

#[tokio::test]
async fn a_tunnel_that_found_no_other_place_and_stays_looks_for_better_paths_again() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::SayUsedUp, true)];
    let costs = Duration::from_secs(9);
    let paths = SeveralPaths::to([(&relays[0], costs), (&relays[1], costs), (&relays[0], Duration::ZERO)]).await;
    let _local = put_off(&paths, &relays[1]).await;
    let [first, _, third] = &paths.lines;
    first.come_back();
    third.come_back();
    let begun = Instant::now();
    eventually(|| {
        first.recall();
        paths.moved.get() == 1
    })
    .await;
    assert!(begun.elapsed() < PATIENCE / 2);
    assert_eq!((third.tunnels(), relays[1].requests()), (1, 1));
}

#[tokio::test]
async fn senders_of_one_address_leave_for_those_of_another_that_has_none_itself() {
    const SENDERS: usize = 8;
    let relay = TestRelay::start(Does::EchoIn(SENDERS), true);
    let (uplink, running) = uplink_to(&relay);
    let counters = [(); 2].map(|()| Arc::<LocalAddressCounters>::default());
    let locals = counters.each_ref().map(|counters| local(uplink.clone(), counters, (PATIENCE, PATIENCE)));
    let addresses = locals.each_ref().map(|local| local.address().unwrap());
    let serving = locals.map(|local| tokio::spawn(local.run()));
    let ask = async |address: SocketAddr| {
        let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        application.connect(address).await.unwrap();
        application.send(b"payload").await.unwrap();
        timeout(PATIENCE, application.recv(&mut [0; 64])).await.expect("it is not answered").unwrap();
        application
    };
    let mut idle = Vec::new();
    for _ in 0..SENDERS {
        idle.push(ask(addresses[0]).await);
    }
    assert_eq!(relay.open(), SENDERS);
    idle.push(ask(addresses[1]).await);
    assert!(counters[0].sources_evicted.get() > 0);
    assert_eq!([&counters[1].sources_evicted, &counters[1].tunnels_crowded_out].map(Counter::get), [0, 0]);
    serving.iter().for_each(JoinHandle::abort);
    running.abort();
}
