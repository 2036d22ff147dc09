//! How many requests come.

/// The rate of requests: the inverse of a mean gap in which each gap counts 0.15. It begins with one a second, so that two
/// requests at the same instant are no flood.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    last_ns: Option<u64>,
    gap_ns: f64,
}

const GAP_WEIGHT: f64 = 0.15;
const FIRST_GAP_NS: f64 = 1e9;

impl Rate {
    /// Notes a request. Times that jump back count as no gap.
    pub fn arrived(&mut self, now_ns: u64) {
        if let Some(last_ns) = self.last_ns {
            let gap_ns = now_ns.saturating_sub(last_ns) as f64;
            self.gap_ns += GAP_WEIGHT * (gap_ns - self.gap_ns);
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
        for at in 0..60 {
            rate.arrived(at * 50_000_000);
        }
        assert!((rate.per_sec() - 20.0).abs() < 0.1, "{rate:?}");
        rate.arrived(u64::MAX);
        rate.arrived(0);
        assert!(rate.per_sec() > 0.0 && rate.per_sec() < 1e-6, "{rate:?}");
    }

    #[test]
    fn two_requests_at_once_are_no_flood() {
        let mut rate = Rate::default();
        rate.arrived(5);
        rate.arrived(5);
        assert!(rate.per_sec() < 2.0);
    }
}
