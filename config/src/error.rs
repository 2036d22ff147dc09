//! Errors in a configuration, with what is needed to correct them: the place, the key, the problem, and what to write
//! instead.

use std::{borrow::Borrow, fmt};

use masque::template::TemplateError;

use crate::pattern::NotAPattern;

/// The errors in a text, at most a hundred, in the order of its lines. An error that only follows from another one is left out. Never
/// empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors(Vec<Error>);

/// One error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}line {line}, column {column}: {}{problem}", Prefix(file.as_deref().unwrap_or_default()), Prefix(key))]
pub struct Error {
    /// The file, if there are several.
    pub file: Option<String>,
    /// The file's place among them.
    pub(crate) part: usize,
    /// The line, counted from 1.
    pub line: usize,
    /// The column, counted in characters from 1.
    pub column: usize,
    /// The path of the key, such as `relay.limits.connections`; empty if the error concerns none.
    pub key: String,
    /// The problem.
    pub problem: Problem,
}

/// The problem with a key, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is not TOML. In the parser's words.
    #[error("this is not TOML: {0}; see https://toml.io for its syntax")]
    Syntax(String),
    /// No such key.
    #[error("unknown key; {}", Remedy { suggestion: *suggestion, known })]
    UnknownKey {
        /// The known key that is closest, if one is close.
        suggestion: Option<&'static str>,
        /// All keys that are known here.
        known: Vec<&'static str>,
    },
    /// The name of a section that does not exist.
    #[error("there is no {name:?}; {}", Remedy { suggestion: suggestion.as_deref(), known })]
    UnknownName {
        /// The name as written.
        name: String,
        /// The known name that is closest, if one is close.
        suggestion: Option<String>,
        /// Names that can be used here, the first few.
        known: Vec<String>,
    },
    /// A section that takes keys from itself, or is reached through itself: the names around the cycle.
    #[error("this forms a cycle: {}; remove it from one of them", .0.join(", then "))]
    Cycle(Vec<String>),
    /// A missing key that the section requires.
    #[error("missing; add {key} = {expected}")]
    Missing {
        /// The key to add.
        key: &'static str,
        /// What its value looks like.
        expected: &'static str,
    },
    /// A missing or empty list that the section requires.
    #[error("missing or empty; add {key} = [...] with {expected}")]
    MissingList {
        /// The key to add.
        key: &'static str,
        /// What an element looks like.
        expected: &'static str,
    },
    /// A value of the wrong type or form.
    #[error("{found} does not fit; write {expected}")]
    Unfit {
        /// The value as written, shortened.
        found: String,
        /// What to write.
        expected: &'static str,
    },
    /// A URI template that names no target.
    #[error("{found} is not a URI template for targets; {error}")]
    Template {
        /// The value as written, shortened.
        found: String,
        /// What to change.
        error: TemplateError,
    },
    /// A network with bits set after its prefix: probably meant as another network, or as an address.
    #[error(transparent)]
    HostBits(#[from] NotAPattern),
    /// A text in place of a number, such as a number with a unit.
    #[error(
        "{found} is not a number; write a whole number from {min} to {max}, without quotes and without a unit (the unit is in the key's name)"
    )]
    NotANumber {
        /// The value as written, shortened.
        found: String,
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
    },
    /// A number outside its limits.
    #[error("{found} is out of range; write a whole number from {min} to {max}")]
    OutOfRange {
        /// The value as written.
        found: String,
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
    },
    /// A value that contradicts another one.
    #[error("{cause}; {remedy}")]
    Contradiction {
        /// The contradiction.
        cause: &'static str,
        /// What to change.
        remedy: &'static str,
    },
}

impl Error {
    const fn position(&self) -> (usize, usize, usize) {
        (self.part, self.line, self.column)
    }
}

impl Errors {
    /// Sorts errors by position, so that a report follows the file.
    pub(crate) fn new(mut errors: Vec<Error>) -> Self {
        errors.sort_by_key(Error::position);
        Self(errors)
    }

    /// Returns the errors in the order of their lines.
    pub fn iter(&self) -> std::slice::Iter<'_, Error> {
        self.0.iter()
    }
}

impl std::error::Error for Errors {}

/// One error per line.
impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if index == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

struct Prefix<'a>(&'a str);

impl fmt::Display for Prefix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "{}: ", self.0) }
    }
}

struct Remedy<'a, S> {
    suggestion: Option<&'a str>,
    known: &'a [S],
}

impl<S: Borrow<str>> fmt::Display for Remedy<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.suggestion {
            Some(suggestion) => write!(f, "did you mean {suggestion}?"),
            None if self.known.is_empty() => f.write_str("none is defined yet; define it, or remove this key"),
            None => write!(f, "known here: {}", self.known.join(", ")),
        }
    }
}
