//! HTTP Datagrams (RFC 9297 §2) and the contexts of UDP proxying (RFC 9298 §4 and §5).
//!
//! ```text
//! QUIC DATAGRAM frame:  quarter stream ID │ context ID │ payload
//! DATAGRAM capsule:     type 0 │ length   │ context ID │ payload
//! ```
//!
//! All of this runs once per packet: it neither allocates nor copies payloads.

use std::ops::Deref;

use bytes::BufMut;
use thiserror::Error;

use crate::{
    h3::{Code, ProtocolError},
    varint,
};

/// The context of plain UDP payloads (RFC 9298 §4).
pub const UDP_CONTEXT: u64 = 0;

/// The longest UDP payload that may travel in [`UDP_CONTEXT`], in bytes (RFC 9298 §5).
pub const MAX_UDP_PAYLOAD_BYTES: usize = 65_527;

/// The largest quarter stream ID: a quarter of the largest client-initiated bidirectional stream ID
/// (RFC 9297 §2.1).
pub const MAX_QUARTER_STREAM_ID: u64 = (1 << 60) - 1;

/// The code with which a request ends if a datagram arrives for it and its method has no known use for datagrams (RFC 9297 §2).
pub const WITHOUT_USE: Code = Code::DatagramError;

/// Why a QUIC DATAGRAM frame is not an HTTP Datagram. In either case the connection ends with `H3_DATAGRAM_ERROR` (RFC
/// 9297 §2.1): the [`ProtocolError`] made from it.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum DatagramError {
    /// The frame ends before its quarter stream ID does.
    #[error("{}", self.reason())]
    Truncated,
    /// The quarter stream ID is above [`MAX_QUARTER_STREAM_ID`]: no such stream can exist.
    #[error("{}", self.reason())]
    NoSuchStream,
}

impl DatagramError {
    const fn reason(self) -> &'static str {
        match self {
            Self::Truncated => "a datagram is too short for its quarter stream ID",
            Self::NoSuchStream => "a datagram names a stream that cannot exist",
        }
    }
}

impl From<DatagramError> for ProtocolError {
    fn from(error: DatagramError) -> Self {
        Self::Connection(Code::DatagramError, error.reason())
    }
}

/// Splits the content of a QUIC DATAGRAM frame into the quarter stream ID and the HTTP Datagram after it.
///
/// # Errors
/// See [`DatagramError`]: the connection has to end. The caller checks whether the stream exists.
#[inline]
pub fn split(frame: &[u8]) -> Result<(u64, &[u8]), DatagramError> {
    let mut rest = frame;
    match varint::read(&mut rest) {
        Some(quarter_stream_id) if quarter_stream_id <= MAX_QUARTER_STREAM_ID => Ok((quarter_stream_id, rest)),
        Some(_) => Err(DatagramError::NoSuchStream),
        None => Err(DatagramError::Truncated),
    }
}

/// Splits an HTTP Datagram into its context ID and the payload after it, or returns `None` if it ends before the
/// context ID does.
#[inline]
#[must_use]
pub fn context(datagram: &[u8]) -> Option<(u64, &[u8])> {
    let mut rest = datagram;
    varint::read(&mut rest).map(|context_id| (context_id, rest))
}

/// Returns the header that precedes a UDP payload on the request stream `stream_id` in a QUIC DATAGRAM frame: the
/// quarter stream ID and [`UDP_CONTEXT`].
#[inline]
#[must_use]
pub fn header(stream_id: u64) -> Header {
    header_as_long(stream_id, 1)
}

/// Like [`header`], with a quarter stream ID of at least `id_bytes`: 1, 2, 4 or 8. Equal payloads of all streams then make packets of equal
/// sizes, which travel to the peer as one message (UDP GSO).
#[inline]
#[must_use]
pub fn header_as_long(stream_id: u64, id_bytes: usize) -> Header {
    debug_assert_eq!(stream_id % 4, 0, "requests travel on client-initiated bidirectional streams");
    let quarter = stream_id / 4;
    Header::new(|out| {
        varint::write_as(quarter, id_bytes.max(varint::encoded_len(quarter)), out);
        varint::write(UDP_CONTEXT, out);
    })
}

/// Returns how many bytes the quarter stream ID of the request stream `stream_id` takes at least.
#[inline]
#[must_use]
pub const fn id_bytes(stream_id: u64) -> usize {
    varint::encoded_len(stream_id / 4)
}

/// Returns the header that precedes meaningless bytes on the request stream `stream_id`: the quarter stream ID and a
/// context ID that this end allocates (RFC 9298 §4: the client's are even, the proxy's are odd) and never registers, so
/// that the peer ignores the bytes after it.
#[inline]
#[must_use]
pub fn filler(stream_id: u64, by_client: bool) -> Header {
    // The largest IDs that take one byte: IDs registered by extensions start from below.
    Header::of(&[stream_id / 4, if by_client { 62 } else { 63 }])
}

/// A few encoded integers that precede a payload, kept inline. Dereferences to its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    bytes: [u8; Self::CAPACITY_BYTES],
    len: u8,
}

impl Header {
    /// Room for the longest header in use: one unbounded integer between two that take a byte each.
    const CAPACITY_BYTES: usize = 10;

    /// Encodes `integers` in order. The caller ensures that they fit.
    #[inline]
    pub(crate) fn of(integers: &[u64]) -> Self {
        Self::new(|out| integers.iter().for_each(|integer| varint::write(*integer, out)))
    }

    #[inline]
    fn new(write: impl FnOnce(&mut &mut [u8])) -> Self {
        let mut bytes = [0; Self::CAPACITY_BYTES];
        let mut free = &mut bytes[..];
        write(&mut free);
        let len = (Self::CAPACITY_BYTES - free.remaining_mut()) as u8;
        Self { bytes, len }
    }
}

impl Deref for Header {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quarter_stream_ids_end_where_stream_ids_end_rfc_9297_2_1() {
        for (frame, expected) in [
            (&[0x00][..], Ok((0, &[][..]))),
            (&[0x01, 0x00, 0xaa], Ok((1, &[0x00, 0xaa][..]))),
            (&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Ok((MAX_QUARTER_STREAM_ID, &[][..]))),
            (&[0xd0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00], Err(DatagramError::NoSuchStream)),
            (&[], Err(DatagramError::Truncated)),
            (&[0x40], Err(DatagramError::Truncated)),
        ] {
            assert_eq!(split(frame), expected, "{frame:x?}");
        }
    }

    #[test]
    fn a_context_id_may_take_any_length_but_must_be_whole() {
        assert_eq!(context(&[0x00]), Some((0, &[][..])));
        assert_eq!(context(&[0x40, 0x00, 0x07]), Some((0, &[0x07][..])));
        assert_eq!(context(&[0x02, 0x07]), Some((2, &[0x07][..])));
        assert_eq!(context(&[]), None);
        assert_eq!(context(&[0x80, 0x00]), None);
    }

    proptest! {
        #[test]
        fn headers_read_back(quarter in 0..=MAX_QUARTER_STREAM_ID, payload: Vec<u8>) {
            let frame = [&header(quarter * 4)[..], &payload[..]].concat();
            let (read, datagram) = split(&frame).unwrap();
            prop_assert_eq!(read, quarter);
            prop_assert_eq!(context(datagram), Some((UDP_CONTEXT, &payload[..])));
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = split(&bytes);
            let _ = context(&bytes);
        }
    }
}
