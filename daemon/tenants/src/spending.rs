//! How many tokens the holders of keys have used in a calendar month of UTC. The counts outlive restarts, and
//! gateways, which a changed configuration replaces.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use parking_lot::Mutex;
use role::month::Month;
use serde::{Deserialize, Serialize};

/// The tokens used in a month, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// The month.
    pub month: String,
    /// Tokens by the name of the key.
    pub tokens: BTreeMap<String, u64>,
}

/// The used tokens. All names come from the configuration, so their number is bounded by the names that it has had in
/// a month.
#[derive(Debug, Default)]
pub struct Spending(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `None` before the first use of the clock.
    month: Option<Month>,
    tokens: BTreeMap<Arc<str>, u64>,
}

impl State {
    /// Begins another month if it has started.
    fn turn(&mut self, now: SystemTime) -> Month {
        let month = Month::after(self.month, now);
        if self.month.replace(month).is_some_and(|last| last != month) {
            self.tokens.clear();
        }
        month
    }
}

impl Spending {
    /// Notes tokens that were used with a key.
    pub fn spend(&self, name: &Arc<str>, tokens: u64, now: SystemTime) {
        let mut state = self.0.lock();
        state.turn(now);
        if tokens > 0 {
            let spent = state.tokens.entry(name.clone()).or_default();
            *spent = spent.saturating_add(tokens);
        }
    }

    /// Returns how many tokens were used with a key this month.
    #[must_use]
    pub fn of(&self, name: &str, now: SystemTime) -> u64 {
        let mut state = self.0.lock();
        state.turn(now);
        state.tokens.get(name).copied().unwrap_or_default()
    }

    /// Checks whether a key has tokens left of a quota.
    ///
    /// # Errors
    /// The key has none until the month ends; the error is the number of seconds until then.
    pub fn admit(&self, name: &str, quota: u64, now: SystemTime) -> Result<(), u64> {
        let mut state = self.0.lock();
        let month = state.turn(now);
        let spent = state.tokens.get(name).copied().unwrap_or_default();
        if spent < quota { Ok(()) } else { Err(month.seconds_left(now)) }
    }

    /// Returns the tokens used this month.
    #[must_use]
    pub fn spent(&self, now: SystemTime) -> Spent {
        let mut state = self.0.lock();
        let month = state.turn(now).to_string();
        Spent { month, tokens: state.tokens.iter().map(|(name, tokens)| (name.to_string(), *tokens)).collect() }
    }

    /// Adds the tokens used before the restart, if they are of this month. The stored month continues while the clock
    /// is not set.
    pub fn restore(&self, spent: &Spent, now: SystemTime) {
        let (mut state, month) = (self.0.lock(), spent.month.parse().ok());
        state.month = month;
        if Some(state.turn(now)) == month {
            for (name, tokens) in &spent.tokens {
                let known = state.tokens.entry(name.as_str().into()).or_default();
                *known = known.saturating_add(*tokens);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// The 22nd of November 2026.
    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + 20_779 * DAY
    }

    #[test]
    fn a_quota_that_is_used_up_admits_its_key_again_when_the_month_has_ended() {
        let (spending, ann) = (Spending::default(), Arc::from("ann"));
        spending.spend(&ann, 999, now());
        assert_eq!(spending.admit("ann", 1_000, now()), Ok(()));
        spending.spend(&ann, 500, now());
        assert_eq!(spending.admit("ann", 1_000, now()), Err(9 * 86_400));
        assert_eq!(spending.admit("bob", 1_000, now()), Ok(()));
        assert_eq!(spending.admit("ann", 1_000, now() + 9 * DAY), Ok(()), "in December");
        assert_eq!(spending.of("ann", now() + 9 * DAY), 0);
    }

    #[test]
    fn the_used_tokens_survive_a_restart_within_the_month_and_a_clock_that_is_not_set_yet() {
        let before = Spending::default();
        before.spend(&"ann".into(), 700, now());
        let spent = before.spent(now());
        let after = |at: SystemTime| {
            let after = Spending::default();
            after.restore(&spent, at);
            after.of("ann", at)
        };
        assert_eq!(after(now() + DAY), 700);
        assert_eq!(after(now() + 9 * DAY), 0);
        assert_eq!(after(SystemTime::UNIX_EPOCH + DAY), 700);
        let text = serde_json::to_string(&spent).unwrap();
        assert_eq!(serde_json::from_str::<Spent>(&text).unwrap(), spent);
    }
}
