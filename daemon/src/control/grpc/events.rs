//! Events as messages of the protocol.

use std::time::SystemTime;

use api::v1;
use role::access::record::{AccessRecord, RecordedRequest, What};

use super::super::{ACCESS, Happening};

/// Converts an event.
pub(super) fn response(happening: Happening) -> v1::WatchEventsResponse {
    let (time, kind, message, access) = match happening {
        Happening::Event(event) => (event.time, event.kind, event.message, None),
        Happening::Access(found) => (found.time, ACCESS, found.text(), Some(record(&found))),
        Happening::Lost(count) => {
            (SystemTime::now(), "lost", format!("{count} events came faster than they were read"), None)
        }
    };
    v1::WatchEventsResponse { time: Some(time.into()), kind: kind.to_owned(), message, access }
}

fn record(found: &AccessRecord) -> v1::AccessRecord {
    let event = found.event().to_owned();
    match &found.what {
        What::Tunnel(asked, ended) => v1::AccessRecord {
            tunnel: ended.tunnel,
            continues: ended.continues.unwrap_or_default(),
            next_hop: ended.next_hop.map(|next_hop| next_hop.to_string()).unwrap_or_default(),
            class: ended.class.clone(),
            form: ended.form().to_owned(),
            up_bytes: ended.up.bytes,
            down_bytes: ended.down.bytes,
            up_packets: ended.up.packets,
            down_packets: ended.down.packets,
            counts: counts(&ended.drops),
            duration: ended.duration.try_into().ok(),
            reason: ended.reason.to_owned(),
            ..request(asked, event)
        },
        What::Refusal(asked, refused) => v1::AccessRecord {
            reason: refused.reason.to_owned(),
            status: refused.status.unwrap_or_default().into(),
            error: refused.error.unwrap_or_default().to_owned(),
            ..request(asked, event)
        },
        What::Model(served) => v1::AccessRecord {
            user: served.user.as_deref().unwrap_or_default().to_owned(),
            listener: served.listener.to_string(),
            client: served.client.map(|client| client.to_string()).unwrap_or_default(),
            class: served.class.clone(),
            duration: served.duration.try_into().ok(),
            reason: served.reason.to_owned(),
            status: served.status.unwrap_or_default().into(),
            request: served.id,
            client_request: served.client_request.as_deref().unwrap_or_default().to_owned(),
            operation: served.operation.to_owned(),
            asked_model: served.asked.clone(),
            model: served.model.to_string(),
            engine: served.engine.clone().unwrap_or_default(),
            input_tokens: served.usage.map_or(0, |usage| usage.prompt_tokens),
            output_tokens: served.output_tokens(),
            predicted: served.predicted.and_then(|time| time.try_into().ok()),
            first_token: served.first_token.and_then(|time| time.try_into().ok()),
            up_bytes: served.moved_bytes.map_or(0, |(up, _)| up),
            down_bytes: served.moved_bytes.map_or(0, |(_, down)| down),
            relay: served.way.as_ref().map(|way| way.relay.to_string()).unwrap_or_default(),
            path: served.way.as_ref().map(|way| way.path.to_string()).unwrap_or_default(),
            event,
            ..v1::AccessRecord::default()
        },
        What::Omitted(omitted) => v1::AccessRecord {
            counts: omitted
                .refusals
                .iter()
                .map(|(reason, count)| (format!("refused_{reason}"), *count))
                .chain([("lost".to_owned(), omitted.lost)])
                .collect(),
            event,
            ..v1::AccessRecord::default()
        },
    }
}

fn counts(of: &[(&str, u64)]) -> std::collections::HashMap<String, u64> {
    of.iter().filter(|(_, count)| *count > 0).map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

fn request(of: &RecordedRequest, event: String) -> v1::AccessRecord {
    v1::AccessRecord {
        event,
        connection: of.connection.unwrap_or_default(),
        user: of.user.as_deref().unwrap_or_default().to_owned(),
        listener: of.listener.to_string(),
        client: of.client.map(|client| client.to_string()).unwrap_or_default(),
        target: of.target.as_ref().map(ToString::to_string).unwrap_or_default(),
        protocol: of.protocol.map(|protocol| protocol.to_string()).unwrap_or_default(),
        relay: of.way.as_ref().map(|way| way.relay.to_string()).unwrap_or_default(),
        path: of.way.as_ref().map(|way| way.path.to_string()).unwrap_or_default(),
        ..v1::AccessRecord::default()
    }
}
