//! A thread that polls for events for a while after each arrival, and does not sleep meanwhile (busy polling, as `net.core.busy_read`
//! of the kernel does for network cards).
//!
//! A thread that sleeps is woken tens of microseconds after an event, later than most packets take to be relayed.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use tokio::task::yield_now;

thread_local! {
    /// Whether something has arrived since the last look.
    static HAS_ARRIVED: Cell<bool> = const { Cell::new(false) };
    /// Wakes [`poll_after_arrivals`].
    static WAKER: RefCell<Option<Waker>> = const { RefCell::new(None) };
}

/// Notes that something has arrived for the current thread.
pub(super) fn arrived() {
    HAS_ARRIVED.set(true);
    if let Some(waker) = WAKER.take() {
        waker.wake();
    }
}

/// Keeps the thread from sleeping until nothing has arrived for `time`: as long as a task is ready, the runtime looks for events and does
/// not wait for them. Never ends.
pub(super) async fn poll_after_arrivals(time: Duration) {
    loop {
        poll_fn(|cx| {
            if HAS_ARRIVED.take() {
                return Poll::Ready(());
            }
            WAKER.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        let mut last = Instant::now();
        while last.elapsed() < time {
            yield_now().await;
            if HAS_ARRIVED.take() {
                last = Instant::now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future as _,
        pin::pin,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering::Relaxed},
        },
        task::{Context, Wake},
    };

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicU64);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn a_thread_sleeps_until_something_arrives_and_then_looks_for_events_until_the_time_is_over() {
        for (time, polls) in [(Duration::from_secs(3_600), true), (Duration::ZERO, false)] {
            let woken = Arc::<Woken>::default();
            let waker = Waker::from(woken.clone());
            let mut context = Context::from_waker(&waker);
            let mut polling = pin!(poll_after_arrivals(time));
            let is_woken = || woken.0.swap(0, Relaxed) > 0;
            let mut look = || assert!(polling.as_mut().poll(&mut context).is_pending());
            look();
            assert!(!is_woken(), "it sleeps");
            for is_first in [true, false] {
                arrived();
                assert!(is_woken() || (polls && !is_first), "an arrival wakes it, unless it does not sleep");
                for _ in 0..100 {
                    look();
                    assert_eq!(is_woken(), polls, "it looks for events as long as the time lasts");
                }
            }
        }
    }
}
