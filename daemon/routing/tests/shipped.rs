//! The policies that are installed with paced.

use std::{collections::BTreeSet, fs, path::Path};

use routing::{learn, policy::PolicyFile, scenario::Scenario};
use sched::route::RoutingPolicy;
use sha2::{Digest as _, Sha256};

#[test]
fn shipped_policies_have_the_scores_of_their_log_and_beat_the_rule() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/policies");
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    let (scenario, log) = (text("three-models.toml"), text("three-models.log"));
    let sha256: String = Sha256::digest(&scenario).iter().map(|byte| format!("{byte:02x}")).collect();
    // Two of the rates, and few seeds: the intervals of the log are from ten.
    let scenario = Scenario { requests_per_sec: vec![48.0, 96.0], ..Scenario::parse(&scenario).unwrap() };
    let logged = |name: &str, requests_per_sec: f64| -> f64 {
        let rows = log.split_once(&format!("at {requests_per_sec} requests/s")).unwrap().1;
        let row = rows.lines().find_map(|row| row.strip_prefix(name)).unwrap();
        row.trim().split(' ').next().unwrap().parse().unwrap()
    };
    let means = |name: &str, policy: &RoutingPolicy| {
        let rows = learn::evaluate(&scenario, policy, 3);
        for row in &rows {
            let (played, logged) = (row.score.mean, logged(name, row.requests_per_sec));
            assert!((played - logged).abs() < 0.02, "{name} at {}: {played}, not {logged}", row.requests_per_sec);
        }
        rows.iter().map(|row| row.score.mean).sum::<f64>() / 2.0
    };
    let rule = means("rule", &RoutingPolicy::Rule { margin: 1.1 });
    for name in ["three-models-thresholds.toml", "three-models-network.safetensors"] {
        let bytes = fs::read(folder.join(name)).unwrap();
        let made = String::from_utf8_lossy(&bytes);
        assert!(made.contains(&sha256), "{name} is of another scenario");
        let policy = learn::fit(&scenario, &PolicyFile::parse(&bytes).unwrap()).unwrap();
        let mean = means(name, &policy);
        assert!(mean > rule, "{name}: {mean}, and the rule {rule}");
    }
}

#[test]
fn the_manual_explains_every_key_of_a_scenario_and_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    // It is written with all keys, also those with defaults.
    let written = Scenario::parse(&text("config/policies/three-models.toml")).unwrap().to_toml().unwrap();
    let keys: BTreeSet<_> = written
        .lines()
        .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()).filter(|key| !key.is_empty()))
        .collect();
    let manual = text("docs/models.md");
    let section = manual.split_once("### Keys of a scenario\n").unwrap().1;
    let section = section.split_once("\n### ").unwrap().0;
    let explained: BTreeSet<_> =
        section.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned())).collect();
    assert_eq!(explained, keys);
}
