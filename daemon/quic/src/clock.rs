//! Where time comes from: the machine, or a simulated network.

use std::{
    future::Future,
    pin::Pin,
    sync::LazyLock,
    time::{Duration, Instant},
};

/// A future that completes at a given time.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A source of time. All code on the path of a packet reads the time here, so that the same code runs in virtual time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Nanoseconds since a fixed point in time.
    pub now_ns: fn() -> u64,
    /// Sleeps until `now_ns` has reached a value; at once if it has.
    pub sleep_until: fn(u64) -> Sleep,
}

impl Clock {
    /// Returns the machine's monotonic clock with tokio's timers.
    #[must_use]
    pub const fn system() -> Self {
        Self { now_ns: system_now_ns, sleep_until: system_sleep_until }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::system()
    }
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn system_now_ns() -> u64 {
    // A `u64` has room for 584 years.
    START.elapsed().as_nanos() as u64
}

fn system_sleep_until(at_ns: u64) -> Sleep {
    Box::pin(tokio::time::sleep(Duration::from_nanos(at_ns.saturating_sub(system_now_ns()))))
}
