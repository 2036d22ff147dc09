//! XDP ingress: first packets with a proof of their address have budgets that forged addresses do not use up.

use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use admission::connection_id::{STAMP_AT, StampKey, TOKEN_BYTES};
use bpf::ingress::{Guard, GuardLimits, GuardReason, Ingress};
use lab::{
    client::Client,
    frame::Frame,
    process::SetOnDrop,
    site::{Counts, Family, SOON, Site, Terms},
};
use pacing::monotonic;
use socket2::{Domain, Socket, Type};

use super::ingress::{GENEROUS, INITIAL, VERSION_1, few, id, initial_from, judge, long, program, reason_of};

const STAMPS: StampKey = StampKey(*b"key of the stamp");
const DAY_NS: u64 = 24 * 3_600 * 1_000_000_000;

/// A program whose lane for strangers is used up by forged addresses; each other lane has room for 21 packets.
fn flooded(limits: GuardLimits) -> (Ingress, Guard) {
    let mut program = program(GuardLimits { total: few(20), ..limits });
    program.1.set_stamp_key(&STAMPS.0).unwrap();
    let forged = |number: u8| judge(&program, &initial_from(&format!("10.{number}.0.1:7"))).1;
    assert_eq!((0..21).map(forged).collect::<Vec<_>>(), [Some(GuardReason::Initial); 21]);
    assert_eq!(forged(21), Some(GuardReason::TotalLimit));
    program
}

/// An Initial with a token.
fn with_token(id: &[u8], token: &[u8]) -> Vec<u8> {
    let version = VERSION_1.to_be_bytes();
    let scid = b"the client's";
    let mut packet = [&[INITIAL], &version[..], &[id.len() as u8], id, &[scid.len() as u8], scid].concat();
    packet.push(token.len() as u8);
    packet.extend(token);
    packet.resize(1_200, 0xab);
    packet
}

fn token(stamp: [u8; 8]) -> [u8; TOKEN_BYTES] {
    let mut token = [0xcd; TOKEN_BYTES];
    token[STAMP_AT..][..8].copy_from_slice(&stamp);
    token
}

fn from(address: &str, payload: &[u8]) -> Vec<u8> {
    let to = if address.starts_with('[') { Frame::v6(&[]).to } else { Frame::v4(&[]).to };
    Frame::between(address.parse().unwrap(), to, payload).bytes()
}

fn now_seconds() -> u64 {
    monotonic::now_ns() / 1_000_000_000
}

#[test]
fn initials_under_one_id_of_ours_and_under_all_of_them_are_limited() {
    lab::ring!(Netns);
    let program = program(GuardLimits { id: few(5), total: few(19), ..GENEROUS });
    let under = |number| reason_of(&program, &long(INITIAL, VERSION_1, &id(number), 1_200));
    assert_eq!([(); 3].map(|()| under(1)), [GuardReason::InitialId; 3], "each stands for two packets, one per family");
    assert_eq!(under(1), GuardReason::IdLimit);
    let others: Vec<_> = (2..12).map(under).collect();
    assert_eq!(others[..7], [GuardReason::InitialId; 7], "20 packets in all");
    assert_eq!(others[7..], [GuardReason::Initial; 3], "then they use the budget of all Initials");
}

#[test]
fn an_initial_with_an_address_token_does_not_share_the_budget_of_forged_addresses() {
    lab::ring!(Netns);
    for client in ["192.0.2.1:40000", "[2001:db8:7::1]:40000"] {
        let program = flooded(GENEROUS);
        let stamp = STAMPS.stamp(client.parse().unwrap(), now_seconds());
        let shows =
            |address: &str, stamp| judge(&program, &from(address, &with_token(&id(1), &token(stamp)))).1.unwrap();
        let by_client = |stamp| judge(&program, &from(client, &with_token(b"client's", &token(stamp)))).1.unwrap();
        assert_eq!(by_client(stamp), GuardReason::InitialToken);
        assert_eq!(shows(client, stamp), GuardReason::InitialToken, "the token takes precedence over the ID");
        for other in [client.replace("40000", "40001"), client.replace("1]", "2]").replace(".1:", ".2:")] {
            let packet = from(&other, &with_token(b"client's", &token(stamp)));
            assert_eq!(
                judge(&program, &packet).1,
                Some(GuardReason::TotalLimit),
                "{other} shows another client's token"
            );
        }
        for bit in 32..64 {
            let mut forged = stamp;
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(by_client(forged), GuardReason::TotalLimit, "bit {bit}");
        }
        for seconds in [now_seconds() - 12, now_seconds() + 60, 0] {
            assert_eq!(by_client(STAMPS.stamp(client.parse().unwrap(), seconds)), GuardReason::TotalLimit, "{seconds}");
        }
        assert_eq!(by_client(StampKey([1; 16]).stamp(client.parse().unwrap(), now_seconds())), GuardReason::TotalLimit);
        for cut in [&token(stamp)[1..], &[]] {
            let packet = from(client, &with_token(b"client's", cut));
            assert_eq!(judge(&program, &packet).1, Some(GuardReason::TotalLimit), "{} bytes", cut.len());
        }
        let more: Vec<_> = (0..20).map(|_| by_client(STAMPS.stamp(client.parse().unwrap(), now_seconds()))).collect();
        assert_eq!(more[..19], [GuardReason::InitialToken; 19], "21 packets in all");
        assert_eq!(more[19], GuardReason::TotalLimit);
    }
}

#[test]
fn first_packets_from_an_address_with_a_completed_handshake_have_a_lane_for_a_day() {
    lab::ring!(Netns);
    for [client, same, other] in [
        ["192.0.2.1:7", "192.0.2.1:8", "192.0.2.2:7"],
        ["[2001:db8:7:1::1]:7", "[2001:db8:7:1::2]:8", "[2001:db8:7:2::1]:7"],
        // The bytes of the other address are the first of the network's.
        ["[2001:db8::1]:7", "[2001:db8::2]:8", "32.1.13.184:7"],
    ] {
        let mut program = flooded(GuardLimits { prefix: few(4), ..GENEROUS });
        let mut known = program.1.take_known_addresses().unwrap();
        let ip: IpAddr = client.parse::<SocketAddr>().unwrap().ip();
        let now_ns = monotonic::now_ns();
        let reason = |address: &str| judge(&program, &initial_from(address)).1;
        assert_eq!(reason(client), Some(GuardReason::TotalLimit));
        // Wraps, because the machine may have been up for less than a day.
        known.note(ip, now_ns.wrapping_sub(DAY_NS)).unwrap();
        assert_eq!(reason(client), Some(GuardReason::TotalLimit));
        known.note(ip, now_ns).unwrap();
        assert_eq!([client, same].map(reason), [Some(GuardReason::InitialKnown); 2]);
        assert_eq!(reason(other), Some(GuardReason::TotalLimit));
        let version = from(client, &long(INITIAL, 0x0a0a_0a0a, b"by a client", 1_200));
        assert_eq!(judge(&program, &version).1, Some(GuardReason::Version));
        assert_eq!([(); 4].map(|()| reason(client)).map(Option::unwrap)[..2], [GuardReason::InitialKnown; 2]);
        assert_eq!(reason(client), Some(GuardReason::TotalLimit), "five packets from one address");
    }
}

#[test]
fn once_the_lane_of_strangers_is_used_up_no_prefix_is_looked_at() {
    lab::ring!(Netns);
    let program = program(GuardLimits { prefix: few(0), total: few(1), ..GENEROUS });
    let reason = |prefix: u8| judge(&program, &initial_from(&format!("10.0.{prefix}.1:7"))).1.unwrap();
    assert_eq!(
        [reason(1), reason(1), reason(2), reason(2)],
        [GuardReason::Initial, GuardReason::PrefixLimit, GuardReason::Initial, GuardReason::TotalLimit]
    );
}

const DEVICES: &str = "[kernel]\ndevices = [\"client\", \"target\"]";

const TOTAL_LIMIT: &str = "kernel_guarded_packets_total{verdict=\"dropped\",reason=\"total_limit\"}";

fn passed(site: &Site, reason: &str) -> i64 {
    site.counts().unwrap().of(&format!("kernel_guarded_packets_total{{verdict=\"passed\",reason=\"{reason}\"}}"))
}

/// Opens a socket that sends from a forged address, in a network of its own for each number.
fn forged_socket(number: u8) -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
    socket.set_ip_transparent_v4(true).unwrap();
    socket.bind(&SocketAddr::from(([10, 200, number, 1], 7)).into()).unwrap();
    socket
}

/// Sends 200 Initials, each from another address.
fn flood(to: SocketAddr) {
    for number in 0..200_u8 {
        forged_socket(number).send_to(&long(INITIAL, VERSION_1, b"by nobody", 1_200), &to.into()).unwrap();
    }
}

#[test]
fn a_client_that_was_here_comes_back_while_forged_addresses_use_up_the_budget_of_strangers() {
    lab::ring!(Netns);
    let sections = format!("{DEVICES}\ninitials_per_second = 4");
    let site = Site::new(Terms { sections: &sections, ..Terms::default() }).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    let relay = SocketAddr::from((site.chain.access.far.v4, 443));
    let connect = async || drop(Client::connect(site.access(Family::V4).unwrap()).await.unwrap());
    site.client(async || connect().await).unwrap();
    assert_eq!(passed(&site, "initial_known"), 0, "a new client is a stranger");
    site.client(async || {
        flood(relay);
        connect().await;
    })
    .unwrap();
    let dropped = site.counts().unwrap().of(TOTAL_LIMIT);
    assert!(dropped >= 100, "{dropped} of 200");
    assert!(passed(&site, "initial_known") >= 1);
}

#[test]
fn the_kernel_knows_the_tokens_that_a_relay_sends_with_retry() {
    lab::ring!(Netns);
    let terms = Terms { sections: DEVICES, limits: "handshakes_in_flight = 0", ..Terms::default() };
    let site = Site::new(terms).unwrap();
    site.relay.wait_for_line("ready", SOON).unwrap();
    for (family, tokens) in [(Family::V4, 1), (Family::V6, 2)] {
        site.client(async || drop(Client::connect(site.access(family).unwrap()).await.unwrap())).unwrap();
        assert!(passed(&site, "initial_token") >= tokens, "{family:?}");
    }
}

/// Sends Initials from 200 networks, 4,000 a second, until it is told to stop.
fn flood_until(stop: &AtomicBool, to: SocketAddr) {
    let sockets: Vec<_> = (0..200).map(forged_socket).collect();
    let packet = long(INITIAL, VERSION_1, b"by nobody", 1_200);
    let (began, mut sent) = (Instant::now(), 0);
    while !stop.load(Relaxed) {
        let due = began.elapsed().as_millis() as usize * 4;
        // At most 40 packets at once, so that the relay's queue does not overflow.
        let until = due.min(sent + 40);
        for number in sent..until {
            // The device drops the packet if its queue is full.
            _ = sockets[number % sockets.len()].send_to(&packet, &to.into());
        }
        sent = until;
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes `count` handshakes, one after another, and returns their median and their longest time as text.
fn handshakes(site: &Site, count: usize, mut before_each: impl FnMut(usize)) -> String {
    let mut times: Vec<_> = (0..count)
        .map(|number| {
            before_each(number);
            let connect = async || {
                let began = Instant::now();
                let client = loop {
                    // A stranger's packets may be dropped until the attempt ends.
                    if let Ok(client) = Client::connect(site.access(Family::V4).unwrap()).await {
                        break client;
                    }
                };
                client.relay.http().wait_for_settings().await.unwrap();
                let took = began.elapsed();
                client.close().await;
                took
            };
            site.client(connect).unwrap()
        })
        .collect();
    times.sort_unstable();
    format!("median {:.1?}, most {:.1?} of {count}", times[count / 2], times[count - 1])
}

#[test]
fn handshakes_of_known_clients_pass_a_flood_of_forged_first_packets_untouched() {
    lab::ring!(Netns);
    const HANDSHAKES: usize = 20;
    for (limits, what) in [("", "without Retry"), ("handshakes_in_flight = 0", "with Retry")] {
        let site = Site::new(Terms { sections: DEVICES, limits, ..Terms::default() }).unwrap();
        site.relay.wait_for_line("ready", SOON).unwrap();
        let relay = SocketAddr::from((site.chain.access.far.v4, 443));
        println!("{what}, calm: {}", handshakes(&site, HANDSHAKES, |_| ()));
        let (known, tokens) = (passed(&site, "initial_known"), passed(&site, "initial_token"));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| site.chain.client.run(|| flood_until(&stop, relay)).unwrap());
            let _stop = SetOnDrop(&stop);
            let is_flooded = |counts: &Counts| counts.of(TOTAL_LIMIT) > 0;
            site.wait_for_counts("the budget of strangers to be used up", is_flooded).unwrap();
            println!("{what}, known, under a flood: {}", handshakes(&site, HANDSHAKES, |_| ()));
            assert!(passed(&site, "initial_known") >= known + HANDSHAKES as i64, "each passes by its own lane");
            let by_token = if limits.is_empty() { 0 } else { HANDSHAKES as i64 };
            assert!(passed(&site, "initial_token") >= tokens + by_token, "{what}");
            if limits.is_empty() {
                // Each client has an address from which no handshake has come before.
                let move_to = |number: usize| {
                    let (device, from) = (&site.chain.access.near.device, format!("10.0.1.{}", 20 + number));
                    let lines = format!(
                        "address add {from}/24 dev {device}\nroute replace {}/32 dev {device} src {from}",
                        relay.ip()
                    );
                    site.chain.client.ip(&lines).unwrap();
                };
                println!("{what}, unknown, under a flood: {}", handshakes(&site, 10, move_to));
            }
        });
    }
}
