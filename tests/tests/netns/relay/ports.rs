//! The ports of the relay's host toward targets, when they are used up.

use std::net::UdpSocket;

use lab::{
    client::{Client, refusal},
    site::{Family, SOON, Site, Terms},
};
use masque::{
    proxy_status::ErrorType,
    target::{Host, Target},
};
use tokio::time::timeout;

use super::limits::limit_hits;

#[test]
fn a_range_of_ports_that_is_used_up_is_a_limit_and_no_fault_of_the_relay() {
    lab::ring!(Netns);
    let limits = "tunnels_per_connection = 4000\ntunnels_per_user = 4000";
    let site = Site::new(Terms { limits, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    // The relay's own sockets have ports outside this range.
    site.chain.relay.sysctl("net.ipv4.ip_local_port_range", "50000 52998").unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let mut tunnels = Vec::new();
        let refused = loop {
            match client.open(site.target(Family::V4, 7)).await {
                Ok(tunnel) => tunnels.push(tunnel),
                refused => break refusal(refused),
            }
        };
        assert_eq!(refused, (503, ErrorType::ConnectionLimitReached));
        assert_eq!(tunnels.len(), 2_999);
        for _ in 0..20 {
            assert_eq!(refusal(client.open(site.target(Family::V4, 7)).await).0, 503);
        }
        assert_eq!(tunnels[0].echo(None, b"still here").await, b"still here");
        tunnels.pop().unwrap().udp.finish();
        site.counted("a port to be free again", |counts| counts.closed("finished") == 1).await.unwrap();
        client.open(site.target(Family::V4, 7)).await.unwrap();
    })
    .unwrap();
    let counts = site.counts().unwrap();
    assert_eq!((limit_hits(&counts, "local_ports"), counts.refused("overloaded")), (21, 21));
    let said = site.relay.output().matches("no more sockets for targets").count();
    assert!((1..=3).contains(&said), "logged {said} times");
}

#[test]
fn each_source_address_has_the_ports_of_the_range_and_tunnels_take_turns() {
    lab::ring!(Netns);
    let relay = "auth = \"none\"\nsource_addresses = [\"10.0.2.1\", \"10.0.2.3\", \"fd00:2::1\"]";
    let site = Site::new(Terms { relay, ..Terms::default() }).unwrap();
    site.chain.relay.ip("address add 10.0.2.3/24 dev target").unwrap();
    site.chain.relay.sysctl("net.ipv4.ip_local_port_range", "50000 50009").unwrap();
    let target = site.chain.target.run(|| UdpSocket::bind("0.0.0.0:7").unwrap()).unwrap();
    target.set_nonblocking(true).unwrap();
    site.client(async || {
        let target = tokio::net::UdpSocket::from_std(target).unwrap();
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (mut tunnels, mut seen) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            let mut tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
            tunnel.send(None, b"who am I").await.unwrap();
            let received = timeout(SOON, target.recv_from(&mut [0; 10])).await;
            seen.push(received.expect("a payload").unwrap().1.ip().to_string());
            tunnels.push(tunnel);
        }
        let of = |address: &str| seen.iter().filter(|seen| *seen == address).count();
        assert_eq!((of("10.0.2.1"), of("10.0.2.3")), (10, 10));
        assert_eq!(refusal(client.open(site.target(Family::V4, 7)).await).0, 503);
        let _listener = site.chain.target.run(|| std::net::TcpListener::bind("[::]:80").unwrap()).unwrap();
        for family in [Family::V4, Family::V6] {
            let target = Target { host: Host::Ip(site.target(family, 80).ip()), port: 80 };
            client.relay.open_tcp(&target, None).await.unwrap();
        }
    })
    .unwrap();
}
