//! What the programs do where nobody reads what they print.

use std::{io, process::Command};

#[test]
fn a_closed_pipe_ends_a_program_in_peace() {
    let (paced, pacectl) = (env!("CARGO_BIN_EXE_paced"), env!("CARGO_BIN_EXE_pacectl"));
    for (program, arguments) in [
        (paced, &["config", "schema"][..]),
        (pacectl, &["token", "new", "alice"]),
        (pacectl, &["--json", "token", "new", "alice"]),
        (pacectl, &["completions", "bash"]),
    ] {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let output = Command::new(program).args(arguments).stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{arguments:?}: {}: {said}", output.status);
    }
}
