//! What the edge role has open, as messages.

use std::time::Duration;

use api::v1;
use edge::{
    link::Line,
    roster::{Roster, Tunnel},
    uplink::{Attempts, Standpoint, Uplink},
};

use super::super::{Caller, Control, Filter, PAGE};

/// The relays that are used.
pub(super) fn uplinks(roster: &Roster, caller: &Caller) -> Vec<v1::Uplink> {
    let of = |standpoint: Standpoint| {
        let Attempts { connects, failures, failure } = standpoint.attempts;
        let failure = || failure.as_ref().map(ToString::to_string).unwrap_or_default();
        v1::Uplink {
            relay: standpoint.relay,
            connections: standpoint.lines.iter().map(|line| line.id).collect(),
            connects,
            failures,
            failure: caller.shown(failure),
        }
    };
    roster.uplinks().iter().flat_map(|uplink| uplink.standpoints()).map(of).collect()
}

/// The local addresses that are served.
pub(super) fn entrances(roster: &Roster) -> Vec<v1::Entrance> {
    let entrances = roster.entrances();
    let of = |counters: &edge::Counters| v1::Entrance {
        listen: counters.listen().to_owned(),
        protocol: counters.protocol().to_owned(),
        tunnels: u64::try_from(counters.open.get()).unwrap_or(0),
        opened: counters.tunnels_opened.get(),
        refused: counters.tunnels_refused.get(),
        up_bytes: counters.bytes_up.get(),
        down_bytes: counters.bytes_down.get(),
    };
    entrances.iter().map(|counters| of(counters)).collect()
}

fn tunnel(found: &Tunnel, caller: &Caller) -> v1::Tunnel {
    let (up_bytes, down_bytes) = found.traffic.bytes();
    v1::Tunnel {
        id: found.id,
        connection: found.connection,
        class: found.class().policy().name.clone(),
        protocol: found.protocol.to_string(),
        target: caller.shown(|| found.target.to_string()),
        since: Some(found.since.into()),
        up_bytes,
        down_bytes,
        role: "edge".to_owned(),
        listen: found.listen.clone(),
        sender: caller.shown(|| found.sender.to_string()),
        ..v1::Tunnel::default()
    }
}

fn connection(uplink: &Uplink, line: &Line) -> v1::Connection {
    let path = line.path.get();
    let time = |time: Option<Duration>| time.and_then(|time| time.try_into().ok());
    v1::Connection {
        smoothed_rtt: time(path.smoothed_rtt),
        min_rtt: time(path.min_rtt),
        sent_bytes: path.sent_bytes,
        received_bytes: path.received_bytes,
        sent_packets: path.sent_packets,
        lost_packets: path.lost_packets,
        id: line.id,
        since: Some(line.opened.into()),
        tunnels: u32::try_from(line.tunnels()).unwrap_or(u32::MAX),
        role: "edge".to_owned(),
        relay: uplink.relay_of(line),
        relay_address: line.address.to_string(),
        ..v1::Connection::default()
    }
}

/// Adds the edge's tunnels to a page of the relay's behind `after`, of at most `limit` rows.
pub(super) fn with_tunnels(
    control: &Control,
    filter: &Filter,
    (after, limit): (u64, usize),
    (page, next): (Vec<v1::Tunnel>, Option<u64>),
    caller: &Caller,
) -> (Vec<v1::Tunnel>, Option<u64>) {
    let own = control.edge_tunnels(filter, after, PAGE + 1);
    let own = own.iter().map(|found| tunnel(found, caller));
    merged(page, next, own.collect(), limit, |of| of.id)
}

/// As [`with_tunnels`], of connections.
pub(super) fn with_connections(
    control: &Control,
    (after, limit): (u64, usize),
    (page, next): (Vec<v1::Connection>, Option<u64>),
) -> (Vec<v1::Connection>, Option<u64>) {
    let own = control.edge().connections(after);
    let own = own.iter().map(|(uplink, line)| connection(uplink, line));
    merged(page, next, own.collect(), limit, |of| of.id)
}

/// Joins two lists by ID. Of the first, `next` says that it goes on.
fn merged<T>(
    mut rows: Vec<T>,
    next: Option<u64>,
    more: Vec<T>,
    limit: usize,
    id: impl Fn(&T) -> u64,
) -> (Vec<T>, Option<u64>) {
    let limit = if limit == 0 { PAGE } else { limit.min(PAGE) };
    rows.extend(more);
    rows.sort_by_key(|row| id(row));
    let goes_on = next.is_some() || rows.len() > limit;
    rows.truncate(limit);
    let last = rows.last().map(id);
    (rows, last.filter(|_| goes_on))
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
                let mut page: Vec<_> = ours.iter().copied().filter(|id| *id > after).take(limit + 1).collect();
                let next = if page.len() > limit { page.get(limit - 1).copied() } else { None };
                page.truncate(limit);
                let more = theirs.iter().copied().filter(|id| *id > after).collect();
                let (rows, next) = merged(page, next, more, limit, |id| *id);
                assert!(rows.len() <= limit);
                seen.extend(rows);
                let Some(next) = next else { break };
                after = next;
            }
            assert_eq!(seen, [1, 2, 3, 4, 5, 7, 8, 9, 10], "{limit}");
        }
    }
}
