//! The beginning of a client's text, as far as errors and records repeat it.

/// How much of a client's own text errors and records repeat, in bytes. A body may consist of one long name, and errors and records do
/// not count against the bound on bodies.
const EXCERPT_BYTES: usize = 256;

/// Returns the beginning of a client's text, for errors and records: at most 256 bytes, in whole letters.
#[must_use]
pub fn excerpt(text: &str) -> &str {
    text.get(..text.floor_char_boundary(EXCERPT_BYTES)).unwrap_or_default()
}
