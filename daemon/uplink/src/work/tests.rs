//! What the task of an uplink does when connections fall silent, end or fill up, or when their relays shut down.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    task::Poll,
};

use masque::template::Template;
use quic::{datagrams::Schedules, endpoint::Transport};
use relay_client::{access::Access, backoff::SHORT, error::TokenError, exit::Exit};
use test_relay::{Does, PATIENCE, TestRelay};

use super::{silence::GIVEN_UP, *};
use crate::{UplinkResources, moves::HostNetwork, task::SPARE, tests::paths_to};

mod addresses;
mod leaving;
mod told;

/// An uplink to a relay.
fn uplink_to(relay: &TestRelay) -> Arc<Uplink> {
    Uplink::new(vec![relay.endpoint()], None, (PATIENCE, PATIENCE), UplinkResources::default())
}

/// Makes the first connection of an uplink.
async fn connect(work: &mut Work<'_>) -> Arc<Line> {
    let (at, connected) = work.uplink.attempt((0, 0)).await;
    work.attempted(at, connected);
    work.uplink.lines().into_iter().next().unwrap()
}

/// Makes the first connection of each of two paths.
async fn connect_both(work: &mut Work<'_>) {
    for at in [(0, 0), (1, 0)] {
        let (at, connected) = work.uplink.attempt(at).await;
        work.attempted(at, connected);
    }
}

/// Makes the only connection fall silent.
fn silence(work: &mut Work<'_>, line: &Line) {
    work.look();
    work.pulses[0].1.silence(Instant::now());
    line.doubt(true);
    work.look();
}

#[tokio::test]
async fn only_requests_for_models_leave_a_silent_gateway_for_another_one() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let uplinks = relays.each_ref().map(uplink_to);
    uplinks[0].set_peers(vec![Arc::downgrade(&uplinks[1])]);
    let (mut work, mut other) = (Work::new(&uplinks[0]), Work::new(&uplinks[1]));
    let line = connect(&mut work).await;
    let (tunnel, request) = (line.link().unwrap(), line.link().unwrap().for_request());
    silence(&mut work, &line);
    assert!(line.silenced().now_or_never().is_none(), "the other gateway is not reached yet");
    let mut changes = uplinks[0].changes.listen();
    uplinks[0].fall_silent(&line, false);
    let told = changes.try_recv().unwrap().message;
    assert!(told.starts_with("the relay 127.0.0.1:"), "{told}");
    assert!(told.ends_with(" does not answer: sending its requests to another gateway"), "{told}");

    connect(&mut other).await;
    work.look();
    assert!(line.silenced().now_or_never().is_some(), "requests go to the other gateway");
    assert!(!line.is_left() && line.left().now_or_never().is_none(), "tunnels have nowhere to go");
    let late = Instant::now() + 2 * GIVEN_UP;
    assert!(!work.give_up(late, std::slice::from_ref(&line)) && !line.is_closed(), "the tunnel waits for the path");
    drop(tunnel);
    assert!(!uplinks[0].is_within_reach());
    assert!(work.give_up(late, std::slice::from_ref(&line)) && line.is_closed(), "the request does not");
    drop(request);
    work.lost(&line, Some(&h3::Error::Closed));
    assert!(!uplinks[0].is_within_reach(), "it was given up");
    connect(&mut work).await;
    assert!(uplinks[0].is_within_reach(), "it is back");
}

#[tokio::test]
async fn a_connection_that_times_out_fell_silent_only_if_it_was_kept_alive() {
    let relay = TestRelay::start(Does::Echo, true);
    for keep_alive in [None, Some(Duration::from_secs(10))] {
        let endpoint = relay.endpoint_over(Transport { keep_alive, ..Transport::default() });
        let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
        let mut work = Work::new(&uplink);
        let line = connect(&mut work).await;
        work.wanted = false;
        work.lost(&line, Some(&h3::Error::Connection(s2n_quic::connection::Error::idle_timer_expired())));
        assert_eq!(work.wanted, keep_alive.is_some(), "only a relay that fell silent is looked for again");
        assert_eq!(uplink.is_within_reach(), keep_alive.is_none());
    }
}

#[tokio::test]
async fn everything_leaves_a_silent_connection_for_another_one_to_the_same_gateway() {
    let relay = TestRelay::start(Does::Echo, true);
    let (uplink, peer) = (uplink_to(&relay), uplink_to(&relay));
    uplink.set_peers(vec![Arc::downgrade(&peer)]);
    let mut work = Work::new(&uplink);
    let line = connect(&mut work).await;
    let _tunnel = line.link().unwrap();
    silence(&mut work, &line);
    assert!(!line.is_left());
    let (at, connected) = uplink.attempt((0, 0)).await;
    work.attempted(at, connected);
    work.look();
    assert!(line.is_left() && line.left().now_or_never().is_some());
    let lines = [line.clone(), uplink.lines().remove(0)];
    assert!(work.give_up(Instant::now() + 2 * GIVEN_UP, &lines) && line.is_closed());
}

#[tokio::test]
async fn a_relay_that_goes_away_at_once_is_tried_no_faster_than_the_back_off() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let mut work = Work::new(&uplink);
    let line = connect(&mut work).await;
    work.goes_away(&line);
    assert!(line.is_closed(), "it has no tunnels");
    assert!(work.wanted && matches!(work.next(), Step::Wait(_)));

    // A connection whose tunnels cannot move is closed after the last one.
    let line = connect(&mut work).await;
    let tunnel = line.link().unwrap();
    work.goes_away(&line);
    uplink.close_spare(Instant::now());
    assert!(!line.is_closed());
    drop(tunnel);
    uplink.close_spare(Instant::now());
    assert!(line.is_closed());
}

#[tokio::test]
async fn tunnels_leave_a_relay_that_shuts_down_whenever_there_is_room_elsewhere() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let mut work = Work::new(&uplink);
    let line = connect(&mut work).await;
    let _tunnel = line.link().unwrap();
    work.goes_away(&line);
    work.next();
    assert!(!line.is_left(), "there is no other connection");
    let other = connect(&mut work).await;
    other.doubt(true);
    work.next();
    assert!(!line.is_left(), "the other connection does not answer");
    other.doubt(false);
    work.next();
    assert!(line.is_left());
    line.come_back();
    assert!(line.is_left(), "it still shuts down");
}

#[tokio::test]
async fn a_connection_to_a_better_relay_takes_over_however_long_it_has_to_last_before() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let settling = 10 * SPARE;
    let endpoints = relays.iter().map(TestRelay::endpoint).collect();
    let uplink = Uplink::new(endpoints, None, (PATIENCE, settling), UplinkResources::default());
    let mut work = Work::new(&uplink);
    for at in [(0, 1), (0, 0)] {
        let (at, connected) = uplink.attempt(at).await;
        work.attempted(at, connected);
    }
    let places = || uplink.lines().iter().map(|line| line.place).collect::<Vec<_>>();
    let now = Instant::now();
    uplink.close_spare(now + 2 * SPARE);
    assert_eq!(places(), [1, 0], "the better one still has to last");
    uplink.close_spare(now + 2 * settling);
    assert_eq!(places(), [0]);
}

#[tokio::test]
async fn a_request_on_a_connection_that_falls_silent_after_it_was_left_learns_of_it() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let line = connect(&mut Work::new(&uplink)).await;
    let mut silenced = Box::pin(line.silenced());
    line.leave();
    assert!(silenced.as_mut().now_or_never().is_none(), "it may still answer");
    line.doubt(true);
    assert!(silenced.now_or_never().is_some());
}

#[tokio::test]
async fn a_connection_without_an_answer_at_its_new_address_waits_for_it_if_another_path_works() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    let lines = uplink.lines();
    work.proofs.push((lines[0].clone(), lines[0].heard(), Instant::now()));
    work.prove();
    assert!(work.proofs.is_empty() && !lines[0].is_closed() && !lines[0].is_doubted());

    // Without another path, a new connection takes its place.
    let uplink = uplink_to(&relay);
    let mut work = Work::new(&uplink);
    let line = connect(&mut work).await;
    work.proofs.push((line.clone(), line.heard(), Instant::now()));
    work.prove();
    assert!(line.is_doubted() && matches!(work.next(), Step::Connect((0, 0))));
}

#[tokio::test]
async fn a_path_with_a_long_queue_is_slow_also_after_persistent_congestion() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    // Nothing waits from here on, so the connections measure nothing themselves.
    let (lines, now, ms) = (uplink.lines(), Instant::now(), Duration::from_millis);
    lines.iter().for_each(|line| line.path.measured(ms(20), ms(20)));
    lines[0].path.measured(ms(500), ms(20));
    assert!(!work.look_for_slow(now, &lines), "it may be a burst");
    lines[0].path.measured(ms(500), ms(500));
    assert_eq!(lines[0].path.get().min_rtt, Some(ms(500)), "the transport has forgotten the shorter ones");
    assert!(work.look_for_slow(now + Duration::from_secs(3), &lines));
    assert_eq!([0, 1].map(|place| lines[place].is_slow()), [true, false]);
    assert!(!work.look_for_slow(now + Duration::from_secs(30), &lines), "its queue is as long as before");
    assert!(lines[0].is_slow());
}

#[tokio::test]
async fn a_path_that_comes_back_gets_one_connection() {
    let relay = TestRelay::start(Does::Echo, true);
    let waits = (Duration::ZERO, PATIENCE);
    let uplink = Uplink::over(paths_to(&relay), None, waits, UplinkResources::default());
    let mut work = Work::new(&uplink);
    let (at, connected) = uplink.attempt((1, 0)).await;
    work.attempted(at, connected);
    work.suspects[0][0] = true;
    assert!(matches!(work.next(), Step::Connect((0, 0))));
    let (at, connected) = uplink.attempt((0, 0)).await;
    work.attempted(at, connected);
    assert_eq!(uplink.lines().len(), 1, "it has to answer more often");
    assert!(matches!(work.next(), Step::Nothing));
}

#[tokio::test]
async fn a_connection_whose_tunnel_ends_was_not_closed_by_its_relay() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let connected = uplink.attempt((0, 0)).await.1.unwrap();
    let line = Line::new(&connected, (1, 0, 0), Arc::default(), Arc::default());
    let ended = drive_until(&line, connected.connection, std::future::ready(()).boxed()).await;
    assert!(ended.is_none(), "{ended:?}");
    let connected = uplink.attempt((0, 0)).await.1.unwrap();
    let line = Line::new(&connected, (2, 0, 0), Arc::default(), Arc::default());
    line.relay.http().close(Code::NoError);
    assert!(drive_until(&line, connected.connection, pending().boxed()).await.is_some());
}

#[tokio::test]
async fn places_are_all_taken_only_if_no_further_connection_is_near() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let endpoints = relays.iter().map(TestRelay::endpoint).collect();
    let uplink = Uplink::new(endpoints, None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let failed = || Err(ConnectError::NoAnswer((std::net::Ipv4Addr::LOCALHOST, 9).into()));
    let mut links = Vec::new();
    for count in 1..=CONNECTIONS {
        let (at, connected) = uplink.attempt((0, 1)).await;
        work.attempted(at, connected);
        // The preferred relay stays away.
        work.attempted((0, 0), failed());
        work.next();
        assert!(!uplink.is_full());
        let line = uplink.lines().into_iter().find(|line| line.has_room()).unwrap();
        links.extend(std::iter::from_fn(|| line.link()));
        work.next();
        assert_eq!(uplink.is_full(), count == CONNECTIONS, "{count}");
    }
    links.pop();
    assert!(!uplink.is_full());
}

#[tokio::test]
async fn a_new_tunnel_waits_for_another_connection_to_the_relay_in_use_and_no_longer_than_one_may_come() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let endpoints = relays.iter().map(TestRelay::endpoint).collect();
    let uplink = Uplink::new(endpoints, None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    for at in [(0, 0), (0, 1)] {
        let (at, connected) = uplink.attempt(at).await;
        work.attempted(at, connected);
    }
    let own = uplink.lines().into_iter().find(|line| line.place == 0).unwrap();
    let _full: Vec<_> = std::iter::from_fn(|| own.link()).collect();
    let mut new = Box::pin(uplink.link());
    assert!(matches!(work.next(), Step::Connect((0, 0))));
    assert!(work.wanted && futures::poll!(&mut new).is_pending(), "a place at the other relay is none for it");
    work.attempted((0, 0), Err(ConnectError::NoAnswer((Ipv4Addr::LOCALHOST, 9).into())));
    assert!(futures::poll!(&mut new).is_pending(), "nothing is decided yet");
    assert!(!matches!(work.next(), Step::Connect(_)), "it has a back-off");
    let Poll::Ready(Ok(link)) = futures::poll!(&mut new) else {
        panic!("it waits for a connection that does not come")
    };
    assert_eq!(link.line().place, 1);
}

#[tokio::test]
async fn a_connection_that_takes_no_tunnels_is_open_until_it_is_closed() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = uplink_to(&relay);
    let line = connect(&mut Work::new(&uplink)).await;
    let open = || uplink.open_lines().iter().map(|line| line.id).collect::<Vec<_>>();
    line.doubt(true);
    assert_eq!(open(), [line.id], "it may have tunnels, and be recorded");
    line.close();
    assert!(open().is_empty());
}

#[tokio::test]
async fn a_relay_that_comes_within_reach_is_tried_at_once_and_one_that_stays_silent_before_long() {
    let relay = TestRelay::start(Does::Echo, true);
    let uplink = Uplink::over(paths_to(&relay), None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect(&mut work).await;
    // Nothing waits from here on, and the machine may be busy.
    tokio::time::pause();
    let until = |work: &mut Work<'_>| match work.next() {
        Step::Wait(until) => until.saturating_duration_since(Instant::now()),
        Step::Connect(at) => panic!("{at:?} is tried at once"),
        Step::Nothing => panic!("it is not tried again"),
    };
    work.attempted((1, 0), Err(ConnectError::NoAnswer((Ipv4Addr::LOCALHOST, 9).into())));
    assert!(until(&mut work) <= SHORT, "another path works");
    work.moved(&HostNetwork::default());
    assert!(until(&mut work) <= SHORT, "nothing has changed for it");
    work.sources[1][0] = None;
    work.moved(&HostNetwork::default());
    assert!(matches!(work.next(), Step::Connect((1, 0))), "there is a route again");
    work.moved(&HostNetwork::default());
    assert!(!matches!(work.next(), Step::Connect(_)), "that attempt is in progress");

    work.attempted((1, 0), Err(ConnectError::Http(h3::Error::Closed)));
    assert!(until(&mut work) > SHORT, "it answers");
}

/// An endpoint for a relay at this host and port, with the credentials for `relay`.
fn relay_at(authority: &str, relay: &TestRelay) -> Endpoint {
    let access = Access { template: Template::default_at(authority).unwrap(), ..relay.access() };
    Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap()
}

/// Drives an attempt to connect until a packet comes from a socket that was not `seen` before, and returns this socket's address.
async fn new_socket<T>(
    silent: &UdpSocket,
    attempt: &mut (impl Future<Output = T> + Unpin),
    seen: &[SocketAddr],
) -> SocketAddr {
    loop {
        assert!(futures::poll!(&mut *attempt).is_pending());
        match silent.recv_from(&mut [0; 2_048]) {
            Ok((_, from)) if !seen.contains(&from) => return from,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

#[tokio::test]
async fn an_attempt_in_progress_begins_anew_when_the_route_to_its_relay_changes() {
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    silent.set_nonblocking(true).unwrap();
    let endpoint = relay_at(&silent.local_addr().unwrap().to_string(), &TestRelay::start(Does::Echo, true));
    let exit = Exit::new(None, Some(Ipv4Addr::LOCALHOST.into()));
    let uplink =
        Uplink::new(vec![endpoint.leaving_by(exit.into())], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let mut attempt = Box::pin(uplink.attempt((0, 0)));
    let mut seen = Vec::new();
    for _ in 0..2 {
        let heard = new_socket(&silent, &mut attempt, &seen);
        seen.push(timeout(PATIENCE, heard).await.expect("each attempt has a socket of its own"));
        work.sources[0][0] = None;
        work.moved(&HostNetwork::default());
    }
}

#[tokio::test]
async fn a_path_whose_device_carries_nothing_is_silent_at_once_and_tried_when_the_device_is_back() {
    let relay = TestRelay::start(Does::Echo, true);
    let config = config::Config::from_toml("[[path]]\nname = \"a\"\ninterface = \"lo\"\n").unwrap();
    let exit = Exit::new(config.paths[0].interface.clone(), None);
    let path = |name: &str, exit: Exit| Path::new(name, vec![relay.endpoint().leaving_by(exit.into())]);
    // The first is reached through a hop, over the device.
    for exit in [exit.in_tunnel(), exit] {
        let paths = vec![path("a", exit), path("b", Exit::default())];
        assert_silent_without_its_device(paths).await;
    }
}

async fn assert_silent_without_its_device(paths: Vec<Path>) {
    let uplink = Uplink::over(paths, None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    connect_both(&mut work).await;
    work.look();
    let lines = uplink.lines();
    work.moved(&HostNetwork::from_iter(["other0".to_owned()]));
    assert_eq!(uplink.lines().len(), 2);
    work.moved(&HostNetwork::from_iter(["lo".to_owned()]));
    assert!(lines[0].is_doubted() && !lines[1].is_doubted(), "only that path leaves by the device");

    lines[0].close();
    work.lost(&lines[0], None);
    work.attempted((0, 0), Err(ConnectError::NoAnswer((Ipv4Addr::LOCALHOST, 9).into())));
    assert!(matches!(work.next(), Step::Wait(_)));
    work.moved(&HostNetwork::default());
    assert!(matches!(work.next(), Step::Connect((0, 0))));
}

#[tokio::test]
async fn a_device_that_carried_nothing_at_the_start_makes_the_edge_connect_once_it_carries() {
    let relay = TestRelay::start(Does::Echo, true);
    let config = config::Config::from_toml("[[path]]\nname = \"a\"\ninterface = \"lo\"\n").unwrap();
    let exit = Arc::new(Exit::new(config.paths[0].interface.clone(), None));
    let uplink =
        Uplink::new(vec![relay.endpoint().leaving_by(exit)], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    tokio::time::pause();
    work.begin(&HostNetwork::from_iter(["lo".to_owned()]));
    assert!(matches!(work.next(), Step::Connect((0, 0))));
    work.attempted((0, 0), Err(ConnectError::NoAnswer((Ipv4Addr::LOCALHOST, 9).into())));
    assert!(!matches!(work.next(), Step::Connect(_)), "it has a back-off");
    work.moved(&HostNetwork::default());
    assert!(matches!(work.next(), Step::Connect((0, 0))));
}

#[tokio::test(start_paused = true)]
async fn a_relay_whose_name_was_never_resolved_is_tried_whenever_the_network_gets_more() {
    let template = Template::default_at("relay.invalid:443").unwrap();
    let access = Access { template, ..TestRelay::start(Does::Echo, true).access() };
    let endpoint = Endpoint::new(access, Transport::default(), Arc::default(), Schedules::default()).unwrap();
    let uplink = Uplink::new(vec![endpoint], None, (PATIENCE, PATIENCE), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let fail = |work: &mut Work<'_>| {
        assert!(matches!(work.next(), Step::Connect((0, 0))));
        let cause = std::io::ErrorKind::NotFound.into();
        work.attempted((0, 0), Err(ConnectError::Resolve { name: "relay.invalid".to_owned(), cause }));
        assert!(!matches!(work.next(), Step::Connect(_)), "it has a back-off");
    };
    fail(&mut work);
    let mut host = HostNetwork::default();
    for _ in 0..3 {
        work.moved(&host);
        assert!(!matches!(work.next(), Step::Connect(_)), "nothing was added");
        host = host.with_addition();
        work.moved(&host);
        fail(&mut work);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_before_the_next_attempt_to_connect_is_in_vain_if_only_that_can_help() {
    let (relay, hour) = (TestRelay::start(Does::Echo, true), Duration::from_secs(3_600));
    let uplink = Uplink::new(vec![relay.endpoint()], None, (hour, hour), UplinkResources::default());
    let mut work = Work::new(&uplink);
    let no_token = || ConnectError::Token { from: "nowhere".into(), cause: TokenError::Malformed };
    let is_vain = |wait| uplink.unreached_for(wait).is_some();
    assert!(matches!(work.next(), Step::Connect(_)) && !is_vain(ANSWER_TIMEOUT), "nothing is known");
    work.attempted((0, 0), Err(no_token()));
    assert!(matches!(work.next(), Step::Wait(_)) && is_vain(ANSWER_TIMEOUT) && !is_vain(hour));

    tokio::time::advance(hour).await;
    assert!(!is_vain(ANSWER_TIMEOUT), "it is due");
    assert!(matches!(work.next(), Step::Connect(_)) && !is_vain(ANSWER_TIMEOUT));
    assert!(matches!(work.next(), Step::Wait(_)) && !is_vain(ANSWER_TIMEOUT), "an attempt is in progress");
    work.attempted((0, 0), Err(ConnectError::NoAnswer(relay.address)));
    assert!(matches!(work.next(), Step::Wait(_)) && !is_vain(ANSWER_TIMEOUT), "it may come within reach earlier");
}
