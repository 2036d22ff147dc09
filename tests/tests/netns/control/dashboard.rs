//! The dashboard in `perf/grafana.json` and the alert rules in `perf/alerts.yml`, compared with a relay's metrics.

use api::token::generate_token;
use config::hash::hex;
use lab::client::Client;
use lab::engine::{Engine, Speed};
use lab::site::{Family, Site, Terms};
use serde_json::Value;

use super::VOICE;

/// All strings of a JSON value in places where Grafana expects a query.
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

/// The names of metrics in a PromQL query.
fn metrics(query: &str) -> impl Iterator<Item = &str> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter_map(|word| word.strip_prefix("paced_").or_else(|| word.starts_with("process_").then_some(word)))
}

/// The queries of alert rules: the text after `expr:`, on the same line or indented on the following ones.
fn rules(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(query) = line.trim().strip_prefix("expr: ") else { continue };
        let mut query = query.trim_start_matches('>').to_owned();
        while let Some(more) = lines.next_if(|line| line.starts_with("          ")) {
            query.push_str(more);
        }
        found.push(query);
    }
    found
}

#[test]
fn every_query_of_the_dashboard_and_of_alerts_is_about_metrics_that_a_relay_has() {
    lab::ring!(Netns);
    let dashboard = include_str!("../../../../perf/grafana.json");
    let dashboard: Value = serde_json::from_str(dashboard).unwrap();
    let queries = queries(&dashboard);
    let mut wanted: Vec<_> = queries.iter().flat_map(|query| metrics(query)).collect();
    assert!(
        queries.len() > 20 && wanted.len() >= queries.len() - 1,
        "a metric in each query except that for data sources: {queries:#?}"
    );
    let rules = rules(include_str!("../../../../perf/alerts.yml"));
    assert!(rules.len() > 10, "{rules:#?}");
    for rule in &rules {
        assert!(metrics(rule).count() > 0 || rule.starts_with("up{"), "{rule}");
        wanted.extend(metrics(rule));
    }

    let (token, digest) = generate_token().unwrap();
    let token_lines = format!("[[relay.token]]\nname = \"alice\"\nsha256 = \"{}\"\n", hex(&digest));
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
        site.counted("the tunnel to be closed", |counts| counts.has("tunnels_closed_total")).await.unwrap();
    })
    .unwrap();
    let _engine = Engine::start(&site.chain.relay, 8001, "large", Speed::default()).unwrap();
    for _ in 0..2 {
        let mut curl = site.chain.relay.command("curl").unwrap();
        let body =
            r#"{"model":"large","prompt":"x","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#;
        curl.args([
            "-sS",
            "-f",
            "-H",
            &format!("authorization: Bearer {key}"),
            "-H",
            "x-paced-budget-ms: 9000",
            "--json",
            body,
        ]);
        let output = curl.arg("http://127.0.0.1:8300/v1/completions").output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let counts = site.wait_for_counts("the monitor to run", |counts| counts.of("kernel_monitor") == 1).unwrap();
    let missing: Vec<_> = wanted.iter().filter(|name| !counts.has(name)).collect();
    assert!(missing.is_empty(), "{missing:?} are not in {counts:#?}");
}
