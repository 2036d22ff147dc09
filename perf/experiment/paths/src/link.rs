//! A simulated path: a drop-tail queue in front of a link, a congestion window, and the sender's state about its packets.
//!
//! The sender follows QUIC's loss detection (RFC 9002): a packet is lost once a packet sent three later is acknowledged, or one
//! sent some time later (§6.1); a probe timeout (§6.2) resends the two oldest. Its window is NewReno's (§7): slow start, then one
//! packet per round trip; it is halved once per round trip with losses. It grows only while it is full.

use std::collections::{BTreeMap, VecDeque};

use instruments::random::Random;
use plan::paths::Links;

use super::stream::Piece;

/// RFC 9002 §6.1.1.
const PACKET_THRESHOLD: u64 = 3;

/// The least duration of a probe timeout, as in quic-go of the paper's time and in TCP. On a slow link, the first window takes
/// longer than any estimate from the handshake.
const LEAST_PATIENCE_NS: f64 = 2e8;

/// The state of a packet until it is acknowledged or declared lost.
#[derive(Clone, Copy, Debug)]
struct Sent {
    piece: Piece,
    at_ns: u64,
}

/// A path, as the network has it and as the sender sees it.
#[derive(Clone, Debug)]
pub(super) struct Link {
    packet_ns: u64,
    one_way_ns: u64,
    buffer: usize,
    jitter_ns: f64,
    /// When each packet in the router's queue will have left, including the one that is leaving.
    departures: VecDeque<u64>,
    arrived_last_ns: u64,
    acknowledged_last_ns: u64,
    window: f64,
    threshold: f64,
    /// Losses of packets with lower numbers have already reduced the window.
    recovered_from: u64,
    next: u64,
    in_flight: BTreeMap<u64, Sent>,
    sent_last_ns: u64,
    smoothed_ns: f64,
    variance_ns: f64,
    /// The number of successive probe timeouts; each doubles the next one's duration.
    probes: u32,
    delivered: u64,
    /// Packets that the router dropped.
    pub(super) dropped: u64,
}

/// The fate of a packet that was sent.
pub(super) struct Departure {
    pub(super) number: u64,
    /// When it arrives, and when its acknowledgement arrives; `None` if it was dropped.
    pub(super) times: Option<(u64, u64)>,
}

impl Link {
    /// Makes a path with `packet_ns` per packet and a round trip of `rtt_ns`, which the sender estimates as `known_ns`.
    pub(super) fn new(packet_ns: u64, rtt_ns: u64, known_ns: f64, links: &Links) -> Self {
        Self {
            packet_ns,
            one_way_ns: rtt_ns / 2,
            buffer: links.buffer_packets,
            jitter_ns: links.jitter_ms * 1e6,
            departures: VecDeque::new(),
            arrived_last_ns: 0,
            acknowledged_last_ns: 0,
            window: f64::from(links.initial_window),
            threshold: f64::INFINITY,
            recovered_from: 0,
            next: 0,
            in_flight: BTreeMap::new(),
            sent_last_ns: 0,
            smoothed_ns: known_ns,
            variance_ns: known_ns / 2.0,
            probes: 0,
            delivered: 0,
            dropped: 0,
        }
    }

    pub(super) fn has_window(&self) -> bool {
        (self.in_flight.len() as f64) < self.window.floor()
    }

    pub(super) fn window(&self) -> f64 {
        self.window
    }

    /// Returns how many packets are neither acknowledged nor declared lost.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.len() as u64
    }

    /// Returns how many packets were acknowledged.
    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Returns the rate at which Linux would pace, in packets per nanosecond: two windows per round trip while the window is less
    /// than half of the slow start threshold, later 1.2 windows (`tcp_update_pacing_rate` in net/ipv4/tcp_input.c).
    pub(super) fn pacing_packets_per_ns(&self) -> f64 {
        let ratio = if self.window < self.threshold / 2.0 { 2.0 } else { 1.2 };
        ratio * self.window.max(self.in_flight.len() as f64) / self.smoothed_ns
    }

    pub(super) fn smoothed_ns(&self) -> f64 {
        self.smoothed_ns
    }

    pub(super) fn deviation_ns(&self) -> f64 {
        self.variance_ns
    }

    /// Sends a piece of a stream.
    pub(super) fn send(&mut self, now_ns: u64, piece: Piece, random: &mut Random) -> Departure {
        let number = self.next;
        self.next += 1;
        self.sent_last_ns = now_ns;
        self.in_flight.insert(number, Sent { piece, at_ns: now_ns });
        while self.departures.front().is_some_and(|left| *left <= now_ns) {
            self.departures.pop_front();
        }
        if self.departures.len() > self.buffer {
            self.dropped += 1;
            return Departure { number, times: None };
        }
        let left = self.departures.back().copied().unwrap_or(now_ns).max(now_ns) + self.packet_ns;
        self.departures.push_back(left);
        let mut jitter = || (random.share() * self.jitter_ns) as u64;
        let arrived = (left + self.one_way_ns + jitter()).max(self.arrived_last_ns);
        let acknowledged = (arrived + self.one_way_ns + jitter()).max(self.acknowledged_last_ns);
        (self.arrived_last_ns, self.acknowledged_last_ns) = (arrived, acknowledged);
        Departure { number, times: Some((arrived, acknowledged)) }
    }

    /// Processes an acknowledgement and returns the pieces that are now known to be lost.
    pub(super) fn acknowledged(&mut self, now_ns: u64, number: u64) -> Vec<Piece> {
        let is_full = self.in_flight.len() as f64 + 1.0 >= self.window.floor();
        let Some(sent) = self.in_flight.remove(&number) else { return Vec::new() };
        self.probes = 0;
        self.delivered += 1;
        // RFC 9002 §5.3.
        let sample = (now_ns - sent.at_ns) as f64;
        self.variance_ns = 0.75 * self.variance_ns + 0.25 * (self.smoothed_ns - sample).abs();
        self.smoothed_ns = 0.875 * self.smoothed_ns + 0.125 * sample;
        if is_full && number >= self.recovered_from {
            self.window += if self.window < self.threshold { 1.0 } else { 1.0 / self.window };
        }
        // §6.1.2: 9/8 of a round trip.
        let late = (1.125 * self.smoothed_ns.max(sample)) as u64;
        let is_lost = |other: u64, sent: &Sent| other + PACKET_THRESHOLD <= number || sent.at_ns + late <= now_ns;
        let earlier = self.in_flight.range(..number).filter(|(it, sent)| is_lost(**it, sent));
        let lost: Vec<u64> = earlier.map(|(it, _)| *it).collect();
        if lost.iter().any(|lost| *lost >= self.recovered_from) {
            self.recovered_from = self.next;
            self.window = (self.window / 2.0).max(2.0);
            self.threshold = self.window;
        }
        lost.into_iter().filter_map(|lost| self.in_flight.remove(&lost)).map(|sent| sent.piece).collect()
    }

    /// Returns when a probe timeout is due unless an acknowledgement arrives (RFC 9002 §6.2.1), counted from the last packet.
    pub(super) fn probe_at_ns(&self) -> Option<u64> {
        if self.in_flight.is_empty() {
            return None;
        }
        let once = (self.smoothed_ns + 4.0 * self.variance_ns).max(LEAST_PATIENCE_NS);
        Some(self.sent_last_ns + (once * f64::from(1_u32 << self.probes.min(6))) as u64)
    }

    /// Processes a probe timeout and returns the pieces to send again.
    pub(super) fn probe(&mut self) -> Vec<Piece> {
        self.probes += 1;
        let oldest: Vec<u64> = self.in_flight.keys().take(2).copied().collect();
        oldest.into_iter().filter_map(|it| self.in_flight.remove(&it)).map(|sent| sent.piece).collect()
    }
}
