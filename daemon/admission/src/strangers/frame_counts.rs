//! The frames of one connection, in its packets and on its streams: how many of them are free, and which are charged to its user.

use std::time::Duration;

use super::{ClientStanding, budget::FRAMES_PER_PACKET};

/// The frames in the current packet of one connection.
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
            standing.charge_frames(1, *self.second.get_or_insert_with(|| now().as_secs()));
        }
    }
}

/// How many bytes of a stream may pay for frames that arrive later: about those of a packet.
const MOST_SPARE_BYTES: u16 = 1_344;

/// How many bytes of a stream pay for one HTTP/3 frame or capsule on it: [`FRAMES_PER_PACKET`] of them are free in a packet.
const BYTES_PER_FRAME: u16 = MOST_SPARE_BYTES / FRAMES_PER_PACKET as u16;

/// The HTTP/3 frames and capsules on one stream of the peer. Every 84 bytes of the stream pay for one of them; the others are charged to the
/// user. Useful payloads are larger, or few. Every tunnel has such a count, so it is small; a read of more than 65,535 bytes counts as that.
#[derive(Debug, Default)]
pub struct StreamFrames {
    /// The frames and capsules in the bytes of the last read.
    frames: u16,
    /// The bytes that have not paid for a frame yet.
    spare_bytes: u16,
}

impl StreamFrames {
    /// Counts `frames` more frames or capsules, found in bytes of the last read.
    #[inline]
    pub fn add(&mut self, frames: u32) {
        self.frames = self.frames.saturating_add(u16::try_from(frames).unwrap_or(u16::MAX));
    }

    /// Notes that `bytes` were read from the stream, before they are parsed. Call [`StreamFrames::settle`] before the next read.
    #[inline]
    pub fn on_read(&mut self, bytes: usize) {
        let bytes = u16::try_from(bytes).unwrap_or(u16::MAX);
        self.spare_bytes = self.spare_bytes.min(MOST_SPARE_BYTES).saturating_add(bytes);
    }

    /// Charges the user for the frames that the bytes do not pay for, once all bytes of a read were parsed. Returns whether the connection
    /// has to end. `now` is that of [`PacketFrames::on_frame`]; reads whose bytes pay for all frames do not call it.
    #[inline]
    pub fn settle(&mut self, standing: &ClientStanding, now: impl FnOnce() -> Duration) -> bool {
        let owed = self.take_owed();
        owed > 0 && standing.charge_frames(owed, now().as_secs())
    }

    fn take_owed(&mut self) -> u32 {
        let frames = std::mem::take(&mut self.frames);
        let paid = (self.spare_bytes / BYTES_PER_FRAME).min(frames);
        self.spare_bytes -= paid * BYTES_PER_FRAME;
        u32::from(frames - paid)
    }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, sync::Arc};

    use super::{
        super::{ConnectionPlaces, UserFrames},
        *,
    };
    use crate::limits::FrameRates;

    /// The rates of a user who may send 1,000 frames within a second beyond the usual ones, 10 of them on each connection.
    const RATES: FrameRates = FrameRates { user_frames_per_second: 1_000, connection_frames_per_second: 10 };

    /// Returns the standing of a connection of a user.
    fn connection(user: &Arc<UserFrames>) -> ClientStanding {
        let standing = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        standing.admit_as(user.clone(), RATES);
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
        let [first, ordinary, small, last] = [(); 4].map(|()| connection(&user));
        let stranger_to_it = connection(&other);
        send(&first, 0, 10, 100);
        send(&small, 0, 1, 10);
        send(&last, 0, 1, 11);
        send(&ordinary, 0, 1_000, 0);
        send(&stranger_to_it, 0, 10, 100);
        let ended = [&first, &ordinary, &small, &last, &stranger_to_it].map(|standing| standing.exceeded().is_some());
        assert_eq!(ended, [false, false, false, true, false]);
    }

    /// Reads `reads` times `bytes` from a stream, with `frames` frames and capsules in them; returns whether the connection has to end.
    fn read(
        standing: &ClientStanding,
        stream: &mut StreamFrames,
        at_ms: u64,
        reads: u32,
        (bytes, frames): (usize, u32),
    ) -> bool {
        (0..reads).fold(false, |_, _| {
            stream.on_read(bytes);
            (0..frames).for_each(|_| stream.add(1));
            stream.settle(standing, || Duration::from_millis(at_ms))
        })
    }

    #[test]
    fn useful_content_of_streams_is_never_too_much_and_bytes_full_of_frames_soon_are() {
        let user = Arc::default();
        let (standing, mut stream) = (connection(&user), StreamFrames::default());
        // Payloads of 1,200 bytes, of which each is a capsule in a frame of its own; many such capsules at once; a few large frames.
        for (bytes, frames) in [(1_205, 2), (48_200, 80), (65_536, 4), (84, 1)] {
            assert!(!read(&standing, &mut stream, 0, 100_000, (bytes, frames)));
        }
        assert_eq!(user.charge(0, 0), 0, "nothing was charged");
        // 640 capsules without a value in the bytes of a packet.
        assert!(!read(&standing, &mut StreamFrames::default(), 0, 1, (1_280, 640)));
        assert_eq!(user.charge(0, 0), 640 - 15);
        assert!(!read(&standing, &mut StreamFrames::default(), 1_000, 1, (1_280, 640)), "the next second");
        assert!(read(&standing, &mut StreamFrames::default(), 1_999, 1, (1_280, 640)));
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }

    #[test]
    fn bytes_pay_for_frames_that_come_soon_after_them_and_not_for_all_later_ones() {
        let mut stream = StreamFrames::default();
        stream.on_read(10 << 20);
        assert_eq!(stream.take_owed(), 0);
        stream.on_read(32);
        stream.add(100);
        assert_eq!(stream.take_owed(), 100 - FRAMES_PER_PACKET, "as many as the bytes of a packet pay for");
        // However the bytes of the stream are cut.
        let cut = |bytes: usize, frames: u32, reads: u32| {
            let mut stream = StreamFrames::default();
            (0..reads)
                .map(|_| {
                    stream.on_read(bytes);
                    stream.add(frames);
                    stream.take_owed()
                })
                .sum::<u32>()
        };
        assert_eq!([cut(84, 1, 160), cut(42, 1, 160), cut(21, 1, 160), cut(3, 1, 160)], [0, 80, 120, 155]);
        assert_eq!([cut(840, 40, 4), cut(3_360, 160, 1)], [120, 120]);
    }

    #[test]
    fn frames_in_packets_and_on_streams_count_together() {
        let user = Arc::default();
        let (in_packets, on_a_stream) = (connection(&user), connection(&user));
        send(&in_packets, 0, 9, 100);
        assert!(!read(&on_a_stream, &mut StreamFrames::default(), 0, 1, (200, 102)), "as many as allowed");
        assert!(read(&on_a_stream, &mut StreamFrames::default(), 0, 1, (2, 1)));
        assert_eq!([&in_packets, &on_a_stream].map(ClientStanding::exceeded), [None, Some("frames_per_second")]);
    }

    #[test]
    fn only_a_users_connection_ends_by_its_frames() {
        let stranger = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        for standing in [stranger, ClientStanding::own()] {
            send(&standing, 0, 1, 2_000_000);
            assert!(!read(&standing, &mut StreamFrames::default(), 0, 1, (2, 2_000_000)));
            assert_eq!(standing.exceeded(), None);
        }
    }

    #[test]
    fn a_stranger_that_becomes_a_user_is_not_judged_by_its_former_limits() {
        let standing = Arc::<ConnectionPlaces>::default().enter(IpAddr::from([192, 0, 2, 1]));
        standing.exceed("stranger_packets");
        assert_eq!(standing.exceeded(), Some("stranger_packets"));
        standing.admit_as(Arc::default(), RATES);
        assert_eq!(standing.exceeded(), None);
        send(&standing, 0, 1, 1_001);
        assert_eq!(standing.exceeded(), Some("frames_per_second"));
    }
}
