//! Capsules of a request stream (RFC 9297 §3.2).

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use h3::proto::varint::VarInt;

/// The type of the capsule that carries an HTTP datagram (RFC 9297 §3.5).
const DATAGRAM: VarInt = VarInt::from_u32(0);

/// The longest HTTP datagram that is accepted: the longest context ID and the longest UDP payload (RFC 9298 §5).
const MAX_DATAGRAM_BYTES: u64 = 8 + 65_527;

/// A stream whose capsules cannot be read any further.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// Takes the datagrams out of a request stream and skips all other capsules.
#[derive(Default)]
pub struct Capsules {
    /// The beginning of the next capsule: at most its header and [`MAX_DATAGRAM_BYTES`], and what was last received.
    received: BytesMut,
    /// The bytes that belong to a capsule being skipped.
    skipped: u64,
}

impl Capsules {
    /// Adds bytes of the stream.
    pub fn receive(&mut self, bytes: impl Buf) {
        self.received.put(bytes);
    }

    /// Returns the next datagram, or `None` until more bytes are received.
    ///
    /// # Errors
    /// When a datagram is longer than [`MAX_DATAGRAM_BYTES`].
    pub fn next_datagram(&mut self) -> Result<Option<Bytes>, Malformed> {
        loop {
            let skipped = self.skipped.min(self.received.len() as u64);
            self.received.advance(skipped as usize);
            self.skipped -= skipped;
            let mut rest = &self.received[..];
            let (Ok(kind), Ok(length)) = (VarInt::decode(&mut rest), VarInt::decode(&mut rest)) else {
                return Ok(None);
            };
            let (length, header) = (length.into_inner(), self.received.len() - rest.len());
            if kind != DATAGRAM {
                self.received.advance(header);
                self.skipped = length;
            } else if length > MAX_DATAGRAM_BYTES {
                return Err(Malformed);
            } else if (rest.len() as u64) < length {
                return Ok(None);
            } else {
                self.received.advance(header);
                return Ok(Some(self.received.split_to(length as usize).freeze()));
            }
        }
    }

    /// Whether the stream may end here, between two capsules.
    pub fn is_between(&self) -> bool {
        self.received.is_empty() && self.skipped == 0
    }
}

/// Returns a capsule with a datagram.
pub fn of_datagram(datagram: &[u8]) -> Bytes {
    let mut capsule = BytesMut::with_capacity(2 * VarInt::MAX_SIZE + datagram.len());
    DATAGRAM.encode(&mut capsule);
    VarInt::from_u32(datagram.len() as u32).encode(&mut capsule);
    capsule.put_slice(datagram);
    capsule.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_are_found_wherever_the_stream_is_cut() {
        let mut stream = Vec::new();
        stream.extend_from_slice(&of_datagram(b"\0first"));
        stream.extend_from_slice(b"\x17\x03abc");
        stream.extend_from_slice(&of_datagram(&[7; 1200]));
        for step in [1, 2, 3, 7, stream.len()] {
            let (mut capsules, mut found) = (Capsules::default(), Vec::new());
            for part in stream.chunks(step) {
                capsules.receive(part);
                while let Some(datagram) = capsules.next_datagram().unwrap() {
                    found.push(datagram);
                }
            }
            assert!(capsules.is_between());
            assert_eq!(found, [Bytes::from_static(b"\0first"), Bytes::from(vec![7; 1200])]);
        }
    }

    #[test]
    fn a_stream_may_not_end_within_a_capsule_nor_announce_an_endless_datagram() {
        for cut in [&b"\0"[..], b"\0\x05abcd", b"\x17\x05abcd"] {
            let mut capsules = Capsules::default();
            capsules.receive(cut);
            assert_eq!(capsules.next_datagram(), Ok(None));
            assert!(!capsules.is_between(), "{cut:?}");
        }
        let mut capsules = Capsules::default();
        capsules.receive(&b"\0\x80\x01\0\0"[..]);
        assert_eq!(capsules.next_datagram(), Err(Malformed));
    }
}
