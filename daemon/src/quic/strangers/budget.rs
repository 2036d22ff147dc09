//! What a stranger's frames make us hold.

use std::collections::HashMap;

use s2n_quic::provider::event::events::Frame;

use super::Standing;

/// The smallest piece of memory that s2n-quic takes for bytes of a stream (`buffer/reassembler.rs`).
const BLOCK_BYTES: u64 = 4096;

/// What a stream costs without any bytes, about: its state in the transport, in the dispatcher, and a task. A stream that
/// is named opens all of its kind with lower IDs (RFC 9000 §3.2).
const STREAM_BYTES: u64 = 1024;

/// The books of one connection, kept until its client is known.
///
/// The transport takes memory by blocks, wherever in a stream's window a byte falls. So what counts of a stream is how far
/// it reaches, and not how many bytes of it came: an upper bound that no choice of offsets evades.
#[derive(Debug, Default)]
pub struct Budget {
    packets: u32,
    /// Up to where streams may hold memory, in whole blocks; 0 for those that were let go.
    reaches: HashMap<u64, u64>,
    /// How many streams the peer has opened, of each kind.
    opened: [u64; 2],
    held_bytes: u64,
}

impl Budget {
    /// Counts a packet.
    pub fn on_packet(&mut self, standing: &Standing) {
        if standing.is_known() {
            return;
        }
        self.packets += 1;
        if self.packets > standing.terms().packets {
            standing.exceed("stranger_packets");
        }
    }

    /// Counts what a frame of the peer may have us hold.
    pub fn on_frame(&mut self, frame: &Frame, standing: &Standing) {
        let (id, reach) = match *frame {
            Frame::Stream { id, offset, len, .. } => (id, offset + u64::from(len)),
            Frame::ResetStream { id, .. }
            | Frame::StopSending { id, .. }
            | Frame::MaxStreamData { id, .. }
            | Frame::StreamDataBlocked { stream_id: id, .. } => (id, 0),
            _ => return,
        };
        if standing.is_known() {
            if self.held_bytes > 0 {
                *self = Self::default();
            }
            return;
        }
        self.note(id, reach);
        standing.note_held(self.held_bytes);
        if self.held_bytes > u64::from(standing.terms().bytes) {
            standing.exceed("stranger_bytes");
        }
    }

    fn note(&mut self, id: u64, reach: u64) {
        // RFC 9000 §2.1: those of clients are even, and bit 1 is for unidirectional ones.
        if id & 1 == 1 {
            return;
        }
        let opened = &mut self.opened[(id >> 1 & 1) as usize];
        if id >> 2 >= *opened {
            // Frames are told before the transport refuses a stream that the peer may not open: any ID may come.
            let streams_bytes = ((id >> 2) + 1 - *opened).saturating_mul(STREAM_BYTES);
            self.held_bytes = self.held_bytes.saturating_add(streams_bytes);
            *opened = (id >> 2) + 1;
        }
        if reach == 0 {
            return;
        }
        let known = self.reaches.entry(id).or_insert(1);
        // One that was let go holds nothing any more, whatever still arrives.
        if *known > 0 && reach > *known - 1 {
            let blocks = |reach: u64| reach.next_multiple_of(BLOCK_BYTES);
            self.held_bytes = self.held_bytes.saturating_add(blocks(reach) - blocks(*known - 1));
            *known = reach + 1;
        }
    }

    /// A stream was ended from our side, so that the transport keeps nothing of it.
    pub fn release(&mut self, id: u64, standing: &Standing) {
        if standing.is_known() {
            return;
        }
        let reach = self.reaches.insert(id, 0).unwrap_or(1);
        if reach > 0 {
            self.held_bytes -= (reach - 1).next_multiple_of(BLOCK_BYTES) + STREAM_BYTES;
            standing.note_held(self.held_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_byte_counts_as_all_before_it_in_its_stream() {
        let mut budget = Budget::default();
        budget.note(0, 1);
        assert_eq!(budget.held_bytes, STREAM_BYTES + BLOCK_BYTES);
        // One byte in each block, never the first.
        (1..64).for_each(|block| budget.note(0, block * 4096 + 2));
        assert_eq!(budget.held_bytes, STREAM_BYTES + 64 * BLOCK_BYTES);
        budget.note(0, 4096);
        assert_eq!(budget.held_bytes, STREAM_BYTES + 64 * BLOCK_BYTES, "nothing counts twice");
    }

    #[test]
    fn a_stream_counts_with_all_that_it_opens_and_ours_do_not() {
        let mut budget = Budget::default();
        budget.note(4 * 99, 0);
        budget.note(4 * 50, 0);
        budget.note(1, 1 << 20);
        assert_eq!(budget.held_bytes, 100 * STREAM_BYTES);
        budget.note(2 + 4 * 4, 1);
        assert_eq!(budget.held_bytes, 105 * STREAM_BYTES + BLOCK_BYTES);
    }

    #[test]
    fn the_highest_stream_counts_as_more_than_anybody_may_have_held() {
        let mut budget = Budget::default();
        for id in [(1 << 62) - 4, (1 << 62) - 2] {
            budget.note(id, (1 << 62) + 65_534);
            assert_eq!(budget.held_bytes, u64::MAX);
        }
    }

    #[test]
    fn a_stream_that_was_let_go_counts_no_more_whatever_arrives_for_it() {
        let (mut budget, standing) = (Budget::default(), std::sync::Arc::default());
        let standing = super::super::Places::enter(&standing, std::net::IpAddr::from([192, 0, 2, 1]));
        budget.note(0, 10_000);
        budget.note(4, 10);
        budget.release(0, &standing);
        budget.release(0, &standing);
        budget.note(0, 100_000);
        assert_eq!(budget.held_bytes, STREAM_BYTES + BLOCK_BYTES);
        budget.release(4, &standing);
        assert_eq!(budget.held_bytes, 0);
    }

    proptest! {
        /// Whatever the order, the bound covers every block that a byte fell into.
        #[test]
        fn no_choice_of_offsets_evades_the_count(frames in prop::collection::vec((0..8_u64, 1..1_u64 << 20), 1..300)) {
            let (mut budget, mut blocks) = (Budget::default(), std::collections::HashSet::new());
            for (stream, reach) in frames {
                budget.note(stream * 4, reach);
                blocks.insert((stream, (reach - 1) / BLOCK_BYTES));
                prop_assert!(budget.held_bytes >= blocks.len() as u64 * BLOCK_BYTES);
            }
        }
    }
}
