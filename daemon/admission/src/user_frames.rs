//! The bound on the frames of users. The transport spends more on a frame than on the packet around it, so packets that are full of the
//! smallest frames cost up to ten times as much as others of their size. HTTP/3 frames and capsules on streams
//! cost as much, so they count against the same bound. Packets themselves have no bound here.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::limits::FrameRates;

/// Counts the frames of a user within a second, over all connections: QUIC frames, and the HTTP/3 frames and capsules on streams. The first
/// 16 QUIC frames of each packet are free, and so is one frame or capsule for each 84 bytes of a stream. Useful packets rarely have more.
#[derive(Debug, Default)]
pub struct UserFrames(Mutex<Charged>);

#[derive(Debug, Default)]
struct Charged {
    second: u64,
    frames: u64,
}

impl UserFrames {
    /// Charges frames to `second`; returns how many frames were charged to it so far.
    pub(super) fn charge(&self, frames: u32, second: u64) -> u64 {
        let mut charged = self.0.lock();
        if charged.second != second {
            *charged = Charged { second, frames: 0 };
        }
        charged.frames = charged.frames.saturating_add(frames.into());
        charged.frames
    }
}

/// The bound on the frames of a user, as it applies to one connection.
#[derive(Debug)]
pub(super) struct FramesBound {
    user: Arc<UserFrames>,
    /// The frames of this connection alone.
    own: UserFrames,
    rates: FrameRates,
}

impl FramesBound {
    pub(super) fn new(user: Arc<UserFrames>, rates: FrameRates) -> Self {
        Self { user, own: UserFrames::default(), rates }
    }

    /// Charges frames to `second`; returns whether the connection has to end. Without a part of its own, an innocent connection would end
    /// with its next small payload while another connection of the user floods the relay.
    pub(super) fn charge(&self, frames: u32, second: u64) -> bool {
        let (own, all) = (self.own.charge(frames, second), self.user.charge(frames, second));
        all > self.rates.user_frames_per_second.into() && own > self.rates.connection_frames_per_second.into()
    }
}
