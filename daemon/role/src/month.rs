//! Calendar months in UTC, the periods of quotas.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime},
};

use time::{Date, OffsetDateTime, Time};

/// Before this time (2025-01-01), the clock of a machine without a battery has not yet been set.
const CLOCK_IS_SET: Duration = Duration::from_secs(1_735_689_600);

/// The longest month.
const LONGEST: Duration = Duration::from_secs(31 * 86_400);

/// A month. Displays as `2026-11`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Month {
    year: i32,
    month: time::Month,
}

impl Month {
    /// Returns the month of a time.
    #[must_use]
    pub fn of(moment: SystemTime) -> Self {
        let moment = OffsetDateTime::from(moment);
        Self { year: moment.year(), month: moment.month() }
    }

    /// Returns the month at `now`, or `last` as long as the clock has not been set.
    #[must_use]
    pub fn after(last: Option<Self>, now: SystemTime) -> Self {
        let is_set = now.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since >= CLOCK_IS_SET);
        last.filter(|_| !is_set).unwrap_or_else(|| Self::of(now))
    }

    /// Returns the seconds from `now` until the next month begins, at least 1.
    #[must_use]
    pub fn seconds_left(self, now: SystemTime) -> u64 {
        let (year, month) = match self.month {
            time::Month::December => (self.year + 1, time::Month::January),
            month => (self.year, month.next()),
        };
        // Every month has a first day; the year 10,000 would be the exception.
        let next = Date::from_calendar_date(year, month, 1).unwrap_or(Date::MAX).with_time(Time::MIDNIGHT).assume_utc();
        let left = SystemTime::from(next).duration_since(now).unwrap_or_default();
        left.min(LONGEST).as_secs().max(1)
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.year, u8::from(self.month))
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
        Ok(Self { year: year.parse().map_err(|_| NotAMonth)?, month: month.ok_or(NotAMonth)? })
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
    }
}
