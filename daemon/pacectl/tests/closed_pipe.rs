//! The behaviour of `pacectl` if the reader of its output is gone.

use std::{io, process::Command};

#[test]
fn a_closed_pipe_ends_commands_in_peace() {
    for arguments in [&["token", "new", "alice"][..], &["--json", "token", "new", "alice"], &["completions", "bash"]] {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let program = env!("CARGO_BIN_EXE_pacectl");
        let output = Command::new(program).args(arguments).stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{arguments:?}: {}: {said}", output.status);
    }
}
