//! What happens when a configured limit was reached: it is counted, and logged now and then.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use role::seldom::Seldom;

use super::counters::RelayMetrics;

/// Counts and logs that configured limits were reached.
#[derive(Debug)]
pub(crate) struct LimitHits {
    metrics: Arc<RelayMetrics>,
    /// The log throttle of each limit; one for each name in the code.
    told: Mutex<HashMap<&'static str, Seldom>>,
}

impl LimitHits {
    pub(crate) fn new(metrics: Arc<RelayMetrics>) -> Self {
        Self { metrics, told: Mutex::default() }
    }

    /// Counts that a configured limit was reached, and occasionally logs it.
    pub(crate) fn note(&self, limit: &'static str) {
        self.metrics.limit_hit(limit);
        self.told.lock().entry(limit).or_default().note(|unsaid| {
            tracing::warn!(limit, unsaid, "clients reached a configured limit: raise it if they should get more");
        });
    }
}
