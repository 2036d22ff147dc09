//! Sending at a rate: how many payloads are due at each tick.

use std::{
    fs::File,
    io::{self, Read as _},
    time::Duration,
};

use pacing::descriptor::watch;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The period of a source's ticks: short enough that bursts stay small, long enough that ticking costs next to nothing.
const TICK: Duration = Duration::from_micros(250);

/// The most ticks that are made up for after a pause: the generator does not send a long backlog as one burst.
const MOST_TICKS: u64 = 8;

/// Counts how many payloads are due, tick by tick.
pub struct Pacer {
    ticks: Ticks,
    per_tick: f64,
    due: f64,
}

impl Pacer {
    /// Starts to count at `per_second` payloads per second.
    ///
    /// # Errors
    /// When the kernel provides no timer.
    pub fn start(per_second: f64) -> io::Result<Self> {
        Ok(Self { ticks: Ticks::start(TICK)?, per_tick: per_second * TICK.as_secs_f64(), due: 0.0 })
    }

    /// Waits for the next tick and returns how many payloads are due, possibly 0.
    ///
    /// # Errors
    /// When the timer fails.
    pub async fn due(&mut self) -> io::Result<usize> {
        let ticks = self.ticks.wait().await?.min(MOST_TICKS);
        self.due += self.per_tick * ticks as f64;
        let whole = self.due.floor();
        self.due -= whole;
        Ok(whole as usize)
    }
}

/// A kernel timer, because tokio's timers have a resolution of milliseconds.
pub struct Ticks(AsyncFd<File>);

impl Ticks {
    /// Starts to tick with this period.
    ///
    /// # Errors
    /// When the kernel provides no timer.
    pub fn start(period: Duration) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let period = Timespec { tv_sec: period.as_secs() as i64, tv_nsec: i64::from(period.subsec_nanos()) };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: period, it_value: period })?;
        Ok(Self(watch(File::from(timer), Interest::READABLE)?))
    }

    /// Returns how many periods have passed since the last call, at least one.
    ///
    /// # Errors
    /// When the timer fails.
    pub async fn wait(&self) -> io::Result<u64> {
        self.0
            .async_io(Interest::READABLE, |mut timer| {
                let mut ticks = [0; 8];
                timer.read_exact(&mut ticks)?;
                Ok(u64::from_ne_bytes(ticks))
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn due_payloads_add_up_to_the_rate_without_lost_fractions() {
        let mut pacer = Pacer::start(100.0).unwrap();
        let started = std::time::Instant::now();
        let mut sum = 0;
        while sum < 5 {
            sum += pacer.due().await.unwrap();
        }
        assert!(started.elapsed() >= Duration::from_millis(49), "five payloads take 50 ms at 100 a second");
    }
}
