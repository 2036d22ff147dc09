//! Bounds the sizes of crates, of test executables and of files, so that a reader can enter each of them.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::arrows::members;

/// The most lines of Rust in a crate, with its unit tests, and in each of its test executables, examples and benchmarks.
const MOST_LINES: usize = 12_000;

/// The most lines of a file.
const MOST_LINES_OF_A_FILE: usize = 512;

/// The sources of a member of the workspace, and each of its other targets.
fn targets(member: &Path) -> Vec<PathBuf> {
    let folders = ["tests", "examples", "benches"].into_iter().filter_map(|name| fs::read_dir(member.join(name)).ok());
    folders.flatten().map(|entry| entry.unwrap().path()).chain([member.join("src")]).collect()
}

/// The files of Rust at a path or below it, each with its lines.
fn sizes(path: &Path) -> Vec<(PathBuf, usize)> {
    if path.is_dir() {
        fs::read_dir(path).unwrap().flat_map(|entry| sizes(&entry.unwrap().path())).collect()
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        vec![(path.to_owned(), fs::read_to_string(path).unwrap().lines().count())]
    } else {
        Vec::new()
    }
}

#[test]
fn no_crate_and_no_file_outgrows_its_reader() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut seen = 0;
    for target in members(root).iter().flat_map(|member| targets(&root.join(member))) {
        let sizes = sizes(&target);
        seen += sizes.len();
        let lines: usize = sizes.iter().map(|(_, lines)| lines).sum();
        assert!(lines <= MOST_LINES, "{} has {lines} lines: divide it", target.display());
        for (file, lines) in sizes {
            assert!(lines <= MOST_LINES_OF_A_FILE, "{} has {lines} lines: divide it", file.display());
        }
    }
    assert!(seen > 500, "only {seen} files of Rust were found");
}
