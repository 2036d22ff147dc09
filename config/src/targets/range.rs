//! The address ranges that no target may be in unless the operator opens them, and the IPv6 forms that embed an IPv4
//! address.
//!
//! Sources: the IANA special-purpose address registries (RFC 6890 and its updates), RFC 4291 §2.5.5 (IPv4-mapped and
//! -compatible), RFC 2765 (IPv4-translated), RFC 6052 and RFC 8215 (NAT64), RFC 3056 (6to4), RFC 4380 §4 (Teredo).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Why an address range is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialRange {
    /// 0.0.0.0/8 and `::`.
    Unspecified,
    /// 127.0.0.0/8 and `::1`.
    Loopback,
    /// 10.0.0.0/8, 172.16.0.0/12 and 192.168.0.0/16.
    Private,
    /// 100.64.0.0/10, used behind carrier-grade NAT.
    Shared,
    /// 169.254.0.0/16 (cloud metadata services live there) and fe80::/10.
    LinkLocal,
    /// fc00::/7.
    UniqueLocal,
    /// fec0::/10, deprecated.
    SiteLocal,
    /// Addresses reserved for documentation.
    Documentation,
    /// 198.18.0.0/15 and 2001:2::/48.
    Benchmarking,
    /// 224.0.0.0/4 and ff00::/8.
    Multicast,
    /// 255.255.255.255.
    Broadcast,
    /// 100::/64, whose packets are meant to be dropped.
    Discard,
    /// 168.63.129.16, where a cloud's hosts serve their guests, among other things with metadata and keys: the only
    /// such address outside the other ranges. The addresses of other clouds are link-local, shared, unique-local or
    /// reserved.
    CloudHost,
    /// 64:ff9b:1::/48: each network decides where it embeds the IPv4 address, so all of it is refused unless
    /// `nat64_prefixes` names the prefix.
    LocalTranslation,
    /// Everything else that is not ordinary unicast.
    Reserved,
}

impl SpecialRange {
    /// Returns the name of the range for metrics and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unspecified",
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::Shared => "shared",
            Self::LinkLocal => "link_local",
            Self::UniqueLocal => "unique_local",
            Self::SiteLocal => "site_local",
            Self::Documentation => "documentation",
            Self::Benchmarking => "benchmarking",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Discard => "discard",
            Self::CloudHost => "cloud_host",
            Self::LocalTranslation => "local_translation",
            Self::Reserved => "reserved",
        }
    }
}

/// The first row that contains an address decides.
const REFUSED: &[(IpNet, SpecialRange)] = &[
    (v4([0, 0, 0, 0], 8), SpecialRange::Unspecified),
    (v4([10, 0, 0, 0], 8), SpecialRange::Private),
    (v4([100, 64, 0, 0], 10), SpecialRange::Shared),
    (v4([127, 0, 0, 0], 8), SpecialRange::Loopback),
    (v4([168, 63, 129, 16], 32), SpecialRange::CloudHost),
    (v4([169, 254, 0, 0], 16), SpecialRange::LinkLocal),
    (v4([172, 16, 0, 0], 12), SpecialRange::Private),
    (v4([192, 0, 0, 0], 24), SpecialRange::Reserved),
    (v4([192, 0, 2, 0], 24), SpecialRange::Documentation),
    (v4([192, 88, 99, 0], 24), SpecialRange::Reserved),
    (v4([192, 168, 0, 0], 16), SpecialRange::Private),
    (v4([198, 18, 0, 0], 15), SpecialRange::Benchmarking),
    (v4([198, 51, 100, 0], 24), SpecialRange::Documentation),
    (v4([203, 0, 113, 0], 24), SpecialRange::Documentation),
    (v4([224, 0, 0, 0], 4), SpecialRange::Multicast),
    (v4([255, 255, 255, 255], 32), SpecialRange::Broadcast),
    (v4([240, 0, 0, 0], 4), SpecialRange::Reserved),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), SpecialRange::Unspecified),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), SpecialRange::Loopback),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), SpecialRange::LocalTranslation),
    (v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64), SpecialRange::Discard),
    (v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), SpecialRange::Benchmarking),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), SpecialRange::Documentation),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), SpecialRange::Reserved),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), SpecialRange::Documentation),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), SpecialRange::UniqueLocal),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), SpecialRange::LinkLocal),
    (v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), SpecialRange::SiteLocal),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), SpecialRange::Multicast),
    // The rest outside 2000::/3 is not assigned to unicast (RFC 4291 §2.4).
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 3), SpecialRange::Reserved),
    (v6([0x4000, 0, 0, 0, 0, 0, 0, 0], 2), SpecialRange::Reserved),
    (v6([0x8000, 0, 0, 0, 0, 0, 0, 0], 1), SpecialRange::Reserved),
];

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix))
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix))
}

/// Returns the refused range that contains `ip`, and its extent. Does not look for embedded addresses.
pub(super) fn refused(ip: IpAddr) -> Option<(IpNet, SpecialRange)> {
    REFUSED.iter().find(|(network, _)| network.contains(&ip)).copied()
}

/// Returns the addresses to check before `ip` is allowed: the IPv4 addresses that an IPv6 form embeds (for Teredo, the
/// server's and the client's), otherwise `ip` itself. Does not know a network's own prefixes; see
/// [`TargetRules::judged_by`](super::TargetRules::judged_by).
pub fn judged_by(ip: IpAddr) -> impl Iterator<Item = IpAddr> + Clone {
    let [first, second] = match ip {
        IpAddr::V6(v6) => embedded(v6),
        IpAddr::V4(_) => [None, None],
    };
    let first = first.map_or(ip, IpAddr::V4);
    std::iter::once(first).chain(second.map(IpAddr::V4))
}

fn embedded(ip: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let join = |high: u16, low: u16| Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => [None, None],
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => [join(high, low), None],
        [0x2001, 0, high, low, _, _, client_high, client_low] => [join(high, low), join(!client_high, !client_low)],
        _ => [None, None],
    }
}
