//! Tests of `paced` with a standard output that no program reads.

use std::{io, process::Command};

#[test]
fn a_closed_pipe_ends_the_program_in_peace() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let program = env!("CARGO_BIN_EXE_paced");
    let output = Command::new(program).args(["config", "schema"]).stdout(writer).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{}: {said}", output.status);
}
