//! The monthly quotas of keys, as metrics that are computed when they are scraped.

use std::{fmt, sync::Arc, time::SystemTime};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

use crate::spending::Spending;

/// The shown quotas, by the names of keys, and the source of their use. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Quotas(Arc<Mutex<Shown>>);

/// Names with their quotas, and how much of these is used.
type Shown = (Vec<(Arc<str>, u64)>, Arc<Spending>);

impl Quotas {
    /// Shows exactly these quotas.
    pub(super) fn replace(&self, quotas: Vec<(Arc<str>, u64)>, spending: Arc<Spending>) {
        *self.0.lock() = (quotas, spending);
    }
}

impl Collector for Quotas {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (quotas, spending) = self.0.lock().clone();
        let now = SystemTime::now();
        let mut show = |name: &str, help: &str, value: &dyn Fn(&str, u64) -> u64| -> fmt::Result {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            // For a user with several keys, the largest quota counts.
            let mut largest = std::collections::BTreeMap::<&str, u64>::new();
            for (user, quota) in &quotas {
                let known = largest.entry(user).or_default();
                *known = (*known).max(*quota);
            }
            for (user, quota) in largest {
                let value = i64::try_from(value(user, quota)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&[("user", user)])?)?;
            }
            Ok(())
        };
        show("gateway_user_quota_tokens", "Tokens that a user may use in a month", &|_, quota| quota)?;
        let help = "Tokens that a user with a quota has used this month";
        show("gateway_user_quota_used_tokens", help, &|user, _| spending.of(user, now))
    }
}
