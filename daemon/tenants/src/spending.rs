//! How many tokens the holders of keys have used in a calendar month of UTC. The counts outlive restarts, and
//! gateways, which a changed configuration replaces.

use std::{collections::BTreeMap, mem, sync::Arc, time::SystemTime};

use parking_lot::Mutex;
use role::month::{Month, MonthAmounts, OtherMonths};
use serde::{Deserialize, Serialize};

/// The file of the tokens in the state folder.
pub const FILE: &str = "tokens.json";

/// The tokens used in a month, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// The month, in UTC.
    pub month: Month,
    /// Tokens by the name of the key.
    pub tokens: MonthAmounts,
    /// The tokens used in other months.
    #[serde(default, skip_serializing_if = "OtherMonths::is_empty")]
    pub other_months: OtherMonths,
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
    other_months: OtherMonths,
}

impl State {
    /// Turns to another month if it is due; returns the month.
    fn turn(&mut self, now: SystemTime) -> Month {
        let month = Month::after(self.month, now);
        if let Some(before) = self.month.replace(month).filter(|before| *before != month) {
            let used = mem::take(&mut self.tokens).into_iter().map(|(name, tokens)| (name.to_string(), tokens));
            let found = self.other_months.exchange((before, used.collect()), month, "the tokens of clients");
            self.add(&found);
        }
        month
    }

    /// Adds tokens to those used this month.
    fn add(&mut self, used: &MonthAmounts) {
        for (name, tokens) in used {
            let known = self.tokens.entry(name.as_str().into()).or_default();
            *known = known.saturating_add(*tokens);
        }
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
        let month = state.turn(now);
        let tokens = state.tokens.iter().map(|(name, tokens)| (name.to_string(), *tokens)).collect();
        Spent { month, tokens, other_months: state.other_months.clone() }
    }

    /// Adds the tokens used before the restart. Those of another month than that of `now` are kept for that month. The stored month
    /// continues while the clock is not set.
    pub fn restore(&self, spent: &Spent, now: SystemTime) {
        let mut state = self.0.lock();
        (state.month, state.other_months) = (Some(spent.month), spent.other_months.clone());
        state.add(&spent.tokens);
        state.turn(now);
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
    fn a_clock_that_is_wrong_once_takes_no_used_tokens_away() {
        let (spending, ann) = (Spending::default(), Arc::from("ann"));
        spending.spend(&ann, 700, now());
        let spent = spending.spent(now());
        assert_eq!(spending.of("ann", now() + 1_100 * DAY), 0);
        let saved = serde_json::to_string(&spending.spent(now() - 40 * DAY)).unwrap();
        let again = Spending::default();
        again.restore(&serde_json::from_str(&saved).unwrap(), now() + DAY);
        assert_eq!((again.of("ann", now()), again.spent(now())), (700, spent));
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
