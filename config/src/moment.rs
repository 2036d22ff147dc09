//! Points in time in configurations: dates of RFC 3339.

use std::{fmt, time::SystemTime};

use serde_json::Value as Json;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use toml::de::DeValue;

use crate::{
    section::{Value, text},
    text::quoted,
};

/// A point in time, to the second or finer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(OffsetDateTime);

impl Moment {
    /// Reads a date-time (RFC 3339 §5.6), or a date, which means its first instant in UTC.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_date = text.len() == "2027-01-31".len();
        let whole = if is_date { format!("{text}T00:00:00Z") } else { text.to_owned() };
        OffsetDateTime::parse(&whole, &Rfc3339).ok().map(Self)
    }

    /// Returns how many whole days are left at `now`; 0 on the last day, and `None` once the time has passed.
    #[must_use]
    pub fn days_left(self, now: SystemTime) -> Option<u64> {
        let left = SystemTime::from(self).duration_since(now).ok()?;
        (!left.is_zero()).then_some(left.as_secs() / 86_400)
    }
}

/// Writes a time to the millisecond (RFC 3339), in UTC.
#[must_use]
pub fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let ((year, month, day), (hour, minute, second, millis)) = (time.to_calendar_date(), time.to_hms_milli());
    format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z", u8::from(month))
}

impl From<Moment> for SystemTime {
    fn from(Moment(moment): Moment) -> Self {
        moment.into()
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Any time that was read has a year of four digits, so it can be written.
        f.write_str(&self.0.format(&Rfc3339).map_err(|_| fmt::Error)?)
    }
}

impl Value for Moment {
    const EXPECTED: &'static str =
        "a date, or a time of RFC 3339, in quotes, such as \"2027-01-31\" or \"2027-01-31T12:00:00Z\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        Self::parse(value.as_str()?)
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        let (date, time) = ("[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "[0-9]{2}:[0-9]{2}:[0-9]{2}");
        text(&format!(r"^{date}([Tt ]{time}(\.[0-9]+)?([Zz]|[+-][0-9]{{2}}:[0-9]{{2}}))?$"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_date_is_its_first_moment_in_utc_and_a_time_keeps_its_offset() {
        let [date, time, later] = ["2027-01-31", "2027-01-31T00:00:00Z", "2027-01-31T00:00:00-01:00"]
            .map(|text| Moment::parse(text).unwrap());
        assert_eq!(date, time);
        assert!(later > date);
        assert_eq!(date.to_string(), "2027-01-31T00:00:00Z");
        assert_eq!(Moment::parse(&later.to_string()), Some(later));
        for text in ["2027-02-30", "2027-1-31", "2027-01-31T00:00:00", "31.1.2027", "tomorrow", ""] {
            assert_eq!(Moment::parse(text), None, "{text}");
        }
    }

    #[test]
    fn times_are_told_to_the_millisecond() {
        let at = |ms: u64| rfc3339(SystemTime::UNIX_EPOCH + Duration::from_micros(ms * 1_000 + 999));
        assert_eq!((at(0), at(1_234)), ("1970-01-01T00:00:00.000Z".into(), "1970-01-01T00:00:01.234Z".into()));
    }

    #[test]
    fn days_that_are_left_are_whole_ones() {
        let moment = Moment::parse("2027-01-31").unwrap();
        let at = |seconds| SystemTime::from(moment) - Duration::from_secs(seconds);
        assert_eq!(moment.days_left(at(86_400)), Some(1));
        assert_eq!(moment.days_left(at(86_399)), Some(0));
        assert_eq!(moment.days_left(at(0)), None);
    }
}
