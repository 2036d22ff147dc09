//! The state that a connection's lock guards.

use std::sync::Arc;

use pacing::qlog::Tap;

use super::{inbox::Inbox, outbox::Outbox, streams::Streams};
use crate::{binding::Binding, ledger::Ledger, schedule::Schedule, turns::Turns};

/// The state behind the lock of a connection.
pub(crate) struct State {
    pub(super) turns: Turns,
    /// Where turns are logged.
    pub(super) tap: Tap,
    /// The books of the transport's callbacks, once there is a driver.
    pub(super) ledger: Option<Arc<Ledger>>,
    /// How early the bytes of streams are handed over.
    pub(super) binding: Binding,
    /// Whether the connection has a schedule of its own, and so does not follow its endpoint's.
    pub(super) has_own_schedule: bool,
    pub(crate) streams: Streams,
    pub(super) outbox: Outbox,
    pub(super) inbox: Inbox,
}

impl State {
    pub(super) fn new(schedule: &Schedule) -> Self {
        Self {
            turns: Turns::new(schedule.discipline, schedule.seed),
            tap: Tap::default(),
            ledger: None,
            binding: schedule.binding,
            has_own_schedule: false,
            streams: Streams::default(),
            outbox: Outbox::default(),
            inbox: Inbox::default(),
        }
    }

    /// Returns how many bytes the next turn of a stream may have, of `quantum`; `None` while streams have to wait for a tunnel that goes
    /// before them. The driver is woken when they no longer have to.
    pub(crate) fn stream_quantum(&mut self, quantum: u64, ledger: &Ledger) -> Option<u64> {
        if self.turns.hold_streams(ledger) {
            return None;
        }
        Some(self.turns.quantum(quantum))
    }

    /// Follows another schedule from now on.
    pub(super) fn go_by(&mut self, schedule: &Schedule) {
        self.turns.reorder(schedule.discipline, schedule.seed);
        self.binding = schedule.binding;
        if let Some(ledger) = &self.ledger {
            ledger.bind(schedule.binding);
            // There may be more room than before.
            ledger.driver().wake();
        }
    }
}
