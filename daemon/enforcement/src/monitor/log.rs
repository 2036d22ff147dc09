//! The log of the privileged processes: lines on standard error.

use std::{
    fmt,
    io::{self, Write as _},
};

/// Writes a line of keeper or monitor to standard error. Without a reader, which the daemon may have lost, the line is
/// lost: `eprintln` would panic.
pub(super) fn say(words: fmt::Arguments<'_>) {
    _ = io::stderr().write_all(format!("paced monitor: {words}\n").as_bytes());
}
