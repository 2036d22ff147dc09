//! Reads several files as one document: a main file and drop-ins. Later drop-ins take precedence.

use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

/// A file of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilePart {
    /// Its name in messages.
    pub name: String,
    /// Its content, in TOML.
    pub text: String,
}

impl From<&str> for FilePart {
    /// Makes an unnamed part of a single text.
    fn from(text: &str) -> Self {
        Self { name: String::new(), text: text.to_owned() }
    }
}

/// Joins the texts of all parts; also returns where each begins.
pub(super) fn join(parts: &[FilePart]) -> (String, Vec<usize>) {
    let (mut text, mut starts) = (String::new(), Vec::new());
    for part in parts {
        starts.push(text.len());
        text.push_str(&part.text);
        // A part begins on a new line.
        text.push('\n');
    }
    (text, starts)
}

/// Shifts the positions of everything in a table by `start`, the place of its part in the whole text.
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

/// Overlays a later table on an earlier one: sections are joined key by key, `[[sections]]` follow the earlier ones,
/// and any other value replaces the earlier one; an empty list removes earlier `[[sections]]`. `text` is the text of both.
pub(super) fn overlay<'i>(earlier: &mut DeTable<'i>, later: DeTable<'i>, text: &str) {
    for (key, value) in later {
        match (earlier.get_mut(key.get_ref().as_ref()).map(Spanned::get_mut), value.get_ref()) {
            (Some(DeValue::Table(before)), DeValue::Table(_)) => {
                if let DeValue::Table(table) = value.into_inner() {
                    overlay(before, table, text);
                }
            }
            (Some(DeValue::Array(before)), DeValue::Array(after))
                if are_sections(before, text) && are_sections(after, text) && !after.is_empty() =>
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

/// Returns whether a list consists of `[[sections]]`, and is not a list in brackets after its key.
fn are_sections(list: &DeArray<'_>, text: &str) -> bool {
    list.iter().all(|element| text.get(element.span().start..).is_some_and(|text| text.starts_with("[[")))
}
