//! Percentiles of durations in constant memory.

/// Linear buckets per power of two: values are known to 3 %.
const STEPS: usize = 32;

/// Counts of nanosecond values in buckets that grow with the value. Recording neither allocates nor searches.
pub struct Histogram {
    buckets: Box<[u64; STEPS * 64]>,
    count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: Box::new([0; STEPS * 64]), count: 0 }
    }
}

impl Histogram {
    /// Counts a value.
    pub fn record(&mut self, ns: u64) {
        self.buckets[bucket(ns)] += 1;
        self.count += 1;
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the value in nanoseconds that `share` (0 to 1) of all values do not exceed, or 0 if there is none.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.map_or(0, upper_bound)
    }
}

/// The first values have a bucket each; from then on, [`STEPS`] buckets share each power of two.
fn bucket(ns: u64) -> usize {
    let exponent = ns.checked_ilog2().unwrap_or(0).saturating_sub(STEPS.ilog2());
    exponent as usize * STEPS + (ns >> exponent) as usize
}

fn upper_bound(bucket: usize) -> u64 {
    if bucket < 2 * STEPS {
        return bucket as u64;
    }
    let exponent = bucket / STEPS - 1;
    (((bucket - exponent * STEPS) as u64 + 1) << exponent) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_a_bucket_whose_bound_is_at_most_a_step_above_it() {
        for shift in 0..64 {
            for ns in [1_u64 << shift, (1 << shift) + (1 << shift) / 3, (1 << shift) - 1] {
                let bound = upper_bound(bucket(ns));
                assert!(bound >= ns && bound - ns <= ns / STEPS as u64, "{ns} {bound}");
            }
        }
    }

    #[test]
    fn quantiles_are_the_values_at_their_rank() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile_ns(0.5), 0);
        (1..=50).for_each(|ns| histogram.record(ns));
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| histogram.quantile_ns(share)), [1, 25, 50, 50]);
        histogram.clear();
        assert_eq!(histogram.quantile_ns(1.0), 0);
    }
}
