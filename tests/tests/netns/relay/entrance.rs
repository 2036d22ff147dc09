//! TCP connections that enter the edge role through a forward for TCP.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::PathBuf,
    thread::JoinHandle,
};

use lab::{
    application::{application, assert_carries},
    process::{Process, limit_descriptors, wait_for},
    site::{Counts, Family, SOON, Site, Terms},
};
use serde_json::Value;

/// The address of the edge's metrics, inside the client's namespace.
const METRICS: &str = "127.0.0.1:9434";

/// A local address whose TCP connections go to port 80 of the target.
const TCP: &str = "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\n$RELAY\n";

/// A daemon in the edge role, at the client.
pub struct Edge<'a> {
    pub site: &'a Site,
    pub process: Process,
}

impl<'a> Edge<'a> {
    /// Starts a daemon with these sections; `$RELAY` stands for the keys about the relay, and `$FOLDER` for the folder.
    pub fn start(site: &'a Site, sections: &str) -> Self {
        let folder = site.path("").display().to_string().trim_end_matches('/').to_owned();
        let relay = format!("relay = \"{}\"\nca = \"$FOLDER/authority.pem\"", site.template(Family::V4));
        let sections = sections.replace("$RELAY", &relay);
        let text = format!(
            "state_dir = \"$FOLDER/edge\"\n[metrics]\nlisten = \"{METRICS}\"\n[control]\nsocket = \"$FOLDER/edge.sock\"\n\
             [log]\nlevel = \"debug\"\n{sections}"
        );
        let file = site.write("edge.toml", &text.replace("$FOLDER", &folder)).unwrap();
        let arguments: [PathBuf; 3] = ["run".into(), "--config".into(), file];
        let process = site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
        let edge = Self { site, process };
        wait_for("metrics of the edge", SOON, || edge.counts()).unwrap();
        // The metrics are served before the local addresses are.
        let is_serving = |line: &&str| line.contains("forwarding") || line.contains("serving as a proxy");
        let serving = || edge.process.output().lines().filter(is_serving).count();
        wait_for("local addresses", SOON, || (serving() == sections.matches("[[").count()).then_some(())).unwrap();
        edge
    }

    pub fn counts(&self) -> Option<Counts> {
        Counts::read(&self.site.chain.client, METRICS).ok()
    }

    pub fn wait_for_counts(&self, what: &str, done: impl Fn(&Counts) -> bool) {
        let found = wait_for(what, SOON, || self.counts().filter(&done));
        assert!(found.is_ok(), "{what}: {:#?}", self.counts());
    }

    /// The page for load balancers.
    pub fn ready(&self) -> String {
        let mut stream = self.connect(METRICS);
        stream.write_all(b"GET /readyz HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// The text that a successful `pacectl` command prints, as lines with single spaces.
    pub fn lines(&self, arguments: &[&str]) -> Vec<String> {
        let (code, said) = self.site.pacectl_at("edge.sock", arguments).unwrap();
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        said.lines().map(words).collect()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        self.site.json_at("edge.sock", arguments).unwrap()
    }

    pub fn connect(&self, to: &str) -> TcpStream {
        let stream = self.site.chain.client.run(|| TcpStream::connect(to).unwrap()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    }
}

/// A target that reads each of `times` connections, one after another, to the end, and answers with the same bytes and
/// a word.
fn target(site: &Site, port: u16, times: usize) -> JoinHandle<()> {
    let listener = site.chain.target.run(|| TcpListener::bind(("::", port)).unwrap()).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(times) {
            let mut stream = stream.unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(&all).unwrap();
            stream.write_all(b" heard").unwrap();
        }
    })
}

fn says(stream: &mut TcpStream, words: &str) -> String {
    say(stream, words);
    hear(stream)
}

fn say(stream: &mut TcpStream, words: &str) {
    stream.write_all(words.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
}

fn hear(stream: &mut TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The name of a sample about a TCP forward's local address.
pub fn sample(name: &str, port: u16) -> String {
    format!("edge_{name}{{listen=\"127.0.0.1:{port}\",protocol=\"tcp\"}}")
}

#[test]
fn connections_to_a_local_address_reach_the_target_and_each_way_ends_by_itself() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = target(&site, 80, 3);
    let edge = Edge::start(&site, TCP);
    for words in ["one", "two", "three"] {
        assert_eq!(says(&mut edge.connect("127.0.0.1:5001"), words), format!("{words} heard"));
    }
    server.join().unwrap();
    edge.wait_for_counts("the bytes up and down", |counts| {
        let of = |name| counts.of(&sample(name, 5001));
        (of("tunnels_opened_total"), of("bytes_up_total"), of("bytes_down_total")) == (3, 11, 29)
    });
    let counts = site.wait_for_counts("all tunnels to be closed", |counts| counts.closed("finished") == 3).unwrap();
    assert_eq!(counts.of("connections"), 1, "they share a connection to the relay");
}

#[test]
fn a_connection_that_the_relay_refuses_is_reset_and_the_reason_is_logged_and_counted() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let edge = Edge::start(&site, TCP);
    for _ in 0..2 {
        let error = edge.connect("127.0.0.1:5001").read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    edge.process.wait_for_line("the target refused the connection", SOON).unwrap();
    let reason = "edge_refusals_total{listen=\"127.0.0.1:5001\",protocol=\"tcp\",reason=\"connection_refused\"}";
    edge.wait_for_counts("the refusals' reason", |counts| counts.of(reason) == 2);
    let output = edge.process.output();
    let told: Vec<_> = output.lines().filter(|line| line.contains("INFO") && line.contains("refused")).collect();
    assert_eq!(told.len(), 1, "the same reason is logged once");
    assert!(told[0].contains("127.0.0.1:5001"), "{told:?}");
}

#[test]
fn an_address_without_descriptors_serves_again_when_there_are_some() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = target(&site, 80, 2);
    let edge = Edge::start(&site, TCP);
    assert_eq!(says(&mut edge.connect("127.0.0.1:5001"), "first"), "first heard");
    let few = limit_descriptors(edge.process.id(), 3).unwrap();
    let mut stream = edge.connect("127.0.0.1:5001");
    edge.process.wait_for_line("cannot accept connections for now", SOON).unwrap();
    limit_descriptors(edge.process.id(), few).unwrap();
    assert_eq!(says(&mut stream, "second"), "second heard");
    server.join().unwrap();
}

#[test]
fn clients_of_an_address_leave_some_descriptors_free_and_wait_for_others() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = target(&site, 80, 3);
    let edge = Edge::start(&site, TCP);
    assert_eq!(says(&mut edge.connect("127.0.0.1:5001"), "first"), "first heard");
    let open = std::fs::read_dir(format!("/proc/{}/fd", edge.process.id())).unwrap().count();
    // A quarter of them is not for clients.
    let before = limit_descriptors(edge.process.id(), open as u64 + 4).unwrap();
    // The edge already waits for one of them.
    let mut waiting = ["second", "third"].map(|words| (words, edge.connect("127.0.0.1:5001")));
    edge.process.wait_for_line("cannot accept connections for now", SOON).unwrap();
    limit_descriptors(edge.process.id(), before).unwrap();
    // The target serves one after the other, in any order.
    for (words, stream) in &mut waiting {
        say(stream, words);
    }
    for (words, stream) in &mut waiting {
        assert_eq!(hear(stream), format!("{words} heard"));
    }
    server.join().unwrap();
}

#[test]
fn connections_beyond_the_bound_wait_for_their_turn() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let server = target(&site, 80, 2);
    let edge = Edge::start(
        &site,
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\nmax_connections = 1\n$RELAY\n",
    );
    let (mut first, mut second) = (edge.connect("127.0.0.1:5001"), edge.connect("127.0.0.1:5001"));
    edge.wait_for_counts("the first tunnel to open", |counts| counts.of(&sample("tunnels_opened_total", 5001)) == 1);
    let hit = "edge_limit_hits_total{listen=\"127.0.0.1:5001\",protocol=\"tcp\",limit=\"max_connections\"}";
    edge.wait_for_counts("the second connection to wait", |counts| counts.of(hit) == 1);
    assert_eq!(says(&mut first, "first"), "first heard");
    drop(first);
    assert_eq!(says(&mut second, "second"), "second heard");
    server.join().unwrap();
}

#[test]
fn tunnels_of_every_entrance_are_listed_everywhere_and_can_be_closed() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let listener = site.chain.target.run(|| TcpListener::bind(("::", 80)).unwrap()).unwrap();
    let edge = Edge::start(
        &site,
        "[[forward]]\nlisten = \"127.0.0.1:5001\"\ntarget = \"10.0.2.2:7\"\n$RELAY\n\
         [[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\ntarget = \"10.0.2.2:80\"\n$RELAY\n\
         [[proxy]]\nlisten = \"127.0.0.1:1080\"\n$RELAY\n",
    );
    assert_carries(&site, &application(&site, "127.0.0.1:5001"), 100);
    let mut stream = edge.connect("127.0.0.1:5002");
    stream.write_all(b"eight by").unwrap();
    let (mut target, _) = listener.accept().unwrap();
    target.read_exact(&mut [0; 8]).unwrap();

    let tunnels = edge.json(&["tunnels"]);
    let of = |index: usize, key: &str| tunnels[index][key].as_str().unwrap_or_default().to_owned();
    assert_eq!(tunnels.as_array().unwrap().len(), 2, "{tunnels}");
    assert_eq!([of(0, "protocol"), of(0, "target"), of(0, "listen")], ["udp", "10.0.2.2:7", "127.0.0.1:5001"]);
    assert_eq!([of(1, "protocol"), of(1, "target"), of(1, "role")], ["tcp", "10.0.2.2:80", "edge"]);
    assert_eq!(of(1, "sender"), stream.local_addr().unwrap().to_string());
    let moved =
        |index: usize| [&tunnels[index]["up_bytes"], &tunnels[index]["down_bytes"]].map(|of| of.as_u64().unwrap());
    assert!(moved(0).iter().all(|bytes| *bytes >= 5_000), "{tunnels}");
    assert_eq!(moved(1), [8, 0]);

    let connections = edge.json(&["connections"]);
    let connection = &connections[0];
    assert_eq!((connection["relay"].as_str(), connection["tunnels"].as_u64()), (Some("10.0.1.2:443"), Some(2)));
    assert_eq!((&tunnels[0]["connection"], connections.as_array().unwrap().len()), (&connection["id"], 1));
    let status = edge.json(&["status"]);
    assert_eq!((status["connections"].as_u64(), status["tunnels"].as_u64()), (Some(1), Some(2)), "{status}");
    let uplink = &status["uplinks"][0];
    assert_eq!((&uplink["connections"][0], uplink["connects"].as_u64()), (&connection["id"], Some(1)));
    let entrances: Vec<_> = status["entrances"].as_array().unwrap().iter().map(|of| of["tunnels"].as_u64()).collect();
    assert_eq!(entrances, [Some(1), Some(1), Some(0)]);
    let classes = edge.json(&["classes"]);
    assert_eq!(
        (classes["tunnels"].as_u64(), classes["classes"][0]["tunnels"].as_u64()),
        (Some(2), Some(2)),
        "{classes}"
    );
    let sent = classes["classes"][0]["sent_bytes"].as_u64().unwrap();
    assert!(sent >= moved(0)[0], "{classes}");

    // The text output shows the same, but a local address counts TCP bytes only once a second.
    let shown = |command: &str, parts: &[&str]| {
        let is_shown = |line: &String| parts.iter().all(|part| line.contains(part));
        let found = || edge.lines(&[command]).iter().any(is_shown).then_some(());
        wait_for(&format!("{parts:?} in the output of {command}"), SOON, found).unwrap();
    };
    let (udp_sender, tcp_sender) = (of(0, "sender"), of(1, "sender"));
    assert!(udp_sender.starts_with("127.0.0.1:"), "{tunnels}");
    shown("status", &["relay 10.0.1.2:443: connected; connected once, failed 0 times"]);
    shown("status", &["127.0.0.1:5001 udp 1 1 0 ", " KiB "]);
    shown("status", &["127.0.0.1:5002 tcp 1 1 0 8 B 0 B"]);
    shown("tunnels", &[&udp_sender, "udp 10.0.2.2:7", " KiB"]);
    shown("tunnels", &[&tcp_sender, "tcp 10.0.2.2:80", "8 B 0 B"]);
    shown("connections", &["to 10.0.1.2:443", " ms "]);
    shown("classes", &["default edge 2 ", " KiB "]);

    let up = "edge_uplink_connections{relay=\"10.0.1.2:443\"}";
    edge.wait_for_counts("gauges and bytes of open tunnels", |counts| {
        let udp = |name| counts.of(&format!("edge_{name}{{listen=\"127.0.0.1:5001\",protocol=\"udp\"}}"));
        let tcp = |name| counts.of(&sample(name, 5002));
        (udp("tunnels"), tcp("tunnels"), tcp("bytes_up_total"), counts.of(up)) == (1, 1, 8, 1)
            && udp("bytes_up_total") == i64::try_from(moved(0)[0]).unwrap()
    });

    assert_eq!(edge.ready(), "ready\n");
    let (udp, tcp) = (tunnels[0]["id"].to_string(), tunnels[1]["id"].to_string());
    let (code, _) = edge.site.pacectl_at("edge.sock", &["class", &tcp, "default"]).unwrap();
    assert_eq!(code, Some(3), "the tunnel keeps the forward's class");
    edge.json(&["close", &tcp]);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    edge.json(&["close", &udp]);
    edge.wait_for_counts("all tunnels to end", |counts| counts.sum("edge_tunnels{") == 0);
    site.signal(libc::SIGTERM).unwrap();
    edge.wait_for_counts("the relay's connection to end", |counts| counts.of(up) == 0);
    // The edge tries to connect, which fails only after a while.
    let is_said = || (edge.ready() == "no connection to 10.0.1.2:443\n").then_some(());
    wait_for("the edge to report that it is not ready", SOON, is_said).unwrap();
}
