//! The program at XDP ingress.

use std::{
    net::{Ipv6Addr, SocketAddr},
    time::Duration,
};

use admission::connection_id::{IdLabel, Keys, LEN};
use bpf::ingress::{Guard, GuardLimits, GuardReason, Ingress, RateLimit};
use lab::frame::Frame;

pub(crate) const KEYS: Keys = Keys { tag: *b"the key of a tag", mask: *b"that of the mask" };
pub(crate) const CONFIG: u8 = 2;
pub(crate) const VERSION_1: u32 = 1;
pub(crate) const INITIAL: u8 = 0xc0;
const ZERO_RTT: u8 = 0xd0;
pub(crate) const HANDSHAKE: u8 = 0xe0;
const RETRY: u8 = 0xf0;
pub(crate) const SHORT: u8 = 0x40;
/// A rate that no test exceeds.
pub(crate) const MUCH: RateLimit = RateLimit::per_second(1_000_000, 1_000_000);
/// Limits that no test reaches.
pub(crate) const GENEROUS: GuardLimits =
    GuardLimits { prefix: MUCH, total: MUCH, id: MUCH, resets: MUCH, fragments: MUCH };

/// A program that knows the keys, and the documentation addresses to which frames go as its listeners.
pub(crate) fn program(limits: GuardLimits) -> (Ingress, Guard) {
    let ingress = Ingress::load().unwrap();
    let mut guard = ingress.guard().unwrap();
    guard.listen([Frame::v4(&[]).to, Frame::v6(&[]).to]).unwrap();
    guard.set_keys(&[(CONFIG, KEYS.into())]).unwrap();
    guard.set_limits(limits).unwrap();
    (ingress, guard)
}

pub(crate) fn generous() -> (Ingress, Guard) {
    program(GENEROUS)
}

/// What the program did with a frame: whether it passed, and the reason that was counted, if any.
pub(crate) fn judge(program: &(Ingress, Guard), frame: &[u8]) -> (bool, Option<GuardReason>) {
    let (ingress, guard) = program;
    let before = guard.counts().unwrap();
    let (passed, _) = ingress.try_on(frame, 1).unwrap();
    let after = guard.counts().unwrap();
    let mut counted = before.into_iter().zip(after).filter(|(before, after)| before != after);
    let reason = counted.next().map(|(before, after)| {
        assert_eq!(after.1, before.1 + 1, "a packet is counted once");
        after.0
    });
    assert_eq!(counted.next(), None, "a packet has one reason");
    (passed, reason)
}

pub(crate) fn reason_of(program: &(Ingress, Guard), payload: &[u8]) -> GuardReason {
    let reasons = [Frame::v4(payload), Frame::v6(payload)].map(|frame| {
        let (passed, reason) = judge(program, &frame.bytes());
        assert_eq!(Some(passed), reason.map(GuardReason::passes), "{reason:?}");
        reason.unwrap()
    });
    assert_eq!(reasons[0], reasons[1], "IPv4 and IPv6");
    reasons[0]
}

pub(crate) fn id(number: u8) -> [u8; LEN] {
    KEYS.seal(CONFIG, [number, 2, 3, 4, 5], IdLabel { class: 3, worker: number })
}

pub(crate) fn short(id: &[u8], bytes: usize) -> Vec<u8> {
    let mut packet = [&[SHORT], id].concat();
    packet.resize(bytes, 0xab);
    packet
}

pub(crate) fn long(first: u8, version: u32, id: &[u8], bytes: usize) -> Vec<u8> {
    let mut packet = [&[first], &version.to_be_bytes()[..], &[id.len() as u8], id, &[0]].concat();
    packet.resize(packet.len().max(bytes), 0xab);
    packet
}

#[test]
fn packets_of_our_connections_pass_in_every_frame_that_ip_comes_in() {
    lab::ring!(Netns);
    let program = generous();
    for number in 0..50 {
        assert_eq!(reason_of(&program, &short(&id(number), 40)), GuardReason::Connection);
    }
    for vlans in [vec![7], vec![100, 200]] {
        let frame = Frame { vlans, ..Frame::v6(&short(&id(1), 40)) };
        assert_eq!(judge(&program, &frame.bytes()), (true, Some(GuardReason::Connection)));
    }
    // Ethernet pads short frames; the length in the UDP header decides.
    let mut padded = Frame::v4(&short(&id(1), 20)).bytes();
    padded.resize(100, 0);
    assert_eq!(judge(&program, &padded), (false, Some(GuardReason::Malformed)));
}

#[test]
fn an_id_with_any_bit_changed_is_not_ours() {
    lab::ring!(Netns);
    let program = generous();
    assert_eq!(reason_of(&program, &long(HANDSHAKE, VERSION_1, &id(9), 100)), GuardReason::Connection);
    for bit in 0..LEN * 8 {
        let mut forged = id(9);
        forged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(reason_of(&program, &long(HANDSHAKE, VERSION_1, &forged, 100)), GuardReason::ForgedId, "bit {bit}");
        assert_eq!(reason_of(&program, &short(&forged, 40)), GuardReason::UnknownId, "bit {bit}");
    }
}

#[test]
fn every_kind_of_packet_has_its_reason() {
    lab::ring!(Netns);
    let program = generous();
    let (ours, clients) = (&id(1)[..], &b"chosen by a client"[..]);
    let cases = [
        (long(INITIAL, VERSION_1, clients, 1_200), GuardReason::Initial),
        (long(INITIAL, VERSION_1, &clients[..LEN], 1_200), GuardReason::Initial),
        (long(INITIAL, VERSION_1, &clients[..8], 1_200), GuardReason::Initial),
        (long(INITIAL, VERSION_1, ours, 1_200), GuardReason::InitialId),
        (long(INITIAL, VERSION_1, clients, 1_199), GuardReason::ShortInitial),
        (long(INITIAL, VERSION_1, ours, 1_199), GuardReason::ShortInitial),
        (long(INITIAL, VERSION_1, &clients[..7], 1_200), GuardReason::ShortId),
        (long(INITIAL, VERSION_1, &[], 1_200), GuardReason::ShortId),
        (long(INITIAL, VERSION_1, &[7; 21], 1_200), GuardReason::Malformed),
        (long(INITIAL & !0x40, VERSION_1, clients, 1_200), GuardReason::Malformed),
        (long(ZERO_RTT, VERSION_1, clients, 300), GuardReason::Initial),
        (long(ZERO_RTT, VERSION_1, &clients[..7], 300), GuardReason::ShortId),
        (long(ZERO_RTT, VERSION_1, ours, 300), GuardReason::InitialId),
        (long(HANDSHAKE, VERSION_1, clients, 300), GuardReason::ForgedId),
        (long(HANDSHAKE, VERSION_1, ours, 300), GuardReason::Connection),
        (long(HANDSHAKE, VERSION_1, ours, 20), GuardReason::Malformed),
        (long(RETRY, VERSION_1, ours, 300), GuardReason::Malformed),
        (long(INITIAL, 0, clients, 1_200), GuardReason::VersionNegotiation),
        (long(INITIAL, 0x0a0a_0a0a, clients, 1_200), GuardReason::Version),
        (long(0x80, 0x0a0a_0a0a, &[7; 200], 1_200), GuardReason::Version),
        (long(INITIAL, 0x0a0a_0a0a, clients, 1_199), GuardReason::ShortVersion),
        (short(ours, 21), GuardReason::Connection),
        (short(ours, 20), GuardReason::Malformed),
        (short(b"nobody's own", 21), GuardReason::UnknownId),
        ([&[0x00], ours, &[0; 30]].concat(), GuardReason::Malformed),
        (Vec::new(), GuardReason::Malformed),
        (vec![SHORT], GuardReason::Malformed),
        (vec![INITIAL; 6], GuardReason::Malformed),
    ];
    for (number, (payload, reason)) in cases.iter().enumerate() {
        assert_eq!(reason_of(&program, payload), *reason, "case {number}");
    }
}

#[test]
fn a_udp_length_beyond_the_packet_is_malformed() {
    lab::ring!(Netns);
    let program = generous();
    let frame = Frame::v4(&short(&id(1), 40));
    for (len, expected) in [
        (0_u16, GuardReason::Malformed),
        (8, GuardReason::Malformed),
        (48, GuardReason::Connection),
        (49, GuardReason::Malformed),
    ] {
        let mut bytes = frame.bytes();
        bytes[38..40].copy_from_slice(&len.to_be_bytes());
        assert_eq!(judge(&program, &bytes).1, Some(expected), "{len}");
    }
}

#[test]
fn packets_that_are_not_udp_to_a_listener_pass_uncounted() {
    lab::ring!(Netns);
    let program = generous();
    let garbage = [0xff; 64];
    let v4 = Frame::v4(&garbage);
    let changed = |at: usize, value: u8| {
        let mut bytes = v4.bytes();
        bytes[at] = value;
        bytes
    };
    let other_port = |frame: Frame| Frame { to: SocketAddr::new(frame.to.ip(), 53), ..frame }.bytes();
    let mapped: Ipv6Addr = "::ffff:198.51.100.3".parse().unwrap();
    let cases = [
        other_port(v4.clone()),
        other_port(Frame::v6(&garbage)),
        Frame { to: "198.51.100.3:443".parse().unwrap(), ..v4.clone() }.bytes(),
        Frame { to: (mapped, 443).into(), ..Frame::v6(&garbage) }.bytes(),
        changed(23, 6),    // TCP
        changed(14, 0x55), // not IPv4
        changed(14, 0x44), // shorter than an IPv4 header
        changed(12, 0x88), // not IP
        v4.bytes()[..40].to_vec(),
        Frame { vlans: vec![1, 2, 3], ..v4.clone() }.bytes(),
        vec![0; 14],
    ];
    for (number, bytes) in cases.iter().enumerate() {
        assert_eq!(judge(&program, bytes), (true, None), "case {number}");
    }
    assert_eq!(judge(&program, &v4.bytes()), (false, Some(GuardReason::ShortVersion)), "the same frame to a listener");
}

#[test]
fn listeners_come_and_go() {
    lab::ring!(Netns);
    let (ingress, mut guard) = generous();
    let garbage = Frame::v4(&[0; 30]);
    guard.listen([Frame::v6(&[]).to]).unwrap();
    assert!(ingress.try_on(&garbage.bytes(), 1).unwrap().0);
    guard.listen([Frame::v6(&[]).to, garbage.to]).unwrap();
    assert!(!ingress.try_on(&garbage.bytes(), 1).unwrap().0);
}

#[test]
fn ids_of_every_key_are_ours_until_another_key_has_its_config() {
    lab::ring!(Netns);
    let mut program = generous();
    let next = Keys { tag: *b"another tag's ke", mask: *b"another mask's k" };
    let with_next = short(&next.seal(CONFIG + 1, [1; 5], IdLabel { class: 0, worker: 0 }), 40);
    assert_eq!(reason_of(&program, &with_next), GuardReason::UnknownId);
    program.1.set_keys(&[(CONFIG + 1, next.into()), (CONFIG, KEYS.into())]).unwrap();
    assert_eq!(reason_of(&program, &with_next), GuardReason::Connection);
    assert_eq!(reason_of(&program, &short(&id(1), 40)), GuardReason::Connection);
    // As after a step of the clock: the endpoint still knows the connections of the previous weeks.
    program.1.set_keys(&[(CONFIG + 2, KEYS.into())]).unwrap();
    assert_eq!(reason_of(&program, &short(&id(1), 40)), GuardReason::Connection);
    assert_eq!(reason_of(&program, &with_next), GuardReason::Connection);
    program.1.set_keys(&[(CONFIG, next.into())]).unwrap();
    assert_eq!(reason_of(&program, &short(&id(1), 40)), GuardReason::UnknownId);
    assert_eq!(reason_of(&program, &with_next), GuardReason::Connection);
}

#[test]
fn hundreds_of_listeners_are_all_known_and_their_neighbours_are_not() {
    lab::ring!(Netns);
    let (ingress, mut guard) = generous();
    let address = |host: u16, port| SocketAddr::from(([10, 0, (host >> 8) as u8, host as u8], port));
    guard.listen((0..300).map(|host| address(host, 443))).unwrap();
    let passes = |to| ingress.try_on(&Frame { to, ..Frame::v4(&[0; 30]) }.bytes(), 1).unwrap().0;
    assert!((0..300).all(|host| !passes(address(host, 443))));
    assert!((300..600).all(|host| passes(address(host, 443))) && (0..300).all(|host| passes(address(host, 444))));
    guard.listen((0..100_000).map(|host| address(host as u16, host as u16))).unwrap_err();
}

/// One per hour, after a burst of `burst` + 1.
pub(crate) fn few(burst: u32) -> RateLimit {
    RateLimit { interval: Duration::from_secs(3_600), burst }
}

pub(crate) fn initial_from(address: &str) -> Vec<u8> {
    let to = if address.starts_with('[') { Frame::v6(&[]).to } else { Frame::v4(&[]).to };
    Frame::between(address.parse().unwrap(), to, &long(INITIAL, VERSION_1, b"by a client", 1_200)).bytes()
}

#[test]
fn a_prefix_may_begin_so_many_connections_and_does_not_take_those_of_others() {
    lab::ring!(Netns);
    let program = program(GuardLimits { prefix: few(4), ..GENEROUS });
    for prefix in [
        ["192.0.2.1:7", "192.0.2.200:8", "192.0.3.1:7"],
        ["[2001:db8:0:1::1]:7", "[2001:db8:0:ff::2]:8", "[2001:db8:0:100::1]:7"],
    ] {
        let [one, neighbour, stranger] = prefix.map(initial_from);
        for _ in 0..5 {
            assert_eq!(judge(&program, &one), (true, Some(GuardReason::Initial)));
        }
        assert_eq!(judge(&program, &one), (false, Some(GuardReason::PrefixLimit)));
        assert_eq!(judge(&program, &neighbour), (false, Some(GuardReason::PrefixLimit)), "the same prefix");
        assert_eq!(judge(&program, &stranger), (true, Some(GuardReason::Initial)));
    }
    assert_eq!(
        reason_of(&program, &long(INITIAL, VERSION_1, &id(1), 1_200)),
        GuardReason::InitialId,
        "Initials with our IDs have their own budget"
    );
}

#[test]
fn all_prefixes_together_may_begin_so_many_connections() {
    lab::ring!(Netns);
    let program = program(GuardLimits { prefix: few(4), total: few(9), ..GENEROUS });
    let reasons = (0..30).map(|prefix| judge(&program, &initial_from(&format!("10.0.{prefix}.1:7"))).1.unwrap());
    let reasons: Vec<_> = reasons.collect();
    assert_eq!(reasons[..10], [GuardReason::Initial; 10]);
    assert_eq!(reasons[10..], [GuardReason::TotalLimit; 20]);
    assert_eq!(reason_of(&program, &short(b"nobody's own", 40)), GuardReason::UnknownId, "resets have another budget");
}

#[test]
fn so_many_packets_of_unknown_connections_may_be_answered_with_a_reset() {
    lab::ring!(Netns);
    let program = program(GuardLimits { resets: few(3), ..GENEROUS });
    let unknown = Frame::v4(&short(b"nobody's own", 40)).bytes();
    for _ in 0..4 {
        assert_eq!(judge(&program, &unknown), (true, Some(GuardReason::UnknownId)));
    }
    for _ in 0..20 {
        assert_eq!(judge(&program, &unknown), (false, Some(GuardReason::ResetLimit)));
    }
    assert_eq!(
        reason_of(&program, &short(&id(1), 40)),
        GuardReason::Connection,
        "packets of known connections still pass"
    );
}

#[test]
fn any_bytes_have_exactly_one_reason() {
    lab::ring!(Netns);
    let program = generous();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..2_000 {
        let len = random() % 1_300;
        let mut payload: Vec<u8> = (0..len).map(|_| random() as u8).collect();
        if random() % 2 == 0 && len > 5 {
            payload[1..5].copy_from_slice(&VERSION_1.to_be_bytes());
        }
        let (passed, reason) = judge(&program, &Frame::v4(&payload).bytes());
        assert_eq!(Some(passed), reason.map(GuardReason::passes));
    }
}
