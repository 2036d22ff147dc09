//! Reads files that a configuration names: none keeps its reader waiting for a writer, or fills the memory.

use std::{
    fs::OpenOptions,
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::Path,
};

/// The maximum size of a file that a configuration names, in bytes. The longest ones are the revocation lists of large authorities.
pub const MOST_CONFIGURED_BYTES: u64 = 16 << 20;

/// Reads a file that a configuration names.
///
/// # Errors
/// It cannot be read, is not a regular file, or has more than 16 MiB.
pub fn read_configured(path: &Path) -> io::Result<Vec<u8>> {
    // Otherwise, opening a FIFO waits until another process writes to it.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() {
        let what = match (kind.is_dir(), kind.is_fifo()) {
            (true, _) => "a folder",
            (_, true) => "a FIFO",
            _ => "a device",
        };
        return Err(io::Error::other(format!("it is {what}: put a regular file in its place")));
    }
    let mut contents = Vec::new();
    // Its size says too little: it may grow, and files in /proc have none.
    file.take(MOST_CONFIGURED_BYTES + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > MOST_CONFIGURED_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 16 MiB"));
    }
    Ok(contents)
}

/// Reads a text file that a configuration names.
///
/// # Errors
/// As [`read_configured`], or it is not text in UTF-8.
pub fn read_configured_text(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(read_configured(path)?);
    text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not text in UTF-8"))
}
