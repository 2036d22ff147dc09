//! Connections that no longer answer: their tunnels move to others, and after a while the connections end.

use std::{sync::Arc, time::Duration};

use relay_client::backoff::random;
use tokio::time::Instant;

use super::{Work, ending::MOVED_WITHIN, is_suspect};
use crate::{
    line::Line,
    path::pulse::{Beat, Pulse},
};

/// How long connections that cannot move wait for a silent path while another path works. After that they end, so that applications
/// can connect again.
pub(super) const GIVEN_UP: Duration = Duration::from_secs(5);

impl Work<'_> {
    /// Checks which connections answer, and returns whether one has fallen silent or answers again. Relays that have fallen silent are
    /// suspect.
    pub(super) fn look_for_silent(&mut self, now: Instant) -> bool {
        let (mut changed, mut silent) = (false, Vec::new());
        // From now on, also watch connections from before there was another gateway.
        for line in &self.uplink.state.borrow().lines {
            if !self.pulses.iter().any(|(known, _)| Arc::ptr_eq(known, line)) {
                let mut pulse = Pulse::new(line.heard());
                if line.is_doubted() {
                    pulse.silence(now);
                }
                self.pulses.push((line.clone(), pulse));
            }
        }
        for (line, pulse) in &mut self.pulses {
            let smoothed_rtt = line.path.get().smoothed_rtt.unwrap_or(line.handshake);
            // A request for a model may wait long for its answer while the connection sends nothing.
            let is_awaited = line.requests() > 0;
            match pulse.look(now, (line.heard(), line.due_since()), smoothed_rtt, is_awaited) {
                Beat::Same => {}
                Beat::Ask => line.ping(),
                Beat::Silent => {
                    changed = true;
                    let at = (line.path_place, line.place);
                    self.uplink.fall_silent(line, silent.contains(&at) || is_suspect(&self.suspects, at));
                    silent.push(at);
                }
                Beat::Back => {
                    changed = true;
                    // Several connections to the same relay are one event.
                    let suspect = self.suspects.get_mut(line.path_place).and_then(|relays| relays.get_mut(line.place));
                    if suspect.is_some_and(std::mem::take) {
                        self.uplink.announce(line, "answers again");
                        self.uplink.counters.returned.inc();
                    }
                    line.doubt(false);
                    if !line.is_slow() {
                        line.come_back();
                    }
                }
            }
        }
        silent.into_iter().for_each(|at| self.suspect(at, now));
        changed
    }

    /// Moves tunnels away from silent connections if there are others that work, or else requests for models if another gateway works.
    /// Tunnels that had no other connection yet move once there is one.
    pub(super) fn leave_silent(&self, lines: &[Arc<Line>]) {
        let doubted = lines.iter().filter(|line| line.is_doubted());
        if lines.iter().any(|line| line.is_usable()) {
            doubted.filter(|line| !line.is_left()).for_each(|line| line.leave());
        } else if self.uplink.has_working_peer() {
            doubted.for_each(|line| line.leave_requests());
        }
    }

    /// Notes that a relay has fallen silent: its tunnels need another connection, and the next relay of its path is tried before it.
    pub(super) fn suspect(&mut self, (path, place): (usize, usize), now: Instant) {
        self.wanted = true;
        if let Some(suspect) = self.suspects.get_mut(path).and_then(|relays| relays.get_mut(place)) {
            *suspect = true;
        }
        let has_others = self.uplink.paths.get(path).is_some_and(|path| path.relays.len() > 1);
        if let Some(failover) = self.failovers.get_mut(path).filter(|_| has_others) {
            failover.failed(place, now, random());
            failover.note_unanswered(place, true);
        }
    }

    /// Ends connections that have been silent for long, if there are others, so that the owners of streams that could
    /// not move learn of it. A new connection shows when the path answers again. UDP tunnels that are still opened
    /// again elsewhere keep their connection for longer, because they would end with it. If there is only another
    /// gateway, a connection with other tunnels than requests for models stays, because its path may return.
    pub(super) fn give_up(&self, now: Instant, lines: &[Arc<Line>]) -> bool {
        let has_other = lines.iter().any(|line| line.is_usable());
        if !has_other && !self.uplink.has_working_peer() {
            return false;
        }
        let is_over = |(line, pulse): &&(Arc<Line>, Pulse)| {
            let tunnels = line.tunnels();
            let can_move = if has_other { line.is_left() } else { tunnels == line.requests() };
            let patience = if line.movable() > 0 { GIVEN_UP + MOVED_WITHIN } else { GIVEN_UP };
            !line.is_closed() && can_move && tunnels > 0 && pulse.silent_for(now) >= patience
        };
        let over: Vec<_> = self.pulses.iter().filter(is_over).map(|(line, _)| line).collect();
        for line in &over {
            self.uplink.say(line, "is still silent: closing a connection with tunnels or requests that could not move");
            self.uplink.counters.given_up.inc();
            line.close();
        }
        !over.is_empty()
    }
}
