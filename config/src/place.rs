//! Finds the place of a value in a configuration.

use std::fmt;

use toml::de::{DeTable, DeValue};

use crate::section::FilePart;

/// A value's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPlace {
    /// The name of the part; may be empty.
    pub file: String,
    /// The line, counted from 1.
    pub line: usize,
    /// The path of the key.
    pub key: String,
}

impl fmt::Display for KeyPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, key } = self;
        let gap = if file.is_empty() { "" } else { ": " };
        write!(f, "{file}{gap}line {line}: {key}")
    }
}

/// Finds a key of this name, in any section, with this text as its value or as an element of its list: in the last part
/// that has it, because later parts take precedence, and there at the first place. A key with its sections, such as
/// `forward.listen`, is found only at a single place: of several, it is not known which one is meant.
#[must_use]
pub fn place(parts: &[FilePart], key: &str, value: &str) -> Option<KeyPlace> {
    let mut places = parts.iter().rev().flat_map(|part| places_in(part, key, value));
    let first = places.next();
    let is_ambiguous = key.contains('.') && places.next().is_some();
    first.filter(|_| !is_ambiguous)
}

/// Returns the places in one part, in their order.
fn places_in(part: &FilePart, key: &str, value: &str) -> Vec<KeyPlace> {
    let (table, _) = DeTable::parse_recoverable(&part.text);
    let mut found = Vec::new();
    look(table.get_ref(), "", key, value, &mut found);
    found.sort();
    let line = |offset| part.text.get(..offset).map(|before| before.matches('\n').count() + 1);
    let place = |(offset, key)| Some(KeyPlace { file: part.name.clone(), line: line(offset)?, key });
    found.into_iter().filter_map(place).collect()
}

fn look(table: &DeTable<'_>, path: &str, wanted: &str, text: &str, found: &mut Vec<(usize, String)>) {
    for (key, value) in table {
        let path = if path.is_empty() { key.get_ref().to_string() } else { format!("{path}.{}", key.get_ref()) };
        if (key.get_ref() == wanted || path == wanted) && says(value.get_ref(), text) {
            found.push((value.span().start, path.clone()));
        }
        let below: Vec<_> = match value.get_ref() {
            DeValue::Array(elements) => elements.iter().filter_map(|element| element.get_ref().as_table()).collect(),
            other => other.as_table().into_iter().collect(),
        };
        below.into_iter().for_each(|table| look(table, &path, wanted, text, found));
    }
}

fn says(value: &DeValue<'_>, text: &str) -> bool {
    match value {
        DeValue::Array(elements) => elements.iter().any(|element| says(element.get_ref(), text)),
        other => other.as_str() == Some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_in_the_last_part_that_has_it_with_its_line_and_the_path_of_its_key() {
        let part = |name: &str, text: &str| FilePart { name: name.into(), text: text.into() };
        let parts = [
            part("a", "[relay]\ncertificate = \"/c\"\nprivate_key = \"/k\"\n[[relay.listener]]\nprivate_key = \"/k\""),
            part("b", "\n[kernel]\ndevices = [\"lo\",\n\"eth0\"]\n[control.tcp]\ncertificate = \"/c\""),
        ];
        for (key, value, expected) in [
            ("certificate", "/c", Some("b: line 6: control.tcp.certificate")),
            ("private_key", "/k", Some("a: line 3: relay.private_key")),
            ("devices", "eth0", Some("b: line 3: kernel.devices")),
            ("client_ca", "/c", None),
            ("certificate", "/d", None),
            ("relay.certificate", "/c", Some("a: line 2: relay.certificate")),
            ("relay.listener.private_key", "/k", Some("a: line 5: relay.listener.private_key")),
        ] {
            assert_eq!(place(&parts, key, value).map(|place| place.to_string()).as_deref(), expected, "{key}");
        }
        let twice = [part("", "[[forward]]\nlisten = \"a\"\n[[forward]]\nlisten = \"a\"\n")];
        assert_eq!(
            ["listen", "forward.listen"].map(|key| place(&twice, key, "a").map(|place| place.line)),
            [Some(2), None]
        );
        assert_eq!(place(&[part("", "a = \"1\"")], "a", "1").unwrap().to_string(), "line 1: a");
    }
}
