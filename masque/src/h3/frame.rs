//! Frames (RFC 9114 §7): their types, and the division of a stream into frames without buffering payloads.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::error::{Code, ProtocolError};
use crate::varint;

pub(super) const DATA: u64 = 0x00;
pub(super) const HEADERS: u64 = 0x01;
pub(super) const SETTINGS: u64 = 0x04;
pub(super) const GOAWAY: u64 = 0x07;
pub(super) const PRIORITY_UPDATE_REQUEST: u64 = 0xf0700;

/// The frame types to which some rule refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Headers,
    CancelPush,
    Settings,
    PushPromise,
    GoAway,
    MaxPushId,
    /// PRIORITY_UPDATE of a request stream (RFC 9218 §7.2).
    PriorityUpdateRequest,
    /// PRIORITY_UPDATE of a push stream (RFC 9218 §7.2).
    PriorityUpdatePush,
    /// A type that HTTP/2 used and HTTP/3 forbids (RFC 9114 §7.2.8).
    Http2,
    /// Every other type, including the reserved ones 0x1f·N + 0x21: skipped (RFC 9114 §9).
    Unknown,
}

impl From<u64> for Kind {
    fn from(value: u64) -> Self {
        match value {
            DATA => Self::Data,
            HEADERS => Self::Headers,
            0x03 => Self::CancelPush,
            SETTINGS => Self::Settings,
            0x05 => Self::PushPromise,
            GOAWAY => Self::GoAway,
            0x0d => Self::MaxPushId,
            PRIORITY_UPDATE_REQUEST => Self::PriorityUpdateRequest,
            0xf0701 => Self::PriorityUpdatePush,
            0x02 | 0x06 | 0x08 | 0x09 => Self::Http2,
            _ => Self::Unknown,
        }
    }
}

/// The next item that a [`Cutter`] finds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A frame begins; its payload is `len` bytes long.
    Start { kind: Kind, len: u64 },
    /// The next piece of the current frame's payload, a slice of the input. Every frame has exactly one last piece,
    /// which is empty if the payload is.
    Payload { kind: Kind, piece: Bytes, last: bool },
}

/// Two variable-length integers: type and length.
const MAX_HEADER_BYTES: usize = 16;

/// Cuts a stream into frames. Holds at most one incomplete frame header and never a payload.
#[derive(Debug)]
pub(super) struct Cutter {
    /// The beginning of a frame header that has not arrived completely.
    header: [u8; MAX_HEADER_BYTES],
    header_len: u8,
    kind: Kind,
    /// How many bytes of the current payload are missing; `None` between frames.
    payload_left: Option<u64>,
}

impl Cutter {
    pub(super) const fn new() -> Self {
        Self { header: [0; MAX_HEADER_BYTES], header_len: 0, kind: Kind::Unknown, payload_left: None }
    }

    /// Takes the next step off the front of `input`, or returns `None` once `input` is used up.
    pub(super) fn next(&mut self, input: &mut Bytes) -> Option<Step> {
        let Some(left) = self.payload_left else {
            return self.start(input);
        };
        if left > 0 && input.is_empty() {
            return None;
        }
        let piece = input.split_to(usize::try_from(left).map_or(input.len(), |left| left.min(input.len())));
        let left = left - piece.len() as u64;
        self.payload_left = (left > 0).then_some(left);
        Some(Step::Payload { kind: self.kind, piece, last: left == 0 })
    }

    /// Returns an error if the stream must not end here because a frame is incomplete (RFC 9114 §7.1).
    pub(super) fn finish(&self) -> Result<(), ProtocolError> {
        if self.header_len > 0 || self.payload_left.is_some() {
            return Err(ProtocolError::Connection(Code::FrameError, "the stream ended inside a frame"));
        }
        Ok(())
    }

    fn start(&mut self, input: &mut Bytes) -> Option<Step> {
        let held = usize::from(self.header_len);
        let taken = input.len().min(MAX_HEADER_BYTES - held);
        self.header[held..held + taken].copy_from_slice(&input[..taken]);
        let mut rest = &self.header[..held + taken];
        let (Some(kind), Some(len)) = (varint::read(&mut rest), varint::read(&mut rest)) else {
            self.header_len = (held + taken) as u8;
            input.advance(taken);
            return None;
        };
        // The held bytes were not a whole header, so the header ends inside `input`.
        input.advance(taken - rest.len());
        self.header_len = 0;
        self.kind = Kind::from(kind);
        self.payload_left = Some(len);
        Some(Step::Start { kind: self.kind, len })
    }
}

/// Appends the header of a frame.
pub(super) fn write_header(kind: u64, payload_len: u64, out: &mut impl BufMut) {
    varint::write(kind, out);
    varint::write(payload_len, out);
}

/// Encodes the header of a DATA frame whose payload of `payload_len` bytes follows: an array and its used length.
#[must_use]
pub fn data_frame_header(payload_len: u64) -> ([u8; 9], usize) {
    let mut bytes = [0; 9];
    let mut rest = &mut bytes[..];
    write_header(DATA, payload_len, &mut rest);
    let unused = rest.len();
    (bytes, 9 - unused)
}

/// Encodes a DATA frame with a copy of the payload (RFC 9114 §7.2.1).
#[must_use]
pub fn data_frame(payload: &[u8]) -> Bytes {
    let (header, header_len) = data_frame_header(payload.len() as u64);
    let mut frame = BytesMut::with_capacity(header_len + payload.len());
    frame.put_slice(&header[..header_len]);
    frame.put_slice(payload);
    frame.freeze()
}

/// Reads a payload that is exactly one integer (GOAWAY, MAX_PUSH_ID, CANCEL_PUSH).
pub(super) fn single_id(mut payload: &[u8]) -> Result<u64, ProtocolError> {
    match varint::read(&mut payload) {
        Some(id) if payload.is_empty() => Ok(id),
        _ => Err(ProtocolError::Connection(Code::FrameError, "the payload is not exactly one integer")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Frame = (Kind, u64, Vec<u8>);

    /// All frames in `chunks`, payload pieces joined, and the verdict on the end.
    fn frames(chunks: &[&[u8]]) -> (Vec<Frame>, Result<(), ProtocolError>) {
        let mut cutter = Cutter::new();
        let mut found: Vec<Frame> = Vec::new();
        for chunk in chunks {
            let mut input = Bytes::copy_from_slice(chunk);
            while let Some(step) = cutter.next(&mut input) {
                match step {
                    Step::Start { kind, len } => found.push((kind, len, Vec::new())),
                    Step::Payload { kind, piece, .. } => {
                        let frame = found.last_mut().unwrap();
                        assert_eq!(frame.0, kind);
                        frame.2.extend_from_slice(&piece);
                    }
                }
            }
            assert!(input.is_empty());
        }
        (found, cutter.finish())
    }

    #[test]
    fn reserved_and_extension_types_are_unknown_and_http_2_types_are_not() {
        for n in [0, 1, 7, 1000] {
            assert_eq!(Kind::from(0x1f * n + 0x21), Kind::Unknown);
        }
        for kind in [0x02, 0x06, 0x08, 0x09] {
            assert_eq!(Kind::from(kind), Kind::Http2);
        }
    }

    #[test]
    fn a_payload_is_a_slice_of_the_input_and_not_a_copy() {
        let mut input = Bytes::from_static(&[0x00, 0x03, b'a', b'b', b'c']);
        let payload = input.slice(2..);
        let mut cutter = Cutter::new();
        assert_eq!(cutter.next(&mut input), Some(Step::Start { kind: Kind::Data, len: 3 }));
        let Some(Step::Payload { piece, last: true, .. }) = cutter.next(&mut input) else { panic!("no payload") };
        assert_eq!(piece.as_ptr(), payload.as_ptr());
    }

    #[test]
    fn an_empty_payload_has_one_last_piece() {
        let mut input = Bytes::from_static(&[0x21, 0x00]);
        let mut cutter = Cutter::new();
        assert_eq!(cutter.next(&mut input), Some(Step::Start { kind: Kind::Unknown, len: 0 }));
        assert_eq!(
            cutter.next(&mut input),
            Some(Step::Payload { kind: Kind::Unknown, piece: Bytes::new(), last: true })
        );
        assert_eq!(cutter.next(&mut input), None);
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_a_frame_error() {
        let whole = [0x40, 0x00, 0x40, 0x02, 1, 2];
        for cut in 1..whole.len() {
            let error = frames(&[&whole[..cut]]).1.unwrap_err();
            assert_eq!(
                error,
                ProtocolError::Connection(Code::FrameError, "the stream ended inside a frame"),
                "cut at {cut}"
            );
        }
        assert_eq!(frames(&[&whole]).1, Ok(()));
    }

    #[test]
    fn a_data_frame_header_is_type_zero_and_the_shortest_length() {
        for (len, bytes) in [(5, &[0x00, 0x05][..]), (1200, &[0x00, 0x44, 0xb0])] {
            let (header, used) = data_frame_header(len);
            assert_eq!(&header[..used], bytes);
        }
        assert_eq!(data_frame_header(varint::MAX).1, 9);
    }

    proptest! {
        #[test]
        fn frames_survive_any_split_of_the_stream(
            sent in prop::collection::vec((0u64..0x50, prop::collection::vec(any::<u8>(), 0..40)), 0..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut bytes = Vec::new();
            for (kind, payload) in &sent {
                write_header(*kind, payload.len() as u64, &mut bytes);
                bytes.extend_from_slice(payload);
            }
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let chunks: Vec<&[u8]> = at.windows(2).map(|range| &bytes[range[0]..range[1]]).collect();
            let expected: Vec<_> =
                sent.into_iter().map(|(kind, payload)| (Kind::from(kind), payload.len() as u64, payload)).collect();
            prop_assert_eq!(frames(&chunks), (expected, Ok(())));
        }

        #[test]
        fn random_bytes_never_panic(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6)) {
            let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let _ = frames(&chunks);
        }
    }
}
