//! The beginning of a streamed answer, which is held back as long as another engine may still answer.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use masque::h3::ResponseHead;
use tokio::time::Instant;

/// The limits within which the beginning of an answer is held back. Engines send comments and the name of a role before any token.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldLimits {
    /// The maximum size of the events.
    pub(super) bytes: usize,
    /// The longest time, counted from the first event.
    pub(super) time: Duration,
}

impl Default for HoldLimits {
    fn default() -> Self {
        Self { bytes: 64 << 10, time: Duration::from_secs(1) }
    }
}

/// The head of an answer, and its events before the first token. The client has received nothing of the answer.
pub(super) struct HeldEvents {
    pub(super) head: ResponseHead,
    events: BytesMut,
    limits: HoldLimits,
    /// When the time ends; `None` before the first event.
    until: Option<Instant>,
}

impl HeldEvents {
    /// Begins with a head, without events.
    pub(super) fn new(head: ResponseHead, limits: HoldLimits) -> Self {
        Self { head, events: BytesMut::new(), limits, until: None }
    }

    /// Returns when the events must be released; `None` if there are none.
    pub(super) const fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Holds more events back if there is room for them. Returns whether there is.
    pub(super) fn hold(&mut self, events: &[u8]) -> bool {
        let has_room = self.events.len() + events.len() <= self.limits.bytes;
        if has_room {
            self.events.extend_from_slice(events);
            self.until.get_or_insert_with(|| Instant::now() + self.limits.time);
        }
        has_room
    }

    /// Returns all held events, followed by `next`.
    pub(super) fn followed_by(mut self, next: Bytes) -> Bytes {
        if self.events.is_empty() {
            return next;
        }
        self.events.extend_from_slice(&next);
        self.events.freeze()
    }
}
