//! The behaviour of `pacectl` if the reader of its output is gone.

use std::{fs, io, os::unix::fs::PermissionsExt as _, process::Command};

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

/// Acknowledges what a recording is told, and shows one sample.
const PERF: &str = r#"#!/bin/sh
case $1 in
record) while read -r said; do echo ack; [ "$said" != stop ] || exit 0; done ;;
script) printf 'paced 7 [000] 1.000000001: cycles:\n\t55d2 main\n\n' ;;
esac
"#;

#[test]
fn a_closed_pipe_leaves_no_recording_of_perf_behind() {
    let folder = std::env::temp_dir().join(format!("pacectl-closed-{}", std::process::id()));
    let [programs, recordings] = ["programs", "recordings"].map(|name| folder.join(name));
    [&programs, &recordings].into_iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    fs::write(programs.join("perf"), PERF).unwrap();
    fs::set_permissions(programs.join("perf"), fs::Permissions::from_mode(0o755)).unwrap();
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pacectl"));
    command.args(["flamegraph", "--seconds", "1", "--pid", &std::process::id().to_string(), "--output"]).arg(&folder);
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let output = command.env("PATH", path).env("TMPDIR", &recordings).stdout(writer).output().unwrap();
    let drawn = folder.join("on-cpu.svg").exists();
    let left = fs::read_dir(&recordings).unwrap().count();
    fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && drawn, "{}: {said}", output.status);
    assert_eq!(left, 0, "{said}");
}
