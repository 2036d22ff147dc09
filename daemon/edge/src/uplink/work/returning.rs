//! Tunnels that go back to a better path: once a path has taken tunnels for a while, the tunnels of other paths are asked, a few per second,
//! whether they would gain by a move.

use std::{
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;
use tracing::info;

use super::Work;
use crate::link::Line;

/// How long a path must have taken tunnels without a break: an unstable path is no gain.
const STEADY: Duration = Duration::from_secs(15);

/// The time between two tunnels that are asked. It exceeds the time between two looks, so that each sees what the one before has changed.
const ASK: Duration = Duration::from_millis(200);

/// How long a tunnel may take to move after it was asked, before moves are counted for listeners.
const MOVE: Duration = Duration::from_secs(2);

/// Which tunnels are to be asked.
#[derive(Default)]
pub(super) struct Returning {
    /// By path: since when it takes tunnels, and whether the tunnels of other paths were asked since.
    paths: Vec<(Option<Instant>, bool)>,
    /// Connections, and how many of their tunnels are still to be asked.
    asked: Vec<(Weak<Line>, usize)>,
    /// When a tunnel was last asked, until moves are told.
    last: Option<Instant>,
    /// By path: how many tunnels have come back, as far as listeners were told.
    told: Vec<u64>,
}

impl Returning {
    /// Notes at `now` which paths take tunnels, and returns the paths that have now done so for long enough. Each path is returned once
    /// until it fails again.
    fn steady(&mut self, now: Instant, take_tunnels: &[bool]) -> Vec<usize> {
        self.paths.resize(take_tunnels.len(), (None, false));
        let mut steady = Vec::new();
        for (place, ((since, is_known), takes_tunnels)) in self.paths.iter_mut().zip(take_tunnels).enumerate() {
            if !takes_tunnels {
                (*since, *is_known) = (None, false);
                continue;
            }
            let since = *since.get_or_insert(now);
            if !*is_known && now.saturating_duration_since(since) >= STEADY {
                *is_known = true;
                steady.push(place);
            }
        }
        steady
    }
}

impl Work<'_> {
    /// Asks tunnels whether they would do better on another path, once a path has become steady.
    pub(super) fn look_for_better(&mut self, now: Instant, lines: &[Arc<Line>]) {
        if !self.uplink.has_several_paths() {
            return;
        }
        let takes_tunnels = |place| lines.iter().any(|line| line.path_place == place && line.is_usable());
        let take_tunnels: Vec<_> = (0..self.uplink.paths.len()).map(takes_tunnels).collect();
        let returning = &mut self.returning;
        for place in returning.steady(now, &take_tunnels) {
            for line in lines.iter().filter(|line| line.path_place != place && line.is_usable()) {
                let line = Arc::downgrade(line);
                returning.asked.retain(|(known, _)| !known.ptr_eq(&line));
                let tunnels = line.upgrade().map_or(0, |line| line.tunnels());
                returning.asked.push((line, tunnels));
            }
        }
        let since_last = returning.last.map(|last| now.saturating_duration_since(last));
        if since_last.is_none_or(|since| since >= ASK)
            && let Some((line, left)) = returning.asked.last_mut()
        {
            *left = left.saturating_sub(1);
            let is_over = *left == 0;
            if let Some(line) = line.upgrade() {
                line.recall();
            }
            if is_over {
                returning.asked.pop();
            }
            returning.last = Some(now);
            return;
        }
        if since_last.is_some_and(|since| since >= MOVE) {
            returning.last = None;
            self.tell_returned();
        }
    }

    /// Tells listeners how many tunnels have come back to each path.
    fn tell_returned(&mut self) {
        self.returning.told.resize(self.uplink.paths.len(), 0);
        for (path, told) in self.uplink.paths.iter().zip(&mut self.returning.told) {
            let returned = path.returned.load(Relaxed);
            let tunnels = returned - std::mem::replace(told, returned);
            if tunnels > 0 {
                let path = &path.name;
                info!(path, tunnels, "tunnels went back to a better path");
                self.uplink.counters.changes.tell(format!("{tunnels} tunnels went back to the path {path}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_steady_once_after_each_failure() {
        let (mut returning, begun) = (Returning::default(), Instant::now());
        assert!(returning.steady(begun, &[true, false]).is_empty());
        assert!(returning.steady(begun + STEADY / 2, &[true, true]).is_empty());
        assert_eq!(returning.steady(begun + STEADY, &[true, true]), [0]);
        assert_eq!(returning.steady(begun + 2 * STEADY, &[true, true]), [1]);
        assert!(returning.steady(begun + 3 * STEADY, &[true, true]).is_empty());
        assert!(returning.steady(begun + 4 * STEADY, &[false, true]).is_empty());
        assert!(returning.steady(begun + 5 * STEADY, &[true, true]).is_empty());
        assert_eq!(returning.steady(begun + 6 * STEADY, &[true, true]), [0]);
    }
}
