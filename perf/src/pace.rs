//! Sending at a rate: how many payloads are due at each tick.

use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::{FromRawFd as _, OwnedFd},
    time::Duration,
};

use tokio::io::{Interest, unix::AsyncFd};

/// Ticks of a source: short enough that bursts stay small, long enough that ticking costs next to nothing.
const TICK: Duration = Duration::from_micros(250);

/// The most ticks that are made up for after a pause: what the generator missed is not sent as one burst.
const MOST_TICKS: u64 = 8;

/// Says how many payloads are due, tick by tick.
pub struct Pacer {
    ticks: Ticks,
    per_tick: f64,
    due: f64,
}

impl Pacer {
    /// Starts to count at `per_second` payloads a second.
    ///
    /// # Errors
    /// The kernel has no timer for us.
    pub fn start(per_second: f64) -> io::Result<Self> {
        Ok(Self { ticks: Ticks::start(TICK)?, per_tick: per_second * TICK.as_secs_f64(), due: 0.0 })
    }

    /// Waits for the next tick and returns how many payloads are due; may be 0.
    ///
    /// # Errors
    /// The timer failed.
    pub async fn due(&mut self) -> io::Result<usize> {
        let ticks = self.ticks.wait().await?.min(MOST_TICKS);
        self.due += self.per_tick * ticks as f64;
        let whole = self.due.floor();
        self.due -= whole;
        Ok(whole as usize)
    }
}

/// A timer of the kernel, because tokio's knows only milliseconds.
struct Ticks(AsyncFd<File>);

impl Ticks {
    fn start(period: Duration) -> io::Result<Self> {
        // SAFETY: a system call that takes no pointers.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let period = libc::timespec {
            tv_sec: period.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(period.subsec_nanos() as i32),
        };
        let timer = libc::itimerspec { it_interval: period, it_value: period };
        // SAFETY: the kernel reads `timer`, which outlives the call, and is given nowhere to write.
        if unsafe { libc::timerfd_settime(fd, 0, &raw const timer, std::ptr::null_mut()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a `File` owns its descriptor and always names the same one; nothing takes it out of the `AsyncFd`.
        Ok(Self(unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }?))
    }

    /// Returns how many periods went by since the last call, at least one.
    async fn wait(&self) -> io::Result<u64> {
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
    async fn what_is_due_adds_up_to_the_rate_and_fractions_are_not_lost() {
        let mut pacer = Pacer::start(100.0).unwrap();
        let started = std::time::Instant::now();
        let mut sum = 0;
        while sum < 5 {
            sum += pacer.due().await.unwrap();
        }
        assert!(started.elapsed() >= Duration::from_millis(49), "five payloads take 50 ms at 100 a second");
    }
}
