//! The log of the privileged processes (lines on standard error), and how they shorten messages.

use std::{
    fmt,
    io::{self, Write as _},
};

/// Writes a line of keeper or monitor to standard error. Without a reader, which the daemon may have lost, the line is
/// lost: `eprintln` would panic.
pub(super) fn say(words: fmt::Arguments<'_>) {
    _ = io::stderr().write_all(format!("paced monitor: {words}\n").as_bytes());
}

/// Returns the first line of a message, without the kernel's explanation of a refused program, which begins in it.
pub(super) fn first_line(message: &str) -> &str {
    let line = message.lines().next().unwrap_or_default();
    line.split(". Verifier output:").next().unwrap_or(line)
}

/// Puts a message on one line and cuts out the middle of a long one: the kernel explains a refused program instruction by instruction.
pub(super) fn abridged(message: &str) -> String {
    const HEAD: usize = 400;
    const TAIL: usize = 600;
    let message = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" / ");
    let length = message.chars().count();
    if length <= HEAD + TAIL {
        return message;
    }
    let (head, tail) = (message.chars().take(HEAD), message.chars().skip(length - TAIL));
    head.chain(" … ".chars()).chain(tail).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_keeps_its_beginning_and_end() {
        assert_eq!(abridged("short"), "short");
        assert_eq!(abridged("why:\n 0: r1\n\n1: r2\n"), "why: / 0: r1 / 1: r2");
        let long = format!("begin{}end", "é".repeat(100_000));
        let short = abridged(&long);
        assert!(short.starts_with("beginé") && short.ends_with("éend") && short.len() < 3_000);
    }

    #[test]
    fn a_part_is_told_with_the_kernels_reason_but_without_its_explanation() {
        let refused = "without CAP_PERFMON: Permission denied (os error 13). Verifier output: 0: R1=ctx()\n1: r2";
        assert_eq!(first_line(refused), "without CAP_PERFMON: Permission denied (os error 13)");
        assert_eq!(first_line("one"), "one");
    }
}
