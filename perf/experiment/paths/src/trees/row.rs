//! Rows of results.

use anyhow::Result;
use instruments::rows::parse_lines;
use plan::{
    BASE,
    trees::{Browser, TreesScheduler},
};
use serde::{Deserialize, Serialize};

use super::{super::row::mean_and_interval, page::Loaded, setting::Setting};

/// One line of results, without its origin: one page with one browser's signals under one scheduler in one cell. Beside each figure
/// is half of the 95 % interval of its mean.
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
    /// The browser whose signals were sent.
    pub browser: Browser,
    /// The cell's name.
    pub cell: String,
    /// The scheduler.
    pub scheduler: TreesScheduler,
    /// The time from the first request to the last render-blocking byte, in milliseconds.
    pub render_ms: f64,
    /// Its interval.
    pub render_ci_ms: f64,
    /// The time from the first request to the last byte of the page, in milliseconds.
    pub load_ms: f64,
    /// Its interval.
    pub load_ci_ms: f64,
    /// How much later rendering is than under `paced` with the same seed, in milliseconds.
    pub render_later_ms: f64,
    /// Its interval.
    pub render_later_ci_ms: f64,
    /// How much later the whole page is than under `paced` with the same seed, in milliseconds.
    pub load_later_ms: f64,
    /// Its interval.
    pub load_later_ci_ms: f64,
    /// The first seed; further ones count up.
    pub seed: u64,
    /// The number of repetitions.
    pub repetitions: u64,
}

impl Row {
    /// Reads lines of JSON; the origin in each line is ignored.
    ///
    /// # Errors
    /// When a line is no row; the error names its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        parse_lines(text)
    }
}

/// Returns the rows of a setting, one for each scheduler; `loads` has the repetitions of each.
pub(super) fn of(setting: &Setting, loads: &[(TreesScheduler, Vec<Loaded>)]) -> Vec<Row> {
    let paced = loads.iter().find(|(scheduler, _)| *scheduler == TreesScheduler::Paced);
    let paced = paced.map(|(_, loads)| loads.as_slice()).unwrap_or_default();
    let row = |(scheduler, loads): &(TreesScheduler, Vec<Loaded>)| {
        let mean = |figure: &dyn Fn(&Loaded) -> f64| mean_and_interval(&loads.iter().map(figure).collect::<Vec<_>>());
        let later = |figure: &dyn Fn(&Loaded) -> f64| {
            let later = loads.iter().zip(paced).map(|(other, ours)| figure(other) - figure(ours));
            mean_and_interval(&later.collect::<Vec<_>>())
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
