use proptest::prelude::*;

use super::*;
use crate::h3::{
    frame::{self, write_header},
    message::{encode_request, encode_response},
};

const LIMIT: u64 = 16 * 1024;

fn field(name: &'static str, value: &'static str) -> Field {
    Field::new(name, value)
}

fn request(method: &'static str, fields: Vec<Field>) -> RequestHead {
    let connect = method == "CONNECT";
    RequestHead {
        method: method.into(),
        scheme: (!connect).then(|| "https".into()),
        authority: Some(if connect { "target.example:443" } else { "proxy.example" }.into()),
        path: (!connect).then(|| "/".into()),
        protocol: None,
        fields,
    }
}

fn head(method: &'static str, fields: Vec<Field>) -> Bytes {
    encode_request(&request(method, fields), None).unwrap()
}

fn response(status: u16, fields: Vec<Field>) -> Bytes {
    encode_response(&ResponseHead { status, fields }, None).unwrap()
}

fn raw(kind: u64, payload: &[u8]) -> Bytes {
    let mut out = Vec::new();
    write_header(kind, payload.len() as u64, &mut out);
    out.extend_from_slice(payload);
    out.into()
}

fn data(payload: &[u8]) -> Bytes {
    raw(frame::DATA, payload)
}

fn trailers() -> Bytes {
    raw(frame::HEADERS, &qpack::encode(&[field("checksum", "1")]))
}

/// The parts of `chunks`, with adjacent data joined, and the verdict on the end.
fn read(stream: &mut RequestStream, chunks: &[&[u8]]) -> (Vec<Part>, Result<(), ProtocolError>) {
    let mut parts = Vec::new();
    for chunk in chunks {
        stream.on_bytes(Bytes::copy_from_slice(chunk));
        loop {
            match (stream.next_part(), parts.last_mut()) {
                (Ok(Some(Part::Data(new))), Some(Part::Data(data))) => *data = [&data[..], &new].concat().into(),
                (Ok(Some(part)), _) => parts.push(part),
                (Ok(None), _) => break,
                (Err(error), _) => return (parts, Err(error)),
            }
        }
    }
    (parts, stream.on_fin())
}

fn outcome(role: Role, frames: &[Bytes]) -> Result<(), ProtocolError> {
    read(&mut RequestStream::new(role, LIMIT), &[&frames.concat()]).1
}

#[track_caller]
fn ends_connection(role: Role, frames: &[Bytes], expected: Code) {
    match outcome(role, frames) {
        Err(ProtocolError::Connection(code, _)) => assert_eq!(code, expected),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn ends_stream(role: Role, frames: &[Bytes], expected: Code) {
    match outcome(role, frames) {
        Err(ProtocolError::Stream(code, _)) => assert_eq!(code, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_idle_stream_is_small() {
    assert!(size_of::<RequestStream>() <= 150, "{}", size_of::<RequestStream>());
    let mut stream = RequestStream::new(Role::Server, LIMIT);
    let chunk = Bytes::from([&head("CONNECT", vec![])[..], &data(b"abc"), &[0x00]].concat());
    stream.on_bytes(chunk.clone());
    while stream.next_part().unwrap().is_some() {}
    assert_eq!(stream.section.capacity(), 0);
    assert!(chunk.is_unique(), "the stream keeps a received chunk alive");
}

#[test]
fn a_message_is_a_head_then_content_then_trailers() {
    // RFC 9114 §4.1
    let frames = [head("POST", vec![]), data(b"ab"), data(b""), data(b"c"), trailers()].concat();
    let (parts, end) = read(&mut RequestStream::new(Role::Server, LIMIT), &[&frames]);
    assert_eq!(end, Ok(()));
    assert_eq!(
        parts,
        [
            Part::Request(request("POST", vec![])),
            Part::Data("abc".into()),
            Part::Trailers(vec![field("checksum", "1")]),
        ]
    );
}

#[test]
fn a_tunnel_is_asked_for_and_granted() {
    // RFC 9298 §3.4, §3.5
    let asked = RequestHead {
        protocol: Some("connect-udp".into()),
        scheme: Some("https".into()),
        authority: Some("proxy.example".into()),
        path: Some("/.well-known/masque/udp/192.0.2.6/443/".into()),
        ..request("CONNECT", vec![field("capsule-protocol", "?1"), field("proxy-authorization", "Bearer x")])
    };
    let bytes = encode_request(&asked, None).unwrap();
    let (parts, end) = read(&mut RequestStream::new(Role::Server, LIMIT), &[&bytes]);
    assert_eq!((parts, end), (vec![Part::Request(asked)], Ok(())));

    let granted = ResponseHead { status: 200, fields: vec![field("capsule-protocol", "?1")] };
    let bytes = encode_response(&granted, None).unwrap();
    let (parts, end) = read(&mut RequestStream::new(Role::Client, LIMIT), &[&bytes]);
    assert_eq!((parts, end), (vec![Part::Response(granted)], Ok(())));
}

#[test]
fn content_is_a_slice_of_what_was_received() {
    let chunk = Bytes::from([&head("POST", vec![])[..], &data(b"abc")].concat());
    let mut stream = RequestStream::new(Role::Server, LIMIT);
    stream.on_bytes(chunk.clone());
    stream.next_part().unwrap();
    let Some(Part::Data(content)) = stream.next_part().unwrap() else { panic!("no data") };
    assert_eq!(content.as_ptr(), chunk[chunk.len() - 3..].as_ptr());
}

#[test]
fn frames_out_of_order_end_the_connection() {
    // RFC 9114 §4.1
    use Role::{Client, Server};
    let (post, ok) = (head("POST", vec![]), response(200, vec![]));
    ends_connection(Server, &[data(b"a")], Code::FrameUnexpected);
    ends_connection(Server, &[data(b"")], Code::FrameUnexpected);
    ends_connection(Server, &[post.clone(), trailers(), data(b"a")], Code::FrameUnexpected);
    ends_connection(Server, &[post, trailers(), trailers()], Code::FrameUnexpected);
    ends_connection(Client, &[data(b"a")], Code::FrameUnexpected);
    ends_connection(Client, &[response(100, vec![]), data(b"a")], Code::FrameUnexpected);
    ends_connection(Client, &[ok, trailers(), data(b"")], Code::FrameUnexpected);
}

#[test]
fn frames_of_other_streams_end_the_connection() {
    // RFC 9114 §7.2, §7.2.8; RFC 9218 §7.2
    for role in [Role::Server, Role::Client] {
        let head = if role == Role::Server { head("GET", vec![]) } else { response(200, vec![]) };
        for kind in [0x02, 0x03, 0x04, 0x06, 0x07, 0x08, 0x09, 0x0d, 0xf0700, 0xf0701] {
            ends_connection(role, &[raw(kind, &[0])], Code::FrameUnexpected);
            ends_connection(role, &[head.clone(), raw(kind, &[0])], Code::FrameUnexpected);
        }
    }
}

#[test]
fn a_promised_push_is_unexpected_for_a_server_and_beyond_the_limit_for_a_client() {
    // RFC 9114 §7.2.5
    ends_connection(Role::Server, &[raw(0x05, &[0])], Code::FrameUnexpected);
    ends_connection(Role::Client, &[raw(0x05, &[0])], Code::IdError);
    ends_connection(Role::Client, &[response(200, vec![]), raw(0x05, &[0])], Code::IdError);
}

#[test]
fn unknown_frames_are_skipped_everywhere_and_never_buffered() {
    // RFC 9114 §7.2.8, §9
    let unknown = raw(0x21, &[0; 100_000]);
    let frames =
        [unknown.clone(), head("POST", vec![]), unknown.clone(), data(b"a"), unknown.clone(), trailers(), unknown];
    assert_eq!(outcome(Role::Server, &frames), Ok(()));

    let mut endless = RequestStream::new(Role::Server, LIMIT);
    let mut header = Vec::new();
    write_header(0x21, crate::varint::MAX, &mut header);
    endless.on_bytes(header.into());
    for _ in 0..100 {
        endless.on_bytes(Bytes::from_static(&[0; 1000]));
        assert_eq!(endless.next_part(), Ok(None));
    }
    assert_eq!((endless.input.len(), endless.section.capacity()), (0, 0));
}

#[test]
fn a_tunnel_carries_only_data_and_unknown_frames() {
    // RFC 9114 §4.4
    for (role, head) in
        [(Role::Server, head("CONNECT", vec![])), (Role::Client, response(200, vec![field("content-length", "0")]))]
    {
        let tunnel = |frame: Bytes| {
            let mut stream = RequestStream::new(role, LIMIT);
            // The frame after the head arrives together with it: the CONNECT is still accepted first.
            stream.on_bytes([&head[..], &frame].concat().into());
            stream.next_part().unwrap().unwrap();
            stream.set_connect();
            let part = stream.next_part();
            stream.on_fin().and(part)
        };
        assert_eq!(tunnel(data(b"abc")), Ok(Some(Part::Data("abc".into()))));
        assert_eq!(tunnel(raw(0x21, b"abc")), Ok(None));
        for frame in [trailers(), raw(0x04, &[]), raw(0x05, &[0]), raw(0x06, &[])] {
            assert_eq!(tunnel(frame).unwrap_err().code(), Code::FrameUnexpected);
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_incomplete() {
    // RFC 9114 §4.1, §8.1
    ends_stream(Role::Server, &[], Code::RequestIncomplete);
    ends_stream(Role::Server, &[raw(0x21, b"x")], Code::RequestIncomplete);
    ends_stream(Role::Client, &[], Code::MessageError);
    ends_stream(Role::Client, &[response(103, vec![])], Code::MessageError);
}

#[test]
fn a_stream_that_ends_inside_a_frame_ends_the_connection() {
    // RFC 9114 §7.1
    let whole = [head("POST", vec![]), data(b"abc")].concat();
    let between = head("POST", vec![]).len();
    for cut in (1..whole.len()).filter(|cut| *cut != between) {
        let (_, end) = read(&mut RequestStream::new(Role::Server, LIMIT), &[&whole[..cut]]);
        assert!(matches!(end, Err(ProtocolError::Connection(Code::FrameError, _))), "cut at {cut}: {end:?}");
    }
}

#[test]
fn content_matches_its_declared_length() {
    // RFC 9114 §4.1.2
    for (content, trailers_follow) in [(&b"ab"[..], false), (b"abcd", false), (b"", false), (b"ab", true)] {
        for (role, head) in [
            (Role::Server, head("POST", vec![field("content-length", "3")])),
            (Role::Client, response(200, vec![field("content-length", "3")])),
        ] {
            let mut frames = vec![head, data(content)];
            frames.extend(trailers_follow.then(trailers));
            ends_stream(role, &frames, Code::MessageError);
        }
    }
    let head = head("POST", vec![field("content-length", "3")]);
    assert_eq!(outcome(Role::Server, &[head, data(b"ab"), data(b"c"), trailers()]), Ok(()));
}

#[test]
fn the_declared_length_counts_nothing_where_there_is_no_content() {
    // RFC 9110 §9.3.6, §15.3.5, §15.4.5
    let length = || vec![field("content-length", "3")];
    assert_eq!(outcome(Role::Server, &[head("CONNECT", length()), data(b"abcdef")]), Ok(()));
    assert_eq!(outcome(Role::Client, &[response(304, length())]), Ok(()));
    assert_eq!(outcome(Role::Client, &[response(103, length()), response(200, vec![])]), Ok(()));
}

#[test]
fn interim_responses_precede_the_final_one() {
    // RFC 9114 §4.1
    let frames = [response(100, vec![]), response(103, vec![]), response(200, vec![]), data(b"a")].concat();
    let (parts, end) = read(&mut RequestStream::new(Role::Client, LIMIT), &[&frames]);
    assert_eq!(end, Ok(()));
    let statuses: Vec<u16> = parts
        .iter()
        .filter_map(|part| if let Part::Response(head) = part { Some(head.status) } else { None })
        .collect();
    assert_eq!(statuses, [100, 103, 200]);
    ends_stream(Role::Client, &[response(200, vec![]), response(200, vec![])], Code::MessageError);
}

#[test]
fn a_malformed_message_ends_its_stream_and_a_broken_section_the_connection() {
    // RFC 9114 §4.1.2, RFC 9204 §2.2
    ends_stream(Role::Server, &[response(200, vec![])], Code::MessageError);
    ends_stream(Role::Client, &[head("GET", vec![])], Code::MessageError);
    ends_stream(Role::Server, &[raw(frame::HEADERS, &[0, 0])], Code::MessageError);
    ends_connection(Role::Server, &[raw(frame::HEADERS, &[])], Code::QpackDecompressionFailed);
    ends_connection(Role::Server, &[raw(frame::HEADERS, &[0, 0, 0x80])], Code::QpackDecompressionFailed);
}

#[test]
fn a_field_section_beyond_the_limit_is_refused_before_it_is_buffered() {
    // RFC 9114 §4.2.2
    let mut stream = RequestStream::new(Role::Server, 100);
    let mut header = Vec::new();
    write_header(frame::HEADERS, 101, &mut header);
    let (_, end) = read(&mut stream, &[&header]);
    assert!(matches!(end, Err(ProtocolError::Stream(Code::ExcessiveLoad, _))));
    assert_eq!(end.unwrap_err().answer(), Some(431));

    // Small enough when compressed, but too large when decoded.
    let (_, end) = read(&mut RequestStream::new(Role::Server, 100), &[&head("GET", vec![])]);
    assert_eq!(end, Err(qpack::SECTION_TOO_LARGE));
}

#[test]
fn after_an_error_the_stream_is_deaf() {
    let mut stream = RequestStream::new(Role::Server, LIMIT);
    let (_, end) = read(&mut stream, &[&response(200, vec![])]);
    assert!(end.is_err());
    assert_eq!(read(&mut stream, &[&data(b"abc"), &raw(0x04, &[]), &[0x01]]), (vec![], Ok(())));
}

/// A valid stream: a head, content with unknown frames in between, and optionally trailers.
fn valid_stream() -> impl Strategy<Value = (Role, Vec<u8>)> {
    let body = prop::collection::vec((prop::sample::select(vec![0x00, 0x21, 0x4040]), 0usize..50), 0..6);
    (any::<bool>(), body, any::<bool>()).prop_map(|(server, body, with_trailers)| {
        let (role, mut bytes) = if server {
            (Role::Server, head("POST", vec![field("user-agent", "x")]).to_vec())
        } else {
            (Role::Client, [response(103, vec![]), response(200, vec![field("server", "x")])].concat())
        };
        for (kind, len) in body {
            bytes.extend_from_slice(&raw(kind, &vec![len as u8; len]));
        }
        if with_trailers {
            bytes.extend_from_slice(&trailers());
        }
        (role, bytes)
    })
}

proptest! {
    #[test]
    fn parts_survive_any_split_of_the_stream(
        (role, bytes) in valid_stream(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let whole = read(&mut RequestStream::new(role, LIMIT), &[&bytes]);
        prop_assert_eq!(whole.1, Ok(()));
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let chunks: Vec<&[u8]> = at.windows(2).map(|range| &bytes[range[0]..range[1]]).collect();
        prop_assert_eq!(&read(&mut RequestStream::new(role, LIMIT), &chunks), &whole);
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        prop_assert_eq!(&read(&mut RequestStream::new(role, LIMIT), &single), &whole);
    }

    #[test]
    fn bytes_added_before_the_parts_were_pulled_are_kept((role, bytes) in valid_stream(), cut: prop::sample::Index) {
        let whole = read(&mut RequestStream::new(role, LIMIT), &[&bytes]);
        let (first, second) = bytes.split_at(cut.index(bytes.len()));
        let mut stream = RequestStream::new(role, LIMIT);
        stream.on_bytes(Bytes::copy_from_slice(first));
        prop_assert_eq!(read(&mut stream, &[second]), whole);
    }

    #[test]
    fn random_bytes_never_panic(
        server: bool,
        prefix: bool,
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..8),
    ) {
        let role = if server { Role::Server } else { Role::Client };
        let mut stream = RequestStream::new(role, 64);
        let head = if server { head("POST", vec![]) } else { response(200, vec![]) };
        let mut chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
        if prefix {
            stream.max_field_section_size = LIMIT;
            chunks.insert(0, &head);
        }
        let _ = read(&mut stream, &chunks);
        prop_assert!(stream.section.len() as u64 <= stream.max_field_section_size);
    }
}

#[test]
fn all_frames_are_counted_also_frames_without_a_part() {
    let mut stream = RequestStream::new(Role::Server, LIMIT);
    let chunks = [&head("POST", Vec::new())[..], &raw(0x21, b"")[..], &data(b"")[..], &raw(0x17, &[0; 100])[..]];
    assert_eq!(read(&mut stream, &chunks).0.len(), 1);
    assert_eq!((stream.take_frames(), stream.take_frames()), (4, 0));
    // A frame counts once, however it is cut.
    let bytes = data(&[7; 10]);
    read(&mut stream, &[&bytes[..1], &bytes[1..5], &bytes[5..]]).1.unwrap();
    assert_eq!(stream.take_frames(), 1);
}
