//! Which side sends next when streams and datagrams share a connection.

use crate::stream::Rank;

/// One of the two kinds of payload that a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Stream bytes that the transport already holds.
    Streams,
    /// Datagrams waiting to be pulled.
    Datagrams,
}

/// Chooses between two sides whose [ranks](Rank) come from one [`DisciplineClock`](crate::stream::DisciplineClock).
///
/// The smaller rank goes first. On equal ranks (under round robin all ranks are equal) the sides share by start-time
/// fair queueing (SIGCOMM 1996), each weighted by how many streams or flows wait on it: `n` streams and `m` datagram
/// flows share `n : m`, as if they waited in one queue. A side is charged only while the other one waits at the same rank,
/// so a side that had nothing to send, or nothing of that rank, accumulates no credit.
#[derive(Clone, Debug, Default)]
pub struct Arbiter {
    streams: u64,
    datagrams: u64,
}

impl Arbiter {
    /// Virtual time of one byte when one stream or flow waits. Only the difference between the sides is kept, so it
    /// cannot overflow with turns of less than 4 GiB; longer turns count as 4 GiB.
    const UNITS_PER_BYTE: u64 = 1 << 32;

    /// Creates an arbiter without history.
    #[must_use]
    pub const fn new() -> Self {
        Self { streams: 0, datagrams: 0 }
    }

    /// Returns which side sends next, given the rank of each side's next payload. Returns `None` if neither side has
    /// anything to send.
    #[must_use]
    pub fn choose(&self, streams: Option<Rank>, datagrams: Option<Rank>) -> Option<Side> {
        match (streams, datagrams) {
            (None, None) => None,
            (Some(_), None) => Some(Side::Streams),
            (None, Some(_)) => Some(Side::Datagrams),
            (Some(streams), Some(datagrams)) => {
                let first = (streams, self.streams) <= (datagrams, self.datagrams);
                Some(if first { Side::Streams } else { Side::Datagrams })
            }
        }
    }

    /// Charges `side` for `bytes` that it sent while the other side waited at the same rank, and `waiting` of its own streams
    /// or flows did; 0 counts as 1. A side that was not chosen is charged as well: stream bytes fill up packets of datagrams.
    pub fn sent(&mut self, side: Side, bytes: u64, waiting: usize) {
        let (own, other) = match side {
            Side::Streams => (&mut self.streams, &mut self.datagrams),
            Side::Datagrams => (&mut self.datagrams, &mut self.streams),
        };
        *own = own.saturating_add(bytes.saturating_mul(Self::UNITS_PER_BYTE) / waiting.max(1) as u64);
        let both = (*own).min(*other);
        *own -= both;
        *other -= both;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stream::{Discipline, DisciplineClock, Service, Streams};

    /// Streams on one side, datagram flows on the other; none runs dry.
    struct Connection {
        clock: DisciplineClock,
        arbiter: Arbiter,
        streams: Streams,
        datagrams: Streams,
    }

    impl Connection {
        fn new(discipline: Discipline, streams: &[Service], datagrams: &[Service]) -> Self {
            let mut clock = DisciplineClock::new(discipline, 1);
            let mut set = |services: &[Service]| {
                let mut streams = Streams::new();
                for (stream, service) in (0..).zip(services) {
                    streams.insert(&mut clock, stream, *service);
                    streams.wake(&mut clock, stream);
                }
                streams
            };
            let (streams, datagrams) = (set(streams), set(datagrams));
            Self { clock, arbiter: Arbiter::new(), streams, datagrams }
        }

        fn rank(streams: &Streams) -> Option<Rank> {
            streams.turn().map(|(_, rank)| rank)
        }

        /// Sends a packet of `bytes` from the side that the arbiter chooses.
        fn send(&mut self, bytes: u64) -> Side {
            let chosen = self.arbiter.choose(Self::rank(&self.streams), Self::rank(&self.datagrams));
            let side = chosen.expect("both sides are backlogged");
            self.send_from(side, bytes);
            side
        }

        fn send_from(&mut self, side: Side, bytes: u64) {
            let set = match side {
                Side::Streams => &mut self.streams,
                Side::Datagrams => &mut self.datagrams,
            };
            let (stream, _) = set.turn().expect("the chosen side has a turn");
            self.arbiter.sent(side, bytes, set.len());
            set.end_turn(&mut self.clock, stream, bytes, true);
        }
    }

    const PACKET_BYTES: u64 = 1_200;

    proptest! {
        #[test]
        fn in_round_robin_sides_share_by_how_many_wait_to_within_a_packet(
            streams in 1..50usize, datagrams in 1..50usize,
            packets in prop::collection::vec(1..=PACKET_BYTES, 1..500),
        ) {
            let services = [Service::default(); 50];
            let mut connection = Connection::new(Discipline::Rr, &services[..streams], &services[..datagrams]);
            let (mut stream_bytes, mut datagram_bytes) = (0, 0);
            for bytes in packets {
                match connection.send(bytes) {
                    Side::Streams => stream_bytes += bytes,
                    Side::Datagrams => datagram_bytes += bytes,
                }
                let ahead = stream_bytes as f64 / streams as f64 - datagram_bytes as f64 / datagrams as f64;
                let packet = PACKET_BYTES as f64;
                prop_assert!(ahead <= packet / streams as f64 + 1e-3 && ahead >= -packet / datagrams as f64 - 1e-3);
            }
        }

        #[test]
        fn a_side_that_sends_out_of_turn_waits_for_as_long_as_that_took(
            packets in 1..100usize, side in any::<bool>()
        ) {
            let (early, late) = if side { (Side::Streams, Side::Datagrams) } else { (Side::Datagrams, Side::Streams) };
            let services = [Service::default(); 1];
            let mut connection = Connection::new(Discipline::Rr, &services, &services);
            for _ in 0..packets {
                connection.send_from(early, PACKET_BYTES);
            }
            let had = (0..2 * packets).filter(|_| connection.send(PACKET_BYTES) == late).count();
            prop_assert!((3 * packets / 2..=3 * packets / 2 + 1).contains(&had));
        }
    }

    #[test]
    fn the_smaller_rank_goes_first_however_much_its_side_has_had() {
        let urgent = Service { priority: 200, ..Service::default() };
        let mut connection = Connection::new(Discipline::Abs, &[Service::default()], &[urgent]);
        assert!((0..100).all(|_| connection.send(PACKET_BYTES) == Side::Datagrams));
    }

    #[test]
    fn under_fair_queueing_weights_hold_across_the_sides() {
        let heavy = Service { weight: 3, ..Service::default() };
        let mut connection = Connection::new(Discipline::Wfq, &[Service::default(); 2], &[heavy]);
        let datagrams = (0..500).filter(|_| connection.send(PACKET_BYTES) == Side::Datagrams).count();
        assert!((299..=301).contains(&datagrams), "three of five, but {datagrams} of 500");
    }

    #[test]
    fn no_stream_is_chosen_when_none_waits() {
        let connection = Connection::new(Discipline::Rr, &[], &[]);
        assert_eq!(connection.arbiter.choose(None, None), None);
    }

    #[test]
    fn extremes_neither_panic_nor_wrap() {
        let mut arbiter = Arbiter::new();
        for side in [Side::Streams, Side::Datagrams, Side::Streams, Side::Streams] {
            arbiter.sent(side, u64::MAX, 0);
            arbiter.sent(side, u64::MAX, usize::MAX);
        }
    }
}
