//! A configuration as text, key by key.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use toml::Value;

use crate::hash::hex;
use crate::section::Word;
use crate::targets::Ports;

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

    /// Writes a section behind a header.
    pub(crate) fn section(&mut self, header: &str, fill: impl FnOnce(&mut Keys<'_>)) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        // Writing to a string cannot fail.
        _ = writeln!(self.text, "{gap}{header}");
        self.keys(fill);
    }

    pub(crate) fn keys(&mut self, fill: impl FnOnce(&mut Keys<'_>)) {
        fill(&mut Keys(self));
    }
}

/// One table, key by key.
pub(crate) struct Keys<'a>(&'a mut Text);

impl Keys<'_> {
    fn line(&mut self, key: &str, value: impl Display) {
        _ = writeln!(self.0.text, "{key} = {value}");
    }

    /// Writes what a reader would take for granted only into a text that says everything.
    pub(crate) fn unless(&mut self, is_granted: bool, write: impl FnOnce(&mut Self)) {
        if !is_granted || self.0.is_whole {
            write(self);
        }
    }

    pub(crate) fn text(&mut self, key: &str, text: &(impl Display + ?Sized)) {
        self.line(key, quoted(text));
    }

    pub(crate) fn optional_text(&mut self, key: &str, text: Option<impl Display>) {
        if let Some(text) = text {
            self.text(key, &text);
        }
    }

    pub(crate) fn word(&mut self, key: &str, word: impl Word) {
        self.text(key, word.word());
    }

    /// Writes what needs no quotes.
    pub(crate) fn number(&mut self, key: &str, number: Option<impl Display>) {
        if let Some(number) = number {
            self.line(key, number);
        }
    }

    pub(crate) fn seconds(&mut self, key: &str, time: Duration) {
        self.line(key, time.as_secs());
    }

    pub(crate) fn millis(&mut self, key: &str, time: Option<Duration>) {
        self.number(key, time.map(|time| time.as_millis()));
    }

    pub(crate) fn hash(&mut self, key: &str, hash: &[u8; 32]) {
        self.text(key, &hex(hash));
    }

    pub(crate) fn rate(&mut self, key: &str, bytes_per_sec: Option<u64>) {
        self.optional_text(key, bytes_per_sec.map(rate).as_ref());
    }

    pub(crate) fn list(&mut self, key: &str, items: Option<&Vec<impl Display>>) {
        let of = |items: &Vec<_>| items.iter().map(quoted).collect::<Vec<_>>().join(", ");
        self.number(key, items.map(|items| format!("[{}]", of(items))));
    }

    pub(crate) fn ports(&mut self, key: &str, ports: Option<&Ports>) {
        self.number(key, ports.map(self::ports));
    }
}

pub(crate) fn ports(Ports(ports): &Ports) -> String {
    let range = |range: &std::ops::RangeInclusive<u16>| match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("\"{first}-{last}\""),
    };
    format!("[{}]", ports.iter().map(range).collect::<Vec<_>>().join(", "))
}

pub(crate) fn quoted(text: &(impl Display + ?Sized)) -> String {
    Value::String(text.to_string()).to_string()
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
