//! A plan of processes with few requests: its counts and the form of its rows, but no times.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{fs, process::Command};

use experiment::serving::processes::{Row, tables};
use plan::ProcessesPlan;

/// Returns a plan of some seconds: five times as fast, one rate, three policies, two generations of thresholds.
fn text(name: &str) -> String {
    let plan = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/plans/routing-processes.toml")).unwrap();
    let changed = [
        ("name = \"routing-processes\"", format!("name = \"{name}\"")),
        ("faster = 1\n", "faster = 5\n".to_owned()),
        ("evaluations = 5", "evaluations = 2".to_owned()),
        ("rates = [2, 6, 20], duration_s = 20", "rates = [3], duration_s = 5".to_owned()),
        ("requests = 120", "requests = 10".to_owned()),
        ("rounds = 4\n", "rounds = 1\n".to_owned()),
        ("tokens = 200\n", "tokens = 20\n".to_owned()),
        ("[changes]\n", "[changes]\ngpus = 2\nlengths.output_tokens = 30\n".to_owned()),
        (
            "[changes.tuned.predicted]\n",
            "[changes.tuned.predicted]\ngenerations = 2\ncandidates = 4\nelites = 2\n".to_owned(),
        ),
    ];
    changed.iter().fold(plan, |plan, (from, to)| {
        assert!(plan.contains(from), "{from}");
        plan.replacen(from, to, 1)
    })
}

#[test]
fn each_request_has_one_end_and_each_row_names_its_seed_and_both_sides() {
    lab::ring!(Netns);
    let folder = std::env::temp_dir().join(format!("paced-processes-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (file, json) = (folder.join("tiny.toml"), folder.join("rows.json"));
    fs::write(&file, text("tiny")).unwrap();
    let policies = ["1.3b", "round-robin", "tuned"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_paced-perf"));
    command.arg("run").arg(&file).args(["--policy", &policies.join(","), "--repetitions", "1", "--json"]).arg(&json);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let lines = fs::read_to_string(&json).unwrap();
    let rows = Row::parse_all(&lines).unwrap();
    let plan = ProcessesPlan::from_toml(&text("tiny")).unwrap();
    let seed = plan.seeds().unwrap().evaluation;
    // Two workloads, three policies.
    assert_eq!(rows.len(), 6, "{lines}");
    for row in &rows {
        assert!(policies.contains(&row.policy.as_str()) && (row.seed, row.repetitions) == (seed, 1), "{row:?}");
        assert!(row.requests > 0 && row.failed == 0, "{row:?}");
        for side in [&row.processes, &row.simulated] {
            let answered: usize = side.selected.values().sum();
            assert!(side.met <= answered && answered <= row.requests, "{row:?}");
            assert!((0.0..=side.met as f64 / row.requests as f64 + 1e-4).contains(&side.score), "{row:?}");
            let others = side.selected.iter().filter(|(model, count)| *model != "1.3b" && **count > 0).count();
            assert!(row.policy != "1.3b" || others == 0, "{row:?}");
        }
        assert_eq!(row.simulated.selected.values().sum::<usize>(), row.requests, "{row:?}");
        assert_eq!(row.rate, (row.workload == "stable").then_some(3.0), "at the speed of the other plan");
        assert!(row.link.starts_with("tbf, 20 Mbit/s"), "{row:?}");
    }
    let offered =
        |workload: &str| rows.iter().filter(|row| row.workload == workload).map(|row| row.requests).collect::<Vec<_>>();
    assert_eq!(offered("bursts"), [10; 3]);
    assert!(offered("stable").windows(2).all(|pair| pair[0] == pair[1]), "all policies get the same requests");
    let some =
        rows.iter().any(|row| row.policy == "round-robin" && row.processes.selected.values().all(|count| *count > 0));
    assert!(some, "in turns, each model answers: {rows:#?}");
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["fingerprint"], plan.fingerprint());
        assert_eq!(line["clock"], "native");
        for key in ["machine", "kernel", "commit", "trees", "command"] {
            assert!(line[key].as_str().is_some_and(|text| !text.is_empty()), "{key}");
        }
    }
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(printed.trim_end(), tables(&rows).trim_end());
    fs::remove_dir_all(&folder).unwrap();
}
