//! Where time comes from: the machine, or a simulated network.

use std::{
    future::Future,
    pin::Pin,
    sync::LazyLock,
    time::{Duration, Instant},
};

/// Ends at a moment.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A source of time. All that reads the time on the way of a packet reads this, so that the same code runs in virtual
/// time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Nanoseconds since some moment that stays the same.
    pub now_ns: fn() -> u64,
    /// Sleeps until `now_ns` has reached a value; at once if it has.
    pub sleep_until: fn(u64) -> Sleep,
}

impl Clock {
    /// The machine's monotonic clock and tokio's timers.
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
    // 584 years fit.
    START.elapsed().as_nanos() as u64
}

fn system_sleep_until(at_ns: u64) -> Sleep {
    Box::pin(tokio::time::sleep(Duration::from_nanos(at_ns.saturating_sub(system_now_ns()))))
}
