//! The results as lines of JSON, and the table made from them.

use std::fmt::Write as _;

use anyhow::Result;
use instruments::{median::median, origin::Origin};
use serde::{Deserialize, Serialize};

/// All samples of one metric of one peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The load.
    pub config: String,
    /// The name of the metric.
    pub metric: String,
    /// Its unit.
    pub unit: String,
    /// The peer between clients and engine.
    pub peer: String,
    /// The median of the samples.
    pub value: f64,
    /// One sample of each round in which the peer did not fail.
    pub samples: Vec<f64>,
    /// The seed of the first sample's round.
    pub seed: u64,
    /// The seed of each sample's round; empty in older rows, where each further round has the next.
    #[serde(default)]
    pub seeds: Vec<u64>,
}

/// Metrics that are not in the table: they explain results, or other metrics derive from them.
const EXPLANATIONS: [&str; 12] = [
    "generator cores",
    "tokens on the way",
    "streams",
    "stalls of the engine",
    "first token, median",
    "first token, 99 %",
    "token, median",
    "token, 99 %",
    "token, 99.9 %",
    "jitter between tokens, median",
    "jitter between tokens, 99 %",
    "CPU per 1,000, alone",
];

/// All rows of a run, in the order in which they first appeared.
#[derive(Debug, Default)]
pub struct Rows(Vec<Row>);

/// A value of one round.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The name of the metric.
    pub metric: &'static str,
    /// The value.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
}

impl Rows {
    /// Adds the samples of the round with this seed.
    pub fn add(&mut self, config: &str, peer: &str, seed: u64, samples: &[Sample]) {
        for &Sample { metric, value, unit } in samples {
            let is_same = |row: &&mut Row| (&row.config[..], &row.peer[..], &row.metric[..]) == (config, peer, metric);
            let row = match self.0.iter_mut().find(is_same) {
                Some(row) => row,
                None => {
                    let [config, metric, unit, peer] = [config, metric, unit, peer].map(str::to_owned);
                    self.0.push(Row {
                        config,
                        metric,
                        unit,
                        peer,
                        value: 0.0,
                        samples: Vec::new(),
                        seed,
                        seeds: Vec::new(),
                    });
                    let Some(row) = self.0.last_mut() else { continue };
                    row
                }
            };
            row.samples.push(value);
            row.seeds.push(seed);
            row.value = median(row.samples.iter().copied()).unwrap_or_default();
        }
    }

    /// Adds how much more of `metric` each peer has than `base`, round by round, as `name`. Rounds in which either failed are left
    /// out, because rounds differ more than peers do.
    pub fn add_difference(&mut self, base: &str, metric: &str, name: &'static str) {
        let of_metric: Vec<_> = self.0.iter().filter(|row| row.metric == metric).cloned().collect();
        for row in of_metric.iter().filter(|row| row.peer != base) {
            let Some(base) = of_metric.iter().find(|other| other.peer == base && other.config == row.config) else {
                continue;
            };
            let of_base = |seed| base.rounds().find(|(of, _)| *of == seed).map(|(_, sample)| sample);
            let differences = row.rounds().filter_map(|(seed, own)| Some((seed, own - of_base(seed)?)));
            let (seeds, samples): (Vec<_>, Vec<_>) = differences.unzip();
            let Some(&seed) = seeds.first() else { continue };
            self.0.push(Row {
                metric: name.to_owned(),
                value: median(samples.iter().copied()).unwrap_or_default(),
                samples,
                seed,
                seeds,
                ..row.clone()
            });
        }
    }

    /// Renders lines of JSON.
    ///
    /// # Errors
    /// When a value is not finite.
    pub fn json_lines(&self, origin: &Origin) -> Result<String> {
        instruments::origin::json_lines(&self.0, origin)
    }

    /// Reads lines of JSON.
    ///
    /// # Errors
    /// When a line is no row.
    pub fn read(lines: &str) -> Result<Self> {
        Ok(Self(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?))
    }

    /// Renders a table in Markdown: medians over the rounds, with the least and the greatest sample.
    #[must_use]
    pub fn table(&self) -> String {
        let (mut peers, mut metrics) = (Vec::new(), Vec::new());
        for row in &self.0 {
            if !peers.contains(&&row.peer) {
                peers.push(&row.peer);
            }
        }
        for row in &self.0 {
            // With a single peer, all metrics are shown, because there is nothing to compare.
            let is_shown = peers.len() == 1 || !EXPLANATIONS.contains(&&row.metric[..]);
            if is_shown && !metrics.contains(&(&row.config, &row.metric, &row.unit)) {
                metrics.push((&row.config, &row.metric, &row.unit));
            }
        }
        let mut table = String::from("| load | figure |");
        peers.iter().for_each(|peer| _ = write!(table, " {peer} |"));
        _ = writeln!(table, "\n|---|---|{}", "--:|".repeat(peers.len()));
        for (config, metric, unit) in metrics {
            let comma = if unit.is_empty() { "" } else { ", " };
            _ = write!(table, "| {config} | {metric}{comma}{unit} |");
            for peer in &peers {
                let is_cell = |row: &&Row| (&row.config, &row.metric, &&row.peer) == (config, metric, peer);
                let cell = self.0.iter().find(is_cell).map_or_else(String::new, Row::cell);
                _ = write!(table, " {cell} |");
            }
            table.push('\n');
        }
        table
    }
}

impl Row {
    /// Returns the seed and the sample of each round; nothing for older rows, which have no `seeds`.
    fn rounds(&self) -> impl Iterator<Item = (u64, f64)> {
        self.seeds.iter().copied().zip(self.samples.iter().copied())
    }

    fn cell(&self) -> String {
        let least = self.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let [value, least, most] = [self.value, least, most].map(number);
        if least == most { value } else { format!("{value} ({least} to {most})") }
    }
}

/// Formats three significant digits, or all digits before the decimal point.
fn number(value: f64) -> String {
    let decimals = if value == 0.0 { 0 } else { (2 - value.abs().log10().floor() as i32).clamp(0, 3) };
    format!("{value:.*}", decimals as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_medians_with_their_range_and_differences_are_those_of_a_round() {
        let mut rows = Rows::default();
        let sample = |value| [Sample { metric: "delay", value, unit: "µs" }];
        for (seed, direct, paced) in [(7, 10.0, 200.0), (8, 100.0, 310.0), (9, 20.0, 300.0)] {
            rows.add("tokens", "direct", seed, &sample(direct));
            rows.add("tokens", "paced", seed, &sample(paced));
        }
        rows.add_difference("direct", "delay", "added delay");
        let origin = Origin::of_this_run("wall").unwrap();
        let table = Rows::read(&rows.json_lines(&origin).unwrap()).unwrap().table();
        assert!(table.contains("| tokens | delay, µs | 20.0 (10.0 to 100) | 300 (200 to 310) |\n"), "{table}");
        assert!(table.contains("| tokens | added delay, µs |  | 210 (190 to 280) |\n"), "{table}");
    }

    #[test]
    fn a_peer_is_compared_in_the_rounds_that_both_have() {
        let mut rows = Rows::default();
        let sample = |value| [Sample { metric: "delay", value, unit: "µs" }];
        // The first round of direct and the last of nginx failed, and litellm has only the first.
        for (seed, direct, paced, nginx, litellm) in [
            (7, None, Some(150.0), Some(20.0), Some(5.0)),
            (8, Some(100.0), Some(310.0), Some(130.0), None),
            (9, Some(20.0), Some(300.0), None, None),
        ] {
            for (peer, value) in [("direct", direct), ("paced", paced), ("nginx", nginx), ("litellm", litellm)] {
                value.into_iter().for_each(|value| rows.add("tokens", peer, seed, &sample(value)));
            }
        }
        rows.add_difference("direct", "delay", "added delay");
        let origin = Origin::of_this_run("wall").unwrap();
        let table = Rows::read(&rows.json_lines(&origin).unwrap()).unwrap().table();
        assert!(table.contains("| tokens | added delay, µs | 245 (210 to 280) | 30.0 |  |  |\n"), "{table}");
    }

    #[test]
    fn the_table_of_the_readme_is_that_of_its_rows() {
        let read = |file| std::fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (readme, lines) = (read("README.md"), read("results/serving-tokens.json"));
        let command = "paced-perf serving table perf/results/serving-tokens.json";
        let (_, rest) = readme.split_once(&format!("<!-- {command} -->\n\n")).unwrap();
        let (written, _) = rest.split_once("\n<!-- end of the table -->").unwrap();
        assert!(written == Rows::read(&lines).unwrap().table(), "print it again: {command}");
    }

    #[test]
    fn each_line_says_where_it_comes_from() {
        let mut rows = Rows::default();
        rows.add("x", "direct", 7, &[Sample { metric: "errors", value: 0.0, unit: "" }]);
        let lines = rows.json_lines(&Origin::of_this_run("wall").unwrap()).unwrap();
        let line: serde_json::Value = serde_json::from_str(&lines).unwrap();
        assert!(
            ["machine", "kernel", "commit", "command"].iter().all(|key| line[key].is_string()) && line["seed"] == 7
        );
    }
}
