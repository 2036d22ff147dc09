//! A relay that an edge reaches through another one, so that neither knows both ends.

use std::{
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use api::token::generate_token;
use config::hash::hex;
use lab::{
    application::{application, assert_carries, echoes},
    authority::Authority,
    flow::watch,
    netns::{Chain, Link, Namespace},
    process::{Process, wait_for},
    report::figure,
    site::{Counts, Family, SOON, Site, Terms},
    stalls::CpuStalls,
    uplinks::{PAYLOADS, ROUND_ROBIN, assert_carry_unbroken, assert_short_gap, assert_unless_stalled, paths, states},
};

use super::forward::{ask, assert_leaves_nothing};

const LISTEN: &str = "127.0.0.1:5000";
const TCP_LISTEN: &str = "127.0.0.1:5001";
const PROXY: &str = "127.0.0.1:5002";
const METRICS: &str = "127.0.0.1:9433";

/// The log settings of both relays.
const LOG: &str = "access = \"json\"\naccess_addresses = true\n";

/// Client, first relay, second relay, target: each reaches only its neighbours, and each relay has its own authority and
/// token.
struct Hops {
    site: Site,
    end: Namespace,
    second_relay: Process,
    token_digest: String,
    second: Namespace,
    _links: [Link; 2],
}

fn first_terms(sections: &str) -> Terms<'_> {
    Terms { relay: "auth = \"token\"", sections, ..Terms::default() }
}

impl Hops {
    fn new() -> Self {
        let chain = Chain::new().unwrap();
        let [second, end] = ["second", "end"].map(|role| Namespace::new(role).unwrap());
        let links = [Link::new(&chain.relay, &second, 3).unwrap(), Link::new(&second, &end, 4).unwrap()];
        let (first_token, digest) = generate_token().unwrap();
        let token_digest = hex(&digest);
        let site = Site::on(chain, first_terms(&sections(&token_digest))).unwrap();
        site.write("first.token", &first_token).unwrap();
        let (token, digest) = generate_token().unwrap();
        site.write("second.token", &token).unwrap();
        let authority = Authority::new().unwrap();
        site.write("second-authority.pem", &authority.pem()).unwrap();
        site.write_identity("second", &authority.issue(&["10.0.3.2"]).unwrap()).unwrap();
        let text = format!(
            "state_dir = \"$FOLDER/second\"\n[control]\nenabled = false\n[relay]\nlisten = [\"10.0.3.2:444\"]\n\
             certificate = \"$FOLDER/second.pem\"\nprivate_key = \"$FOLDER/second.key\"\nauth = \"token\"\n\
             templates = [\"https://10.0.3.2:444/.well-known/masque/udp/{{target_host}}/{{target_port}}/\"]\n\
             [relay.targets]\nallow = [{{ to = \"10.0.4.0/24\", ports = [\"1-65535\"] }}]\n[log]\nlevel = \"debug\"\n{LOG}\
             [[relay.token]]\nname = \"bob\"\nsha256 = \"{}\"\n",
            hex(&digest)
        );
        let file = write(&site, "second.toml", &text);
        let arguments = ["run".into(), "--config".into(), file];
        let second_relay = second.start(lab::program("paced").unwrap(), arguments).unwrap();
        second_relay.wait_for_line("10.0.3.2:444", SOON).unwrap();
        Self { site, end, second_relay, token_digest, second, _links: links }
    }

    /// The edge's configuration: port 7 of the target by UDP, port 80 by TCP, and a proxy; `more` is added.
    fn configuration(&self, more: &str) -> String {
        let second = "relay = \"https://10.0.3.2:444/.well-known/masque/udp/{target_host}/{target_port}/\"\n\
                      token_file = \"$FOLDER/second.token\"\nca = \"$FOLDER/second-authority.pem\"\nvia = \"first\"\n\
                      backoff_longest_seconds = 1\n";
        let mut text = format!(
            "state_dir = \"$FOLDER/edge\"\n[control]\nsocket = \"$FOLDER/edge.sock\"\n[transport]\n\
             keep_alive_seconds = 1\n[metrics]\nlisten = \"{METRICS}\"\n"
        );
        for (listen, protocol, port) in [(LISTEN, "udp", 7), (TCP_LISTEN, "tcp", 80)] {
            _ = write!(
                text,
                "[[forward]]\nlisten = \"{listen}\"\nprotocol = \"{protocol}\"\ntarget = \"10.0.4.2:{port}\"\n{second}"
            );
        }
        _ = write!(text, "[[proxy]]\nlisten = \"{PROXY}\"\n{second}");
        text + more
    }

    /// The section of the first relay as a hop, with its address of this family.
    fn hop(&self, family: Family) -> String {
        format!(
            "[hop.first]\nrelay = \"{}\"\nca = \"$FOLDER/authority.pem\"\ntoken_file = \"$FOLDER/first.token\"\n\
             backoff_longest_seconds = 1\n",
            self.site.template(family)
        )
    }

    fn edge(&self, family: Family) -> Process {
        self.edge_with(&self.configuration(&self.hop(family)))
    }

    fn edge_with(&self, configuration: &str) -> Process {
        let file = write(&self.site, "edge.toml", configuration);
        let arguments = ["run".into(), "--config".into(), file];
        let edge = self.site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
        edge.wait_for_line("forwarding", SOON).unwrap();
        edge
    }

    /// An edge that prefers the relay beside the first one, and uses the first if that fails. A silent connection lasts for 15 s.
    fn edge_of_two(&self) -> Process {
        let template = self.site.template(Family::V4);
        let beside = self.site.template_beside();
        assert_ne!(beside, template);
        let hop = self.hop(Family::V4).replace(&format!("\"{template}\""), &format!("[\"{beside}\", \"{template}\"]"));
        self.edge_with(&self.configuration(&hop).replace("keep_alive_seconds = 1\n", "keep_alive_seconds = 10\n"))
    }

    fn pacectl(&self, arguments: &[&str]) -> String {
        self.site.pacectl_at("edge.sock", arguments).unwrap().1
    }

    /// The words of the line of `pacectl tunnels` about the hop's tunnel, once there is one.
    fn hop_tunnel(&self) -> Vec<String> {
        let found = wait_for("the hop's tunnel to be listed", SOON, || {
            let said = self.pacectl(&["tunnels"]);
            let line = said.lines().find(|line| line.contains("[hop.first]"))?;
            Some(line.split_whitespace().map(str::to_owned).collect())
        });
        found.unwrap()
    }

    /// The value of an edge's metric without labels.
    fn metric(&self, name: &str) -> Option<f64> {
        let mut stream = self.connect(METRICS);
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: edge\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = Vec::new();
        stream.read_to_end(&mut page).unwrap();
        let page = String::from_utf8_lossy(&page).into_owned();
        page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    fn connect(&self, to: &str) -> TcpStream {
        let stream = self.site.chain.client.run(|| TcpStream::connect(to).unwrap()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }
}

/// The first relay's sections.
fn sections(token_digest: &str) -> String {
    format!("{LOG}[[relay.token]]\nname = \"alice\"\nsha256 = \"{token_digest}\"\n")
}

fn write(site: &Site, name: &str, text: &str) -> std::path::PathBuf {
    let folder = site.path("").display().to_string();
    site.write(name, &text.replace("$FOLDER", folder.trim_end_matches('/'))).unwrap()
}

#[test]
fn a_first_relay_that_goes_away_properly_is_left_for_another_before_it_has_gone() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    let keys = "auth = \"token\"\ndrain_seconds = 5";
    let mut beside = hops.site.start_beside(keys, &format!("[log]\n{}", sections(&hops.token_digest))).unwrap();
    let edge = hops.edge_of_two();
    let sockets: Vec<_> = (0..4).map(|_| application(&hops.site, LISTEN)).collect();
    sockets.iter().for_each(|socket| assert_carries(&hops.site, socket, 600));
    assert_eq!(hops.site.counts().unwrap().udp_tunnels(), 0, "the other relay is preferred");

    let cost = watch(&sockets, Duration::from_secs(5), || beside.signal(libc::SIGTERM).unwrap()).unwrap();
    figure("a first relay of two is upgraded", PAYLOADS, cost);
    let has_tunnel = |counts: &Counts| counts.udp_tunnels() == 1;
    hops.site.wait_for_counts("the hop's tunnel to be at the remaining relay", has_tunnel).unwrap();
    assert_carry_unbroken(&hops.site, METRICS, &sockets, 4, &edge);
    assert!(beside.wait(SOON).unwrap().success());
}

#[test]
fn a_tcp_connection_through_a_silent_first_relay_of_two_ends_after_five_seconds_as_without_a_hop() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    hops.end.echo_tcp(80).unwrap();
    let mut beside =
        hops.site.start_beside("auth = \"token\"", &format!("[log]\n{}", sections(&hops.token_digest))).unwrap();
    let edge = hops.edge_of_two();
    let stalls = CpuStalls::watch(&[hops.site.relay.id(), hops.second_relay.id(), edge.id()]).unwrap();
    let socket = application(&hops.site, LISTEN);
    assert_carries(&hops.site, &socket, 600);
    let mut stream = hops.connect(TCP_LISTEN);
    assert_tcp_carries(&mut stream);
    assert_eq!(hops.site.counts().unwrap().udp_tunnels(), 0, "the other relay is preferred");

    beside.signal(libc::SIGSTOP).unwrap();
    let stopped = Instant::now();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    wait_for("an echo through the remaining relay", SOON, || echoes(&socket, b"moved").then_some(()))
        .unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
    let moved = stopped.elapsed();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let is_over = match stream.read(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    };
    let ended = stopped.elapsed();
    assert!(is_over && ended >= Duration::from_secs(5), "the path may have returned; it ended after {ended:.1?}");
    assert_unless_stalled(ended < Duration::from_secs(10), &("tunnels and connections", moved, ended), &stalls, &edge);
    assert_tcp_carries(&mut hops.connect(TCP_LISTEN));
}

#[test]
fn tunnels_move_when_a_new_connection_to_the_first_relay_replaces_one_that_lost_its_address() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    let edge = hops.edge(Family::V4);
    let sockets: Vec<_> = (0..4).map(|_| application(&hops.site, LISTEN)).collect();
    sockets.iter().for_each(|socket| assert_carries(&hops.site, socket, 600));
    let (client, relay) = (&hops.site.chain.client, &hops.site.chain.relay);
    client.ip("route add 10.0.1.2/32 dev relay").unwrap();
    let counts = || Counts::read(client, METRICS).unwrap();
    let moved = || counts().sum("edge_tunnels_moved_total");
    let mut address = "10.0.1.1/24".to_owned();
    // The old connection may still answer before the new one, and then stays.
    for host in 9..19 {
        let next = format!("10.0.1.{host}/32");
        // For a while, the relay cannot answer the new address, so that the edge does not wait for the old connection to follow.
        relay.ip(&format!("route add blackhole {next}")).unwrap();
        let attempts = counts().sum("edge_connections_left_total");
        let cost = watch(&sockets, Duration::from_secs(3), || {
            client.ip(&format!("address add {next} dev relay\naddress del {address} dev relay")).unwrap();
            let is_left = || (counts().sum("edge_connections_left_total") > attempts).then_some(());
            wait_for("the old connection to be left", SOON, is_left).unwrap();
            relay.ip(&format!("route del blackhole {next}")).unwrap();
        });
        figure("the address toward the first relay changes", PAYLOADS, cost.unwrap());
        address = next;
        if moved() > 0 {
            break;
        }
    }
    // All of them together, perhaps more than once.
    let moves = moved();
    assert!(moves > 0 && moves % 4 == 0, "{moves} moves; the edge said:\n{}", edge.output());
    assert_carry_unbroken(&hops.site, METRICS, &sockets, moves, &edge);
}

fn assert_tcp_carries(stream: &mut TcpStream) {
    let mut said = [0; 5];
    stream.write_all(b"hello").unwrap();
    stream.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello");
}

#[test]
fn all_traffic_passes_two_relays_that_never_know_both_ends_and_resumes_when_the_first_is_back() {
    lab::ring!(Netns);
    let mut hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    hops.end.echo_tcp(80).unwrap();
    let mut edge = hops.edge(Family::V4);
    let socket = application(&hops.site, LISTEN);
    // The second size exceeds a datagram in packets of the smallest size.
    for len in [600, 1_200] {
        assert_carries(&hops.site, &socket, len);
    }
    let mut stream = hops.connect(TCP_LISTEN);
    assert_tcp_carries(&mut stream);
    let mut proxied = hops.connect(PROXY);
    proxied.write_all(b"CONNECT 10.0.4.2:80 HTTP/1.1\r\nHost: 10.0.4.2:80\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        proxied.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    assert_tcp_carries(&mut proxied);

    let [status, connections] = ["status", "connections"].map(|what| hops.pacectl(&[what]));
    assert!(status.contains("10.0.3.2:444 via first: connected"), "{status}");
    assert!(status.contains("10.0.1.2:443: connected"), "{status}");
    assert!(connections.contains("to 10.0.3.2:444 via first"), "{connections}");

    // The tunnel that carries all these is listed as the hop's, and has no class.
    let tunnel = hops.hop_tunnel();
    let [id, _, owner, class, protocol, target] = &tunnel[..6] else { panic!("{tunnel:?}") };
    assert_eq!([owner, class, protocol, target], ["[hop.first]", "-", "udp", "10.0.3.2:444"]);
    assert_eq!(tunnel.iter().filter(|word| *word == "KiB").count(), 2, "bytes both ways: {tunnel:?}");
    assert!(!hops.pacectl(&["tunnels", "--class", "default"]).contains("[hop.first]"));
    assert_eq!(hops.metric("paced_edge_hop_withheld_packets_total"), Some(0.0));

    // A forward that a reload adds uses the same hop, and existing tunnels continue.
    let counts = hops.site.counts().unwrap();
    assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 1), "one tunnel, to the second relay");
    let more = format!(
        "{}[[forward]]\nlisten = \"127.0.0.1:5003\"\nrelay = \"https://10.0.3.2:444/.well-known/masque/udp/{{target_host}}/{{target_port}}/\"\ntarget = \"10.0.4.2:7\"\nca = \"$FOLDER/second-authority.pem\"\ntoken_file = \"$FOLDER/second.token\"\nvia = \"first\"\nbackoff_longest_seconds = 1\n",
        hops.hop(Family::V4)
    );
    write(&hops.site, "edge.toml", &hops.configuration(&more));
    edge.signal(libc::SIGHUP).unwrap();
    let added = wait_for("the added address to work", SOON, || {
        let socket = application(&hops.site, "127.0.0.1:5003");
        echoes(&socket, b"new").then_some(socket)
    });
    assert_carries(&hops.site, &added.unwrap(), 600);
    assert_carries(&hops.site, &socket, 600);
    assert_tcp_carries(&mut stream);
    assert_eq!(hops.site.counts().unwrap().udp_tunnels(), 1, "local addresses share the hop's tunnel");

    hops.site.signal(libc::SIGKILL).unwrap();
    hops.site.relay.wait(SOON).unwrap();
    let first_said = hops.site.relay.output();
    let sections = sections(&hops.token_digest);
    hops.site.start_again(first_terms(&sections)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    wait_for("an echo through the restarted relay", SOON, || echoes(&socket, b"back").then_some(()))
        .unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
    assert_tcp_carries(&mut hops.connect(TCP_LISTEN));

    // When an operator closes the hop's tunnel, all traffic continues in another one.
    let before = hops.hop_tunnel();
    assert_ne!(before[0], *id, "the tunnel through the killed relay is gone");
    hops.pacectl(&["close", &before[0]]);
    wait_for("an echo through another tunnel", SOON, || {
        (echoes(&socket, b"again") && hops.hop_tunnel()[0] != before[0]).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));

    edge.signal(libc::SIGTERM).unwrap();
    edge.wait(SOON).unwrap();
    let first = wait_for("the record of the hop's tunnel", SOON, || {
        let said = hops.site.relay.output();
        said.contains("10.0.3.2:444").then_some(said)
    });
    let (first, second) = (first_said + &first.unwrap(), hops.second_relay.output());
    assert!(first.contains("10.0.1.1") && !first.contains("10.0.4.2"), "the first relay:\n{first}");
    assert!(second.contains("10.0.3.1") && second.contains("10.0.4.2"), "the second relay:\n{second}");
    assert!(!second.contains("10.0.1.1"), "the second relay:\n{second}");
}

#[test]
fn a_path_through_a_relay_and_one_past_it_share_tunnels_and_each_takes_over_those_of_the_other() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let site = &hops.site;
    let _echo = hops.end.echo(7).unwrap();
    let _past = Link::new(&site.chain.client, &hops.second, 5).unwrap();
    site.chain.client.ip("route add 10.0.3.2/32 via 10.0.5.2 dev second").unwrap();
    let class = "backoff_longest_seconds = 1\nclass = \"spread\"\n";
    let own = hops.configuration("").replace("via = \"first\"\n", "").replace("backoff_longest_seconds = 1\n", class);
    let two = "[[path]]\nname = \"past\"\ninterface = \"second\"\n[[path]]\nname = \"through\"\nvia = \"first\"\n";
    let file = write(site, "edge.toml", &format!("{own}{two}{}{ROUND_ROBIN}", hops.hop(Family::V4)));
    let mut edge =
        site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap();
    let stalls = CpuStalls::watch(&[site.relay.id(), hops.second_relay.id(), edge.id()]).unwrap();
    let are_up = || wait_for("both paths", SOON, || (states(site) == ["up", "up"]).then_some(()));
    edge.wait_for_line("forwarding", SOON).unwrap();
    wait_for("its control socket", SOON, || {
        (site.pacectl_at("edge.sock", &["status"]).unwrap().0 == Some(0)).then_some(())
    })
    .unwrap();
    are_up().unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
    let sockets: Vec<_> = (0..6).map(|_| application(site, LISTEN)).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 1_200));
    let found: Vec<_> = paths(site).into_iter().map(|(_, tunnels)| tunnels).collect();
    assert_unless_stalled(found == [3, 3], &("each in its turn", found), &stalls, &edge);
    let said = hops.pacectl(&["paths"]);
    assert!(said.lines().any(|line| line.starts_with("through ") && line.contains("via first")), "{said}");
    assert!(said.lines().any(|line| line.starts_with("past ") && !line.contains("via")), "{said}");
    assert_eq!(site.counts().unwrap().udp_tunnels(), 1, "the first relay has the tunnel to the second");

    assert_short_gap("the first relay of two in a row falls silent", PAYLOADS, &sockets, (&edge, &stalls), || {
        site.signal(libc::SIGSTOP).unwrap();
    });
    let found = paths(site);
    assert_unless_stalled(found[0] == ("up".into(), 6) && found[1].0 != "up", &found, &stalls, &edge);
    site.signal(libc::SIGCONT).unwrap();
    are_up().unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));

    assert_short_gap("a link past the first relay is cut in silence", PAYLOADS, &sockets, (&edge, &stalls), || {
        hops.second.ip("route add blackhole 10.0.5.1/32").unwrap();
    });
    let found = paths(site);
    assert_unless_stalled(found[0].0 != "up" && found[1] == ("up".into(), 6), &found, &stalls, &edge);
    sockets.iter().for_each(|socket| assert_carries(site, socket, 1_200));

    edge.signal(libc::SIGTERM).unwrap();
    edge.wait(SOON).unwrap();
    let is_recorded = || hops.second_relay.output().contains("\"client\":\"10.0.3.1:").then_some(());
    wait_for("records of tunnels through the first relay", SOON, is_recorded)
        .unwrap_or_else(|error| panic!("{error}: {}", hops.second_relay.output()));
    let first = site.relay.output();
    assert!(!first.contains("10.0.4.2"), "the first relay learns of no target:\n{first}");
}

#[test]
fn a_path_to_the_first_relay_that_is_too_narrow_for_a_handshake_in_datagrams_carries_it_in_capsules() {
    lab::ring!(Netns);
    let hops = Hops::new();
    hops.site.chain.access.set_mtu(1_280).unwrap();
    let _echo = hops.end.echo(7).unwrap();
    // Behind the headers of IPv6 and UDP, an outer packet has 1,232 bytes, too few to carry an inner packet of 1,200
    // bytes.
    for family in [Family::V6, Family::V4] {
        let edge = hops.edge(family);
        assert_carries(&hops.site, &application(&hops.site, LISTEN), 1_200);
        let is_narrow = edge.output().contains("too narrow for payloads of 1200 bytes");
        assert!(is_narrow, "{family:?}: {}", edge.output());
        // The inner connection probes whether larger packets pass.
        let withheld = || hops.metric("paced_edge_hop_withheld_packets_total").filter(|count| *count > 0.0);
        let count = wait_for("packets to be withheld from capsules", SOON, withheld).unwrap();
        println!("{family:?}: {count} packets were withheld");
    }
}

#[test]
fn a_path_to_the_first_relay_that_becomes_too_narrow_for_datagrams_carries_the_tunnels_behind_it_in_capsules() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    let _edge = hops.edge(Family::V4);
    let socket = application(&hops.site, LISTEN);
    assert_carries(&hops.site, &socket, 1_200);
    hops.site.chain.access.set_mtu(1_280).unwrap();
    // Of a size that needs no packet larger than the path carries, and of one that does.
    for len in [500, 1_200] {
        assert_carries(&hops.site, &socket, len);
    }
}

#[test]
fn an_untrusted_second_relay_and_a_refusing_first_relay_are_told_apart() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let configuration = hops.configuration(&hops.hop(Family::V4));
    let file = write(&hops.site, "edge.toml", &configuration.replace("second-authority", "authority"));
    let arguments = ["run".into(), "--config".into(), file];
    let mut edge = hops.site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    _ = echoes(&application(&hops.site, LISTEN), b"anybody?");
    edge.wait_for_line("the certificate of 10.0.3.2 is not trusted", SOON).unwrap();
    write(&hops.site, "edge.toml", &configuration.replace("https://10.0.3.2:444", "https://127.0.0.1:444"));
    edge.signal(libc::SIGHUP).unwrap();
    wait_for("a refusal", SOON, || {
        _ = echoes(&application(&hops.site, LISTEN), b"anybody?");
        edge.output().contains("failed to reach 127.0.0.1:444 through [hop.first]").then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}; the edge said:\n{}", edge.output()));
}

#[test]
fn ten_thousand_questions_through_two_relays_leave_nothing_behind() {
    lab::ring!(Netns);
    let hops = Hops::new();
    let _echo = hops.end.echo(7).unwrap();
    let edge = hops.edge(Family::V4);
    let daemons = [("edge", &edge), ("first relay", &hops.site.relay), ("second relay", &hops.second_relay)];
    assert_leaves_nothing(&daemons, |questions| {
        assert_eq!(ask(&hops.site, LISTEN, questions, 20), questions, "the edge said:\n{}", edge.output());
    });
    let counts = hops.site.counts().unwrap();
    assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 1));
}
