use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;

/// Rules from entries in short form, with a port after a space.
fn rules(allow: &[&str], deny: &[&str]) -> TargetRules {
    let entry = |text: &&str| {
        let (to, port) = text.split_once(' ').map_or((*text, None), |(to, port)| (to, Some(port.parse().unwrap())));
        TargetRule { ports: port.map(|port| Ports(vec![port..=port])), ..to.parse::<Pattern>().unwrap().into() }
    };
    TargetRules {
        allow: allow.iter().map(entry).collect(),
        deny: deny.iter().map(entry).collect(),
        ..TargetRules::default()
    }
}

fn udp(rules: &TargetRules, ip: &str, port: u16) -> Result<(), Denied> {
    rules.check(Protocol::Udp, None, ip.parse().unwrap(), port, false)
}

fn named(rules: &TargetRules, name: &str, ip: &str) -> Result<(), Denied> {
    rules.check(Protocol::Udp, Some(name), ip.parse().unwrap(), 443, false)
}

#[test]
fn special_addresses_are_refused_by_default_and_their_neighbours_are_not() {
    let table = [
        (SpecialRange::Unspecified, "0.0.0.0 0.255.255.255 ::"),
        (SpecialRange::Loopback, "127.0.0.1 127.255.255.254 ::1"),
        (SpecialRange::Private, "10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 192.168.255.255"),
        (SpecialRange::Shared, "100.64.0.1 100.127.255.255"),
        (SpecialRange::LinkLocal, "169.254.169.254 fe80::1 febf::1"),
        (SpecialRange::UniqueLocal, "fc00::1 fdff::1"),
        (SpecialRange::SiteLocal, "fec0::1 feff::1"),
        (SpecialRange::Documentation, "192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff:fff::1"),
        (SpecialRange::Benchmarking, "198.18.0.1 198.19.255.255 2001:2::1"),
        (SpecialRange::Multicast, "224.0.0.1 239.255.255.255 ff02::1"),
        (SpecialRange::Broadcast, "255.255.255.255"),
        (SpecialRange::Discard, "100::1"),
        (SpecialRange::CloudHost, "168.63.129.16 64:ff9b::a83f:8110"),
        (SpecialRange::LocalTranslation, "64:ff9b:1::808:808"),
        (
            SpecialRange::Reserved,
            "192.0.0.1 192.88.99.1 240.0.0.1 255.255.255.254 2001:20::1 100:0:0:1::1 4000::1 8000::1 fe00::1",
        ),
    ];
    for (range, addresses) in table {
        for ip in addresses.split(' ') {
            assert_eq!(udp(&TargetRules::default(), ip, 443), Err(Denied::Range(range)), "{ip}");
        }
    }
    let neighbours = "1.0.0.0 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 168.63.129.15 168.63.129.17 169.253.255.255 \
        172.15.255.255 172.32.0.0 192.0.1.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 223.255.255.255 \
        2001:200::1 2001:db9::1 2606:4700::1111 3ffe::1";
    for ip in neighbours.split_whitespace() {
        assert_eq!(udp(&TargetRules::default(), ip, 443), Ok(()), "{ip}");
    }
}

#[test]
fn every_known_metadata_service_of_a_cloud_is_refused_by_default() {
    for ip in [
        "168.63.129.16",   // Azure's host
        "169.254.169.254", // most of them
        "100.100.100.200", // Alibaba
        "192.0.0.192",     // Oracle, formerly
        "fd00:ec2::254",   // AWS
        "fd20:ce::254",    // Google
        "fd00:42::42",     // Scaleway
    ] {
        assert!(udp(&TargetRules::default(), ip, 443).is_err(), "{ip}");
    }
}

#[test]
fn addresses_that_lead_to_this_host_need_an_entry_each() {
    let own = |allow: &[&str]| TargetRules { own: vec!["9.9.9.0/28".parse().unwrap()], ..rules(allow, &[]) };
    assert_eq!(udp(&own(&[]), "9.9.9.7", 443), Err(Denied::OwnAddress));
    assert_eq!(udp(&own(&["9.9.9.0/24"]), "9.9.9.7", 443), Err(Denied::OwnAddress));
    assert_eq!(udp(&own(&["9.9.9.7"]), "9.9.9.7", 443), Ok(()));
    assert_eq!(udp(&own(&[]), "9.9.9.16", 443), Ok(()));
    assert_eq!(udp(&own(&[]), "64:ff9b::909:907", 443), Err(Denied::OwnAddress), "by another name");
}

#[test]
fn a_networks_own_nat64_prefix_hides_nothing() {
    let with = |allow: &[&str]| TargetRules {
        nat64_prefixes: vec!["2a00:64::/96".parse().unwrap(), "64:ff9b:1::/96".parse().unwrap()],
        own: vec!["9.9.9.9/32".parse().unwrap()],
        ..rules(allow, &["8.8.4.4"])
    };
    assert_eq!(udp(&TargetRules::default(), "2a00:64::a00:1", 443), Ok(()), "without being told, it is an address");
    let default = with(&[]);
    assert_eq!(udp(&default, "2a00:64::a00:1", 443), Err(Denied::Range(SpecialRange::Private)));
    assert_eq!(udp(&default, "2a00:64::909:909", 443), Err(Denied::OwnAddress));
    assert_eq!(udp(&default, "2a00:64::808:404", 443), Err(Denied::Listed));
    assert_eq!(udp(&default, "2a00:64::808:808", 443), Ok(()));
    assert_eq!(udp(&default, "64:ff9b:1::808:808", 443), Ok(()), "now that its form is known");
    assert_eq!(udp(&with(&["10.0.0.1"]), "2a00:64::a00:1", 443), Ok(()));
}

#[test]
fn teredo_is_judged_by_its_server_and_its_client() {
    for (server, client, verdict) in [
        ("8.8.8.8", "9.9.9.9", Ok(())),
        ("127.0.0.1", "9.9.9.9", Err(Denied::Range(SpecialRange::Loopback))),
        ("8.8.8.8", "192.168.1.1", Err(Denied::Range(SpecialRange::Private))),
    ] {
        let ip = teredo(server.parse().unwrap(), client.parse().unwrap());
        assert_eq!(udp(&TargetRules::default(), &ip.to_string(), 443), verdict, "{ip}");
    }
}

#[test]
fn default_ports_depend_on_the_protocol_and_port_0_is_never_allowed() {
    let rules = TargetRules::default();
    let check = |protocol, port| rules.check(protocol, None, "9.9.9.9".parse().unwrap(), port, false).is_ok();
    for (port, by_udp, by_tcp) in [
        (0, false, false),
        (25, false, false),
        (53, true, false),
        (80, false, true),
        (443, true, true),
        (1023, false, false),
        (1024, true, false),
        (65_535, true, false),
    ] {
        assert_eq!((check(Protocol::Udp, port), check(Protocol::Tcp, port)), (by_udp, by_tcp), "port {port}");
    }
    assert_eq!(udp(&super::tests::rules(&["9.9.9.9"], &[]), "9.9.9.9", 0), Err(Denied::Port));
}

#[test]
fn a_refused_range_opens_only_to_an_entry_that_names_it_or_a_part() {
    let verdict = |allow: &str, ip: &str| udp(&rules(&[allow], &[]), ip, 443).is_ok();
    for (allow, ip, opens) in [
        ("10.0.0.0/8", "10.1.2.3", true),
        ("10.1.0.0/16", "10.1.2.3", true),
        ("10.1.2.3", "10.1.2.3", true),
        ("10.2.0.0/16", "10.1.2.3", false),
        ("0.0.0.0/0", "10.1.2.3", false),
        ("8.0.0.0/6", "10.1.2.3", false),
        ("::/0", "fd00::1", false),
        ("fd00::/8", "fd00::1", true),
        ("10.0.0.0/8", "::ffff:10.1.2.3", true),
        ("10.0.0.0/8", "64:ff9b::10.1.2.3", true),
        ("10.0.0.0/8", "::ffff:127.0.0.1", false),
        ("64:ff9b:1::/48", "64:ff9b:1::1", true),
        ("inside.example", "10.1.2.3", false),
    ] {
        assert_eq!(verdict(allow, ip), opens, "{allow} and {ip}");
    }
}

#[test]
fn a_name_on_the_allow_list_does_not_lead_inside() {
    let rules = rules(&["*.example.org"], &[]);
    assert_eq!(named(&rules, "rebound.example.org", "127.0.0.1"), Err(Denied::Range(SpecialRange::Loopback)));
}

#[test]
fn an_own_address_opens_only_to_an_entry_of_exactly_it() {
    let own =
        |allow: &[&str], ip: &str| rules(allow, &[]).check(Protocol::Udp, None, ip.parse().unwrap(), 443, true).err();
    assert_eq!(own(&[], "9.9.9.9"), Some(Denied::OwnAddress));
    assert_eq!(own(&["9.9.9.0/24"], "9.9.9.9"), Some(Denied::OwnAddress));
    assert_eq!(own(&["9.9.9.9"], "9.9.9.9"), None);
    assert_eq!(own(&["10.0.0.0/8"], "10.0.0.5"), Some(Denied::OwnAddress));
    assert_eq!(own(&["10.0.0.5"], "10.0.0.5"), None);
    assert_eq!(own(&["127.0.0.0/8"], "127.0.0.1"), None);
}

#[test]
fn deny_beats_allow_and_sees_both_faces_of_an_embedded_address() {
    let rules = rules(&["9.9.9.9", "2002::/15"], &["9.9.0.0/16", "2002:808:808::/48", "8.8.4.4 53", "*.evil.example"]);
    assert_eq!(udp(&rules, "9.9.9.9", 443), Err(Denied::Listed));
    assert_eq!(udp(&rules, "2002:909:909::1", 443), Err(Denied::Listed));
    assert_eq!(udp(&rules, "2002:808:808::1", 443), Err(Denied::Listed));
    assert_eq!(udp(&rules, "8.8.8.8", 443), Ok(()));
    assert_eq!((udp(&rules, "8.8.4.4", 53), udp(&rules, "8.8.4.4", 443)), (Err(Denied::Listed), Ok(())));
    assert_eq!(named(&rules, "www.EVIL.example.", "8.8.8.8"), Err(Denied::Listed));
    assert_eq!(named(&rules, "evil.example", "8.8.8.8"), Ok(()));
    assert_eq!(named(&rules, "notevil.example", "8.8.8.8"), Ok(()));
}

#[test]
fn an_entry_with_ports_means_these_and_one_without_the_default_ports() {
    let rules = rules(&["10.0.0.1 22", "10.0.0.2"], &[]);
    assert_eq!((udp(&rules, "10.0.0.1", 22), udp(&rules, "10.0.0.1", 443)), (Ok(()), Err(Denied::Port)));
    assert_eq!((udp(&rules, "10.0.0.2", 22), udp(&rules, "10.0.0.2", 443)), (Err(Denied::Port), Ok(())));
}

#[test]
fn an_entry_for_one_protocol_says_nothing_about_the_other() {
    let mut rules = rules(&["10.0.0.1"], &["9.9.9.9"]);
    rules.allow[0].protocol = Some(Protocol::Tcp);
    rules.deny[0].protocol = Some(Protocol::Tcp);
    assert_eq!(udp(&rules, "10.0.0.1", 443), Err(Denied::Range(SpecialRange::Private)));
    assert_eq!(udp(&rules, "9.9.9.9", 443), Ok(()));
    let tcp = |ip: &str| rules.check(Protocol::Tcp, None, ip.parse().unwrap(), 443, false);
    assert_eq!((tcp("10.0.0.1"), tcp("9.9.9.9")), (Ok(()), Err(Denied::Listed)));
}

#[test]
fn only_the_list_of_targets_counts_if_unlisted_ones_are_denied() {
    let rules = TargetRules { unlisted: Unlisted::Deny, ..rules(&["9.9.9.0/24", "api.example"], &[]) };
    assert_eq!(udp(&rules, "9.9.9.9", 443), Ok(()));
    assert_eq!(udp(&rules, "8.8.8.8", 443), Err(Denied::Unlisted));
    assert_eq!(named(&rules, "api.example", "8.8.8.8"), Ok(()));
    assert_eq!(named(&rules, "sub.api.example", "8.8.8.8"), Err(Denied::Unlisted));
}

#[test]
fn a_name_is_refused_unresolved_only_if_no_address_could_help() {
    let rules = rules(&["10.0.0.1 22"], &["*.evil.example", "odd.example 444"]);
    let check = |name, port| rules.check_name(Protocol::Udp, name, port);
    assert_eq!(check("www.evil.example", 443), Err(Denied::Listed));
    assert_eq!((check("odd.example", 444), check("odd.example", 443)), (Err(Denied::Listed), Ok(())));
    assert_eq!((check("a.example", 22), check("a.example", 23)), (Ok(()), Err(Denied::Port)));
    let closed = TargetRules { unlisted: Unlisted::Deny, ..super::tests::rules(&["api.example"], &[]) };
    assert_eq!(closed.check_name(Protocol::Udp, "a.example", 443), Err(Denied::Unlisted));
    assert_eq!(closed.check_name(Protocol::Udp, "api.example", 443), Ok(()));
}

fn teredo(server: Ipv4Addr, client: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(0x2001 << 112 | u128::from(server.to_bits()) << 64 | u128::from(!client.to_bits()))
}

/// Every IPv6 form that embeds `ip`.
fn embedding(ip: Ipv4Addr) -> [Ipv6Addr; 8] {
    let (bits, public) = (u128::from(ip.to_bits()), Ipv4Addr::new(8, 8, 8, 8));
    [
        ip.to_ipv6_mapped(),
        Ipv6Addr::from_bits(bits),
        Ipv6Addr::from_bits(0xffff_0000 << 32 | bits),
        Ipv6Addr::from_bits(0x0064_ff9b << 96 | bits),
        Ipv6Addr::from_bits(0x0064_ff9b_0001 << 80 | bits),
        Ipv6Addr::from_bits(0x2002 << 112 | bits << 80 | 1),
        teredo(ip, public),
        teredo(public, ip),
    ]
}

proptest! {
    #[test]
    fn a_refused_ipv4_address_is_refused_in_every_embedded_form(row in 0..REFUSED_IPV4.len(), random: u32) {
        let network: ipnet::Ipv4Net = REFUSED_IPV4[row].parse().unwrap();
        let ip = Ipv4Addr::from_bits(network.network().to_bits() | random & network.hostmask().to_bits());
        let rules = TargetRules::default();
        prop_assert!(rules.check(Protocol::Udp, None, ip.into(), 443, false).is_err());
        for form in embedding(ip) {
            prop_assert!(rules.check(Protocol::Udp, None, form.into(), 443, false).is_err(), "{}", form);
        }
    }

    #[test]
    fn an_embedded_form_gets_the_verdict_of_the_address_it_embeds(bits: u32) {
        let ip = Ipv4Addr::from_bits(bits);
        let rules = rules(&["10.0.0.0/8"], &["9.0.0.0/8"]);
        let verdict = |ip: IpAddr| rules.check(Protocol::Udp, None, ip, 443, false).is_ok();
        for form in embedding(ip) {
            let unsure = form.segments().starts_with(&[0x64, 0xff9b, 1]) || ip.is_unspecified() || bits == 1;
            prop_assert_eq!(verdict(form.into()), verdict(ip.into()) && !unsure, "{}", form);
        }
    }

    #[test]
    fn patterns_read_back_as_they_are_shown(text in "([*.]{0,2}[a-z0-9.-]{1,12}|[0-9a-f:]{2,12}(/[0-9]{1,3})?)") {
        if let Ok(pattern) = text.parse::<Pattern>() {
            prop_assert_eq!(pattern.to_string().parse(), Ok(pattern));
        }
    }
}

/// The refused IPv4 networks, repeated by hand, so that a row missing in the table is noticed.
const REFUSED_IPV4: [&str; 15] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "255.255.255.255/32",
];
