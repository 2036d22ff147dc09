//! Rows of results, and the results of single runs that they sum up.

use anyhow::Result;
use instruments::rows::parse_lines;
use plan::paths::{Cell, PathsPlan, Scheduler};
use sched::route::serving::Interval;
use serde::{Deserialize, Serialize};

/// One line of results, without its origin: one stream under one scheduler in one cell.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// What changes from cell to cell.
    pub axis: String,
    /// The cell's name.
    pub cell: String,
    /// The scheduler.
    pub scheduler: Scheduler,
    /// The stream's name.
    pub stream: String,
    /// The time from the request to the last byte, in milliseconds: the mean over repetitions.
    pub completion_ms: f64,
    /// Its sample standard deviation (by the number of repetitions less one).
    pub deviation_ms: f64,
    /// The same on ideal links.
    pub closed_form_ms: f64,
    /// The percentage of its packets that took the path that would be slowest for it alone.
    pub slow_path_pct: f64,
    /// The first seed; further ones count up.
    pub seed: u64,
    /// The number of repetitions.
    pub repetitions: u64,
}

impl Row {
    /// Reads lines of JSON; the origin in each line is ignored.
    ///
    /// # Errors
    /// When a line is no row; the error has its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        Ok(parse_lines(text)?.into_iter().map(Self::rounded).collect())
    }
}

impl Row {
    /// Rounds its figures to nine digits: later digits depend on how numbers are added, written and read.
    fn rounded(mut self) -> Self {
        let figures =
            [&mut self.completion_ms, &mut self.deviation_ms, &mut self.closed_form_ms, &mut self.slow_path_pct];
        for figure in figures {
            *figure = format!("{figure:.8e}").parse().unwrap_or(*figure);
        }
        self
    }
}

/// Returns the mean and half of its 95 % interval, rounded to a microsecond, so that the order of additions makes no
/// difference.
pub(super) fn mean_and_interval(values: &[f64]) -> [f64; 2] {
    let interval = Interval::of(values);
    [interval.mean, (interval.high - interval.low) / 2.0].map(to_a_thousandth)
}

/// Rounds milliseconds to a microsecond.
pub(super) fn to_a_thousandth(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// Returns the sample standard deviation.
pub(super) fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() as f64 - 1.0).max(1.0)).sqrt()
}

/// The results of one run for one stream of the plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shown {
    /// The time from the request to the last byte.
    pub(super) completion_ms: f64,
    /// The percentage of its packets that took the path that would be slowest for it alone.
    pub(super) slow_pct: f64,
    /// The completion time by the closed form.
    pub(super) closed_ms: f64,
}

/// Returns the rows of a scheduler in a cell, one for each stream; `runs` has its repetitions.
pub(super) fn of(plan: &PathsPlan, cell: &Cell, scheduler: Scheduler, runs: &[Vec<Shown>]) -> Vec<Row> {
    let row = |(at, stream): (usize, &plan::paths::Stream)| {
        let mean = |figure: fn(&Shown) -> f64| runs.iter().map(|run| figure(&run[at])).sum::<f64>() / runs.len() as f64;
        let completion_ms = mean(|shown| shown.completion_ms);
        let all_ms: Vec<_> = runs.iter().map(|run| run[at].completion_ms).collect();
        Row {
            plan: plan.name.clone(),
            variant: plan.variant.clone(),
            axis: plan.axis.clone(),
            cell: cell.name.clone(),
            scheduler,
            stream: stream.name.clone(),
            completion_ms,
            deviation_ms: deviation(&all_ms),
            closed_form_ms: mean(|shown| shown.closed_ms),
            slow_path_pct: mean(|shown| shown.slow_pct),
            seed: plan.seed,
            repetitions: plan.repetitions,
        }
        .rounded()
    };
    plan.streams.iter().enumerate().map(row).collect()
}
