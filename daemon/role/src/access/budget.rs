//! How many refusals are recorded: N per second for all strangers together, and N per second for each user. So a flood of
//! refusals fills no disk.
//!
//! Pure: time is an argument.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// How many users have a budget of their own at once. A full budget is removed, so only this many users refused within the
/// same second can fill the table; further users share the budget of strangers.
const USERS: usize = 1024;

const SECOND_NS: u64 = 1_000_000_000;

/// The budgets, and the counts of omitted refusals.
#[derive(Debug)]
pub struct RefusalBudget {
    per_second: u32,
    strangers: Bucket,
    users: HashMap<Arc<str>, Bucket>,
    left_out: BTreeMap<&'static str, u64>,
}

/// A token bucket that holds at most one second's worth of tokens.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When the bucket would have been empty, if it had been filling since then: one number is enough, as in GCRA (ITU-T
    /// I.371).
    empty_ns: u64,
}

impl Bucket {
    fn take(&mut self, per_second: u32, now_ns: u64) -> bool {
        let cost_ns = SECOND_NS / u64::from(per_second.max(1));
        let empty_ns = self.empty_ns.max(now_ns.saturating_sub(SECOND_NS));
        let is_affordable = empty_ns + cost_ns <= now_ns;
        if is_affordable {
            self.empty_ns = empty_ns + cost_ns;
        }
        is_affordable
    }

    fn is_whole(&self, now_ns: u64) -> bool {
        self.empty_ns.saturating_add(SECOND_NS) <= now_ns
    }
}

impl RefusalBudget {
    /// Creates budgets of `per_second` each, all of them full from time 0 on.
    #[must_use]
    pub fn new(per_second: u32) -> Self {
        Self { per_second, strangers: Bucket { empty_ns: 0 }, users: HashMap::new(), left_out: BTreeMap::new() }
    }

    /// Changes the rate of each budget from now on.
    pub fn set(&mut self, per_second: u32) {
        self.per_second = per_second;
    }

    /// Whether to record a refusal of a user, or of a stranger, for `reason`; otherwise it is counted as omitted.
    /// `now_ns` is at least one second.
    pub fn admit(&mut self, user: Option<&Arc<str>>, reason: &'static str, now_ns: u64) -> bool {
        if self.users.len() >= USERS {
            self.users.retain(|_, bucket| !bucket.is_whole(now_ns));
        }
        let bucket = match user {
            Some(user) if self.users.contains_key(user) || self.users.len() < USERS => {
                self.users.entry(user.clone()).or_insert(Bucket { empty_ns: 0 })
            }
            _ => &mut self.strangers,
        };
        let is_admitted = bucket.take(self.per_second, now_ns);
        if !is_admitted {
            *self.left_out.entry(reason).or_default() += 1;
        }
        is_admitted
    }

    /// Takes the counts of refusals omitted since the last call, by reason.
    #[must_use]
    pub fn take_left_out(&mut self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.left_out).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nanoseconds; the first second has passed.
    fn at(ms: u64) -> u64 {
        SECOND_NS + ms * 1_000_000
    }

    #[test]
    fn a_flood_is_recorded_at_its_rate_and_the_rest_is_counted_by_reason() {
        let mut budget = RefusalBudget::new(10);
        // 60 seconds at 1,000 per second.
        let recorded = (0..60_000).filter(|ms| budget.admit(None, "credentials_missing", at(*ms))).count();
        assert!((600..=610).contains(&recorded), "{recorded}");
        assert_eq!(budget.take_left_out(), [("credentials_missing", 60_000 - recorded as u64)]);
        assert_eq!(budget.take_left_out(), []);
    }

    #[test]
    fn strangers_leave_users_their_budget_and_users_each_other() {
        let mut budget = RefusalBudget::new(2);
        let [alice, bob]: [Arc<str>; 2] = ["alice".into(), "bob".into()];
        let mut taken = |user: Option<&Arc<str>>| (0..9).filter(|_| budget.admit(user, "malformed", at(0))).count();
        assert_eq!((taken(None), taken(Some(&alice)), taken(Some(&bob)), taken(Some(&alice))), (2, 2, 2, 0));
    }

    #[test]
    fn a_user_is_forgotten_as_soon_as_that_changes_nothing() {
        let mut budget = RefusalBudget::new(1);
        for number in 0..10_000_u64 {
            budget.admit(Some(&number.to_string().into()), "malformed", at(number * 100));
            assert!(budget.users.len() <= USERS);
        }
        // All at once: users beyond the capacity share the strangers' budget.
        let crowd =
            (0..5_000).filter(|n| budget.admit(Some(&format!("u{n}").into()), "malformed", at(2_000_000))).count();
        assert_eq!((crowd, budget.users.len()), (USERS + 1, USERS));
    }
}
