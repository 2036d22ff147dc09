//! Devices with unexpected behaviour: they refuse messages of several packets, or drop packets with departures too far
//! ahead.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    future::poll_fn,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    process::Command,
    time::Duration,
};

use lab::{
    client::{Client, Tunnel},
    netns::{Chain, End, Namespace},
    process::{child_of, send_signal, wait_for},
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use pacing::{
    io::message::{self, Message},
    monotonic,
};
use s2n_quic_core::{
    inet::ExplicitCongestionNotification::NotEct,
    path::{Handle as _, RemoteAddress},
};
use s2n_quic_platform::message::default::Handle;
use tokio::time::timeout;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The number of payloads in flight at once.
const BURST: u32 = 32;

fn payload(number: u32, len: usize) -> Vec<u8> {
    let mut payload = vec![7; len];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    payload
}

/// Receives a burst, which must be complete. Payloads may be reordered if a sender moves to another CPU.
async fn receive_all(tunnel: &mut Tunnel, len: usize) {
    let mut received = Vec::new();
    for count in 0..BURST {
        let next = timeout(SOON, tunnel.recv()).await.unwrap_or_else(|_| panic!("only {count} payloads arrive"));
        received.push(next.unwrap().unwrap());
    }
    received.sort();
    assert!((0..BURST).map(|number| payload(number, len)).eq(received), "each payload arrives unchanged");
}

/// Makes UDP from one end to the other go through IPsec: ESP in transport mode with a null cipher. On such a path, the
/// kernel refuses messages of several packets with EIO (`udp_send_skb` in net/ipv4/udp.c, `udp_v6_send_skb` in
/// net/ipv6/udp.c).
fn encapsulate(family: Family, (from, source): (&Namespace, &End), (to, destination): (&Namespace, &End)) {
    let ip = |end: &End| match family {
        Family::V4 => IpAddr::from(end.v4),
        Family::V6 => end.v6.into(),
    };
    let path = format!("src {} dst {}", ip(source), ip(destination));
    for end in [to, from] {
        end.ip(&format!("xfrm state add {path} proto esp spi 256 mode transport enc cipher_null ''")).unwrap();
    }
    from.ip(&format!("xfrm policy add {path} proto udp dir out tmpl proto esp mode transport")).unwrap();
}

#[test]
fn clients_get_every_packet_singly_if_messages_of_several_packets_are_refused() {
    lab::ring!(Vm);
    // The machine is so slow that packets are paced; packets within a quantum then share messages.
    let sections = "[transport]\nquantum_us = 1000";
    for family in FAMILIES {
        let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
        // Room for the bytes that IPsec adds to a packet.
        site.chain.access.set_mtu(1_600).unwrap();
        let target = site.chain.target.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 9)).unwrap()).unwrap();
        target.set_nonblocking(true).unwrap();
        site.client(async || {
            let target = tokio::net::UdpSocket::from_std(target).unwrap();
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 9)).await.unwrap();
            tunnel.send(Form::Datagram, b"whence").await.unwrap();
            let (_, relay) = timeout(SOON, target.recv_from(&mut [0; 10])).await.unwrap().unwrap();
            let Chain { client, relay: host, access, .. } = &site.chain;
            encapsulate(family, (host, &access.far), (client, &access.near));
            // While the window is in use, packets with these payloads are filled up and share messages.
            let (mut rounds, mut after) = (0, 0);
            while after < 3 {
                // While it is stopped, all payloads queue at the relay.
                site.signal(libc::SIGSTOP).unwrap();
                for number in 0..BURST {
                    target.send_to(&payload(number, 1_300), relay).await.unwrap();
                }
                site.signal(libc::SIGCONT).unwrap();
                receive_all(&mut tunnel, 1_300).await;
                rounds += 1;
                assert!(rounds < 100, "no message of several packets");
                after += site.counts().unwrap().of("transport_gso_refused_total");
            }
        })
        .unwrap();
        let counts = site.counts().unwrap();
        let refused = ["gso", "packets"].map(|what| counts.of(&format!("transport_{what}_refused_total")));
        assert_eq!(
            refused,
            [1, 0],
            "{family:?}: messages of several packets toward one peer are refused, and no packets"
        );
        let said = site.relay.wait_for_line("no segmentation offload", SOON).unwrap();
        assert!(said.contains("client"), "{said}");
    }
}

#[test]
fn targets_then_get_each_payload_by_itself_and_miss_none() {
    lab::ring!(Vm);
    for family in FAMILIES {
        let site = Site::new(Terms::default()).unwrap();
        let _echo = site.chain.target.echo(7).unwrap();
        let Chain { relay, target, egress, .. } = &site.chain;
        encapsulate(family, (relay, &egress.near), (target, &egress.far));
        site.client(async || {
            let client = Client::connect(site.access(family).unwrap()).await.unwrap();
            let mut tunnel = client.open(site.target(family, 7)).await.unwrap();
            // Each packet of the stream carries several payloads.
            for number in 0..BURST {
                tunnel.udp.batch(Some(Form::Capsule)).push(&payload(number, 100));
            }
            poll_fn(|cx| tunnel.udp.poll_flush(cx)).await.unwrap();
            receive_all(&mut tunnel, 100).await;
        })
        .unwrap();
        let counts = site.counts().unwrap();
        assert_eq!((counts.of("gso_refused_total"), counts.packets("up")), (1, i64::from(BURST)), "{family:?}");
    }
}

/// A relay that answers its client through `fq` and paces its packets. The round trip takes 10 ms.
fn paced_site() -> Site {
    let chain = Chain::new().unwrap();
    chain.access.near.set_qdisc("netem delay 10ms").unwrap();
    chain.access.far.set_qdisc("fq horizon 2s horizon_drop").unwrap();
    Site::on(chain, Terms::default()).unwrap()
}

#[test]
fn an_fq_whose_horizon_is_nearer_than_departures_is_not_trusted_with_them_and_drops_nothing() {
    lab::ring!(Vm);
    let site = paced_site();
    let _echo = site.chain.target.echo(7).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        tunnel.echo(Form::Datagram, b"the kernel keeps departures").await;
        site.chain.access.far.set_qdisc("fq horizon 500us horizon_drop").unwrap();
        site.relay.wait_for_line("departures changed: departure times are kept by paced on ", SOON).unwrap();
        // After a change, the first packet makes paced look up again which device leads to the peer.
        for _ in 0..5 {
            tunnel.echo(Form::Datagram, b"paced does").await;
        }
        for number in 0..BURST {
            tunnel.udp.batch(Some(Form::Datagram)).push(&payload(number, 1_000));
        }
        poll_fn(|cx| tunnel.udp.poll_flush(cx)).await.unwrap();
        receive_all(&mut tunnel, 1_000).await;
    })
    .unwrap();
    assert!(site.counts().unwrap().of("transport_messages_held_total") > 0);
}

#[test]
fn packets_that_fq_drops_beyond_its_horizon_are_counted_and_reported() {
    lab::ring!(Vm);
    let site = paced_site();
    let client = SocketAddr::from((site.chain.access.near.v4, 9));
    let path = &Handle::from_remote_address(RemoteAddress(client.into()));
    let departure_ns = Some(monotonic::now_ns() + Duration::from_secs(3_600).as_nanos() as u64);
    let message = Message { payload: b"late", segment_bytes: 4, path, ecn: NotEct, departure_ns, mark: None };
    let send = || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        message::enable_departures(&socket).unwrap();
        message::send(&socket, &[message]).unwrap();
    };
    site.chain.relay.run(send).unwrap();
    let drops = "fq{device=\"client\",what=\"horizon_drops\"}";
    site.wait_for_counts("the drop", |counts| counts.of(drops) == 1).unwrap();
    site.relay.wait_for_line("fq drops packets whose departure is beyond its horizon", SOON).unwrap();
}

/// A relay that makes `fq` the root of its device toward clients.
fn with_fq() -> Site {
    let sections = "[kernel]\ndevices = [\"client\"]\nmanage_qdisc = true";
    let site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    site
}

fn tc(site: &Site, arguments: &str) -> String {
    let mut command = Command::new("tc");
    let output = command.args(["-n", site.chain.relay.name()]).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "tc {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Waits until the status says of a device's `fq` whether it is enforced, with this detail.
fn wait_for_fq(site: &Site, enforced: bool, detail: &str) {
    let found = || {
        let (_, words) = site.pacectl(&["status"], "").unwrap();
        let enforced = if enforced { " yes " } else { " no " };
        let is_it = |line: &str| line.contains(" fq ") && line.contains(enforced) && line.contains(detail);
        words.lines().any(is_it).then_some(())
    };
    wait_for("the status to show the change of fq", SOON, found).unwrap();
}

#[test]
fn a_replaced_fq_is_reported_and_not_restored() {
    lab::ring!(Vm);
    let site = with_fq();
    wait_for_fq(&site, true, "in place of noqueue");
    tc(&site, "qdisc replace dev client root handle 7: pfifo");
    wait_for_fq(&site, false, "client has pfifo at its root, which paced did not set");
    assert!(tc(&site, "qdisc show dev client").contains("pfifo 7:"));
    tc(&site, "qdisc delete dev client root");
    wait_for_fq(&site, true, "in place of noqueue");
}

#[test]
fn a_discipline_in_place_of_fq_stays_when_the_relay_ends_even_another_fq() {
    lab::ring!(Vm);
    for (qdisc, enforced, detail) in [
        ("pfifo 7: root", false, "client has pfifo at its root, which paced did not set"),
        ("fq 7: root", true, "it was there"),
    ] {
        let mut site = with_fq();
        wait_for_fq(&site, true, "in place of noqueue");
        let kind = qdisc.split(' ').next().unwrap();
        tc(&site, &format!("qdisc replace dev client root handle 7: {kind}"));
        wait_for_fq(&site, enforced, detail);
        site.relay.signal(libc::SIGTERM).unwrap();
        assert!(site.relay.wait(SOON).unwrap().success());
        let after = tc(&site, "qdisc show dev client");
        assert!(after.contains(qdisc), "{after}");
    }
}

#[test]
fn a_clsact_with_added_filters_stays_with_them() {
    lab::ring!(Vm);
    let mut site = with_fq();
    // Before Linux 6.6, paced has made it.
    if !tc(&site, "qdisc show dev client").contains("clsact") {
        tc(&site, "qdisc add dev client clsact");
    }
    tc(&site, "filter add dev client ingress matchall action ok");
    site.relay.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
    let after = tc(&site, "filter show dev client ingress");
    assert!(after.contains("matchall"), "{after}");
    assert_eq!(tc(&site, "filter show dev client egress"), "", "paced's own filter is gone");
}

#[test]
fn the_next_monitor_removes_from_devices_what_a_killed_one_has_left() {
    lab::ring!(Vm);
    let mut site = with_fq();
    assert!(tc(&site, "qdisc show dev client").contains("fq "));
    let keeper = child_of(site.relay.id()).unwrap();
    send_signal(child_of(keeper).unwrap(), libc::SIGKILL).unwrap();
    site.wait_for_counts("another monitor", |counts| {
        counts.of("kernel_monitor_restarts_total") == 1 && counts.of("kernel_monitor") == 1
    })
    .unwrap();
    assert!(tc(&site, "qdisc show dev client").contains("fq "), "fq stays while there is no monitor");
    site.relay.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
    assert!(!tc(&site, "qdisc show dev client").contains("fq "));
}

#[test]
fn a_device_that_gets_another_name_loses_what_paced_set_at_the_end() {
    lab::ring!(Vm);
    let sections = "[kernel]\ndevices = [\"target\"]\nmanage_qdisc = true";
    let mut site = Site::new(Terms { sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let qdiscs = |site: &Site, device: &str| {
        let output =
            Command::new("tc").args(["-n", site.chain.relay.name(), "qdisc", "show", "dev", device]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let before = qdiscs(&site, "target");
    assert!(before.contains("qdisc fq 70ac:"), "{before}");
    site.chain.relay.ip("link set target down\nlink set target name other\nlink set other up").unwrap();
    let gone = |counts: &lab::site::Counts| counts.of("kernel_enforced{device=\"target\",part=\"fq\"}") == 0;
    site.wait_for_counts("the monitor to see it", gone).unwrap();
    site.signal(libc::SIGTERM).unwrap();
    assert!(site.relay.wait(SOON).unwrap().success());
    let after = qdiscs(&site, "other");
    assert!(!after.contains("qdisc fq ") && !after.contains("clsact"), "{after}");
}
