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
    /// How often something has arrived.
    static ARRIVALS: Cell<u64> = const { Cell::new(0) };
    /// Wakes [`poll_after_arrivals`].
    static WAKER: RefCell<Option<Waker>> = const { RefCell::new(None) };
}

/// Notes that something has arrived for the current thread.
pub(super) fn arrived() {
    ARRIVALS.set(ARRIVALS.get() + 1);
    if let Some(waker) = WAKER.take() {
        waker.wake();
    }
}

/// Keeps the thread from sleeping until nothing has arrived for `time`: as long as a task is ready, the runtime looks for events and does
/// not wait for them. Never ends.
pub(super) async fn poll_after_arrivals(time: Duration) {
    let mut seen = ARRIVALS.get();
    loop {
        poll_fn(|cx| {
            if ARRIVALS.get() != seen {
                return Poll::Ready(());
            }
            WAKER.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        let mut last = Instant::now();
        loop {
            let (arrivals, now) = (ARRIVALS.get(), Instant::now());
            if arrivals != seen {
                (seen, last) = (arrivals, now);
            } else if now.saturating_duration_since(last) >= time {
                break;
            }
            yield_now().await;
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
        // Both end, and begin anew with the next arrival.
        for (time, looks) in [(Duration::from_secs(3_600), 100), (Duration::ZERO, 1)] {
            let woken = Arc::<Woken>::default();
            let waker = Waker::from(woken.clone());
            let mut context = Context::from_waker(&waker);
            let mut polling = pin!(poll_after_arrivals(time));
            let mut look = || assert!(polling.as_mut().poll(&mut context).is_pending());
            let is_woken = || woken.0.swap(0, Relaxed) > 0;
            for _ in 0..2 {
                look();
                if time.is_zero() {
                    assert!(!is_woken(), "it sleeps");
                }
                arrived();
                assert!(is_woken() || !time.is_zero(), "an arrival wakes it");
                for _ in 0..looks {
                    look();
                    assert!(is_woken(), "it looks for events and does not sleep");
                }
            }
        }
    }
}
