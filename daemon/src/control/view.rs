//! What callers see of open tunnels, connections and local addresses. Readers see no addresses of clients and targets.

use std::{sync::Arc, time::SystemTime};

use edge::roster::{self, TunnelOwner};
use pacing::path::PathState;
use quic::class::PolicyRole;
use relay::tunnels::RelayTunnel;
use relay_client::endpoint::SOMEWHERE;
use uplink::{Attempts, Line, Standpoint, Uplink};

use super::Caller;

/// The most rows of one page.
pub const PAGE: usize = 1000;

/// A local address of the edge, as the status lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedForward {
    /// The address, and in parentheses what it is for.
    pub(super) listen: String,
    /// The target of a forward.
    pub(super) target: Option<String>,
    /// The relays or paths that its traffic takes.
    pub(super) through: String,
}

impl ListedForward {
    /// Returns its text for a caller: without the target, unless the caller may see addresses.
    #[must_use]
    pub fn text(&self, caller: &Caller) -> String {
        let Self { listen, target, through } = self;
        let target = target.as_ref().map(|target| caller.shown(|| format!(" to {target}")));
        format!("{listen}{} through {through}", target.unwrap_or_default())
    }
}

/// A page of a list, ordered by ID.
#[derive(Clone, Debug)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// The ID after which the next page begins, if there is one.
    pub next: Option<u64>,
}

/// Returns the number of rows of a page for a requested `limit`; the most possible if that is 0.
pub(super) fn page_rows(limit: usize) -> usize {
    if limit == 0 { PAGE } else { limit.min(PAGE) }
}

impl<T> Page<T> {
    /// Makes a page of at most `limit` rows, by ID. Each list in `rows` has up to `limit + 1` entries, so that a row
    /// beyond the page shows that another page follows.
    pub(super) fn of(mut rows: Vec<T>, limit: usize, id: impl Fn(&T) -> u64) -> Self {
        rows.sort_by_key(&id);
        let goes_on = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().map(id).filter(|_| goes_on);
        Self { rows, next }
    }
}

/// A tunnel.
#[derive(Clone, Debug)]
pub struct TunnelView {
    /// Its ID.
    pub id: u64,
    /// The role that it belongs to.
    pub role: PolicyRole,
    /// The ID of its connection.
    pub connection: u64,
    /// The user; empty at an edge, and at a relay without authentication.
    pub user: String,
    /// The name of its class; empty for a hop.
    pub class: String,
    /// Whether an operator set the class.
    pub is_pinned: bool,
    /// The protocol that it carries.
    pub protocol: String,
    /// The target: its name if the client asked by name, else its address; empty for readers.
    pub target: String,
    /// The target's address, as far as this role knows it; empty for readers.
    pub next_hop: String,
    /// When it was opened.
    pub since: SystemTime,
    /// Bytes to the target.
    pub up_bytes: u64,
    /// Bytes from the target.
    pub down_bytes: u64,
    /// The edge's local address that accepted it; empty at a relay.
    pub listen: String,
    /// The address of the local sender; empty at a relay, and for readers.
    pub sender: String,
    /// The name of the hop that owns it; empty for all other tunnels.
    pub hop: String,
    /// The name of the path at an edge that it goes over; empty without one.
    pub path: String,
}

impl TunnelView {
    pub(super) fn of_relay(found: &RelayTunnel, caller: &Caller) -> Self {
        let (asked, (up_bytes, down_bytes)) = (&found.asked, found.traffic.bytes());
        let target = || {
            let name = asked.name.as_deref().map(|name| format!("{name}:{}", asked.next_hop.port()));
            name.unwrap_or_else(|| asked.next_hop.to_string())
        };
        Self {
            id: found.id,
            role: PolicyRole::Relay,
            connection: found.client.id,
            user: asked.user.as_deref().unwrap_or_default().to_owned(),
            class: found.class().policy().name.clone(),
            is_pinned: found.is_pinned(),
            protocol: asked.protocol.to_string(),
            target: caller.shown(target),
            next_hop: caller.shown(|| asked.next_hop.to_string()),
            since: found.since,
            up_bytes,
            down_bytes,
            listen: String::new(),
            sender: String::new(),
            hop: String::new(),
            path: String::new(),
        }
    }

    pub(super) fn of_edge(found: &roster::EdgeTunnel, caller: &Caller) -> Self {
        let (up_bytes, down_bytes) = found.traffic.bytes();
        let (listen, sender, hop) = match &found.owner {
            TunnelOwner::Application { listen, client, .. } => {
                (listen.to_string(), caller.shown(|| client.address.to_string()), String::new())
            }
            TunnelOwner::Hop { name } => (String::new(), String::new(), name.clone()),
        };
        Self {
            id: found.id,
            role: PolicyRole::Edge,
            connection: found.connection,
            user: String::new(),
            class: found.class().map(|class| class.policy().name.clone()).unwrap_or_default(),
            is_pinned: false,
            protocol: found.protocol.to_string(),
            target: caller.shown(|| found.target.to_string()),
            next_hop: String::new(),
            since: found.since,
            up_bytes,
            down_bytes,
            listen,
            sender,
            hop,
            path: found.way.path.to_string(),
        }
    }
}

/// A connection of a client, or to a relay.
#[derive(Clone, Debug)]
pub struct ConnectionView {
    /// Its ID.
    pub id: u64,
    /// The role that it belongs to.
    pub role: PolicyRole,
    /// The user; empty at an edge, before a request has named it, and at a relay without authentication.
    pub user: String,
    /// The client's address; empty at an edge, and for readers.
    pub client: String,
    /// The listener that accepted it; empty at an edge.
    pub listener: String,
    /// When it was made.
    pub since: SystemTime,
    /// How many tunnels it carries.
    pub tunnels: u32,
    /// The measured state of its network path.
    pub path: PathState,
    /// The name of its schedule; empty for the default one.
    pub schedule: String,
    /// The relay; empty at a relay.
    pub relay: String,
    /// The address of the relay; empty at a relay, and if the relay before it does not report it.
    pub relay_address: String,
    /// The name of the hop that it uses; empty without one.
    pub via: String,
    /// The name of its path at an edge; empty without one.
    pub path_name: String,
    /// How its packets leave an edge, for people; empty if the routes decide.
    pub exit: String,
}

impl ConnectionView {
    pub(super) fn of_relay(found: &relay::RelayClient, schedule: Option<String>, caller: &Caller) -> Self {
        let client = || found.address.map(|address| address.to_string()).unwrap_or_default();
        Self {
            id: found.id,
            role: PolicyRole::Relay,
            user: found.user().map(ToString::to_string).unwrap_or_default(),
            client: caller.shown(client),
            listener: found.listener.to_string(),
            since: found.since,
            tunnels: u32::try_from(found.tunnels()).unwrap_or(u32::MAX),
            path: found.path.get(),
            schedule: schedule.unwrap_or_default(),
            relay: String::new(),
            relay_address: String::new(),
            via: String::new(),
            path_name: String::new(),
            exit: String::new(),
        }
    }

    pub(super) fn of_edge((uplink, line): &(Arc<Uplink>, Arc<Line>)) -> Self {
        Self {
            id: line.id,
            role: PolicyRole::Edge,
            user: String::new(),
            client: String::new(),
            listener: String::new(),
            since: line.opened,
            tunnels: u32::try_from(line.tunnels()).unwrap_or(u32::MAX),
            path: line.path.get(),
            schedule: uplink.schedule.clone().unwrap_or_default(),
            relay: line.way().relay.to_string(),
            relay_address: Some(line.address)
                .filter(|to| to.ip() != SOMEWHERE)
                .map_or_else(String::new, |to| to.to_string()),
            via: uplink.via_of(line),
            path_name: uplink.path_name(line).to_owned(),
            exit: uplink.exit_of(line).to_owned(),
        }
    }
}

/// A relay that the edge uses.
#[derive(Clone, Debug)]
pub struct UplinkView {
    /// Its host and port.
    pub relay: String,
    /// The name of the hop to it; empty without one.
    pub via: String,
    /// The name of the path to it; empty without paths.
    pub path: String,
    /// How packets to it leave, for people; empty if the routes decide.
    pub exit: String,
    /// The IDs of open connections to it.
    pub connections: Vec<u64>,
    /// How many connections were made.
    pub connects: u64,
    /// How often connecting failed.
    pub failures: u64,
    /// How the last attempt failed, if it did, or how the relay refused the credentials; empty for readers.
    pub failure: String,
}

impl UplinkView {
    pub(super) fn new(found: Standpoint, caller: &Caller) -> Self {
        let Attempts { connects, failures, failure, refused } = found.attempts;
        let failure = || match (&failure, &refused) {
            (Some(failure), _) => failure.to_string(),
            (None, Some(refused)) => refused.to_string(),
            (None, None) => String::new(),
        };
        let connections = found.lines.iter().map(|line| line.id).collect();
        let (relay, via, path, exit) = (found.relay, found.via, found.path, found.exit);
        Self { relay, via, path, exit, connections, connects, failures, failure: caller.shown(failure) }
    }
}

/// A part of the kernel's enforcement on a device.
#[derive(Clone, Debug)]
pub struct PartView {
    /// The device.
    pub device: String,
    /// The part, as metrics name it.
    pub part: &'static str,
    /// Whether the kernel enforces it.
    pub is_enforced: bool,
    /// How, or why not.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_two_lists_skip_nothing_and_repeat_nothing() {
        let (ours, theirs): (Vec<u64>, Vec<u64>) = (vec![1, 4, 5, 9], vec![2, 3, 7, 8, 10]);
        for limit in 1..=10 {
            let (mut after, mut seen) = (0, Vec::new());
            loop {
                let behind =
                    |list: &[u64]| list.iter().copied().filter(|id| *id > after).take(limit + 1).collect::<Vec<_>>();
                let Page { rows, next } = Page::of([behind(&ours), behind(&theirs)].concat(), limit, |id| *id);
                assert!(rows.len() <= limit);
                seen.extend(rows);
                let Some(next) = next else { break };
                after = next;
            }
            assert_eq!(seen, [1, 2, 3, 4, 5, 7, 8, 9, 10], "{limit}");
        }
    }
}
