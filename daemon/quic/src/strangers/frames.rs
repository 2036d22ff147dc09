//! How many frames a user's connection may send.

use std::time::Duration;

use super::{ClientStanding, budget::FRAMES_PER_PACKET};

/// The frames of one connection within a second. Frames beyond 16 for each packet are bounded, because the transport spends more on
/// each frame than on the packet around it: packets full of the smallest frames cost ten times as much as others of their size. The
/// packets of a user are bounded by its rate only.
#[derive(Debug, Default)]
pub struct FrameRate {
    /// The present second, counted from the start of the endpoint.
    second: u64,
    frames: u64,
    packets: u64,
}

impl FrameRate {
    /// Counts a packet, which arrived at `now`.
    pub fn on_packet(&mut self, now: Duration) {
        let second = now.as_secs();
        if second != self.second {
            *self = Self { second, ..Self::default() };
        }
        self.packets += 1;
    }

    /// Counts a frame of the last packet.
    pub fn on_frame(&mut self, standing: &ClientStanding) {
        self.frames += 1;
        let usual = self.packets * u64::from(FRAMES_PER_PACKET);
        if self.frames > usual + u64::from(standing.0.frames_per_second) {
            standing.exceed_frames();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, sync::Arc};

    use config::relay::RelayLimits;
    use prometheus_client::metrics::counter::Counter;

    use super::{super::ConnectionPlaces, *};

    /// Returns the standing of a client whose connection may send 1,000 frames within a second beyond the usual ones.
    fn standing() -> ClientStanding {
        let limits = RelayLimits { frames_per_second: 1_000, ..RelayLimits::default() };
        let places = ConnectionPlaces::new(limits, Counter::default(), Box::new(|_| {}));
        Arc::new(places).enter(IpAddr::from([192, 0, 2, 1]))
    }

    fn send(rate: &mut FrameRate, standing: &ClientStanding, at_ms: u64, packets: u32, frames: u32) {
        for _ in 0..packets {
            rate.on_packet(Duration::from_millis(at_ms));
            (0..frames).for_each(|_| rate.on_frame(standing));
        }
    }

    #[test]
    fn packets_with_few_frames_are_never_too_many_and_packets_full_of_frames_soon_are() {
        let (mut rate, standing) = (FrameRate::default(), standing());
        standing.admit();
        send(&mut rate, &standing, 0, 100_000, FRAMES_PER_PACKET);
        assert_eq!(standing.exceeded(), None);
        send(&mut rate, &standing, 1_000, 10, FRAMES_PER_PACKET + 100);
        assert_eq!(standing.exceeded(), None, "as many as allowed");
        send(&mut rate, &standing, 1_999, 1, FRAMES_PER_PACKET + 1);
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }

    #[test]
    fn each_second_has_its_own_frames() {
        let (mut rate, standing) = (FrameRate::default(), standing());
        standing.admit();
        for second in 0..100 {
            send(&mut rate, &standing, second * 1_000, 10, FRAMES_PER_PACKET + 100);
        }
        assert_eq!(standing.exceeded(), None);
    }

    #[test]
    fn only_a_users_connection_ends_by_its_frames() {
        let (mut rate, stranger) = (FrameRate::default(), standing());
        for standing in [stranger, ClientStanding::own()] {
            send(&mut rate, &standing, 0, 1, 2_000_000);
            assert_eq!(standing.exceeded(), None);
        }
    }

    #[test]
    fn a_stranger_that_becomes_a_user_is_not_judged_by_its_former_limits() {
        let standing = standing();
        standing.exceed("stranger_packets");
        assert_eq!(standing.exceeded(), Some("stranger_packets"));
        standing.admit();
        assert_eq!(standing.exceeded(), None);
        send(&mut FrameRate::default(), &standing, 0, 1, 1_100);
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }
}
