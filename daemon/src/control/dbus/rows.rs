//! Views of the control plane as rows of D-Bus types.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use quic::class::PolicyRole;
use serving::view::{EngineView, RequestView};
use uplink::PathReport;

use super::super::{ClassStats, ConnectionView, TunnelView, UplinkView};
use crate::policy::Revision;

/// A tunnel: its ID, connection, user, class and protocol, its target (empty for readers), and bytes to the target and
/// from it. If a tunnel carries an edge's connection to another relay, the user is `[hop.NAME]`.
pub(super) type TunnelRow = (u64, u64, String, String, String, String, u64, u64);

/// A connection, as `list_connections` describes it.
pub(super) type ConnectionRow = (u64, String, String, String, u32, u64, u64, u64, u64, u64);

/// A relay, as `list_uplinks` describes it.
pub(super) type UplinkRow = (String, u64, u64, u64, String, String, String);

/// A path, as `list_paths` describes it.
pub(super) type PathRow = (
    String,
    String,
    String,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    bool,
    u64,
    Vec<String>,
    Vec<u64>,
    u64,
    BTreeMap<String, u64>,
);

/// An engine, as `list_engines` describes it.
pub(super) type EngineRow = (String, String, String, u32, u32, u32, u64, u64, u64, String);

/// A request for a model, as `list_requests` describes it.
pub(super) type RequestRow = (u64, String, String, String, String, u64, u64, u64, f64);

/// A revision of the policy, as `list_revisions` describes it.
pub(super) type RevisionRow = (u64, String, String, u64, String);

/// A class in a role, as `list_classes` describes it.
pub(super) type ClassRow = (String, String, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);

/// Converts a time to microseconds since 1970, as usual in D-Bus interfaces.
pub(super) fn micros(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn revision_row(found: &Revision) -> RevisionRow {
    (found.number, found.author.clone(), found.origin.to_string(), micros(found.since), found.diff.clone())
}

pub(super) fn uplink_row(found: UplinkView) -> UplinkRow {
    // Another column would change the type of the row.
    let UplinkView { relay, via, path, exit: _, connections, connects, failures, failure } = found;
    (relay, connections.len() as u64, connects, failures, failure, path, via)
}

pub(super) fn class_row(found: &ClassStats) -> ClassRow {
    (
        found.class.clone(),
        found.role.as_str().to_owned(),
        found.tunnels,
        found.sent_payloads,
        found.sent_bytes,
        found.sojourn_ns / 1_000,
        found.late_payloads,
        found.dropped_full,
        found.dropped_late,
        found.dropped_sojourn,
        found.expired_streams,
        found.late_packets,
    )
}

pub(super) fn path_row(found: PathReport) -> PathRow {
    let lasting_us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    (
        found.name,
        found.via,
        found.condition.as_str().to_owned(),
        lasting_us(found.smoothed_rtt),
        found.bytes_per_sec,
        found.used_bytes_per_sec,
        found.sent_packets,
        found.lost_packets,
        found.tunnels as u64,
        found.moved,
        found.is_chosen,
        lasting_us(found.min_rtt),
        found.relays,
        found.connections,
        found.requests as u64,
        found.classes.into_iter().map(|(class, tunnels)| (class, tunnels as u64)).collect(),
    )
}

pub(super) fn connection_row(found: ConnectionView) -> ConnectionRow {
    let path = found.path;
    let rtt_us = path.smoothed_rtt.map_or(0, |rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX));
    (
        found.id,
        found.user,
        found.client,
        found.listener,
        found.tunnels,
        rtt_us,
        path.sent_bytes,
        path.received_bytes,
        path.sent_packets,
        path.lost_packets,
    )
}

pub(super) fn engine_row(found: EngineView) -> EngineRow {
    (
        found.model,
        found.engine,
        found.health.name().to_owned(),
        found.in_flight.0,
        found.in_flight.1,
        found.others.running.saturating_add(found.others.waiting),
        found.waiting as u64,
        found.answered,
        found.failed,
        found.trouble.unwrap_or_default(),
    )
}

pub(super) fn request_row(found: RequestView) -> RequestRow {
    let budget_ms = found.budget.map_or(0, |budget| u64::try_from(budget.as_millis()).unwrap_or(u64::MAX));
    let since_us = micros(found.since);
    let stage = found.stage.name().to_owned();
    (found.id, found.user, found.class, found.model, stage, since_us, budget_ms, found.tokens, found.tokens_per_sec)
}

pub(super) fn tunnel_row(found: TunnelView) -> TunnelRow {
    let target = match found.role {
        PolicyRole::Relay => found.next_hop,
        PolicyRole::Edge => found.target,
    };
    let (up_bytes, down_bytes) = (found.up_bytes, found.down_bytes);
    let user = if found.hop.is_empty() { found.user } else { format!("[hop.{}]", found.hop) };
    (found.id, found.connection, user, found.class, found.protocol, target, up_bytes, down_bytes)
}

#[cfg(test)]
mod tests {
    use uplink::Condition;
    use zbus::zvariant::Type as _;

    use super::*;

    #[test]
    fn a_path_has_over_the_bus_what_it_has_over_grpc() {
        let row = path_row(PathReport {
            name: "dsl".to_owned(),
            via: "gate".to_owned(),
            condition: Condition::Slow,
            is_chosen: true,
            relays: vec!["a.example:443".to_owned()],
            connections: vec![7, 9],
            tunnels: 5,
            requests: 2,
            classes: [("models".to_owned(), 2), ("voice".to_owned(), 3)].into(),
            smoothed_rtt: Duration::from_millis(20),
            min_rtt: Duration::from_millis(15),
            bytes_per_sec: 1_000,
            used_bytes_per_sec: 100,
            sent_packets: 50,
            lost_packets: 4,
            moved: 1,
        });
        let (
            name,
            via,
            state,
            rtt,
            rate,
            used,
            sent,
            lost,
            tunnels,
            moved,
            chosen,
            min,
            relays,
            ids,
            requests,
            classes,
        ) = row;
        assert_eq!((&name[..], &via[..], &state[..], rtt, rate, used), ("dsl", "gate", "slow", 20_000, 1_000, 100));
        assert_eq!((sent, lost, tunnels, moved, chosen), (50, 4, 5, 1, true));
        assert_eq!((min, relays, ids, requests), (15_000, vec!["a.example:443".to_owned()], vec![7, 9], 2));
        assert_eq!(classes.into_iter().collect::<Vec<_>>(), [("models".to_owned(), 2), ("voice".to_owned(), 3)]);
        assert_eq!(PathRow::SIGNATURE.to_string(), "(ssstttttttbtasatta{st})");
    }

    #[test]
    fn a_tunnel_of_a_hop_is_marked_where_others_have_their_user() {
        let mut view = TunnelView {
            id: 7,
            role: PolicyRole::Edge,
            connection: 3,
            user: String::new(),
            class: String::new(),
            is_pinned: false,
            protocol: "udp".to_owned(),
            target: "second.example:443".to_owned(),
            next_hop: String::new(),
            since: SystemTime::UNIX_EPOCH,
            up_bytes: 1,
            down_bytes: 2,
            listen: String::new(),
            sender: String::new(),
            hop: "first".to_owned(),
            path: String::new(),
        };
        let (_, _, user, class, _, target, ..) = tunnel_row(view.clone());
        assert_eq!([user.as_str(), &class, &target], ["[hop.first]", "", "second.example:443"]);
        (view.hop, view.user) = (String::new(), "alice".to_owned());
        assert_eq!(tunnel_row(view).2, "alice");
    }
}
