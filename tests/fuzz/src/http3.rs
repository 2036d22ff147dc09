//! HTTP/3: streams and field sections.

use bytes::{BufMut as _, Bytes, BytesMut};
use masque::{
    h3::{
        ControlEvent, ControlReceiver, Part, ProtocolError, RequestStream, Role, Settings, UniVerdict, encode_request,
        encode_response,
    },
    varint,
};

use crate::input::{choice, pieces};

/// The most bytes of a field section.
const SECTION_BYTES: u64 = 16 * 1024;

fn role(input: &mut &[u8]) -> Role {
    if choice(input, 2) == 0 { Role::Server } else { Role::Client }
}

/// A request stream means the same wherever it is cut, and ignores everything after its first error.
pub fn request_stream(mut input: &[u8]) {
    let (role, is_tunnel, seed) = (role(&mut input), choice(&mut input, 2) == 1, choice(&mut input, u8::MAX));
    let bytes = Bytes::copy_from_slice(input);
    let whole = read_request(role, is_tunnel, [bytes.clone()]);
    let cut = read_request(role, is_tunnel, pieces(bytes, seed));
    assert_eq!(whole, cut, "a stream means the same wherever it is cut");
}

/// The heads and trailers of a stream, its content in one piece, and its end.
type Read = (Vec<Part>, Vec<u8>, Result<(), ProtocolError>);

fn read_request(role: Role, is_tunnel: bool, pieces: impl IntoIterator<Item = Bytes>) -> Read {
    let mut stream = RequestStream::new(role, SECTION_BYTES);
    let (mut parts, mut content) = (Vec::new(), Vec::new());
    for piece in pieces {
        stream.on_bytes(piece);
        loop {
            match stream.next_part() {
                Ok(Some(Part::Data(data))) => {
                    assert!(!data.is_empty(), "pieces of content are not empty");
                    content.extend_from_slice(&data);
                }
                Ok(Some(part)) => {
                    let is_final = match &part {
                        Part::Request(_) => true,
                        Part::Response(head) => !head.is_interim(),
                        _ => false,
                    };
                    if is_final && is_tunnel {
                        stream.set_connect();
                    }
                    parts.push(part);
                }
                Ok(None) => break,
                Err(error) => {
                    stream.on_bytes(Bytes::from_static(&[0x21, 0, 0, 1, 0]));
                    assert_eq!(stream.next_part(), Ok(None), "it ignores everything after an error");
                    return (parts, content, Err(error));
                }
            }
        }
    }
    let end = stream.on_fin();
    (parts, content, end)
}

/// A peer's unidirectional streams mean the same wherever they are cut, and queue a bounded number of events.
pub fn control_streams(mut input: &[u8]) {
    let (role, seed) = (role(&mut input), choice(&mut input, u8::MAX));
    // Zero to three streams, one after another; the last gets the rest.
    let mut streams = Vec::new();
    for _ in 0..choice(&mut input, 3) {
        let len = usize::from(choice(&mut input, u8::MAX)).min(input.len());
        let (stream, rest) = input.split_at(len);
        streams.push(Bytes::copy_from_slice(stream));
        input = rest;
    }
    streams.push(Bytes::copy_from_slice(input));
    let whole = read_control(role, streams.iter().map(|stream| vec![stream.clone()]));
    let cut = read_control(role, streams.iter().map(|stream| pieces(stream.clone(), seed).collect()));
    assert_eq!(whole, cut, "streams mean the same wherever they are cut");
}

fn read_control(role: Role, streams: impl Iterator<Item = Vec<Bytes>>) -> (Vec<ControlEvent>, Option<ProtocolError>) {
    let settings = Settings::announced_by(role, SECTION_BYTES);
    let (mut control, mut events) = (ControlReceiver::new(role, settings), Vec::new());
    for pieces in streams {
        let mut stream = control.accept_uni();
        for piece in pieces {
            let verdict = control.on_uni_bytes(&mut stream, piece);
            // Events wait at most until the next bytes.
            for event in std::iter::from_fn(|| control.next_event()) {
                // If several GOAWAYs wait, the last one replaces the others.
                if matches!(event, ControlEvent::GoAway(_)) {
                    events.retain(|event| !matches!(event, ControlEvent::GoAway(_)));
                }
                events.push(event);
            }
            match verdict {
                Ok(UniVerdict::Continue) => {}
                Ok(UniVerdict::StopSending(_)) => break,
                Err(error) => return (events, Some(error)),
            }
        }
        if let Err(error) = control.on_uni_closed(&stream) {
            return (events, Some(error));
        }
    }
    (events, None)
}

/// A head that was read can be written, and is the same when it is read again.
pub fn field_section(mut input: &[u8]) {
    let role = role(&mut input);
    let frame = |section: &[u8]| {
        let mut out = BytesMut::new();
        varint::write(1, &mut out);
        varint::write(section.len() as u64, &mut out);
        out.put_slice(section);
        out.freeze()
    };
    let (parts, _, _) = read_request(role, false, [frame(input)]);
    let again = match parts.first() {
        Some(Part::Request(head)) => encode_request(head, None),
        Some(Part::Response(head)) => encode_response(head, None),
        _ => return,
    };
    let again = again.unwrap_or_else(|error| panic!("a head that was read cannot be written: {error}"));
    let (read, _, _) = read_request(role, false, [again]);
    match (&parts[0], read.first()) {
        (head, Some(again)) => assert_eq!(head, again),
        (head, None) => panic!("{head:?} cannot be read again"),
    }
}
