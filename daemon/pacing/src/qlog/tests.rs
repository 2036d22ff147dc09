use std::collections::{BTreeMap, BTreeSet};

use s2n_quic_core::event::{IntoEvent as _, builder};
use serde_json::{Value, json};

use super::{
    sequence::{Names, Sequence, VantagePoint},
    *,
};

const LONG: Duration = Duration::from_secs(3_600);

/// Parses the records of a text; each has to be framed as in RFC 7464 §2.2.
pub(crate) fn records(text: &str) -> Vec<Value> {
    let framed = text.split_inclusive('\n').map(|line| line.strip_prefix('\u{1e}').unwrap());
    framed.map(|json| serde_json::from_str(json).unwrap()).collect()
}

/// Takes the events since the last call, without the header.
fn taken(sequence: &mut Sequence, names: Names) -> Vec<Value> {
    let mut taken = records(&sequence.text(names).0);
    taken.retain(|record| record.get("trace").is_none());
    let times: Vec<_> = taken.iter().map(|event| event["time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    taken
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name).map(|event| &event["data"]).collect()
}

fn one_rtt(number: u64) -> builder::PacketHeader {
    builder::PacketHeader::OneRtt { number }
}

pub(crate) fn sent(number: u64) -> PacketSent {
    let transmission_mode = builder::TransmissionMode::Normal {};
    builder::PacketSent { packet_header: one_rtt(number), packet_len: 1_200, transmission_mode }.into_event()
}

fn received(number: u64) -> PacketReceived {
    builder::PacketReceived { packet_header: one_rtt(number), packet_len: 60 }.into_event()
}

fn stream(id: u64, len: u16) -> events::Frame {
    builder::Frame::Stream { id, offset: 7, len, is_fin: false }.into_event()
}

fn ack() -> events::Frame {
    let ecn_counts = Some(builder::EcnCounts { ect_0_count: 3, ect_1_count: 0, ce_count: 1 });
    builder::Frame::Ack { ecn_counts, largest_acknowledged: 9, ack_range_count: 2 }.into_event()
}

fn listened() -> (Tap, Sequence) {
    let (tap, traces) = (Tap::default(), Arc::new(Traces::default()));
    let tracing = traces.begin(&tap, LONG).unwrap();
    (tap, Sequence::new(tracing, (7, "dsl"), VantagePoint::Client))
}

#[test]
fn a_file_begins_with_what_it_is_and_what_is_known_already() {
    let (_tap, mut sequence) = listened();
    let (text, goes_on) = sequence.text(Names::default());
    let records = records(&text);
    let header = &records[0];
    assert_eq!(header["file_schema"], "urn:ietf:params:qlog:file:sequential");
    assert_eq!(header["serialization_format"], "application/qlog+json-seq");
    let trace = &header["trace"];
    assert_eq!(trace["vantage_point"]["type"], "client");
    assert!(trace["event_schemas"][0].as_str().unwrap().starts_with("urn:ietf:params:qlog:events:quic-"));
    let namespaces = trace["event_schemas"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap());
    assert_eq!(
        namespaces.filter(|uri| uri.ends_with("#paced")).count(),
        1,
        "our own events have a schema as well: {trace}"
    );
    let (time, format) = (&trace["common_fields"]["reference_time"], &trace["common_fields"]["time_format"]);
    assert_eq!(
        (&time["clock_type"], &time["epoch"], format),
        (&json!("monotonic"), &json!("unknown"), &json!("relative_to_epoch"))
    );
    assert!(time["wall_clock_time"].as_str().unwrap().ends_with('Z'));
    assert_eq!(trace["common_fields"]["paced_path"], "dsl");
    assert!(header["title"].as_str().unwrap().ends_with(" over dsl"), "{header}");
    assert_eq!((&records[1]["name"], records.len(), goes_on), (&json!("quic:mtu_updated"), 2, true));
    assert!(sequence.text(Names::default()).0.is_empty(), "the header comes once");
}

#[test]
fn a_packet_has_its_frames_and_what_had_its_turn_with_class_and_tunnel() {
    let (tap, mut sequence) = listened();
    let voice = ClassKey::of("voice");
    let log = tap.log().unwrap();
    log.stream_turn(4, voice, 500, [2, 1]);
    log.frame_sent(&ack(), |_| None);
    log.acks_sent(&(7..=9));
    log.acks_sent(&(3..=3));
    log.frame_sent(&stream(4, 500), |id| (id == 4).then_some(voice));
    log.datagram_sent(8, ClassKey::of("gone"), 300, 1_500_000);
    _ = log.packet_sent(&sent(12));
    _ = log.packet_sent(&sent(13));
    let names = Names { classes: [(voice, "voice".to_owned())].into(), tunnels: [(4, 1), (8, 2)].into() };
    let events = taken(&mut sequence, names);
    let turn = json!({
        "stream_id": 4, "length": 500, "waiting_streams": 2, "waiting_tunnels": 1, "class": "voice", "tunnel": 1,
    });
    assert_eq!(named(&events, "paced:stream_turn"), [&turn]);
    let header = json!({ "packet_type": "1RTT", "packet_number": 12 });
    let packet = json!({
        "header": header,
        "raw": { "length": 1_200 },
        "is_mtu_probe_packet": false,
        "frames": [
            { "frame_type": "ack", "acked_ranges": [[7, 9], [3]], "ect0": 3, "ect1": 0, "ce": 1 },
            { "frame_type": "stream", "stream_id": 4, "offset": 7, "fin": false,
              "raw": { "length": 500, "payload_length": 500 } },
        ],
    });
    let packets = named(&events, "quic:packet_sent");
    assert_eq!((packets[0], &packets[1]["frames"]), (&packet, &json!([])), "frames are in one packet only");
    let payloads = [
        json!({ "header": header, "form": "stream", "stream_id": 4, "length": 500, "class": "voice", "tunnel": 1 }),
        json!({ "header": header, "form": "datagram", "stream_id": 8, "length": 300, "waited": 1.5, "tunnel": 2 }),
    ];
    assert_eq!(named(&events, "paced:payload"), payloads.iter().collect::<Vec<_>>());
}

#[test]
fn the_manual_names_every_field_of_our_own_events_and_no_other() {
    let (tap, traces) = (Tap::default(), Arc::new(Traces::default()));
    let mut sequence = Sequence::new(traces.begin(&tap, LONG).unwrap(), (7, ""), VantagePoint::Server);
    let (log, voice) = (tap.log().unwrap(), ClassKey::of("voice"));
    log.stream_turn(4, voice, 500, [2, 1]);
    log.datagram_sent(4, voice, 300, 1_500_000);
    let packet = log.packet_sent(&sent(12));
    let now_ns = Some(monotonic::now_ns());
    traces.departed(&[Departing { packet, wanted_ns: now_ns, place: 0 }], now_ns, 1);
    log.state().lost = (1, 0);
    let names = Names { classes: [(voice, "voice".to_owned())].into(), tunnels: [(4, 1)].into() };
    let mut fields = BTreeMap::<String, BTreeSet<String>>::new();
    for event in records(&sequence.text(names).0).iter().filter(|event| event.get("data").is_some()) {
        if let Some(name) = event["name"].as_str().unwrap().strip_prefix("paced:") {
            fields.entry(name.to_owned()).or_default().extend(event["data"].as_object().unwrap().keys().cloned());
        }
    }
    assert_eq!(fields.len(), 4, "{fields:?}");
    let manual = include_str!("../../../../docs/looking-at-it.md");
    let section = manual.split_once("\n## Follow one connection\n").unwrap().1.split_once("\n## ").unwrap().0;
    let mut named = BTreeMap::<String, BTreeSet<String>>::new();
    for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
        let (event, row) = row.split_once("` | `").unwrap();
        named.entry(event.to_owned()).or_default().insert(row.split_once('`').unwrap().0.to_owned());
    }
    assert_eq!(named, fields);
}

#[test]
fn a_packet_that_is_being_read_waits_for_its_frames_and_what_is_behind_it_with_it() {
    let (tap, mut sequence) = listened();
    let log = tap.log().unwrap();
    taken(&mut sequence, Names::default());
    log.packet_received(&received(1));
    log.frame_received(&stream(0, 1));
    log.packet_received(&received(2));
    log.frame_received(&ack());
    let names = |events: &[Value]| events.iter().map(|event| event["name"].clone()).collect::<Vec<_>>();
    let first = taken(&mut sequence, Names::default());
    assert_eq!(
        (names(&first), &first[0]["data"]["frames"][0]["stream_id"]),
        (vec![json!("quic:packet_received")], &json!(0))
    );
    log.acks_received(&(0..=5));
    log.state_updated(&builder::HandshakeStatus::Confirmed {}.into_event());
    log.frame_received(&stream(4, 2));
    _ = log.packet_sent(&sent(0));
    let second = taken(&mut sequence, Names::default());
    assert_eq!(
        names(&second),
        ["quic:packet_received", "quic:connection_state_updated", "quic:packet_sent"].map(Value::from)
    );
    let frames = &second[0]["data"]["frames"];
    assert_eq!((&frames[0]["acked_ranges"], &frames[1]["stream_id"]), (&json!([[0, 5]]), &json!(4)));
    assert_eq!(second[1]["data"], json!({ "new": "handshake_confirmed" }));
}

#[test]
fn a_log_ends_with_the_end_of_its_connection() {
    let (tap, mut sequence) = listened();
    let log = tap.log().unwrap();
    log.packet_received(&received(1));
    let error = s2n_quic::connection::Error::immediate_close("enough");
    log.closed(&builder::ConnectionClosed { error }.into_event());
    let (text, goes_on) = sequence.text(Names::default());
    let events = records(&text);
    assert_eq!((named(&events, "quic:connection_closed")[0]["trigger"].clone(), goes_on), (json!("aborted"), false));
    assert_eq!(named(&events, "quic:packet_received").len(), 1, "all there is");
    assert_eq!(events.last().unwrap()["data"], json!({ "new": "closed" }));
}

#[test]
fn unread_events_are_bounded_and_an_event_counts_the_excess() {
    let (tap, mut sequence) = listened();
    let log = tap.log().unwrap();
    let (mut before, mut number) = (usize::MAX, 0);
    while before != log.state().entries.len() {
        before = log.state().entries.len();
        _ = log.packet_sent(&sent(number));
        number += 1;
    }
    log.frame_sent(&stream(0, 1), |_| None);
    assert!(log.state().entries.len() * size_of::<Entry>() <= LOG_BYTES && log.state().bytes <= LOG_BYTES);
    let (mut events, mut goes_on) = (Vec::new(), 0);
    while events.last().is_none_or(|event: &Value| event["name"] != "paced:events_lost") {
        let (text, _) = sequence.text(Names::default());
        assert!(text.len() < 300 * 1_024, "in parts");
        events.extend(records(&text));
        goes_on += 1;
    }
    assert!(goes_on > 1);
    assert_eq!(named(&events, "quic:packet_sent").len() as u64, number - 1);
    assert!(events.last().unwrap()["data"]["count"].as_u64() >= Some(1));
    _ = log.packet_sent(&sent(number));
    let events = taken(&mut sequence, Names::default());
    assert_eq!(
        (events.len(), &events[0]["data"]["header"]["packet_number"]),
        (1, &json!(number)),
        "there is room again"
    );
}

#[test]
fn one_listens_to_a_connection_and_only_so_many_at_once() {
    let traces = Arc::new(Traces::default());
    let taps: Vec<Tap> = (0..=TRACES).map(|_| Tap::default()).collect();
    assert!(taps[0].log().is_none(), "nobody does");
    let mut open: Vec<_> = taps[..TRACES - 1].iter().map(|tap| traces.begin(tap, LONG).unwrap()).collect();
    assert!(traces.begin(&taps[0], LONG).is_none(), "somebody else does");
    open.push(traces.begin(&taps[TRACES - 1], LONG).unwrap());
    assert!(traces.begin(&taps[TRACES], LONG).is_none(), "too many");
    drop(open.remove(0));
    assert!(taps[0].log().is_none() && taps[1].log().is_some());
    assert!(traces.begin(&taps[TRACES], LONG).is_some());
}

#[test]
fn a_log_whose_time_is_over_is_let_go_of_by_its_connection() {
    let (tap, traces) = (Tap::default(), Arc::new(Traces::default()));
    let forgotten = traces.begin(&tap, Duration::ZERO).unwrap();
    assert!(tap.log().is_none() && forgotten.is_over());
    let next = traces.begin(&tap, LONG).unwrap();
    drop(forgotten);
    assert!(tap.log().is_some() && !next.is_over(), "the end of one is not that of the next");
}

#[test]
fn frames_are_called_as_the_draft_calls_them() {
    let uni = || builder::StreamType::Unidirectional {};
    for (frame, expected) in [
        (
            builder::Frame::Padding { len: 3 },
            json!({ "frame_type": "padding", "raw": { "length": 3, "payload_length": 3 } }),
        ),
        (builder::Frame::Ping {}, json!({ "frame_type": "ping" })),
        (
            builder::Frame::ResetStream { id: 4, error_code: 5, final_size: 6 },
            json!({ "frame_type": "reset_stream", "stream_id": 4, "error": "unknown", "error_code": 5, "final_size": 6 }),
        ),
        (builder::Frame::NewToken {}, json!({ "frame_type": "new_token", "token": {} })),
        (builder::Frame::MaxData { value: 9 }, json!({ "frame_type": "max_data", "maximum": 9 })),
        (
            builder::Frame::MaxStreams { stream_type: uni(), value: 9 },
            json!({ "frame_type": "max_streams", "stream_type": "unidirectional", "maximum": 9 }),
        ),
        (
            builder::Frame::StreamDataBlocked { stream_id: 4, stream_data_limit: 9 },
            json!({ "frame_type": "stream_data_blocked", "stream_id": 4, "limit": 9 }),
        ),
        (builder::Frame::HandshakeDone {}, json!({ "frame_type": "handshake_done" })),
        (
            builder::Frame::Datagram { len: 2 },
            json!({ "frame_type": "datagram", "raw": { "length": 2, "payload_length": 2 } }),
        ),
        (builder::Frame::RetireConnectionId {}, json!({ "frame_type": "unknown", "frame_type_bytes": 25 })),
        (builder::Frame::MtuProbingComplete { mtu: 9 }, json!({ "frame_type": "unknown" })),
    ] {
        let frame: events::Frame = frame.into_event();
        assert_eq!(serde_json::to_value(Frame::from(&frame)).unwrap(), expected);
    }
}
