//! What can be wrong with a configuration, said so that it can be put right: where, which key, what, and what to write
//! instead.

use std::borrow::Borrow;
use std::fmt;

use masque::template::TemplateError;

use crate::pattern::NotAPattern;

/// What is wrong with a text, a hundred errors at most, in the order of its lines. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Errors(Vec<Error>);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}line {line}, column {column}: {}{problem}", Prefix(file.as_deref().unwrap_or_default()), Prefix(key))]
pub struct Error {
    /// Which of several files it is in.
    pub file: Option<String>,
    /// The place of the file among them.
    pub(crate) part: usize,
    /// The line, counted from 1.
    pub line: usize,
    /// The column, counted in characters from 1.
    pub column: usize,
    /// The path of the key, such as `relay.limits.connections`; empty where there is none.
    pub key: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with a key, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is not TOML. The parser's own words.
    #[error("this is not TOML: {0}; see https://toml.io for what may stand here")]
    Syntax(String),
    /// No such key.
    #[error("unknown key; {}", Remedy { suggestion: *suggestion, known })]
    UnknownKey {
        /// The known key that is closest, if one is close.
        suggestion: Option<&'static str>,
        /// All keys that may stand here.
        known: Vec<&'static str>,
    },
    /// The name of a section that does not exist.
    #[error("there is no {name:?}; {}", Remedy { suggestion: suggestion.as_deref(), known })]
    UnknownName {
        /// The name as written.
        name: String,
        /// The known name that is closest, if one is close.
        suggestion: Option<String>,
        /// Names that may stand here, the first few.
        known: Vec<String>,
    },
    /// A section that takes keys from itself, or is reached through itself: the names on the way round.
    #[error("this goes round in a circle, {}; remove it from one of them", .0.join(", then "))]
    Circle(Vec<String>),
    /// A key without which the section means nothing.
    #[error("missing; add {key} = {expected}")]
    Missing {
        /// The key to add.
        key: &'static str,
        /// What its value looks like.
        expected: &'static str,
    },
    /// A list without which the section means nothing.
    #[error("missing or empty; add {key} = [...] with {expected}")]
    MissingList {
        /// The key to add.
        key: &'static str,
        /// What an element looks like.
        expected: &'static str,
    },
    /// A value of the wrong kind.
    #[error("{found} does not fit; write {expected}")]
    Unfit {
        /// The value as written, shortened.
        found: String,
        /// What to write.
        expected: &'static str,
    },
    /// A URI template that names no target.
    #[error("{found} is no template for targets; {error}")]
    Template {
        /// The value as written, shortened.
        found: String,
        /// What to change.
        error: TemplateError,
    },
    /// A network that is meant to be another one, or an address.
    #[error(transparent)]
    HostBits(#[from] NotAPattern),
    /// A text where there has to be a number, such as one with a unit.
    #[error(
        "{found} is no number; write a whole number from {min} to {max}, without quotes, and without the unit, which the key names"
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
        /// What does not go together.
        cause: &'static str,
        /// What to change.
        remedy: &'static str,
    },
}

impl Errors {
    /// Sorts by position, so that a report reads like the file.
    pub(crate) fn new(mut errors: Vec<Error>) -> Self {
        errors.sort_by_key(|error| (error.part, error.line, error.column));
        Self(errors)
    }

    /// Returns the errors in the order of their lines.
    pub fn iter(&self) -> std::slice::Iter<'_, Error> {
        self.0.iter()
    }
}

impl std::error::Error for Errors {}

/// One error a line.
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
            None if self.known.is_empty() => f.write_str("there is none yet; add one, or remove this"),
            None => write!(f, "known here: {}", self.known.join(", ")),
        }
    }
}
