//! The position of a raw value in a body.

use std::ops::Range;

/// Returns the range of a raw value in the text that it was read from, of which it is a part.
pub(super) fn place(raw: &str, text: &str) -> Option<Range<usize>> {
    let start = (raw.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    Some(start..start + raw.len())
}
