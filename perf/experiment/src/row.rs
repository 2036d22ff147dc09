//! Rows of results.

use anyhow::Result;
use instruments::{origin::Origin, rows::parse_lines};
use plan::{Plan, Scheduler};
use serde::{Deserialize, Serialize};

use super::peer;

/// The class of a row about all classes.
pub(super) const ALL: &str = "all";

/// One line of results.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// The scheduler that was compared.
    pub scheduler: Scheduler,
    /// The class's name, or `all`.
    pub class: String,
    /// One of [`METRICS`](plan::METRICS).
    pub metric: String,
    /// Over all repetitions: for latencies and completion, of all requests together; otherwise the median. A missing
    /// value is infinite: too few requests were ever completed.
    pub value: Option<f64>,
    /// The lower end of the 95 % interval of the mean over repetitions, if there are several and all have a value.
    #[serde(default)]
    pub low: Option<f64>,
    /// Its upper end.
    #[serde(default)]
    pub high: Option<f64>,
    /// Whether the value is a lower bound, because the plan's limit ended a repetition: a goodput until the limit lacks the bytes of
    /// unfinished echoes, and a time ends at the limit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lower_bound: bool,
    /// The value of each repetition, in the order of their seeds.
    #[serde(default)]
    pub by_seed: Vec<Option<f64>>,
    /// The value's unit.
    pub unit: String,
    /// The paper's value, if it gives one.
    pub published: Option<f64>,
    /// The seed of the first repetition; further ones count up.
    pub seed: u64,
    /// How many repetitions there were.
    pub repetitions: usize,
    /// The links.
    pub network: String,
    /// The congestion controller.
    pub congestion: String,
    /// The variant's [fingerprint](Plan::fingerprint).
    #[serde(default)]
    pub fingerprint: String,
    /// The origin of the measurement.
    #[serde(flatten)]
    pub origin: Origin,
}

impl Row {
    /// Makes a row about a plan as a whole, without a figure yet.
    pub(super) fn of(plan: &Plan, scheduler: Scheduler, origin: &Origin) -> Self {
        Self {
            plan: plan.name.clone(),
            variant: plan.variant.clone(),
            scheduler,
            class: ALL.to_owned(),
            metric: String::new(),
            value: None,
            low: None,
            high: None,
            lower_bound: false,
            by_seed: Vec::new(),
            unit: String::new(),
            published: None,
            seed: plan.seed,
            repetitions: 0,
            network: plan.links(origin.is_native()),
            congestion: if scheduler.is_of_quic_go() {
                peer::CONGESTION.to_owned()
            } else {
                plan.congestion.to_string()
            },
            fingerprint: plan.fingerprint(),
            origin: origin.clone(),
        }
    }

    /// Reads lines of JSON.
    ///
    /// # Errors
    /// When a line is no row; the error has its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        parse_lines(text)
    }

    /// Writes lines of JSON. Values are rounded to seven digits: further ones are noise, and enlarge files.
    ///
    /// # Errors
    /// When a value is not finite.
    pub fn lines(rows: &[Self]) -> Result<String> {
        let mut lines = String::new();
        for row in rows {
            let mut row = row.clone();
            let values = [&mut row.value, &mut row.low, &mut row.high];
            values.into_iter().chain(&mut row.by_seed).flatten().for_each(|value| *value = rounded(*value));
            lines += &serde_json::to_string(&row)?;
            lines.push('\n');
        }
        Ok(lines)
    }
}

fn rounded(value: f64) -> f64 {
    format!("{value:.6e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_comes_back_and_older_ones_without_seeds_are_read() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let row = Row {
            metric: "latency_p50_ms".to_owned(),
            value: Some(1.25),
            by_seed: vec![Some(1.0), None],
            ..Row::of(&plan, Scheduler::Rr, &Origin::of_this_run("lab").unwrap())
        };
        let lines = Row::lines(&[row.clone(), Row { value: Some(1.0 / 3.0), ..row.clone() }]).unwrap();
        let read = Row::parse_all(&lines).unwrap();
        assert_eq!((&read[0], read[1].value), (&row, Some(0.333_333_3)));
        let mut older: serde_json::Map<_, _> = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        for key in ["low", "high", "by_seed", "fingerprint", "trees"] {
            older.remove(key);
        }
        let older = Row::parse_all(&serde_json::to_string(&older).unwrap()).unwrap();
        assert_eq!((older[0].value, older[0].by_seed.len()), (Some(1.25), 0));
        assert!(Row::parse_all("{}\n").unwrap_err().to_string().contains("line 1"));
    }
}
