//! Rows of results.

use anyhow::{Context as _, Result};
use plan::paths::{Cell, PathsPlan, Scheduler};
use serde::{Deserialize, Serialize};

use super::Shown;

/// One line of results, but for where it comes from: one stream under one scheduler in one cell.
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
    /// From the request to the last byte, in milliseconds: the mean over repetitions.
    pub completion_ms: f64,
    /// Its deviation (of a sample: by the number of repetitions less one).
    pub deviation_ms: f64,
    /// The same on ideal links.
    pub closed_form_ms: f64,
    /// The part of its packets that took the path that is slowest for it alone, in percent.
    pub slow_path_pct: f64,
    /// The first seed; further ones count up.
    pub seed: u64,
    /// How many there were.
    pub repetitions: u64,
}

impl Row {
    /// Reads lines of JSON; what a line says of its origin is left out.
    ///
    /// # Errors
    /// A line is no row; its number is said.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let parse = |line| serde_json::from_str::<Self>(line).map(Self::rounded);
        lines.map(|(at, line)| parse(line).with_context(|| format!("line {}", at + 1))).collect()
    }
}

impl Row {
    /// Rounds its figures to nine digits: what lies beyond differs by how numbers are added up, written and read.
    fn rounded(mut self) -> Self {
        let figures =
            [&mut self.completion_ms, &mut self.deviation_ms, &mut self.closed_form_ms, &mut self.slow_path_pct];
        for figure in figures {
            *figure = format!("{figure:.8e}").parse().unwrap_or(*figure);
        }
        self
    }
}

/// The rows of a scheduler in a cell, one for each stream; `runs` has its repetitions.
pub(super) fn of(plan: &PathsPlan, cell: &Cell, scheduler: Scheduler, runs: &[Vec<Shown>]) -> Vec<Row> {
    let row = |(at, stream): (usize, &plan::paths::Stream)| {
        let mean = |figure: fn(&Shown) -> f64| runs.iter().map(|run| figure(&run[at])).sum::<f64>() / runs.len() as f64;
        let completion_ms = mean(|shown| shown.completion_ms);
        let squares: f64 = runs.iter().map(|run| (run[at].completion_ms - completion_ms).powi(2)).sum();
        Row {
            plan: plan.name.clone(),
            variant: plan.variant.clone(),
            axis: plan.axis.clone(),
            cell: cell.name.clone(),
            scheduler,
            stream: stream.name.clone(),
            completion_ms,
            deviation_ms: (squares / (runs.len() as f64 - 1.0).max(1.0)).sqrt(),
            closed_form_ms: mean(|shown| shown.closed_ms),
            slow_path_pct: mean(|shown| shown.slow_pct),
            seed: plan.seed,
            repetitions: plan.repetitions,
        }
        .rounded()
    };
    plan.streams.iter().enumerate().map(row).collect()
}
