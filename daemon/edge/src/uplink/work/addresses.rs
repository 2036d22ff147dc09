//! Changes of this host's addresses and devices. Connections continue from the new address. If a relay does not answer there, another connection
//! replaces the moved one, unless there is another path, relay or gateway: then `Work::look` judges the connection like any other. A relay
//! that may have come within reach is tried at once, whatever its back-off.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use super::{super::PROOF, Work, is_suspect};
use crate::{
    exit::Exit,
    moves::{DeadDevices, MoveVerdict},
};

/// Whether packets leave by a device that carries nothing.
fn is_dead(exit: &Exit, dead: &DeadDevices) -> bool {
    exit.device().is_some_and(|device| dead.contains(device))
}

impl Work<'_> {
    /// Handles a change of this host's addresses, routes or devices: connections continue from the new addresses.
    pub(in crate::uplink) fn moved(&mut self, dead: &DeadDevices) {
        let (lines, mut silent) = (self.uplink.state.borrow().lines.clone(), Vec::new());
        // If other paths can carry the tunnels, the tunnels do not wait for a route to come back.
        let several = self.uplink.has_several_paths();
        for (line, pulse) in self.pulses.iter_mut().filter(|_| several) {
            if !pulse.is_silent() && (!line.has_route() || is_dead(line.exit(), dead)) {
                pulse.silence(Instant::now());
                let at = (line.path_place, line.place);
                self.uplink.fall_silent(line, silent.contains(&at) || is_suspect(&self.suspects, at));
                silent.push(at);
            }
        }
        silent.into_iter().for_each(|at| self.suspect(at, Instant::now()));
        self.reach(dead);
        for line in lines {
            let heard = line.heard();
            let relay = line.address;
            match line.follow() {
                MoveVerdict::Stays => continue,
                MoveVerdict::Follows => {
                    info!(%relay, "this host's address changed: the connection continues from the new address")
                }
                MoveVerdict::Wears => {
                    info!(%relay, "this host's address changed again: new tunnels get a new connection");
                    self.wanted = true;
                }
                MoveVerdict::Ends => {
                    info!(%relay, "this host's address changed too often for one connection: making a new one");
                    self.uplink.counters.left.inc();
                    line.close();
                    self.wanted = true;
                    continue;
                }
            }
            self.uplink.counters.moved.inc();
            self.proofs.retain(|(known, ..)| !Arc::ptr_eq(known, &line));
            let patience = PROOF.max(2 * line.handshake);
            self.proofs.push((line, heard, Instant::now() + patience));
        }
        self.uplink.state.send_modify(|_| {});
    }

    /// Tries relays without a usable connection again, if packets to them now leave from an address and did not before, or left from another.
    fn reach(&mut self, dead: &DeadDevices) {
        let state = self.uplink.state.borrow();
        for (path_place, path) in self.uplink.paths.iter().enumerate() {
            let (Some(failover), Some(known)) = (self.failovers.get_mut(path_place), self.sources.get_mut(path_place))
            else {
                continue;
            };
            for (place, (relay, known)) in path.relays.iter().zip(known).enumerate() {
                let source = relay.source().filter(|_| !is_dead(relay.exit(), dead));
                let is_news = std::mem::replace(known, source) != source && source.is_some();
                if is_news && !state.usable().any(|line| (line.path_place, line.place) == (path_place, place)) {
                    relay.begin_anew();
                    failover.hurry(place);
                }
            }
        }
    }

    /// Checks whether moved connections hear their relays, if tunnels have no other way. Until then, other connections take the new tunnels.
    pub(in crate::uplink) fn prove(&mut self) {
        let now = Instant::now();
        if self.uplink.has_alternatives() {
            // `look` finds out whether the connections answer, and `give_up` closes those connections that stay silent.
            return self.proofs.clear();
        }
        let due: Vec<_> = self.proofs.extract_if(.., |(_, _, due)| *due <= now).collect();
        for (line, before, _) in due {
            let (was_doubted, is_silent) = (line.is_doubted(), line.heard() == before);
            line.doubt(is_silent);
            if !is_silent {
                continue;
            }
            if !was_doubted {
                info!(relay = %line.address, "no answer since this host's address changed: trying a new connection");
                self.uplink.counters.left.inc();
            }
            self.wanted = true;
            self.proofs.push((line, before, now + PROOF));
        }
        // Only after all checks, because connections move together.
        if self.uplink.state.borrow().has_room() {
            self.proofs.iter().filter(|(line, ..)| line.is_doubted()).for_each(|(line, ..)| line.close());
        }
        // Tasks that wait for a place look again.
        self.uplink.state.send_modify(|_| {});
    }
}
