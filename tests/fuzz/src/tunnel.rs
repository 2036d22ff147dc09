//! Capsules, HTTP Datagrams, and a tunnel that reads them.

use bytes::Bytes;
use masque::{
    capsule::{Capsule, Reader},
    datagram,
    tunnel::Tunnel,
};

use crate::input::{choice, pieces};

/// The most bytes of a datagram that is kept.
const DATAGRAM_BYTES: u16 = 1_500;

/// Capsules mean the same wherever their stream is cut, and none longer than the limit is kept.
pub fn capsules(mut input: &[u8]) {
    let seed = choice(&mut input, u8::MAX);
    let bytes = Bytes::copy_from_slice(input);
    let whole = read([bytes.clone()]);
    assert_eq!(whole, read(pieces(bytes, seed)), "capsules mean the same wherever their stream is cut");
}

fn read(pieces: impl IntoIterator<Item = Bytes>) -> (Vec<Capsule>, bool) {
    let (mut reader, mut tunnel) = (Reader::new(DATAGRAM_BYTES), Tunnel::new(true));
    let mut capsules = Vec::new();
    for mut piece in pieces {
        while let Some(capsule) = reader.next(&mut piece) {
            if let Capsule::Datagram(datagram) = &capsule {
                assert!(
                    datagram.len() <= usize::from(DATAGRAM_BYTES),
                    "a datagram of {} bytes is kept",
                    datagram.len()
                );
            }
            if let Ok(Some(payload)) = tunnel.on_capsule(capsule.clone()) {
                assert!(
                    payload.len() < usize::from(DATAGRAM_BYTES),
                    "a payload is shorter than its datagram by a context ID"
                );
            }
            capsules.push(capsule);
        }
        assert!(piece.is_empty(), "the reader consumes all its input");
    }
    (capsules, reader.finish().is_ok())
}

/// A datagram's payload is a part of it, and a stream ID that was added can be removed.
pub fn datagrams(input: &[u8]) {
    let mut tunnel = Tunnel::new(true);
    if let Ok((quarter_stream_id, http_datagram)) = datagram::split(input) {
        assert!(quarter_stream_id < 1 << 60, "four times this number is a stream ID");
        assert!(input.ends_with(http_datagram));
        if let Ok(Some(payload)) = tunnel.on_datagram(http_datagram) {
            assert!(http_datagram.ends_with(payload) && payload.len() < http_datagram.len());
        }
    }
    if let Some((_, payload)) = datagram::context(input) {
        assert!(input.ends_with(payload) && payload.len() < input.len());
    }
    _ = tunnel.on_datagram(input);
}
