//! Paths that have become slow: their tunnels move to other paths until the round trip is short again.

use std::{sync::Arc, time::Duration};

use sched::path::slow::{RoundTrips, SlownessChange};
use tokio::time::Instant;
use tracing::info;

use super::Work;
use crate::{line::Line, path::ns};

/// The time between two pings on a slow path. Each round trip changes the smoothed one by an eighth (RFC 9002 §5.3), so it takes
/// about thirty of them to get from seconds to milliseconds.
pub(super) const ASK_SLOW: Duration = Duration::from_millis(250);

impl Work<'_> {
    /// Moves tunnels away from paths that have become slow.
    pub(super) fn look_for_slow(&mut self, now: Instant, lines: &[Arc<Line>]) -> bool {
        let answers = |line: &&Arc<Line>| !line.is_closed() && !line.is_doubted();
        let round_trips = |place: usize| {
            let of_path = lines.iter().filter(|line| line.path_place == place).filter(answers);
            let of_path: Vec<_> = of_path.map(|line| line.path.get()).collect();
            let smoothed_ns = of_path.iter().filter_map(|path| path.smoothed_rtt).min().map(ns)?;
            // A queue that overflows is persistent congestion, after which its delay would count as the path's shortest round trip.
            let shortest_ns = of_path.iter().filter_map(|path| path.lifetime_min_rtt).min().map(ns)?;
            Some(RoundTrips { smoothed_ns, shortest_ns })
        };
        let seen: Vec<_> = (0..self.slowness.len()).map(round_trips).collect();
        let takes_tunnels = |place: usize| lines.iter().any(|line| line.path_place == place && line.is_usable());
        let now_ns = ns(now.saturating_duration_since(self.start));
        let mut changed = false;
        for place in 0..seen.len() {
            let others = seen.iter().enumerate().filter(|(other, _)| *other != place && takes_tunnels(*other));
            let other_ns = others.filter_map(|(_, seen)| seen.map(|seen| seen.smoothed_ns)).min();
            let Some((slowness, asked)) = self.slowness.get_mut(place) else { continue };
            let change = slowness.look(now_ns, seen.get(place).copied().flatten(), other_ns);
            let name = self.uplink.paths.get(place).map_or("", |path| path.name.as_str());
            match change {
                SlownessChange::None => {}
                SlownessChange::Slow => {
                    info!(path = name, "the path is slow: moving its tunnels to other paths");
                    self.uplink.changes.tell(format!("the path {name} is slow"));
                    self.uplink.counters.slow.inc();
                }
                SlownessChange::Good => {
                    info!(path = name, "the path is no longer slow, or no other path is left");
                    self.uplink.changes.tell(format!("the path {name} is no longer slow, or no other path is left"));
                }
            }
            changed |= change != SlownessChange::None;
            let is_slow = slowness.is_slow();
            let of_path = lines.iter().filter(|line| line.path_place == place && !line.is_closed());
            let is_due = asked.is_none_or(|asked| now.saturating_duration_since(asked) >= ASK_SLOW);
            for line in of_path {
                // Includes connections that were made meanwhile.
                if line.is_slow() != is_slow {
                    line.note_slow(is_slow);
                }
                if is_slow && is_due {
                    line.ping();
                }
            }
            if is_slow && is_due {
                *asked = Some(now);
            }
        }
        changed
    }
}
