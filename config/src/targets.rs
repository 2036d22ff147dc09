//! Which targets a relay may reach: a pure decision about a name, an address and a port.
//!
//! The rules, in the order in which they apply; the order of entries within a list never matters:
//!
//! 1. An entry of `deny` that matches refuses. Nothing overrides it.
//! 2. An address in a refused range (see [`SpecialRange`]) needs an entry of `allow` that names that range or a part of it;
//!    a wider entry, such as `0.0.0.0/0`, does not open it, and neither does a name.
//! 3. Any other address of this host, or in `own`, needs an entry of `allow` that is exactly this address.
//! 4. Any other target is allowed by an entry of `allow` that matches; without one, `unlisted` decides, and the
//!    default ports.
//!
//! An entry without ports means the default ports of its protocol in `allow`, and all ports in `deny`. An IPv6 address
//! that embeds IPv4 addresses, in one of the known forms or under one of `nat64_prefixes`, is judged by the embedded
//! ones; `deny` checks both.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use ipnet::IpNet;

pub use self::range::{SpecialRange, judged_by};
use crate::section::words;
pub use crate::{
    nat64::Nat64Prefix,
    pattern::{NotAPattern, Pattern},
};

mod range;
#[cfg(test)]
mod tests;

words! {
    /// How a target is reached.
    pub enum Protocol {
        /// By a UDP tunnel (RFC 9298).
        Udp = "udp",
        /// By CONNECT (RFC 9114 §4.4).
        Tcp = "tcp",
    }
}

words! {
    /// What happens to a target that neither list matches.
    #[derive(Default)]
    pub enum Unlisted {
        /// It is allowed at the default ports.
        #[default]
        Allow = "allow",
        /// It is refused.
        Deny = "deny",
    }
}

/// What the operator allows and denies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRules {
    /// Entries that open a target; see the module for what they can open.
    pub allow: Vec<TargetRule>,
    /// Entries that refuse a target, whatever `allow` says.
    pub deny: Vec<TargetRule>,
    /// Networks whose addresses lead to this host, besides the addresses that it knows itself: public addresses that a
    /// router in front of it translates, for instance.
    pub own: Vec<IpNet>,
    /// The prefixes under which the network translates IPv6 to IPv4 (RFC 6052), besides `64:ff9b::/96`.
    pub nat64_prefixes: Vec<Nat64Prefix>,
    /// What happens to targets that neither list matches.
    pub unlisted: Unlisted,
    /// UDP ports unless an entry says otherwise.
    pub udp_ports: Ports,
    /// TCP ports unless an entry says otherwise.
    pub tcp_ports: Ports,
}

/// One entry of `allow` or `deny`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRule {
    /// The addresses or names that it matches.
    pub to: Pattern,
    /// The protocol that it matches; `None` for both.
    pub protocol: Option<Protocol>,
    /// The ports that it matches; the module says what `None` means.
    pub ports: Option<Ports>,
}

/// Why a target is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Denied {
    /// An entry of `deny` matches it.
    #[error("the target is on the deny list")]
    Listed,
    /// The address is in a range that is refused unless `allow` opens it.
    #[error("the target's address is {}", .0.label())]
    Range(SpecialRange),
    /// The address belongs to the relay's host.
    #[error("the target's address belongs to this host")]
    OwnAddress,
    /// The port is not allowed for this target.
    #[error("the target's port is not allowed")]
    Port,
    /// No entry of `allow` matches, and unlisted targets are refused.
    #[error("the target is not on the allow list")]
    Unlisted,
}

impl TargetRules {
    /// Decides about the address to connect to; `name` is the name that it was resolved from, if any. `is_own_address`
    /// returns whether `ip`, or an address that it is [judged by](Self::judged_by), belongs to this host.
    ///
    /// # Errors
    /// The first rule that refuses the target.
    pub fn check(
        &self,
        protocol: Protocol,
        name: Option<&str>,
        ip: IpAddr,
        port: u16,
        is_own_address: bool,
    ) -> Result<(), Denied> {
        let judged = self.judged_by(ip);
        let is_own_address = is_own_address || judged.clone().chain([ip]).any(|ip| self.is_own(ip));
        let denied = |rule: &TargetRule| {
            rule.is_about(protocol, port)
                && (rule.to.covers_name(name) || judged.clone().chain([ip]).any(|ip| rule.to.covers(ip)))
        };
        if self.deny.iter().any(denied) {
            return Err(Denied::Listed);
        }
        judged.clone().try_for_each(|ip| self.check_address(protocol, name, ip, port, is_own_address))
    }

    /// Refuses the targets that can be refused before `name` is resolved, so that hopeless requests cost no query.
    ///
    /// # Errors
    /// The first rule that refuses every address that `name` could have.
    pub fn check_name(&self, protocol: Protocol, name: &str, port: u16) -> Result<(), Denied> {
        if self.deny.iter().any(|rule| rule.is_about(protocol, port) && rule.to.covers_name(Some(name))) {
            return Err(Denied::Listed);
        }
        let allowing = |rule: &TargetRule| matches!(rule.to, Pattern::Network(_)) || rule.to.covers_name(Some(name));
        self.decide(protocol, port, allowing, None)
    }

    /// Returns the addresses to check before `ip` is allowed: the addresses from [`judged_by`], and the IPv4 address that `ip` embeds under
    /// one of `nat64_prefixes`.
    pub fn judged_by(&self, ip: IpAddr) -> impl Iterator<Item = IpAddr> + Clone + use<> {
        judged_by(self.translated(ip).map_or(ip, IpAddr::V4))
    }

    /// Returns the IPv4 address that `ip` embeds under one of `nat64_prefixes`.
    #[must_use]
    pub fn translated(&self, ip: IpAddr) -> Option<Ipv4Addr> {
        match ip {
            IpAddr::V6(v6) => self.nat64_prefixes.iter().find_map(|prefix| prefix.embedded(v6)),
            IpAddr::V4(_) => None,
        }
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        self.own.iter().any(|network| network.contains(&ip))
    }

    /// Returns whether every address that `pattern` matches is judged by other addresses, so that the pattern can open
    /// nothing.
    pub(crate) fn only_embeds(&self, pattern: &Pattern) -> bool {
        let embeds = |ip| self.judged_by(ip).any(|judged| judged != ip);
        matches!(pattern, Pattern::Network(network) if embeds(network.network()))
    }

    fn check_address(
        &self,
        protocol: Protocol,
        name: Option<&str>,
        ip: IpAddr,
        port: u16,
        is_own_address: bool,
    ) -> Result<(), Denied> {
        if let Some((extent, range)) = range::refused(ip) {
            let opens = |rule: &TargetRule| rule.to.covers(ip) && rule.to.is_within(&extent);
            self.decide(protocol, port, opens, Some(Denied::Range(range)))?;
            if range == SpecialRange::Loopback {
                return Ok(());
            }
        }
        if is_own_address {
            let opens = |rule: &TargetRule| rule.to.is_within(&IpNet::from(ip));
            return self.decide(protocol, port, opens, Some(Denied::OwnAddress));
        }
        self.decide(protocol, port, |rule| rule.to.covers(ip) || rule.to.covers_name(name), None)
    }

    /// Applies the entries of `allow` that `matches` selects, by protocol and port. If none applies, returns `closed`
    /// for a target that only `allow` can open; with `None`, the rule for unlisted targets decides.
    fn decide(
        &self,
        protocol: Protocol,
        port: u16,
        matches: impl Fn(&TargetRule) -> bool,
        closed: Option<Denied>,
    ) -> Result<(), Denied> {
        let defaults = match protocol {
            Protocol::Udp => &self.udp_ports,
            Protocol::Tcp => &self.tcp_ports,
        };
        let mut listed = self.allow.iter().filter(|rule| rule.is_for(protocol) && matches(rule)).peekable();
        let otherwise = match (closed, self.unlisted) {
            _ if listed.peek().is_some() => Denied::Port,
            (Some(closed), _) => closed,
            (None, Unlisted::Deny) => Denied::Unlisted,
            (None, Unlisted::Allow) => Denied::Port,
        };
        let by_default = closed.is_none() && self.unlisted == Unlisted::Allow && defaults.contains(port);
        let allowed = by_default || listed.any(|rule| rule.ports.as_ref().unwrap_or(defaults).contains(port));
        if allowed { Ok(()) } else { Err(otherwise) }
    }
}

impl Default for TargetRules {
    /// Public addresses only; UDP 53, 443 and 1024 up; TCP 80 and 443.
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            deny: Vec::new(),
            own: Vec::new(),
            nat64_prefixes: Vec::new(),
            unlisted: Unlisted::Allow,
            udp_ports: Ports(vec![53..=53, 443..=443, 1024..=u16::MAX]),
            tcp_ports: Ports(vec![80..=80, 443..=443]),
        }
    }
}

impl TargetRule {
    fn is_for(&self, protocol: Protocol) -> bool {
        self.protocol.is_none_or(|only| only == protocol)
    }

    fn is_about(&self, protocol: Protocol, port: u16) -> bool {
        self.is_for(protocol) && self.ports.as_ref().is_none_or(|ports| ports.contains(port))
    }
}

impl From<Pattern> for TargetRule {
    fn from(to: Pattern) -> Self {
        Self { to, protocol: None, ports: None }
    }
}

impl fmt::Display for TargetRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to)?;
        if let Some(protocol) = self.protocol {
            write!(f, " {protocol}")?;
        }
        match &self.ports {
            Some(ports) => write!(f, " port {ports}"),
            None => Ok(()),
        }
    }
}

/// A set of ports, none of them 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports(pub(crate) Vec<RangeInclusive<u16>>);

impl Ports {
    /// Every port except 0.
    #[must_use]
    pub fn all() -> Self {
        Self(vec![1..=u16::MAX])
    }

    /// Returns whether `port` is in the set.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (index, range) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let (first, last) = (range.start(), range.end());
            if first == last { write!(f, "{separator}{first}") } else { write!(f, "{separator}{first}-{last}") }?;
        }
        Ok(())
    }
}
