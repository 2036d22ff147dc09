//! Samples, their medians, and the two forms in which they are output.

use std::fmt::{self, Write as _};

use anyhow::Result;
use instruments::{
    load::{
        Figure,
        one_way::{GENERATOR_LIMITS, HIGHEST_RATE},
    },
    median::median,
    origin::Origin,
    relay::Kind,
};
use serde::Serialize;

/// All samples of a run, in the order in which their metrics first appeared.
#[derive(Default)]
pub struct Results {
    series: Vec<Series>,
    /// The QUIC stacks with their versions, by peer.
    stacks: Vec<(&'static str, String)>,
}

/// The samples of one metric of one relay in one step.
struct Series {
    config: String,
    metric: &'static str,
    unit: &'static str,
    peer: &'static str,
    samples: Vec<f64>,
}

impl Series {
    fn median(&self) -> f64 {
        median(self.samples.iter().copied()).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    config: &'a str,
    metric: &'a str,
    value: f64,
    unit: &'a str,
    peer: &'a str,
    samples: &'a [f64],
    /// The QUIC stack that the peer named, with its version; absent for paced, and in rows of commit 8fdf32e and older.
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<&'a str>,
    /// Whether the value is limited by the generator, so that the relay's true value is higher.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    lower_bound: bool,
}

/// Metrics that are not in the table: they only explain results.
const EXPLANATIONS: [&str; 10] = [
    GENERATOR_LIMITS,
    "generator cores while offering",
    "offered",
    "relay cores",
    "generator cores",
    "held back by the client",
    "lost at the relay's QUIC socket",
    "lost at the target's socket",
    "lost at the client's QUIC socket",
    "softirq per payload, whole machine",
];

/// The metric of payloads that did not come back, in percent.
pub const LOSS: &str = "loss";

/// The loss, in percent, above which a ratio is marked: costs are divided by the payloads that were not lost.
pub const MARKED_LOSS_PERCENT: f64 = 1.0;

/// The note below a table with marked ratios.
pub const LOST_NOTE: &str = "† A relay lost more than 1 %: what it did is divided by what was not lost.";

/// The metric that [`Results::add_derived`] adds.
pub const ADDED: &str = "added round trip, median";

/// A median over the rounds.
#[derive(Clone, Copy, Debug)]
pub struct Median {
    pub value: f64,
    /// Whether it is limited by the generator, so that the true value is higher.
    pub is_lower_bound: bool,
}

impl Median {
    /// Returns the ratio of this median to another, or `None` if nothing is known about it: both are lower bounds, or the other is 0.
    pub fn ratio_to(self, other: Self) -> Option<String> {
        let bound = match (self.is_lower_bound, other.is_lower_bound) {
            (true, true) => return None,
            (true, false) => "≥ ",
            (false, true) => "≤ ",
            (false, false) => "",
        };
        (other.value != 0.0).then(|| format!("{bound}{:.2}", self.value / other.value))
    }
}

impl fmt::Display for Median {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.is_lower_bound { "≥ " } else { "" }, number(self.value))
    }
}

impl Results {
    /// Adds a sample of each figure.
    pub fn add(&mut self, config: &str, peer: &'static str, figures: &[Figure], instructions: bool) {
        for &Figure { metric, value, unit } in figures {
            let unit = if instructions && metric == "relay CPU per payload" { "instructions" } else { unit };
            let same =
                |series: &&mut Series| (series.config.as_str(), series.metric, series.peer) == (config, metric, peer);
            match self.series.iter_mut().find(same) {
                Some(series) => series.samples.push(value),
                None => {
                    let (config, samples) = (config.to_owned(), vec![value]);
                    self.series.push(Series { config, metric, unit, peer, samples });
                }
            }
        }
    }

    /// Notes the stack that a peer named when it started, for its lines of JSON.
    pub fn name_stack(&mut self, peer: &'static str, stack: Option<&str>) {
        self.stacks.retain(|(other, _)| *other != peer);
        self.stacks.extend(stack.map(|stack| (peer, stack.to_owned())));
    }

    /// Adds how much each relay adds to the round trip of a single payload.
    pub fn add_derived(&mut self) {
        let round_trip = |series: &&Series| series.metric == "round trip, median";
        let Some(direct) = self.series.iter().filter(round_trip).find(|s| s.config == "no relay").map(Series::median)
        else {
            return;
        };
        let single: Vec<_> =
            self.series.iter().filter(round_trip).filter(|s| s.config.ends_with("× 1 in flight")).collect();
        let added: Vec<_> = single.iter().map(|s| (s.config.clone(), s.peer, s.median() - direct)).collect();
        for (config, peer, value) in added {
            self.add(&config, peer, &[Figure { metric: ADDED, value, unit: "µs" }], false);
        }
    }

    /// Renders medians side by side, in Markdown, and the ratio of the first relay's median to that of each other relay. A step that
    /// searches for the highest rate shows only this rate, because the relays' costs there belong to different rates. A dagger marks a
    /// ratio if either of its two relays lost more than [`MARKED_LOSS_PERCENT`].
    pub fn table(&self, kinds: &[Kind]) -> String {
        let mut table = String::from("| step | figure |");
        kinds.iter().for_each(|kind| _ = write!(table, " {} |", kind.name()));
        let others = kinds.get(1..).unwrap_or_default();
        others.iter().for_each(|kind| _ = write!(table, " ratio to {} |", kind.name()));
        table += &format!("\n|---|---|{}\n", "--:|".repeat(kinds.len() + others.len()));
        let mut rows: Vec<(&str, &str, &str)> = Vec::new();
        for series in &self.series {
            let row = (series.config.as_str(), series.metric, series.unit);
            let is_compared = series.metric == HIGHEST_RATE
                || self.series.iter().all(|other| other.config != series.config || other.metric != HIGHEST_RATE);
            if is_compared && !EXPLANATIONS.contains(&series.metric) && !rows.contains(&row) {
                rows.push(row);
            }
        }
        // Derived figures belong to their step.
        rows.sort_by_key(|row| self.series.iter().position(|series| series.config == row.0));
        for (config, metric, unit) in rows {
            let of = |peer: &str| {
                let series = self.find(config, metric, peer)?;
                Some(Median { value: series.median(), is_lower_bound: self.is_lower_bound(series) })
            };
            let medians: Vec<_> = kinds.iter().map(|kind| of(kind.name())).collect();
            let cells = match of("none") {
                Some(direct) => vec![direct.to_string(); kinds.len()],
                None => {
                    medians.iter().map(|median| median.map_or("–".to_owned(), |median| median.to_string())).collect()
                }
            };
            _ = write!(table, "| {config} | {metric}, {unit} | {} |", cells.join(" | "));
            for (other, theirs) in others.iter().zip(medians.iter().skip(1)) {
                let lost = metric != LOSS && [kinds[0], *other].iter().any(|kind| self.loses(config, kind.name()));
                match medians[0].zip(*theirs).and_then(|(ours, theirs)| ours.ratio_to(theirs)) {
                    Some(ratio) => _ = write!(table, " {ratio}{} |", if lost { " †" } else { "" }),
                    None => table += " |",
                }
            }
            table.push('\n');
        }
        if table.contains('†') {
            _ = writeln!(table, "\n{LOST_NOTE}");
        }
        table
    }

    /// Whether a relay lost more than [`MARKED_LOSS_PERCENT`] in the median of a step.
    fn loses(&self, config: &str, peer: &str) -> bool {
        self.find(config, LOSS, peer).is_some_and(|loss| loss.median() > MARKED_LOSS_PERCENT)
    }

    fn find(&self, config: &str, metric: &str, peer: &str) -> Option<&Series> {
        self.series.iter().find(|s| (s.config.as_str(), s.metric, s.peer) == (config, metric, peer))
    }

    /// Whether the median of highest rates is a lower bound: in a round at or below it, the generator was the limit.
    fn is_lower_bound(&self, rates: &Series) -> bool {
        let limits = self.find(&rates.config, GENERATOR_LIMITS, rates.peer);
        let median = rates.median();
        rates.metric == HIGHEST_RATE
            && limits.is_some_and(|limits| {
                rates.samples.iter().zip(&limits.samples).any(|(rate, limit)| *rate <= median && *limit > 0.0)
            })
    }

    /// Renders all series as lines of JSON.
    pub fn json_lines(&self, origin: &Origin) -> Result<String> {
        let mut lines = String::new();
        for series in &self.series {
            let Series { config, metric, unit, peer, samples } = series;
            let lower_bound = self.is_lower_bound(series);
            let stack = self.stacks.iter().find(|(of, _)| of == peer).map(|(_, stack)| stack.as_str());
            let value = series.median();
            let line = Line { origin, config, metric, value, unit, peer, samples, stack, lower_bound };
            lines += &serde_json::to_string(&line)?;
            lines.push('\n');
        }
        Ok(lines)
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

    fn figure(value: f64) -> [Figure; 1] {
        [Figure { metric: "round trip, median", value, unit: "µs" }]
    }

    #[test]
    fn the_table_shows_medians_their_ratio_and_what_the_relay_adds() {
        let mut results = Results::default();
        for (ours, theirs) in [(300.0, 800.0), (200.0, 100.0), (210.0, 420.0)] {
            results.add("echo, 1 tunnel × 1 in flight", "paced", &figure(ours), false);
            results.add("echo, 1 tunnel × 1 in flight", "quic-go", &figure(theirs), false);
            results.add("no relay", "none", &figure(70.0), false);
        }
        results.add_derived();
        let table = results.table(&[Kind::Paced, Kind::QuicGo]);
        for row in [
            "| echo, 1 tunnel × 1 in flight | round trip, median, µs | 210 | 420 | 0.50 |\n",
            "| echo, 1 tunnel × 1 in flight | added round trip, median, µs | 140 | 350 | 0.40 |\n",
            "| no relay | round trip, median, µs | 70.0 | 70.0 | |\n",
        ] {
            assert!(table.contains(row), "{table}");
        }
        let alone = results.table(&[Kind::Paced]);
        assert!(alone.contains("| round trip, median, µs | 210 |\n"), "{alone}");
    }

    #[test]
    fn a_ratio_is_marked_where_a_relay_lost_payloads() {
        let mut results = Results::default();
        for (config, theirs_lost) in [("echo, 1 tunnel", 27.4), ("echo, 10 tunnels", 0.9)] {
            for (peer, cost, loss) in [("paced", 1.0, 0.0), ("quic-go", 4.0, theirs_lost)] {
                let cost = Figure { metric: "relay CPU per GB", value: cost, unit: "s" };
                results.add(config, peer, &[cost, Figure { metric: LOSS, value: loss, unit: "%" }], false);
            }
        }
        let table = results.table(&[Kind::Paced, Kind::QuicGo]);
        for row in [
            "| echo, 1 tunnel | relay CPU per GB, s | 1.00 | 4.00 | 0.25 † |\n",
            "| echo, 1 tunnel | loss, % | 0 | 27.4 | 0.00 |\n",
            "| echo, 10 tunnels | relay CPU per GB, s | 1.00 | 4.00 | 0.25 |\n",
            "\n† A relay lost more than 1 %",
        ] {
            assert!(table.contains(row), "{table}");
        }
    }

    #[test]
    fn each_peer_has_its_own_ratio_and_only_ratios_to_a_peer_that_lost_are_marked() {
        let mut results = Results::default();
        for (peer, cost, loss) in [("paced", 1.0, 0.0), ("quinn", 2.0, 0.2), ("quic-go", 4.0, 5.0)] {
            let cost = Figure { metric: "relay CPU per GB", value: cost, unit: "s" };
            results.add("echo", peer, &[cost, Figure { metric: LOSS, value: loss, unit: "%" }], false);
        }
        let kinds = [Kind::Paced, Kind::Quinn, Kind::QuicGo];
        let table = results.table(&kinds);
        for row in [
            "| step | figure | paced | quinn | quic-go | ratio to quinn | ratio to quic-go |\n|---|---|--:|--:|--:|--:|--:|\n",
            "| echo | relay CPU per GB, s | 1.00 | 2.00 | 4.00 | 0.50 | 0.25 † |\n",
            "| echo | loss, % | 0 | 0.200 | 5.00 | 0.00 | 0.00 |\n",
        ] {
            assert!(table.contains(row), "{table}");
        }
        // A relay whose step failed has no figures.
        results.add("up", "paced", &figure(1.0), false);
        results.add("up", "quic-go", &figure(2.0), false);
        assert!(results.table(&kinds).contains(" µs | 1.00 | – | 2.00 | | 0.50 |\n"), "{}", results.table(&kinds));
    }

    #[test]
    fn lines_of_a_peer_name_its_stack() {
        let mut results = Results::default();
        ["paced", "quinn"].iter().for_each(|peer| results.add("echo", peer, &figure(1.0), false));
        results.name_stack("paced", None);
        (0..2).for_each(|_| results.name_stack("quinn", Some("quinn 1.2.3")));
        let lines = results.json_lines(&Origin::of_this_run("wall").unwrap()).unwrap();
        let stacks: Vec<_> = lines.lines().map(|line| line.split_once("\"stack\":").map(|(_, stack)| stack)).collect();
        assert_eq!(stacks, [None, Some("\"quinn 1.2.3\"}")]);
    }

    #[test]
    fn a_rate_at_which_the_generator_ended_is_a_lower_bound() {
        let search = |rate, limit| {
            [
                Figure { metric: "relay CPU per GB", value: 1.0, unit: "s" },
                Figure { metric: HIGHEST_RATE, value: rate, unit: "1/s" },
                Figure { metric: GENERATOR_LIMITS, value: limit, unit: "1 if so" },
            ]
        };
        let mut results = Results::default();
        for (rate, limit) in [(300e3, 0.0), (200e3, 1.0), (400e3, 0.0)] {
            results.add("up searched", "paced", &search(rate, limit), false);
            results.add("down searched", "paced", &search(rate, 1.0), false);
            // Only the round above the median was limited by the generator.
            results.add("up searched", "quic-go", &search(rate / 3.0, f64::from(u8::from(rate > 350e3))), false);
            results.add("down searched", "quic-go", &search(rate, 1.0), false);
        }
        let table = results.table(&[Kind::Paced, Kind::QuicGo]);
        for row in [
            "| up searched | highest rate without loss, 1/s | ≥ 300000 | 100000 | ≥ 3.00 |\n",
            "| down searched | highest rate without loss, 1/s | ≥ 300000 | ≥ 300000 | |\n",
        ] {
            assert!(table.contains(row), "{table}");
        }
        assert!(!table.contains(GENERATOR_LIMITS) && !table.contains("per GB"), "{table}");
        let lines = results.json_lines(&Origin::of_this_run("wall").unwrap()).unwrap();
        let bounds = lines.lines().filter(|line| line.contains("\"lower_bound\":true")).count();
        assert_eq!((lines.lines().count(), bounds), (12, 3), "{lines}");
    }

    #[test]
    fn each_line_of_json_is_a_median_with_its_origin() {
        let mut results = Results::default();
        [3.0, 1.0].iter().for_each(|value| results.add("idle", "paced", &figure(*value), false));
        let lines = results.json_lines(&Origin::of_this_run("instructions").unwrap()).unwrap();
        let line: serde_json::Value = serde_json::from_str(lines.trim()).unwrap();
        assert_eq!((&line["value"], &line["clock"]), (&2.0.into(), &"instructions".into()));
        assert!(["machine", "kernel", "commit", "command", "unit"].iter().all(|key| line[key].is_string()));
    }

    #[test]
    fn numbers_have_three_digits_at_least_before_they_have_a_point() {
        assert_eq!(
            [0.0, 0.0512, 1.234, 56.78, 987.6, 12345.6].map(number),
            ["0", "0.051", "1.23", "56.8", "988", "12346"]
        );
    }
}
