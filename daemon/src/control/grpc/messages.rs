//! Views of the control plane as messages of the protocol.

use std::time::{Duration, SystemTime};

use api::v1;
use pacing::io::recorder::{self, Records};
use routes::Tally;
use serving::view::{AliasView, EngineView, RequestView};
use uplink::PathReport;

use super::super::{ConnectionView, Control, Statistics, TunnelView, UplinkView};
use crate::{certificates::Certificate, policy::Revision};

pub(super) fn certificate(of: &Certificate) -> v1::Certificate {
    v1::Certificate {
        used_by: of.used_by.to_owned(),
        address: of.address.to_string(),
        file: of.file.display().to_string(),
        expires: Some(of.expires.into()),
        days_left: of.days_left(SystemTime::now()),
    }
}

pub(super) fn model_request(of: RequestView) -> v1::ModelRequest {
    let RequestView { id, user, class, model, stage, since, budget, tokens, tokens_per_sec } = of;
    let (stage, since) = (stage.name().to_owned(), Some(since.into()));
    let budget = budget.and_then(|budget| budget.try_into().ok());
    v1::ModelRequest { id, user, class, model, stage, since, budget, tokens, tokens_per_sec }
}

pub(super) fn alias(of: AliasView) -> v1::ModelAlias {
    let AliasView { alias, models, policy, kind, shadow, shadow_kind, tally } = of;
    let Tally { decided, guarded, fell_back, shadowed, agreed } = tally;
    v1::ModelAlias {
        alias,
        models,
        policy,
        kind: kind.to_owned(),
        shadow: shadow.unwrap_or_default(),
        shadow_kind: shadow_kind.unwrap_or_default().to_owned(),
        decided,
        guarded,
        fell_back,
        shadowed,
        agreed,
    }
}

pub(super) fn engine(of: EngineView) -> v1::Engine {
    let EngineView { model, engine, in_flight, others, waiting, health, trouble, answered, failed, samples, cost } = of;
    let ejected_for = Duration::from_nanos(health.ejected_for_ns());
    let duration = |ns: f64| Duration::try_from_secs_f64(ns / 1e9).ok().and_then(|time| time.try_into().ok());
    let has_cost = samples != (0, 0);
    v1::Engine {
        model,
        engine,
        in_flight: in_flight.0,
        max_in_flight: in_flight.1,
        waiting: waiting as u64,
        ejected_for: ejected_for.try_into().ok().filter(|_| !ejected_for.is_zero()),
        answered,
        failed,
        cost: has_cost.then(|| v1::EngineCost {
            steps: samples.0,
            first_tokens: samples.1,
            step: duration(cost.host_ns + cost.gpu_ns),
            step_per_request: duration(cost.gpu_per_sequence_ns),
            first_token: duration(cost.prefill_ns),
            first_token_per_thousand: duration(cost.prefill_per_token_ns * 1e3),
            longer_per_neighbour: cost.sharing,
        }),
        state: health.name().to_owned(),
        trouble: trouble.unwrap_or_default(),
        others_running: others.running,
        others_waiting: others.waiting,
    }
}

pub(super) fn revision(found: &Revision, confirm_by: Option<SystemTime>) -> v1::Revision {
    v1::Revision {
        number: found.number,
        text: found.text.clone(),
        author: found.author.clone(),
        origin: found.origin.to_string(),
        since: Some(found.since.into()),
        diff: found.diff.clone(),
        confirm_by: confirm_by.map(Into::into),
    }
}

pub(super) fn tunnel(found: TunnelView) -> v1::Tunnel {
    v1::Tunnel {
        id: found.id,
        connection: found.connection,
        user: found.user,
        class: found.class,
        pinned: found.is_pinned,
        protocol: found.protocol,
        target: found.target,
        next_hop: found.next_hop,
        since: Some(found.since.into()),
        up_bytes: found.up_bytes,
        down_bytes: found.down_bytes,
        role: found.role.as_str().to_owned(),
        listen: found.listen,
        sender: found.sender,
        hop: found.hop,
        path: found.path,
    }
}

pub(super) fn connection(found: ConnectionView) -> v1::Connection {
    let path = found.path;
    let time = |time: Option<Duration>| time.and_then(|time| time.try_into().ok());
    v1::Connection {
        user: found.user,
        smoothed_rtt: time(path.smoothed_rtt),
        min_rtt: time(path.min_rtt),
        sent_bytes: path.sent_bytes,
        received_bytes: path.received_bytes,
        sent_packets: path.sent_packets,
        lost_packets: path.lost_packets,
        id: found.id,
        client: found.client,
        listener: found.listener,
        since: Some(found.since.into()),
        tunnels: found.tunnels,
        role: found.role.as_str().to_owned(),
        schedule: found.schedule,
        relay: found.relay,
        relay_address: found.relay_address,
        via: found.via,
        path: found.path_name,
        exit: found.exit,
    }
}

pub(super) fn path(found: PathReport) -> v1::Path {
    let duration = |time: Duration| prost_types::Duration::try_from(time).ok();
    v1::Path {
        name: found.name,
        state: found.condition.as_str().to_owned(),
        relays: found.relays,
        connections: found.connections,
        tunnels: u32::try_from(found.tunnels).unwrap_or(u32::MAX),
        smoothed_rtt: duration(found.smoothed_rtt),
        min_rtt: duration(found.min_rtt),
        bytes_per_sec: found.bytes_per_sec,
        used_bytes_per_sec: found.used_bytes_per_sec,
        sent_packets: found.sent_packets,
        lost_packets: found.lost_packets,
        via: found.via,
        moved: found.moved,
        requests: u32::try_from(found.requests).unwrap_or(u32::MAX),
        chosen: found.is_chosen,
        classes: found.classes.into_iter().map(|(class, of)| (class, u32::try_from(of).unwrap_or(u32::MAX))).collect(),
    }
}

pub(super) fn uplink(found: UplinkView) -> v1::Uplink {
    let UplinkView { relay, via, path, exit, connections, connects, failures, failure } = found;
    v1::Uplink { relay, via, path, exit, connections, connects, failures, failure }
}

pub(super) fn entrance(found: &edge::roster::LocalEntrance) -> v1::Entrance {
    let counters = &found.counters;
    v1::Entrance {
        listen: found.address.to_string(),
        protocol: found.protocol.to_owned(),
        tunnels: u64::try_from(counters.open.get()).unwrap_or(0),
        opened: counters.tunnels_opened.get(),
        refused: counters.tunnels_refused.get(),
        up_bytes: counters.bytes_up.get(),
        down_bytes: counters.bytes_down.get(),
    }
}

pub(super) fn stats(found: &Statistics) -> v1::WatchStatsResponse {
    let classes = found.classes.iter().map(|of| v1::ClassStats {
        class: of.class.clone(),
        role: of.role.as_str().to_owned(),
        sent_bytes: of.sent_bytes,
        sent_payloads: of.sent_payloads,
        sojourn: Duration::from_nanos(of.sojourn_ns).try_into().ok(),
        late_payloads: of.late_payloads,
        dropped_full: of.dropped_full,
        dropped_late: of.dropped_late,
        dropped_sojourn: of.dropped_sojourn,
        expired_streams: of.expired_streams,
        tunnels: of.tunnels,
        late_packets: of.late_packets,
    });
    v1::WatchStatsResponse {
        time: Some(found.time.into()),
        revision: found.revision,
        connections: found.connections,
        tunnels: found.tunnels,
        classes: classes.collect(),
        late_packets: found.late_packets,
    }
}

pub(super) fn departures(control: &Control, records: Records) -> v1::WatchDeparturesResponse {
    let names = control.class_names();
    let packet = |packet: &recorder::Packet| v1::SentPacket {
        decided_ns: packet.decided_ns,
        wanted_ns: packet.wanted_ns,
        class: packet.class.and_then(|key| names.get(&key)).cloned().unwrap_or_default(),
    };
    let message = |message: recorder::SentMessage| v1::SentMessage {
        thread: message.thread,
        handed_ns: message.handed_ns,
        returned_ns: message.returned_ns,
        departure_ns: message.departure_ns,
        from: message.from.to_string(),
        to: message.to.to_string(),
        // A UDP message is shorter than 2^16 bytes.
        bytes: message.bytes as u32,
        segment_bytes: message.segment_bytes as u32,
        packets: message.packets.iter().map(packet).collect(),
        device: message.device,
        path: message.path.to_string(),
    };
    v1::WatchDeparturesResponse {
        messages: records.messages.into_iter().map(message).collect(),
        lost_packets: records.lost_packets,
    }
}
