use proptest::prelude::*;

use super::*;

/// The type of a control stream and an empty SETTINGS.
const BEGINNING: [u8; 3] = [0x00, 0x04, 0x00];

fn control(role: Role) -> ControlReceiver {
    ControlReceiver::new(role, Settings::announced_by(role, 16 * 1024))
}

fn frame(kind: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame::write_header(kind, payload.len() as u64, &mut out);
    out.extend_from_slice(payload);
    out
}

/// Processes `bytes` on a new stream and returns the verdict.
fn receive(control: &mut ControlReceiver, bytes: &[u8]) -> Result<UniVerdict, ProtocolError> {
    let mut stream = control.accept_uni();
    control.on_uni_bytes(&mut stream, Bytes::copy_from_slice(bytes))
}

/// Processes frames after SETTINGS, and returns the events after the settings.
fn receive_frames(role: Role, frames: &[Vec<u8>]) -> Result<Vec<ControlEvent>, ProtocolError> {
    let mut control = control(role);
    receive(&mut control, &[&BEGINNING[..], &frames.concat()].concat())?;
    assert_eq!(control.next_event(), Some(ControlEvent::Settings(Settings::default())));
    Ok(std::iter::from_fn(|| control.next_event()).collect())
}

#[track_caller]
fn ends_connection<T: std::fmt::Debug>(outcome: Result<T, ProtocolError>, expected: Code) {
    match outcome {
        Err(ProtocolError::Connection(code, _)) => assert_eq!(code, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_side_understands_the_preamble_of_the_other() {
    for (sender, receiver) in [(Role::Server, Role::Client), (Role::Client, Role::Server)] {
        let preamble = control(sender).preamble();
        let mut receiver = control(receiver);
        assert_eq!(receive(&mut receiver, &preamble), Ok(UniVerdict::Continue));
        let settings = Settings::announced_by(sender, 16 * 1024);
        assert_eq!(receiver.next_event(), Some(ControlEvent::Settings(settings)));
        assert_eq!(receiver.next_event(), None);
    }
}

#[test]
fn a_control_stream_begins_with_settings() {
    // RFC 9114 §6.2.1; an unknown frame does not count (§9).
    for first in [frame(0x07, &[0]), frame(0x21, &[]), frame(0x00, &[]), frame(0x02, &[]), frame(0x0d, &[0])] {
        ends_connection(receive(&mut control(Role::Server), &[&[0x00], &first[..]].concat()), Code::MissingSettings);
    }
}

#[test]
fn settings_are_sent_once() {
    // RFC 9114 §7.2.4
    ends_connection(receive_frames(Role::Server, &[frame(0x04, &[])]), Code::FrameUnexpected);
}

#[test]
fn bad_settings_end_the_connection() {
    // RFC 9114 §7.2.4
    for (payload, code) in [(&[0x33, 0x02][..], Code::SettingsError), (&[0x33], Code::FrameError)] {
        let stream = [&[0x00], &frame(0x04, payload)[..]].concat();
        ends_connection(receive(&mut control(Role::Client), &stream), code);
    }
}

#[test]
fn frames_of_other_streams_end_the_connection() {
    // RFC 9114 §7.2.1, §7.2.2, §7.2.5, §7.2.8
    for role in [Role::Server, Role::Client] {
        for kind in [0x00, 0x01, 0x02, 0x05, 0x06, 0x08, 0x09] {
            ends_connection(receive_frames(role, &[frame(kind, &[0])]), Code::FrameUnexpected);
        }
    }
}

#[test]
fn frames_that_only_clients_send_are_unexpected_for_a_client() {
    // RFC 9114 §7.2.7, RFC 9218 §7.2
    for kind in [0x0d, 0xf0700, 0xf0701] {
        ends_connection(receive_frames(Role::Client, &[frame(kind, &[0])]), Code::FrameUnexpected);
    }
}

#[test]
fn unknown_frames_are_skipped_at_any_length() {
    // RFC 9114 §9
    let frames = [frame(0x21, &[0; 100_000]), frame(0x4040, &[]), frame(0x07, &[0])];
    assert_eq!(receive_frames(Role::Server, &frames), Ok(vec![ControlEvent::GoAway(0)]));
}

#[test]
fn known_frames_are_bounded() {
    let mut header = Vec::new();
    frame::write_header(0x04, MAX_PAYLOAD_BYTES + 1, &mut header);
    ends_connection(receive(&mut control(Role::Server), &[&[0x00], &header[..]].concat()), Code::ExcessiveLoad);
    let mut header = Vec::new();
    frame::write_header(0xf0700, varint::MAX, &mut header);
    ends_connection(receive_frames(Role::Server, &[header]), Code::ExcessiveLoad);
}

#[test]
fn payloads_have_exactly_the_length_of_their_fields() {
    // RFC 9114 §7.1
    for kind in [0x03, 0x07, 0x0d] {
        for payload in [&[][..], &[0x40], &[0x00, 0x00]] {
            ends_connection(receive_frames(Role::Server, &[frame(kind, payload)]), Code::FrameError);
        }
    }
    for kind in [0xf0700, 0xf0701] {
        for payload in [&[][..], &[0x40]] {
            ends_connection(receive_frames(Role::Server, &[frame(kind, payload)]), Code::FrameError);
        }
    }
}

#[test]
fn goaway_names_a_request_stream_to_a_client_and_a_push_to_a_server() {
    // RFC 9114 §5.2, §7.2.6
    for id in [1, 2, 3] {
        ends_connection(receive_frames(Role::Client, &[frame(0x07, &[id])]), Code::IdError);
        assert_eq!(receive_frames(Role::Server, &[frame(0x07, &[id])]), Ok(vec![ControlEvent::GoAway(id.into())]));
    }
    assert_eq!(
        receive_frames(Role::Client, &[ControlReceiver::goaway(400).to_vec()]),
        Ok(vec![ControlEvent::GoAway(400)])
    );
}

#[test]
fn goaway_ids_never_grow_and_only_the_last_one_counts() {
    // RFC 9114 §5.2
    for role in [Role::Server, Role::Client] {
        let falling = [8, 8, 4].map(|id| ControlReceiver::goaway(id).to_vec());
        assert_eq!(receive_frames(role, &falling), Ok(vec![ControlEvent::GoAway(4)]));
        let rising = [4, 8].map(|id| ControlReceiver::goaway(id).to_vec());
        ends_connection(receive_frames(role, &rising), Code::IdError);
    }
}

#[test]
fn max_push_id_never_shrinks() {
    // RFC 9114 §7.2.7
    assert_eq!(receive_frames(Role::Server, &[1, 1, 2].map(|id| frame(0x0d, &[id]))), Ok(vec![]));
    ends_connection(receive_frames(Role::Server, &[2, 1].map(|id| frame(0x0d, &[id]))), Code::IdError);
}

#[test]
fn a_push_that_was_never_promised_cannot_be_cancelled() {
    // RFC 9114 §7.2.3
    ends_connection(receive_frames(Role::Server, &[frame(0x0d, &[8]), frame(0x03, &[0])]), Code::IdError);
    ends_connection(receive_frames(Role::Client, &[frame(0x03, &[0])]), Code::IdError);
}

#[test]
fn priority_updates_name_request_streams() {
    // RFC 9218 §7.2
    let update = ControlEvent::PriorityUpdate { stream_id: 4, value: "u=1".into() };
    assert_eq!(receive_frames(Role::Server, &[frame(0xf0700, b"\x04u=1")]), Ok(vec![update]));
    assert_eq!(ControlReceiver::priority_update(4, b"u=1"), frame(0xf0700, b"\x04u=1"));
    for id in [1, 2, 3] {
        ends_connection(receive_frames(Role::Server, &[frame(0xf0700, &[id])]), Code::IdError);
    }
    ends_connection(receive_frames(Role::Server, &[frame(0xf0701, &[0])]), Code::IdError);
}

#[test]
fn unread_priority_updates_are_dropped_and_counted() {
    let mut control = control(Role::Server);
    let mut stream = control.accept_uni();
    let updates = frame(0xf0700, &[0]).repeat(MAX_EVENTS + 4);
    let bytes = [&BEGINNING[..], &updates, &ControlReceiver::goaway(0)].concat();
    assert_eq!(control.on_uni_bytes(&mut stream, bytes.into()), Ok(UniVerdict::Continue));
    assert_eq!([control.take_dropped_priority_updates(), control.take_dropped_priority_updates()], [5, 0]);
    let events: Vec<_> = std::iter::from_fn(|| control.next_event()).collect();
    assert_eq!(events.len(), MAX_EVENTS + 1);
    assert_eq!(events.last(), Some(&ControlEvent::GoAway(0)));
}

#[test]
fn streams_that_exist_once_are_not_opened_again() {
    // RFC 9114 §6.2.1, RFC 9204 §4.2
    for kind in [CONTROL, QPACK_ENCODER, QPACK_DECODER] {
        let mut control = control(Role::Server);
        assert_eq!(receive(&mut control, &[kind as u8]), Ok(UniVerdict::Continue));
        ends_connection(receive(&mut control, &[kind as u8]), Code::StreamCreationError);
    }
}

#[test]
fn critical_streams_are_not_closed_and_others_may_be() {
    // RFC 9114 §6.2, §6.2.1; RFC 9204 §4.2
    let mut control = control(Role::Server);
    for (bytes, critical) in
        [(&[0x00][..], true), (&[0x02], true), (&[0x03], true), (&[], false), (&[0x40], false), (&[0x21], false)]
    {
        let mut stream = control.accept_uni();
        control.on_uni_bytes(&mut stream, Bytes::from_static(bytes)).unwrap();
        let closed = control.on_uni_closed(&stream);
        if critical {
            ends_connection(closed, Code::ClosedCriticalStream);
        } else {
            assert_eq!(closed, Ok(()));
        }
    }
}

#[test]
fn push_streams_end_the_connection() {
    // RFC 9114 §6.2.2, §7.2.7
    ends_connection(receive(&mut control(Role::Server), &[0x01, 0x00]), Code::StreamCreationError);
    ends_connection(receive(&mut control(Role::Client), &[0x01, 0x00]), Code::IdError);
}

#[test]
fn streams_of_unknown_types_are_refused_alone() {
    // RFC 9114 §6.2, §9
    let refusal = Ok(UniVerdict::StopSending(Code::StreamCreationError));
    for bytes in [&[0x04][..], &[0x21, 1, 2, 3], &[0x40, 0x54, 0xff], &[0xff; 8]] {
        let mut control = control(Role::Server);
        let mut stream = control.accept_uni();
        assert_eq!(control.on_uni_bytes(&mut stream, Bytes::from_static(bytes)), refusal);
        assert_eq!(control.on_uni_bytes(&mut stream, Bytes::from_static(&[0; 50])), Ok(UniVerdict::Continue));
    }
}

#[test]
fn instructions_that_need_a_dynamic_table_end_the_connection() {
    // RFC 9204 §3.2.3, §4.4
    for (bytes, code) in [
        (&[0x02, 0x20, 0x3f, 0x00][..], Code::QpackEncoderStreamError),
        (&[0x02, 0xc0], Code::QpackEncoderStreamError),
        (&[0x03, 0x40, 0x80], Code::QpackDecoderStreamError),
        (&[0x03, 0x01], Code::QpackDecoderStreamError),
    ] {
        ends_connection(receive(&mut control(Role::Server), bytes), code);
    }
    assert_eq!(receive(&mut control(Role::Server), &[0x02, 0x20]), Ok(UniVerdict::Continue));
    assert_eq!(receive(&mut control(Role::Server), &[0x03, 0x40]), Ok(UniVerdict::Continue));
}

proptest! {
    #[test]
    fn events_survive_any_split_of_the_stream(cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)) {
        let settings = Settings::announced_by(Role::Client, 100);
        let bytes = [
            &ControlReceiver::new(Role::Client, settings).preamble()[..],
            &frame(0xf0700, b"\x40\x08u=7, i"),
            &frame(0x21, &[0; 30]),
            &frame(0x0d, &[5]),
            &ControlReceiver::goaway(3),
        ]
        .concat();
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let mut control = control(Role::Server);
        let mut stream = control.accept_uni();
        for range in at.windows(2) {
            let chunk = Bytes::copy_from_slice(&bytes[range[0]..range[1]]);
            prop_assert_eq!(control.on_uni_bytes(&mut stream, chunk), Ok(UniVerdict::Continue));
        }
        let events: Vec<_> = std::iter::from_fn(|| control.next_event()).collect();
        prop_assert_eq!(events, [
            ControlEvent::Settings(settings),
            ControlEvent::PriorityUpdate { stream_id: 8, value: "u=7, i".into() },
            ControlEvent::GoAway(3),
        ]);
    }

    #[test]
    fn random_bytes_never_panic(
        server: bool,
        streams in prop::collection::vec(
            (0u8..5, any::<bool>(), prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..4)),
            0..6,
        ),
    ) {
        let mut control = control(if server { Role::Server } else { Role::Client });
        for (kind, with_settings, chunks) in streams {
            let mut stream = control.accept_uni();
            let beginning = if with_settings { BEGINNING.to_vec() } else { vec![kind] };
            for chunk in std::iter::once(beginning).chain(chunks) {
                if control.on_uni_bytes(&mut stream, chunk.into()).is_err() {
                    break;
                }
            }
            let _ = control.on_uni_closed(&stream);
        }
        while control.next_event().is_some() {}
    }
}

#[test]
fn frames_of_the_control_stream_are_counted_also_unknown_ones() {
    let mut control = control(Role::Server);
    receive(&mut control, &[&BEGINNING[..], &frame(0x21, b""), &frame(0x21, &[0; 50])].concat()).unwrap();
    assert_eq!((control.take_frames(), control.take_frames()), (3, 0));
}
