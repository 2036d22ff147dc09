//! The names of users as labels of metrics.
//!
//! The number of user names is bounded by the configuration, except for names in certificates that an authority vouches
//! for. So only the first users, up to `users` of `[metrics]`, get metrics of their own; all others share "other".

use std::{collections::HashSet, sync::Arc};

use config::metrics::MetricsSettings;
use parking_lot::Mutex;

/// The common name of all users without metrics of their own.
pub const OTHER: &str = "other";

/// The users that have metrics of their own. Clones share them, so that these are the same users in all metrics of a process.
#[derive(Clone, Debug)]
pub struct UserLabels(Arc<Mutex<Labelled>>);

#[derive(Debug)]
struct Labelled {
    limit: usize,
    users: HashSet<Arc<str>>,
    other: Arc<str>,
}

impl Default for UserLabels {
    /// The limit is the default of `users` in `[metrics]`.
    fn default() -> Self {
        let limit = MetricsSettings::default().users as usize;
        Self(Arc::new(Mutex::new(Labelled { limit, users: HashSet::new(), other: OTHER.into() })))
    }
}

impl UserLabels {
    /// Sets how many users may have metrics of their own; users that already have them keep them.
    pub fn limit(&self, users: u32) {
        self.0.lock().limit = users as usize;
    }

    /// Returns the label of a user: its name, or "other" if there is no room for another user.
    #[must_use]
    pub fn of(&self, user: &Arc<str>) -> Arc<str> {
        let mut labelled = self.0.lock();
        if let Some(known) = labelled.users.get(user) {
            return known.clone();
        }
        if labelled.users.len() >= labelled.limit {
            return labelled.other.clone();
        }
        labelled.users.insert(user.clone());
        user.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_users_keep_their_names_under_a_lower_limit_and_the_rest_has_one_name() {
        let labels = UserLabels::default();
        labels.limit(2);
        let shared = labels.clone();
        let name = |labels: &UserLabels, user: &str| labels.of(&user.into()).to_string();
        assert_eq!(["a", "b", "c"].map(|user| name(&labels, user)), ["a", "b", "other"]);
        labels.limit(0);
        assert_eq!(["a", "b", "c"].map(|user| name(&shared, user)), ["a", "b", "other"]);
        labels.limit(3);
        assert_eq!(["c", "d"].map(|user| name(&shared, user)), ["c", "other"]);
    }
}
