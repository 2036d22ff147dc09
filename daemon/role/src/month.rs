//! Calendar months in UTC, the periods of quotas, and the amounts that were used in them.

use std::{
    collections::BTreeMap,
    fmt,
    str::FromStr,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use time::{Date, OffsetDateTime, Time};

/// Before this time (2025-01-01), the clock of a machine without a battery has not yet been set.
const CLOCK_IS_SET: Duration = Duration::from_secs(1_735_689_600);

/// The longest month.
const LONGEST: Duration = Duration::from_secs(31 * 86_400);

/// How many months are kept beside the current one.
const OTHERS: usize = 3;

/// A month of the years 0 to 9999. Displays as `2026-11`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Month {
    /// The months since January of the year 0.
    number: u32,
}

impl Month {
    /// Returns the month of a time.
    #[must_use]
    pub fn of(moment: SystemTime) -> Self {
        let moment = OffsetDateTime::from(moment);
        Self::new(u32::try_from(moment.year()).unwrap_or_default(), moment.month())
    }

    fn new(year: u32, month: time::Month) -> Self {
        Self { number: year * 12 + u32::from(u8::from(month)) - 1 }
    }

    /// Returns the month at `now`, or `last` as long as the clock has not been set.
    #[must_use]
    pub fn after(last: Option<Self>, now: SystemTime) -> Self {
        let is_set = now.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since >= CLOCK_IS_SET);
        last.filter(|_| !is_set).unwrap_or_else(|| Self::of(now))
    }

    fn next(self) -> Self {
        Self { number: self.number + 1 }
    }

    fn year_and_month(self) -> (u32, u8) {
        // The remainder is below 12.
        (self.number / 12, (self.number % 12) as u8 + 1)
    }

    /// Returns the seconds from `now` until the next month begins, at least 1.
    #[must_use]
    pub fn seconds_left(self, now: SystemTime) -> u64 {
        let (year, month) = self.next().year_and_month();
        let first = time::Month::try_from(month).ok().zip(i32::try_from(year).ok());
        let first = first.and_then(|(month, year)| Date::from_calendar_date(year, month, 1).ok());
        // Every month has a first day; the year 10,000 would be the exception.
        let next = first.unwrap_or(Date::MAX).with_time(Time::MIDNIGHT).assume_utc();
        let left = SystemTime::from(next).duration_since(now).unwrap_or_default();
        left.min(LONGEST).as_secs().max(1)
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month) = self.year_and_month();
        write!(f, "{year:04}-{month:02}")
    }
}

impl From<Month> for String {
    fn from(month: Month) -> Self {
        month.to_string()
    }
}

/// The text is not a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a month such as 2026-11")]
pub struct NotAMonth;

impl FromStr for Month {
    type Err = NotAMonth;

    fn from_str(text: &str) -> Result<Self, NotAMonth> {
        let (year, month) = text.split_once('-').ok_or(NotAMonth)?;
        let month = month.parse::<u8>().ok().and_then(|month| time::Month::try_from(month).ok());
        let year = year.parse().ok().filter(|year| *year <= 9_999);
        Ok(Self::new(year.ok_or(NotAMonth)?, month.ok_or(NotAMonth)?))
    }
}

impl TryFrom<String> for Month {
    type Error = NotAMonth;

    fn try_from(text: String) -> Result<Self, NotAMonth> {
        text.parse()
    }
}

/// What was used in one month, by name.
pub type MonthAmounts = BTreeMap<String, u64>;

/// The amounts of the months before and after the current one. A clock that is wrong for a while and then right again finds its
/// month's amounts here. At most three months are kept: the month that is farthest from the current one is dropped first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OtherMonths(BTreeMap<Month, MonthAmounts>);

impl OtherMonths {
    /// Whether no other month has amounts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps the amounts of the month that has been current, and returns those of the month that is current from now on. Logs the change of
    /// `what`, with a warning unless one month follows the other.
    pub fn exchange(&mut self, (before, amounts): (Month, MonthAmounts), now: Month, what: &str) -> MonthAmounts {
        let found = self.0.remove(&now).unwrap_or_default();
        if amounts.is_empty() && found.is_empty() && self.0.is_empty() {
            // Nothing is counted here, or nothing was used yet.
        } else if now == before.next() {
            tracing::info!(%before, %now, "a month begins for {what}");
        } else {
            tracing::warn!(
                %before,
                %now,
                "the clock has gone to another month: {what} count for that month now, and paced keeps the amounts of the month before. \
                 Check the clock, unless it has just been corrected, or paced has not run in the meantime"
            );
        }
        if !amounts.is_empty() {
            self.0.insert(before, amounts);
        }
        while self.0.len() > OTHERS {
            let farthest = self.0.keys().copied().max_by_key(|month| month.number.abs_diff(now.number));
            let Some(farthest) = farthest else { break };
            self.0.remove(&farthest);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_have_their_names_and_end_at_midnight_of_utc() {
        for (seconds, name, left) in [
            (0, "1970-01", 31 * 86_400),
            (1_796_083_199, "2026-11", 1),
            (1_796_083_200, "2026-12", 31 * 86_400),
            (1_798_675_200, "2026-12", 86_400),
            (1_709_164_800, "2024-02", 86_400),
        ] {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            let month = Month::of(now);
            assert_eq!((&month.to_string()[..], month.seconds_left(now)), (name, left), "{seconds}");
            assert_eq!(name.parse(), Ok(month));
        }
        for text in ["", "2026", "2026-13", "2026-00", "-1-11", "10000-01", "4294967295-12"] {
            assert_eq!(text.parse::<Month>(), Err(NotAMonth), "{text}");
        }
    }

    #[test]
    fn a_month_is_found_again_after_a_detour_and_only_the_nearest_months_are_kept() {
        let month = |name: &str| name.parse::<Month>().unwrap();
        let amounts = |amount| MonthAmounts::from([("alice".to_owned(), amount)]);
        let mut others = OtherMonths::default();
        let mut go = |before: &str, used, now: &str| {
            let found = others.exchange((month(before), used), month(now), "quotas");
            (found, others.0.keys().map(ToString::to_string).collect::<Vec<_>>())
        };
        for (before, now) in [("2026-08", "2026-09"), ("2026-09", "2026-10"), ("2026-10", "2026-11")] {
            assert_eq!(go(before, amounts(1), now).0, MonthAmounts::new());
        }
        let (found, kept) = go("2026-11", amounts(7), "2029-11");
        assert_eq!((found.len(), kept), (0, ["2026-09", "2026-10", "2026-11"].map(str::to_owned).to_vec()));
        let (found, kept) = go("2029-11", amounts(2), "2026-11");
        assert_eq!((found, kept), (amounts(7), ["2026-09", "2026-10", "2029-11"].map(str::to_owned).to_vec()));
        let (_, kept) = go("2026-11", amounts(8), "2026-12");
        assert_eq!(
            kept,
            ["2026-09", "2026-10", "2026-11"].map(str::to_owned),
            "the month of the wrong clock is the farthest"
        );
        let (_, kept) = go("2026-12", MonthAmounts::new(), "2027-01");
        assert_eq!(kept, ["2026-09", "2026-10", "2026-11"].map(str::to_owned), "nothing was used in December");
    }
}
