//! Files of model routing: policies, scenarios and recorded decisions. An operator may get them from another person.

use routing::{decision, policy::PolicyFile, scenario::Scenario};

/// Policies as thresholds or as weights: a policy that was read can be written, and is the same when it is read again.
pub fn routing_policy(input: &[u8]) {
    let Ok(file) = PolicyFile::parse(input) else { return };
    let bytes = file.to_bytes("by the fuzzer").unwrap_or_else(|error| panic!("{error:#}"));
    let again = PolicyFile::parse(&bytes).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(again, file);
    assert!(file.check(&file.models).is_ok() && file.check(&[]).is_err());
}

/// Scenarios: a scenario that was read can be written, and is the same when it is read again.
pub fn routing_scenario(input: &[u8]) {
    let Ok(scenario) = str::from_utf8(input).map_err(drop).and_then(|text| Scenario::parse(text).map_err(drop)) else {
        return;
    };
    let text = scenario.to_toml().unwrap_or_else(|error| panic!("{error:#}"));
    let again = Scenario::parse(&text).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(again.to_toml().ok(), Some(text));
    _ = scenario.setup();
}

/// Lines of decisions: each is read or counted as wrong. A decision that was read can be written, and is the same when
/// it is read again.
pub fn routing_decisions(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let (decisions, wrong) = decision::read(text);
    let lines = text.lines().filter(|line| !line.trim().is_empty()).count();
    assert_eq!(decisions.len() + wrong, lines);
    let written: String = decisions.iter().map(decision::Decision::line).collect();
    let (again, wrong) = decision::read(&written);
    assert_eq!((again, wrong), (decisions, 0));
}
