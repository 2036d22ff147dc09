//! What part of a task was woken.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release},
    },
    task::Waker,
};

use futures::task::{ArcWake, AtomicWaker};

/// Wakes a task, and has it know that it was this which woke it.
#[derive(Debug)]
pub(super) struct Stirred {
    is_set: AtomicBool,
    task: AtomicWaker,
}

impl Default for Stirred {
    /// Nothing was looked at yet.
    fn default() -> Self {
        Self { is_set: AtomicBool::new(true), task: AtomicWaker::new() }
    }
}

impl Stirred {
    /// Whether something woke the task through this since it was last asked. `task` is woken from now on.
    pub(super) fn take(&self, task: &Waker) -> bool {
        // Before the look: what is set after it wakes this task.
        self.task.register(task);
        self.is_set.swap(false, AcqRel)
    }

    /// Has the next look find something, without waking anybody.
    pub(super) fn set(&self) {
        self.is_set.store(true, Release);
    }
}

impl ArcWake for Stirred {
    fn wake_by_ref(of: &Arc<Self>) {
        of.set();
        of.task.wake();
    }
}

#[cfg(test)]
mod tests {
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
}
