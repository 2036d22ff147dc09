//! Congestion controllers: one type for all of them, so that the transport is compiled once.

use s2n_quic::provider::congestion_controller::{
    Bbr, CongestionController, Cubic, Endpoint, PathInfo, Publisher, RandomGenerator, RttEstimator, Timestamp,
};

type CubicController = <Cubic as Endpoint>::CongestionController;
type BbrController = <Bbr as Endpoint>::CongestionController;
type BbrPacket = <BbrController as CongestionController>::PacketInfo;

/// The congestion controller of an endpoint's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC (RFC 9438).
    #[default]
    Cubic,
    /// BBRv2, less sensitive to loss.
    Bbr,
}

impl Endpoint for Congestion {
    type CongestionController = Controller;

    fn new_congestion_controller(&mut self, path: PathInfo<'_>) -> Controller {
        match self {
            Self::Cubic => Controller::Cubic(Box::new(Cubic::default().new_congestion_controller(path))),
            Self::Bbr => Controller::Bbr(Box::new(Bbr::default().new_congestion_controller(path))),
        }
    }
}

/// The controller of one path.
#[derive(Clone, Debug)]
pub enum Controller {
    /// CUBIC.
    Cubic(Box<CubicController>),
    /// BBRv2.
    Bbr(Box<BbrController>),
}

/// Calls a method of whichever controller it is.
macro_rules! either {
    ($self:ident, $controller:ident => $call:expr) => {
        match $self {
            Self::Cubic($controller) => $call,
            Self::Bbr($controller) => $call,
        }
    };
}

impl CongestionController for Controller {
    /// What BBR remembers of each packet; nothing for CUBIC.
    type PacketInfo = Option<BbrPacket>;

    fn congestion_window(&self) -> u32 {
        either!(self, controller => controller.congestion_window())
    }

    fn bytes_in_flight(&self) -> u32 {
        either!(self, controller => controller.bytes_in_flight())
    }

    fn is_congestion_limited(&self) -> bool {
        either!(self, controller => controller.is_congestion_limited())
    }

    fn requires_fast_retransmission(&self) -> bool {
        either!(self, controller => controller.requires_fast_retransmission())
    }

    fn on_packet_sent<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        sent_bytes: usize,
        app_limited: Option<bool>,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) -> Self::PacketInfo {
        match self {
            Self::Cubic(cubic) => {
                cubic.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, publisher);
                None
            }
            Self::Bbr(bbr) => Some(bbr.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, publisher)),
        }
    }

    fn on_rtt_update<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        now: Timestamp,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) {
        either!(self, controller => controller.on_rtt_update(time_sent, now, rtt, publisher));
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
        match (self, newest_acked_packet) {
            (Self::Bbr(bbr), Some(packet)) => {
                bbr.on_ack(
                    newest_acked_time_sent,
                    bytes_acknowledged,
                    packet,
                    rtt,
                    random,
                    ack_receive_time,
                    publisher,
                );
            }
            (Self::Cubic(cubic), _) => {
                cubic.on_ack(newest_acked_time_sent, bytes_acknowledged, (), rtt, random, ack_receive_time, publisher);
            }
            // A path keeps its controller, so BBR gets back what it gave out.
            (Self::Bbr(_), None) => {}
        }
    }

    fn on_packet_lost<P: Publisher>(
        &mut self,
        lost_bytes: u32,
        packet: Self::PacketInfo,
        persistent_congestion: bool,
        new_loss_burst: bool,
        random: &mut dyn RandomGenerator,
        now: Timestamp,
        publisher: &mut P,
    ) {
        match (self, packet) {
            (Self::Bbr(bbr), Some(packet)) => {
                bbr.on_packet_lost(lost_bytes, packet, persistent_congestion, new_loss_burst, random, now, publisher);
            }
            (Self::Cubic(cubic), _) => {
                cubic.on_packet_lost(lost_bytes, (), persistent_congestion, new_loss_burst, random, now, publisher);
            }
            (Self::Bbr(_), None) => {}
        }
    }

    fn on_explicit_congestion<P: Publisher>(&mut self, ce_count: u64, event_time: Timestamp, publisher: &mut P) {
        either!(self, controller => controller.on_explicit_congestion(ce_count, event_time, publisher));
    }

    fn on_mtu_update<P: Publisher>(&mut self, max_data_size: u16, publisher: &mut P) {
        either!(self, controller => controller.on_mtu_update(max_data_size, publisher));
    }

    fn on_packet_discarded<P: Publisher>(&mut self, bytes_sent: usize, publisher: &mut P) {
        either!(self, controller => controller.on_packet_discarded(bytes_sent, publisher));
    }

    fn earliest_departure_time(&self) -> Option<Timestamp> {
        either!(self, controller => controller.earliest_departure_time())
    }

    fn send_quantum(&self) -> Option<usize> {
        either!(self, controller => controller.send_quantum())
    }
}
