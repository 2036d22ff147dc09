//! The tests that run in guests of the vm ring.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{fs, path::Path};

/// The lists of the vm ring (`tests/run`).
const LISTS: [&str; 4] = ["exact", "programs", "service", "subset"];

/// The tests that no list has, because they take too long. `perf/vm-paths.sh` runs them, and keeps their figures.
const MEASUREMENTS: [&str; 2] = [
    "downloads::a_download_in_ranges_is_measured_over_uplinks_of_every_kind",
    "paths::tunnels_and_a_nested_connection_go_on_while_links_addresses_and_relays_change",
];

/// The names of the tests in a file of a test executable.
fn tests_of(file: &Path) -> Vec<String> {
    let (text, module) = (fs::read_to_string(file).unwrap(), file.file_stem().unwrap().to_str().unwrap());
    let after = text.split("#[test]").skip(1);
    let name = |item: &str| Some(item.split_once("fn ")?.1.split_once('(')?.0.to_owned());
    after.map(|item| format!("{module}::{}", name(item).unwrap())).collect()
}

/// Whether a line of a list, `EXECUTABLE FILTER… [--skip PART]…`, runs a test of the executable `vm`.
fn runs(line: &str, test: &str) -> bool {
    let mut words = line.split_whitespace();
    if words.next() != Some("vm") {
        return false;
    }
    let (mut is_named, mut has_names) = (false, false);
    while let Some(word) = words.next() {
        match word {
            "--skip" if words.next().is_some_and(|part| test.contains(part)) => return false,
            _ if word.starts_with("--") => {}
            _ => (is_named, has_names) = (is_named || test.contains(word), true),
        }
    }
    is_named || !has_names
}

#[test]
fn every_test_of_a_guest_is_in_a_list_of_the_ring_or_is_a_measurement() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let lists = LISTS.map(|list| fs::read_to_string(root.join("vm").join(list)).unwrap()).concat();
    let script = fs::read_to_string(root.join("../perf/vm-paths.sh")).unwrap();
    let files = fs::read_dir(root.join("tests/vm")).unwrap().map(|entry| entry.unwrap().path());
    let tests: Vec<_> = files.flat_map(|file| tests_of(&file)).collect();
    assert!(tests.len() > 30, "only {} tests were found", tests.len());
    for test in &tests {
        let (is_listed, is_measurement) =
            (lists.lines().any(|line| runs(line, test)), MEASUREMENTS.contains(&test.as_str()));
        assert!(is_listed != is_measurement, "{test} is in a list: {is_listed}; is a measurement: {is_measurement}");
        assert!(!is_measurement || script.contains(&format!("name={test}\n")), "perf/vm-paths.sh does not run {test}");
    }
    for measurement in MEASUREMENTS {
        assert!(tests.iter().any(|test| test == measurement), "there is no test {measurement}");
    }
}

#[test]
fn a_line_of_a_list_runs_what_its_filters_name_and_it_does_not_skip() {
    for (line, is_run) in [
        ("vm paths:: --test-threads=1", true),
        ("vm bpf:: paths::a", true),
        ("vm --test-threads=1", true),
        ("vm bpf::", false),
        ("vm paths:: --skip a_b", false),
        ("vm --skip c", true),
        ("netns paths::", false),
        ("# vm paths::", false),
    ] {
        assert_eq!(runs(line, "paths::a_b"), is_run, "{line}");
    }
}
