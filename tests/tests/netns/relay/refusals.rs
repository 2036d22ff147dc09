//! The targets that a relay refuses, and the errors that it sends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lab::{
    client::{Client, refusal},
    name_server::NameServer,
    netns::Chain,
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};
use masque::{
    proxy_status::ErrorType,
    target::{Host, Target},
};

const ADDRESS: (u16, ErrorType) = (403, ErrorType::DestinationIpProhibited);
const BY_RULE: (u16, ErrorType) = (403, ErrorType::HttpRequestDenied);

/// Addresses on the internet, which the relay reaches by its default route.
const FOREIGN: (Ipv4Addr, Ipv6Addr) = (Ipv4Addr::new(45, 0, 0, 1), Ipv6Addr::new(0x2a00, 1, 0, 0, 0, 0, 0, 7));

fn address(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().unwrap(), 443)
}

/// The rules of a relay whose configuration has none about targets.
fn defaults() -> Terms<'static> {
    Terms { targets: "", ..Terms::default() }
}

#[test]
fn special_addresses_and_the_relays_own_are_refused_by_default() {
    lab::ring!(Netns);
    const REFUSED: &[&str] = &[
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "127.255.0.1",
        "::",
        "::1", // unspecified and loopback
        "10.0.2.2",
        "172.16.0.1",
        "192.168.0.1",
        "fd00:2::2",
        "fec0::1", // private, unique-local, site-local
        "100.64.0.1",
        "192.0.0.8",
        "198.18.0.1",
        "240.0.0.1",
        "192.0.2.1",
        "2001:db8::1", // shared, reserved, …
        "169.254.169.254",
        "fe80::1",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255", // link-local, multicast, broadcast
        "168.63.129.16",   // a cloud host's services for its guests
        "10.0.1.2",
        "10.0.2.1",
        "fd00:1::2",
        "fd00:2::1", // the relay's own
        "::ffff:127.0.0.1",
        "::ffff:10.0.2.2",
        "64:ff9b::a00:202",
        "2002:a00:202::1", // embedded IPv4
        "2001:0:a00:202::1",
        "2001:0:2d00:1:0:0:f5ff:fdfd", // Teredo: the server's address, the client's address
    ];
    let site = Site::new(defaults()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for text in REFUSED {
            assert_eq!(refusal(client.open(address(text)).await), ADDRESS, "{text}");
        }
        for ip in [IpAddr::from(FOREIGN.0), FOREIGN.1.into()] {
            client.open((ip, 443).into()).await.unwrap();
        }
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("address_prohibited"), REFUSED.len() as i64);
}

#[test]
fn an_address_is_the_relays_own_for_as_long_as_its_host_has_it() {
    lab::ring!(Netns);
    let site = Site::new(defaults()).unwrap();
    for (ip, prefix) in [(IpAddr::from(FOREIGN.0), 32), (FOREIGN.1.into(), 128)] {
        let refused = || is_own(&site, ip);
        assert!(!refused(), "{ip} is not the relay's at first");
        site.chain.relay.ip(&format!("address add {ip}/{prefix} dev lo")).unwrap();
        wait_for("the relay to notice its new address", SOON, || refused().then_some(())).unwrap();
        site.chain.relay.ip(&format!("address del {ip}/{prefix} dev lo")).unwrap();
        wait_for("the relay to notice that it lost the address", SOON, || (!refused()).then_some(())).unwrap();
    }
}

/// Returns whether the relay refuses a target as one of its own addresses.
fn is_own(site: &Site, ip: IpAddr) -> bool {
    let opened = site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        client.open((ip, 443).into()).await.map(drop)
    });
    let opened = opened.unwrap();
    opened.is_err().then(|| assert_eq!(refusal(opened), ADDRESS)).is_some()
}

#[test]
fn addresses_that_a_local_route_or_the_configuration_leads_to_the_relay_are_its_own() {
    lab::ring!(Netns);
    let targets = "own = [\"45.9.0.0/24\"]\nnat64_prefixes = [\"2a00:64::/96\"]";
    let site = Site::new(Terms { targets, ..Terms::default() }).unwrap();
    for (known, ip, is_refused) in [
        ("a translated address", "45.9.0.9", true),
        ("its neighbour", "45.9.1.9", false),
        ("NAT64 of a private address", "2a00:64::a00:202", true),
        ("NAT64 of the relay's address", "2a00:64::2d09:9", true),
        ("NAT64 of a public address", "2a00:64::2d00:1", false),
    ] {
        assert_eq!(is_own(&site, ip.parse().unwrap()), is_refused, "{known}");
    }
    for (network, ip) in [("45.7.0.0/16", "45.7.9.9"), ("2a00:7::/32", "2a00:7::9")] {
        let ip = ip.parse().unwrap();
        assert!(!is_own(&site, ip), "{ip} is not the relay's at first");
        site.chain.relay.ip(&format!("route add local {network} dev lo")).unwrap();
        wait_for("the relay to notice its new route", SOON, || is_own(&site, ip).then_some(())).unwrap();
        site.chain.relay.ip(&format!("route del local {network} dev lo")).unwrap();
        wait_for("the relay to notice that it lost the route", SOON, || (!is_own(&site, ip)).then_some(())).unwrap();
    }
    site.chain.relay.ip("route add local 45.8.0.0/16 dev lo").unwrap();
    let Site { chain, relay, .. } = site;
    drop(relay);
    let later = Site::on(chain, defaults()).unwrap();
    assert!(is_own(&later, "45.8.9.9".parse().unwrap()), "a route that existed before the relay");
}

#[test]
fn ports_that_are_not_listed_are_refused() {
    lab::ring!(Netns);
    let site = Site::new(defaults()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for port in [53, 443, 1024, 65535] {
            client.open((FOREIGN.0, port).into()).await.unwrap();
        }
        for port in [1, 52, 54, 80, 1023] {
            assert_eq!(refusal(client.open((FOREIGN.0, port).into()).await), BY_RULE, "port {port} by UDP");
        }
        for port in [22, 25, 53, 1024] {
            let target = Target { host: Host::Ip(FOREIGN.0.into()), port };
            assert_eq!(refusal(client.relay.open_tcp(&target, None).await), BY_RULE, "port {port} by TCP");
        }
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("port_prohibited"), 5 + 4);
}

#[test]
fn a_broadcast_address_is_refused_and_no_fault_of_the_relay() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        assert_eq!(refusal(client.open("10.0.2.255:443".parse().unwrap()).await), ADDRESS);
    })
    .unwrap();
}

#[test]
fn a_target_of_a_blackhole_route_is_unroutable_and_no_fault_of_the_relay() {
    lab::ring!(Netns);
    let site = Site::new(defaults()).unwrap();
    site.chain.relay.ip("route add blackhole 45.7.0.0/16\nroute add blackhole 2a00:7::/32").unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let unroutable = (502, ErrorType::DestinationIpUnroutable);
        for ip in ["45.7.0.1", "2a00:7::1"].map(|ip| ip.parse::<IpAddr>().unwrap()) {
            assert_eq!(refusal(client.open((ip, 443).into()).await), unroutable, "{ip} by UDP");
            let target = Target { host: Host::Ip(ip), port: 443 };
            assert_eq!(refusal(client.relay.open_tcp(&target, None).await), unroutable, "{ip} by TCP");
        }
    })
    .unwrap();
    assert!(!site.relay.output().contains("failed to create a socket"), "{}", site.relay.output());
}

#[test]
fn an_ipv6_target_of_a_relay_without_ipv6_is_unroutable_and_no_shortage_of_ports() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    site.chain.relay.sysctl("net.ipv6.conf.all.disable_ipv6", "1").unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        let (at, unroutable) = (site.target(Family::V6, 443), (502, ErrorType::DestinationIpUnroutable));
        assert_eq!(refusal(client.open(at).await), unroutable, "by UDP");
        let target = Target { host: Host::Ip(at.ip()), port: 443 };
        assert_eq!(refusal(client.relay.open_tcp(&target, None).await), unroutable, "by TCP");
    })
    .unwrap();
    assert!(!site.relay.output().contains("no more sockets"), "{}", site.relay.output());
}

fn name(text: &str, port: u16) -> Target {
    Target { host: Host::Name(text.to_owned()), port }
}

#[test]
fn the_deny_list_wins_over_the_allow_list_for_addresses_and_names() {
    lab::ring!(Netns);
    let targets = r#"
        allow = ["45.0.0.0/8", "10.0.2.2", "open.example", "below.blocked.example"]
        deny = ["45.0.0.1", { to = "45.0.0.2", ports = [53] }, "*.blocked.example"]
        unlisted = "deny""#;
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let target = IpAddr::from(chain.egress.far.v4);
    let table = [("open.example", target), ("unlisted.example", target), ("denied.example", FOREIGN.0.into())];
    let _names = NameServer::start(&chain.target, &table).unwrap();
    let site = Site::on(chain, Terms { targets, ..Terms::default() }).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for open in ["45.0.0.2:443", "45.0.0.3:53", "10.0.2.2:443"] {
            client.open(open.parse().unwrap()).await.unwrap();
        }
        client.open_target(&name("open.example", 443)).await.unwrap();
        for denied in ["45.0.0.1:443", "45.0.0.2:53", "46.0.0.1:443", "10.0.2.3:443", "[2a00:1::7]:443"] {
            assert_eq!(refusal(client.open(denied.parse().unwrap()).await), ADDRESS, "{denied}");
        }
        for blocked in ["below.blocked.example", "far.below.blocked.example", "BELOW.Blocked.example"] {
            assert_eq!(refusal(client.open_target(&name(blocked, 443)).await), BY_RULE, "{blocked}");
        }
        // The address to which a name resolves is judged like one that was requested directly.
        assert_eq!(refusal(client.open_target(&name("denied.example", 443)).await), ADDRESS);
    })
    .unwrap();
    assert_eq!(site.counts().unwrap().refused("name_prohibited"), 3);
}

#[test]
fn a_name_that_stands_for_a_prohibited_address_is_refused() {
    lab::ring!(Netns);
    let mut chain = Chain::new().unwrap();
    chain.relay.resolve_with(&[chain.egress.far.v4.into()]).unwrap();
    let own = IpAddr::from(chain.access.far.v6);
    let table = [
        ("loopback.example", IpAddr::from(Ipv4Addr::LOCALHOST)),
        ("private.example", chain.egress.far.v4.into()),
        ("own.example", own),
        ("foreign.example", FOREIGN.0.into()),
    ];
    let _names = NameServer::start(&chain.target, &table).unwrap();
    let site = Site::on(chain, defaults()).unwrap();
    site.client(async || {
        let client = Client::connect(site.access(Family::V4).unwrap()).await.unwrap();
        for refused in ["loopback.example", "private.example", "own.example"] {
            assert_eq!(refusal(client.open_target(&name(refused, 443)).await), ADDRESS, "{refused}");
        }
        let tunnel = client.open_target(&name("foreign.example", 443)).await.unwrap();
        assert_eq!(tunnel.next_hop, Some((FOREIGN.0, 443).into()));
    })
    .unwrap();
}
