//! Applications that know nothing of relays, behind `pacectl forward` and behind the edge role.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    application::{BRIEF, application, assert_carries, echoes, receive_into},
    flow::watch,
    netns::End,
    process::{Held, Process, wait_for},
    report::figure,
    site::{Counts, Family, SOON, Site, Terms},
    uplinks::PAYLOADS,
};

const LISTEN: &str = "127.0.0.1:5000";

/// Starts `pacectl forward` at the client.
fn start_forward(site: &Site, family: Family, target: &str, options: &[&str]) -> Process {
    let (template, authority) = (site.template(family), site.path("authority.pem").display().to_string());
    let arguments = [&["forward", LISTEN, target, "--relay", &template, "--ca", &authority], options].concat();
    site.chain.client.start(lab::program("pacectl").unwrap(), arguments).unwrap()
}

/// Starts `pacectl forward` at the client and waits until it listens.
fn forward(site: &Site, family: Family, target: &str, options: &[&str]) -> Process {
    let forward = start_forward(site, family, target, options);
    forward.wait_for_line("forwarding", SOON).unwrap();
    forward
}

#[test]
fn an_applications_datagrams_pass_in_every_mode() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    for family in [Family::V4, Family::V6] {
        for mode in ["auto", "datagram", "stream"] {
            let _forward = forward(&site, family, &site.target(family, 7).to_string(), &["--mode", mode]);
            assert_carries(&site, &application(&site, LISTEN), 1200);
        }
    }
}

#[test]
fn payloads_of_1200_bytes_cross_a_path_of_1280() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.access.set_mtu(1280).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    for family in [Family::V4, Family::V6] {
        let _forward = forward(&site, family, &site.target(Family::V4, 7).to_string(), &[]);
        assert_carries(&site, &application(&site, LISTEN), 1200);
    }
}

#[test]
fn a_tcp_application_passes() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let listener = site.chain.target.run(|| TcpListener::bind("0.0.0.0:80").unwrap()).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        stream.read_to_end(&mut request).unwrap();
        stream.write_all(&request).unwrap();
    });
    let _forward = forward(&site, Family::V4, &site.target(Family::V4, 80).to_string(), &["--tcp"]);
    let mut stream = site.chain.client.run(|| TcpStream::connect(LISTEN).unwrap()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(b"to whom it may concern").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    assert_eq!(response, b"to whom it may concern");
    server.join().unwrap();
}

#[test]
fn the_edge_role_carries_many_senders_over_one_connection_and_finds_its_relay_again() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "connection_idle_seconds = 5", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = site.template(Family::V4);
    let edge = format!(
        r#"
        state_dir = "$FOLDER/edge"
        [transport]
        keep_alive_seconds = 1
        [[forward]]
        listen = "127.0.0.1:5001"
        relay = "{relay}"
        target = "10.0.2.2:7"
        mode = "datagram"
        ca = "$FOLDER/authority.pem"
        [[forward]]
        listen = "127.0.0.1:5002"
        relay = "{relay}"
        target = "[fd00:2::2]:7"
        mode = "stream"
        ca = "$FOLDER/authority.pem"
        "#
    );
    let folder = site.path("").display().to_string();
    let file = site.write("edge.toml", &edge.replace("$FOLDER", folder.trim_end_matches('/'))).unwrap();
    let arguments = ["run".into(), "--config".into(), file];
    let _edge = site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    let senders: Vec<_> = (0..10).map(|at| application(&site, ["127.0.0.1:5001", "127.0.0.1:5002"][at % 2])).collect();
    senders.iter().for_each(|sender| assert_carries(&site, sender, 1200));
    let counts = site.counts().unwrap();
    assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 10));

    site.chain.access.near.set_up(false).unwrap();
    site.wait_for_counts("the connection to be lost", |counts| counts.of("connections") == 0).unwrap();
    site.chain.access.near.set_up(true).unwrap();
    for sender in &senders {
        sender.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        wait_for("an echo over a new connection", SOON, || echoes(sender, b"back again").then_some(())).unwrap();
    }
}

/// Sends one question from each of `questions` new ports, `at_once` at a time, and returns how many were answered.
pub fn ask(site: &Site, to: &str, questions: usize, at_once: usize) -> usize {
    let answered = |_| {
        let socket = application(site, to);
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket.send(b"a question").unwrap();
        socket
    };
    let mut received = [0; 64];
    (0..questions / at_once)
        .map(|_| {
            let sockets: Vec<_> = (0..at_once).map(answered).collect();
            sockets.iter().filter(|socket| receive_into(socket, &mut received).is_ok()).count()
        })
        .sum()
}

/// Asks ten thousand questions, and asserts that afterwards the daemons hold no more than after the first two thousand, at which all places
/// for senders have been taken.
pub fn assert_leaves_nothing(daemons: &[(&str, &Process)], ask: impl Fn(usize)) {
    ask(2_000);
    let before: Vec<_> = daemons.iter().map(|(_, daemon)| Held::by(daemon.id()).unwrap()).collect();
    ask(8_000);
    for ((name, daemon), before) in daemons.iter().zip(before) {
        // Tunnels that give way to others may not have ended yet.
        let has_closed = || Held::by(daemon.id()).ok().filter(|held| held.descriptors <= before.descriptors + 4);
        wait_for("the last questions' tunnels to end", SOON, has_closed).unwrap();
        let after = Held::by(daemon.id()).unwrap();
        println!("{name}: {before:?} after 2,000 questions, {after:?} after 10,000");
        assert!(after.kib < before.kib + 8 * 1_024, "{name}: {before:?} became {after:?}");
    }
}

#[test]
fn a_resolver_behind_an_edge_is_asked_from_new_ports_for_ever() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = edge(&site, Family::V4, "");
    assert_leaves_nothing(&[("edge", &edge), ("relay", &site.relay)], |questions| {
        let answered = ask(&site, LISTEN, questions, 20);
        // Either end's counters may show where the other questions went.
        let counted = || [Counts::read(&site.chain.client, "127.0.0.1:9100"), site.counts()];
        assert_eq!(
            answered,
            questions,
            "edge and relay counted {:#?}, and the edge said:\n{}",
            counted(),
            edge.output()
        );
    });
    let counts = site.counts().unwrap();
    assert_eq!((counts.of("connections"), counts.udp_tunnels() <= 1_024), (1, true));
}

/// Starts an edge at the client with one forward to port 7 of the target over a relay in `family`, and these lines in its `[transport]`.
fn edge(site: &Site, family: Family, transport: &str) -> Process {
    let edge = r#"
        state_dir = "$FOLDER/edge"
        [transport]
        $TRANSPORT
        [metrics]
        listen = "127.0.0.1:9100"
        [[forward]]
        listen = "127.0.0.1:5000"
        relay = "$RELAY"
        target = "10.0.2.2:7"
        ca = "$FOLDER/authority.pem"
        "#;
    let folder = site.path("").display().to_string();
    let edge = edge.replace("$FOLDER", folder.trim_end_matches('/')).replace("$RELAY", &site.template(family));
    let file = site.write("edge.toml", &edge.replace("$TRANSPORT", transport)).unwrap();
    let edge =
        site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap();
    edge.wait_for_line("forwarding", SOON).unwrap();
    edge
}

/// The commands that give the client its address number `next` in `family` in place of address number `before`, with `flags` of
/// `ip address add`.
fn moved(site: &Site, family: Family, [before, next]: [u32; 2], flags: &str) -> String {
    let End { device, v4, v6, .. } = &site.chain.access.near;
    let number = |number: u32| match family {
        Family::V4 => format!("{}/24", Ipv4Addr::from_bits((v4.to_bits() & !0xff) | number)),
        Family::V6 => format!("{}/64", Ipv6Addr::from_bits((v6.to_bits() & !0xff) | u128::from(number))),
    };
    format!("address del {} dev {device}\naddress add {} dev {device} {flags}", number(before), number(next))
}

/// Without duplicate address detection (RFC 4862 §5.4), before whose end the kernel does not use an address.
const AT_ONCE: &str = "nodad";

/// Changes the client's addresses by these lines while an application sends every 10 ms, prints what that cost, and asserts that it lost less
/// than a second of payloads.
fn assert_loses_less_than_a_second(site: &Site, edge: &Process, socket: &UdpSocket, event: &str, lines: &str) {
    let change = || site.chain.client.ip(lines).unwrap();
    let cost = watch(std::slice::from_ref(socket), Duration::from_secs(2), change).unwrap();
    figure(event, PAYLOADS, cost);
    assert!(cost.lost_of.unwrap().0 < 100, "{event}: {cost}; the edge said:\n{}", edge.output());
}

fn assert_goes_on_from_other_addresses(family: Family, flags: &str) {
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = edge(&site, family, "");
    let socket = application(&site, LISTEN);
    assert_carries(&site, &socket, 1200);
    let mut number = 1;
    for change in 1..=8 {
        let next = 16 + change;
        let lines = moved(&site, family, [number, next], flags);
        let event = format!("the address of the only link changes, {family:?}, change {change}");
        assert_loses_less_than_a_second(&site, &edge, &socket, &event, &lines);
        number = next;
        if change <= 2 {
            let counts = site.counts().unwrap();
            assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 1), "change {change}");
        }
    }
}

#[test]
fn an_edge_goes_on_from_another_address_with_its_tunnel_and_loses_less_than_a_second() {
    lab::ring!(Netns);
    assert_goes_on_from_other_addresses(Family::V4, "");
}

#[test]
fn an_edge_goes_on_from_another_address_of_ipv6_with_its_tunnel_and_loses_less_than_a_second() {
    lab::ring!(Netns);
    assert_goes_on_from_other_addresses(Family::V6, AT_ONCE);
}

#[test]
fn an_edge_goes_on_once_its_new_address_has_been_found_to_be_its_alone() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = edge(&site, Family::V6, "");
    let socket = application(&site, LISTEN);
    assert_carries(&site, &socket, 1200);
    for change in [[1, 17], [17, 18]] {
        site.chain.client.ip(&moved(&site, Family::V6, change, "")).unwrap();
        socket.set_read_timeout(Some(BRIEF)).unwrap();
        wait_for("an echo from the new address", SOON, || echoes(&socket, b"moved").then_some(()))
            .unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
    }
}

#[test]
fn an_edge_whose_connection_cannot_move_makes_another_and_loses_less_than_a_second() {
    lab::ring!(Netns);
    for (family, flags) in [(Family::V4, ""), (Family::V6, AT_ONCE)] {
        let site = Site::new(Terms::default()).unwrap();
        let _echo = site.chain.target.echo(7).unwrap();
        // s2n-quic's own sockets keep the address with which they started.
        let edge = edge(&site, family, "io = \"stock\"");
        let socket = application(&site, LISTEN);
        assert_carries(&site, &socket, 1200);
        let lines = moved(&site, family, [1, 9], flags);
        let event = format!("the address of the only link changes, {family:?}, with another connection");
        assert_loses_less_than_a_second(&site, &edge, &socket, &event, &lines);
    }
}

#[test]
fn short_connections_and_questions_pass_one_after_another_through_a_relay_that_allows_few_at_once() {
    lab::ring!(Netns);
    let site = Site::new(Terms { limits: "tunnels_per_connection = 4", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let questions = forward(&site, Family::V4, &site.target(Family::V4, 7).to_string(), &[]);
    assert_eq!(ask(&site, LISTEN, 200, 2), 200, "pacectl said:\n{}", questions.output());
    drop(questions);

    const CONNECTIONS: usize = 200;
    let listener = site.chain.target.run(|| TcpListener::bind("0.0.0.0:80").unwrap()).unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..CONNECTIONS {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            stream.write_all(&byte).unwrap();
        }
    });
    let _forward = forward(&site, Family::V4, &site.target(Family::V4, 80).to_string(), &["--tcp"]);
    for at in 0..CONNECTIONS {
        let mut stream = site.chain.client.run(|| TcpStream::connect(LISTEN).unwrap()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(&[at as u8]).unwrap();
        let mut answer = [0];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [at as u8]);
    }
    server.join().unwrap();
}

#[test]
fn pacectl_forward_says_why_a_tcp_connection_fails() {
    lab::ring!(Netns);
    let (token, digest) = generate_token().unwrap();
    let sections = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"", hex(&digest));
    let site = Site::new(Terms { relay: "", sections: &sections, ..Terms::default() }).unwrap();
    let closed = site.target(Family::V4, 81).to_string();
    let with_token = |token: &str| {
        let file = site.write("a.token", token).unwrap().display().to_string();
        ["--tcp".to_owned(), "--token-file".to_owned(), file]
    };
    let refused = with_token("wrong");
    let mut refused = start_forward(&site, Family::V4, &closed, &refused.each_ref().map(String::as_str));
    assert_eq!(refused.wait(SOON).unwrap().code(), Some(3), "{}", refused.output());
    let said = refused.output();
    assert!(said.contains("the token in proxy-authorization is not valid") && !said.contains("forwarding"), "{said}");
    let admitted = with_token(&token);
    let admitted = forward(&site, Family::V4, &closed, &admitted.each_ref().map(String::as_str));
    let mut stream = site.chain.client.run(|| TcpStream::connect(LISTEN).unwrap()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // The stream ends, with or without a reset.
    _ = stream.read(&mut [0]);
    admitted.wait_for_line("the target refused", SOON).unwrap();
}
