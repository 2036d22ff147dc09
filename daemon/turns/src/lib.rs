//! How a thread that moves packets waits for events: as briefly as they are apart, or longer than it has to, or without sleep (`busy`).
//!
//! Longer waits make fewer and longer turns of a busy thread, as a network card coalesces its interrupts (`rx-usecs` of ethtool(8)). Under
//! load, waiting, reading sockets and sending messages cost more than the packets themselves, so that a relay becomes cheaper if one
//! turn handles more of them. A turn begins when the thread wakes up. A busy thread, whose last wait was shorter than the interval, rests
//! until the interval has passed since the turn's beginning, and then waits again. Any other thread waits again at once, so that single
//! packets are not delayed. A thread with little work never rests, nor does one whose senders would then send less (`trial`): readers of
//! sockets tell what arrives ([`arrived`]).

use std::{
    cell::{Cell, RefCell},
    io, thread,
    time::{Duration, Instant},
};

use prometheus_client::metrics::counter::Counter;
use tokio::runtime::{Builder, Runtime};

use self::trial::Trial;

mod busy;
mod trial;

thread_local! {
    /// What has arrived since the last look.
    static ARRIVED_BYTES: Cell<u64> = const { Cell::new(0) };
    static TURNS: RefCell<Option<Turns>> = const { RefCell::new(None) };
}

/// How threads wait for events. By default, each event wakes its thread. Do not set both times.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    /// The shortest time between the beginnings of two turns under load: events and timers are late by up to this much. Zero lets each
    /// event wake the thread.
    pub coalesce: Duration,
    /// How long a thread polls for events after each arrival, before it sleeps. Zero lets it sleep at once.
    pub busy_poll: Duration,
    /// Counts the rests of all threads.
    pub rests: Counter,
}

/// Returns a runtime for one thread that moves packets.
///
/// # Errors
/// The kernel refuses what a runtime needs.
pub fn runtime(Waits { coalesce, busy_poll, rests }: Waits) -> io::Result<Runtime> {
    let mut builder = Builder::new_current_thread();
    if !coalesce.is_zero() {
        builder.on_thread_unpark(move || {
            let now = Instant::now();
            TURNS.with_borrow_mut(|turns| turns.get_or_insert_with(|| Turns::new(coalesce, now)).begin(now));
        });
        builder.on_thread_park(move || {
            TURNS.with_borrow_mut(|turns| {
                let Some(turns) = turns else { return };
                if let Some(time) = turns.rest(ARRIVED_BYTES.take(), Instant::now()) {
                    rests.inc();
                    // No spawned task is ready. The runtime's own future may be, and is late as well.
                    thread::sleep(time);
                }
                turns.end(Instant::now());
            });
        });
    }
    let runtime = builder.enable_all().build()?;
    if !busy_poll.is_zero() {
        runtime.spawn(busy::poll_after_arrivals(busy_poll));
    }
    Ok(runtime)
}

/// Notes that the current thread has read `bytes` from a socket.
pub fn arrived(bytes: usize) {
    ARRIVED_BYTES.set(ARRIVED_BYTES.get() + bytes as u64);
    busy::arrived();
}

/// When the last turn of a thread began, and the last wait before it.
#[derive(Debug)]
struct Turns {
    interval: Duration,
    waits_since: Instant,
    began: Instant,
    trial: Trial,
}

impl Turns {
    fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, waits_since: now, began: now, trial: Trial::new(interval, now) }
    }

    /// Notes that a wait has ended.
    const fn begin(&mut self, now: Instant) {
        self.began = now;
    }

    /// Returns how much longer a busy thread lets events gather when it has nothing left to do. `bytes` have arrived since the last call.
    fn rest(&mut self, bytes: u64, now: Instant) -> Option<Duration> {
        let may_rest = self.trial.may_rest(bytes, now.saturating_duration_since(self.began), now);
        let is_busy = self.began.saturating_duration_since(self.waits_since) < self.interval;
        let rest = (self.began + self.interval).saturating_duration_since(now);
        (may_rest && is_busy && !rest.is_zero()).then_some(rest)
    }

    /// Notes that a wait begins.
    const fn end(&mut self, now: Instant) {
        self.waits_since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_lets_events_gather_only_if_the_last_one_came_soon() {
        let (interval, zero) = (Duration::from_nanos(1_000), Instant::now());
        let at = |ns| zero + Duration::from_nanos(ns);
        let mut turns =
            Turns { trial: Trial::usually(true, Duration::from_secs(3_600), zero), ..Turns::new(interval, zero) };
        // When a wait begins, how long it takes, how long the turn takes, and the rest.
        for (waits_since_ns, wait_ns, work_ns, rest_ns) in [
            (5_000, 1_000, 10, None),
            (6_010, 999, 10, Some(990)),
            (7_999, 0, 600, Some(400)),
            (9_000, 0, 1_000, None),
            (10_000, 0, 5_000, None),
            (15_000, 70_000, 999, None),
        ] {
            turns.end(at(waits_since_ns));
            turns.begin(at(waits_since_ns + wait_ns));
            let rest = turns.rest(0, at(waits_since_ns + wait_ns + work_ns));
            assert_eq!(rest, rest_ns.map(Duration::from_nanos), "{waits_since_ns}");
        }
    }

    #[test]
    fn a_thread_with_an_interval_rests_between_turns_and_counts_it() {
        let interval = Duration::from_millis(50);
        for (interval, waits) in [(Duration::ZERO, 3), (interval, 1_000)] {
            let how = Waits { coalesce: interval, ..Waits::default() };
            let runtime = runtime(how.clone()).unwrap();
            // As after trials that found rests free.
            let turns = (!interval.is_zero()).then(|| Turns {
                trial: Trial::usually(true, Duration::from_secs(3_600), Instant::now()),
                ..Turns::new(interval, Instant::now())
            });
            TURNS.replace(turns);
            let (counted, began) = (how.rests.clone(), Instant::now());
            runtime.block_on(async {
                // The first wait shows that the thread is busy, unless a slow machine makes it longer than the interval.
                for _ in 0..waits {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    if counted.get() > 0 {
                        break;
                    }
                }
            });
            assert_eq!(counted.get() == 0, interval.is_zero());
            assert!(interval.is_zero() || began.elapsed() >= interval, "a rest takes time");
            TURNS.take();
        }
    }

    #[test]
    fn only_a_thread_that_polls_for_events_has_a_task_for_it() {
        for (busy_poll, tasks) in [(Duration::ZERO, 0), (Duration::from_micros(50), 1)] {
            let runtime = runtime(Waits { busy_poll, ..Waits::default() }).unwrap();
            assert_eq!(runtime.metrics().num_alive_tasks(), tasks);
        }
    }
}
