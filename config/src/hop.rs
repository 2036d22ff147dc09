//! The edge role: relays through which other relays are reached, so that none of them knows both ends.

use crate::{
    path::PathSettings,
    policy::Policy,
    section::Section,
    uplink::{self, Nameable, UplinkSettings},
};

/// The most hops of a configuration.
pub const MAX_HOPS: usize = 16;

/// A relay through which another relay is reached: connections to that other relay run in a UDP tunnel of this one
/// (RFC 9298). This relay sees the other's address but not the content; the other sees only this relay's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Its name; the rules of [`ClassSettings::name`](sched::class::ClassSettings::name) apply.
    pub name: String,
    /// Its relay's address, how that relay is verified, and the client's credentials; it may use another hop.
    pub uplink: UplinkSettings,
}

/// Reads the hops and refuses one that is reached through itself. Also returns the names of all hops, including those
/// with mistakes.
pub(crate) fn read<'a>(root: &mut Section<'a>, policy: &Policy) -> (Vec<Hop>, Vec<&'a str>) {
    let mut sections = root.named_sections("hop", None);
    if sections.len() > MAX_HOPS {
        root.refuse_excess("hop", "there are more than 16 hops", "remove some");
        sections.truncate(MAX_HOPS);
    }
    let hops = sections.names();
    let names = Nameable { policy, hops: &hops };
    let read = sections.read_chained("via", |name, section| {
        let uplink = uplink::walk(section, None, names)?;
        Some(Hop { name: name.to_owned(), uplink })
    });
    (read.into_iter().flatten().collect(), hops)
}

/// Returns the hop `name` and all hops that its packets pass, `name` first: the way to a relay behind it, from its end.
#[must_use]
pub fn chain<'a>(hops: &'a [Hop], name: &str) -> Vec<&'a Hop> {
    let mut chain: Vec<&Hop> = Vec::new();
    let mut next = Some(name);
    while let Some(hop) = next.and_then(|name| hops.iter().find(|hop| hop.name == name)) {
        // A valid configuration has no cycle.
        if chain.len() == hops.len() {
            break;
        }
        chain.push(hop);
        next = hop.uplink.via.as_deref();
    }
    chain
}

/// Returns the hops that packets to these relays pass on these paths, each hop once. Without paths, the relays' own hop
/// counts.
#[must_use]
pub fn passed<'a>(hops: &'a [Hop], uplink: &UplinkSettings, paths: &[PathSettings]) -> Vec<&'a Hop> {
    let own = uplink.via.as_deref();
    let of_paths = paths.iter().map(|path| path.via.as_deref().or(own));
    let vias = of_paths.chain(paths.is_empty().then_some(own)).flatten();
    let mut passed: Vec<&Hop> = Vec::new();
    for hop in vias.flat_map(|name| chain(hops, name)) {
        if !passed.contains(&hop) {
            passed.push(hop);
        }
    }
    passed
}
