//! The target of a tunnel: a host and a port, from a proxy request (RFC 9298 §3, RFC 9110 §9.3.6).
//!
//! **Invariant:** a [`Host::Name`] is a DNS name that no resolver interprets as an address, so that a target
//! checked as a name cannot turn out to be `127.1` in disguise.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use thiserror::Error;

/// The longest DNS name in bytes, without the trailing dot (RFC 1035 §2.3.4).
const MAX_NAME_BYTES: usize = 253;

/// The longest label of a DNS name in bytes (RFC 1035 §2.3.4).
const MAX_LABEL_BYTES: usize = 63;

/// A host named by a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// A literal address.
    Ip(IpAddr),
    /// A DNS name: letters, digits and hyphens, in lower case, without the trailing dot.
    Name(String),
}

/// A host and a port, 1 to 65535. Displays in the form of an authority: `[2001:db8::1]:443`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The host.
    pub host: Host,
    /// The port, never 0.
    pub port: u16,
}

/// Why a text is not a target.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidTarget {
    /// A percent sign without two hexadecimal digits, or a character that has to be percent-encoded.
    #[error("the target is not percent-encoded correctly")]
    Encoding,
    /// No host.
    #[error("the target host is empty")]
    EmptyHost,
    /// Neither an address nor a DNS name. Scoped IPv6 addresses give this error (RFC 9298 §3).
    #[error("the target host is neither an IP address nor a DNS name")]
    Host,
    /// A name that ends in a number, which some resolvers read as an IPv4 address.
    #[error("the target host ends in a number but is no IPv4 address")]
    NumericName,
    /// No port, or one that is not a decimal number from 1 to 65535.
    #[error("the target port is not a number from 1 to 65535")]
    Port,
}

impl Target {
    /// Parses `host:port` as in the `:authority` of a CONNECT request; IPv6 addresses are in brackets, and the
    /// port is mandatory (RFC 9110 §7.1 and §9.3.6).
    ///
    /// # Errors
    /// See [`InvalidTarget`]. User information is refused as part of the host.
    pub fn from_authority(authority: &str) -> Result<Self, InvalidTarget> {
        let (host, port) = authority.rsplit_once(':').ok_or(InvalidTarget::Port)?;
        Ok(Self { host: Host::from_authority(host)?, port: port_from(port)? })
    }

    /// Parses the authority of an `https` URI, in which a missing port means 443 (RFC 9110 §4.2.2).
    ///
    /// # Errors
    /// See [`InvalidTarget`].
    pub fn from_https_authority(authority: &str) -> Result<Self, InvalidTarget> {
        match authority.rsplit_once(':') {
            Some((_, port)) if !port.ends_with(']') => Self::from_authority(authority),
            _ => Ok(Self { host: Host::from_authority(authority)?, port: 443 }),
        }
    }

    /// Parses the variables of a URI template after percent-decoding; IPv6 addresses have no brackets (RFC 9298
    /// §3).
    ///
    /// # Errors
    /// See [`InvalidTarget`].
    pub fn from_variables(host: &str, port: &str) -> Result<Self, InvalidTarget> {
        Ok(Self { host: Host::parse(host)?, port: port_from(port)? })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

impl Host {
    /// Parses an IPv4 or IPv6 address or a DNS name, without brackets.
    ///
    /// # Errors
    /// See [`InvalidTarget`].
    pub fn parse(host: &str) -> Result<Self, InvalidTarget> {
        if let Ok(address) = host.parse() {
            return Ok(Self::Ip(address));
        }
        let name = host.strip_suffix('.').unwrap_or(host);
        if host.is_empty() {
            return Err(InvalidTarget::EmptyHost);
        }
        if name.len() > MAX_NAME_BYTES || !name.split('.').all(is_label) {
            return Err(InvalidTarget::Host);
        }
        if name.rsplit('.').next().is_some_and(is_number) {
            return Err(InvalidTarget::NumericName);
        }
        Ok(Self::Name(name.to_ascii_lowercase()))
    }

    /// Parses the host of an authority: IPv6 addresses, and only these, are in brackets (RFC 3986 §3.2.2).
    fn from_authority(host: &str) -> Result<Self, InvalidTarget> {
        match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(address) => {
                address.parse::<Ipv6Addr>().map(|address| Self::Ip(address.into())).map_err(|_| InvalidTarget::Host)
            }
            None if host.contains(':') => Err(InvalidTarget::Host),
            None => Self::parse(host),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// Whether `label` is valid between the dots of a host name (RFC 952, RFC 1123 §2.1).
fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Whether a lenient resolver reads `label` as part of an IPv4 address: decimal, octal or hexadecimal.
fn is_number(label: &str) -> bool {
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits(label) || label.strip_prefix("0x").or(label.strip_prefix("0X")).is_some_and(hexadecimal)
}

/// Parses a port: digits only, 1 to 65535.
fn port_from(port: &str) -> Result<u16, InvalidTarget> {
    match port.parse() {
        Ok(number) if number > 0 && !port.starts_with('+') => Ok(number),
        _ => Err(InvalidTarget::Port),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn name(name: &str) -> Host {
        Host::Name(name.into())
    }

    #[test]
    fn hosts_are_addresses_or_names() {
        for (text, expected) in [
            ("192.0.2.1", Ok(Host::Ip(Ipv4Addr::new(192, 0, 2, 1).into()))),
            ("2001:db8::1", Ok(Host::Ip("2001:db8::1".parse().unwrap()))),
            ("::ffff:127.0.0.1", Ok(Host::Ip("::ffff:127.0.0.1".parse().unwrap()))),
            ("Example.ORG", Ok(name("example.org"))),
            ("example.org.", Ok(name("example.org"))),
            ("localhost", Ok(name("localhost"))),
            ("xn--bcher-kva.example", Ok(name("xn--bcher-kva.example"))),
            ("1.2.3.4.in-addr.arpa", Ok(name("1.2.3.4.in-addr.arpa"))),
            ("0xcafe.example", Ok(name("0xcafe.example"))),
            ("", Err(InvalidTarget::EmptyHost)),
            (".", Err(InvalidTarget::Host)),
            ("example..org", Err(InvalidTarget::Host)),
            (".example.org", Err(InvalidTarget::Host)),
            ("example.org..", Err(InvalidTarget::Host)),
            ("-a.example", Err(InvalidTarget::Host)),
            ("a-.example", Err(InvalidTarget::Host)),
            ("a_b.example", Err(InvalidTarget::Host)),
            ("bücher.example", Err(InvalidTarget::Host)),
            ("a b", Err(InvalidTarget::Host)),
            ("user@example.org", Err(InvalidTarget::Host)),
            ("example.org\0", Err(InvalidTarget::Host)),
            ("[2001:db8::1]", Err(InvalidTarget::Host)),
            ("fe80::1%eth0", Err(InvalidTarget::Host)),
            ("fe80::1%251", Err(InvalidTarget::Host)),
            ("*", Err(InvalidTarget::Host)),
        ] {
            assert_eq!(Host::parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn addresses_in_disguise_are_no_names() {
        for text in [
            "127.1",
            "0x7f.1",
            "017700000001",
            "2130706433",
            "0x7f000001",
            "0X7F.0.0.0X1",
            "127.0.0.1.",
            "127.0.0.01",
            "0177.0.0.1",
            "256.1.1.1",
            "1.2.3.4.5",
            "example.0x",
            "example.1",
        ] {
            assert_eq!(Host::parse(text), Err(InvalidTarget::NumericName), "{text:?}");
        }
    }

    #[test]
    fn names_end_at_253_bytes_and_labels_at_63() {
        let label = |len| "a".repeat(len);
        let (long, longer) = ([label(63), label(63), label(63), label(61)].join("."), label(64));
        assert_eq!(Host::parse(&long), Ok(name(&long)));
        assert_eq!(Host::parse(&format!("{long}.")), Ok(name(&long)));
        assert_eq!(Host::parse(&format!("{long}a")), Err(InvalidTarget::Host));
        assert_eq!(Host::parse(&longer), Err(InvalidTarget::Host));
    }

    #[test]
    fn ports_are_decimal_numbers_from_1_to_65535() {
        for (text, expected) in [("1", Some(1)), ("65535", Some(65535)), ("0443", Some(443))] {
            assert_eq!(port_from(text).ok(), expected);
        }
        for text in ["", "0", "00", "65536", "-1", "+1", " 1", "1 ", "0x50", "http", "١"] {
            assert_eq!(port_from(text), Err(InvalidTarget::Port), "{text:?}");
        }
    }

    #[test]
    fn connect_needs_host_and_port_rfc_9110_9_3_6() {
        for (text, expected) in [
            ("example.org:443", Ok("example.org:443")),
            ("192.0.2.1:1", Ok("192.0.2.1:1")),
            ("[2001:DB8::1]:443", Ok("[2001:db8::1]:443")),
            ("example.org", Err(InvalidTarget::Port)),
            ("example.org:", Err(InvalidTarget::Port)),
            ("[2001:db8::1]", Err(InvalidTarget::Host)),
            ("", Err(InvalidTarget::Port)),
            (":443", Err(InvalidTarget::EmptyHost)),
            ("[]:443", Err(InvalidTarget::Host)),
            ("2001:db8::1:443", Err(InvalidTarget::Host)),
            ("[192.0.2.1]:443", Err(InvalidTarget::Host)),
            ("[example.org]:443", Err(InvalidTarget::Host)),
            ("[fe80::1%25eth0]:443", Err(InvalidTarget::Host)),
            ("user@example.org:443", Err(InvalidTarget::Host)),
            ("https://example.org:443", Err(InvalidTarget::Host)),
        ] {
            let parsed = Target::from_authority(text).map(|target| target.to_string());
            assert_eq!(parsed, expected.map(str::to_owned), "{text:?}");
        }
    }

    #[test]
    fn https_authorities_default_to_port_443() {
        for (text, expected) in [
            ("Relay.example", "relay.example:443"),
            ("relay.example:8443", "relay.example:8443"),
            ("[::1]", "[::1]:443"),
        ] {
            assert_eq!(Target::from_https_authority(text).unwrap().to_string(), expected);
        }
        assert_eq!(Target::from_https_authority("relay.example:"), Err(InvalidTarget::Port));
    }

    /// Targets of every kind.
    pub(crate) fn targets() -> impl Strategy<Value = Target> {
        let host = prop_oneof![
            any::<Ipv4Addr>().prop_map(|address| Host::Ip(address.into())),
            any::<Ipv6Addr>().prop_map(|address| Host::Ip(address.into())),
            "([a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?\\.){0,3}[a-z][a-z0-9]{0,8}".prop_map(Host::Name),
        ];
        (host, 1..=u16::MAX).prop_map(|(host, port)| Target { host, port })
    }

    proptest! {
        #[test]
        fn a_displayed_target_parses_back(target in targets()) {
            prop_assert_eq!(Target::from_authority(&target.to_string()), Ok(target.clone()));
            prop_assert_eq!(Target::from_variables(&target.host.to_string(), &target.port.to_string()), Ok(target));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = Target::from_authority(&text);
            let _ = Target::from_https_authority(&text);
            let _ = Target::from_variables(&text, "1");
        }
    }
}
