//! Applications that know nothing of relays, behind `pacectl forward` and the daemon's edge role.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use tests::process::{Process, wait_for};
use tests::site::{Family, SOON, Site, Terms};

const LISTEN: &str = "127.0.0.1:5000";

/// Starts `pacectl forward` at the client and waits until it listens.
fn forward(site: &Site, family: Family, target: &str, options: &[&str]) -> Process {
    let (template, authority) = (site.template(family), site.path("authority.pem").display().to_string());
    let arguments = [&["forward", LISTEN, target, "--relay", &template, "--ca", &authority], options].concat();
    let forward = site.chain.client.start(tests::program("pacectl").unwrap(), arguments).unwrap();
    forward.wait_for_line("forwarding", SOON).unwrap();
    forward
}

/// An application's socket, inside the client's namespace.
pub fn application(site: &Site, to: &str) -> UdpSocket {
    let socket = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

fn echoes(socket: &UdpSocket, payload: &[u8]) -> bool {
    let mut received = vec![0; 2048];
    socket.send(payload).is_ok() && socket.recv(&mut received).is_ok_and(|len| &received[..len] == payload)
}

/// Waits until a payload comes back, and then wants as much of all that follow.
pub fn assert_carries(socket: &UdpSocket, len: usize) {
    wait_for("the first echo", SOON, || echoes(socket, &vec![0; len]).then_some(())).unwrap();
    // What was repeated above may still come.
    while socket.recv(&mut [0; 2048]).is_ok() {}
    socket.set_read_timeout(Some(SOON)).unwrap();
    for seed in 1..50 {
        assert!(echoes(socket, &vec![seed; len]), "payload {seed} of {len} bytes");
    }
}

#[test]
fn an_applications_datagrams_pass_in_every_mode() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    for family in [Family::V4, Family::V6] {
        for mode in ["auto", "datagram", "stream"] {
            let _forward = forward(&site, family, &site.target(family, 7).to_string(), &["--mode", mode]);
            assert_carries(&application(&site, LISTEN), 1200);
        }
    }
}

#[test]
fn payloads_of_1200_bytes_cross_a_path_of_1280() {
    tests::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.access.set_mtu(1280).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    for family in [Family::V4, Family::V6] {
        let _forward = forward(&site, family, &site.target(Family::V4, 7).to_string(), &[]);
        assert_carries(&application(&site, LISTEN), 1200);
    }
}

#[test]
fn a_tcp_application_passes() {
    tests::ring!(Netns);
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
    tests::ring!(Netns);
    let site = Site::new(Terms { limits: "connection_idle_seconds = 1", ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let relay = site.template(Family::V4);
    let edge = format!(
        r#"
        state_dir = "$FOLDER"
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
    let _edge = site.chain.client.start(tests::program("paced").unwrap(), arguments).unwrap();
    let senders: Vec<_> = (0..10).map(|at| application(&site, ["127.0.0.1:5001", "127.0.0.1:5002"][at % 2])).collect();
    senders.iter().for_each(|sender| assert_carries(sender, 1200));
    let counts = site.counts().unwrap();
    assert_eq!((counts.of("connections"), counts.udp_tunnels()), (1, 10));

    site.chain.access.near.set_up(false).unwrap();
    site.wait_for_counts("the connection is lost", |counts| counts.of("connections") == 0).unwrap();
    site.chain.access.near.set_up(true).unwrap();
    for sender in &senders {
        sender.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        wait_for("an echo over a new connection", SOON, || echoes(sender, b"back again").then_some(())).unwrap();
    }
}
