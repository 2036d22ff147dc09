//! Long waits of processes for a CPU, which tell a program that was late from one that is wrong.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Result;
use parking_lot::Mutex;

use crate::process::waits_for_cpu;

/// How often the waits are read.
const EVERY: Duration = Duration::from_millis(20);

/// The kernel counts a wait when it is over. If a thread's waits have become this much longer between two readings, one wait began before the
/// first of them: the short waits of a busy machine do not add up to a stall.
const LONG: Duration = Duration::from_millis(40);

/// The stalls of some processes since a moment: the times for which a thread of theirs waited for a CPU without a turn. Watched by a thread that
/// ends when this is dropped.
#[derive(Debug)]
pub struct CpuStalls {
    waits: Arc<Mutex<ThreadWaits>>,
    begun: Instant,
    /// Tells the thread to end. Both are `None` only while this is dropped.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct ThreadWaits {
    /// The waits of each process's threads at the last reading.
    last: HashMap<u32, HashMap<u32, Duration>>,
    stalls: StallTimes,
}

/// Disjoint times, in order.
#[derive(Debug, Default)]
struct StallTimes(Vec<Range<Instant>>);

impl CpuStalls {
    /// Begins to watch all threads of these processes. A process may end meanwhile.
    ///
    /// # Errors
    /// When there is no such process, or the kernel keeps no statistics of its scheduler.
    pub fn watch(pids: &[u32]) -> Result<Self> {
        let mut waits = ThreadWaits::default();
        for pid in pids {
            waits.last.insert(*pid, waits_for_cpu(*pid)?);
        }
        let waits = Arc::new(Mutex::new(waits));
        let (running, is_over) = channel();
        let begun = Instant::now();
        let thread = thread::Builder::new().spawn({
            let waits = waits.clone();
            move || {
                while is_over.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                    waits.lock().read();
                }
            }
        })?;
        Ok(Self { waits, begun, running: Some(running), thread: Some(thread) })
    }

    /// Returns the longest time of stalls in any span of this length since the beginning.
    pub fn most_within(&self, span: Duration) -> Duration {
        self.most_since(self.begun, span)
    }

    /// Returns the longest time of stalls in any span of this length that ended since a moment.
    pub fn most_since(&self, since: Instant, span: Duration) -> Duration {
        let mut waits = self.waits.lock();
        waits.read();
        waits.stalls.most(since, span)
    }
}

impl Drop for CpuStalls {
    fn drop(&mut self) {
        drop(self.running.take());
        _ = self.thread.take().map(JoinHandle::join);
    }
}

impl ThreadWaits {
    fn read(&mut self) {
        for pid in self.last.keys().copied().collect::<Vec<_>>() {
            // The process may have ended.
            let Ok(waits) = waits_for_cpu(pid) else { continue };
            self.add(pid, waits, Instant::now());
        }
    }

    /// Notes the waits of a process's threads so far.
    fn add(&mut self, pid: u32, waits: HashMap<u32, Duration>, now: Instant) {
        let before = self.last.remove(&pid).unwrap_or_default();
        let step =
            |(thread, wait): (&u32, &Duration)| wait.saturating_sub(before.get(thread).copied().unwrap_or_default());
        let longest = waits.iter().map(step).max().unwrap_or_default();
        if longest >= LONG {
            self.stalls.add(now - longest..now);
        }
        self.last.insert(pid, waits);
    }
}

impl StallTimes {
    /// Adds a time that ends last.
    fn add(&mut self, mut stall: Range<Instant>) {
        while let Some(last) = self.0.pop_if(|last| last.end >= stall.start) {
            stall.start = stall.start.min(last.start);
        }
        self.0.push(stall);
    }

    /// Returns the most of a span of this length, ended since this moment, that these times cover.
    fn most(&self, since: Instant, span: Duration) -> Duration {
        let covered = |(at, last): (usize, &Range<Instant>)| {
            let begin = last.end - span;
            let of_span = self.0[..=at].iter().rev().take_while(|stall| stall.end > begin);
            of_span.map(|stall| stall.end - stall.start.max(begin)).sum()
        };
        let ended = self.0.iter().enumerate().filter(|(_, stall)| stall.end >= since);
        ended.map(covered).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn one_long_wait_is_a_stall_and_many_short_ones_are_not() {
        let begun = Instant::now() + ms(10_000);
        let mut found = ThreadWaits::default();
        // Each of three threads waits half of the time, and looks are made every 20 ms, for a second.
        for look in 0..50 {
            found.add(7, (1..=3).map(|thread| (thread, ms(10) * look)).collect(), begun + ms(20) * look);
        }
        assert_eq!(found.stalls.most(begun, ms(1_000)), ms(0));
        let waits = [(1, ms(490)), (2, ms(590)), (3, ms(500))];
        found.add(7, waits.into(), begun + ms(1_000));
        assert_eq!(found.stalls.most(begun, ms(1_000)), ms(100));
        assert_eq!(found.stalls.most(begun, ms(60)), ms(60), "no more than the span");
        assert_eq!(found.stalls.most(begun + ms(1_001), ms(1_000)), ms(0), "nothing ended since");
    }

    #[test]
    fn waits_one_after_another_add_up_and_those_at_the_same_time_do_not() {
        let begun = Instant::now() + ms(10_000);
        let at = |time: u64| begun + ms(time);
        let mut times = StallTimes::default();
        for stall in [0..40, 50..90, 60..95, 55..100, 1_000..1_040] {
            times.add(at(stall.start)..at(stall.end));
        }
        assert_eq!(times.0, [at(0)..at(40), at(50)..at(100), at(1_000)..at(1_040)]);
        assert_eq!(times.most(begun, ms(100)), ms(90));
        assert_eq!(times.most(begun, ms(75)), ms(65));
        assert_eq!(times.most(at(500), ms(75)), ms(40));
        assert_eq!(times.most(begun, ms(5_000)), ms(130));
    }

    #[test]
    fn a_process_that_has_its_turns_does_not_stall_and_one_that_has_ended_does_no_harm() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let stalls = CpuStalls::watch(&[child.id()]).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        _ = stalls.most_within(ms(75));
        assert!(CpuStalls::watch(&[child.id()]).is_err());
    }
}
