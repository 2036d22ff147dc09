//! XDP ingress: packets behind IP options, extension headers and fragment headers.

use std::net::SocketAddr;

use bpf::ingress::{Guard, GuardLimits, GuardReason, Ingress};
use lab::frame::Frame;

use super::ingress::{GENEROUS, few, generous, id, judge, program, short};

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// An extension header of `bytes` bytes, with a padding option if it is of a kind that has options.
fn extension(number: u8, bytes: u8) -> (u8, Vec<u8>) {
    let units = if number == AUTHENTICATION { bytes / 4 - 2 } else { bytes / 8 - 1 };
    (number, [&[units, 1, bytes - 4][..], &vec![0; usize::from(bytes) - 4]].concat())
}

/// A fragment header: the offset in units of eight bytes, and whether more fragments follow.
fn fragment(offset: u16, more: bool) -> (u8, Vec<u8>) {
    let [high, low] = (offset << 3 | u16::from(more)).to_be_bytes();
    (FRAGMENT, vec![0, high, low, 0, 0, 0, 9])
}

/// An IPv6 frame to a listener, with these extension headers.
fn behind(extensions: &[(u8, Vec<u8>)], payload: &[u8]) -> Frame {
    Frame { extensions: extensions.to_vec(), ..Frame::v6(payload) }
}

fn elsewhere(frame: Frame) -> Frame {
    let to = if frame.to.is_ipv4() { "198.51.100.9:443" } else { "[2001:db8::9]:443" };
    Frame { to: to.parse().unwrap(), ..frame }
}

fn other_port(frame: Frame) -> Frame {
    Frame { to: SocketAddr::new(frame.to.ip(), 53), ..frame }
}

fn assert_passes_uncounted(program: &(Ingress, Guard), frame: &Frame) {
    assert_eq!(judge(program, &frame.bytes()), (true, None), "{frame:?}");
}

#[test]
fn packets_behind_ip_options_and_extension_headers_are_judged_as_all_others() {
    lab::ring!(Netns);
    let program = generous();
    let chains = [
        vec![extension(HOP_BY_HOP, 8)],
        vec![extension(DESTINATION, 248)],
        vec![extension(ROUTING, 24)],
        vec![extension(AUTHENTICATION, 24)],
        // An atomic fragment (RFC 6946) contains the whole packet.
        vec![fragment(0, false)],
        vec![extension(HOP_BY_HOP, 8), extension(DESTINATION, 16), extension(ROUTING, 40), fragment(0, false)],
        [HOP_BY_HOP, DESTINATION, ROUTING, AUTHENTICATION, DESTINATION, DESTINATION]
            .map(|of| extension(of, 16))
            .to_vec(),
    ];
    let wrapped = |payload: &[u8]| -> Vec<Frame> {
        let options = (1..=10).map(|words| Frame { options: vec![1; words * 4], ..Frame::v4(payload) });
        options.chain(chains.iter().map(|chain| behind(chain, payload))).collect()
    };
    for frame in wrapped(&[0xff; 64]) {
        assert_eq!(judge(&program, &frame.bytes()), (false, Some(GuardReason::ShortVersion)), "{frame:?}");
        assert_passes_uncounted(&program, &other_port(frame.clone()));
        assert_passes_uncounted(&program, &elsewhere(frame));
    }
    for frame in wrapped(&short(&id(1), 40)) {
        assert_eq!(judge(&program, &frame.bytes()), (true, Some(GuardReason::Connection)), "{frame:?}");
        let vlan = Frame { vlans: vec![7], ..frame };
        assert_eq!(judge(&program, &vlan.bytes()), (true, Some(GuardReason::Connection)), "{vlan:?}");
    }
}

/// First fragments of packets to a listener.
fn first_fragments(payload: &[u8]) -> [Frame; 4] {
    [
        Frame { fragment: 0x2000, ..Frame::v4(payload) },
        Frame { fragment: 0x2000, options: vec![1; 8], ..Frame::v4(payload) },
        behind(&[fragment(0, true)], payload),
        behind(&[extension(HOP_BY_HOP, 8), fragment(0, true), extension(DESTINATION, 8)], payload),
    ]
}

/// Later fragments of packets to any port at a listener's address.
fn later_fragments(payload: &[u8]) -> [Frame; 4] {
    [
        Frame { fragment: 0x2001, ..Frame::v4(payload) },
        Frame { fragment: 0x1fff, options: vec![1; 40], ..Frame::v4(payload) },
        behind(&[fragment(1, true)], payload),
        behind(&[extension(ROUTING, 8), fragment(0x1fff, false), extension(DESTINATION, 8)], payload),
    ]
}

#[test]
fn the_first_fragment_of_a_packet_to_a_listener_is_dropped_and_those_to_others_pass() {
    lab::ring!(Netns);
    let program = generous();
    for frame in first_fragments(&short(&id(1), 40)) {
        assert_eq!(judge(&program, &frame.bytes()), (false, Some(GuardReason::FirstFragment)), "{frame:?}");
        assert_passes_uncounted(&program, &other_port(frame.clone()));
        assert_passes_uncounted(&program, &elsewhere(frame));
    }
}

#[test]
fn later_fragments_to_the_address_of_a_listener_have_a_budget() {
    lab::ring!(Netns);
    let program = program(GuardLimits { fragments: few(3), ..GENEROUS });
    for frame in later_fragments(&[0xff; 64]) {
        assert_eq!(judge(&program, &frame.bytes()), (true, Some(GuardReason::Fragment)), "{frame:?}");
        assert_passes_uncounted(&program, &elsewhere(frame));
    }
    for frame in later_fragments(&[0xff; 64]).map(other_port) {
        assert_eq!(judge(&program, &frame.bytes()), (false, Some(GuardReason::FragmentLimit)), "{frame:?}");
        assert_passes_uncounted(&program, &elsewhere(frame));
    }
    let tcp = Frame { protocol: 6, ..later_fragments(&[0xff; 64])[0].clone() };
    assert_passes_uncounted(&program, &tcp);
    assert_passes_uncounted(&program, &Frame { protocol: 6, ..behind(&[fragment(1, true)], &[0xff; 64]) });
    assert_eq!(judge(&program, &Frame::v4(&short(&id(1), 40)).bytes()), (true, Some(GuardReason::Connection)));
}

#[test]
fn a_first_fragment_too_short_for_its_port_shares_the_budget_of_later_ones() {
    lab::ring!(Netns);
    let program = program(GuardLimits { fragments: few(0), ..GENEROUS });
    for (frame, expected) in [
        (first_fragments(&[])[0].clone(), (true, Some(GuardReason::Fragment))),
        (first_fragments(&[])[2].clone(), (false, Some(GuardReason::FragmentLimit))),
    ] {
        let mut bytes = frame.bytes();
        bytes.truncate(bytes.len() - 4);
        assert_eq!(judge(&program, &bytes), expected, "{frame:?}");
    }
}

#[test]
fn a_packet_hidden_behind_extension_headers_is_dropped_at_an_address_of_a_listener_only() {
    lab::ring!(Netns);
    let program = generous();
    let payload = short(&id(1), 40);
    let many = behind(&vec![extension(DESTINATION, 8); 7], &payload);
    assert_eq!(judge(&program, &many.bytes()), (false, Some(GuardReason::Hidden)));
    assert_eq!(
        judge(&program, &other_port(many.clone()).bytes()),
        (false, Some(GuardReason::Hidden)),
        "the program does not see its port"
    );
    assert_passes_uncounted(&program, &elsewhere(many));
    let mut cut = behind(&[extension(DESTINATION, 8)], &[]).bytes();
    cut.truncate(14 + 40 + 4);
    assert_eq!(judge(&program, &cut), (false, Some(GuardReason::Hidden)));
    for protocol in [6, 50, 58, 59] {
        assert_passes_uncounted(&program, &Frame { protocol, ..behind(&[extension(DESTINATION, 8)], &payload) });
    }
}
