//! Waits for a moment of the machine's clock, which may be set meanwhile.

use std::time::{Duration, SystemTime};

/// How often a wait looks at the clock.
const LOOK: Duration = Duration::from_secs(60);

/// Completes at `at`, or within a minute after the clock was set beyond it; if that is `None`, never.
pub async fn expiry(at: Option<SystemTime>) {
    let Some(at) = at else { return std::future::pending().await };
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        // In a box, because few of those who wait have an expiry.
        Box::pin(tokio::time::sleep(left.min(LOOK))).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_past_expiry_ends_at_once_and_a_future_one_does_not() {
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3_600));
        for (at, is_over) in [(Some(now), true), (Some(now - hour), true), (Some(now + hour), false), (None, false)] {
            assert_eq!(expiry(at).now_or_never().is_some(), is_over, "{at:?}");
        }
    }
}
