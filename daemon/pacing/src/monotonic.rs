//! The transport's clock: CLOCK_MONOTONIC, which `fq` compares departures with, and a timerfd.

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use s2n_quic_core::time::{self, Clock as _, ClockWithTimer, NoopClock, Timestamp};
use tokio::io::{Interest, unix::AsyncFd};

use crate::descriptor::watch;

/// Reads CLOCK_MONOTONIC, in nanoseconds since boot.
#[must_use]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The first time of the transport's form, in nanoseconds of this clock.
const FIRST_NS: u64 = 1_000;

/// Returns the first time of the transport's form: that of a clock that stands still at a microsecond.
fn first() -> Timestamp {
    NoopClock.get_time()
}

/// Converts a time of this clock to the transport's form, which resolves microseconds.
#[must_use]
pub fn timestamp(ns: u64) -> Timestamp {
    first() + Duration::from_nanos(ns.saturating_sub(FIRST_NS))
}

/// Converts a timestamp to a time of this clock, in nanoseconds.
#[must_use]
pub fn ns(timestamp: Timestamp) -> u64 {
    // No timestamp is before the first, and it has room for 584 years.
    ((timestamp - first()).as_nanos() as u64).saturating_add(FIRST_NS)
}

/// The clock of one event loop. Clones share one timer, which serves the clone that armed it last.
#[derive(Clone, Debug)]
pub struct LoopClock {
    timer: Arc<AsyncFd<OwnedFd>>,
}

impl LoopClock {
    /// Creates the clock and its timer in the current runtime.
    ///
    /// # Errors
    /// The kernel provides no timer.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled, like every tokio socket.
    pub fn new() -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        Ok(Self { timer: Arc::new(watch(timer, Interest::READABLE)?) })
    }
}

impl time::Clock for LoopClock {
    fn get_time(&self) -> Timestamp {
        timestamp(now_ns())
    }
}

impl ClockWithTimer for LoopClock {
    type Timer = Timer;

    fn timer(&self) -> Timer {
        Timer { fd: self.timer.clone(), wanted_ns: None, armed_ns: None }
    }
}

/// Wakes a task at a time of CLOCK_MONOTONIC.
#[derive(Debug)]
pub struct Timer {
    fd: Arc<AsyncFd<OwnedFd>>,
    wanted_ns: Option<u64>,
    /// The time set in the kernel, never later than the wanted one: most timeouts move back before they expire, and a
    /// system call for each move would cost more than an occasional idle wake.
    armed_ns: Option<u64>,
}

impl Timer {
    /// Waits for `ns` instead of the previous time; for nothing if `None`.
    pub fn set(&mut self, ns: Option<u64>) {
        self.wanted_ns = ns;
        if let Some(ns) = ns.filter(|ns| self.armed_ns.is_none_or(|armed_ns| *ns < armed_ns)) {
            self.arm(ns);
        }
    }

    fn arm(&mut self, ns: u64) {
        // Zero would disarm it.
        let ns = ns.max(1);
        let at = Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: at };
        // It fails only for an invalid time.
        _ = timerfd_settime(self.fd.get_ref(), TimerfdTimerFlags::ABSTIME, &once);
        self.armed_ns = Some(ns);
    }
}

impl time::clock::Timer for Timer {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(wanted_ns) = self.wanted_ns else {
            return Poll::Pending;
        };
        loop {
            if now_ns() >= wanted_ns {
                self.wanted_ns = None;
                return Poll::Ready(());
            }
            let Poll::Ready(Ok(mut ready)) = self.fd.poll_read_ready(cx) else {
                return Poll::Pending;
            };
            // The timer has expired or was armed again meanwhile; its count does not matter.
            let expired = ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut [0; 8]).map(drop)?));
            if expired.is_ok() {
                self.armed_ns = None;
            }
            if self.armed_ns.is_none() {
                self.arm(wanted_ns);
            }
        }
    }

    fn update(&mut self, timestamp: Timestamp) {
        self.set(Some(ns(timestamp)));
    }
}

#[cfg(test)]
mod tests {
    use s2n_quic_core::time::clock::Timer as _;

    use super::*;

    #[test]
    fn a_time_becomes_the_transports_and_back_in_whole_microseconds_from_the_first() {
        for (then_ns, back_ns) in [(0, 1_000), (1_999, 1_000), (2_000, 2_000), (7_654_321, 7_654_000)] {
            assert_eq!(ns(timestamp(then_ns)), back_ns);
        }
        let later = timestamp(5_000_000_000);
        assert_eq!(later - timestamp(3_000_000_000), Duration::from_secs(2));
        assert_eq!(format!("{later:?}"), "Timestamp(0:00:05)");
        assert_eq!(ns(timestamp(u64::MAX)) / 1_000, u64::MAX / 1_000);
    }

    #[tokio::test]
    async fn a_timer_fires_when_its_time_has_come_and_not_before() {
        let clock = LoopClock::new().unwrap();
        let mut timer = clock.timer();
        for (first_ms, then_ms) in [(3, 3), (2, 6), (50, 4)] {
            let begun_ns = now_ns();
            timer.set(Some(begun_ns + first_ms * 1_000_000));
            let then_ns = begun_ns + then_ms * 1_000_000;
            timer.update(timestamp(then_ns));
            timer.ready().await;
            assert!(now_ns() >= then_ns / 1_000 * 1_000, "{first_ms} {then_ms}");
        }
    }

    #[tokio::test]
    async fn a_timer_that_was_taken_back_does_not_fire() {
        let mut timer = LoopClock::new().unwrap().timer();
        timer.set(Some(now_ns() + 1_000_000));
        timer.set(None);
        let fired = tokio::time::timeout(Duration::from_millis(5), timer.ready()).await;
        assert!(fired.is_err());
    }

    #[tokio::test]
    async fn timestamps_are_times_since_boot() {
        let (before_ns, now, after_ns) = (now_ns(), LoopClock::new().unwrap().get_time(), now_ns());
        assert!((before_ns / 1_000..=after_ns / 1_000).contains(&(ns(now) / 1_000)));
    }
}
