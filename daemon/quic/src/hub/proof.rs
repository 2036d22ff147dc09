//! Proof that the path still carries full packets.
//!
//! The transport concludes that the path became narrow (RFC 8899 §4.3) when four bursts of packets above the base size of
//! 1,200 bytes are lost and no full packet was acknowledged since (s2n-quic `path/mtu.rs`): packets then stay at 1,200
//! bytes for a minute. Streams fill their packets. Payloads of tunnels do not: the payloads of an inner QUIC connection
//! make packets of about 1,240 bytes, never a full one, so four ordinary losses in a connection's life would suffice; and
//! none of these payloads fits into packets of 1,200 bytes.
//!
//! So packets that are neither small nor full are filled up, with an HTTP Datagram that the peer ignores:
//!
//! - all of them while the window is used and grows as fast as in slow start, because the end of a slow start loses every
//!   second packet of a window, and by the time this is known, that window has long left;
//! - as many as single losses require;
//! - where few packets are lost, as many as add one byte to [`SHARE`]. These are the first packets of a burst, several in
//!   a row, because a message of the kernel's segmentation offload has packets of one size: single ones in the middle of
//!   a burst would make it leave in three messages instead of one. While the path sets the pace, they are filled up one
//!   at a time anyway, because then the gap between two of them counts.
//!
//! If the path did become narrow, these full packets are lost as well, and the transport still finds out.

use std::num::NonZeroU64;

use masque::datagram;
use s2n_quic::provider::datagram::Packet;

use crate::ledger::{BASE_PACKET_BYTES, Ledger};

/// The most that one packet can lack: with jumbo frames.
static NOTHING: [u8; 9_000] = [0; 9_000];

/// How many bytes of packets pay for one byte of filling up: less than 3 % are added.
const SHARE: i64 = 35;

/// Most packets that are filled up in a row. With more, too many losses fall between two rows.
const ROW: i64 = 8;

/// At least how many packets are left as they are for each packet of a row: each row may take a message.
const PAUSE: i64 = 5;

/// What one connection knows about its packets with datagrams that are above the base size.
pub(super) struct Proof {
    /// Packets since the last one that was filled up.
    since: u32,
    /// Packets since the last loss.
    since_loss: u32,
    /// Packets between two losses, on average.
    gap: u32,
    /// The total of lost packets when it was last read.
    lost: u64,
    /// Bytes that filling up may add.
    credit: i64,
    /// The burst of the last packet, and how many of the next packets in it to fill up.
    burst: u32,
    row: i64,
}

impl Default for Proof {
    /// Nothing is known about the path, so losses are likely.
    fn default() -> Self {
        Self { since: 0, since_loss: 0, gap: 64, lost: 0, credit: 0, burst: 0, row: 0 }
    }
}

/// The state of the path when a packet is about to leave.
#[derive(Clone, Copy, Debug, Default)]
struct Moment {
    /// Packets above the base size that were lost so far.
    lost: u64,
    /// The number of the burst that the packet belongs to.
    burst: u32,
    /// Whether the path sets the pace.
    uses_window: bool,
    /// Whether the window also grows fast.
    opens_window: bool,
}

impl Proof {
    /// Returns `n`: with a loss in every `gap` packets, one of `n` packets has to be filled up.
    ///
    /// With one of three, any loss is followed by a full packet before the transport declares it, which takes three
    /// packets (RFC 9002 §6.1.1). Where losses are rarer, few enough fall between two full packets. The result is odd, so
    /// that it does not keep in step with a queue that drops every second packet.
    fn every(gap: u32) -> u32 {
        if gap < 32 { 1 } else { (gap / 40).max(3) | 1 }
    }

    /// Whether to fill up a packet of `packet_bytes`, which lacks `left_bytes`.
    fn is_due(&mut self, packet_bytes: u64, left_bytes: u64, now: Moment) -> bool {
        if packet_bytes <= BASE_PACKET_BYTES {
            return false;
        }
        self.since = self.since.saturating_add(1);
        self.since_loss = self.since_loss.saturating_add(1);
        if let Some(new) = NonZeroU64::new(now.lost.saturating_sub(self.lost)) {
            let sample = (u64::from(self.since_loss) / new) as u32;
            self.gap = (self.gap / 4 * 3).saturating_add(sample / 4);
            (self.lost, self.since_loss) = (now.lost, 0);
        }
        let every = Self::every(self.gap.max(self.since_loss / 2));

        // Neither exceeds 16 bits. A packet that lacks nothing counts as lacking one byte.
        let (packet_bytes, left_bytes) = (packet_bytes as i64, (left_bytes as i64).max(1));
        let most = if now.uses_window { 1 } else { ROW };
        // As many packets as can be paid for shortly before losses require one.
        let row = (i64::from(every) * 3 / 4 * packet_bytes / SHARE / left_bytes).clamp(1, most);
        self.credit = (self.credit + packet_bytes / SHARE).min((row * left_bytes).max(self.credit));
        if std::mem::replace(&mut self.burst, now.burst) != now.burst {
            let is_affordable = self.credit >= row * left_bytes && i64::from(self.since) > PAUSE * row;
            self.row = if is_affordable { row } else { 0 };
        }
        let is_cheap = SHARE * left_bytes <= packet_bytes;
        now.opens_window || is_cheap || self.row > 0 || self.since >= every
    }

    /// Notes that a packet was filled up with `left_bytes`.
    fn on_filled_up(&mut self, left_bytes: u64) {
        self.since = 0;
        self.row = (self.row - 1).max(0);
        self.credit = (self.credit - left_bytes as i64).max(0);
    }

    /// Fills a packet up, if that is due, with bytes that belong to a stream that has a tunnel; returns whether it did.
    pub(super) fn fill_up<P: Packet>(&mut self, packet: &mut P, stream_id: u64, ledger: &Ledger) -> bool {
        let room = packet.remaining_capacity() as u64;
        // What the transport subtracted for a frame's type and length; the length can be left out of a last frame.
        let length_bytes = if room + 2 < 64 { 1 } else { 2 };
        let left = room + 1 + length_bytes;
        let packet_bytes = ledger.full_packet_bytes().saturating_sub(left);
        let now = Moment {
            lost: ledger.large_packets_lost(),
            burst: ledger.burst(),
            uses_window: ledger.uses_window(),
            opens_window: ledger.opens_window(),
        };
        if !self.is_due(packet_bytes, left, now) {
            return false;
        }
        let header = datagram::filler(stream_id, !ledger.is_server());
        let zeros = (left as usize).checked_sub(1 + header.len()).and_then(|zeros| NOTHING.get(..zeros));
        let filled_up = zeros.is_some_and(|zeros| packet.write_datagram_vectored(&[&header, zeros]).is_ok());
        if filled_up {
            self.on_filled_up(left);
        }
        filled_up
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::FakePacket, *};
    use crate::ledger::account::Account;

    /// The transport's detection of a path that became narrow (s2n-quic `path/mtu.rs`, `recovery/manager.rs`).
    #[derive(Default)]
    struct Lookout {
        /// Whether each packet in flight is full, and whether it will be lost, by number.
        sent: Vec<(bool, bool)>,
        acknowledged: usize,
        judged: usize,
        full: Option<usize>,
        bursts: u32,
        last_lost: Option<usize>,
        is_fooled: bool,
    }

    impl Lookout {
        /// An acknowledgement of all packets below `end` that arrived.
        fn acknowledge(&mut self, end: usize) {
            for number in self.acknowledged..end {
                if self.sent[number] == (true, false) {
                    (self.full, self.bursts) = (Some(number), 0);
                }
            }
            self.acknowledged = end;
            for number in self.judged..end.saturating_sub(3).max(self.judged) {
                let (is_full, is_lost) = self.sent[number];
                if is_lost {
                    let is_burst = self.last_lost.replace(number).is_none_or(|last| last + 1 != number);
                    if is_burst && !is_full && self.full.is_none_or(|full| number > full) {
                        self.bursts += 1;
                        self.is_fooled |= self.bursts > 3;
                    }
                }
                self.judged = number + 1;
            }
        }
    }

    /// What a connection did: which packets of each burst were filled up, how many bytes that added, and whether losses
    /// passed for a narrow path.
    struct Course {
        bursts: Vec<Vec<bool>>,
        added_percent: f64,
        is_fooled: bool,
    }

    /// Sends bursts of packets of `packet_bytes`, where full ones have `full_bytes`, `flight` of them before the first is
    /// acknowledged. `now` returns what is known when a packet leaves, and `loses` whether it is lost.
    fn course(
        (packet_bytes, full_bytes): (u64, u64),
        (packets, burst, flight): (usize, usize, usize),
        now: impl Fn(usize) -> Moment,
        mut loses: impl FnMut(usize) -> bool,
    ) -> Course {
        let (mut proof, mut lookout, mut bursts) = (Proof::default(), Lookout::default(), Vec::new());
        let (mut lost, mut added, mut counted) = (0, 0, 0);
        for number in 0..packets {
            if number.is_multiple_of(burst) {
                bursts.push(Vec::new());
                if let Some(end) = number.checked_sub(flight) {
                    let judged = lookout.judged;
                    lookout.acknowledge(end);
                    lost += lookout.sent[judged..lookout.judged].iter().filter(|(_, is_lost)| *is_lost).count() as u64;
                }
            }
            let left = full_bytes - packet_bytes;
            let now = Moment { lost, burst: bursts.len() as u32, ..now(number) };
            let is_full = proof.is_due(packet_bytes, left, now);
            if is_full {
                proof.on_filled_up(left);
            }
            // The first packets are filled up more often, since nothing is known yet.
            if number >= packets / 10 {
                (added, counted) = (added + u64::from(is_full) * left, counted + packet_bytes);
            }
            bursts.last_mut().unwrap().push(is_full);
            lookout.sent.push((is_full, loses(number)));
        }
        let added_percent = 100.0 * added as f64 / counted as f64;
        Course { bursts, added_percent, is_fooled: lookout.is_fooled }
    }

    /// Returns a number from 0 to 1 that looks random.
    fn random(seed: u64) -> f64 {
        let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }

    const SIZES: [(u64, u64); 7] = [
        (1_201, 1_472),
        (1_240, 1_472),
        (1_300, 1_472),
        (1_400, 1_472),
        (1_470, 1_472),
        (1_240, 8_972),
        (4_000, 8_972),
    ];

    #[test]
    fn filling_up_adds_less_than_three_percent_at_any_size_whether_or_not_the_path_sets_the_pace() {
        for sizes in SIZES {
            for (burst, uses_window) in [(1, false), (3, true), (7, false), (20, true), (64, false)] {
                let moment = Moment { uses_window, ..Moment::default() };
                for loss in [0.0, 0.0003] {
                    // Paths with large packets are tested with fewer losses: filling up three of a hundred packets is
                    // expensive there.
                    let loss = if sizes.1 > 1_472 { loss / 30.0 } else { loss };
                    let loses = |number| random(number as u64) < loss;
                    let seen = course(sizes, (200_000, burst, 100), |_| moment, loses);
                    let context = format!("{sizes:?}, bursts of {burst}, {loss} lost: {:.2} %", seen.added_percent);
                    assert!((0.01..3.0).contains(&seen.added_percent), "{context}");
                    assert!(!seen.is_fooled, "{context}");
                }
            }
        }
        let seen = course((1_200, 1_472), (10_000, 8, 100), |_| Moment::default(), |number| number.is_multiple_of(5));
        assert!(seen.added_percent == 0.0 && !seen.bursts.iter().flatten().any(|full| *full), "never small ones");
    }

    #[test]
    fn full_packets_lead_a_burst_or_are_all_of_it_so_that_no_message_is_broken() {
        for (sizes, burst) in SIZES.into_iter().flat_map(|sizes| [1, 2, 5, 8, 30].map(|burst| (sizes, burst))) {
            let seen = course(sizes, (100_000, burst, 100), |_| Moment::default(), |_| false);
            let settled = &seen.bursts[seen.bursts.len() / 2..];
            let rows = settled.iter().filter(|burst| burst.contains(&true)).count();
            assert!(rows > 10, "{sizes:?} in {burst}: {rows}");
            for packets in settled {
                let row = packets.iter().take_while(|full| **full).count();
                assert!(packets[row..].iter().all(|full| !full), "{packets:?}");
            }
            let broken = settled.iter().filter(|packets| packets.contains(&true) && packets.contains(&false)).count();
            // Bursts that are no longer than a row have packets of one size, as long as rows are worth it.
            let (least_row, packets) = (if sizes.1 > 1_472 { 1 } else { 7 }, settled.len() * burst);
            assert!(broken <= packets / 45 && (burst > least_row || broken == 0), "{sizes:?} in {burst}: {broken}");
        }
    }

    #[test]
    fn losses_do_not_pass_for_a_narrow_path_singly_or_when_a_slow_start_ends() {
        for (sizes, loss) in
            SIZES.into_iter().flat_map(|sizes| [0.001, 0.003, 0.01, 0.05, 0.2].map(|loss| (sizes, loss)))
        {
            let uses_window = Moment { uses_window: true, ..Moment::default() };
            let seen = course(
                sizes,
                (100_000, 4, 60),
                |_| uses_window,
                |number| {
                    // Losses become more frequent over time.
                    random(number as u64) < loss * (number as f64 / 20_000.0).min(1.0)
                },
            );
            assert!(!seen.is_fooled, "{sizes:?}, {loss} lost: {:.2} % more", seen.added_percent);
        }
        let slow_start = |number| Moment { uses_window: true, opens_window: number < 3_000, ..Moment::default() };
        let half_a_window = |number: usize| (2_000..3_000).contains(&number) && number.is_multiple_of(2);
        assert!(!course((1_240, 1_472), (20_000, 10, 1_000), slow_start, half_a_window).is_fooled);
        let nothing_known = |_| Moment::default();
        let without = course((1_240, 1_472), (20_000, 10, 1_000), nothing_known, half_a_window);
        assert!(without.is_fooled, "without that the same losses would pass for a narrow path");
    }

    #[test]
    fn a_connection_that_never_fills_a_packet_up_goes_on_counting() {
        let mut proof = Proof { since: u32::MAX, ..Proof::default() };
        assert!(proof.is_due(1_300, 100, Moment::default()) && proof.is_due(1_300, 100, Moment::default()));
    }

    #[test]
    fn the_more_is_lost_the_more_packets_are_filled_up() {
        let mut before = 0.0;
        for (gap, least) in [(5_000, 0.4), (100, 5.0), (40, 6.0), (10, 18.0)] {
            let seen =
                course((1_240, 1_472), (50_000, 5, 50), |_| Moment::default(), |number| number.is_multiple_of(gap));
            assert!(seen.added_percent > least && seen.added_percent > before - 0.01, "{gap}: {}", seen.added_percent);
            assert!(!seen.is_fooled, "{gap}");
            before = seen.added_percent;
        }
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
