//! The bound on the frames of users. The transport spends more on a frame than on the packet around it, so packets that are full of the
//! smallest frames cost up to ten times as much as others of their size. Packets themselves have no bound here.

use std::time::Duration;

use parking_lot::Mutex;

use super::{ClientStanding, budget::FRAMES_PER_PACKET};

/// Counts the frames of a user within a second, over all connections. The first 16 frames of each packet do not count: useful packets
/// rarely have more.
#[derive(Debug, Default)]
pub struct UserFrames(Mutex<Charged>);

#[derive(Debug, Default)]
struct Charged {
    second: u64,
    frames: u64,
}

impl UserFrames {
    /// Charges one frame to `second`; returns how many frames were charged to it so far.
    pub(super) fn charge(&self, second: u64) -> u64 {
        let mut charged = self.0.lock();
        if charged.second != second {
            *charged = Charged { second, frames: 0 };
        }
        charged.frames += 1;
        charged.frames
    }
}

/// The frames in the present packet of one connection.
#[derive(Debug, Default)]
pub struct PacketFrames {
    frames: u32,
    /// The second in which the packet's first counted frame arrived.
    second: Option<u64>,
}

impl PacketFrames {
    /// Begins a packet.
    pub fn on_packet(&mut self) {
        *self = Self::default();
    }

    /// Counts a frame of the packet. `now` has to read one clock for all connections of a user, not the clock of an endpoint. The first
    /// frame beyond 16 of a packet calls it; packets with fewer frames do not.
    pub fn on_frame(&mut self, standing: &ClientStanding, now: impl FnOnce() -> Duration) {
        self.frames = self.frames.saturating_add(1);
        if self.frames > FRAMES_PER_PACKET {
            standing.charge_frame(*self.second.get_or_insert_with(|| now().as_secs()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, sync::Arc};

    use super::{super::ConnectionPlaces, *};

    /// Returns the standing of a connection of a user who may send 1,000 frames within a second beyond the usual ones.
    fn connection(user: &Arc<UserFrames>) -> ClientStanding {
        let standing = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        standing.admit_as(user.clone(), 1_000);
        standing
    }

    /// Sends packets with `more` frames than usual.
    fn send(standing: &ClientStanding, at_ms: u64, packets: u32, more: u32) {
        let mut frames = PacketFrames::default();
        for _ in 0..packets {
            frames.on_packet();
            (0..FRAMES_PER_PACKET + more).for_each(|_| frames.on_frame(standing, || Duration::from_millis(at_ms)));
        }
    }

    #[test]
    fn packets_with_few_frames_are_never_too_many_and_packets_full_of_frames_soon_are() {
        let standing = connection(&Arc::default());
        send(&standing, 0, 100_000, 0);
        send(&standing, 999, 10, 100);
        assert_eq!(standing.exceeded(), None, "as many as allowed");
        send(&standing, 1_000, 10, 100);
        assert_eq!(standing.exceeded(), None, "the next second");
        send(&standing, 1_999, 1, 1);
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }

    #[test]
    fn connections_of_a_user_share_the_bound_and_only_a_connection_that_exceeds_it_ends() {
        let (user, other) = (Arc::default(), Arc::default());
        let [first, ordinary, last] = [(); 3].map(|()| connection(&user));
        let stranger_to_it = connection(&other);
        send(&first, 0, 10, 100);
        send(&last, 0, 1, 1);
        send(&ordinary, 0, 1_000, 0);
        send(&stranger_to_it, 0, 10, 100);
        let ended = [&first, &ordinary, &last, &stranger_to_it].map(|standing| standing.exceeded().is_some());
        assert_eq!(ended, [false, false, true, false]);
    }

    #[test]
    fn only_a_users_connection_ends_by_its_frames() {
        let stranger = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        for standing in [stranger, ClientStanding::own()] {
            send(&standing, 0, 1, 2_000_000);
            assert_eq!(standing.exceeded(), None);
        }
    }

    #[test]
    fn a_stranger_that_becomes_a_user_is_not_judged_by_its_former_limits() {
        let standing = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        standing.exceed("stranger_packets");
        assert_eq!(standing.exceeded(), Some("stranger_packets"));
        standing.admit_as(Arc::default(), 1_000);
        assert_eq!(standing.exceeded(), None);
        send(&standing, 0, 1, 1_001);
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }
}
