//! Clients of the edge's local proxy: an unmodified curl, and SOCKS byte by byte.

use std::{
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
};

use edge::proxy::socks::{datagram, datagram_header};
use lab::{
    name_server::NameServer,
    netns::Chain,
    process::wait_for,
    site::{SOON, Site, Terms},
};
use masque::target::Target;

use super::entrance::Edge;

const PROXY: &str = "127.0.0.1:1080";

/// A site where only the relay can resolve web.example, which is the target.
fn site() -> (Site, NameServer) {
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let names = NameServer::start(&chain.target, &[("web.example", IpAddr::from(chain.egress.far.v4))]).unwrap();
    (Site::on(chain, Terms::default()).unwrap(), names)
}

fn edge<'a>(site: &'a Site, keys: &str) -> Edge<'a> {
    Edge::start(site, &format!("[[proxy]]\nlisten = \"{PROXY}\"\n$RELAY\n{keys}\n"))
}

/// A web server at the target that answers each request with its first line, its Host and its content.
fn web_server(site: &Site) {
    let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
}

fn answer(mut stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let (mut first, mut host, mut len) = (String::new(), String::new(), 0);
    reader.read_line(&mut first).ok()?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(": ") {
            None => break,
            Some((name, value)) if name.eq_ignore_ascii_case("host") => host = value.to_owned(),
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => len = value.parse().ok()?,
            Some(_) => {}
        }
    }
    let mut content = vec![0; len];
    reader.read_exact(&mut content).ok()?;
    let body = format!("{} at {host}: {}", first.trim_end(), String::from_utf8_lossy(&content));
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).ok()
}

/// Runs curl at the client; returns its exit code, its output and its error output.
fn curl(site: &Site, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = site.chain.client.command("curl").unwrap();
    let output = command.args(["--silent", "--show-error", "--max-time", "20"]).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn curl_reaches_a_name_that_only_the_relay_knows_in_every_way_that_it_can_use_a_proxy() {
    lab::ring!(Netns);
    let (site, _names) = site();
    web_server(&site);
    let _edge = edge(&site, "");
    let (socks, http) = (format!("socks5h://{PROXY}"), format!("http://{PROXY}"));
    let expected =
        |line: &str, content: &str| (Some(0), format!("{line} HTTP/1.1 at web.example: {content}"), String::new());
    for options in [&["--proxy", &socks][..], &["--proxy", &http], &["--proxy", &http, "--proxytunnel"]] {
        let get = curl(&site, &[options, &["http://web.example/a?b"]].concat());
        assert_eq!(get, expected("GET /a?b", ""), "{options:?}");
        let long = "x".repeat(200_000);
        let file = site.write("content", &long).unwrap();
        let content = format!("@{}", file.display());
        let post = curl(&site, &[options, &["--data-binary", &content, "http://web.example/c"]].concat());
        assert_eq!(post, expected("POST /c", &long), "{options:?}");
    }
    // Each of the two requests goes to its own server over its own connection.
    let (code, two, _) = curl(&site, &["--proxy", &http, "http://web.example/1", "http://10.0.2.2/2"]);
    assert_eq!((code, two.as_str()), (Some(0), "GET /1 HTTP/1.1 at web.example: GET /2 HTTP/1.1 at 10.0.2.2: "));
}

/// A web server at the target that keeps its connections open, although the requests ask it to close them.
fn stubborn_web_server(site: &Site) {
    let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                while stream.read(&mut [0; 4_096]).is_ok_and(|len| len > 0) {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                }
            });
        }
    });
}

#[test]
fn a_second_request_for_a_uri_is_not_left_without_an_answer() {
    lab::ring!(Netns);
    let (site, _names) = site();
    stubborn_web_server(&site);
    let edge = edge(&site, "");
    let mut client = edge.connect(PROXY);
    client.write_all(b"POST http://web.example/1 HTTP/1.1\r\nContent-Length: 1\r\n\r\nx").unwrap();
    let mut answer = [0; 40];
    client.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(b"\r\n\r\nok"));
    client.write_all(b"\r\nGET http://web.example/2 HTTP/1.1\r\n\r\n").unwrap();
    let ended = |client: &mut TcpStream| client.read(&mut [0]).unwrap_err().kind();
    assert_eq!(ended(&mut client), ErrorKind::ConnectionReset);
    let mut hasty = edge.connect(PROXY);
    hasty.write_all(&b"GET http://web.example/ HTTP/1.1\r\n\r\n".repeat(2)).unwrap();
    assert_eq!(ended(&mut hasty), ErrorKind::ConnectionReset);
}

#[test]
fn a_client_is_told_in_its_own_protocol_why_a_target_is_not_reached() {
    lab::ring!(Netns);
    let (site, _names) = site();
    let edge = edge(&site, "");
    let (socks, http) = (format!("socks5h://{PROXY}"), format!("http://{PROXY}"));
    for (url, status, error, word) in [
        ("http://web.example:81/", "502", "connection_refused", "(5)"),
        ("http://nowhere.example/", "502", "dns_error", "(4)"),
        ("http://127.0.0.1/", "403", "destination_ip_prohibited", "(2)"),
    ] {
        let (_, plain, _) = curl(&site, &["--proxy", &http, "--include", url]);
        assert!(plain.starts_with(&format!("HTTP/1.1 {status} ")), "{url}: {plain}");
        assert!(plain.contains(&format!("Proxy-Status: paced;error={error}")), "{url}: {plain}");
        let (_, tunnelled, _) = curl(&site, &["--proxy", &http, "-p", "--write-out", "%{http_connect}", url]);
        assert_eq!(tunnelled, status, "{url}");
        let (code, _, complaint) = curl(&site, &["--proxy", &socks, url]);
        assert!(code == Some(97) && complaint.contains(word), "{url}: {complaint}");
    }
    let (_, hint, _) = curl(&site, &[&format!("{http}/")]);
    assert!(hint.contains("this is a proxy"), "{hint}");
    let refused = "edge_refusals_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",reason=\"connection_refused\"}";
    edge.wait_for_counts("the refusals to be counted by reason", |counts| counts.of(refused) == 3);
    let wrong = "edge_refusals_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",reason=\"malformed\"}";
    edge.wait_for_counts("the request to the proxy itself to be counted", |counts| counts.of(wrong) == 1);
    let log = edge.process.output();
    let named: Vec<_> = log.lines().filter(|line| line.contains("nowhere.example")).collect();
    assert!(!named.is_empty() && named.iter().all(|line| line.contains("DEBUG")), "{named:?}");
}

#[test]
fn a_proxy_with_users_serves_only_them() {
    lab::ring!(Netns);
    let (site, _names) = site();
    web_server(&site);
    let users = site.write("proxy.users", "alice:open sesame\n").unwrap();
    let edge = edge(&site, &format!("users_file = \"{}\"", users.display()));
    let (socks, http) = (format!("socks5h://{PROXY}"), format!("http://{PROXY}"));
    for proxy in [&socks, &http] {
        let of = |user: &[&str]| curl(&site, &[&["--proxy", proxy][..], user, &["http://web.example/"]].concat());
        assert_eq!(of(&["--proxy-user", "alice:open sesame"]).1, "GET / HTTP/1.1 at web.example: ");
        for user in [&[][..], &["--proxy-user", "alice:sesame"], &["--proxy-user", "bob:open sesame"]] {
            assert!(!of(user).1.contains("GET /"), "{proxy} {user:?}");
        }
    }
    let (_, head, _) = curl(&site, &["--proxy", &http, "--include", "http://web.example/"]);
    assert!(head.starts_with("HTTP/1.1 407 ") && head.contains("Proxy-Authenticate: Basic"), "{head}");
    let denied = "edge_refusals_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",reason=\"unauthenticated\"}";
    edge.wait_for_counts("the unauthenticated clients to be counted", |counts| counts.of(denied) == 7);
}

#[test]
fn one_client_has_no_more_connections_than_its_share_and_other_protocols_are_not_served() {
    lab::ring!(Netns);
    let (site, _names) = site();
    let edge = edge(&site, "max_connections_per_client = 1\nprotocols = [\"socks5\"]");
    let mut first = edge.connect(PROXY);
    first.write_all(&[5, 1, 0]).unwrap();
    first.read_exact(&mut [0; 2]).unwrap();
    assert!(edge.connect(PROXY).read(&mut [0]).is_err(), "the second connection is reset");
    let limit =
        "edge_limit_hits_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",limit=\"max_connections_per_client\"}";
    edge.wait_for_counts("the limit to be counted", |counts| counts.of(limit) == 1);
    drop(first);
    let gone = "edge_refusals_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",reason=\"client_gone\"}";
    edge.wait_for_counts("the first connection to end", |counts| counts.of(gone) == 1);
    let mut http = edge.connect(PROXY);
    http.write_all(b"GET http://web.example/ HTTP/1.1\r\n\r\n").unwrap();
    assert!(http.read(&mut [0]).is_err(), "HTTP is switched off");
}

/// A client's association with the proxy.
struct Association {
    control: TcpStream,
    socket: UdpSocket,
    at: SocketAddr,
}

impl Association {
    fn new(edge: &Edge<'_>) -> Self {
        let mut control = edge.connect(PROXY);
        control.write_all(&[5, 1, 0]).unwrap();
        control.read_exact(&mut [0; 2]).unwrap();
        control.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
        let mut reply = [0; 10];
        control.read_exact(&mut reply).unwrap();
        let [5, 0, 0, 1, a, b, c, d, port @ ..] = reply else { panic!("{reply:?}") };
        let at = ([a, b, c, d], u16::from_be_bytes(port)).into();
        let socket = edge.site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        Self { control, socket, at }
    }

    fn send(&self, target: &str, payload: &[u8]) {
        let header = datagram_header(&Target::from_authority(target).unwrap());
        self.socket.send_to(&[&header[..], payload].concat(), self.at).unwrap();
    }

    fn receive(&self) -> (String, Vec<u8>) {
        let mut buffer = [0; 2048];
        let len = self.socket.recv(&mut buffer).unwrap();
        let (target, payload) = datagram(&buffer[..len]).unwrap();
        (target.to_string(), payload.to_vec())
    }
}

#[test]
fn payloads_of_socks_clients_reach_each_target_that_they_name_and_come_back_under_its_name() {
    lab::ring!(Netns);
    let (site, _names) = site();
    let _echo = site.chain.target.echo(7).unwrap();
    for mode in ["datagram", "stream"] {
        let edge = edge(&site, &format!("mode = \"{mode}\""));
        let association = Association::new(&edge);
        for target in ["web.example:7", "10.0.2.2:7", "[fd00:2::2]:7"] {
            for size in [0, 1, 1_100] {
                association.send(target, &vec![7; size]);
                assert_eq!(association.receive(), (target.to_owned(), vec![7; size]), "{mode}");
            }
        }
        site.wait_for_counts("a tunnel for each target", |counts| counts.udp_tunnels() == 3).unwrap();
        // A fragment, a datagram without a header, and a stranger's datagram.
        association.socket.send_to(&[0, 0, 1, 1, 10, 0, 2, 2, 0, 7, 1], association.at).unwrap();
        association.socket.send_to(&[0], association.at).unwrap();
        let stranger = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        stranger.send_to(&datagram_header(&Target::from_authority("10.0.2.2:7").unwrap()), association.at).unwrap();
        edge.wait_for_counts("the ignored datagrams to be counted", |counts| {
            let of = |reason| {
                let sample = format!("listen=\"{PROXY}\",protocol=\"proxy\",reason=\"{reason}\"");
                counts.of(&format!("edge_ignored_total{{{sample}}}"))
            };
            (of("fragment"), of("malformed"), of("sender")) == (1, 1, 1)
        });
        drop(association.control);
        site.wait_for_counts("the tunnels to end with the association", |counts| counts.udp_tunnels() == 0).unwrap();
    }
}

#[test]
fn beyond_the_bound_a_clients_least_recent_target_makes_room() {
    lab::ring!(Netns);
    let (site, _names) = site();
    let _echoes = [7, 8, 9].map(|port| site.chain.target.echo(port).unwrap());
    let edge = edge(&site, "max_udp_tunnels = 2");
    let association = Association::new(&edge);
    for target in ["10.0.2.2:7", "10.0.2.2:8", "10.0.2.2:7", "10.0.2.2:9", "10.0.2.2:7"] {
        association.send(target, b"payload");
        assert_eq!(association.receive().0, target);
    }
    site.wait_for_counts("two tunnels to remain", |counts| counts.udp_tunnels() == 2).unwrap();
    let counts = edge.counts().unwrap();
    let evicted = counts.of("edge_sources_evicted_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\"}");
    assert_eq!(evicted, 1, "the tunnel that was silent for longest");
    // Another client gets its share: the tunnel of the one with the most that was silent for longest.
    let other = Association::new(&edge);
    other.send("10.0.2.2:8", b"payload");
    assert_eq!(other.receive().0, "10.0.2.2:8");
    for target in ["10.0.2.2:9", "10.0.2.2:7"] {
        association.send(target, b"payload");
        assert_eq!(association.receive().0, target);
    }
    other.send("10.0.2.2:8", b"payload");
    assert_eq!(other.receive().0, "10.0.2.2:8");
    let limit = "edge_limit_hits_total{listen=\"127.0.0.1:1080\",protocol=\"proxy\",limit=\"max_udp_tunnels\"}";
    wait_for("all limits to be counted", SOON, || edge.counts().filter(|counts| counts.of(limit) == 4)).unwrap();
}
