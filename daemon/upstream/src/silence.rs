//! How long an engine may be silent, without a timer for each token.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

/// A bound on silence. Its timer is reset when it fires, not when a silence ends, because tokens come far more often.
#[derive(Debug)]
pub struct Silence {
    /// `None` as long as the timer stays, however often another silence begins.
    longest: Option<Duration>,
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Silence {
    /// Begins a silence that may last for `longest`.
    #[must_use]
    pub fn new(longest: Duration) -> Self {
        let since = Instant::now();
        Self { longest: Some(longest), since, timer: Box::pin(sleep_until(since + longest)) }
    }

    /// Begins a silence that ends at `until`, however often another one begins, unless [`Silence::limit`] sets another bound.
    #[must_use]
    pub fn until(until: Instant) -> Self {
        Self { longest: None, since: Instant::now(), timer: Box::pin(sleep_until(until)) }
    }

    /// Begins another silence. From now on, each may last for `longest`.
    pub fn limit(&mut self, longest: Duration) {
        (self.longest, self.since) = (Some(longest), Instant::now());
        self.timer.as_mut().reset(self.since + longest);
    }

    /// Begins another silence.
    pub fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Prolongs the silence by this time, which has passed within it and is not the engine's.
    pub fn excuse(&mut self, time: Duration) {
        match self.longest {
            Some(_) => self.since += time,
            None => {
                let until = self.timer.deadline() + time;
                self.timer.as_mut().reset(until);
            }
        }
    }

    /// Whether the silence has lasted too long by now.
    #[must_use]
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.longest.map_or(self.timer.deadline(), |longest| self.since + longest)
    }

    /// Ready once the silence has lasted too long.
    pub fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let Some(longest) = self.longest else { return Poll::Ready(()) };
            let until = self.since + longest;
            if self.timer.deadline() >= until {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(until);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silence_is_over_when_it_alone_has_lasted_so_long() {
        let (began, longest) = (Instant::now(), Duration::from_secs(30));
        let mut silence = Silence::new(longest);
        for _ in 0..3 {
            let quiet = poll_fn(|cx| silence.poll_over(cx));
            tokio::select! {
                () = quiet => panic!("over after {:?}", began.elapsed()),
                () = sleep(Duration::from_secs(20)) => {}
            }
            silence.begin();
        }
        assert!(!silence.is_over());
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert!(silence.is_over());
        assert_eq!(began.elapsed().as_secs(), 3 * 20 + 30);
        silence.limit(Duration::from_secs(5));
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(began.elapsed().as_secs(), 3 * 20 + 30 + 5, "a shorter limit");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silence_that_ends_at_a_time_is_not_prolonged_by_another() {
        let began = Instant::now();
        let mut silence = Silence::until(began + Duration::from_secs(30));
        sleep(Duration::from_secs(20)).await;
        silence.begin();
        assert!(!silence.is_over());
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert!(silence.is_over());
        assert_eq!(began.elapsed().as_secs(), 30);
        silence.limit(Duration::from_secs(5));
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(began.elapsed().as_secs(), 30 + 5);
    }

    #[tokio::test(start_paused = true)]
    async fn time_that_is_not_the_engines_counts_as_no_silence_of_either_kind() {
        let longest = Duration::from_secs(30);
        for is_limited in [true, false] {
            let began = Instant::now();
            let mut silence = if is_limited { Silence::new(longest) } else { Silence::until(began + longest) };
            sleep(Duration::from_secs(40)).await;
            assert!(silence.is_over());
            silence.excuse(Duration::from_secs(25));
            assert!(!silence.is_over());
            poll_fn(|cx| silence.poll_over(cx)).await;
            assert!(silence.is_over());
            assert_eq!(began.elapsed().as_secs(), 30 + 25);
        }
    }
}
