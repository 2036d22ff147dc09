//! A controller that controls nothing: a fixed rate, for measurements of pacing alone.

use std::time::Duration;

use s2n_quic::provider::congestion_controller::{
    CongestionController, Publisher, RandomGenerator, RttEstimator, Timestamp,
};
use s2n_quic_core::recovery::bandwidth::Bandwidth;

/// How many packets s2n-quic's own pacer sends at once.
const BURST_PACKETS: u64 = 10;

/// Sends at one rate, whatever is lost.
///
/// - Under paced's IO provider, every packet gets a departure time at this rate, as under CUBIC.
/// - Under any other provider it sends as s2n-quic's pacer would at this rate: bursts of 10 packets. (That pacer itself
///   cannot be given a rate: it belongs to the controllers that have a window.)
#[derive(Clone, Debug)]
pub struct Fixed {
    bytes_per_sec: u64,
    packet_bytes: u16,
    smoothed_rtt: Duration,
    in_flight_bytes: u32,
    /// The bytes left of the current burst, and when the next may begin.
    burst_bytes: u64,
    next_burst: Option<Timestamp>,
}

impl Fixed {
    /// Creates the controller of one path. A rate of 0 is treated as one byte per second.
    #[must_use]
    pub fn new(bytes_per_sec: u64, packet_bytes: u16) -> Self {
        let (bytes_per_sec, smoothed_rtt) = (bytes_per_sec.max(1), Duration::ZERO);
        Self { bytes_per_sec, packet_bytes, smoothed_rtt, in_flight_bytes: 0, burst_bytes: 0, next_burst: None }
    }

    fn burst(&mut self, now: Timestamp, sent_bytes: usize) {
        if self.burst_bytes == 0 {
            self.burst_bytes = BURST_PACKETS * u64::from(self.packet_bytes);
            let lasts = Duration::from_nanos(self.burst_bytes * 1_000_000_000 / self.bytes_per_sec);
            self.next_burst = Some(self.next_burst.map_or(now, |next| (next + lasts).max(now)));
        }
        self.burst_bytes = self.burst_bytes.saturating_sub(sent_bytes as u64);
    }

    fn settle(&mut self, bytes: usize) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes as u32);
    }
}

impl CongestionController for Fixed {
    type PacketInfo = ();

    /// Returns twice what the path holds at this rate, which never limits; other parts derive the path's rate from it.
    fn congestion_window(&self) -> u32 {
        let path_bytes = u128::from(self.bytes_per_sec) * self.smoothed_rtt.as_micros() / 1_000_000;
        let least = BURST_PACKETS * u64::from(self.packet_bytes);
        u32::try_from(path_bytes * 2).unwrap_or(u32::MAX).max(least as u32)
    }

    fn bytes_in_flight(&self) -> u32 {
        self.in_flight_bytes
    }

    fn is_congestion_limited(&self) -> bool {
        false
    }

    fn requires_fast_retransmission(&self) -> bool {
        false
    }

    fn on_packet_sent<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        sent_bytes: usize,
        _app_limited: Option<bool>,
        _rtt: &RttEstimator,
        publisher: &mut P,
    ) {
        let rate = Bandwidth::new(self.bytes_per_sec, Duration::from_secs(1));
        publisher.on_pacing_rate_updated(rate, u32::from(self.packet_bytes), 1.into());
        self.burst(time_sent, sent_bytes);
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(sent_bytes as u32);
    }

    fn on_rtt_update<P: Publisher>(&mut self, _: Timestamp, _: Timestamp, rtt: &RttEstimator, _: &mut P) {
        self.smoothed_rtt = rtt.smoothed_rtt();
    }

    fn on_ack<P: Publisher>(
        &mut self,
        _newest_acked_time_sent: Timestamp,
        bytes_acknowledged: usize,
        (): (),
        _rtt: &RttEstimator,
        _random: &mut dyn RandomGenerator,
        _ack_receive_time: Timestamp,
        _publisher: &mut P,
    ) {
        self.settle(bytes_acknowledged);
    }

    fn on_packet_lost<P: Publisher>(
        &mut self,
        lost_bytes: u32,
        (): (),
        _persistent_congestion: bool,
        _new_loss_burst: bool,
        _random: &mut dyn RandomGenerator,
        _now: Timestamp,
        _publisher: &mut P,
    ) {
        self.settle(lost_bytes as usize);
    }

    fn on_explicit_congestion<P: Publisher>(&mut self, _: u64, _: Timestamp, _: &mut P) {}

    fn on_mtu_update<P: Publisher>(&mut self, max_data_size: u16, _: &mut P) {
        self.packet_bytes = max_data_size;
    }

    fn on_packet_discarded<P: Publisher>(&mut self, bytes_sent: usize, _: &mut P) {
        self.settle(bytes_sent);
    }

    fn earliest_departure_time(&self) -> Option<Timestamp> {
        self.next_burst
    }
}

#[cfg(test)]
mod tests {
    use pacing::monotonic;

    use super::*;

    #[test]
    fn bursts_of_ten_packets_keep_the_rate_between_them() {
        // At 1.2 MB/s ten packets of 1,200 bytes last 10 ms.
        let (mut fixed, mut departures) = (Fixed::new(1_200_000, 1_200), Vec::new());
        for _ in 0..25 {
            fixed.burst(monotonic::timestamp(5_000_000), 1_200);
            departures.push(monotonic::ns(fixed.earliest_departure_time().unwrap()) / 1_000_000);
        }
        assert_eq!(departures, [[5; 10].as_slice(), &[15; 10], &[25; 5]].concat());
    }
}
