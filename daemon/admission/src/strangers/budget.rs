//! What a stranger's frames make us hold.

use std::collections::HashMap;

use s2n_quic::provider::event::events::Frame;

use super::ClientStanding;

/// The smallest piece of memory that s2n-quic takes for bytes of a stream (`buffer/reassembler.rs`).
const BLOCK_BYTES: u64 = 4096;

/// The approximate cost of a stream without bytes: its state in the transport and in the dispatcher, and a task. A frame
/// that names a stream opens all of the stream's kind with lower IDs (RFC 9000 §3.2).
const STREAM_BYTES: u64 = 1024;

/// How many bytes a gap in a stream counts for. It takes a hundred times less memory, but whatever arrives for the stream later
/// has to pass it: s2n-quic walks over the pieces of a stream from the back (`buffer/reassembler.rs`), so one-byte frames,
/// scattered over a window, cost the square of their number. With the default `stranger_bytes`, there are 32 gaps at most.
const GAP_BYTES: u64 = 16 * 1024;

/// How many bytes a CRYPTO frame counts for, for the same reason. A handshake has up to a few dozen, some of them in any order.
const CRYPTO_BYTES: u64 = 4 * 1024;

/// How many frames count as another packet. The transport spends more on each frame than on the packet around it. Few useful
/// packets have more than a handful; a hostile one has hundreds.
pub(super) const FRAMES_PER_PACKET: u32 = 16;

/// The books of one connection, kept until its client is known.
///
/// The transport allocates memory in blocks, wherever in a stream's window a byte falls. So a stream counts by how far it
/// reaches, not by how many of its bytes arrived: an upper bound that no choice of offsets evades. Gaps count as well.
#[derive(Debug, Default)]
pub struct Budget {
    packets: u32,
    frames: u32,
    extents: HashMap<u64, Extent>,
    /// How many streams the peer has opened, of each kind.
    opened: [u64; 2],
    held_bytes: u64,
}

/// The part of a stream that has arrived.
#[derive(Debug, Default)]
struct Extent {
    /// The end of the farthest piece.
    end: u64,
    /// The end of the part that has no gap before it, or less.
    whole: u64,
    /// How many pieces neither began in that part nor followed the farthest piece.
    gaps: u64,
    /// Whether the stream was released, so that it holds nothing any more, whatever still arrives.
    is_released: bool,
}

impl Extent {
    fn add(&mut self, offset: u64, len: u64) {
        let end = offset + len;
        if offset <= self.whole {
            self.whole = self.whole.max(end);
        } else if offset != self.end {
            self.gaps += 1;
        }
        self.end = self.end.max(end);
    }

    fn held_bytes(&self) -> u64 {
        if self.is_released { 0 } else { self.end.next_multiple_of(BLOCK_BYTES) + self.gaps * GAP_BYTES }
    }
}

impl Budget {
    /// Counts a packet.
    pub fn on_packet(&mut self, standing: &ClientStanding) {
        if standing.is_known() {
            return;
        }
        self.packets += 1;
        if self.packets > standing.terms().packets {
            standing.exceed("stranger_packets");
        }
    }

    /// Counts a frame of the peer, and how many bytes it may make us hold.
    pub fn on_frame(&mut self, frame: &Frame, standing: &ClientStanding) {
        if standing.is_known() {
            if self.held_bytes > 0 {
                *self = Self::default();
            }
            return;
        }
        self.frames += 1;
        if self.frames.is_multiple_of(FRAMES_PER_PACKET) {
            self.on_packet(standing);
        }
        match *frame {
            Frame::Stream { id, offset, len, .. } => self.note(id, offset, len.into()),
            Frame::ResetStream { id, .. }
            | Frame::StopSending { id, .. }
            | Frame::MaxStreamData { id, .. }
            | Frame::StreamDataBlocked { stream_id: id, .. } => self.note(id, 0, 0),
            Frame::Crypto { .. } => self.held_bytes = self.held_bytes.saturating_add(CRYPTO_BYTES),
            _ => return,
        }
        standing.note_held(self.held_bytes);
        if self.held_bytes > u64::from(standing.terms().held_bytes) {
            standing.exceed("stranger_bytes");
        }
    }

    fn note(&mut self, id: u64, offset: u64, len: u64) {
        // RFC 9000 §2.1: the IDs of clients' streams are even, and bit 1 is for unidirectional ones.
        if id & 1 == 1 {
            return;
        }
        let opened = &mut self.opened[(id >> 1 & 1) as usize];
        if id >> 2 >= *opened {
            // Frames are reported before the transport refuses a stream that the peer may not open, so any ID may come.
            let streams_bytes = ((id >> 2) + 1 - *opened).saturating_mul(STREAM_BYTES);
            self.held_bytes = self.held_bytes.saturating_add(streams_bytes);
            *opened = (id >> 2) + 1;
        }
        if offset + len == 0 {
            return;
        }
        let extent = self.extents.entry(id).or_default();
        let before = extent.held_bytes();
        extent.add(offset, len);
        self.held_bytes = self.held_bytes.saturating_add(extent.held_bytes() - before);
    }

    /// Notes that we ended a stream, so that the transport keeps nothing of it.
    pub fn release(&mut self, id: u64, standing: &ClientStanding) {
        if standing.is_known() {
            return;
        }
        let extent = self.extents.entry(id).or_default();
        if !extent.is_released {
            self.held_bytes -= extent.held_bytes() + STREAM_BYTES;
            extent.is_released = true;
            standing.note_held(self.held_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use s2n_quic_core::event::{IntoEvent as _, builder};

    use super::*;

    #[test]
    fn a_byte_counts_as_all_before_it_in_its_stream() {
        let mut budget = Budget::default();
        budget.note(0, 0, 1);
        assert_eq!(budget.held_bytes, STREAM_BYTES + BLOCK_BYTES);
        // A byte far away, and everything that lies between.
        budget.note(0, 63 * 4096 + 1, 1);
        let held_bytes = STREAM_BYTES + 64 * BLOCK_BYTES + GAP_BYTES;
        assert_eq!(budget.held_bytes, held_bytes);
        budget.note(0, 1, 4096);
        assert_eq!(budget.held_bytes, held_bytes, "nothing counts twice");
    }

    #[test]
    fn bytes_that_are_scattered_over_a_stream_are_few_and_a_lost_packet_leaves_one_gap() {
        let (mut scattered, mut lossy) = (Budget::default(), Budget::default());
        (1..=32).for_each(|number| scattered.note(0, 2 * number, 1));
        assert_eq!(scattered.held_bytes, STREAM_BYTES + BLOCK_BYTES + 32 * GAP_BYTES);
        // Packets of a kibibyte. The third arrives late, and the first two arrive again.
        for packet in [0, 1, 3, 4, 5, 2, 0, 1, 6] {
            lossy.note(0, packet * 1024, 1024);
        }
        assert_eq!(lossy.held_bytes, STREAM_BYTES + 2 * BLOCK_BYTES + GAP_BYTES);
    }

    #[test]
    fn a_packet_full_of_frames_counts_as_many() {
        let (places, frame) = (std::sync::Arc::default(), builder::Frame::Ping {}.into_event());
        let standing = super::super::ConnectionPlaces::enter(&places, std::net::IpAddr::from([192, 0, 2, 1]));
        let mut budget = Budget::default();
        for _ in 0..10 {
            budget.on_packet(&standing);
            (0..400).for_each(|_| budget.on_frame(&frame, &standing));
        }
        assert_eq!(budget.packets, 10 * (1 + 400 / FRAMES_PER_PACKET));
    }

    #[test]
    fn a_stream_counts_with_all_that_it_opens_and_ours_do_not() {
        let mut budget = Budget::default();
        budget.note(4 * 99, 0, 0);
        budget.note(4 * 50, 0, 0);
        budget.note(1, 0, 1 << 20);
        assert_eq!(budget.held_bytes, 100 * STREAM_BYTES);
        budget.note(2 + 4 * 4, 0, 1);
        assert_eq!(budget.held_bytes, 105 * STREAM_BYTES + BLOCK_BYTES);
    }

    #[test]
    fn the_highest_stream_counts_as_more_than_anybody_may_have_held() {
        let mut budget = Budget::default();
        for id in [(1 << 62) - 4, (1 << 62) - 2] {
            budget.note(id, (1 << 62) - 1, 65_535);
            assert_eq!(budget.held_bytes, u64::MAX);
        }
    }

    #[test]
    fn a_released_stream_no_longer_counts_even_if_bytes_arrive_for_it() {
        let (mut budget, standing) = (Budget::default(), std::sync::Arc::default());
        let standing = super::super::ConnectionPlaces::enter(&standing, std::net::IpAddr::from([192, 0, 2, 1]));
        budget.note(0, 9_000, 1_000);
        budget.note(4, 0, 10);
        budget.release(0, &standing);
        budget.release(0, &standing);
        budget.note(0, 90_000, 10_000);
        assert_eq!(budget.held_bytes, STREAM_BYTES + BLOCK_BYTES);
        budget.release(4, &standing);
        assert_eq!(budget.held_bytes, 0);
    }

    proptest! {
        /// Whatever the order, the bound covers every block that a byte fell into, and every piece that stands alone.
        #[test]
        fn no_choice_of_offsets_evades_the_count(
            frames in prop::collection::vec((0..2_u64, 0..12_000_u64, 1..60_u64), 1..60),
        ) {
            let (mut budget, mut bytes) = (Budget::default(), std::collections::BTreeSet::new());
            for (stream, offset, len) in frames {
                budget.note(stream * 4, offset, len);
                bytes.extend((offset..offset + len).map(|byte| (stream, byte)));
            }
            let blocks: std::collections::HashSet<_> = bytes.iter().map(|(stream, byte)| (stream, byte / BLOCK_BYTES)).collect();
            prop_assert!(budget.held_bytes >= blocks.len() as u64 * BLOCK_BYTES);
            for stream in 0..2 {
                let begins = |byte: &&(u64, u64)| byte.0 == stream && byte.1 > 0 && !bytes.contains(&(stream, byte.1 - 1));
                let pieces = bytes.iter().filter(begins).count() as u64;
                prop_assert!(pieces <= budget.extents.get(&(stream * 4)).map_or(0, |extent| extent.gaps));
            }
        }
    }
}
