//! Rows of results.

use anyhow::{Context as _, Result};
use plan::{
    BASE,
    trees::{Browser, TreesScheduler},
};
use sched::route::serving::Interval;
use serde::{Deserialize, Serialize};

use super::{Loaded, Setting};

/// One line of results, but for where it comes from: one page with one browser's signals under one scheduler in one cell. Each figure
/// stands beside half of the 95 % interval of its mean.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// `base`: these plans have no variants.
    pub variant: String,
    /// What changes from cell to cell.
    pub axis: String,
    /// The page's name.
    pub page: String,
    /// Whose signals were sent.
    pub browser: Browser,
    /// The cell's name.
    pub cell: String,
    /// The scheduler.
    pub scheduler: TreesScheduler,
    /// From the first request to the last byte of what blocks rendering, in milliseconds.
    pub render_ms: f64,
    /// Its interval.
    pub render_ci_ms: f64,
    /// From the first request to the last byte of all, in milliseconds.
    pub load_ms: f64,
    /// Its interval.
    pub load_ci_ms: f64,
    /// By how much rendering is later than under `paced` with the same seed, in milliseconds.
    pub render_later_ms: f64,
    /// Its interval.
    pub render_later_ci_ms: f64,
    /// By how much the whole page is later than under `paced` with the same seed, in milliseconds.
    pub load_later_ms: f64,
    /// Its interval.
    pub load_later_ci_ms: f64,
    /// The first seed; further ones count up.
    pub seed: u64,
    /// How many there were.
    pub repetitions: u64,
}

impl Row {
    /// Reads lines of JSON, and leaves out the origin of each.
    ///
    /// # Errors
    /// A line is no row; the error names its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let parse = |line| serde_json::from_str::<Self>(line);
        lines.map(|(at, line)| parse(line).with_context(|| format!("line {}", at + 1))).collect()
    }
}

/// The rows of a setting, one for each scheduler; `loads` has the repetitions of each.
pub(super) fn of(setting: &Setting, loads: &[(TreesScheduler, Vec<Loaded>)]) -> Vec<Row> {
    let paced = loads.iter().find(|(scheduler, _)| *scheduler == TreesScheduler::Paced);
    let paced = paced.map(|(_, loads)| loads.as_slice()).unwrap_or_default();
    let row = |(scheduler, loads): &(TreesScheduler, Vec<Loaded>)| {
        let mean = |figure: &dyn Fn(&Loaded) -> f64| of_values(loads.iter().map(figure));
        let later = |figure: &dyn Fn(&Loaded) -> f64| {
            of_values(loads.iter().zip(paced).map(|(other, ours)| figure(other) - figure(ours)))
        };
        let (render, load) = (|loaded: &Loaded| loaded.render_ms, |loaded: &Loaded| loaded.load_ms);
        let ([render_ms, render_ci_ms], [load_ms, load_ci_ms]) = (mean(&render), mean(&load));
        let ([render_later_ms, render_later_ci_ms], [load_later_ms, load_later_ci_ms]) = (later(&render), later(&load));
        Row {
            plan: setting.plan.name.clone(),
            variant: BASE.to_owned(),
            axis: setting.plan.axis.clone(),
            page: setting.page.name.clone(),
            browser: setting.browser,
            cell: setting.cell.name.clone(),
            scheduler: *scheduler,
            render_ms,
            render_ci_ms,
            load_ms,
            load_ci_ms,
            render_later_ms,
            render_later_ci_ms,
            load_later_ms,
            load_later_ci_ms,
            seed: setting.plan.seed,
            repetitions: setting.plan.repetitions,
        }
    };
    loads.iter().map(row).collect()
}

/// Returns the mean and half of its 95 % interval, rounded to a microsecond, so that the order of additions makes no difference.
fn of_values(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let interval = Interval::of(&values.collect::<Vec<_>>());
    [interval.mean, (interval.high - interval.low) / 2.0].map(|ms| (ms * 1e3).round() / 1e3)
}
