//! The edge role: the paths between this host and its relays, over which local traffic is spread.

use std::{net::IpAddr, time::Duration};

use masque::template::Template;

use crate::{
    error::Problem,
    kernel::KernelDevice,
    policy::rate,
    section::{PathName, Section},
    uplink::Nameable,
};

/// The most paths that an edge may have.
pub const MAX_PATHS: usize = 8;

/// A path: its local end, from which packets leave, and the relay at its other end. All local addresses use all paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSettings {
    /// Its name; the rules of [`ClassSettings::name`](sched::class::ClassSettings::name) apply.
    pub name: String,
    /// The network device for outgoing packets, whatever the routes prefer.
    pub interface: Option<KernelDevice>,
    /// The address of this host from which packets leave. It chooses no device by itself: routing rules must do that.
    pub address: Option<IpAddr>,
    /// The relay at its end, in place of the one that a local address names.
    pub relay: Option<Template>,
    /// The name of the [`Hop`](crate::hop::Hop) through which the relay at its end is reached. It replaces the hop that
    /// a local address names.
    pub via: Option<String>,
    /// How much earlier a transfer must end over this path than over another for this one to be chosen.
    pub cost: Duration,
    /// Its speed in bytes per second, if known; otherwise it is measured.
    pub rate: Option<u64>,
}

/// Walks through a path; its hop must be among `names`.
pub(crate) fn walk(section: &mut Section<'_>, of: Option<&PathSettings>, names: Nameable<'_>) -> Option<PathSettings> {
    let name = section.require("name", of.map(|of| PathName::from(of.name.clone())));
    let interface = section.optional("interface", of.and_then(|of| of.interface.clone()));
    let address = section.optional("address", of.and_then(|of| of.address));
    let relay = section.optional("relay", of.and_then(|of| of.relay.clone()));
    let via = names.hop_in(section, of.and_then(|of| of.via.clone()));
    let is_plain = interface.is_none() && address.is_none() && relay.is_none() && !section.has("via");
    if is_plain && name.is_some() {
        let cause = "the path has no interface, address, relay or hop";
        let remedy = "add one of interface, address, relay and via";
        let from = section.keys(&["interface", "address", "relay", "via"]);
        section.refuse_by("name", Problem::Contradiction { cause, remedy }, from);
    }
    let cost = section.millis("cost_ms", 0..=60_000, of.map_or(Duration::ZERO, |of| of.cost));
    let rate = rate(section, "rate", of.and_then(|of| of.rate));
    Some(PathSettings { name: name?.into(), interface, address, relay, via, cost, rate })
}
