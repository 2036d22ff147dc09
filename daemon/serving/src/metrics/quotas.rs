//! The monthly quotas of keys, as metrics that are computed when they are scraped.

use std::{collections::BTreeMap, fmt, sync::Arc, time::SystemTime};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};
use role::user_labels::UserLabels;
use tenants::spending::Spending;

/// The shown quotas, by the names of keys, and the source of their use. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Quotas {
    shown: Arc<Mutex<Shown>>,
    labels: UserLabels,
}

/// Names with their quotas, and how much of these is used.
type Shown = (Vec<(Arc<str>, u64)>, Arc<Spending>);

impl Quotas {
    /// Shows no quotas yet; names their users by these labels.
    pub(super) fn new(labels: UserLabels) -> Self {
        Self { shown: Arc::default(), labels }
    }

    /// Shows exactly these quotas.
    pub(super) fn replace(&self, quotas: Vec<(Arc<str>, u64)>, spending: Arc<Spending>) {
        *self.shown.lock() = (quotas, spending);
    }
}

impl Collector for Quotas {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (quotas, spending) = self.shown.lock().clone();
        let now = SystemTime::now();
        // For a user with several keys, the largest quota counts.
        let mut largest = BTreeMap::<&Arc<str>, u64>::new();
        for (user, quota) in &quotas {
            let known = largest.entry(user).or_default();
            *known = (*known).max(*quota);
        }
        // Users without metrics of their own are added up.
        let mut sums = BTreeMap::<Arc<str>, (u64, u64)>::new();
        for (user, quota) in largest {
            let (quotas, used) = sums.entry(self.labels.of(user)).or_default();
            (*quotas, *used) = (quotas.saturating_add(quota), used.saturating_add(spending.of(user, now)));
        }
        let mut show = |name: &str, help: &str, value: fn(&(u64, u64)) -> u64| -> fmt::Result {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (user, sum) in &sums {
                let value = i64::try_from(value(sum)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&[("user", &**user)])?)?;
            }
            Ok(())
        };
        show("gateway_user_quota_tokens", "Tokens that a user may use in a month", |(quota, _)| *quota)?;
        let help = "Tokens that a user with a quota has used this month";
        show("gateway_user_quota_used_tokens", help, |(_, used)| *used)
    }
}
