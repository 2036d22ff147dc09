//! Packets carry their class to the kernel programs: what the relay and the edge send, as the other end receives it.

use std::{io::Read as _, net::UdpSocket};

use lab::{
    client::Client,
    process::wait_for,
    site::{Counts, Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::task::spawn_blocking;

use super::attach::{receive_traffic_class, want_traffic_class};

/// Two classes, distinguished by the target's port.
const POLICY: &str = r#"
    [kernel]
    devices = ["client", "target"]
    [class.voice]
    dscp = 46
    [class.bulk]
    dscp = 10
    [[rule]]
    class = "voice"
    ports = [7]
    [[rule]]
    class = "bulk"
"#;

const VOICE: u16 = 7;
const BULK: u16 = 9;

/// A payload of a size that only the tunnel's own packets carry: other packets of this size are probes of the path's
/// MTU.
const PAYLOAD: [u8; 1_100] = [1; 1_100];

fn site() -> Site {
    let site = Site::new(Terms { sections: POLICY, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    site
}

/// The number of packets that left with the mark of this class.
fn marked(counts: &Counts, class: &str, direction: &str) -> i64 {
    counts.of(&format!("kernel_packets_total{{class=\"{class}\",direction=\"{direction}\"}}"))
}

/// Captures the relay's UDP packets that reach the client over IPv4.
struct Arrivals(Socket);

impl Arrivals {
    fn new(site: &Site) -> Self {
        let raw = || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).unwrap();
        let socket = site.chain.client.run(raw).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self(socket)
    }

    /// Takes the captured packets: DSCP and ECN of each, and whether it carries [`PAYLOAD`].
    fn take(&mut self) -> Vec<(u8, u8, bool)> {
        let (mut packets, mut packet) = (Vec::new(), vec![0; 65_536]);
        while let Ok(bytes) = self.0.read(&mut packet) {
            let port = u16::from_be_bytes([packet[20], packet[21]]);
            if port == 443 {
                packets.push((packet[1] >> 2, packet[1] & 3, bytes > PAYLOAD.len()));
            }
        }
        packets
    }
}

#[test]
fn a_tunnels_packets_reach_its_target_with_the_mark_of_its_class() {
    lab::ring!(Netns);
    let site = site();
    for (family, any) in [(Family::V4, "0.0.0.0"), (Family::V6, "[::]")] {
        for (port, class, dscp) in [(VOICE, "voice", 46), (BULK, "bulk", 10)] {
            let target = site.chain.target.run(|| UdpSocket::bind(format!("{any}:{port}")).unwrap()).unwrap();
            target.set_read_timeout(Some(SOON)).unwrap();
            want_traffic_class(&target);
            let before = marked(&site.counts().unwrap(), class, "up");
            site.client(async || {
                let client = Client::connect(site.access(family).unwrap()).await.unwrap();
                let mut tunnel = client.open(site.target(family, port)).await.unwrap();
                for _ in 0..5 {
                    tunnel.send(None, b"marked").await.unwrap();
                    let target = target.try_clone().unwrap();
                    let arrived = spawn_blocking(move || receive_traffic_class(&target)).await.unwrap();
                    assert_eq!(arrived, (b"marked".to_vec(), dscp << 2), "{family:?} {class}, still without ECN");
                }
            })
            .unwrap();
            assert_eq!(marked(&site.counts().unwrap(), class, "up") - before, 5, "{family:?} {class}");
        }
    }
    assert_eq!(site.counts().unwrap().of("kernel_unmarked_sockets_total"), 0);
}

#[test]
fn quic_packets_have_the_class_of_what_they_carry_in_both_forms_and_families() {
    lab::ring!(Netns);
    let site = site();
    let _echoes = [VOICE, BULK].map(|port| site.chain.target.echo(port).unwrap());
    for family in [Family::V4, Family::V6] {
        let mut arrivals = Arrivals::new(&site);
        site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut voice = client.open(site.target(family, VOICE)).await.unwrap();
            let mut bulk = client.open(site.target(family, BULK)).await.unwrap();
            for form in [Form::Datagram, Form::Capsule] {
                for (tunnel, class, other, dscp) in
                    [(&mut voice, "voice", "bulk", 46), (&mut bulk, "bulk", "voice", 10)]
                {
                    arrivals.take();
                    let before = site.counts().unwrap();
                    for _ in 0..20 {
                        assert_eq!(tunnel.echo(form, &PAYLOAD).await, PAYLOAD);
                    }
                    let after = site.counts().unwrap();
                    let [own, others] =
                        [class, other].map(|of| marked(&after, of, "down") - marked(&before, of, "down"));
                    assert!(own >= 20, "{family:?} {form:?}: {own} packets of {class}");
                    assert!(others <= 2, "{family:?} {form:?}: {others} packets of {other}, more than retransmissions");
                    if family == Family::V4 {
                        let packets = arrivals.take();
                        let full = packets.iter().filter(|(of, _, is_full)| *is_full && *of == dscp).count();
                        assert!(full >= 20, "{form:?}: {full} full packets of {class}: {packets:?}");
                        let foreign = packets.iter().filter(|(of, _, _)| ![0, dscp].contains(of)).count();
                        assert!(foreign <= 2, "{form:?}: {packets:?}");
                        assert!(packets.iter().any(|(_, ecn, _)| *ecn != 0), "QUIC's ECN is preserved: {packets:?}");
                    }
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn a_class_keeps_its_mark_when_a_reloaded_policy_counts_others_before_it() {
    lab::ring!(Netns);
    let site = site();
    let _echo = site.chain.target.echo(VOICE).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut voice = client.open(site.target(Family::V4, VOICE)).await.unwrap();
        let sections = POLICY.replace("[class.voice]", "[class.another]\n[class.voice]").replace("46", "34");
        site.configure(Terms { sections: &sections, ..Terms::default() }).unwrap();
        site.signal(libc::SIGHUP).unwrap();
        site.relay.wait_for_line("configuration reloaded", SOON).unwrap();
        let mut arrivals = Arrivals::new(&site);
        assert_eq!(voice.echo(Form::Datagram, &PAYLOAD).await, PAYLOAD);
        assert!(
            arrivals.take().iter().any(|(dscp, _, is_full)| *is_full && *dscp == 34),
            "the class has its new terms"
        );
    })
    .unwrap();
}

#[test]
fn an_edge_marks_what_it_sends_to_its_relay() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let _echo = site.chain.target.echo(VOICE).unwrap();
    let metrics = "127.0.0.1:9434";
    let text = format!(
        r#"
        state_dir = "$FOLDER/edge"
        [metrics]
        listen = "{metrics}"
        [[forward]]
        listen = "127.0.0.1:5000"
        relay = "{}"
        target = "{}"
        ca = "$FOLDER/authority.pem"
        class = "voice"
        {}
        "#,
        site.template(Family::V4),
        site.target(Family::V4, VOICE),
        POLICY.replace(r#""client", "target""#, r#""relay""#).split("[[rule]]").next().unwrap(),
    );
    let folder = site.path("").display().to_string();
    let file = site.write("edge.toml", &text.replace("$FOLDER", folder.trim_end_matches('/'))).unwrap();
    let arguments = ["run".into(), "--config".into(), file];
    let _edge = site.chain.client.start(lab::program("paced").unwrap(), arguments).unwrap();
    let application = site.chain.client.run(|| UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    application.connect("127.0.0.1:5000").unwrap();
    application.set_read_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    let echoed = || {
        let sent = application.send(&PAYLOAD).is_ok();
        (sent && application.recv(&mut [0; 2_048]).is_ok()).then_some(())
    };
    for _ in 0..10 {
        wait_for("an echo", SOON, echoed).unwrap();
    }
    let counts = Counts::read(&site.chain.client, metrics).unwrap();
    assert!(marked(&counts, "voice", "up") >= 10, "{counts:?}");
    assert_eq!((marked(&counts, "voice", "down"), marked(&counts, "bulk", "up")), (0, 0), "{counts:?}");
}

#[test]
fn the_probe_of_marks_sends_no_packet() {
    lab::ring!(Netns);
    let sections = POLICY.replace(r#""client", "target""#, r#""lo""#);
    let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let counts = site.counts().unwrap();
    assert_eq!(counts.of("kernel_enforced{device=\"lo\",part=\"egress\"}"), 1, "{counts:?}");
    assert_eq!(marked(&counts, "default", "down"), 0);
}
