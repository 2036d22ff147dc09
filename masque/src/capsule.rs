//! The Capsule Protocol (RFC 9297 §3): the content of a tunnel's stream once it is open.
//!
//! ```text
//! capsule = type (varint) │ length (varint) │ value
//! ```
//!
//! | input | output |
//! |---|---|
//! | DATAGRAM capsule within the bound | [`Capsule::Datagram`], a slice of the input if it arrived in one piece |
//! | DATAGRAM capsule above the bound | [`Capsule::Oversize`]; its value is skipped as it arrives |
//! | any other type | [`Capsule::Unknown`]; its value is skipped as it arrives, at any length (RFC 9297 §3.2) |

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

use crate::{
    datagram::{Header, UDP_CONTEXT},
    h3::Code,
    varint,
};

/// The capsule type that carries an HTTP Datagram (RFC 9297 §3.5).
const DATAGRAM: u64 = 0x00;

/// How many bytes of an oversize capsule are reported: enough for the longest context ID.
pub const OVERSIZE_START_BYTES: usize = 8;

/// The longest head of a capsule that [`Reader`] needs to classify it.
const MAX_HEAD_BYTES: usize = 8 + 8 + OVERSIZE_START_BYTES;

/// The capacity initially reserved for a datagram that arrives in pieces, so that announcing a length costs the
/// receiver no more than sending a packet does.
const FIRST_RESERVATION_BYTES: usize = 2048;

/// A capsule that a peer sent on the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capsule {
    /// An HTTP Datagram: context ID and payload, not yet split. May be empty.
    Datagram(Bytes),
    /// An HTTP Datagram longer than the reader's bound.
    Oversize {
        /// Its length, including the context ID.
        len_bytes: u64,
        /// Its first bytes, which contain the context ID.
        start: [u8; OVERSIZE_START_BYTES],
    },
    /// A capsule of another type, which the receiver has to ignore.
    Unknown(u64),
}

/// The stream ended inside a capsule: the message is malformed (RFC 9297 §3.3), so the caller resets the stream
/// instead of closing it.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the stream ended inside a capsule")]
pub struct Truncated;

impl Truncated {
    /// Returns the code with which the stream is reset (RFC 9114 §4.1.2).
    #[must_use]
    pub const fn code(self) -> Code {
        Code::MessageError
    }
}

/// Reads capsules from a stream whose pieces may be cut anywhere.
///
/// Holds at most one capsule head, or one datagram up to the bound; nothing is queued.
#[derive(Debug)]
pub struct Reader {
    state: State,
    max_bytes: u16,
}

#[derive(Debug)]
enum State {
    /// The first `len` bytes of a head.
    Head { bytes: [u8; MAX_HEAD_BYTES], len: u8 },
    /// A datagram that lacks this many bytes.
    Datagram { value: BytesMut, missing_bytes: u16 },
    /// A value with this many bytes left to discard.
    Skip(u64),
}

impl State {
    const START: Self = Self::Head { bytes: [0; MAX_HEAD_BYTES], len: 0 };

    /// Skips the next `bytes` of the current capsule, if any.
    fn skip(bytes: u64) -> Self {
        if bytes == 0 { Self::START } else { Self::Skip(bytes) }
    }
}

impl Reader {
    /// Creates a reader of HTTP Datagrams of up to `max_bytes` each, including the context ID; at least
    /// [`OVERSIZE_START_BYTES`]. No useful datagram is longer than 65,535: an eight-byte context ID and the longest
    /// UDP payload.
    #[must_use]
    pub fn new(max_bytes: u16) -> Self {
        Self { state: State::START, max_bytes: max_bytes.max(OVERSIZE_START_BYTES as u16) }
    }

    /// Takes bytes from the front of `input` and returns the next capsule, or `None` once `input` is used up.
    ///
    /// Call it until it returns `None`, then again with the next piece of the stream. No input is an error here: any
    /// bytes are a sequence of capsules, unless they end early (see [`Reader::finish`]).
    pub fn next(&mut self, input: &mut Bytes) -> Option<Capsule> {
        while !input.is_empty() {
            match &mut self.state {
                State::Head { bytes, len } => {
                    let held = usize::from(*len);
                    let taken = input.len().min(MAX_HEAD_BYTES - held);
                    bytes[held..held + taken].copy_from_slice(&input[..taken]);
                    let Some((head, head_bytes)) = Head::read(&bytes[..held + taken], self.max_bytes) else {
                        *len += taken as u8;
                        input.advance(taken);
                        continue;
                    };
                    input.advance(head_bytes - held);
                    if let Some(capsule) = self.begin(head, input) {
                        return Some(capsule);
                    }
                }
                State::Datagram { value, missing_bytes } => {
                    let piece = input.split_to(input.len().min(usize::from(*missing_bytes)));
                    value.extend_from_slice(&piece);
                    *missing_bytes -= piece.len() as u16;
                    if *missing_bytes == 0 {
                        let datagram = value.split().freeze();
                        self.state = State::START;
                        return Some(Capsule::Datagram(datagram));
                    }
                }
                State::Skip(missing_bytes) => {
                    let skipped = (*missing_bytes).min(input.len() as u64);
                    input.advance(skipped as usize);
                    self.state = State::skip(*missing_bytes - skipped);
                }
            }
        }
        None
    }

    /// Proceeds to the value after `head`, and returns the capsule if it needs no further input.
    fn begin(&mut self, head: Head, input: &mut Bytes) -> Option<Capsule> {
        match head {
            Head::Datagram(len) if input.len() >= usize::from(len) => {
                self.state = State::START;
                Some(Capsule::Datagram(input.split_to(usize::from(len))))
            }
            Head::Datagram(len) => {
                let value = BytesMut::with_capacity(usize::from(len).min(FIRST_RESERVATION_BYTES));
                self.state = State::Datagram { value, missing_bytes: len };
                None
            }
            Head::Oversize { len_bytes, start } => {
                self.state = State::skip(len_bytes - OVERSIZE_START_BYTES as u64);
                Some(Capsule::Oversize { len_bytes, start })
            }
            Head::Unknown { kind, len_bytes } => {
                self.state = State::skip(len_bytes);
                Some(Capsule::Unknown(kind))
            }
        }
    }

    /// Checks whether the stream may end here.
    ///
    /// # Errors
    /// [`Truncated`] if a capsule is not complete.
    pub fn finish(&self) -> Result<(), Truncated> {
        match self.state {
            State::Head { len: 0, .. } => Ok(()),
            _ => Err(Truncated),
        }
    }
}

/// The front of a capsule, which classifies the rest.
enum Head {
    Datagram(u16),
    Oversize { len_bytes: u64, start: [u8; OVERSIZE_START_BYTES] },
    Unknown { kind: u64, len_bytes: u64 },
}

impl Head {
    /// Reads a head and returns it with its length in `bytes`, or `None` if there are too few bytes.
    fn read(bytes: &[u8], max_bytes: u16) -> Option<(Self, usize)> {
        let mut rest = bytes;
        let kind = varint::read(&mut rest)?;
        let len_bytes = varint::read(&mut rest)?;
        let head = match u16::try_from(len_bytes) {
            _ if kind != DATAGRAM => Self::Unknown { kind, len_bytes },
            Ok(len) if len <= max_bytes => Self::Datagram(len),
            _ => {
                let (start, after) = rest.split_first_chunk()?;
                rest = after;
                Self::Oversize { len_bytes, start: *start }
            }
        };
        Some((head, bytes.len() - rest.len()))
    }
}

/// Returns the header that precedes a UDP payload of `payload_bytes` in a DATAGRAM capsule: type, length and
/// [`UDP_CONTEXT`].
#[inline]
#[must_use]
pub fn datagram_header(payload_bytes: usize) -> Header {
    Header::of(&[DATAGRAM, varint::encoded_len(UDP_CONTEXT) as u64 + payload_bytes as u64, UDP_CONTEXT])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX_BYTES: u16 = 64;

    fn encode(kind: u64, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        varint::write(kind, &mut bytes);
        varint::write(value.len() as u64, &mut bytes);
        bytes.extend_from_slice(value);
        bytes
    }

    /// Reads `stream` in pieces that end at `cuts`, and returns the capsules and the verdict on the end.
    fn read(stream: &[u8], cuts: &[usize]) -> (Vec<Capsule>, Result<(), Truncated>) {
        let (mut reader, mut capsules, mut from) = (Reader::new(MAX_BYTES), Vec::new(), 0);
        for to in cuts.iter().copied().chain([stream.len()]) {
            let mut piece = Bytes::copy_from_slice(&stream[from..to]);
            while let Some(capsule) = reader.next(&mut piece) {
                capsules.push(capsule);
            }
            assert!(piece.is_empty());
            from = to;
        }
        (capsules, reader.finish())
    }

    #[test]
    fn a_capsule_that_arrived_in_one_piece_is_not_copied() {
        let mut piece = Bytes::from(encode(DATAGRAM, b"\0payload"));
        let value = piece.slice(2..);
        let Some(Capsule::Datagram(datagram)) = Reader::new(MAX_BYTES).next(&mut piece) else { panic!("no datagram") };
        assert_eq!(datagram.as_ptr(), value.as_ptr());
    }

    #[test]
    fn unknown_types_are_skipped_and_what_follows_is_read_rfc_9297_3_2() {
        let stream = [encode(0x17, &[1; 1000]), encode(0x29 + 0x17, &[]), encode(DATAGRAM, b"\0x")].concat();
        let expected = vec![Capsule::Unknown(0x17), Capsule::Unknown(0x40), Capsule::Datagram(Bytes::from("\0x"))];
        assert_eq!(read(&stream, &[]), (expected, Ok(())));
    }

    #[test]
    fn a_datagram_above_the_bound_costs_nothing_but_itself() {
        let fits = vec![7; usize::from(MAX_BYTES)];
        let stream = [encode(DATAGRAM, &[9; 65]), encode(DATAGRAM, &fits)].concat();
        let expected = vec![Capsule::Oversize { len_bytes: 65, start: [9; 8] }, Capsule::Datagram(fits.into())];
        assert_eq!(read(&stream, &[]), (expected, Ok(())));
    }

    #[test]
    fn a_length_that_never_arrives_is_never_allocated() {
        let mut head = Bytes::from_static(&[0x00, 0x80, 0x00, 0xff, 0xff, 0x00]);
        let mut reader = Reader::new(u16::MAX);
        assert_eq!(reader.next(&mut head), None);
        let State::Datagram { value, missing_bytes } = &reader.state else { panic!("{reader:?}") };
        assert_eq!((value.capacity(), *missing_bytes), (FIRST_RESERVATION_BYTES, 65_534));
        assert_eq!(reader.finish(), Err(Truncated));
    }

    #[test]
    fn types_and_lengths_may_be_longer_than_needed() {
        let mut stream = vec![0xc0, 0, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0, 0, 0, 0, 0, 65];
        stream.extend([5; 65]);
        assert_eq!(read(&stream, &[]).0, [Capsule::Oversize { len_bytes: 65, start: [5; 8] }]);
    }

    #[test]
    fn an_idle_reader_is_small() {
        assert!(size_of::<Reader>() <= 56, "{}", size_of::<Reader>());
    }

    fn capsules() -> impl Strategy<Value = Vec<(u64, Vec<u8>)>> {
        let kind = prop_oneof![Just(DATAGRAM), Just(DATAGRAM), 0..=varint::MAX];
        prop::collection::vec((kind, prop::collection::vec(any::<u8>(), 0..90)), 0..6)
    }

    proptest! {
        #[test]
        fn payloads_survive_any_split_of_the_stream(capsules in capsules()) {
            let stream: Vec<u8> = capsules.iter().flat_map(|(kind, value)| encode(*kind, value)).collect();
            let expected: Vec<_> = capsules.into_iter().map(|(kind, value)| match value.len() {
                _ if kind != DATAGRAM => Capsule::Unknown(kind),
                0..=64 => Capsule::Datagram(value.into()),
                len => Capsule::Oversize { len_bytes: len as u64, start: *value.first_chunk().unwrap() },
            }).collect();
            let expected = (expected, Ok(()));
            for cut in 0..=stream.len() {
                prop_assert_eq!(&read(&stream, &[cut]), &expected);
            }
            prop_assert_eq!(&read(&stream, &(0..stream.len()).collect::<Vec<_>>()), &expected);
        }

        #[test]
        fn an_end_inside_a_capsule_is_seen_rfc_9297_3_3(kind in 0..3u64, value in prop::collection::vec(any::<u8>(), 0..90)) {
            let stream = encode(kind, &value);
            for end in 1..stream.len() {
                prop_assert_eq!(read(&stream[..end], &[]).1, Err(Truncated), "after {} bytes", end);
            }
        }

        #[test]
        fn no_bytes_panic(stream: Vec<u8>) {
            let _ = read(&stream, &[]);
        }

        #[test]
        fn headers_read_back(payload in prop::collection::vec(any::<u8>(), 0..60)) {
            let stream = [&datagram_header(payload.len())[..], &payload[..]].concat();
            let (capsules, end) = read(&stream, &[]);
            let datagram = [&[0], &payload[..]].concat();
            prop_assert_eq!((capsules, end), (vec![Capsule::Datagram(datagram.into())], Ok(())));
        }
    }
}
