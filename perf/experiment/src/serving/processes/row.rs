//! Rows of results: a policy, a seed.

use std::{collections::BTreeMap, fmt};

use anyhow::Result;
use instruments::rows::parse_lines;
use plan::serving::ServingPlan;
use serde::{Deserialize, Serialize};

use crate::serving::figures::Figures;

/// One line of results, without its origin: a policy's answers to the requests of a seed.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// The workload's name.
    pub workload: String,
    /// Requests per second at the speed of the simulator's own plan, if the workload has several rates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// The policy's name.
    pub policy: String,
    /// The seed of the requests.
    pub seed: u64,
    /// How many seeds there were.
    pub repetitions: u64,
    /// The link between edge and gateway.
    pub link: String,
    /// How many requests were sent.
    pub requests: usize,
    /// How many of them were refused, or broke off.
    pub failed: usize,
    /// The outcome with processes.
    pub processes: Side,
    /// The simulator's outcome for the same requests.
    pub simulated: Side,
    /// How many choices the gateway's guard replaced.
    pub guarded: u64,
    /// The longest time by which the client sent a request too late.
    pub sent_late_ms: f64,
    /// The longest time by which an engine made a token too late.
    pub made_late_ms: f64,
}

/// The outcome of a run.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Side {
    /// The mean reward of all requests.
    pub score: f64,
    /// How many answers were in time.
    pub met: usize,
    /// How many requests each model answered, or had begun to answer at the end. In the simulator, each request counts.
    pub selected: BTreeMap<String, usize>,
}

impl Side {
    pub(super) fn of(plan: &ServingPlan, figures: &Figures) -> Self {
        let all = figures.of_task(None);
        let selected = plan.models.iter().zip(&all.selected).map(|(model, count)| (model.name.clone(), *count));
        let score = (all.score().unwrap_or_default() * 1e5).round() / 1e5;
        Self { score, met: all.met, selected: selected.collect() }
    }
}

impl Row {
    /// Reads lines of JSON; the origin in each line is ignored.
    ///
    /// # Errors
    /// When a line is no row; the error has its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        parse_lines(text)
    }

    /// Returns the name of its requests in tables.
    pub(super) fn cell(&self) -> String {
        self.rate.map_or_else(|| self.workload.clone(), |rate| format!("{}, {rate}/s", self.workload))
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, requests, failed, processes, simulated, sent_late_ms, made_late_ms, .. } = self;
        write!(
            f,
            "{}: {policy}: {requests} requests, {} met, score {:.3}, {failed} failed; simulated {} met, {:.3}; sent {sent_late_ms} ms \
             late, made {made_late_ms} ms late",
            self.cell(),
            processes.met,
            processes.score,
            simulated.met,
            simulated.score
        )
    }
}
