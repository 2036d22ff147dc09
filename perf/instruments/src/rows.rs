//! What rows of results have in common, whatever their columns are.

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;

/// Reads lines of JSON, of any kind of rows. If a kind has no origin, the origin in the line is ignored.
///
/// # Errors
/// When a line is no such row; the error names its number.
pub fn parse_lines<R: DeserializeOwned>(text: &str) -> Result<Vec<R>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| serde_json::from_str(line).with_context(|| format!("line {}", at + 1))).collect()
}

/// Returns each value once, in the order in which they appear first.
pub fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    all.for_each(|one| {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    });
    distinct
}
