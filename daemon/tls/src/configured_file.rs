//! Reads files that a configuration names: none keeps its reader waiting for a writer, or fills the memory.

use std::{io, path::Path};

/// The maximum size of a file that a configuration names, in bytes. The longest ones are the revocation lists of large authorities.
pub const MOST_CONFIGURED_BYTES: u64 = 16 << 20;

/// Reads a file that a configuration names.
///
/// # Errors
/// It cannot be read, is not a regular file, or has more than 16 MiB.
pub fn read_configured(path: &Path) -> io::Result<Vec<u8>> {
    state::read_regular(path, MOST_CONFIGURED_BYTES).map(|(contents, _)| contents)
}

/// Reads a text file that a configuration names.
///
/// # Errors
/// As [`read_configured`], or it is not text in UTF-8.
pub fn read_configured_text(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(read_configured(path)?);
    text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not text in UTF-8"))
}
