//! Existing counters as one family of metrics.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::Counter},
    registry::Registry,
};

/// The names and values of labels.
type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Registers existing counters as one family.
pub fn register<const N: usize>(registry: &mut Registry, name: &str, help: &str, counters: &[(Labels<N>, &Counter)]) {
    registry.register(
        name,
        help,
        Fixed(counters.iter().map(|(labels, counter)| (*labels, (*counter).clone())).collect()),
    );
}

/// A family with a fixed set of members.
#[derive(Debug)]
struct Fixed<const N: usize>(Vec<(Labels<N>, Counter)>);

impl<const N: usize> EncodeMetric for Fixed<N> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (labels, counter) in &self.0 {
            let encoder = encoder.encode_family(labels)?;
            EncodeMetric::encode(counter, encoder)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}
