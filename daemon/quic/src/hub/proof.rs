//! Proof that the path still carries full packets.
//!
//! The transport takes losses for a path that became narrow (RFC 8899 §4.3) when four bursts of packets above the base
//! size of 1,200 bytes are lost and no full one was acknowledged since (s2n-quic `path/mtu.rs`): packets then stay at
//! 1,200 bytes for a minute. Streams fill their packets. Payloads of tunnels do not: those of an inner QUIC connection
//! make packets of 1,240 bytes or so, never a full one, so that four plain losses in a connection's life would suffice;
//! and in packets of 1,200 bytes none of them fits any more.
//!
//! So packets that are neither small nor full are filled up, with an HTTP Datagram that the peer ignores: all of them
//! while most of the congestion window is in flight, because a queue that overflows, or a slow start that ends, loses
//! every second packet of a window, and by the time that is known the window has long left; and otherwise as many as
//! losses that come singly ask for. Where full packets vanish because the path did become narrow, these vanish too, and
//! the transport still finds out.

use std::num::NonZeroU64;

use masque::datagram;
use s2n_quic::provider::datagram::Packet;

use crate::ledger::{BASE_PACKET_BYTES, Ledger};

/// What is longest of all that one packet can lack: jumbo frames.
static NOTHING: [u8; 9_000] = [0; 9_000];

/// What one connection knows of its packets with datagrams that are above the base size.
pub(super) struct Proof {
    /// How many since the last that was filled up.
    since: u32,
    /// How many since the last loss.
    since_loss: u32,
    /// How many lie between two losses, on average.
    gap: u32,
    /// Lost in all, when last seen.
    lost: u64,
}

impl Default for Proof {
    /// Nothing is known of the path, so losses are to be expected.
    fn default() -> Self {
        Self { since: 0, since_loss: 0, gap: 64, lost: 0 }
    }
}

impl Proof {
    /// One of how many packets is to be filled up, where one of `gap` is lost.
    ///
    /// With one of three, any loss is followed by a full packet before the transport believes in it, which takes three
    /// packets (RFC 9002 §6.1.1). Where losses are rarer, few enough fall between two full packets; filling up one of 33
    /// costs nothing and guards against what comes. The result is odd, so as not to keep time with a queue that drops
    /// every second packet.
    fn every(gap: u32) -> u32 {
        if gap < 32 { 1 } else { (gap / 40).clamp(3, 33) | 1 }
    }

    /// Whether a packet of `packet_bytes` is to be filled up; `lost` packets above the base size were lost so far, and
    /// `uses_window` says whether the path sets the pace.
    fn is_due(&mut self, packet_bytes: u64, lost: u64, uses_window: bool) -> bool {
        if packet_bytes <= BASE_PACKET_BYTES {
            return false;
        }
        self.since += 1;
        self.since_loss = self.since_loss.saturating_add(1);
        if let Some(new) = NonZeroU64::new(lost.saturating_sub(self.lost)) {
            let sample = (u64::from(self.since_loss) / new) as u32;
            self.gap = (self.gap / 4 * 3).saturating_add(sample / 4);
            (self.lost, self.since_loss) = (lost, 0);
        }
        uses_window || self.since >= Self::every(self.gap.max(self.since_loss / 2))
    }

    /// Fills a packet up, if it is time to, with bytes that belong to a stream that has a tunnel; returns whether it did.
    pub(super) fn fill_up<P: Packet>(&mut self, packet: &mut P, stream_id: u64, ledger: &Ledger) -> bool {
        let room = packet.remaining_capacity() as u64;
        // What the transport subtracted for a frame's type and length; the length can be left out of a last frame.
        let length_bytes = if room + 2 < 64 { 1 } else { 2 };
        let left = room + 1 + length_bytes;
        let packet_bytes = ledger.full_packet_bytes().saturating_sub(left);
        if !self.is_due(packet_bytes, ledger.large_packets_lost(), ledger.uses_window()) {
            return false;
        }
        let header = datagram::filler(stream_id, !ledger.is_server());
        let zeros = (left as usize).checked_sub(1 + header.len()).and_then(|zeros| NOTHING.get(..zeros));
        let filled_up = zeros.is_some_and(|zeros| packet.write_datagram_vectored(&[&header, zeros]).is_ok());
        if filled_up {
            self.since = 0;
        }
        filled_up
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::FakePacket, *};
    use crate::ledger::Account;

    /// How many of 10,000 packets are filled up where one of `gap` is lost.
    fn filled_up(proof: &mut Proof, packet_bytes: u64, gap: u64) -> usize {
        let before = proof.lost;
        let due = |count: &u64| {
            let due = proof.is_due(packet_bytes, before + count / gap, false);
            proof.since *= u32::from(!due);
            due
        };
        (0..10_000).filter(due).count()
    }

    #[test]
    fn the_more_is_lost_the_more_packets_are_filled_up_and_small_ones_never() {
        let proof = &mut Proof::default();
        assert_eq!(filled_up(proof, 1_200, 10), 0);
        let without_loss = filled_up(proof, 1_240, u64::MAX);
        assert!((10_000 / 33..550).contains(&without_loss), "{without_loss}: more to begin with");
        for (gap, expected) in [(10, 9_900..10_001), (66, 3_100..3_500), (600, 600..760), (5_000, 290..320)] {
            filled_up(proof, 1_240, gap);
            let filled_up = filled_up(proof, 1_240, gap);
            assert!(expected.contains(&filled_up), "{filled_up} with one lost of {gap}");
        }
    }

    #[test]
    fn where_the_path_sets_the_pace_all_packets_but_small_ones_are_filled_up() {
        let mut proof = Proof::default();
        assert_eq!([1_200, 1_201, 1_240].map(|bytes| proof.is_due(bytes, 0, true)), [false, true, true]);
    }

    #[test]
    fn a_packet_is_filled_to_its_last_byte_with_what_peers_ignore() {
        let mut account = Account::new(false);
        account.on_mtu(1_472);
        let (ledger, _) = account.join();
        // Type, quarter stream ID and context take four bytes.
        for left in [0, 3, 5, 6, 63, 64, 230, 9_001] {
            let mut proof = Proof { since: 99, ..Proof::default() };
            let mut packet = FakePacket::new(left);
            account.on_mtu(if left > 1_000 { 10_300 } else { 1_472 });
            assert_eq!(proof.fill_up(&mut packet, 40_000, &ledger), left > 3, "{left} bytes left");
            if left > 3 {
                assert_eq!((packet.room, packet.written.len()), (0, 1));
                let (quarter_stream_id, datagram) = datagram::split(&packet.written[0]).unwrap();
                assert_eq!((quarter_stream_id, datagram::context(datagram).unwrap().0), (10_000, 62));
            }
        }
    }
}
