//! The dashboard in `perf/grafana.json` and the alert rules in `perf/alerts.yml`, compared with a relay's metrics.

use std::collections::BTreeSet;

use api::token::generate_token;
use config::hash::hex;
use lab::{
    client::Client,
    engine::{Engine, Speed},
    promql::{self, Query, Selector},
    site::{Counts, Family, Site, Terms},
};
use serde_json::Value;

use super::VOICE;

/// All queries of panels in a JSON value.
fn queries(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(values) => values.iter().flat_map(queries).collect(),
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(key, value)| match value {
                Value::String(query) if key == "expr" => vec![query.as_str()],
                other => queries(other),
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// The labels that Prometheus adds to each sample.
const ADDED: [&str; 2] = ["instance", "job"];

/// Returns what is wrong with a query, and with the labels that an alert's texts mention, for a daemon with these metrics.
fn mistakes(query: &str, mentioned: &[String], counts: &Counts) -> Vec<String> {
    let read = match Query::parse(query) {
        Ok(read) => read,
        Err(error) => return vec![format!("{query}: {error:#}")],
    };
    let mut mistakes = Vec::new();
    let mut known = BTreeSet::from(ADDED.map(str::to_owned));
    for Selector { metric, conditions } in &read.selectors {
        if metric == "up" {
            continue;
        }
        let samples = counts.labels(metric.strip_prefix("paced_").unwrap_or(metric));
        if samples.is_empty() || !(metric.starts_with("paced_") || metric.starts_with("process_")) {
            mistakes.push(format!("{query}: no metric {metric}"));
        }
        let labels: BTreeSet<_> =
            samples.iter().flat_map(|sample| sample.iter().map(|(name, _)| name.clone())).collect();
        for [label, operator, value] in conditions {
            let has_value = |sample: &Vec<(String, String)>| sample.contains(&(label.clone(), value.clone()));
            if !labels.contains(label) && !ADDED.contains(&&label[..]) {
                mistakes.push(format!("{query}: {metric} has no label {label}"));
            } else if operator == "=" && !ADDED.contains(&&label[..]) && !samples.iter().any(has_value) {
                mistakes.push(format!("{query}: {metric} has no {label}={value:?}"));
            }
        }
        known.extend(labels);
    }
    // An aggregation leaves only the labels that it names.
    let is_grouped = !read.labels.is_empty();
    for label in &read.labels {
        if !known.contains(label) {
            mistakes.push(format!("{query}: no label {label}"));
        }
    }
    for label in mentioned {
        if !known.contains(label) || (is_grouped && query.contains(" by (") && !read.labels.contains(label)) {
            mistakes.push(format!("{query}: {label} is mentioned"));
        }
    }
    mistakes
}

#[test]
fn every_query_of_the_dashboard_and_of_alerts_is_about_metrics_labels_and_values_that_a_relay_has() {
    lab::ring!(Netns);
    let dashboard = include_str!("../../../perf/grafana.json");
    let dashboard: Value = serde_json::from_str(dashboard).unwrap();
    let queries = queries(&dashboard);
    assert!(queries.len() > 20, "{queries:#?}");
    let variable = &dashboard["templating"]["list"][1]["query"];
    assert_eq!(variable, "label_values(paced_connections, instance)");
    let alerts = promql::alerts(include_str!("../../../perf/alerts.yml")).unwrap();
    assert!(alerts.len() > 10, "{alerts:#?}");

    let (token, digest) = generate_token().unwrap();
    let token_lines =
        format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"\nmonthly_quota = \"1 GB\"\n", hex(&digest));
    // An edge has its own metrics, whether or not it reaches its relay.
    let forward = "[[forward]]\nlisten = \"127.0.0.1:5001\"\nrelay = \"https://127.0.0.1:4/{target_host}/{target_port}/\"\n\
                   target = \"127.0.0.1:7\"\n[[path]]\nname = \"only\"\ninterface = \"lo\"\n";
    // A gateway whose engine reports usage, for a user with a quota.
    let (key, key_digest) = generate_token().unwrap();
    let gateway = format!(
        "[gateway]\n[[gateway.model]]\nname = \"large\"\nengines = [\"http://127.0.0.1:8001\"]\n\
         [[gateway.listener]]\naddress = \"127.0.0.1:8300\"\ntls = false\n\
         [[gateway.key]]\nname = \"ann\"\nsha256 = \"{}\"\nmonthly_tokens = 1000\n",
        hex(&key_digest)
    );
    let sections = format!("{token_lines}{VOICE}{forward}{gateway}[kernel]\ndevices = [\"client\", \"target\"]\n");
    let terms = Terms { relay: "", sections: &sections, limits: "tunnels_per_connection = 1", ..Terms::default() };
    let site = Site::new(terms).unwrap();
    site.client(async || {
        // A counter with a reason appears only once it has counted.
        let client = Client::connect(site.access_with_token(&token).unwrap()).await.unwrap();
        let tunnel = client.open(site.target(Family::V4, 7)).await.unwrap();
        assert!(client.open(site.target(Family::V4, 7)).await.is_err(), "the second tunnel exceeds the limit");
        drop(tunnel);
        let stranger = Client::connect(site.access_with_token("wrong").unwrap()).await.unwrap();
        assert!(stranger.open(site.target(Family::V4, 7)).await.is_err(), "the token is not valid");
        site.counted("the tunnel to be closed", |counts| counts.has("tunnels_closed_total")).await.unwrap();
    })
    .unwrap();
    let _engine = Engine::start(&site.chain.relay, 8001, "large", Speed::default()).unwrap();
    // The last one is late.
    for budget_ms in [9_000, 9_000, 1] {
        let mut curl = site.chain.relay.command("curl").unwrap();
        let body =
            r#"{"model":"large","prompt":"x","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#;
        curl.args([
            "-sS",
            "-f",
            "-H",
            &format!("authorization: Bearer {key}"),
            "-H",
            &format!("x-paced-budget-ms: {budget_ms}"),
            "--json",
            body,
        ]);
        let output = curl.arg("http://127.0.0.1:8300/v1/completions").output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let counts = site.wait_for_counts("the monitor to run", |counts| counts.of("kernel_monitor") == 1).unwrap();
    let of_panels = queries.iter().flat_map(|query| mistakes(query, &[], &counts));
    let of_alerts = alerts.iter().flat_map(|alert| mistakes(&alert.query, &alert.mentioned, &counts));
    let mistakes: Vec<_> = of_panels.chain(of_alerts).collect();
    assert!(mistakes.is_empty(), "{mistakes:#?} with {counts:#?}");
}
