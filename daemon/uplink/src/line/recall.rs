//! How tunnels are asked, one after another, to look for a better path.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::sync::Notify;

/// The tunnels of one connection that can be asked.
#[derive(Default)]
pub(super) struct Recall {
    asked: Notify,
    waiting: AtomicUsize,
}

/// A tunnel that waits to be asked.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Recall {
    /// Asks the tunnel that has waited for longest. If none waits, the call has no effect on tunnels that wait later.
    pub(super) fn ask(&self) {
        if self.waiting() > 0 {
            self.asked.notify_one();
        }
    }

    /// Completes when this tunnel is asked.
    pub(super) async fn asked(&self) {
        self.waiting.fetch_add(1, Relaxed);
        let _waiting = Waiting(&self.waiting);
        self.asked.notified().await;
    }

    /// Returns how many tunnels wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn only_tunnels_that_wait_are_asked_and_each_in_its_turn() {
        let recall = Recall::default();
        recall.ask();
        let (mut first, mut second) = (Box::pin(recall.asked()), pin!(recall.asked()));
        assert!(poll!(&mut first).is_pending(), "it did not wait yet");
        assert!(poll!(&mut second).is_pending());
        assert_eq!(recall.waiting(), 2);
        recall.ask();
        assert!(poll!(&mut second).is_pending() && poll!(&mut first).is_ready());
        let mut third = Box::pin(recall.asked());
        assert!(poll!(&mut third).is_pending());
        drop(third);
        assert_eq!(recall.waiting(), 1);
        recall.ask();
        assert!(poll!(&mut second).is_ready());
        assert_eq!(recall.waiting(), 0);
    }
}
