//! The mistakes in a text that is not TOML. The parser finds fault with all that follows a value that is not closed.

use std::collections::BTreeSet;

use toml::{
    Spanned,
    de::{DeTable, DeValue, Error},
};

/// The most values that are not closed: behind each, the rest of the text is parsed again.
const MAX_OPEN: usize = 8;

/// How the messages begin about a list and a table that are not closed.
const UNCLOSED: [&str; 2] = ["unclosed array,", "unclosed inline table,"];

/// Returns the mistakes, at most one of a line, each with its place. `table` and `errors` are what the parser made of the text.
pub(super) fn mistakes(text: &str, table: &DeTable<'_>, errors: Vec<Error>) -> Vec<(usize, String)> {
    let ends: Vec<usize> = text.match_indices('\n').map(|(end, _)| end).collect();
    let line_of = |offset: usize| ends.partition_point(|end| *end < offset);
    let refused: BTreeSet<usize> = errors.iter().map(|error| line_of(start(error))).collect();
    let (mut found, mut begin) = (Vec::new(), 0);
    let (mut open, mut errors) = (open_value(table, &errors), errors);
    for _ in 0..MAX_OPEN {
        let Some((opened, unclosed)) = open.take() else { break };
        found.extend(errors.iter().filter(|error| start(error) < opened).map(|error| told(begin, error)));
        found.push((begin + opened, unclosed));
        let rest = text.get(begin + opened..).and_then(|rest| rest.find('\n'));
        let Some(next) = rest.map(|end| begin + opened + end + 1) else {
            errors.clear();
            break;
        };
        let (table, again) = DeTable::parse_recoverable(text.get(next..).unwrap_or_default());
        // The rest begins with lines of the value: these are refused only here.
        begin = next;
        open = open_value(table.get_ref(), &again);
        errors = again.into_iter().filter(|error| refused.contains(&line_of(next + start(error)))).collect();
    }
    if open.is_none() {
        found.extend(errors.iter().map(|error| told(begin, error)));
    }
    found.sort();
    found.dedup_by_key(|(offset, _)| line_of(*offset));
    found
}

fn start(error: &Error) -> usize {
    error.span().map_or(0, |span| span.start)
}

/// Returns the place and the message of an error in a text that begins at `begin`.
fn told(begin: usize, error: &Error) -> (usize, String) {
    (begin + start(error), error.message().to_owned())
}

/// Returns where a list begins that is not closed, and the message that says so. For a table in braces, of which the parser keeps
/// less, returns the first error.
fn open_value(table: &DeTable<'_>, errors: &[Error]) -> Option<(usize, String)> {
    let is_open = |error: &&Error| UNCLOSED.iter().any(|words| error.message().starts_with(words));
    let unclosed = errors.iter().find(is_open)?;
    let list = table.iter().find_map(|(_, value)| list_until(value, start(unclosed)));
    let first = || errors.iter().map(|error| told(0, error)).min();
    list.map(|opened| (opened, unclosed.message().to_owned())).or_else(first)
}

/// Returns where the outermost list begins that ends at `end`.
fn list_until(value: &Spanned<DeValue<'_>>, end: usize) -> Option<usize> {
    let span = value.span();
    match value.get_ref() {
        DeValue::Array(_) if span.end == end => Some(span.start),
        DeValue::Array(elements) => elements.iter().find_map(|element| list_until(element, end)),
        DeValue::Table(table) => table.iter().find_map(|(_, value)| list_until(value, end)),
        _ => None,
    }
}
