//! What is logged, and in which form.

use std::ops::RangeInclusive;

use crate::section::{Section, words};

/// The log of paced's own work, and the access log of tunnels and requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// The level of the log.
    pub level: LogLevel,
    /// The form of the access log, if it is on.
    pub access: AccessForm,
    /// Whether the access log includes addresses of clients and targets.
    pub access_addresses: bool,
    /// How many refusals per second the access log records at most, for strangers together and for each user.
    pub access_refusals_per_second: u32,
}

impl Default for LogSettings {
    /// The log at its default level, without an access log.
    fn default() -> Self {
        Self {
            level: LogLevel::default(),
            access: AccessForm::default(),
            access_addresses: false,
            access_refusals_per_second: 10,
        }
    }
}

words! {
    /// The level of the log: each level includes those before it.
    #[derive(Default)]
    pub enum LogLevel {
        /// Errors that stop paced or a role of it.
        Error = "error",
        /// Problems that the operator should look into.
        Warn = "warn",
        /// The normal work of paced.
        #[default]
        Info = "info",
        /// Events of every connection and tunnel.
        Debug = "debug",
        /// Events of every packet.
        Trace = "trace",
    }
}

words! {
    /// The form of the access log.
    #[derive(Default)]
    pub enum AccessForm {
        /// No access log.
        #[default]
        Off = "off",
        /// Lines of `key=value` on standard output.
        Text = "text",
        /// JSON objects on standard output, one per line.
        Json = "json",
        /// Entries of systemd's journal, with a field for each key.
        Journal = "journal",
    }
}

/// Walks through the keys of the log.
pub(crate) fn walk(section: &mut Section<'_>, of: &LogSettings) -> LogSettings {
    const REFUSALS: RangeInclusive<u64> = 1..=100_000;
    LogSettings {
        level: section.value("level", of.level),
        access: section.value("access", of.access),
        access_addresses: section.value("access_addresses", of.access_addresses),
        access_refusals_per_second: section.number(
            "access_refusals_per_second",
            REFUSALS,
            of.access_refusals_per_second,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Config,
        tests::{assert_refused, valid},
    };

    #[test]
    fn there_is_an_access_log_only_where_it_is_asked_for_and_addresses_only_where_they_are() {
        assert_eq!(valid("").log, LogSettings::default());
        let log = valid("[log]\naccess = \"json\"").log;
        assert_eq!((log.access, log.access_addresses), (AccessForm::Json, false));
        let log = valid("[log]\naccess = \"journal\"\naccess_addresses = true\naccess_refusals_per_second = 3").log;
        assert_eq!((log.access, log.access_addresses, log.access_refusals_per_second), (AccessForm::Journal, true, 3));
        for (line, why) in [
            ("access = \"file\"", ["line 2", "\"text\"", "\"journal\""]),
            ("access_refusals_per_second = 0", ["line 2", "out of range", "100000"]),
        ] {
            let text = format!("[log]\n{line}");
            let refusals = Config::from_toml(&text).expect_err(&text).to_string();
            assert_refused(&text, &refusals, why);
        }
    }
}
