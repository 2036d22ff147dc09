//! The patterns of rules for targets: networks, addresses, names and name suffixes.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use masque::target::Host;

/// The addresses or names that an entry matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// A network, or a single address as a network of full length.
    Network(IpNet),
    /// Exactly this name, in lower case.
    Name(String),
    /// Every name below this one, in lower case, without the leading dot; not the name itself.
    Suffix(String),
}

impl Pattern {
    pub(crate) fn covers(&self, ip: IpAddr) -> bool {
        matches!(self, Self::Network(network) if network.contains(&ip))
    }

    pub(crate) fn is_within(&self, extent: &IpNet) -> bool {
        matches!(self, Self::Network(network) if extent.contains(network))
    }

    /// Whether the entry matches a host, whose name is not resolved.
    #[must_use]
    pub fn covers_host(&self, host: &Host) -> bool {
        match host {
            Host::Ip(ip) => self.covers(*ip),
            Host::Name(name) => self.covers_name(Some(name)),
        }
    }

    /// Compares case-insensitively and without the dot that may end a fully qualified name.
    pub(crate) fn covers_name(&self, name: Option<&str>) -> bool {
        let Some(name) = name.map(|name| name.strip_suffix('.').unwrap_or(name)) else { return false };
        match self {
            Self::Network(_) => false,
            Self::Name(own) => own.eq_ignore_ascii_case(name),
            Self::Suffix(suffix) => {
                name.len().checked_sub(suffix.len()).and_then(|start| name.split_at_checked(start)).is_some_and(
                    |(below, end)| end.eq_ignore_ascii_case(suffix) && below.len() > 1 && below.ends_with('.'),
                )
            }
        }
    }
}

/// Why a text is not a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPattern {
    /// A network with bits set after its prefix.
    #[error(
        "{0} has bits set after its prefix; write {net} for the network, or {address} for the address",
        net = .0.trunc(),
        address = .0.addr()
    )]
    HostBits(IpNet),
    /// The text has another form.
    #[error("not a network, an address, a name or a name suffix")]
    Neither,
}

impl FromStr for Pattern {
    type Err = NotAPattern;

    /// Reads `10.0.0.0/8`, `2001:db8::1`, `example.org`, `*.example.org` or `.example.org`.
    fn from_str(text: &str) -> Result<Self, NotAPattern> {
        if let Ok(network) = text.parse::<IpNet>() {
            // Bits behind the prefix are probably a mistake.
            return match network == network.trunc() {
                true => Ok(Self::Network(network)),
                false => Err(NotAPattern::HostBits(network)),
            };
        }
        let suffix = text.strip_prefix("*.").or_else(|| text.strip_prefix('.'));
        match (Host::parse(suffix.unwrap_or(text)), suffix) {
            (Ok(Host::Name(name)), None) => Ok(Self::Name(name)),
            (Ok(Host::Name(name)), Some(_)) => Ok(Self::Suffix(name)),
            (Ok(Host::Ip(ip)), None) => Ok(Self::Network(ip.into())),
            _ => Err(NotAPattern::Neither),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(network) if network.prefix_len() == network.max_prefix_len() => network.addr().fmt(f),
            Self::Network(network) => network.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Suffix(suffix) => write!(f, "*.{suffix}"),
        }
    }
}
