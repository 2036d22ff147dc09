//! The edge role: relays through which other relays are reached, so that none of them knows both ends.

use crate::error::Problem;
use crate::policy::Policy;
use crate::section::Section;
use crate::uplink::{self, Nameable, UplinkSettings};

/// The most hops that there may be.
pub const MAX_HOPS: usize = 16;

/// A relay through which another relay is reached: connections to that one run in a UDP tunnel of this one (RFC 9298), which
/// sees their relay's address and none of what they carry, while that one sees this one's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// What it is called: as a class may be, see [`Class::name`](crate::policy::Class::name).
    pub name: String,
    /// Where its relay is, why that is believed and what it is shown; perhaps reached through another hop.
    pub uplink: UplinkSettings,
}

/// Reads the hops, none of which is reached through itself; returns their names as well, of those too that cannot be read.
pub(crate) fn read<'a>(root: &mut Section<'a>, policy: &Policy) -> (Vec<Hop>, Vec<&'a str>) {
    let mut sections = root.named_sections("hop", None);
    if sections.len() > MAX_HOPS {
        let cause = "there are more than 16 hops";
        root.refuse("hop", Problem::Contradiction { cause, remedy: "leave some out" });
        sections.truncate(MAX_HOPS);
    }
    let hops = sections.names();
    let names = Nameable { policy, hops: &hops };
    let read = sections.read_chained("via", |name, section| {
        let uplink = walk(section, None, names)?;
        Some(Hop { name: name.to_owned(), uplink })
    });
    (read.into_iter().flatten().collect(), hops)
}

/// Walks through the keys of a hop.
pub(crate) fn walk(
    section: &mut Section<'_>,
    of: Option<&UplinkSettings>,
    names: Nameable<'_>,
) -> Option<UplinkSettings> {
    uplink::walk(section, of, names)
}

/// Returns the hops behind one of a name, that one first: the way that packets to a relay behind it take, from its end.
#[must_use]
pub fn chain<'a>(hops: &'a [Hop], name: &str) -> Vec<&'a Hop> {
    let mut chain: Vec<&Hop> = Vec::new();
    let mut next = Some(name);
    while let Some(hop) = next.and_then(|name| hops.iter().find(|hop| hop.name == name)) {
        // A valid configuration has no circle.
        if chain.len() == hops.len() {
            break;
        }
        chain.push(hop);
        next = hop.uplink.via.as_deref();
    }
    chain
}
