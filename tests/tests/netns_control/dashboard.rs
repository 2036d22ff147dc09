//! The dashboard in `perf/grafana.json`, against what a relay shows.

use serde_json::Value;
use tests::site::{Family, Site, Terms};

use super::{VOICE, connect};

/// All strings of a JSON value that stand where Grafana expects a query.
fn queries(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(values) => values.iter().flat_map(queries).collect(),
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(key, value)| match value {
                Value::String(query) if key == "expr" || key == "query" => vec![query.as_str()],
                other => queries(other),
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// The names of metrics in a query of PromQL.
fn metrics(query: &str) -> impl Iterator<Item = &str> {
    query
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter_map(|word| word.strip_prefix("paced_"))
}

#[test]
fn every_query_of_the_dashboard_is_about_metrics_that_a_relay_has() {
    tests::ring!(Netns);
    let dashboard = include_str!("../../../perf/grafana.json");
    let dashboard: Value = serde_json::from_str(dashboard).unwrap();
    let queries = queries(&dashboard);
    let wanted: Vec<_> = queries.iter().flat_map(|query| metrics(query)).collect();
    assert!(queries.len() > 20 && wanted.len() >= queries.len() - 1, "each but that for data sources: {queries:#?}");

    let sections = format!("{VOICE}[kernel]\ndevices = [\"client\", \"target\"]\n");
    let terms = Terms { sections: &sections, limits: "tunnels_per_connection = 1", ..Terms::default() };
    let site = Site::new(terms).unwrap();
    site.client(async || {
        // What is counted by reason shows only once there was one.
        let client = connect(&site).await;
        let tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert!(client.open(site.target(Family::V4, 7)).await.is_err(), "one too many");
        drop(tunnel);
        site.counted("a tunnel that was closed", |counts| counts.has("tunnels_closed_total")).await.unwrap();
    })
    .unwrap();
    let counts = site.wait_for_counts("the monitor", |counts| counts.of("kernel_monitor") == 1).unwrap();
    let missing: Vec<_> = wanted.iter().filter(|name| !counts.has(name)).collect();
    assert!(missing.is_empty(), "{missing:?} are not in {counts:#?}");
}
