//! Congestion controllers: one type for all of them, so that the transport is compiled once, and the code around them that turns
//! their rates into departure times.

use std::{cell::Cell, time::Duration};

use num_rational::Ratio;
use pacing::{
    label, monotonic,
    pacer::{HORIZON_NS, Pacer},
};
use s2n_quic::provider::congestion_controller::{
    Bbr, CongestionController, Cubic, Endpoint, PathInfo, Publisher, RandomGenerator, RttEstimator, Timestamp,
};
use s2n_quic_core::{
    event::builder::{BbrState, SlowStartExitCause},
    recovery::{
        K_GRANULARITY,
        bandwidth::{Bandwidth, RateSample},
    },
};

use self::fixed::Fixed;

pub mod fixed;

type CubicController = <Cubic as Endpoint>::CongestionController;
type BbrController = <Bbr as Endpoint>::CongestionController;
type BbrPacket = <BbrController as CongestionController>::PacketInfo;

thread_local! {
    /// Whether streams wait for turns on the connection whose packet is being written.
    static HELD_BACK: Cell<bool> = const { Cell::new(false) };
}

/// Notes, while a packet is being written, whether streams of its connection wait for turns. The transport sees only the bytes that
/// were handed to it, and considers a connection that has sent all of them application-limited. BBR then ignores its bandwidth
/// samples: on a thin link it may stay in Startup, which sends at 2.77 times the link's rate, until the connection ends.
pub fn note_held_back(is_held_back: bool) {
    HELD_BACK.set(is_held_back);
}

/// The congestion controller of an endpoint's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC (RFC 9438).
    #[default]
    Cubic,
    /// CUBIC as s2n-quic has it. For the ends of measurements that are not ours.
    StockCubic,
    /// BBRv2, less sensitive to loss.
    Bbr,
    /// No control: one rate, whatever happens (see [`Fixed`]). For measurements, never for other people's networks.
    Fixed {
        /// The rate, in bytes of UDP payload.
        bytes_per_sec: u64,
    },
}

/// Makes the congestion controllers of an endpoint's connections.
#[derive(Clone, Copy, Debug)]
pub struct Controllers {
    /// The algorithm.
    pub congestion: Congestion,
    /// Packets on paths with a shorter smoothed round trip have no departure times.
    pub min_paced_rtt: Duration,
}

impl Endpoint for Controllers {
    type CongestionController = Controller;

    fn new_congestion_controller(&mut self, path: PathInfo<'_>) -> Controller {
        let algorithm = match self.congestion {
            Congestion::Cubic => Algorithm::Cubic(cubic(path), RoundTrips::ShortestUntilLoss),
            Congestion::StockCubic => Algorithm::Cubic(cubic(path), RoundTrips::Shortest),
            Congestion::Bbr => Algorithm::Bbr(Box::new(Bbr::default().new_congestion_controller(path))),
            Congestion::Fixed { bytes_per_sec } => Algorithm::Fixed(Fixed::new(bytes_per_sec, path.max_datagram_size)),
        };
        Controller { algorithm, pacer: Pacer::new(self.min_paced_rtt), is_paced: false }
    }
}

fn cubic(path: PathInfo<'_>) -> Box<CubicController> {
    Box::new(Cubic::default().new_congestion_controller(path))
}

/// The round trip with which CUBIC computes how fast Reno's window would grow: half a packet in each round trip.
///
/// s2n-quic takes the shortest round trip of the path. Behind a full queue, packets take many times as long, so the window grows many times
/// too fast, and the queue overflows all the time. RFC 9438 §4.3 takes the current round trip. Before the first loss, we keep s2n-quic's
/// choice: slow start may have ended too early (RFC 9406 §2), and the larger window makes nobody lose packets yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundTrips {
    Shortest,
    ShortestUntilLoss,
    Current,
}

impl RoundTrips {
    /// Notes that the path is congested.
    fn note_congestion(&mut self) {
        if *self == Self::ShortestUntilLoss {
            *self = Self::Current;
        }
    }
}

/// The controller of one path. Under queues that hold packets until they depart (see [`label`]), it gives every packet its departure
/// and lets the transport run [`HORIZON_NS`] ahead of it; under other queues it is only its algorithm.
#[derive(Clone, Debug)]
pub struct Controller {
    algorithm: Algorithm,
    pacer: Pacer,
    /// Whether the queue holds packets until they depart.
    is_paced: bool,
}

#[derive(Clone, Debug)]
enum Algorithm {
    Cubic(Box<CubicController>, RoundTrips),
    Bbr(Box<BbrController>),
    Fixed(Fixed),
}

/// Calls a method of the algorithm in use.
macro_rules! any {
    ($self:ident, $algorithm:ident => $call:expr) => {
        match &$self.algorithm {
            Algorithm::Cubic($algorithm, _) => $call,
            Algorithm::Bbr($algorithm) => $call,
            Algorithm::Fixed($algorithm) => $call,
        }
    };
    (mut $self:ident, $algorithm:ident => $call:expr) => {
        match &mut $self.algorithm {
            Algorithm::Cubic($algorithm, _) => $call,
            Algorithm::Bbr($algorithm) => $call,
            Algorithm::Fixed($algorithm) => $call,
        }
    };
}

impl CongestionController for Controller {
    /// BBR's record of each packet; `None` for the others.
    type PacketInfo = Option<BbrPacket>;

    fn congestion_window(&self) -> u32 {
        any!(self, algorithm => algorithm.congestion_window())
    }

    fn bytes_in_flight(&self) -> u32 {
        any!(self, algorithm => algorithm.bytes_in_flight())
    }

    fn is_congestion_limited(&self) -> bool {
        any!(self, algorithm => algorithm.is_congestion_limited())
    }

    fn requires_fast_retransmission(&self) -> bool {
        any!(self, algorithm => algorithm.requires_fast_retransmission())
    }

    fn on_packet_sent<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        sent_bytes: usize,
        app_limited: Option<bool>,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) -> Self::PacketInfo {
        let is_held_back = HELD_BACK.take();
        let app_limited = app_limited.map(|is_limited| is_limited && !is_held_back);
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        let packet = match &mut self.algorithm {
            Algorithm::Cubic(cubic, _) => {
                cubic.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, listener);
                None
            }
            Algorithm::Bbr(bbr) => Some(bbr.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, listener)),
            Algorithm::Fixed(fixed) => {
                fixed.on_packet_sent(time_sent, sent_bytes, app_limited, rtt, listener);
                None
            }
        };
        self.is_paced = label::write(|label| {
            label.of_connection = true;
            let departure_ns = self.pacer.depart(monotonic::ns(time_sent), sent_bytes, rtt.smoothed_rtt());
            // QUIC packets that share a datagram leave with the last of them.
            label.departure_ns = label.departure_ns.max(departure_ns);
        });
        packet
    }

    fn on_rtt_update<P: Publisher>(
        &mut self,
        time_sent: Timestamp,
        now: Timestamp,
        rtt: &RttEstimator,
        publisher: &mut P,
    ) {
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        any!(mut self, algorithm => algorithm.on_rtt_update(time_sent, now, rtt, listener));
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
        let (sent, bytes, now) = (newest_acked_time_sent, bytes_acknowledged, ack_receive_time);
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        match (&mut self.algorithm, newest_acked_packet) {
            (Algorithm::Bbr(bbr), Some(packet)) => bbr.on_ack(sent, bytes, packet, rtt, random, now, listener),
            (Algorithm::Cubic(cubic, RoundTrips::Current), _) => {
                // CUBIC reads only the shortest round trip of an estimator.
                let current = RttEstimator::new(rtt.smoothed_rtt());
                cubic.on_ack(sent, bytes, (), &current, random, now, listener);
            }
            (Algorithm::Cubic(cubic, _), _) => cubic.on_ack(sent, bytes, (), rtt, random, now, listener),
            (Algorithm::Fixed(fixed), _) => fixed.on_ack(sent, bytes, (), rtt, random, now, listener),
            // Does not happen: a path keeps its controller, so BBR gets back its own record.
            (Algorithm::Bbr(_), None) => {}
        }
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
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        match (&mut self.algorithm, packet) {
            (Algorithm::Bbr(bbr), Some(packet)) => {
                bbr.on_packet_lost(lost_bytes, packet, persistent, new_burst, random, now, listener);
            }
            (Algorithm::Cubic(cubic, round_trips), _) => {
                round_trips.note_congestion();
                cubic.on_packet_lost(lost_bytes, (), persistent, new_burst, random, now, listener);
            }
            (Algorithm::Fixed(fixed), _) => {
                fixed.on_packet_lost(lost_bytes, (), persistent, new_burst, random, now, listener);
            }
            (Algorithm::Bbr(_), None) => {}
        }
    }

    fn on_explicit_congestion<P: Publisher>(&mut self, ce_count: u64, event_time: Timestamp, publisher: &mut P) {
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        if let Algorithm::Cubic(_, round_trips) = &mut self.algorithm {
            round_trips.note_congestion();
        }
        any!(mut self, algorithm => algorithm.on_explicit_congestion(ce_count, event_time, listener));
    }

    fn on_mtu_update<P: Publisher>(&mut self, max_data_size: u16, publisher: &mut P) {
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        any!(mut self, algorithm => algorithm.on_mtu_update(max_data_size, listener));
    }

    fn on_packet_discarded<P: Publisher>(&mut self, bytes_sent: usize, publisher: &mut P) {
        let listener = &mut RateListener { pacer: &mut self.pacer, publisher };
        any!(mut self, algorithm => algorithm.on_packet_discarded(bytes_sent, listener));
    }

    /// Returns when the next packet may be handed over. The transport considers a time reached 1 ms early (`K_GRANULARITY`), which is
    /// added here, so that no packet is handed over more than the horizon ahead.
    fn earliest_departure_time(&self) -> Option<Timestamp> {
        if !self.is_paced {
            return any!(self, algorithm => algorithm.earliest_departure_time());
        }
        let departure_ns = self.pacer.next_departure_ns()?;
        Some(monotonic::timestamp(departure_ns.saturating_sub(HORIZON_NS)) + K_GRANULARITY)
    }

    fn send_quantum(&self) -> Option<usize> {
        // The queue bounds messages by their departures.
        if self.is_paced { None } else { any!(self, algorithm => algorithm.send_quantum()) }
    }
}

/// Passes the rate that an algorithm publishes to the pacer, and forwards everything.
struct RateListener<'a, P> {
    pacer: &'a mut Pacer,
    publisher: &'a mut P,
}

impl<P: Publisher> Publisher for RateListener<'_, P> {
    fn on_slow_start_exited(&mut self, cause: SlowStartExitCause, congestion_window: u32) {
        self.publisher.on_slow_start_exited(cause, congestion_window);
    }

    fn on_delivery_rate_sampled(&mut self, rate_sample: RateSample) {
        self.publisher.on_delivery_rate_sampled(rate_sample);
    }

    fn on_pacing_rate_updated(&mut self, pacing_rate: Bandwidth, burst_size: u32, pacing_gain: Ratio<u64>) {
        self.pacer.set_rate(pacing_rate.as_bytes_per_second());
        self.publisher.on_pacing_rate_updated(pacing_rate, burst_size, pacing_gain);
    }

    fn on_bbr_state_changed(&mut self, state: BbrState) {
        self.publisher.on_bbr_state_changed(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use s2n_quic_core::{inet::SocketAddress, packet::number::PacketNumberSpace, path::mtu::Config};

    use super::*;

    /// Notes whether BBR left Startup.
    #[derive(Default)]
    struct States(bool);

    impl Publisher for States {
        fn on_slow_start_exited(&mut self, _: SlowStartExitCause, _: u32) {}
        fn on_delivery_rate_sampled(&mut self, _: RateSample) {}
        fn on_pacing_rate_updated(&mut self, _: Bandwidth, _: u32, _: Ratio<u64>) {}

        fn on_bbr_state_changed(&mut self, _: BbrState) {
            self.0 = true;
        }
    }

    struct Zeros;

    impl RandomGenerator for Zeros {
        fn public_random_fill(&mut self, dest: &mut [u8]) {
            dest.fill(0);
        }

        fn private_random_fill(&mut self, dest: &mut [u8]) {
            dest.fill(0);
        }
    }

    /// Whether BBR leaves Startup within twenty round trips. In each, four packets are sent, and the transport has no more.
    fn leaves_startup(is_held_back: bool) -> bool {
        let (config, address) = (Config::default(), SocketAddress::default());
        let mut controllers = Controllers { congestion: Congestion::Bbr, min_paced_rtt: Duration::ZERO };
        let mut controller = controllers.new_congestion_controller(PathInfo::new(&config, &address));
        let (rtt, mut states) = (RttEstimator::new(Duration::from_millis(50)), States::default());
        for round in 1..=20_u64 {
            let [sent, acknowledged] = [0, 50].map(|ms| monotonic::timestamp((round * 60 + ms) * 1_000_000));
            let packets = [(); 4].map(|()| {
                note_held_back(is_held_back);
                controller.on_packet_sent(sent, 1_200, Some(true), &rtt, &mut states)
            });
            for packet in packets {
                controller.on_ack(sent, 1_200, packet, &rtt, &mut Zeros, acknowledged, &mut states);
            }
        }
        states.0
    }

    /// Returns the window of CUBIC after 240 acknowledgements, one in 5 ms. The packet of `lost` is lost instead.
    fn cubic_window(congestion: Congestion, rtt: &RttEstimator, lost: Option<u64>) -> u32 {
        let (config, address) = (Config::default(), SocketAddress::default());
        let mut controllers = Controllers { congestion, min_paced_rtt: Duration::ZERO };
        let mut controller = controllers.new_congestion_controller(PathInfo::new(&config, &address));
        let (mut states, mut in_flight) = (States::default(), VecDeque::new());
        for step in 0..240_u64 {
            let now = monotonic::timestamp(1_000_000_000 + step * 5_000_000);
            while !controller.is_congestion_limited() {
                controller.on_packet_sent(now, 1_200, Some(false), rtt, &mut states);
                in_flight.push_back(now);
            }
            let Some(sent) = in_flight.pop_front() else { continue };
            if lost == Some(step) {
                controller.on_packet_lost(1_200, None, false, true, &mut Zeros, now, &mut states);
            } else {
                controller.on_ack(sent, 1_200, None, rtt, &mut Zeros, now, &mut states);
            }
        }
        controller.congestion_window()
    }

    #[test]
    fn once_packets_are_lost_the_window_of_cubic_grows_by_the_round_trips_that_they_take_rfc_9438_4_3() {
        let mut behind_queue = RttEstimator::new(Duration::from_millis(1));
        for milliseconds in std::iter::once(1).chain(std::iter::repeat_n(250, 200)) {
            let (sample, at) = (Duration::from_millis(milliseconds), monotonic::timestamp(1_000_000_000));
            behind_queue.update_rtt(Duration::ZERO, sample, at, true, PacketNumberSpace::ApplicationData);
        }
        assert_eq!(behind_queue.min_rtt(), Duration::from_millis(1));
        let far = RttEstimator::new(behind_queue.smoothed_rtt());
        let window = |congestion, rtt: &RttEstimator| cubic_window(congestion, rtt, Some(40));
        assert_eq!(window(Congestion::Cubic, &behind_queue), window(Congestion::StockCubic, &far));
        assert!(window(Congestion::StockCubic, &behind_queue) > 2 * window(Congestion::Cubic, &behind_queue));
        let before_loss = |congestion| cubic_window(congestion, &behind_queue, None);
        assert_eq!(before_loss(Congestion::Cubic), before_loss(Congestion::StockCubic));
    }

    #[test]
    fn bbr_leaves_startup_while_streams_wait_for_turns_and_not_for_an_idle_application() {
        assert_eq!([true, false].map(leaves_startup), [true, false]);
    }
}
