//! Histograms cheap enough to update per message or payload: their bounds are fixed on creation, and they take no lock.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};

/// A histogram of whole numbers. Clones share their counts; adding costs two relaxed additions.
#[derive(Clone, Debug)]
pub struct Distribution<const N: usize>(Arc<Buckets<N>>);

#[derive(Debug)]
struct Buckets<const N: usize> {
    /// Ascending. A number counts in the first bucket whose bound it does not exceed.
    bounds: [u64; N],
    counts: [AtomicU64; N],
    beyond: AtomicU64,
    sum: AtomicU64,
    /// How many units of the numbers make one unit of the metric.
    per_unit: f64,
}

impl<const N: usize> Distribution<N> {
    /// Creates an empty histogram whose buckets end at `bounds`, ascending. The metric's unit is `per_unit` times that of
    /// the numbers.
    #[must_use]
    pub fn new(bounds: [u64; N], per_unit: f64) -> Self {
        let counts = std::array::from_fn(|_| AtomicU64::new(0));
        Self(Arc::new(Buckets { bounds, counts, beyond: AtomicU64::new(0), sum: AtomicU64::new(0), per_unit }))
    }

    /// Counts `number`, `times` times.
    pub fn add(&self, number: u64, times: u64) {
        let Buckets { bounds, counts, beyond, sum, .. } = &*self.0;
        let bucket = bounds.iter().position(|bound| number <= *bound).map_or(beyond, |bucket| &counts[bucket]);
        bucket.fetch_add(times, Relaxed);
        sum.fetch_add(number.saturating_mul(times), Relaxed);
    }

    /// The sum of all numbers.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.0.sum.load(Relaxed)
    }

    /// Returns how many numbers were greater than `bound`, which has to be the end of a bucket.
    #[must_use]
    pub fn above(&self, bound: u64) -> u64 {
        let Buckets { bounds, counts, beyond, .. } = &*self.0;
        let greater = bounds.iter().zip(counts).filter(|(end, _)| **end > bound).map(|(_, count)| count);
        greater.chain([beyond]).map(|count| count.load(Relaxed)).sum()
    }
}

impl<const N: usize> TypedMetric for Distribution<N> {
    const TYPE: MetricType = MetricType::Histogram;
}

impl<const N: usize> EncodeMetric for Distribution<N> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Buckets { bounds, counts, beyond, sum, per_unit } = &*self.0;
        let shown = |number: u64| number as f64 / per_unit;
        let buckets = bounds.iter().zip(counts).map(|(bound, count)| (shown(*bound), count.load(Relaxed)));
        let buckets: Vec<_> = buckets.chain([(f64::INFINITY, beyond.load(Relaxed))]).collect();
        // Summed from the same reading, so that it equals the last bucket.
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(shown(sum.load(Relaxed)), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text, registry::Registry};

    use super::*;

    #[test]
    fn a_number_counts_in_all_buckets_that_it_does_not_exceed() {
        let distribution = Distribution::new([0, 20_000, 5_000_000], 1e9);
        let mut registry = Registry::default();
        registry.register("late_seconds", "Late", distribution.clone());
        for (number, times) in [(0, 3), (20_000, 1), (20_001, 2), (2_000_000_000, 1)] {
            distribution.add(number, times);
        }
        assert_eq!([0, 20_000, 5_000_000].map(|bound| distribution.above(bound)), [4, 3, 1]);
        assert_eq!(distribution.sum(), 2_000_060_002);
        let mut shown = String::new();
        text::encode(&mut shown, &registry).unwrap();
        let expected = r#"# HELP late_seconds Late.
# TYPE late_seconds histogram
late_seconds_sum 2.000060002
late_seconds_count 7
late_seconds_bucket{le="0.0"} 3
late_seconds_bucket{le="0.00002"} 4
late_seconds_bucket{le="0.005"} 6
late_seconds_bucket{le="+Inf"} 7
# EOF
"#;
        assert_eq!(shown, expected);
    }
}
