//! Sections whose names the operator chooses, such as `[class.bulk]`, and which may take keys from each other.

use std::iter::once;

use serde_json::Value as Json;
use toml::{
    Spanned,
    de::{DeString, DeTable, DeValue},
};

use super::{
    Report, Section, SectionHeader, Value,
    report::KeyDoubt,
    schema::{self, ANY, NAME},
    text, unfit,
};
use crate::{error::Problem, text::quoted};

const MAX_NAME_BYTES: usize = 32;

/// The sections `[key.NAME]` below another section, in the order of the text. A section whose name or value was refused is among
/// them, because others may refer to it.
pub(crate) struct NamedSections<'a> {
    report: &'a Report<'a>,
    /// The path of `key`.
    path: String,
    sections: Vec<Named<'a>>,
}

struct Named<'a> {
    name: &'a str,
    offset: usize,
    table: Option<&'a DeTable<'a>>,
    /// Whether the text has another value in place of the section.
    is_refused: bool,
}

impl<'a> Section<'a> {
    /// Finds the sections `[key.NAME]` and refuses invalid ones. The section named `first`, if any, comes first, and
    /// exists without keys if the text lacks it.
    pub(crate) fn named_sections(&mut self, key: &'static str, first: Option<&'static str>) -> NamedSections<'a> {
        let path = self.path_of(key);
        let value = self.value_of(key, || schema::named_tables(&format!("{path}.{ANY}")));
        let table = value.and_then(|value| value.get_ref().as_table());
        if let (Some(value), None) = (value, table) {
            self.refuse(key, unfit(value.get_ref(), "named sections, such as [class.bulk] on a line of its own"));
        }
        self.collect_named(path, key, table.into_iter().flatten(), first)
    }

    /// Finds the sections `[section.NAME]` of this section, the document's section `key`, which has keys as well: every table
    /// whose name is not a key asked for so far. Call it after asking for all keys.
    pub(crate) fn own_named_sections(&mut self, key: &'static str) -> NamedSections<'a> {
        self.has_named_sections = true;
        if let Some(described) = &self.report.schema {
            described.borrow_mut().add_named(&self.header.path);
        }
        let own = self.table.into_iter().flatten();
        let own = own.filter(|(key, value)| !self.is_key(key.get_ref()) && value.get_ref().is_table());
        self.collect_named(self.header.path.clone(), key, own, None)
    }

    fn collect_named(
        &self,
        path: String,
        key: &'static str,
        entries: impl Iterator<Item = (&'a Spanned<DeString<'a>>, &'a Spanned<DeValue<'a>>)>,
        first: Option<&'static str>,
    ) -> NamedSections<'a> {
        let mut sections = Vec::new();
        for (name, value) in entries {
            let table = value.get_ref().as_table();
            let problem = if !is_name(name.get_ref()) {
                // Others may refer to the name that was meant.
                self.report.doubt(SectionHeader::default().key(key), KeyDoubt::Wrong);
                let expected = "a name of 1 to 32 lower-case letters, digits and hyphens";
                Some(Problem::Unfit { found: format!("{:?}", name.get_ref()), expected })
            } else {
                let expected = "a named section, such as [class.bulk] on a line of its own";
                table.is_none().then(|| unfit(value.get_ref(), expected))
            };
            if let Some(problem) = problem {
                let path = format!("{path}.{}", name.get_ref());
                self.report.add(name.span().start, path, problem, Vec::new());
            }
            let (name, offset) = (name.get_ref().as_ref(), value.span().start);
            sections.push(Named { name, offset, table, is_refused: table.is_none() });
        }
        let first = if self.report.schema.is_some() { Some(ANY) } else { first };
        if let Some(first) = first.filter(|first| sections.iter().all(|section| section.name != *first)) {
            sections.push(Named { name: first, offset: self.header.offset, table: None, is_refused: false });
        }
        sections.sort_by_key(|section| (Some(section.name) != first, section.offset));
        NamedSections { report: self.report, path, sections }
    }
}

/// The name of a section of some kind; the section may not exist.
pub(crate) trait Name: Value + From<String> + Into<String> {
    /// The key of the document below which such sections are.
    const SECTIONS: &'static str;
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident in $sections:literal: $expected:literal,)+) => {$(
        $(#[$doc])*
        pub(crate) struct $name(String);

        impl Name for $name {
            const SECTIONS: &'static str = $sections;
        }

        impl From<String> for $name {
            fn from(name: String) -> Self {
                Self(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl Value for $name {
            const EXPECTED: &'static str = $expected;

            fn read(value: &DeValue<'_>) -> Option<Self> {
                String::read(value).map(Self)
            }

            fn write(&self) -> String {
                quoted(&self.0)
            }

            /// The schema of names that a section may have.
            fn schema() -> Json {
                text(NAME)
            }
        }
    )+};
}

names! {
    /// The name of a class.
    ClassName in "class": "the name of a class in quotes",
    /// The name of a schedule.
    ScheduleName in "schedule": "the name of a [schedule.NAME] in quotes",
    /// The name of a hop.
    HopName in "hop": "the name of a [hop.NAME] in quotes",
}

/// The name of a path, in its own section.
pub(crate) struct PathName(String);

impl From<String> for PathName {
    fn from(name: String) -> Self {
        Self(name)
    }
}

impl From<PathName> for String {
    fn from(name: PathName) -> Self {
        name.0
    }
}

impl Value for PathName {
    const EXPECTED: &'static str = "a name of 1 to 32 lower-case letters, digits and hyphens in quotes";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        String::read(value).filter(|name| is_name(name)).map(Self)
    }

    fn write(&self) -> String {
        quoted(&self.0)
    }

    fn schema() -> Json {
        text(NAME)
    }
}

impl<'a> NamedSections<'a> {
    /// Returns the number of sections.
    pub(crate) const fn len(&self) -> usize {
        self.sections.len()
    }

    /// Drops all but the first `len`.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.sections.truncate(len);
    }

    /// Returns the names; none occurs twice.
    pub(crate) fn names(&self) -> Vec<&'a str> {
        self.sections.iter().map(|section| section.name).collect()
    }

    /// Reads all of them independently.
    pub(crate) fn read<T>(&self, mut read: impl FnMut(&'a str, &mut Section<'a>) -> T) -> Vec<T> {
        self.sections.iter().map(|named| self.open(named).read_by(|section| read(named.name, section))).collect()
    }

    /// Reads all sections. If a section has no value for a key, it takes the value from the section that its `like`
    /// names, and so on. An unknown name ends the search. A section may not be like itself. The time grows with the
    /// cube of the number of sections.
    pub(crate) fn read_like<T>(
        &self,
        like: &'static str,
        mut read: impl FnMut(&'a str, &mut Section<'a>) -> T,
    ) -> Vec<T> {
        let read = |(place, named): (usize, &Named<'a>)| {
            let ancestors = self.ancestors(place, like);
            let inherited = |place: &usize| Some((self.header(&self.sections[*place]), self.sections[*place].table?));
            let mut section = self.open(named);
            section.inherited = ancestors.iter().filter_map(inherited).collect();
            section.like = Some(like);
            section.read_by(|section| {
                self.refuse_cycle(section, like, place, &ancestors);
                read(named.name, section)
            })
        };
        self.sections.iter().enumerate().map(read).collect()
    }

    /// Reads all of them independently. Each may name another as its `next`; a section that leads back to itself that
    /// way is refused.
    pub(crate) fn read_chained<T>(
        &self,
        next: &'static str,
        mut read: impl FnMut(&'a str, &mut Section<'a>) -> T,
    ) -> Vec<T> {
        let read = |(place, named): (usize, &Named<'a>)| {
            self.open(named).read_by(|section| {
                self.refuse_cycle(section, next, place, &self.ancestors(place, next));
                read(named.name, section)
            })
        };
        self.sections.iter().enumerate().map(read).collect()
    }

    fn open(&self, named: &Named<'a>) -> Section<'a> {
        let mut section = Section::new(self.report, self.header(named), named.table);
        section.is_refused = named.is_refused;
        section
    }

    fn header(&self, named: &Named<'_>) -> SectionHeader {
        SectionHeader { path: format!("{}.{}", self.path, named.name), offset: named.offset }
    }

    /// Refuses a cycle once, at its first member.
    fn refuse_cycle(&self, section: &Section<'a>, key: &'static str, place: usize, ancestors: &[usize]) {
        if ancestors.contains(&place) && ancestors.iter().all(|other| place <= *other) {
            let cycle = once(&place).chain(ancestors).map(|place| self.sections[*place].name.to_owned());
            section.refuse(key, Problem::Cycle(cycle.collect()));
        }
    }

    /// Returns the places of the sections from which the one at `place` takes keys, the nearest first; itself, as the
    /// last, only if it is part of a cycle.
    fn ancestors(&self, place: usize, like: &str) -> Vec<usize> {
        let mut ancestors = Vec::new();
        let mut last = place;
        while let Some(next) = self.parent(last, like).filter(|next| !ancestors.contains(next)) {
            ancestors.push(next);
            last = next;
        }
        ancestors
    }

    fn parent(&self, place: usize, like: &str) -> Option<usize> {
        let name = self.sections[place].table?.get(like)?.get_ref().as_str()?;
        self.sections.iter().position(|section| section.name == name)
    }
}

fn is_name(text: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}
