//! Fewer and longer turns of a busy thread, as a network card coalesces its interrupts (`rx-usecs` of ethtool(8)).
//!
//! Under load, waiting, reading sockets and sending messages cost more than the packets themselves, so that a relay becomes cheaper if one
//! turn handles more of them. A turn begins when the thread wakes up. A busy thread, whose last wait was shorter than the interval, waits
//! again only when the interval has passed since the turn's beginning. Any other thread waits again at once, so that single packets are
//! not delayed.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tokio::runtime::{Builder, Runtime};

use crate::monotonic;

/// Returns a runtime for one thread that moves packets. `interval` is the shortest time between the beginnings of two turns under load:
/// events and timers are late by up to this much. Zero lets each event wake the thread.
///
/// # Errors
/// The kernel refuses what a runtime needs.
pub fn runtime(interval: Duration) -> io::Result<Runtime> {
    let mut builder = Builder::new_current_thread();
    if !interval.is_zero() {
        let turns = Arc::new(Turns { interval_ns: interval.as_nanos() as u64, ..Turns::default() });
        let of_thread = turns.clone();
        builder.on_thread_unpark(move || turns.begin(monotonic::now_ns()));
        builder.on_thread_park(move || {
            if let Some(rest) = of_thread.rest(monotonic::now_ns()) {
                // No spawned task is ready. The runtime's own future may be, and is late as well.
                thread::sleep(rest);
            }
            of_thread.end(monotonic::now_ns());
        });
    }
    builder.enable_all().build()
}

/// When the last turn of a thread began, and the last wait before it. Only that thread changes them.
#[derive(Debug, Default)]
struct Turns {
    interval_ns: u64,
    waits_since_ns: AtomicU64,
    began_ns: AtomicU64,
}

impl Turns {
    /// Notes that a wait has ended.
    fn begin(&self, now_ns: u64) {
        self.began_ns.store(now_ns, Relaxed);
    }

    /// Returns how much longer a busy thread lets events gather when it has nothing left to do.
    fn rest(&self, now_ns: u64) -> Option<Duration> {
        let (waited_since_ns, began_ns) = (self.waits_since_ns.load(Relaxed), self.began_ns.load(Relaxed));
        let is_busy = began_ns.saturating_sub(waited_since_ns) < self.interval_ns;
        let rest_ns = (began_ns + self.interval_ns).saturating_sub(now_ns);
        (is_busy && rest_ns > 0).then(|| Duration::from_nanos(rest_ns))
    }

    /// Notes that a wait begins.
    fn end(&self, now_ns: u64) {
        self.waits_since_ns.store(now_ns, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::time::sleep;

    use super::*;

    #[test]
    fn a_thread_lets_events_gather_only_if_the_last_one_came_soon() {
        let turns = Turns { interval_ns: 1_000, ..Turns::default() };
        // When a wait begins, how long it takes, how long the turn takes, and the rest.
        for (waits_since_ns, wait_ns, work_ns, rest_ns) in [
            (5_000, 1_000, 10, None),
            (6_010, 999, 10, Some(990)),
            (7_999, 0, 600, Some(400)),
            (9_000, 0, 1_000, None),
            (10_000, 0, 5_000, None),
            (15_000, 70_000, 999, None),
        ] {
            turns.end(waits_since_ns);
            turns.begin(waits_since_ns + wait_ns);
            let rest = turns.rest(waits_since_ns + wait_ns + work_ns);
            assert_eq!(rest, rest_ns.map(Duration::from_nanos), "{waits_since_ns}");
        }
    }

    #[test]
    fn a_runtime_with_an_interval_wakes_up_later_if_it_is_busy() {
        let naps = |interval| {
            let began = Instant::now();
            runtime(interval).unwrap().block_on(async {
                for _ in 0..2 {
                    sleep(Duration::from_millis(1)).await;
                }
            });
            began.elapsed()
        };
        // The first wait shows that the thread is busy, or took as long as the interval.
        let interval = Duration::from_millis(200);
        assert!(naps(interval) >= interval);
    }
}
