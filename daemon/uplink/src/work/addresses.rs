//! Changes of this host's addresses and devices. Connections continue from the new address. If a relay does not answer
//! there, another connection replaces the moved one, unless there is another path, relay or gateway: then `Work::look`
//! judges the connection like any other. A relay that may have come within reach is tried at once, whatever its
//! back-off.

use std::{sync::Arc, time::Duration};

use relay_client::exit::Exit;
use tokio::time::Instant;
use tracing::info;

use super::{Work, is_suspect};
use crate::{
    line::Line,
    moves::{HostNetwork, MoveVerdict},
};

/// Whether packets leave by a device that carries nothing.
fn is_dead(exit: &Exit, host: &HostNetwork) -> bool {
    exit.device().is_some_and(|device| host.is_dead(device))
}

/// How soon after a change of this host's address the relay has to be heard; otherwise, a new connection is made. Twice the
/// handshake's time if that is longer.
const PROOF: Duration = Duration::from_millis(400);

/// The shortest time between two changes after which attempts to connect to relays that were never resolved begin again: a look-up takes a
/// while, and changes may come all the time.
const ANEW: Duration = Duration::from_secs(1);

impl Work<'_> {
    /// Begins with what is known of this host's network.
    pub(crate) fn begin(&mut self, host: &HostNetwork) {
        self.additions = host.additions();
        self.renew_recreated(host);
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
        let recreated = self.renew_recreated(host);
        self.reach(host);
        for line in lines {
            let at = (line.path_place, line.place);
            let heard = line.heard();
            let relay = line.address;
            match line.follow() {
                MoveVerdict::Stays => {
                    // Its packets no longer leave: its socket is bound to a device that is gone, or its address has no route, but another
                    // one of its relay has.
                    let is_stranded = recreated.contains(&at) || !line.has_route() && self.has_source(at);
                    if is_stranded && !self.proofs.iter().any(|(known, ..)| Arc::ptr_eq(known, &line)) {
                        line.ping();
                        self.ask_for_proof(line, heard);
                    }
                    continue;
                }
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
            self.ask_for_proof(line, heard);
        }
        self.uplink.state.send_modify(|_| {});
    }

    /// Notes that a connection must soon have received more than the packets that it had `heard`.
    fn ask_for_proof(&mut self, line: Arc<Line>, heard: u64) {
        let patience = PROOF.max(2 * line.handshake);
        self.proofs.push((line, heard, Instant::now() + patience));
    }

    /// Whether packets to one of the relay's addresses, over this path, have an address to leave from, as of the last change.
    fn has_source(&self, (path, place): (usize, usize)) -> bool {
        self.sources.get(path).and_then(|relays| relays.get(place)).is_some_and(Option::is_some)
    }

    /// Makes new connections use new sockets if the device that the current sockets are bound to was removed and
    /// another one has its name by now: these sockets will never send again. Returns the relays that this concerns, by
    /// the places of their paths and of themselves.
    fn renew_recreated(&mut self, host: &HostNetwork) -> Vec<(usize, usize)> {
        let mut recreated = Vec::new();
        for (path_place, (path, known)) in self.uplink.paths.iter().zip(&mut self.devices).enumerate() {
            for (place, (relay, known)) in path.relays.iter().zip(known).enumerate() {
                // While there is none, the last one counts.
                let Some(index) = relay.exit().device().and_then(|device| host.index(device)) else { continue };
                if known.replace(index).is_some_and(|last| last != index) {
                    relay.renew();
                    recreated.push((path_place, place));
                }
            }
        }
        recreated
    }

    /// Tries relays without a usable connection, or with one that has no route, again, if packets to them now leave
    /// from an address and did not before, or left from another. A relay whose address is not known is tried again
    /// after every addition to the network.
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
                let is_here = |line: &Line| (line.path_place, line.place) == (path_place, place) && line.has_route();
                if !is_news && !is_possible || state.usable().any(|line| is_here(line)) {
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

    /// Checks whether moved connections hear their relays, if tunnels have no other way. Until then, other connections
    /// take the new tunnels.
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
