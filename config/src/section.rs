//! Reads one table of the text key by key, and reports errors with their positions.
//!
//! A section learns its schema as it is read: keys that were never asked for are unknown. So each key is named only
//! once. Reading continues after an error, with the default in place of the refused value, so that one run finds as
//! many errors as possible.
//!
//! [`describe`] runs a reader on an empty document, as if every section occurred once, and collects the keys that it
//! asks for. [`write()`] also runs it on an empty document, and collects the values that it is given to hold for
//! missing keys; see [`keys`].

use std::{cell::RefCell, collections::BTreeSet, fmt::Display};

use serde_json::Value as Json;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::error::{Error, Errors, Problem};

mod keys;
mod lines;
mod merge;
mod named;
mod schema;
mod value;

pub use self::merge::FilePart;
pub(crate) use self::{
    keys::write,
    named::{ClassName, HopName, PathName, ScheduleName},
    schema::Schema,
    value::{Value, Word, text, unsigned, whole_number, words},
};
use self::{lines::Lines, value::unfit};

/// Names whose Jaro-Winkler similarity to every known key is below this get no suggestion.
const SIMILAR: f64 = 0.8;

/// A table that is being read, described or written; an absent one reads as empty.
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    offset: usize,
    table: Option<&'a DeTable<'a>>,
    /// Tables whose keys apply if the section's own table lacks them, the nearest first. See [`named`].
    inherited: Vec<&'a DeTable<'a>>,
    known: Vec<&'static str>,
    /// Whether tables that are not `known` are sections with names of the operator's choice.
    has_named_sections: bool,
}

/// Collects the errors of all sections.
#[derive(Default)]
struct Report<'a> {
    /// All parts, one after another.
    text: &'a str,
    /// The start of each part.
    starts: &'a [usize],
    parts: &'a [FilePart],
    errors: RefCell<Vec<Error>>,
    /// The known keys, if the caller wants a description of the document.
    schema: Option<RefCell<Schema>>,
    /// The lines with values, if the caller wants the text of the document.
    lines: Option<RefCell<Lines>>,
}

/// Reads a whole document with `read`, which returns `None` only after it refused something. Later parts take
/// precedence over earlier ones.
pub(crate) fn read_document<T>(
    parts: &[FilePart],
    read: impl FnOnce(&mut Section<'_>) -> Option<T>,
) -> Result<T, Errors> {
    let (text, starts) = merge::join(parts);
    let report = Report { text: &text, starts: &starts, parts, ..Report::default() };
    let mut document = DeTable::new();
    for (part, start) in parts.iter().zip(&starts) {
        let (table, syntax) = DeTable::parse_recoverable(&part.text);
        for error in syntax {
            let offset = error.span().map_or(0, |span| span.start);
            report.add(start + offset, String::new(), Problem::Syntax(error.message().to_owned()));
        }
        merge::overlay(&mut document, merge::shift(table.into_inner(), *start), &text);
    }
    if !report.errors.borrow().is_empty() {
        return Err(Errors::new(report.errors.into_inner()));
    }
    let value = Section::open(&report, String::new(), 0, Some(&document), read);
    match (value, report.errors.into_inner()) {
        (Some(value), errors) if errors.is_empty() => Ok(value),
        (_, errors) => Err(Errors::new(errors)),
    }
}

/// Returns the keys that `read` asks for: all of them, as long as they do not depend on values.
pub(crate) fn describe<T>(read: impl FnOnce(&mut Section<'_>) -> T) -> Schema {
    let report = Report { schema: Some(RefCell::default()), ..Report::default() };
    Section::open(&report, String::new(), 0, None, read);
    report.schema.map(RefCell::into_inner).unwrap_or_default()
}

/// The most errors that are reported: more are of no use, and each costs a walk through the text.
const MAX_ERRORS: usize = 100;

impl Report<'_> {
    fn is_full(&self) -> bool {
        self.errors.borrow().len() == MAX_ERRORS
    }

    fn add(&self, offset: usize, key: String, problem: Problem) {
        if self.is_full() {
            return;
        }
        let part = self.starts.partition_point(|start| *start <= offset).saturating_sub(1);
        let start = self.starts.get(part).copied().unwrap_or(0);
        let before = self.text.get(start..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        let column = before[line_start..].chars().count() + 1;
        // If there is only one part, the caller knows its name.
        let file = self.parts.get(part).filter(|_| self.parts.len() > 1).map(|part| part.name.clone());
        self.errors.borrow_mut().push(Error { file, part, line, column, key, problem });
    }
}

impl<'a> Section<'a> {
    fn open<T>(
        report: &'a Report<'a>,
        path: String,
        offset: usize,
        table: Option<&'a DeTable<'a>>,
        read: impl FnOnce(&mut Self) -> T,
    ) -> T {
        Self { report, path, offset, table, inherited: Vec::new(), known: Vec::new(), has_named_sections: false }
            .read_by(read)
    }

    fn read_by<T>(mut self, read: impl FnOnce(&mut Self) -> T) -> T {
        let value = read(&mut self);
        self.refuse_unknown_keys();
        value
    }

    /// Returns whether the section itself has `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    /// Returns whether there is any section in double brackets of this name, whether or not it is valid.
    pub(crate) fn has_any(&self, key: &str) -> bool {
        let value = self.table.and_then(|table| table.get(key));
        value.is_some_and(|value| value.get_ref().as_array().is_none_or(|sections| !sections.is_empty()))
    }

    /// Returns whether `key` has no value.
    pub(crate) fn lacks(&self, key: &str) -> bool {
        !self.has(key) && !self.inherits(key)
    }

    /// Returns whether `key` has a value only because of another section, which then reports errors in it.
    fn inherits(&self, key: &str) -> bool {
        !self.has(key) && self.inherited.iter().any(|table| table.contains_key(key))
    }

    /// Reads a subsection.
    pub(crate) fn section<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
        let path = self.path_of(key);
        let value = self.value_of(key, || schema::table(&path));
        let table = value.and_then(|value| value.get_ref().as_table());
        if let (Some(value), None) = (value, table) {
            self.refuse(key, unfit(value.get_ref(), "a section: its name in brackets on a line of its own"));
        }
        let offset = value.map_or(self.offset, |value| value.span().start);
        Section::open(self.report, path, offset, table, read)
    }

    /// Reads a subsection if the text has it.
    pub(crate) fn optional_section<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Section<'_>) -> Option<T>,
    ) -> Option<T> {
        let path = self.path_of(key);
        let is_there = self.value_of(key, || schema::table(&path)).is_some();
        if is_there || self.report.schema.is_some() { self.section(key, read) } else { None }
    }

    /// Reads sections of the same name, each with the name in double brackets as its header.
    pub(crate) fn sections<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&mut Section<'_>) -> Option<T>,
    ) -> Vec<T> {
        let path = self.path_of(key);
        self.rehearse(&path, &mut read);
        let read = |section: &Self, element: &'a Spanned<DeValue<'a>>| match element.get_ref().as_table() {
            Some(table) => Section::open(section.report, path.clone(), element.span().start, Some(table), &mut read),
            None => {
                section.refuse(key, unfit(element.get_ref(), "sections: the name in double brackets before each"));
                None
            }
        };
        self.elements(key, || schema::tables(&path), read).unwrap_or_default()
    }

    /// Reports a problem at the value of `key`, or at the header of the section if it has none.
    pub(crate) fn refuse(&self, key: &'static str, problem: Problem) {
        if self.inherits(key) {
            return;
        }
        let value = self.table.and_then(|table| table.get(key));
        self.report.add(value.map_or(self.offset, |value| value.span().start), self.path_of(key), problem);
    }

    /// Refuses `key` where it has no meaning, and omits it when writing. Call it before asking for the key.
    pub(crate) fn refuse_unless(&self, means: bool, key: &'static str, cause: &'static str, remedy: &'static str) {
        if !means && self.has(key) {
            self.refuse(key, Problem::Contradiction { cause, remedy });
        }
        if let Some(lines) = self.report.lines.as_ref().filter(|_| !means) {
            lines.borrow_mut().leave_out(key);
        }
    }

    /// Refuses two values that contradict each other, at the first that is the section's own; if neither is, the
    /// section that has them refuses them.
    pub(crate) fn refuse_pair(&self, pair: [&'static str; 2], cause: &'static str, remedy: &'static str) {
        if let Some(key) = pair.into_iter().find(|key| self.has(key)) {
            self.refuse(key, Problem::Contradiction { cause, remedy });
        }
    }

    /// Refuses a list in which two entries have the same distinguishing value.
    pub(crate) fn refuse_shared<T, K: Ord>(
        &self,
        key: &'static str,
        entries: &[T],
        distinct: impl FnMut(&T) -> K,
        cause: &'static str,
    ) {
        let different: BTreeSet<K> = entries.iter().map(distinct).collect();
        if different.len() < entries.len() {
            self.refuse(key, Problem::Contradiction { cause, remedy: "remove or change one of them" });
        }
    }

    /// Asks for the value of `key`, which `schema` describes.
    fn value_of(&mut self, key: &'static str, schema: impl FnOnce() -> Json) -> Option<&'a Spanned<DeValue<'a>>> {
        if !self.known.contains(&key) {
            self.known.push(key);
            if let Some(described) = &self.report.schema {
                described.borrow_mut().add(&self.path, key, schema());
            }
        }
        self.table.into_iter().chain(self.inherited.iter().copied()).find_map(|table| table.get(key))
    }

    /// Returns whether `key` was asked for.
    fn is_key(&self, key: &str) -> bool {
        self.known.contains(&key)
    }

    /// Refuses a section that has neither of two keys; the message names the first, which is the more usual.
    pub(crate) fn require_one_of(&self, either: [&'static str; 2], expected: &'static str) {
        if let Some(described) = &self.report.schema {
            described.borrow_mut().demand_one_of(&self.path, either);
        }
        let [key, _] = either;
        if either.iter().all(|key| self.lacks(key)) {
            self.refuse(key, Problem::Missing { key, expected });
        }
    }

    /// Describes `key` as required.
    fn demand(&self, key: &'static str) {
        if let Some(described) = &self.report.schema {
            described.borrow_mut().demand(&self.path, key);
        }
    }

    /// Describes a section that may occur any number of times.
    fn rehearse<T>(&self, path: &str, read: impl FnOnce(&mut Section<'_>) -> T) {
        if self.report.schema.is_some() {
            Section::open(self.report, path.to_owned(), self.offset, None, read);
        }
    }

    fn read<T: Value>(&self, key: &'static str, value: &Spanned<DeValue<'_>>) -> Option<T> {
        let read = T::read(value.get_ref());
        if read.is_none() && !self.inherits(key) {
            self.report.add(value.span().start, self.path_of(key), T::problem(value.get_ref()));
        }
        read
    }

    fn elements<T>(
        &mut self,
        key: &'static str,
        schema: impl FnOnce() -> Json,
        mut read: impl FnMut(&Self, &'a Spanned<DeValue<'a>>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let value = self.value_of(key, schema)?;
        let Some(elements) = value.get_ref().as_array() else {
            self.refuse(key, unfit(value.get_ref(), "a list in brackets, its elements separated by commas"));
            return None;
        };
        Some(elements.iter().filter_map(|element| read(self, element)).collect())
    }

    fn path_of(&self, key: impl Display) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    fn refuse_unknown_keys(self) {
        for (key, value) in self.table.into_iter().flatten() {
            if self.is_key(key.get_ref()) || (self.has_named_sections && value.get_ref().is_table()) {
                continue;
            }
            // Each suggestion takes a comparison with all known keys.
            if self.report.is_full() {
                return;
            }
            let suggestion = closest(key.get_ref(), &self.known);
            let problem = Problem::UnknownKey { suggestion, known: self.known.clone() };
            self.report.add(key.span().start, self.path_of(key.get_ref()), problem);
        }
    }
}

/// Returns the known name that is closest to `name`, if one is close.
fn closest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let compared = known.iter().map(|known| (strsim::jaro_winkler(known, name), *known));
    let closest = compared.max_by(|(a, _), (b, _)| a.total_cmp(b));
    closest.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, known)| known)
}
