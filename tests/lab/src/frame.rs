//! Ethernet frames made by hand, for the programs in the kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A UDP packet in an Ethernet frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The source, in the same address family as `to`.
    pub from: SocketAddr,
    /// The destination.
    pub to: SocketAddr,
    /// DSCP and ECN: the old TOS byte of IPv4, or the traffic class of IPv6.
    pub traffic_class: u8,
    /// VLAN tags, the outermost first.
    pub vlans: Vec<u16>,
    /// Options of the IPv4 header: a multiple of four bytes, 40 at most.
    pub options: Vec<u8>,
    /// Flags and offset of IPv4: 0x4000 is "do not fragment", 0x2000 "more fragments"; the offset counts units of eight
    /// bytes.
    pub fragment: u16,
    /// Extension headers of IPv6: the number of each, and its bytes after the "next header" field.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// The protocol number, 17 for UDP.
    pub protocol: u8,
    /// The payload of UDP.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Makes a frame between two IPv4 addresses reserved for documentation (RFC 5737).
    pub fn v4(payload: &[u8]) -> Self {
        Self::between(
            (Ipv4Addr::new(192, 0, 2, 1), 40_000).into(),
            (Ipv4Addr::new(198, 51, 100, 2), 443).into(),
            payload,
        )
    }

    /// As [`Frame::v4`], in IPv6 (RFC 3849).
    pub fn v6(payload: &[u8]) -> Self {
        let address = |host| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host);
        Self::between((address(1), 40_000).into(), (address(2), 443).into(), payload)
    }

    /// Makes a frame between any two addresses of one family.
    pub fn between(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Self {
        let (vlans, options, extensions) = (Vec::new(), Vec::new(), Vec::new());
        let payload = payload.to_vec();
        Self { from, to, traffic_class: 0, vlans, options, fragment: 0x4000, extensions, protocol: 17, payload }
    }

    /// Returns the bytes from the Ethernet header on. The checksum of the IPv4 header is right; that of UDP is left out.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        for vlan in &self.vlans {
            bytes.extend([[0x81, 0x00], vlan.to_be_bytes()].concat());
        }
        let udp_len = self.payload.len() as u16 + 8;
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                bytes.extend([0x08, 0x00]);
                let [high, low] = (udp_len + 20 + self.options.len() as u16).to_be_bytes();
                let (words, [flags, offset]) = (5 + self.options.len() as u8 / 4, self.fragment.to_be_bytes());
                let tos = self.traffic_class;
                let mut header = vec![0x40 | words, tos, high, low, 0, 0, flags, offset, 64, self.protocol, 0, 0];
                header.extend([from.octets(), to.octets()].concat());
                header.extend(&self.options);
                let checksum = !sum(&header);
                header[10..12].copy_from_slice(&checksum.to_be_bytes());
                bytes.extend(header);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                bytes.extend([0x86, 0xdd, 0x60 | self.traffic_class >> 4, self.traffic_class << 4 | 5, 0x12, 0x34]);
                let extension_bytes: usize = self.extensions.iter().map(|(_, bytes)| 1 + bytes.len()).sum();
                let len = (udp_len + extension_bytes as u16).to_be_bytes();
                let mut numbers = self.extensions.iter().map(|(number, _)| *number).chain([self.protocol]);
                let first = numbers.next().unwrap_or(self.protocol);
                bytes.extend([&len[..], &[first, 64], &from.octets(), &to.octets()].concat());
                for ((_, rest), next) in self.extensions.iter().zip(numbers) {
                    bytes.push(next);
                    bytes.extend(rest);
                }
            }
            _ => unreachable!("one family"),
        }
        for number in [self.from.port(), self.to.port(), udp_len, 0] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }
}

/// A router's or host's report about an undeliverable packet.
#[derive(Clone, Copy, Debug)]
pub enum Undeliverable {
    /// "Destination unreachable" with a code (RFC 792, RFC 4443 §3.1).
    Unreachable(u8),
    /// A link on the path takes only packets of up to this many bytes (RFC 1191 §4, RFC 4443 §3.2).
    TooBig(u16),
}

impl Undeliverable {
    /// Returns the bytes of the ICMP message that reports this about `packet` and quotes it up to the end of the UDP
    /// header. The kernel, which knows the addresses, fills in the checksum of ICMPv6.
    pub fn bytes(self, packet: &Frame) -> Vec<u8> {
        let is_v4 = packet.from.is_ipv4();
        let (kind, code, mtu) = match (self, is_v4) {
            (Self::Unreachable(code), true) => (3, code, 0),
            (Self::Unreachable(code), false) => (1, code, 0),
            (Self::TooBig(mtu), true) => (3, 4, mtu),
            (Self::TooBig(mtu), false) => (2, 0, mtu),
        };
        let mut message = vec![kind, code, 0, 0, 0, 0];
        message.extend(mtu.to_be_bytes());
        let headers = if is_v4 { 20 + 8 } else { 40 + 8 };
        message.extend(&Frame { vlans: Vec::new(), ..packet.clone() }.bytes()[14..14 + headers]);
        if is_v4 {
            let checksum = !sum(&message);
            message[2..4].copy_from_slice(&checksum.to_be_bytes());
        }
        message
    }
}

/// Computes the sum of the Internet checksum (RFC 1071): `0xffff` over a header whose checksum is right.
pub fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
