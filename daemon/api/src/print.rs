//! Standard output of programs for humans.
//!
//! `println!` panics if its reader is gone, as behind `| head`. The signal that ends other programs in that case (SIGPIPE,
//! signal(7)) would also end these when a server closes a TLS connection, whose bytes are written like a file's.

use std::{
    fmt,
    io::{self, Write},
    process,
};

/// Prints a line to standard output, as `println!` does; ends the process quietly if the reader is gone.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::print::line(format_args!($($text)*)) };
}

/// Prints a line to standard output; ends the process quietly if the reader is gone.
pub fn line(text: fmt::Arguments<'_>) {
    printed(writeln!(Out, "{text}"));
}

/// Prints a text to standard output as it is; ends the process quietly if the reader is gone.
pub fn text(text: impl AsRef<[u8]>) {
    printed(Out.write_all(text.as_ref()).and_then(|()| Out.flush()));
}

/// Standard output, which ends the process quietly if the reader is gone.
#[derive(Clone, Copy, Debug)]
pub struct Out;

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        unless_closed(io::stdout().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        unless_closed(io::stdout().flush())
    }
}

fn unless_closed<T>(outcome: io::Result<T>) -> io::Result<T> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => process::exit(0),
        outcome => outcome,
    }
}

fn printed(outcome: io::Result<()>) {
    if let Err(error) = outcome {
        // Standard error may be closed as well.
        _ = writeln!(io::stderr(), "cannot print: {error}");
        process::exit(1);
    }
}
