//! Rows of results, and their tables.

use std::fmt::Write as _;

use anyhow::Result;
use instruments::rows::parse_lines;
use plan::{
    BASE,
    paths::Cell,
    stack::{Congestion, StackPlan, Transfer},
};
use serde::{Deserialize, Serialize};

use super::{
    super::row::{deviation, mean_and_interval, to_a_thousandth},
    Known, Measured,
};

/// One line of results, without its origin: one stream in one cell, measured over the kernel's stack and simulated. Each time is a
/// mean over repetitions, with its sample standard deviation and half of its 95 % interval. Counts are means as well.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// `base`: these plans have no variants.
    pub variant: String,
    /// What changes from cell to cell.
    pub axis: String,
    /// The cell's name.
    pub cell: String,
    /// The kernel's congestion controller.
    pub congestion: Congestion,
    /// The stream's name.
    pub stream: String,
    /// How many paths there are: 1 for TCP, 2 for MPTCP.
    pub paths: usize,
    /// By path: the kernel's smoothed round trip before the request, which simulated senders know as well.
    pub known_rtt_ms: Vec<f64>,
    /// By path: the kernel's pacing rate before the request, which simulated senders know as well.
    pub known_pacing_mbit: Vec<f64>,
    /// The time from the request to the last byte over the kernel's stack, in milliseconds.
    pub measured_ms: f64,
    /// Its deviation.
    pub measured_deviation_ms: f64,
    /// Its interval.
    pub measured_ci_ms: f64,
    /// The same, simulated: with MPTCP by the kernel's rule.
    pub simulated_ms: f64,
    /// Its deviation.
    pub simulated_deviation_ms: f64,
    /// Its interval.
    pub simulated_ci_ms: f64,
    /// The same, simulated with MPQUIC's lowest-RTT scheduler, which the kernel lacks.
    pub lowest_rtt_ms: f64,
    /// The percentage of all packets that took the last path.
    pub measured_last_path_pct: f64,
    /// The same, simulated.
    pub simulated_last_path_pct: f64,
    /// Packets that queues dropped.
    pub measured_dropped: f64,
    /// The same, simulated.
    pub simulated_dropped: f64,
    /// Segments that the kernel's TCP retransmitted.
    pub retransmitted: f64,
    /// Pieces that MPTCP sent again on another subflow.
    pub reinjected: f64,
    /// The first seed of the simulation; further ones count up.
    pub seed: u64,
    /// How many repetitions there were, measured and simulated.
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

    /// Returns how much longer the simulated time is than the measured one, in percent.
    #[must_use]
    pub fn difference_pct(&self) -> f64 {
        100.0 * (self.simulated_ms / self.measured_ms - 1.0)
    }
}

/// One transfer of a plan.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) plan: &'a StackPlan,
    pub(super) cell: &'a Cell,
    pub(super) congestion: Congestion,
    pub(super) stream: &'a Transfer,
}

impl<'a> Setting<'a> {
    /// Returns all transfers of a plan, in its order.
    pub(super) fn all(plan: &'a StackPlan) -> Vec<Self> {
        let mut all = Vec::new();
        for congestion in &plan.congestion {
            for cell in &plan.cells {
                all.extend(plan.streams.iter().map(|stream| Self { plan, cell, congestion: *congestion, stream }));
            }
        }
        all
    }

    /// Returns the row of a measurement, with the simulation of the same transfer.
    ///
    /// # Errors
    /// When a simulated transfer does not end.
    pub(super) fn row(&self, measured: &[Measured]) -> Result<Row> {
        let known = |path: usize| Known {
            rtt_ms: mean(measured.iter().map(|run| run.known[path].rtt_ms)),
            pacing_mbit: mean(measured.iter().map(|run| run.known[path].pacing_mbit)),
        };
        let known: Vec<_> = (0..self.cell.paths.len()).map(known).collect();
        let (simulated, lowest_rtt) = (self.simulated(&known)?, self.lowest_rtt(&known)?);
        let [measured_ms, measured_deviation_ms, measured_ci_ms] = times(measured.iter().map(|run| run.completion_ms));
        let [simulated_ms, simulated_deviation_ms, simulated_ci_ms] =
            times(simulated.iter().map(|run| run.completion_ms));
        Ok(Row {
            plan: self.plan.name.clone(),
            variant: BASE.to_owned(),
            axis: self.plan.axis.clone(),
            cell: self.cell.name.clone(),
            congestion: self.congestion,
            stream: self.stream.name.clone(),
            paths: self.cell.paths.len(),
            known_rtt_ms: known.iter().map(|known| known.rtt_ms).collect(),
            known_pacing_mbit: known.iter().map(|known| known.pacing_mbit).collect(),
            measured_ms,
            measured_deviation_ms,
            measured_ci_ms,
            simulated_ms,
            simulated_deviation_ms,
            simulated_ci_ms,
            lowest_rtt_ms: times(lowest_rtt.iter().map(|run| run.completion_ms))[0],
            measured_last_path_pct: mean(measured.iter().map(|run| last_pct(&run.packets))),
            simulated_last_path_pct: mean(simulated.iter().map(|run| last_pct(&run.packets))),
            measured_dropped: mean(measured.iter().map(|run| run.dropped as f64)),
            simulated_dropped: mean(simulated.iter().map(|run| run.dropped as f64)),
            retransmitted: mean(measured.iter().map(|run| run.retransmitted as f64)),
            reinjected: mean(measured.iter().map(|run| run.reinjected as f64)),
            seed: self.plan.seed,
            repetitions: self.plan.repetitions,
        })
    }
}

/// Returns the mean, the standard deviation and half of the mean's 95 % interval.
fn times(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let values: Vec<_> = values.collect();
    let [mean, interval] = mean_and_interval(&values);
    [mean, to_a_thousandth(deviation(&values)), interval]
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    mean_and_interval(&values.collect::<Vec<_>>())[0]
}

fn last_pct(packets: &[u64]) -> f64 {
    let all: u64 = packets.iter().sum();
    100.0 * packets.last().copied().unwrap_or_default() as f64 / all.max(1) as f64
}

/// Renders rows as Markdown: a table for TCP and one for MPTCP, by congestion controller, with a line for each cell and stream.
#[must_use]
pub fn tables(rows: &[Row]) -> String {
    let mut text = String::new();
    for (paths, stack) in [(1, "TCP over one path"), (2, "MPTCP over two paths")] {
        for congestion in [Congestion::Reno, Congestion::Cubic] {
            let here: Vec<_> = rows.iter().filter(|row| (row.paths, row.congestion) == (paths, congestion)).collect();
            let Some(first) = here.first() else { continue };
            _ = writeln!(
                text,
                "{stack}, {}: milliseconds from request to last byte, mean of {} repetitions ± standard deviation (± half of the 95 % interval).\n",
                congestion.name(),
                first.repetitions
            );
            _ = write!(
                text,
                "| {} | stream | measured | simulated | difference | dropped | simulated | sent again |",
                first.axis
            );
            text += if paths > 1 {
                " reinjected | on path 2 | simulated | lowest-RTT |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
            } else {
                "\n|---|---|--:|--:|--:|--:|--:|--:|\n"
            };
            for row in here {
                text += &line(row);
            }
            text.push('\n');
        }
    }
    text.trim_end().to_owned() + "\n"
}

fn line(row: &Row) -> String {
    let time = |mean: f64, deviation: f64, ci: f64| format!("{mean:.1} ± {deviation:.1} (± {ci:.1})");
    let mut line = format!(
        "| {} | {} | {} | {} | {:+.1} % | {:.1} | {:.1} | {:.1} |",
        row.cell,
        row.stream,
        time(row.measured_ms, row.measured_deviation_ms, row.measured_ci_ms),
        time(row.simulated_ms, row.simulated_deviation_ms, row.simulated_ci_ms),
        row.difference_pct(),
        row.measured_dropped,
        row.simulated_dropped,
        row.retransmitted
    );
    if row.paths > 1 {
        _ = write!(
            line,
            " {:.1} | {:.0} % | {:.0} % | {:.1} |",
            row.reinjected, row.measured_last_path_pct, row.simulated_last_path_pct, row.lowest_rtt_ms
        );
    }
    line.push('\n');
    line
}
