//! A configuration that is being written, section by section.

use std::fmt::Write as _;

use crate::section::{self, Section};

/// A text that is being written.
pub(crate) struct Text {
    text: String,
    is_whole: bool,
}

impl Text {
    /// Returns a text that omits defaults.
    pub(crate) const fn brief() -> Self {
        Self { text: String::new(), is_whole: false }
    }

    /// Returns a text that includes defaults.
    pub(crate) const fn whole() -> Self {
        Self { text: String::new(), is_whole: true }
    }

    /// Returns whether the text includes defaults.
    pub(crate) const fn is_whole(&self) -> bool {
        self.is_whole
    }

    pub(crate) fn into_string(self) -> String {
        self.text
    }

    /// Writes a section: its header, and the keys that `walk` visits.
    pub(crate) fn section<T>(&mut self, header: &str, walk: impl FnOnce(&mut Section<'_>) -> T) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        // Writing to a string cannot fail.
        _ = writeln!(self.text, "{gap}{header}");
        self.keys(walk);
    }

    /// Writes the keys that `walk` visits.
    pub(crate) fn keys<T>(&mut self, walk: impl FnOnce(&mut Section<'_>) -> T) {
        for line in section::write(self.is_whole, walk) {
            _ = writeln!(self.text, "{line}");
        }
    }
}
