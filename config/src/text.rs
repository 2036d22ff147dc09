//! Writes values that several kinds of keys share.

use std::fmt::Display;

/// Writes a text in quotes.
pub(crate) fn quoted(text: &(impl Display + ?Sized)) -> String {
    toml::Value::String(text.to_string()).to_string()
}

/// Writes items in a row, with semicolons between them.
pub(crate) fn joined<T: Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join("; ")
}

/// Returns whether the configuration accepts a text, such as the name of a user: 1 to 255 printable ASCII characters.
#[must_use]
pub fn is_text(text: &str) -> bool {
    (1..=255).contains(&text.len()) && text.bytes().all(|byte| (0x20..0x7f).contains(&byte))
}

/// Writes a rate, which was read in one of these units, in the largest unit that gives a whole number.
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
