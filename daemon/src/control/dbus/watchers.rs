//! The places of callers that watch statistics: one for each, and a bounded number in all. They end with the door,
//! as calls that wait do.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

/// How many callers on a bus may watch statistics at once, with one watch each.
pub(super) const MAX_WATCHERS: usize = 32;

/// The callers that watch over one connection to the bus.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    /// By the caller's unique name on the bus. Dropping the sender ends the watch. A watch that ends by itself drops its receiver.
    by_name: Mutex<HashMap<String, oneshot::Sender<()>>>,
    is_over: watch::Sender<bool>,
}

impl Watchers {
    /// Gives a caller a place, in exchange for its old place, if any. Returns a channel that closes when the watch has to end; `None` if
    /// too many others watch, or all watches have ended.
    pub(super) fn begin(&self, name: &str) -> Option<oneshot::Receiver<()>> {
        let mut watches = self.by_name.lock();
        watches.retain(|_, watch| !watch.is_closed());
        let is_full = watches.len() >= MAX_WATCHERS && !watches.contains_key(name);
        if is_full || *self.is_over.borrow() {
            return None;
        }
        let (watch, end) = oneshot::channel();
        watches.insert(name.to_owned(), watch);
        Some(end)
    }

    /// Ends a caller's watch. Returns whether there was one.
    pub(super) fn end(&self, name: &str) -> bool {
        self.by_name.lock().remove(name).is_some_and(|watch| !watch.is_closed())
    }

    /// Completes when all watches have ended for ever.
    pub(super) async fn all_ended(&self) {
        // It cannot be closed, because this has the sender.
        _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
    }

    /// Ends all watches, for ever: their tasks would keep the bus connection open and the bus name taken.
    pub(super) fn end_all(&self) {
        let mut watches = self.by_name.lock();
        self.is_over.send_replace(true);
        watches.clear();
    }
}

/// Ends all watches, and all calls that wait, when it is dropped. The task that keeps the door holds it; the door itself lives as long as
/// either.
#[derive(Debug, Default)]
pub(super) struct EndsAll(pub(super) Arc<Watchers>);

impl Drop for EndsAll {
    fn drop(&mut self) {
        self.0.end_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_and_become_free_when_either_side_ends_a_watch() {
        let watchers = Watchers::default();
        let mut ends = (0..MAX_WATCHERS).map(|at| watchers.begin(&format!(":1.{at}")).unwrap()).collect::<Vec<_>>();
        assert!(watchers.begin(":1.99").is_none(), "all places are taken");
        let again = watchers.begin(":1.0").unwrap();
        assert!(ends[0].try_recv() == Err(oneshot::error::TryRecvError::Closed), "a caller has one watch");
        ends[0] = again;
        assert!(watchers.begin(":1.99").is_none(), "it kept its place");

        assert!(watchers.end(":1.0") && !watchers.end(":1.0"));
        assert!(ends[0].try_recv() == Err(oneshot::error::TryRecvError::Closed));
        let other = watchers.begin(":1.99").unwrap();
        assert!(watchers.begin(":1.0").is_none());

        drop(ends.pop());
        assert!(!watchers.end(&format!(":1.{}", MAX_WATCHERS - 1)), "it ended by itself");
        ends.push(watchers.begin(":1.0").unwrap());
        drop(other);
        ends.push(watchers.begin(":1.98").unwrap());

        watchers.end_all();
        assert!(ends.iter_mut().all(|end| end.try_recv() == Err(oneshot::error::TryRecvError::Closed)));
        assert!(watchers.begin(":1.0").is_none());
    }
}
