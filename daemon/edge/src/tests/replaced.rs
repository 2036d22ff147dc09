//! Lists of forwards, one after another.

use std::{
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use config::{
    Config,
    forward::{Forward, TunnelMode},
    hop::Hop,
    path::PathSettings,
    policy::Policy,
    serve::Serve,
    uplink::{TrustSource, UplinkSettings},
};
use masque::target::Target;
use quic::{
    application::Discipline,
    class::{ClassMetrics, PolicyRole},
    endpoint::Transport,
};
use role::classes::Classes;
use test_relay::{Does, PATIENCE, TestRelay, eventually};
use tokio::{net::UdpSocket, sync::watch};

use super::{
    super::{Edge, EdgeResources, EntranceClasses, NamedSchedules, Place, local},
    receive,
};

fn forward_on(relay: &TestRelay, ip: [u8; 4], mode: TunnelMode, token_file: Option<PathBuf>) -> Forward {
    let access = relay.access();
    Forward {
        listen: (ip, 0).into(),
        protocol: config::targets::Protocol::Udp,
        uplink: UplinkSettings {
            relays: vec![access.template],
            token_file,
            client: None,
            trust: access.trust,
            via: None,
            schedule: None,
            backoff: (Duration::from_millis(10), Duration::from_secs(60)),
        },
        target: Target::from_authority("192.0.2.1:9").unwrap(),
        mode,
        class: None,
        idle: PATIENCE,
        idle_answered: PATIENCE,
        max_connections: 1,
    }
}

/// A configuration with exactly these forwards.
fn wanting(forwards: &[Forward]) -> Config {
    Config { forwards: forwards.to_vec(), ..Config::from_toml("").unwrap() }
}

/// A local address for clients of the OpenAI API, whose requests go to these gateways.
pub(crate) fn serve_on(gateways: &[&TestRelay], host: u8) -> Serve {
    let plain = forward_on(gateways[0], [127, 0, 0, 1], TunnelMode::Auto, None).uplink;
    let relays = gateways.iter().map(|relay| relay.access().template).collect();
    Serve {
        listen: ([127, 0, 0, host], 0).into(),
        hosts: Vec::new(),
        uplink: UplinkSettings { relays, trust: TrustSource::System, ..plain },
        balance: true,
        class: None,
        keys: Vec::new(),
        max_body_bytes: 1 << 20,
        bodies_bytes: 1 << 20,
        max_connections: 1,
        idle: PATIENCE,
        stall_timeout: PATIENCE,
    }
}

fn role() -> (Edge, EntranceClasses) {
    let make = |policy: &Policy| {
        Arc::new(Classes::new(policy.clone(), PolicyRole::Edge, &ClassMetrics::default(), |_| Default::default()))
    };
    let schedules = NamedSchedules::default();
    let classes = EntranceClasses::new(Policy::default(), schedules.clone(), make);
    (
        Edge::new(Transport::default(), EdgeResources::default(), schedules, watch::Sender::default().subscribe()),
        classes,
    )
}

async fn echoes(edge: &Edge, forward: &Forward, application: &UdpSocket) {
    let served = edge.served.iter().find(|served| served.wanted.listen() == forward.listen).expect("it is served");
    application.connect(served.socket.address().unwrap()).await.unwrap();
    application.send(b"payload").await.unwrap();
    assert_eq!(receive(application).await, b"payload");
}

#[tokio::test]
async fn forwards_that_stay_the_same_keep_their_tunnels_while_others_come_go_and_change() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let [stays, changes, comes] =
        [1, 2, 3].map(|host| forward_on(&relay, [127, 0, 0, host], TunnelMode::Datagram, None));
    edge.serve(edge.prepare(&wanting(&[stays.clone(), changes.clone()])).unwrap(), &classes);
    let mut applications = Vec::new();
    for _ in 0..3 {
        applications.push(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap());
    }
    echoes(&edge, &stays, &applications[0]).await;
    echoes(&edge, &changes, &applications[1]).await;
    let was = edge.served[1].socket.address().unwrap();

    let changed = Forward { mode: TunnelMode::Stream, ..changes };
    edge.serve(edge.prepare(&wanting(&[comes.clone(), changed.clone(), stays.clone()])).unwrap(), &classes);
    echoes(&edge, &stays, &applications[0]).await;
    assert_eq!(
        (relay.seen.requests.load(Relaxed), relay.seen.capsules.load(Relaxed)),
        (2, 0),
        "the tunnel is the same"
    );
    eventually(|| relay.seen.finished.load(Relaxed) == 1).await;
    echoes(&edge, &changed, &applications[1]).await;
    assert!(edge.served.iter().any(|served| served.socket.address().unwrap() == was), "so is the socket");
    echoes(&edge, &comes, &applications[2]).await;
    assert_eq!((relay.seen.requests.load(Relaxed), relay.seen.capsules.load(Relaxed)), (4, 1));
    assert_eq!(relay.seen.connections.load(Relaxed), 1, "all share a connection");

    edge.serve(edge.prepare(&wanting(&[])).unwrap(), &classes);
    eventually(|| relay.seen.finished.load(Relaxed) == 4 && local::bind(was).is_ok()).await;
    edge.close().await;
}

#[tokio::test]
async fn a_forward_begins_anew_when_a_file_that_it_names_says_something_else() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let file = std::env::temp_dir().join(format!("paced-edge-token-{}", std::process::id()));
    std::fs::write(&file, "first").unwrap();
    let forward = [forward_on(&relay, [127, 0, 0, 1], TunnelMode::Auto, Some(file.clone()))];
    edge.serve(edge.prepare(&wanting(&forward)).unwrap(), &classes);
    assert!(matches!(edge.prepare(&wanting(&forward)).unwrap().places[..], [Place::Same(0)]));
    std::fs::write(&file, "second").unwrap();
    let prepared = edge.prepare(&wanting(&forward)).unwrap();
    let [Place::Other(other)] = &prepared.places[..] else { panic!("it is another") };
    assert_eq!(other.changed_files(&edge.served[0]), [file.display().to_string()], "the log names it");
    edge.serve(prepared, &classes);
    assert_eq!((edge.served.len(), edge.uplinks.len()), (1, 1), "the connection with the old token is closed");
    std::fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn a_token_that_cannot_be_read_refuses_a_reload_and_no_start() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let file = std::env::temp_dir().join(format!("paced-edge-late-token-{}", std::process::id()));
    let forward = [forward_on(&relay, [127, 0, 0, 1], TunnelMode::Datagram, Some(file.clone()))];
    edge.serve(edge.prepare(&wanting(&forward)).unwrap(), &classes);
    assert!(matches!(edge.prepare(&wanting(&forward)).unwrap().places[..], [Place::Same(0)]), "it may come later");
    std::fs::write(&file, "first").unwrap();
    edge.serve(edge.prepare(&wanting(&forward)).unwrap(), &classes);
    let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    echoes(&edge, &forward[0], &application).await;
    let connections = relay.seen.connections.load(Relaxed);

    let refusal = |edge: &Edge, config: &Config| format!("{:#}", edge.prepare(config).map(drop).unwrap_err());
    for contents in [None, Some(""), Some("\n"), Some("two words")] {
        match contents {
            None => std::fs::remove_file(&file).unwrap(),
            Some(contents) => std::fs::write(&file, contents).unwrap(),
        }
        let said = refusal(&edge, &wanting(&forward));
        assert!(said.contains(&format!("failed to read the token from {}", file.display())), "{contents:?}: {said}");
    }
    std::fs::write(&file, "first").unwrap();
    assert!(matches!(edge.prepare(&wanting(&forward)).unwrap().places[..], [Place::Same(0)]), "it is as it was");
    echoes(&edge, &forward[0], &application).await;
    assert_eq!(relay.seen.connections.load(Relaxed), connections, "nothing has changed meanwhile");

    let elsewhere = forward_on(&relay, [127, 0, 0, 1], TunnelMode::Datagram, Some("/nowhere/token".into()));
    assert!(refusal(&edge, &wanting(std::slice::from_ref(&elsewhere))).contains("/nowhere/token"));
    let mut behind = forward[0].clone();
    behind.uplink.via = Some("first".to_owned());
    let hops = vec![Hop { name: "first".to_owned(), uplink: elsewhere.uplink }];
    assert!(refusal(&edge, &Config { hops, ..wanting(&[behind]) }).contains("/nowhere/token"), "that of a hop");
    std::fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn a_token_that_cannot_be_read_keeps_the_changed_files_of_no_other_address_from_taking_effect() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let [broken, other] = ["broken", "other"].map(|name| {
        let file = std::env::temp_dir().join(format!("paced-edge-{name}-token-{}", std::process::id()));
        std::fs::write(&file, "first").unwrap();
        file
    });
    let at = |host, file: &PathBuf| forward_on(&relay, [127, 0, 0, host], TunnelMode::Datagram, Some(file.clone()));
    let forwards = [at(1, &broken), at(2, &other)];
    edge.serve(edge.prepare(&wanting(&forwards)).unwrap(), &classes);
    let application = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    echoes(&edge, &forwards[0], &application).await;
    let requests = relay.seen.requests.load(Relaxed);

    std::fs::write(&broken, "two words").unwrap();
    std::fs::write(&other, "second").unwrap();
    assert!(edge.prepare(&wanting(&forwards)).is_err(), "a reload is refused");
    let prepared = edge.prepare_again(&wanting(&forwards)).unwrap();
    assert!(matches!(prepared.places[..], [Place::Same(0), Place::Other(_)]));
    let [(_, why)] = &prepared.kept[..] else { panic!("{:?}", prepared.kept) };
    assert!(why.contains(&broken.display().to_string()), "{why}");
    edge.serve(prepared, &classes);
    assert_eq!((edge.served.len(), edge.uplinks.len()), (2, 2));
    echoes(&edge, &forwards[0], &application).await;
    assert_eq!(relay.seen.requests.load(Relaxed), requests, "its tunnel is the same");

    std::fs::write(&broken, "second").unwrap();
    let prepared = edge.prepare_again(&wanting(&forwards)).unwrap();
    let is_new =
        |listen| prepared.places.iter().any(|it| matches!(it, Place::Other(it) if it.wanted.listen() == listen));
    assert_eq!(forwards.each_ref().map(|forward| is_new(forward.listen)), [true, false], "it is read once it can be");
    let moved = Forward { listen: ([127, 0, 0, 3], 0).into(), ..at(1, &"/nowhere/token".into()) };
    assert!(edge.prepare_again(&wanting(&[moved])).is_err(), "nothing is there that could stay");
    [broken, other].iter().for_each(|file| std::fs::remove_file(file).unwrap());
}

#[tokio::test]
async fn connections_and_tunnels_stay_when_a_path_only_gets_other_terms() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let forward = forward_on(&relay, [127, 0, 0, 1], TunnelMode::Datagram, None);
    let over = |cost_s: u64, rate: Option<u64>, host: u8| Config {
        paths: vec![PathSettings {
            name: "only".to_owned(),
            interface: None,
            address: Some([127, 0, 0, host].into()),
            relay: None,
            via: None,
            cost: Duration::from_secs(cost_s),
            rate,
        }],
        ..wanting(std::slice::from_ref(&forward))
    };
    edge.serve(edge.prepare(&over(0, Some(5), 1)).unwrap(), &classes);
    let application = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    echoes(&edge, &forward, &application).await;
    let rate = |edge: &Edge| edge.uplinks[0].uplink.path_states()[0].bytes_per_sec;
    assert_eq!(rate(&edge), 5);

    let prepared = edge.prepare(&over(9, Some(7), 1)).unwrap();
    assert!(matches!(prepared.places[..], [Place::Same(0)]));
    assert_eq!(rate(&edge), 5, "nothing has changed yet");
    edge.serve(prepared, &classes);
    assert_eq!(rate(&edge), 7);
    echoes(&edge, &forward, &application).await;
    let seen = || (relay.seen.connections.load(Relaxed), relay.seen.requests.load(Relaxed));
    assert_eq!((seen(), edge.uplinks.len()), ((1, 1), 1), "the tunnel is the same");

    edge.serve(edge.prepare(&over(9, Some(8), 2)).unwrap(), &classes);
    echoes(&edge, &forward, &application).await;
    assert_eq!((seen(), edge.uplinks.len(), rate(&edge)), ((2, 2), 1, 8), "its packets leave from another address");
}

#[tokio::test]
async fn connections_to_a_hop_say_by_which_exit_of_a_path_they_leave() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let mut forward = forward_on(&relay, [127, 0, 0, 1], TunnelMode::Datagram, None);
    let hops = vec![Hop { name: "first".to_owned(), uplink: forward.uplink.clone() }];
    forward.uplink.via = Some("first".to_owned());
    let paths = [1, 2].map(|host| PathSettings {
        name: format!("path{host}"),
        interface: None,
        address: Some([127, 0, 0, host].into()),
        relay: None,
        via: None,
        cost: Duration::ZERO,
        rate: None,
    });
    let config = Config { hops, paths: paths.into(), ..wanting(&[forward]) };
    edge.serve(edge.prepare(&config).unwrap(), &classes);
    let found = edge.uplinks.iter().flat_map(|shared| shared.uplink.standpoints());
    let mut shown: Vec<_> = found.map(|found| (found.via, found.path, found.exit)).collect();
    shown.sort();
    let expected = [("", "", 1), ("", "", 2), ("first", "path1", 1), ("first", "path2", 2)];
    let expected = expected.map(|(via, path, host)| (via.to_owned(), path.to_owned(), format!("from 127.0.0.{host}")));
    assert_eq!(shown, expected);
}

#[tokio::test]
async fn forwards_share_a_connection_only_under_one_schedule_and_their_connections_follow_the_policy() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let policy = |discipline: &str| {
        let text = format!("[schedule]\ndiscipline = \"rr\"\n[schedule.own]\ndiscipline = \"{discipline}\"\n");
        Policy::from_toml(&text).unwrap()
    };
    classes.follow(&policy("wfq"));
    let forwards = [1, 2, 3].map(|host| {
        let plain = forward_on(&relay, [127, 0, 0, host], TunnelMode::Datagram, None);
        let schedule = (host > 1).then(|| "own".to_owned());
        Forward { uplink: UplinkSettings { schedule, ..plain.uplink }, ..plain }
    });
    edge.serve(edge.prepare(&wanting(&forwards)).unwrap(), &classes);
    for forward in &forwards {
        echoes(&edge, forward, &UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap()).await;
    }
    assert_eq!((edge.uplinks.len(), relay.seen.connections.load(Relaxed)), (2, 2));
    let disciplines = |edge: &Edge| [None, Some("own")].map(|name| edge.schedules.get(name).get().discipline);
    assert_eq!(disciplines(&edge), [Discipline::Rr, Discipline::Wfq]);
    classes.follow(&policy("abs"));
    assert_eq!(disciplines(&edge), [Discipline::Rr, Discipline::Abs]);

    let [plain, own, _] = forwards;
    let changed = Forward { uplink: UplinkSettings { schedule: None, ..own.uplink.clone() }, ..own };
    edge.serve(edge.prepare(&wanting(&[plain, changed.clone()])).unwrap(), &classes);
    echoes(&edge, &changed, &UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap()).await;
    assert_eq!((edge.uplinks.len(), relay.seen.connections.load(Relaxed)), (1, 2), "both share the first");
}

#[tokio::test]
async fn addresses_that_cannot_be_served_are_refused_and_change_nothing() {
    let relay = TestRelay::start(Does::Echo, true);
    let (mut edge, classes) = role();
    let stays = forward_on(&relay, [127, 0, 0, 1], TunnelMode::Auto, None);
    edge.serve(edge.prepare(&wanting(std::slice::from_ref(&stays))).unwrap(), &classes);
    let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let taken = other.local_addr().unwrap();
    let refused = edge.prepare(&wanting(&[stays.clone(), Forward { listen: taken, ..stays.clone() }])).map(drop);
    assert!(format!("{:#}", refused.unwrap_err()).contains(&format!("failed to listen on {taken}")));
    let mut nowhere = stays.clone();
    nowhere.uplink.trust = TrustSource::Authority("/nowhere/ca.pem".into());
    assert!(format!("{:#}", edge.prepare(&wanting(&[nowhere])).map(drop).unwrap_err()).contains("/nowhere/ca.pem"));
    echoes(&edge, &stays, &UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap()).await;
}

#[tokio::test]
async fn gateways_stand_in_for_each_other_only_while_a_local_address_spreads_requests_over_them() {
    let relays = [TestRelay::start(Does::Echo, true), TestRelay::start(Does::Echo, true)];
    let (mut edge, classes) = role();
    let [first, second] = [0, 1].map(|at| serve_on(&[&relays[usize::from(at)]], at + 1));
    let serving = |serves: &[Serve]| Config { serves: serves.to_vec(), ..wanting(&[]) };
    let linked = |edge: &Edge| edge.uplinks.iter().map(|shared| shared.uplink.has_peers()).collect::<Vec<_>>();
    let alone = serving(&[first.clone(), second.clone()]);
    let spread = serving(&[first.clone(), second.clone(), serve_on(&[&relays[0], &relays[1]], 3)]);
    edge.serve(edge.prepare(&alone).unwrap(), &classes);
    assert_eq!(linked(&edge), [false, false]);
    let prepared = edge.prepare(&spread).unwrap();
    assert_eq!(linked(&edge), [false, false], "nothing has changed yet");
    edge.serve(prepared, &classes);
    assert_eq!(linked(&edge), [true, true]);
    edge.serve(edge.prepare(&alone).unwrap(), &classes);
    assert_eq!(linked(&edge), [false, false], "requests no longer go to both");
}
