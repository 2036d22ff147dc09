//! Which paths an answer gains from if it is fetched in ranges (RFC 9110 §14).

use std::{cmp::Reverse, sync::Arc};

use quic::class::Class;
use sched::path::{CandidatePath, split::split};
use tokio::time::Instant;

use crate::{
    Uplink,
    line::{Line, Link, LinkId},
    path::PathDemand,
};

/// A path that may carry a part of an answer beside another path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathBeside {
    /// Its index.
    pub path: usize,
    /// Its assumed rate, in bytes per second.
    pub bytes_per_sec: u64,
}

impl Uplink {
    /// Returns the other paths that would carry a part of the last `rest` bytes of an answer if all parts ended at the same time, the
    /// one with the largest part first. The request is of this class and in the place `present`. Paths whose `cost` exceeds that time
    /// carry nothing.
    #[must_use]
    pub fn paths_beside(&self, class: &Class, present: &LinkId, rest: u64) -> Vec<PathBeside> {
        let (line, own) = (present.line(), present.load().map(|load| load.left()));
        let state = self.state.borrow();
        let lines = state.with_room(Instant::now(), None);
        let Some((places, views)) = self.candidates((&state, None), &lines) else { return Vec::new() };
        // Nothing goes beside a path that is not a candidate itself, for example because an operator has chosen another.
        let Some(at) = places.iter().position(|place| *place == line.path_place) else { return Vec::new() };
        let mut paths: Vec<_> =
            places.iter().filter_map(|place| views.get(*place)).map(|view| view.path.clone()).collect();
        drop(views);
        if let (Some(path), Some(own)) = (paths.get_mut(at), own) {
            without(path, own);
        }
        let mut ask = PathDemand::of(class, &self.sizes);
        ask.request.bytes = rest;
        let (request, paths) = ask.as_served(paths, self.discipline());
        let mut others = split(&request, &paths);
        others.retain(|range| range.path != at);
        others.sort_by_key(|range| Reverse(range.bytes));
        let beside = |at: usize| {
            let bytes_per_sec = paths.get(at)?.bytes_per_sec;
            Some(PathBeside { path: *places.get(at)?, bytes_per_sec })
        };
        others.iter().filter_map(|range| beside(range.path)).collect()
    }

    /// Returns a place on the path with this index, if a connection there takes tunnels and has room now. While an operator has chosen another
    /// path, and a connection there has room, the place is on that path.
    #[must_use]
    pub fn link_on(&self, path: usize) -> Option<Link> {
        let state = self.state.borrow();
        let lines = state.with_room(Instant::now(), None);
        let on = |path| lines.iter().filter(move |line: &&&Arc<Line>| line.path_place == path);
        let chosen = state.chosen().path.filter(|chosen| on(*chosen).next().is_some());
        on(chosen.unwrap_or(path)).find_map(|line| line.link())
    }
}

/// Removes the request itself, which still has to carry `own` bytes, from what is on its path: the entry closest to it, since the list is
/// up to one look old.
fn without(path: &mut CandidatePath, own: u64) {
    let closest = path.placed.iter().enumerate().min_by_key(|(_, placed)| placed.bytes.abs_diff(own)).map(|(at, _)| at);
    if let Some(at) = closest {
        path.placed.swap_remove(at);
    }
}
