//! The HTTP/2 authority that gRPC clients send over the Unix socket, sent byte by byte, because other HTTP/2 clients refuse to
//! send such values.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use lab::site::{SOON, Site, Terms};

/// The manual's page about the option to set.
const MANUAL: &str = include_str!("../../../docs/control.md");

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// With a message of this size after gRPC's prefix of five bytes.
    Answered(usize),
    /// By RST_STREAM with this error code (RFC 9113 §7).
    Reset(u32),
}

const PROTOCOL_ERROR: u32 = 1;

// Types and flags of frames (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A field as grpcio encodes it: a literal with a new name, without Huffman coding (RFC 7541 §6.2.1).
fn field(name: &str, value: &str) -> Vec<u8> {
    let length = |text: &str| u8::try_from(text.len()).ok().filter(|length| *length < 127).unwrap();
    [&[0x40, length(name)], name.as_bytes(), &[length(value)], value.as_bytes()].concat()
}

/// Calls GetStatus as a client that sends `authority`.
fn call(site: &Site, authority: &str) -> End {
    let mut stream = UnixStream::connect(site.path("control.sock")).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let fields = [
        (":path", "/paced.v1.ControlService/GetStatus"),
        (":authority", authority),
        (":method", "POST"),
        (":scheme", "http"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let fields = fields.map(|(name, value)| field(name, value)).concat();
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, END_HEADERS, 1, &fields),
        // An empty message.
        frame(DATA, END_STREAM, 1, &[0; 5]),
    ];
    stream.write_all(&request.concat()).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).unwrap();
        match (head[3], head[8]) {
            (DATA, 1) => return End::Answered(payload.len().saturating_sub(5)),
            (RST_STREAM, 1) => return End::Reset(u32::from_be_bytes(payload.try_into().unwrap())),
            (HEADERS, 1) if head[4] & END_STREAM != 0 => panic!("an answer of trailers only: {payload:?}"),
            _ => {}
        }
    }
}

/// The value that the manual gives for a channel option, in a line of Python.
fn option(name: &str) -> Option<&'static str> {
    let (_, behind) = MANUAL.split_once(&format!("(\"{name}\", \""))?;
    Some(behind.split_once("\")")?.0)
}

#[test]
fn the_manual_says_which_authority_a_client_has_to_set_that_sends_the_sockets_path() {
    lab::ring!(Netns);
    let site = Site::new(Terms::default()).unwrap();
    let path = site.path("control.sock").display().to_string();
    // As captured from grpcio 1.85, which omits the first slash.
    let encoded = path.trim_start_matches('/').replace('/', "%2F");
    for authority in [&encoded, &path] {
        assert_eq!(
            call(&site, authority),
            End::Reset(PROTOCOL_ERROR),
            "{authority}: the manual's advice is not needed"
        );
    }
    let documented = option("grpc.default_authority").expect("the manual names the option and a value");
    for authority in [documented, "relay.example.org:9443", "anything"] {
        let end = call(&site, authority);
        assert!(matches!(end, End::Answered(bytes) if bytes > 0), "{authority}: {end:?}");
    }
    let java = format!("overrideAuthority(\"{documented}\")");
    assert!(
        MANUAL.contains(&java) && MANUAL.contains("Stream removed"),
        "the manual has the symptom and Java's option"
    );
}
