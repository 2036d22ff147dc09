//! A configuration as text.

use std::fmt::{Display, Write as _};

use crate::section::{self, Section};

/// A text that is being written.
pub(crate) struct Text {
    text: String,
    is_whole: bool,
}

impl Text {
    /// Returns a text without what goes without saying.
    pub(crate) const fn brief() -> Self {
        Self { text: String::new(), is_whole: false }
    }

    /// Returns a text that says everything.
    pub(crate) const fn whole() -> Self {
        Self { text: String::new(), is_whole: true }
    }

    /// Tells whether it says everything.
    pub(crate) const fn is_whole(&self) -> bool {
        self.is_whole
    }

    pub(crate) fn into_string(self) -> String {
        self.text
    }

    /// Writes a section behind a header: what `walk` finds in it.
    pub(crate) fn section<T>(&mut self, header: &str, walk: impl FnOnce(&mut Section<'_>) -> T) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        // Writing to a string cannot fail.
        _ = writeln!(self.text, "{gap}{header}");
        self.keys(walk);
    }

    /// Writes keys: what `walk` finds.
    pub(crate) fn keys<T>(&mut self, walk: impl FnOnce(&mut Section<'_>) -> T) {
        for line in section::write(self.is_whole, walk) {
            _ = writeln!(self.text, "{line}");
        }
    }
}

pub(crate) fn quoted(text: &(impl Display + ?Sized)) -> String {
    toml::Value::String(text.to_string()).to_string()
}

/// Writes a rate, which was read in one of these units, in the largest that it is a whole number of.
pub(crate) fn rate(bytes_per_sec: u64) -> String {
    let bits = bytes_per_sec * 8;
    let units = [(1_000_000_000, "Gbit/s"), (1_000_000, "Mbit/s")];
    let (unit, name) = units.into_iter().find(|(unit, _)| bits.is_multiple_of(*unit)).unwrap_or((1_000, "kbit/s"));
    format!("{} {name}", bits / unit)
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn rates_are_written_in_the_largest_unit_of_which_they_are_a_whole_number() {
        let written = |kbit_s: u64| rate(kbit_s * 125);
        for (kbit_s, words) in [
            (8, "8 kbit/s"),
            (1_500, "1500 kbit/s"),
            (30_000, "30 Mbit/s"),
            (2_500_000, "2500 Mbit/s"),
            (1_000_000_000, "1000 Gbit/s"),
        ] {
            assert_eq!(written(kbit_s), words);
        }
    }
}
