//! Collects the errors of all sections, and tells mistakes from what only follows from them.
//!
//! A refused value leaves its key with the default, and a misspelt key leaves it absent. Checks of that key against
//! others would then find faults that nobody made. So each such error names the keys from which it follows, and is left
//! out if one of them is in doubt.

use std::{cell::RefCell, collections::BTreeMap};

use super::{FilePart, Schema, lines::Lines};
use crate::error::{Error, Problem};

/// The most errors that are reported: more are of no use, and each costs a walk through the text.
pub(super) const MAX_ERRORS: usize = 100;

/// A section as it is told from others: those in double brackets share their path.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SectionHeader {
    pub(super) path: String,
    pub(super) offset: usize,
}

/// A key of a certain section, whether or not the section has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SectionKey {
    header: SectionHeader,
    key: &'static str,
}

impl SectionHeader {
    /// Returns a key of the section.
    pub(crate) fn key(&self, key: &'static str) -> SectionKey {
        SectionKey { header: self.clone(), key }
    }
}

/// Why the value of a key is not the one that the operator meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KeyDoubt {
    /// The key is missing.
    Missing,
    /// The value was refused, or the key was misspelt.
    Wrong,
}

/// The errors found so far.
#[derive(Default)]
pub(super) struct Report<'a> {
    /// All parts, one after another.
    pub(super) text: &'a str,
    /// The start of each part.
    pub(super) starts: &'a [usize],
    pub(super) parts: &'a [FilePart],
    /// Each with the keys from which it follows.
    pub(super) errors: RefCell<Vec<(Error, Vec<SectionKey>)>>,
    /// Why keys have no value, or another than was meant.
    pub(super) doubts: RefCell<BTreeMap<SectionKey, KeyDoubt>>,
    /// The known keys, if the caller wants a description of the document.
    pub(super) schema: Option<RefCell<Schema>>,
    /// The lines with values, if the caller wants the text of the document.
    pub(super) lines: Option<RefCell<Lines>>,
}

impl Report<'_> {
    /// Returns how many errors there are.
    pub(super) fn len(&self) -> usize {
        self.errors.borrow().len()
    }

    /// Returns whether further errors are left out.
    pub(super) fn is_full(&self) -> bool {
        self.len() == MAX_ERRORS
    }

    /// Notes that the value of a key is not the one that was meant.
    pub(super) fn doubt(&self, key: SectionKey, doubt: KeyDoubt) {
        let mut doubts = self.doubts.borrow_mut();
        let known = doubts.entry(key).or_insert(doubt);
        *known = doubt.max(*known);
    }

    /// Adds an error that follows from the values of the keys `from`.
    pub(super) fn add(&self, offset: usize, key: String, problem: Problem, from: Vec<SectionKey>) {
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
        self.errors.borrow_mut().push((Error { file, part, line, column, key, problem }, from));
    }

    /// Returns the errors, except for each error that only follows from another one.
    pub(super) fn into_errors(self) -> Vec<Error> {
        let (errors, doubts) = (self.errors.into_inner(), self.doubts.into_inner());
        let is_own = |(error, from): &&(Error, Vec<SectionKey>)| {
            // A missing key is in doubt because of this very error.
            let is_missing = matches!(error.problem, Problem::Missing { .. } | Problem::MissingList { .. });
            let excuse = if is_missing { KeyDoubt::Wrong } else { KeyDoubt::Missing };
            from.iter().all(|key| doubts.get(key).is_none_or(|doubt| *doubt < excuse))
        };
        let own: Vec<Error> = errors.iter().filter(is_own).map(|(error, _)| error.clone()).collect();
        // The cause of all may be beyond the last error that is reported.
        if own.is_empty() { errors.into_iter().map(|(error, _)| error).collect() } else { own }
    }
}
