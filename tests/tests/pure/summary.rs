//! The summary of a log of `tests/run`.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use lab::site::Folder;

/// Returns whether a run with this log succeeds, and the last line of its summary.
fn summary(log: &str) -> (bool, String) {
    let mut command = Command::new("awk");
    command.args(["-f", concat!(env!("CARGO_MANIFEST_DIR"), "/summary.awk")]);
    let mut awk = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    awk.stdin.take().unwrap().write_all(log.as_bytes()).unwrap();
    let output = awk.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    (output.status.success(), said.lines().last().unwrap().to_owned())
}

#[test]
fn tests_of_all_executables_are_added_up() {
    let log = "=== pure one\ntest a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured\n=== ended 0\n\
               === unasked two\nskipped: b: the vm ring was not requested\n=== ended 0\n\
               === the pure ring took 1 s\n";
    assert_eq!(summary(log), (true, "1 passed, 0 failed, 1 skipped".to_owned()));
}

/// The log of a ring of a build of which cargo says this.
fn log_of(ring: &str, artifacts: &str) -> String {
    let folder = Folder::new(&format!("paced-{}-0-run-{}", std::process::id(), artifacts.len())).unwrap();
    folder.write("artifacts.json", artifacts).unwrap();
    let functions = r#"eval "$(sed -n '/^executables() /,/^}/p; /^ended() /p; /^run_natively() /,/^}/p' "$1")""#;
    let script = format!("set -euo pipefail; limit_s=10; {functions}; run_natively \"$2\" env");
    let mut bash = Command::new("bash");
    bash.args(["-c", &script, "bash", concat!(env!("CARGO_MANIFEST_DIR"), "/run"), ring]);
    let path = folder.path();
    let output = bash.env("CARGO_TARGET_DIR", path).env("TMPDIR", path).env("LC_ALL", "C").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_ring_without_executables_fails_the_run() {
    let artifact = |name: &str| {
        let target = serde_json::json!({ "kind": ["test"], "name": name });
        let artifact = serde_json::json!({
            "reason": "compiler-artifact", "profile": { "test": true }, "executable": "/bin/true",
            "manifest_path": concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "target": target,
        });
        format!("{artifact}\n")
    };
    assert_eq!(log_of("netns", &artifact("netns_control")), "=== netns netns_control\n=== ended 0\n");
    for artifacts in [String::new(), artifact("pure"), artifact("netns") + "cut o"] {
        let log = log_of("netns", &artifacts);
        assert_eq!(summary(&log), (false, "0 passed, 1 failed, 0 skipped".to_owned()), "{log}");
    }
}

#[test]
fn a_step_that_prepares_a_ring_runs_no_test_and_may_fail() {
    assert_eq!(summary("=== netns clients\n=== ended 0\n"), (true, "0 passed, 0 failed, 0 skipped".to_owned()));
    assert_eq!(summary("=== netns clients\n=== ended 3\n"), (false, "0 passed, 1 failed, 0 skipped".to_owned()));
}

#[test]
fn an_executable_that_does_not_end_well_fails_the_run() {
    let passed = "test result: ok. 1 passed; 0 failed; 0 ignored\n";
    for log in ["=== pure one\n", "=== pure one\n=== ended 124\n", "=== netns one\n=== ended 0\n"] {
        let (is_green, said) = summary(log);
        assert!(!is_green && said.contains(" 1 failed"), "{log}: {said}");
    }
    assert!(!summary(&format!("=== pure one\n{passed}=== netns two\n=== ended 1\n")).0);
    assert!(!summary("=== vm one\r\ntest a ... ok\r\n=== vm tests/vm/exact\n=== ended 125\n").0, "its guest died");
}

#[test]
fn a_test_that_a_requested_ring_skips_fails_the_run() {
    let log = "=== netns one\nskipped: a: the kernel lacks this\n\
               test result: ok. 2 passed; 0 failed; 0 ignored\n=== ended 0\n";
    assert_eq!(summary(log), (false, "1 passed, 0 failed, 1 skipped".to_owned()));
}

#[test]
fn a_command_in_a_gap_may_say_that_it_skips_a_part_of_its_work() {
    let log = "=== pure one\ntest result: ok. 1 passed; 0 failed; 0 ignored\n=== ended 0\n\
               === also make deny\nskipped: advisories, because a variable names no database\n=== ended 0\n";
    assert_eq!(summary(log), (true, "1 passed, 0 failed, 1 skipped".to_owned()));
    assert!(
        !summary("=== also make deny\nskipped: advisories\n=== ended 2\n").0,
        "a command that fails, fails the run"
    );
}
