//! Reads one table of the text key by key, and reports what does not fit with its position.
//!
//! A section learns its schema from being read: what was never asked for is unknown. So no key is named twice. Reading
//! goes on after an error, with the default in place of what was refused, so that one run finds as many as possible.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use masque::target::Target;
use masque::template::Template;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Error, Errors, Problem};
use crate::targets::Pattern;

mod merge;
mod named;

pub use self::merge::Part;

/// Names that are further than this from every known key, as Jaro-Winkler similarity, get no suggestion.
const SIMILAR: f64 = 0.8;

/// Something that one word of the configuration says.
pub(crate) trait Word {
    /// Returns the word.
    fn word(&self) -> &'static str;
}

/// Defines a closed set of words: the enum, its `as_str` and `Display`, and how it is read. With `for`, the enum is
/// another crate's, and only how it is read and written is defined.
macro_rules! words {
    (for $name:ident { $($variant:ident = $word:literal,)+ }) => {
        impl $crate::section::Word for $name {
            fn word(&self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl $crate::section::Value for $name {
            const EXPECTED: &'static str = concat!("one of", $(" \"", $word, "\""),+);

            fn read(value: &toml::de::DeValue<'_>) -> Option<Self> {
                match value.as_str()? { $($word => Some(Self::$variant),)+ _ => None }
            }
        }
    };
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// Returns the word that the configuration uses.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                $crate::section::Word::word(&self)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        $crate::section::words! { for $name { $($variant = $word,)+ } }
    };
}
pub(crate) use words;

/// Something that one TOML value can say.
pub(crate) trait Value: Sized {
    /// What to write, as the end of the sentence "write …".
    const EXPECTED: &'static str;

    fn read(value: &DeValue<'_>) -> Option<Self>;

    /// Says why [`read`](Self::read) refused `value`.
    fn problem(value: &DeValue<'_>) -> Problem {
        unfit(value, Self::EXPECTED)
    }
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_bool()
    }
}

impl Value for SocketAddr {
    const EXPECTED: &'static str = "an address and a port, such as \"192.0.2.1:443\" or \"[2001:db8::1]:443\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok().filter(|address: &Self| address.port() != 0)
    }
}

impl Value for Pattern {
    const EXPECTED: &'static str =
        "a network, an address, a name or a name suffix, such as \"10.0.0.0/8\" or \"*.example.org\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }
}

impl Value for Target {
    const EXPECTED: &'static str = "a host and a port, such as \"example.org:443\" or \"[2001:db8::1]:443\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        Self::from_authority(value.as_str()?).ok()
    }
}

impl Value for Template {
    const EXPECTED: &'static str =
        "an absolute URI template, such as \"https://relay.example/masque/{target_host}/{target_port}/\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        Self::parse(value.as_str()?).ok()
    }

    fn problem(value: &DeValue<'_>) -> Problem {
        match value.as_str().map(Self::parse) {
            Some(Err(error)) => Problem::Template { found: shown(value), error },
            _ => unfit(value, Self::EXPECTED),
        }
    }
}

/// One port as a number, or several as text.
impl Value for RangeInclusive<u16> {
    const EXPECTED: &'static str = "a port from 1 to 65535, or several such as \"8000-8099\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let (first, last) = match value {
            DeValue::Integer(_) => {
                let port = unsigned(value)?.try_into().ok()?;
                (port, port)
            }
            _ => {
                let text = value.as_str()?;
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                (first.parse().ok()?, last.parse().ok()?)
            }
        };
        (1 <= first && first <= last).then_some(first..=last)
    }
}

/// A SHA-256 hash, or anything else of 32 bytes, in hexadecimal digits; colons may stand between the bytes.
impl Value for [u8; 32] {
    const EXPECTED: &'static str = "a SHA-256 hash: 64 hexadecimal digits in quotes";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let text = value.as_str()?.replace(':', "");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut hash = [0; 32];
        for (index, byte) in hash.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
        }
        Some(hash)
    }
}

impl Value for String {
    const EXPECTED: &'static str = "a text of 1 to 255 printable ASCII characters in quotes";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let text = value.as_str()?;
        let fits = (1..=255).contains(&text.len()) && text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        fits.then(|| text.to_owned())
    }
}

impl Value for PathBuf {
    const EXPECTED: &'static str = "an absolute path in quotes, such as \"/etc/paced/file.pem\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().map(Self::from).filter(|path| path.is_absolute())
    }
}

/// A table that is being read; an absent one reads as empty.
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    offset: usize,
    table: Option<&'a DeTable<'a>>,
    /// Tables whose keys hold where the section's own has none, the nearest first. See [`named`].
    inherited: Vec<&'a DeTable<'a>>,
    known: Vec<&'static str>,
}

/// Collects what is wrong, for all sections.
struct Report<'a> {
    /// All parts, one behind the other.
    text: &'a str,
    /// Where each begins.
    starts: &'a [usize],
    parts: &'a [Part],
    errors: RefCell<Vec<Error>>,
}

/// Reads a whole document with `read`, which returns `None` only after something was refused. Of several parts, the later
/// have the last word.
pub(crate) fn read_document<T>(parts: &[Part], read: impl FnOnce(&mut Section<'_>) -> Option<T>) -> Result<T, Errors> {
    let (text, starts) = merge::join(parts);
    let report = Report { text: &text, starts: &starts, parts, errors: RefCell::default() };
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

/// So many errors are told; nobody reads more, and each costs a walk through the text.
const MAX_ERRORS: usize = 100;

impl Report<'_> {
    fn add(&self, offset: usize, key: String, problem: Problem) {
        if self.errors.borrow().len() == MAX_ERRORS {
            return;
        }
        let part = self.starts.partition_point(|start| *start <= offset).saturating_sub(1);
        let start = self.starts.get(part).copied().unwrap_or(0);
        let before = self.text.get(start..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        let column = before[line_start..].chars().count() + 1;
        // Of a single one, whoever asks knows which it is.
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
        Self { report, path, offset, table, inherited: Vec::new(), known: Vec::new() }.read_by(read)
    }

    fn read_by<T>(mut self, read: impl FnOnce(&mut Self) -> T) -> T {
        let value = read(&mut self);
        self.refuse_unknown_keys();
        value
    }

    /// Reads an optional value.
    pub(crate) fn get<T: Value>(&mut self, key: &'static str) -> Option<T> {
        let value = self.value(key)?;
        self.read(key, value)
    }

    /// Reads a value without which the section means nothing.
    pub(crate) fn require<T: Value>(&mut self, key: &'static str) -> Option<T> {
        if self.value(key).is_none() {
            self.refuse(key, Problem::Missing { key, expected: T::EXPECTED });
        }
        self.get(key)
    }

    /// Tells whether the section itself says anything about `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    /// Tells whether `key` has no value.
    pub(crate) fn lacks(&self, key: &str) -> bool {
        !self.has(key) && !self.inherits(key)
    }

    /// Tells whether `key` has a value because of another section only. What is wrong with it is reported there.
    fn inherits(&self, key: &str) -> bool {
        !self.has(key) && self.inherited.iter().any(|table| table.contains_key(key))
    }

    /// Reads a list without which the section means nothing, and which has to have an element.
    pub(crate) fn require_list<T: Value>(&mut self, key: &'static str) -> Option<Vec<T>> {
        let value = self.value(key).and_then(|value| value.get_ref().as_array());
        if !self.has(key) || value.is_some_and(|elements| elements.is_empty()) {
            self.refuse(key, Problem::MissingList { key, expected: T::EXPECTED });
        }
        self.list(key)
    }

    /// Reads an optional list; elements that do not fit are refused one by one.
    pub(crate) fn list<T: Value>(&mut self, key: &'static str) -> Option<Vec<T>> {
        self.elements(key, |section, element| section.read(key, element))
    }

    /// Reads an optional value or a list of such, which has to have an element.
    pub(crate) fn one_or_list<T: Value>(&mut self, key: &'static str) -> Option<Vec<T>> {
        match self.value(key)?.get_ref() {
            DeValue::Array(_) => self.require_list(key),
            _ => self.get(key).map(|one| vec![one]),
        }
    }

    /// Reads a list of tables, read by `detailed`, and of values that say the same in short.
    pub(crate) fn list_or_tables<T, V: Value + Into<T>>(
        &mut self,
        key: &'static str,
        mut detailed: impl FnMut(&mut Section<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.elements(key, |section, element| match element.get_ref().as_table() {
            Some(table) => {
                Section::open(section.report, section.path_of(key), element.span().start, Some(table), &mut detailed)
            }
            None => section.read::<V>(key, element).map(V::into),
        })
    }

    /// Reads a whole number within `range`, which must fit `N`.
    pub(crate) fn number<N: TryFrom<u64>>(&mut self, key: &'static str, range: RangeInclusive<u64>, default: N) -> N {
        self.optional_number(key, range).unwrap_or(default)
    }

    /// Reads a whole number within `range`, which must fit `N`, if the text has it.
    pub(crate) fn optional_number<N: TryFrom<u64>>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<N> {
        let value = self.value(key)?;
        let number = unsigned(value.get_ref()).filter(|number| range.contains(number));
        let fitting = number.and_then(|number| N::try_from(number).ok());
        if fitting.is_none() {
            let (min, max) = (*range.start(), *range.end());
            self.refuse(key, Problem::OutOfRange { found: shown(value.get_ref()), min, max });
        }
        fitting
    }

    /// Reads a span of time in whole seconds.
    pub(crate) fn seconds(&mut self, key: &'static str, range: RangeInclusive<u64>, default: Duration) -> Duration {
        Duration::from_secs(self.number(key, range, default.as_secs()))
    }

    /// Reads a span of time in whole milliseconds.
    pub(crate) fn millis(&mut self, key: &'static str, range: RangeInclusive<u64>, default: Duration) -> Duration {
        self.optional_millis(key, range).unwrap_or(default)
    }

    /// Reads a span of time in whole milliseconds if the text has it.
    pub(crate) fn optional_millis(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<Duration> {
        self.optional_number(key, range).map(Duration::from_millis)
    }

    /// Reads a section below this one.
    pub(crate) fn section<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Section<'_>) -> T) -> T {
        let value = self.value(key);
        let table = value.and_then(|value| value.get_ref().as_table());
        if let (Some(value), None) = (value, table) {
            self.refuse(key, unfit(value.get_ref(), "a section: its name in brackets on a line of its own"));
        }
        let offset = value.map_or(self.offset, |value| value.span().start);
        Section::open(self.report, self.path_of(key), offset, table, read)
    }

    /// Reads a section below this one if the text has it.
    pub(crate) fn optional_section<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Section<'_>) -> Option<T>,
    ) -> Option<T> {
        self.value(key).and_then(|_| self.section(key, read))
    }

    /// Reads sections of the same name, each beginning with the name in double brackets.
    pub(crate) fn sections<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&mut Section<'_>) -> Option<T>,
    ) -> Vec<T> {
        let read = |section: &Self, element: &'a Spanned<DeValue<'a>>| match element.get_ref().as_table() {
            Some(table) => {
                Section::open(section.report, section.path_of(key), element.span().start, Some(table), &mut read)
            }
            None => {
                section.refuse(key, unfit(element.get_ref(), "sections: the name in double brackets before each"));
                None
            }
        };
        self.elements(key, read).unwrap_or_default()
    }

    /// Reports a problem at the value of `key`, or at the head of the section if it has none.
    pub(crate) fn refuse(&self, key: &'static str, problem: Problem) {
        if self.inherits(key) {
            return;
        }
        let value = self.table.and_then(|table| table.get(key));
        self.report.add(value.map_or(self.offset, |value| value.span().start), self.path_of(key), problem);
    }

    /// Refuses `key` where it means nothing.
    pub(crate) fn refuse_unless(&self, means: bool, key: &'static str, cause: &'static str, remedy: &'static str) {
        if !means && self.has(key) {
            self.refuse(key, Problem::Contradiction { cause, remedy });
        }
    }

    /// Refuses two values that contradict each other, at the first that is the section's own; where none is, the
    /// section that has it refuses it.
    pub(crate) fn refuse_pair(&self, keys: [&'static str; 2], cause: &'static str, remedy: &'static str) {
        if let Some(key) = keys.into_iter().find(|key| self.has(key)) {
            self.refuse(key, Problem::Contradiction { cause, remedy });
        }
    }

    /// Refuses a list in which two entries agree in what should tell them apart.
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

    fn value(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        self.table.into_iter().chain(self.inherited.iter().copied()).find_map(|table| table.get(key))
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
        read: impl FnMut(&Self, &'a Spanned<DeValue<'a>>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let value = self.value(key)?;
        let Some(elements) = value.get_ref().as_array() else {
            self.refuse(key, unfit(value.get_ref(), "a list in brackets, its elements separated by commas"));
            return None;
        };
        let mut read = read;
        Some(elements.iter().filter_map(|element| read(self, element)).collect())
    }

    fn path_of(&self, key: impl Display) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    fn refuse_unknown_keys(self) {
        let unknown = self.table.into_iter().flatten().filter(|(key, _)| !self.known.contains(&key.get_ref().as_ref()));
        for (key, _) in unknown {
            let suggestion = closest(key.get_ref(), &self.known);
            let problem = Problem::UnknownKey { suggestion, known: self.known.clone() };
            self.report.add(key.span().start, self.path_of(key.get_ref()), problem);
        }
    }
}

/// Returns what was probably meant by `name`, if anything is close.
fn closest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let similarity = |known: &&str| strsim::jaro_winkler(known, name);
    let closest = known.iter().copied().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    closest.filter(|known| similarity(known) >= SIMILAR)
}

/// Reads a whole number that is not negative, in any radix.
pub(crate) fn unsigned(value: &DeValue<'_>) -> Option<u64> {
    let number = value.as_integer()?;
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

fn unfit(value: &DeValue<'_>, expected: &'static str) -> Problem {
    Problem::Unfit { found: shown(value), expected }
}

/// Shows a value in a message: scalars as written, the rest by kind, so that a message stays one short line.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) if text.chars().count() <= 60 => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Boolean(yes) => yes.to_string(),
        other => format!("this {}", other.type_str()),
    }
}
