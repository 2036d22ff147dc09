//! The traffic of a connection's tunnels and requests.

use std::{sync::Arc, time::Duration};

use role::traffic::Traffic;
use sched::path::{Placed, precedence::Precedence};

use crate::sizes::TunnelLoad;

/// What a tunnel carries.
pub(super) struct Carried {
    pub(super) traffic: Arc<Traffic>,
    pub(super) class: String,
    /// The weight of its class, and its place in the path's order.
    pub(super) share: (u32, Precedence),
    pub(super) load: TunnelLoad,
    /// How many bytes it had carried in other places, before this one.
    pub(super) before: u64,
}

impl Carried {
    /// Returns how many bytes it has carried in all places.
    pub(super) fn moved(&self) -> u64 {
        let (up, down) = self.traffic.bytes();
        self.before + up + down
    }

    /// Returns what it still has to carry, unless that is nothing. The last call was `since` ago.
    pub(super) fn placed(&mut self, since: Duration) -> Option<Placed> {
        self.load.look(self.moved(), since);
        let (bytes, (weight, precedence)) = (self.load.left(), self.share);
        (bytes > 0).then_some(Placed { bytes, weight, precedence })
    }
}
