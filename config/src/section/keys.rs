//! The keys of a table, each described once: its name, its range, its unit and its field.
//!
//! A function walks through the keys of a section and is given the values to hold for keys that the text lacks:
//! defaults when a text is read, and the actual values when one is written. It returns the resulting values in a
//! struct: since it names all fields, a field without a key does not compile. So reading, schema and writing cannot
//! disagree.
//!
//! A writer walks through each section separately, because it decides their order. The walk finds every required key
//! missing, as with [`describe`](super::describe), and these errors are discarded.

use std::{cell::RefCell, fmt::Display, ops::RangeInclusive, time::Duration};

use toml::{Spanned, de::DeValue};

use super::{
    Report, Section, SectionHeader, closest,
    lines::Lines,
    named::Name,
    schema,
    value::{Value, shown, unsigned},
};
use crate::error::Problem;

/// How many names a message lists.
const SHOWN_NAMES: usize = 8;

/// Returns the keys that `walk` visits as lines; includes defaults if `is_whole`.
pub(crate) fn write<T>(is_whole: bool, walk: impl FnOnce(&mut Section<'_>) -> T) -> Vec<String> {
    let report = Report { lines: Some(RefCell::new(Lines::new(is_whole))), ..Report::default() };
    Section::open(&report, SectionHeader::default(), None, walk);
    report.lines.map(|lines| lines.into_inner().into_vec()).unwrap_or_default()
}

impl Section<'_> {
    /// Asks for a value.
    pub(crate) fn value<T: Value>(&mut self, key: &'static str, held: T) -> T {
        self.ask(key, Some(&held)).unwrap_or(held)
    }

    /// Asks for an optional value.
    pub(crate) fn optional<T: Value>(&mut self, key: &'static str, held: Option<T>) -> Option<T> {
        self.ask(key, held.as_ref()).or(held)
    }

    /// Asks for a required value.
    pub(crate) fn require<T: Value>(&mut self, key: &'static str, held: Option<T>) -> Option<T> {
        if self.value_of(key, schema::one::<T>).is_none() {
            self.refuse(key, Problem::Missing { key, expected: T::EXPECTED });
        }
        self.demand(key);
        self.optional(key, held)
    }

    /// Asks for a list; invalid elements are refused one by one.
    pub(crate) fn list<T: Value>(&mut self, key: &'static str, held: Vec<T>) -> Vec<T> {
        self.optional_list(key, Some(held)).unwrap_or_default()
    }

    /// Asks for a list as [`list`](Self::list) does, which the caller refuses if it has more than `most` elements.
    pub(crate) fn limited_list<T: Value>(&mut self, key: &'static str, most: usize, held: Vec<T>) -> Vec<T> {
        _ = self.value_of(key, || schema::limited_list::<T>(most));
        self.list(key, held)
    }

    /// Asks for an optional list, as [`list`](Self::list) does.
    pub(crate) fn optional_list<T: Value>(&mut self, key: &'static str, held: Option<Vec<T>>) -> Option<Vec<T>> {
        self.say(key, || held.as_ref().map(|held| list(held.iter().map(T::write))));
        self.elements(key, schema::list::<T>, |section, element| section.read(key, element)).or(held)
    }

    /// Asks for a required list, which must have an element.
    pub(crate) fn require_list<T: Value>(&mut self, key: &'static str, held: Option<Vec<T>>) -> Option<Vec<T>> {
        let value = self.value_of(key, schema::filled_list::<T>).and_then(|value| value.get_ref().as_array());
        if !self.has(key) || value.is_some_and(|elements| elements.is_empty()) {
            self.refuse(key, Problem::MissingList { key, expected: T::EXPECTED });
        }
        self.demand(key);
        self.optional_list(key, held)
    }

    /// Asks for an optional value or a list of values, which must have an element.
    pub(crate) fn one_or_list<T: Value>(&mut self, key: &'static str, held: Option<Vec<T>>) -> Option<Vec<T>> {
        match self.value_of(key, schema::one_or_list::<T>).map(Spanned::get_ref) {
            None => self.optional_list(key, held),
            Some(DeValue::Array(_)) => self.require_list(key, held),
            Some(_) => self.optional(key, None).map(|one| vec![one]),
        }
    }

    /// Like [`one_or_list`](Self::one_or_list), but required.
    pub(crate) fn require_one_or_list<T: Value>(&mut self, key: &'static str, held: Option<Vec<T>>) -> Option<Vec<T>> {
        if self.value_of(key, schema::one_or_list::<T>).is_none() {
            self.refuse(key, Problem::Missing { key, expected: T::EXPECTED });
        }
        self.demand(key);
        self.one_or_list(key, held)
    }

    /// Walks through each table of a list by `walk`; a plain value in the list is short for a table.
    pub(crate) fn list_or_tables<T, V: Value + Into<T>>(
        &mut self,
        key: &'static str,
        held: Vec<T>,
        walk: impl Fn(&mut Section<'_>, Option<&T>) -> Option<T>,
    ) -> Vec<T> {
        let path = self.path_of(key);
        let read = |section: &mut Section<'_>| walk(section, None);
        self.rehearse(&path, read);
        let table = |of| format!("{{ {} }}", write(true, |section| walk(section, Some(of))).join(", "));
        self.say(key, || Some(list(held.iter().map(table))));
        let schema = || schema::list_or_tables::<V>(&path);
        let elements = self.elements(key, schema, |section, element| match element.get_ref().as_table() {
            Some(table) => {
                let header = SectionHeader { path: path.clone(), offset: element.span().start };
                Section::open(section.report, header, Some(table), read)
            }
            None => section.read::<V>(key, element).map(V::into),
        });
        elements.unwrap_or(held)
    }

    /// Asks for a name, which must be one of `names`.
    pub(crate) fn name<N: Name>(&mut self, key: &'static str, names: &[&str], held: Option<String>) -> Option<String> {
        let name: String = self.optional(key, held.map(N::from))?.into();
        if names.contains(&&name[..]) {
            return Some(name);
        }
        // A comparison with each name takes long, and there would be one for each name that is unknown.
        if self.report.is_full() {
            return None;
        }
        let suggestion = closest(&name, names).map(str::to_owned);
        let more = (names.len() > SHOWN_NAMES).then_some("...");
        let known = names.iter().copied().take(SHOWN_NAMES).chain(more).map(str::to_owned).collect();
        let sections = SectionHeader::default().key(N::SECTIONS);
        self.refuse_by(key, Problem::UnknownName { name, suggestion, known }, vec![sections]);
        None
    }

    /// Asks for a whole number within `range`, which must fit `N`.
    pub(crate) fn number<N>(&mut self, key: &'static str, range: RangeInclusive<u64>, held: N) -> N
    where
        N: TryFrom<u64> + Display + Copy,
    {
        self.optional_number(key, range, Some(held)).unwrap_or(held)
    }

    /// Asks for an optional whole number within `range`, which must fit `N`.
    pub(crate) fn optional_number<N>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        held: Option<N>,
    ) -> Option<N>
    where
        N: TryFrom<u64> + Display,
    {
        self.say(key, || held.as_ref().map(N::to_string));
        self.ask_number(key, &range).or(held)
    }

    /// Like [`number`](Self::number), for a number that is written in hexadecimal.
    pub(crate) fn hexadecimal(&mut self, key: &'static str, range: RangeInclusive<u64>, held: u32) -> u32 {
        self.say(key, || Some(format!("{held:#x}")));
        self.ask_number(key, &range).unwrap_or(held)
    }

    /// Asks for a span of time in whole seconds.
    pub(crate) fn seconds(&mut self, key: &'static str, range: RangeInclusive<u64>, held: Duration) -> Duration {
        Duration::from_secs(self.number(key, range, held.as_secs()))
    }

    /// Asks for a span of time in whole milliseconds.
    pub(crate) fn millis(&mut self, key: &'static str, range: RangeInclusive<u64>, held: Duration) -> Duration {
        self.optional_millis(key, range, Some(held)).unwrap_or(held)
    }

    /// Asks for an optional span of time in whole milliseconds.
    pub(crate) fn optional_millis(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        held: Option<Duration>,
    ) -> Option<Duration> {
        self.optional_number(key, range, held.map(|held| held.as_millis() as u64)).map(Duration::from_millis)
    }

    /// Asks by `ask` for keys that have their default if `is_granted`: only a text that includes defaults then has
    /// them.
    pub(crate) fn unless<T>(&mut self, is_granted: bool, ask: impl FnOnce(&mut Self) -> T) -> T {
        self.set_tacit(is_granted);
        let asked = ask(self);
        self.set_tacit(false);
        asked
    }

    fn set_tacit(&self, is_tacit: bool) {
        if let Some(lines) = &self.report.lines {
            lines.borrow_mut().set_tacit(is_tacit);
        }
    }

    fn ask<T: Value>(&mut self, key: &'static str, held: Option<&T>) -> Option<T> {
        self.say(key, || held.map(T::write));
        let value = self.value_of(key, schema::one::<T>)?;
        self.read(key, value)
    }

    fn ask_number<N: TryFrom<u64>>(&mut self, key: &'static str, range: &RangeInclusive<u64>) -> Option<N> {
        let value = self.value_of(key, || schema::number(range))?;
        let number = unsigned(value.get_ref()).filter(|number| range.contains(number));
        let fitting = number.and_then(|number| N::try_from(number).ok());
        if fitting.is_none() {
            let (min, max) = (*range.start(), *range.end());
            let found = shown(value.get_ref());
            let problem = match value.get_ref() {
                DeValue::Integer(_) => Problem::OutOfRange { found, min, max },
                _ => Problem::NotANumber { found, min, max },
            };
            self.refuse(key, problem);
        }
        fitting
    }

    /// Writes the value that `held` returns, if this is a writer and the key should be written.
    fn say(&self, key: &'static str, held: impl FnOnce() -> Option<String>) {
        if let Some(lines) = &self.report.lines {
            lines.borrow_mut().say(key, held);
        }
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}
