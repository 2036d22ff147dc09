//! What the transport knows about a connection's path, for callers that inspect connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use self::{arrivals::PacketArrivals, count::add};

mod arrivals;
mod count;

/// What one connection has measured on its path. Clones follow the same connection.
#[derive(Clone, Debug, Default)]
pub struct PathStats(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    smoothed_rtt_us: AtomicU64,
    min_rtt_us: AtomicU64,
    lifetime_min_rtt_us: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    sent_packets: AtomicU64,
    lost_packets: AtomicU64,
    lost: Episodes,
    gaps: Episodes,
    arrivals: PacketArrivals,
    window_bytes: AtomicU64,
    in_flight_bytes: AtomicU64,
}

/// Losses in one direction; losses within a round trip count once.
#[derive(Debug, Default)]
struct Episodes {
    all: AtomicU64,
    /// The episodes without a queue.
    unqueued: AtomicU64,
    /// When the last episode began.
    began_us: AtomicU64,
}

impl Episodes {
    fn note(&self, now_us: u64, path: &Counts) {
        let [began_us, smoothed_us, min_us] =
            [&self.began_us, &path.smoothed_rtt_us, &path.min_rtt_us].map(|count| count.load(Relaxed));
        if began_us > 0 && now_us < began_us.saturating_add(smoothed_us) {
            return;
        }
        self.began_us.store(now_us, Relaxed);
        add(&self.all, 1);
        if smoothed_us <= min_us + min_us / UNQUEUED_SHARE + UNQUEUED_US {
            add(&self.unqueued, 1);
        }
    }
}

/// A snapshot of what a connection has measured on its path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// The smoothed round trip (RFC 9002 §5.3); `None` before the first sample.
    pub smoothed_rtt: Option<Duration>,
    /// The shortest round trip (RFC 9002 §5.2). Persistent congestion resets it to the next round trip, which may include the peer's delay of
    /// an acknowledgement.
    pub min_rtt: Option<Duration>,
    /// The shortest round trip since the connection began.
    pub lifetime_min_rtt: Option<Duration>,
    /// UDP payloads sent, in bytes.
    pub sent_bytes: u64,
    /// UDP payloads received, in bytes.
    pub received_bytes: u64,
    /// QUIC packets sent.
    pub sent_packets: u64,
    /// QUIC packets that were declared lost (RFC 9002 §6), except probes of the path's MTU.
    pub lost_packets: u64,
    /// Round trips in which packets were lost.
    pub loss_episodes: u64,
    /// The loss episodes without a queue: the smoothed round trip was not much longer than the shortest one.
    pub unqueued_episodes: u64,
    /// Round trips without a queue in which packets did not arrive in order, because some were lost or late. Numbers that the peer may
    /// have left out on purpose do not count.
    pub unqueued_gaps: u64,
    /// Packets that arrived after the handshake. Only clients count arrived and missing packets.
    pub arrived_packets: u64,
    /// Packet numbers that have not arrived although a larger one has: packets that were lost or are late, and numbers that the
    /// peer left out.
    pub missing_packets: u64,
    /// The missing numbers that the peer may have left out on purpose.
    pub skipped_packets: u64,
    /// The congestion window, in bytes, after the last burst of packets, acknowledgement or timeout.
    pub window_bytes: u64,
    /// The bytes in flight at that time (RFC 9002 §B.2).
    pub in_flight_bytes: u64,
}

impl PathStats {
    /// Returns a snapshot.
    #[must_use]
    pub fn get(&self) -> PathState {
        let of = |count: &AtomicU64| count.load(Relaxed);
        let time = |count: &AtomicU64| Some(of(count)).filter(|us| *us > 0).map(Duration::from_micros);
        PathState {
            smoothed_rtt: time(&self.0.smoothed_rtt_us),
            min_rtt: time(&self.0.min_rtt_us),
            lifetime_min_rtt: time(&self.0.lifetime_min_rtt_us),
            sent_bytes: of(&self.0.sent_bytes),
            received_bytes: of(&self.0.received_bytes),
            sent_packets: of(&self.0.sent_packets),
            lost_packets: of(&self.0.lost_packets),
            loss_episodes: of(&self.0.lost.all),
            unqueued_episodes: of(&self.0.lost.unqueued),
            unqueued_gaps: of(&self.0.gaps.unqueued),
            arrived_packets: of(&self.0.arrivals.arrived),
            missing_packets: of(&self.0.arrivals.missing),
            skipped_packets: of(&self.0.arrivals.skipped),
            window_bytes: of(&self.0.window_bytes),
            in_flight_bytes: of(&self.0.in_flight_bytes),
        }
    }

    /// Counts a UDP datagram that was sent.
    pub fn sent_datagram(&self, bytes: u64) {
        add(&self.0.sent_bytes, bytes);
    }

    /// Counts a UDP datagram that was received.
    pub fn received_datagram(&self, bytes: u64) {
        add(&self.0.received_bytes, bytes);
    }

    /// Counts a QUIC packet that was sent.
    pub fn sent_packet(&self) {
        add(&self.0.sent_packets, 1);
    }

    /// Counts a QUIC packet that was declared lost, at a time of any clock that does not go back.
    pub fn lost_packet(&self, now: Duration) {
        add(&self.0.lost_packets, 1);
        self.0.lost.note(us(now), &self.0);
    }

    /// Counts a QUIC packet that arrived after the handshake, by its number; the clock is that of lost packets.
    pub fn arrived_packet(&self, number: u64, now: Duration) {
        let now_us = us(now);
        if self.0.arrivals.note(number, now_us, self.0.min_rtt_us.load(Relaxed)) {
            self.0.gaps.note(now_us, &self.0);
        }
    }

    /// Notes the latest congestion window, and how much of it is used.
    pub fn filled(&self, window_bytes: u32, in_flight_bytes: u32) {
        self.0.window_bytes.store(window_bytes.into(), Relaxed);
        self.0.in_flight_bytes.store(in_flight_bytes.into(), Relaxed);
    }

    /// Notes the latest estimates of the round-trip time.
    pub fn measured(&self, smoothed_rtt: Duration, min_rtt: Duration) {
        self.0.smoothed_rtt_us.store(us(smoothed_rtt), Relaxed);
        self.0.min_rtt_us.store(us(min_rtt), Relaxed);
        let shortest_us = &self.0.lifetime_min_rtt_us;
        let known_us = Some(shortest_us.load(Relaxed)).filter(|us| *us > 0);
        shortest_us.store(known_us.map_or(us(min_rtt), |known_us| known_us.min(us(min_rtt))), Relaxed);
    }
}

/// A round trip counts as one without a queue if it exceeds the shortest one by at most this time plus a fourth of the shortest one:
/// acknowledgements may be as late (RFC 9000 §18.2), senders send in bursts, and long paths vary. A queue that drops
/// packets holds more on most links.
const UNQUEUED_US: u64 = 25_000;
const UNQUEUED_SHARE: u64 = 4;

/// Returns a time in microseconds, at least 1, because zero means unknown.
fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// The largest QUIC packet that a connection sends, in bytes of UDP payload. Clones follow the same connection.
#[derive(Clone, Debug)]
pub struct PacketSize(Arc<AtomicU16>);

impl Default for PacketSize {
    /// Nothing is known yet, so nothing is too large.
    fn default() -> Self {
        Self(Arc::new(AtomicU16::new(u16::MAX)))
    }
}

impl PacketSize {
    /// The most that a packet needs beyond a UDP payload: a short header with the longest connection ID and packet number
    /// (RFC 9000 §17.3), the AEAD's tag (RFC 9001 §5.3), and a DATAGRAM frame with its length (RFC 9221 §4), a quarter stream ID
    /// of four bytes and a context ID (RFC 9297 §2.1, RFC 9298 §5).
    const OVERHEAD_BYTES: u16 = 1 + 20 + 4 + 16 + 3 + 4 + 1;

    /// Whether a UDP payload of `payload_bytes` can travel in a DATAGRAM frame.
    #[must_use]
    pub fn carries(&self, payload_bytes: u16) -> bool {
        self.0.load(Relaxed) >= payload_bytes.saturating_add(Self::OVERHEAD_BYTES)
    }

    /// Sets how large packets may be now, in bytes.
    pub fn set(&self, bytes: u16) {
        self.0.store(bytes, Relaxed);
    }

    /// Returns the size, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u16 {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_within_a_round_trip_are_one_episode_and_a_queue_is_known_by_its_round_trips() {
        let (stats, ms) = (PathStats::default(), Duration::from_millis);
        stats.measured(ms(20), ms(20));
        for at in [100, 101, 119, 120, 500] {
            stats.lost_packet(ms(at));
        }
        let seen = stats.get();
        assert_eq!((seen.lost_packets, seen.loss_episodes, seen.unqueued_episodes), (5, 3, 3));
        stats.measured(ms(100), ms(20));
        for at in [600, 710, 720] {
            stats.lost_packet(ms(at));
        }
        let seen = stats.get();
        assert_eq!((seen.lost_packets, seen.loss_episodes, seen.unqueued_episodes), (8, 5, 3));
        // 200 ms of packets in front of a long path do not even double its round trip.
        stats.measured(ms(400), ms(200));
        stats.lost_packet(ms(2_000));
        let seen = stats.get();
        assert_eq!((seen.loss_episodes, seen.unqueued_episodes), (6, 3));
    }

    #[test]
    fn numbers_that_have_not_arrived_are_missing_until_they_do() {
        let stats = PathStats::default();
        let ms = Duration::from_millis(1);
        stats.measured(25 * ms, 25 * ms);
        let missing = [(0, 0), (1, 1), (4, 2), (2, 3), (7, 4), (3, 40), (9, 50)].map(|(number, at)| {
            stats.arrived_packet(number, at * ms);
            stats.get().missing_packets
        });
        let seen = stats.get();
        assert_eq!((missing, seen.arrived_packets), ([0, 0, 2, 1, 3, 2, 3], 7));
        assert_eq!(seen.unqueued_gaps, 1, "the second gap is soon after the first, and the peer may have left out 8");
        assert_eq!(seen.skipped_packets, 1);
    }

    #[test]
    fn a_round_trip_is_known_once_there_was_one_however_short() {
        let stats = PathStats::default();
        assert_eq!(stats.get(), PathState::default());
        stats.measured(Duration::from_nanos(10), Duration::ZERO);
        stats.sent_packet();
        stats.sent_datagram(1_200);
        let us = Some(Duration::from_micros(1));
        let expected = PathState {
            smoothed_rtt: us,
            min_rtt: us,
            lifetime_min_rtt: us,
            sent_bytes: 1_200,
            sent_packets: 1,
            ..PathState::default()
        };
        assert_eq!(stats.clone().get(), expected);
    }

    #[test]
    fn the_shortest_round_trip_of_a_connection_outlasts_persistent_congestion() {
        let (stats, ms) = (PathStats::default(), Duration::from_millis);
        let shortest = [(20, 20), (30, 10), (35, 35), (35, 30)].map(|(smoothed, min)| {
            stats.measured(ms(smoothed), ms(min));
            let seen = stats.get();
            (seen.min_rtt, seen.lifetime_min_rtt)
        });
        let expected = [(20, 20), (10, 10), (35, 10), (30, 10)].map(|(min, of_all)| (Some(ms(min)), Some(ms(of_all))));
        assert_eq!(shortest, expected);
    }
}
