//! NAT64 prefixes, under which a network embeds IPv4 addresses in IPv6 addresses (RFC 6052).

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use ipnet::Ipv6Net;

/// The lengths that a prefix may have (RFC 6052 §2.2).
const LENGTHS: [u8; 6] = [32, 40, 48, 56, 64, 96];

/// The octet that is not part of the embedded IPv4 address and must be zero (RFC 6052 §2.2).
const RESERVED_OCTET: usize = 8;

/// A NAT64 prefix of the relay's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nat64Prefix(Ipv6Net);

impl Nat64Prefix {
    /// Returns the IPv4 address that `ip` embeds, if `ip` is under this prefix.
    #[must_use]
    pub fn embedded(&self, ip: Ipv6Addr) -> Option<Ipv4Addr> {
        if !self.0.contains(&ip) {
            return None;
        }
        let first = usize::from(self.0.prefix_len()) / 8;
        let mut octets = ip.octets().into_iter().enumerate().skip(first).filter(|(at, _)| *at != RESERVED_OCTET);
        let mut next = || octets.next().map(|(_, octet)| octet);
        Some(Ipv4Addr::new(next()?, next()?, next()?, next()?))
    }
}

/// The text is not a prefix that RFC 6052 allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an IPv6 prefix of 32, 40, 48, 56, 64 or 96 bits")]
pub struct NotAPrefix;

impl FromStr for Nat64Prefix {
    type Err = NotAPrefix;

    fn from_str(text: &str) -> Result<Self, NotAPrefix> {
        let network: Ipv6Net = text.parse().map_err(|_| NotAPrefix)?;
        let is_clean = network == network.trunc() && network.addr().octets()[RESERVED_OCTET] == 0;
        if LENGTHS.contains(&network.prefix_len()) && is_clean { Ok(Self(network)) } else { Err(NotAPrefix) }
    }
}

impl fmt::Display for Nat64Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_hides_the_address_where_rfc_6052_says() {
        // RFC 6052 §2.4, with its documentation prefixes.
        for (prefix, address) in [
            ("2001:db8::/32", "2001:db8:c000:221::"),
            ("2001:db8:100::/40", "2001:db8:1c0:2:21::"),
            ("2001:db8:122::/48", "2001:db8:122:c000:2:2100::"),
            ("2001:db8:122:300::/56", "2001:db8:122:3c0:0:221::"),
            ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100::"),
            ("2001:db8:122:344::/96", "2001:db8:122:344::192.0.2.33"),
        ] {
            let prefix: Nat64Prefix = prefix.parse().unwrap();
            assert_eq!(prefix.embedded(address.parse().unwrap()), Some(Ipv4Addr::new(192, 0, 2, 33)), "{prefix}");
            assert_eq!(prefix.embedded("2001:db9::1".parse().unwrap()), None);
        }
    }

    #[test]
    fn only_lengths_of_rfc_6052_are_prefixes() {
        for text in ["2001:db8::/33", "2001:db8::/128", "2001:db8::1/96", "2001:db8:0:0:100::/96", "10.0.0.0/32", "x"] {
            assert_eq!(text.parse::<Nat64Prefix>(), Err(NotAPrefix), "{text}");
        }
    }
}
