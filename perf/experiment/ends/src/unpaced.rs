//! Congestion control without pacing, as at the beginning of HAProxy's slides: everything that fits into the window
//! leaves at once.

use s2n_quic::provider::congestion_controller::{
    CongestionController, Endpoint, PathInfo, Publisher, RandomGenerator, RttEstimator, Timestamp,
};

/// Another controller without its departure times.
#[derive(Clone, Debug)]
pub struct Unpaced<C>(pub C);

impl<C: Endpoint> Endpoint for Unpaced<C> {
    type CongestionController = Unpaced<C::CongestionController>;

    fn new_congestion_controller(&mut self, path: PathInfo<'_>) -> Self::CongestionController {
        Unpaced(self.0.new_congestion_controller(path))
    }
}

impl<C: CongestionController> CongestionController for Unpaced<C> {
    type PacketInfo = C::PacketInfo;

    fn earliest_departure_time(&self) -> Option<Timestamp> {
        None
    }

    fn congestion_window(&self) -> u32 {
        self.0.congestion_window()
    }

    fn bytes_in_flight(&self) -> u32 {
        self.0.bytes_in_flight()
    }

    fn is_congestion_limited(&self) -> bool {
        self.0.is_congestion_limited()
    }

    fn requires_fast_retransmission(&self) -> bool {
        self.0.requires_fast_retransmission()
    }

    fn on_packet_sent<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        sent_bytes: usize,
        app_limited: Option<bool>,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) -> Self::PacketInfo {
        self.0.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, publisher)
    }

    fn on_rtt_update<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        now: Timestamp,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) {
        self.0.on_rtt_update(time_sent, now, rtt, publisher);
    }

    fn on_ack<P: Publisher>(
        &mut self,
        newest_acked_time_sent: Timestamp,
        bytes_acknowledged: usize,
        newest_acked_packet: Self::PacketInfo,
        rtt: &RttEstimator,
        random: &mut dyn RandomGenerator,
        ack_receive_time: Timestamp,
        publisher: &mut P,
    ) {
        let (bytes, newest) = (bytes_acknowledged, newest_acked_packet);
        self.0.on_ack(newest_acked_time_sent, bytes, newest, rtt, random, ack_receive_time, publisher);
    }

    fn on_packet_lost<P: Publisher>(
        &mut self,
        lost_bytes: u32,
        packet: Self::PacketInfo,
        persistent: bool,
        new_burst: bool,
        random: &mut dyn RandomGenerator,
        now: Timestamp,
        publisher: &mut P,
    ) {
        self.0.on_packet_lost(lost_bytes, packet, persistent, new_burst, random, now, publisher);
    }

    fn on_explicit_congestion<P: Publisher>(&mut self, ce_count: u64, event_time: Timestamp, publisher: &mut P) {
        self.0.on_explicit_congestion(ce_count, event_time, publisher);
    }

    fn on_mtu_update<P: Publisher>(&mut self, max_data_size: u16, publisher: &mut P) {
        self.0.on_mtu_update(max_data_size, publisher);
    }

    fn on_packet_discarded<P: Publisher>(&mut self, bytes_sent: usize, publisher: &mut P) {
        self.0.on_packet_discarded(bytes_sent, publisher);
    }
}
