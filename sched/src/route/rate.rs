//! The rate at which requests arrive.

/// The rate of requests: the inverse of a mean gap that remembers about seven gaps, or a quarter of a second if that is
/// more, since seven gaps at a thousand per second would say little. It begins at one per second, so that two requests at
/// the same instant are no flood.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    last_ns: Option<u64>,
    gap_ns: f64,
}

const GAP_WEIGHT: f64 = 0.15;
const GAP_WEIGHT_LEAST: f64 = 0.001;
const MEMORY_NS: f64 = 0.25e9;
const FIRST_GAP_NS: f64 = 1e9;

impl Rate {
    /// Notes a request. A time that jumps back counts as no gap.
    pub fn arrived(&mut self, now_ns: u64) {
        if let Some(last_ns) = self.last_ns {
            let gap_ns = now_ns.saturating_sub(last_ns) as f64;
            let weight = (self.gap_ns / MEMORY_NS).clamp(GAP_WEIGHT_LEAST, GAP_WEIGHT);
            self.gap_ns += weight * (gap_ns - self.gap_ns);
        }
        self.last_ns = Some(now_ns.max(self.last_ns.unwrap_or(0)));
    }

    pub fn per_sec(&self) -> f64 {
        1e9 / self.gap_ns.max(1.0)
    }
}

impl Default for Rate {
    fn default() -> Self {
        Self { last_ns: None, gap_ns: FIRST_GAP_NS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_late_counts_most() {
        let mut rate = Rate::default();
        assert!((rate.per_sec() - 1.0).abs() < 1e-9);
        for at in 0..200 {
            rate.arrived(at * 50_000_000);
        }
        assert!((rate.per_sec() - 20.0).abs() < 0.1, "{rate:?}");
        rate.arrived(u64::MAX);
        rate.arrived(0);
        assert!(rate.per_sec() > 0.0 && rate.per_sec() < 1e-6, "{rate:?}");
    }

    #[test]
    fn a_high_rate_is_steady_and_a_change_is_seen_within_seconds() {
        let mut random = crate::random::Random::new(1);
        let (mut rate, mut now_ns) = (Rate::default(), 0.0);
        let mut run = |per_sec: f64, sec: f64, rate: &mut Rate| {
            let end_ns = now_ns + sec * 1e9;
            let (mut least, mut most) = (f64::INFINITY, 0.0f64);
            while now_ns < end_ns {
                now_ns += random.exponential(1e9 / per_sec);
                rate.arrived(now_ns as u64);
                (least, most) = (least.min(rate.per_sec()), most.max(rate.per_sec()));
            }
            (least, most)
        };
        run(500.0, 3.0, &mut rate);
        let (least, most) = run(500.0, 20.0, &mut rate);
        assert!(least > 350.0 && most < 700.0, "{least} to {most}");
        run(10.0, 2.0, &mut rate);
        assert!(rate.per_sec() < 30.0, "{rate:?}");
        run(500.0, 3.0, &mut rate);
        assert!(rate.per_sec() > 350.0, "{rate:?}");
    }

    #[test]
    fn two_requests_at_once_are_no_flood() {
        let mut rate = Rate::default();
        rate.arrived(5);
        rate.arrived(5);
        assert!(rate.per_sec() < 2.0);
    }
}
