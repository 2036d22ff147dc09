//! How much a tunnel or request of a class will carry, by what those before it did.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use sched::path::Placed;

/// What is expected as long as nothing has ended, in bytes: about a page.
pub const FIRST_BYTES: u64 = 64 * 1024;

/// How many classes are kept: as many as a policy has. Those of earlier policies are forgotten when there are more.
const CLASSES: usize = config::policy::MAX_CLASSES;

/// What those of each class carried, on average: the latest count for an eighth.
#[derive(Debug, Default)]
pub struct Sizes(Mutex<HashMap<String, f64>>);

impl Sizes {
    /// What one of this class is expected to carry, in bytes.
    #[must_use]
    pub fn expected(&self, class: &str) -> u64 {
        self.0.lock().get(class).map_or(FIRST_BYTES, |bytes| *bytes as u64)
    }

    /// Notes what one of this class has carried.
    pub fn learn(&self, class: &str, bytes: u64) {
        let mut sizes = self.0.lock();
        if let Some(mean) = sizes.get_mut(class) {
            *mean += (bytes as f64 - *mean) / 8.0;
            return;
        }
        if sizes.len() >= CLASSES {
            sizes.clear();
        }
        sizes.insert(class.to_owned(), bytes as f64);
    }
}

/// What a tunnel still has to carry: what those of its class usually do, or, once it has carried more than that, what it
/// carries in a second.
#[must_use]
pub fn left(expected: u64, moved: u64, moved_lately: u64, lately: Duration, weight: u32) -> Option<Placed> {
    let per_sec = (moved_lately as f64 / lately.as_secs_f64().max(0.001)) as u64;
    let bytes = expected.saturating_sub(moved).max(per_sec);
    (bytes > 0).then_some(Placed { bytes, weight })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_is_expected_to_carry_what_its_last_ones_did() {
        let sizes = Sizes::default();
        assert_eq!(sizes.expected("bulk"), FIRST_BYTES);
        sizes.learn("bulk", 1 << 20);
        sizes.learn("small", 100);
        assert_eq!((sizes.expected("bulk"), sizes.expected("small")), (1 << 20, 100));
        (0..100).for_each(|_| sizes.learn("bulk", 1_000));
        assert!(sizes.expected("bulk") < 1_100, "{}", sizes.expected("bulk"));
        (0..10 * CLASSES).for_each(|class| sizes.learn(&class.to_string(), 1));
        assert!(sizes.0.lock().len() <= CLASSES);
    }

    #[test]
    fn a_tunnel_has_left_what_its_class_usually_carries_or_its_rate() {
        let left = |expected, moved, lately| left(expected, moved, lately, Duration::from_millis(50), 3);
        assert_eq!(left(1_000, 400, 0), Some(Placed { bytes: 600, weight: 3 }));
        assert_eq!(left(1_000, 5_000, 100), Some(Placed { bytes: 2_000, weight: 3 }));
        assert_eq!(left(1_000, 5_000, 0), None, "it is silent");
    }
}
