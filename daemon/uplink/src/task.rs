//! The task of an uplink: it waits for everything that may need work, and closes connections that are no longer needed.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt as _, stream::FuturesUnordered};
use pacing::monotonic;
use relay_client::{endpoint::Connected, error::ConnectError};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use super::{
    Uplink,
    line::Line,
    moves::HostNetwork,
    work::{Step, Work},
};

/// How long a connection may be without tunnels, while others of its path have room, before it is closed.
pub(crate) const SPARE: Duration = Duration::from_secs(30);

impl Uplink {
    /// Connects whenever a connection is wanted and none has room, the first time at once; never returns. `moves` reports
    /// changes of this host's addresses and devices.
    pub async fn run(&self, mut moves: watch::Receiver<HostNetwork>) {
        self.counters.begin(&self.paths);
        let mut work = Work::new(self);
        work.begin(&moves.borrow_and_update());
        let mut attempts = FuturesUnordered::new();
        let mut tidy = interval(SPARE / 4);
        tidy.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let until = loop {
                match work.next() {
                    Step::Connect(at) => attempts.push(self.attempt(at)),
                    Step::Wait(until) => break Some(until),
                    Step::Nothing => break None,
                }
            };
            let until = work.proofs.iter().map(|(_, _, due)| *due).chain(until).min();
            tokio::select! {
                Some(ended) = work.connections.join_next() => {
                    if let Ok((line, error)) = ended {
                        work.lost(&line, error.as_ref());
                    }
                }
                Some((at, connected)) = attempts.next() => work.attempted(at, connected),
                Some(introduced) = work.introductions.join_next() => {
                    if let Ok((line, Some(refused))) = introduced {
                        self.tell_refusal(&line, &refused);
                    }
                }
                Some(departed) = work.departures.join_next() => {
                    if let Ok((line, true)) = departed {
                        work.goes_away(&line);
                    }
                }
                () = sleep_until(work.look_at), if self.has_alternatives() || self.has_paths() => work.look(),
                () = self.wanted.notified() => work.wanted = true,
                Ok(()) = moves.changed() => {
                    let host = moves.borrow_and_update().clone();
                    work.moved(&host);
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => work.prove(),
                _ = tidy.tick() => {
                    self.close_spare(Instant::now());
                    self.observe(monotonic::now_ns());
                    work.introduce_again();
                }
            }
        }
    }

    pub(crate) async fn attempt(&self, at: (usize, usize)) -> ((usize, usize), Result<Connected, ConnectError>) {
        match self.endpoint_at(at) {
            Some(relay) => (at, relay.connect().await),
            None => std::future::pending().await,
        }
    }

    /// Lets each connection report what it has seen of its path since the last report, so that its observations age from when it made them.
    /// `now_ns` is of the clock of [`monotonic`].
    pub(crate) fn observe(&self, now_ns: u64) {
        self.state.borrow().lines.iter().for_each(|line| _ = line.observe(now_ns));
    }

    /// Closes connections without tunnels if their relay is shutting down, if they take none any more, or if others of the same path suffice.
    /// One connection is kept to a relay that holds tunnels of another path, or that a slow one is compared with.
    pub(crate) fn close_spare(&self, now: Instant) {
        self.state.send_if_modified(|state| {
            let order = state.in_order(now);
            let is_kept = |line: &Arc<Line>| {
                let is_young = now.saturating_duration_since(line.since) <= SPARE;
                let first = order.iter().find(|first| first.path_place == line.path_place);
                let there = order.iter().find(|it| (it.path_place, it.place) == (line.path_place, line.place));
                let is_awaited = there.is_some_and(|there| Arc::ptr_eq(there, line))
                    && (state.may_come(line.path_place, &line.way().relay)
                        || state.is_compared(line.path_place, line.place));
                // Silent and slow connections are kept, to be probed, and the connection to a better relay until it takes tunnels.
                let is_needed = line.is_doubted()
                    || line.stands_by()
                    || state.settles(line, now)
                    || first.is_none_or(|first| Arc::ptr_eq(first, line));
                // Nothing brings back a connection that tunnels have left, unless it was silent or slow.
                let is_over = line.is_left() && !line.is_doubted() && !line.is_slow();
                let is_ending = line.goes() || line.is_worn() || is_over;
                line.tunnels() > 0 || !is_ending && (is_young || is_needed || is_awaited)
            };
            let (kept, spare): (Vec<_>, Vec<_>) = state.lines.iter().cloned().partition(is_kept);
            spare.iter().for_each(|line| line.close());
            state.lines = kept;
            !spare.is_empty()
        });
    }
}
