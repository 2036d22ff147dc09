//! Several files read as one document: a main one and drop-ins, of which the later have the last word.

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

/// A file of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilePart {
    /// What messages call it.
    pub name: String,
    /// What it says, in TOML.
    pub text: String,
}

impl From<&str> for FilePart {
    /// Of a text that is the only one, and needs no name.
    fn from(text: &str) -> Self {
        Self { name: String::new(), text: text.to_owned() }
    }
}

/// Where each part begins in the text of all of them.
pub(super) fn join(parts: &[FilePart]) -> (String, Vec<usize>) {
    let (mut text, mut starts) = (String::new(), Vec::new());
    for part in parts {
        starts.push(text.len());
        text.push_str(&part.text);
        // What begins a part begins a line.
        text.push('\n');
    }
    (text, starts)
}

/// Moves everything in a table that begins at `start` of the whole text to its place there.
pub(super) fn shift<'i>(table: DeTable<'i>, start: usize) -> DeTable<'i> {
    let shifted =
        |key, value| (spanned(key, start, |key| key), spanned(value, start, |value| shift_value(value, start)));
    table.into_iter().map(|(key, value)| shifted(key, value)).collect()
}

fn spanned<T, U>(value: Spanned<T>, start: usize, shift: impl FnOnce(T) -> U) -> Spanned<U> {
    let span = value.span();
    Spanned::new(start + span.start..start + span.end, shift(value.into_inner()))
}

fn shift_value(value: DeValue<'_>, start: usize) -> DeValue<'_> {
    match value {
        DeValue::Table(table) => DeValue::Table(shift(table, start)),
        DeValue::Array(elements) => {
            let mut shifted = DeArray::new();
            elements.into_iter().for_each(|element| shifted.push(spanned(element, start, |it| shift_value(it, start))));
            DeValue::Array(shifted)
        }
        scalar => scalar,
    }
}

/// Lays a later table over an earlier one: sections are joined key by key, `[[sections]]` come after the earlier ones,
/// and any other value takes the place of the one before. `text` is what both are from.
pub(super) fn overlay<'i>(earlier: &mut DeTable<'i>, later: DeTable<'i>, text: &str) {
    for (key, value) in later {
        match (earlier.get_mut(key.get_ref().as_ref()).map(Spanned::get_mut), value.get_ref()) {
            (Some(DeValue::Table(before)), DeValue::Table(_)) => {
                if let DeValue::Table(table) = value.into_inner() {
                    overlay(before, table, text);
                }
            }
            (Some(DeValue::Array(before)), DeValue::Array(after))
                if are_sections(before, text) && are_sections(after, text) =>
            {
                if let DeValue::Array(sections) = value.into_inner() {
                    sections.into_iter().for_each(|section| before.push(section));
                }
            }
            _ => {
                // The key as well, for its position.
                earlier.remove(key.get_ref().as_ref());
                earlier.insert(key, value);
            }
        }
    }
}

/// Tells whether a list is one of `[[sections]]`, and not one in brackets behind its key.
fn are_sections(list: &DeArray<'_>, text: &str) -> bool {
    list.iter().all(|element| text.get(element.span().start..).is_some_and(|text| text.starts_with("[[")))
}
