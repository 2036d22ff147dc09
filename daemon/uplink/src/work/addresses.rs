//! Changes of this host's addresses and devices. Connections continue from the new address. If a relay does not answer there, another connection
//! replaces the moved one, unless there is another path, relay or gateway: then `Work::look` judges the connection like any other. A relay
//! that may have come within reach is tried at once, whatever its back-off.

use std::{sync::Arc, time::Duration};

use relay_client::exit::Exit;
use tokio::time::Instant;
use tracing::info;

use super::{super::PROOF, Work, is_suspect};
use crate::moves::{HostNetwork, MoveVerdict};

/// Whether packets leave by a device that carries nothing.
fn is_dead(exit: &Exit, host: &HostNetwork) -> bool {
    exit.device().is_some_and(|device| host.is_dead(device))
}

/// The shortest time between two changes after which attempts to connect to relays that were never resolved begin anew: a look-up takes a
/// while, and changes may come all the time.
const ANEW: Duration = Duration::from_secs(1);

impl Work<'_> {
    /// Begins with what is known of this host's network.
    pub(crate) fn begin(&mut self, host: &HostNetwork) {
        self.additions = host.additions();
        let relays = self.uplink.paths.iter().flat_map(|path| &path.relays);
        for (relay, source) in relays.zip(self.sources.iter_mut().flatten()) {
            *source = source.filter(|_| !is_dead(relay.exit(), host));
        }
    }

    /// Handles a change of this host's addresses, routes or devices: connections continue from the new addresses.
    pub(crate) fn moved(&mut self, host: &HostNetwork) {
        let (lines, mut silent) = (self.uplink.state.borrow().lines.clone(), Vec::new());
        // If other paths can carry the tunnels, the tunnels do not wait for a route to come back.
        let several = self.uplink.has_several_paths();
        for (line, pulse) in self.pulses.iter_mut().filter(|_| several) {
            if line.has_route() && !is_dead(line.exit(), host) {
                continue;
            }
            let was_silent = pulse.is_silent();
            pulse.silence(Instant::now());
            if !was_silent {
                let at = (line.path_place, line.place);
                self.uplink.fall_silent(line, silent.contains(&at) || is_suspect(&self.suspects, at));
                silent.push(at);
            }
        }
        silent.into_iter().for_each(|at| self.suspect(at, Instant::now()));
        self.reach(host);
        for line in lines {
            let heard = line.heard();
            let relay = line.address;
            match line.follow() {
                MoveVerdict::Stays => continue,
                MoveVerdict::Follows => {
                    info!(%relay, "this host's address changed: the connection continues from the new address")
                }
                MoveVerdict::Wears => {
                    info!(%relay, "this host's address changed again: tunnels get a new connection");
                    // The next step makes UDP tunnels leave once that connection is there.
                    self.wanted = true;
                }
                MoveVerdict::Ends => {
                    info!(%relay, "this host's address changed too often for one connection: making a new one");
                    self.uplink.counters.left.inc();
                    self.end(&line);
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
    /// A relay whose address is not known is tried again after every addition to the network.
    fn reach(&mut self, host: &HostNetwork) {
        let (state, now) = (self.uplink.state.borrow(), Instant::now());
        let is_added = std::mem::replace(&mut self.additions, host.additions()) != host.additions();
        let may_begin = self.begun_anew.is_none_or(|begun| now.saturating_duration_since(begun) >= ANEW);
        for (path_place, path) in self.uplink.paths.iter().enumerate() {
            let (Some(failover), Some(known)) = (self.failovers.get_mut(path_place), self.sources.get_mut(path_place))
            else {
                continue;
            };
            for (place, (relay, known)) in path.relays.iter().zip(known).enumerate() {
                let source = relay.source().filter(|_| !is_dead(relay.exit(), host));
                let is_news = std::mem::replace(known, source) != source && source.is_some();
                let is_possible = is_added && relay.is_unresolved();
                let is_connected = state.usable().any(|line| (line.path_place, line.place) == (path_place, place));
                if is_connected || !is_news && !is_possible {
                    continue;
                }
                if !is_news && may_begin {
                    self.begun_anew = Some(now);
                }
                if is_news || may_begin {
                    relay.begin_anew();
                }
                failover.hurry(place);
            }
        }
    }

    /// Checks whether moved connections hear their relays, if tunnels have no other way. Until then, other connections take the new tunnels.
    pub(crate) fn prove(&mut self) {
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
        if self.uplink.state.borrow().has_room(now) {
            let ended: Vec<_> = self.proofs.extract_if(.., |(line, ..)| line.is_doubted()).collect();
            ended.iter().for_each(|(line, ..)| self.end(line));
        }
        // Tasks that wait for a place look again.
        self.uplink.state.send_modify(|_| {});
    }
}
