//! What is logged, and in which form.

use std::ops::RangeInclusive;

use crate::section::{Section, words};

/// The log of what paced does, and the access log: what became of tunnels and requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// How much is logged of what paced does.
    pub level: LogLevel,
    /// The form of the access log, if it is wanted.
    pub access: AccessForm,
    /// Whether the access log names addresses of clients and targets.
    pub access_addresses: bool,
    /// How many refusals of strangers, and of each user, the access log has a second at most.
    pub access_refusals_per_second: u32,
}

impl Default for LogSettings {
    /// What paced does, without an access log.
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
    /// How much is logged: each word includes those before it.
    #[derive(Default)]
    pub enum LogLevel {
        /// What stops paced or a role of it.
        Error = "error",
        /// What the operator should look into.
        Warn = "warn",
        /// What paced is doing.
        #[default]
        Info = "info",
        /// What happens to every connection and tunnel.
        Debug = "debug",
        /// What happens to every packet.
        Trace = "trace",
    }
}

words! {
    /// The form of the access log.
    #[derive(Default)]
    pub enum AccessForm {
        /// There is none.
        #[default]
        Off = "off",
        /// Lines of `key=value` on standard output.
        Text = "text",
        /// A JSON object a line on standard output.
        Json = "json",
        /// Entries of systemd's journal, with a field for each key.
        Journal = "journal",
    }
}

/// Walks through what is logged.
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
    use crate::Config;
    use crate::tests::{assert_refused, valid};

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
