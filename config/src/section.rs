//! Reads one table of the text key by key, and reports errors with their positions.
//!
//! A section learns its schema as it is read: keys that were never asked for are unknown. So each key is named only
//! once. Reading continues after an error, with the default in place of the refused value, so that one run finds as
//! many errors as possible. What only follows from a refused value is not told; see [`report`].
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

use crate::error::{Errors, Problem};

mod keys;
mod lines;
mod merge;
mod named;
mod report;
mod schema;
mod syntax;
mod value;

pub use self::merge::FilePart;
pub(crate) use self::{
    keys::write,
    named::{ClassName, HopName, PathName, ScheduleName},
    report::{SectionHeader, SectionKey},
    schema::Schema,
    value::{Value, Word, text, unsigned, whole_number, words},
};
use self::{
    report::{KeyDoubt, Report},
    value::unfit,
};

/// Names whose Jaro-Winkler similarity to every known key is below this get no suggestion.
const SIMILAR: f64 = 0.8;

/// A table that is being read, described or written; an absent one reads as empty.
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    header: SectionHeader,
    table: Option<&'a DeTable<'a>>,
    /// Whether the text has another value in place of the section, which was refused: nothing is missing in it then.
    is_refused: bool,
    /// The keys of the sections around it and its own, as far as the text can have each of these only once.
    within: Vec<SectionKey>,
    /// The sections whose keys apply if the section's own table lacks them, the nearest first. See [`named`].
    inherited: Vec<(SectionHeader, &'a DeTable<'a>)>,
    /// The key that names the nearest of them.
    like: Option<&'static str>,
    known: Vec<&'static str>,
    /// Whether tables that are not `known` are sections with names of the operator's choice.
    has_named_sections: bool,
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
        for (offset, message) in syntax::mistakes(&part.text, table.get_ref(), syntax) {
            report.add(start + offset, String::new(), Problem::Syntax(message), Vec::new());
        }
        merge::overlay(&mut document, merge::shift(table.into_inner(), *start), &text);
    }
    if report.len() > 0 {
        return Err(Errors::new(report.into_errors()));
    }
    let value = Section::open(&report, SectionHeader::default(), Some(&document), read);
    match (value, report.into_errors()) {
        (Some(value), errors) if errors.is_empty() => Ok(value),
        (_, errors) => Err(Errors::new(errors)),
    }
}

/// Returns the keys that `read` asks for: all of them, as long as they do not depend on values.
pub(crate) fn describe<T>(read: impl FnOnce(&mut Section<'_>) -> T) -> Schema {
    let report = Report { schema: Some(RefCell::default()), ..Report::default() };
    Section::open(&report, SectionHeader::default(), None, read);
    report.schema.map(RefCell::into_inner).unwrap_or_default()
}

impl<'a> Section<'a> {
    fn open<T>(
        report: &'a Report<'a>,
        header: SectionHeader,
        table: Option<&'a DeTable<'a>>,
        read: impl FnOnce(&mut Self) -> T,
    ) -> T {
        Self::new(report, header, table).read_by(read)
    }

    fn new(report: &'a Report<'a>, header: SectionHeader, table: Option<&'a DeTable<'a>>) -> Self {
        let (within, inherited, known) = Default::default();
        let (is_refused, like, has_named_sections) = Default::default();
        Self { report, header, table, is_refused, within, inherited, like, known, has_named_sections }
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

    /// Returns the value of `key` if it is text, without asking for the key.
    pub(crate) fn text(&self, key: &str) -> Option<&'a str> {
        self.table?.get(key)?.get_ref().as_str()
    }

    /// Returns whether `key` has no value.
    pub(crate) fn lacks(&self, key: &str) -> bool {
        !self.has(key) && !self.inherits(key)
    }

    /// Returns whether `key` has a value only because of another section, which then reports errors in it.
    fn inherits(&self, key: &str) -> bool {
        !self.has(key) && self.inherited.iter().any(|(_, table)| table.contains_key(key))
    }

    /// Reads a subsection.
    pub(crate) fn section<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
        let path = self.path_of(key);
        let value = self.value_of(key, || schema::table(&path));
        let table = value.and_then(|value| value.get_ref().as_table());
        if let (Some(value), None) = (value, table) {
            self.refuse(key, unfit(value.get_ref(), "a section: its name in brackets on a line of its own"));
        }
        let offset = value.map_or(self.header.offset, |value| value.span().start);
        let mut section = Section::new(self.report, SectionHeader { path, offset }, table);
        section.is_refused = self.is_refused || (value.is_some() && table.is_none());
        section.within = self.within.iter().cloned().chain([self.header.key(key)]).collect();
        section.read_by(read)
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

    /// Reads sections of the same name, each with the name in double brackets as its header. Sections with mistakes are left
    /// out, because what differs from other sections or agrees with them may be what was mistaken.
    pub(crate) fn sections<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&mut Section<'_>) -> Option<T>,
    ) -> Vec<T> {
        let path = self.path_of(key);
        self.rehearse(&path, &mut read);
        let read = |section: &Self, element: &'a Spanned<DeValue<'a>>| match element.get_ref().as_table() {
            Some(table) => {
                let header = SectionHeader { path: path.clone(), offset: element.span().start };
                let before = section.report.len();
                let mut opened = Section::new(section.report, header, Some(table));
                opened.within.clone_from(&section.within);
                let value = opened.read_by(&mut read);
                value.filter(|_| section.report.len() == before)
            }
            None => {
                section.refuse(key, unfit(element.get_ref(), "sections: the name in double brackets before each"));
                None
            }
        };
        self.elements(key, || schema::tables(&path), read).unwrap_or_default()
    }

    /// Returns these keys of the section, together with what decides about their values if the section has none.
    pub(crate) fn keys(&self, keys: &[&'static str]) -> Vec<SectionKey> {
        let mut all = Vec::new();
        for &key in keys {
            all.push(self.header.key(key));
            if let Some(like) = self.like.filter(|_| !self.has(key)) {
                let headers = || self.inherited.iter().map(|(header, _)| header).chain([&self.header]);
                all.extend(headers().flat_map(|header| [header.key(key), header.key(like)]));
            }
        }
        all
    }

    /// Returns the section's header.
    pub(crate) const fn header(&self) -> &SectionHeader {
        &self.header
    }

    /// Notes that what is named by `key` cannot be known.
    pub(crate) fn doubt(&self, key: &'static str) {
        self.report.doubt(self.header.key(key), KeyDoubt::Wrong);
    }

    /// Reports a problem at the value of `key`, or at the header of the section if it has none.
    pub(crate) fn refuse(&self, key: &'static str, problem: Problem) {
        let from = if matches!(problem, Problem::Contradiction { .. }) { self.keys(&[key]) } else { Vec::new() };
        self.refuse_by(key, problem, from);
    }

    /// Reports a problem, as [`refuse`](Self::refuse), that follows from the values of the keys `from`. It is left out if one of
    /// them is wrong.
    pub(crate) fn refuse_by(&self, key: &'static str, problem: Problem, mut from: Vec<SectionKey>) {
        if self.inherits(key) || self.is_refused || self.report.is_full() {
            return;
        }
        match problem {
            Problem::Contradiction { .. } => from.extend_from_slice(&self.within),
            Problem::Missing { key: lacking, .. } | Problem::MissingList { key: lacking, .. } => {
                from.extend(self.keys(&[lacking]).into_iter().chain(self.within.iter().cloned()));
                self.report.doubt(self.header.key(lacking), KeyDoubt::Missing);
            }
            _ => self.doubt(key),
        }
        let value = self.table.and_then(|table| table.get(key));
        let offset = value.map_or(self.header.offset, |value| value.span().start);
        self.report.add(offset, self.path_of(key), problem, from);
    }

    /// Refuses more sections below `key` than there may be. Which names they have is then in doubt.
    pub(crate) fn refuse_excess(&self, key: &'static str, cause: &'static str, remedy: &'static str) {
        self.refuse_by(key, Problem::Contradiction { cause, remedy }, Vec::new());
        self.doubt(key);
    }

    /// Refuses `key` where it has no meaning because of the values of `by`, and omits it when writing. Call it before asking for
    /// the key.
    pub(crate) fn refuse_unless(
        &self,
        means: bool,
        key: &'static str,
        by: &[&'static str],
        (cause, remedy): (&'static str, &'static str),
    ) {
        if !means && self.has(key) {
            self.refuse_by(key, Problem::Contradiction { cause, remedy }, self.keys(by));
        }
        if let Some(lines) = self.report.lines.as_ref().filter(|_| !means) {
            lines.borrow_mut().leave_out(key);
        }
    }

    /// Refuses two values that contradict each other, at the first that is the section's own; if neither is, the
    /// section that has them refuses them.
    pub(crate) fn refuse_pair(&self, pair: [&'static str; 2], cause: &'static str, remedy: &'static str) {
        if let Some(key) = pair.into_iter().find(|key| self.has(key)) {
            self.refuse_by(key, Problem::Contradiction { cause, remedy }, self.keys(&pair));
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
            self.refuse_by(key, Problem::Contradiction { cause, remedy: "remove or change one of them" }, Vec::new());
        }
    }

    /// Asks for the value of `key`, which `schema` describes.
    fn value_of(&mut self, key: &'static str, schema: impl FnOnce() -> Json) -> Option<&'a Spanned<DeValue<'a>>> {
        if !self.known.contains(&key) {
            self.known.push(key);
            if let Some(described) = &self.report.schema {
                described.borrow_mut().add(&self.header.path, key, schema());
            }
        }
        self.table.into_iter().chain(self.inherited.iter().map(|(_, table)| *table)).find_map(|table| table.get(key))
    }

    /// Returns whether `key` was asked for.
    fn is_key(&self, key: &str) -> bool {
        self.known.contains(&key)
    }

    /// Refuses a section that has neither of two keys; the message names the first, which is the more usual.
    pub(crate) fn require_one_of(&self, either: [&'static str; 2], expected: &'static str) {
        if let Some(described) = &self.report.schema {
            described.borrow_mut().demand_one_of(&self.header.path, either);
        }
        let [key, _] = either;
        if either.iter().all(|key| self.lacks(key)) {
            self.refuse_by(key, Problem::Missing { key, expected }, self.keys(&either));
        }
    }

    /// Describes `key` as required.
    fn demand(&self, key: &'static str) {
        if let Some(described) = &self.report.schema {
            described.borrow_mut().demand(&self.header.path, key);
        }
    }

    /// Describes a section that may occur any number of times.
    fn rehearse<T>(&self, path: &str, read: impl FnOnce(&mut Section<'_>) -> T) {
        if self.report.schema.is_some() {
            let header = SectionHeader { path: path.to_owned(), offset: self.header.offset };
            Section::open(self.report, header, None, read);
        }
    }

    fn read<T: Value>(&self, key: &'static str, value: &Spanned<DeValue<'_>>) -> Option<T> {
        let read = T::read(value.get_ref());
        if read.is_none() && !self.inherits(key) {
            self.doubt(key);
            self.report.add(value.span().start, self.path_of(key), T::problem(value.get_ref()), Vec::new());
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
        let path = &self.header.path;
        if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }
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
            if let Some(meant) = suggestion {
                self.doubt(meant);
            }
            let problem = Problem::UnknownKey { suggestion, known: self.known.clone() };
            self.report.add(key.span().start, self.path_of(key.get_ref()), problem, Vec::new());
        }
    }
}

/// Returns the known name that is closest to `name`, if one is close.
fn closest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let compared = known.iter().map(|known| (strsim::jaro_winkler(known, name), *known));
    let closest = compared.max_by(|(a, _), (b, _)| a.total_cmp(b));
    closest.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, known)| known)
}
