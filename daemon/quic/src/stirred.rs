//! Which part of a task was woken.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
    task::{Context, Poll, Waker},
};

use futures::task::{ArcWake, waker_ref};
use parking_lot::Mutex;

/// Wakes a task and notes that this waker did it. A task that waits for several things, each through a waker of its own, then
/// polls only the things that woke it.
#[derive(Debug)]
pub struct Stirred {
    is_set: AtomicBool,
    /// Kept, so that a task that checks again need not register its waker again.
    task: Mutex<Option<Waker>>,
}

impl Default for Stirred {
    /// Nothing was polled yet.
    fn default() -> Self {
        Self { is_set: AtomicBool::new(true), task: Mutex::new(None) }
    }
}

impl Stirred {
    /// Whether something woke the task through this since the last call. From now on, `task` is woken.
    pub fn take(&self, task: &Waker) -> bool {
        // Before the check, so that whatever is set after it wakes this task.
        match &mut *self.task.lock() {
            Some(known) if known.will_wake(task) => {}
            other => *other = Some(task.clone()),
        }
        // Most checks find nothing, and a load costs less than a swap.
        self.is_set.load(Acquire) && self.is_set.swap(false, AcqRel)
    }

    /// Makes the next check find something, without waking the task.
    pub fn set(&self) {
        self.is_set.store(true, Release);
    }
}

impl ArcWake for Stirred {
    fn wake_by_ref(of: &Arc<Self>) {
        of.set();
        if let Some(task) = &*of.task.lock() {
            task.wake_by_ref();
        }
    }
}

/// Completes with the first of two futures to complete, `often` if both do. `often` is polled whenever the task is woken,
/// `seldom` only if it caused the wake-up.
pub async fn either<T>(often: impl Future<Output = T>, seldom: impl Future<Output = T>) -> T {
    let stirred = Arc::<Stirred>::default();
    let (mut often, mut seldom) = (pin!(often), pin!(seldom));
    poll_fn(|cx| match often.as_mut().poll(cx) {
        Poll::Pending if stirred.take(cx.waker()) => {
            seldom.as_mut().poll(&mut Context::from_waker(&waker_ref(&stirred)))
        }
        polled => polled,
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use futures::task::{noop_waker, waker};

    use super::*;

    #[test]
    fn a_look_finds_what_was_woken_since_the_last_and_the_task_is_woken() {
        let (stirred, task) = (Arc::<Stirred>::default(), Arc::<Stirred>::default());
        let look = || stirred.take(&waker(task.clone()));
        assert!(look() && !look());
        assert!(task.take(&noop_waker()) && !task.take(&noop_waker()));
        waker(stirred.clone()).wake();
        assert!(task.take(&noop_waker()), "the task was woken");
        assert!(look() && !look());
        stirred.set();
        assert!(!task.take(&noop_waker()) && look(), "nobody was woken");
    }

    #[test]
    fn a_task_is_woken_again_without_having_looked_and_one_that_took_over_is_woken_in_its_place() {
        let (stirred, [first, second]) = (Arc::<Stirred>::default(), [(); 2].map(|()| Arc::<Stirred>::default()));
        let woken = |task: &Arc<Stirred>| task.take(&noop_waker());
        assert!(woken(&first) && woken(&second));
        stirred.take(&waker(first.clone()));
        for _ in 0..2 {
            waker(stirred.clone()).wake();
            assert!(woken(&first) && !woken(&second));
        }
        stirred.take(&waker(second.clone()));
        waker(stirred.clone()).wake();
        assert!(!woken(&first) && woken(&second));
    }

    #[test]
    fn a_rarely_ready_future_is_polled_only_when_it_woke_the_task() {
        let (polls, waker_of, is_done) = (Cell::new((0, 0)), RefCell::new(None), Cell::new(false));
        let often = poll_fn(|_| {
            polls.set((polls.get().0 + 1, polls.get().1));
            Poll::Pending
        });
        let seldom = poll_fn(|cx| {
            polls.set((polls.get().0, polls.get().1 + 1));
            *waker_of.borrow_mut() = Some(cx.waker().clone());
            if is_done.get() { Poll::Ready("done") } else { Poll::Pending }
        });
        let task = Arc::<Stirred>::default();
        let mut both = pin!(either(often, seldom));
        let mut poll = || both.as_mut().poll(&mut Context::from_waker(&waker(task.clone())));
        (0..10).for_each(|_| assert!(poll().is_pending()));
        assert_eq!(polls.get(), (10, 1));
        assert!(task.take(&noop_waker()));
        is_done.set(true);
        waker_of.take().unwrap().wake();
        assert!(task.take(&noop_waker()), "the task is woken by it");
        assert_eq!(poll(), Poll::Ready("done"));
    }
}
