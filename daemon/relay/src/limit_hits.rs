//! What happens when a limit was reached: it is counted, and logged now and then.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use role::seldom::Seldom;

use super::counters::RelayMetrics;

/// The label of the limit that no key of the configuration sets.
pub(crate) const DESCRIPTORS_PER_USER: &str = "descriptors_per_user";

/// Counts and logs that limits were reached.
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

    /// Counts that a limit was reached, and occasionally logs it.
    pub(crate) fn note(&self, limit: &'static str) {
        self.metrics.limit_hit(limit);
        self.told.lock().entry(limit).or_default().note(|unsaid| tracing::warn!(limit, unsaid, "{}", told(limit)));
    }
}

/// Returns the log message about a limit.
fn told(limit: &str) -> &'static str {
    match limit {
        DESCRIPTORS_PER_USER => {
            "the tunnels of one user, or of one network without credentials, take half of the descriptors that tunnels may take: raise the \
             hard limit (`LimitNOFILE=` of the service, `ulimit -Hn` of a shell) if users should get more"
        }
        limit if limit.starts_with("stranger_") => {
            "clients reached a limit for clients without accepted credentials: raise it only if these are users whose \
             credentials come late"
        }
        _ => "clients reached a configured limit: raise it if they should get more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_told_with_what_to_do_about_it() {
        assert!(told("tunnels_per_user").contains("configured"));
        assert!(told("stranger_seconds").contains("only if these are users"));
        let told = told(DESCRIPTORS_PER_USER);
        assert!(told.contains("LimitNOFILE=") && !told.contains("configured"), "{told}");
    }
}
