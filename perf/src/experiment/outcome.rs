//! Figures from samples.

use std::time::Duration;

use serde::Serialize;

use super::Run;
use crate::{
    load::{self, Figure},
    origin::Origin,
    plan::{Class, Plan, Scheduler},
};

/// All repetitions of a scheduler.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was compared.
    pub scheduler: Scheduler,
    /// The repetitions.
    pub runs: Vec<Run>,
}

/// How long requests took.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// The latencies of requests that got all of their echo, ascending, in milliseconds.
    sorted_ms: Vec<f64>,
    /// How many there were, the others included.
    requests: usize,
}

impl Latencies {
    /// Returns the latencies of requests, `None` for requests whose echo never came.
    pub(super) fn of(requests: impl Iterator<Item = Option<Duration>>) -> Self {
        let all: Vec<_> = requests.collect();
        let mut sorted_ms: Vec<_> = all.iter().flatten().map(|latency| latency.as_secs_f64() * 1e3).collect();
        sorted_ms.sort_by(f64::total_cmp);
        Self { sorted_ms, requests: all.len() }
    }

    /// The latency that `share` (0 to 1) of requests with an echo do not exceed, by linear interpolation between ranks.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        let last = self.sorted_ms.len().checked_sub(1)?;
        let rank = last as f64 * share.clamp(0.0, 1.0);
        let (low, high) = (self.sorted_ms[rank as usize], self.sorted_ms[(rank.ceil() as usize).min(last)]);
        Some(low + (high - low) * rank.fract())
    }

    /// The percentage of all requests that were completed within a deadline, or at all without one.
    #[must_use]
    pub fn completion_pct(&self, deadline_ms: Option<u64>) -> Option<f64> {
        let met = |latency_ms: &f64| deadline_ms.is_none_or(|deadline| *latency_ms <= deadline as f64);
        (self.requests > 0).then(|| 100.0 * self.sorted_ms.partition_point(met) as f64 / self.requests as f64)
    }

    /// The arithmetic mean of the latencies of requests with an echo.
    #[must_use]
    pub fn mean_ms(&self) -> Option<f64> {
        let count = self.sorted_ms.len();
        (count > 0).then(|| self.sorted_ms.iter().sum::<f64>() / count as f64)
    }
}

/// One line of results.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// What was compared.
    pub scheduler: Scheduler,
    /// The class's name, or `all`.
    pub class: String,
    /// One of [`METRICS`](crate::plan::METRICS).
    pub metric: &'static str,
    /// Over all repetitions: of latencies and completion, all requests together; of the rest, the median.
    pub value: f64,
    /// The value's unit.
    pub unit: &'static str,
    /// What the paper gives, if it does.
    pub published: Option<f64>,
    /// The seed of the first repetition; further ones count up.
    pub seed: u64,
    /// How many repetitions there were.
    pub repetitions: usize,
    /// The links.
    pub network: String,
    /// The congestion controller.
    pub congestion: String,
    /// Where it was measured.
    #[serde(flatten)]
    pub origin: Origin,
}

impl Row {
    /// A line about a plan as a whole, without a figure yet.
    pub(super) fn of(plan: &Plan, scheduler: Scheduler, origin: &Origin) -> Self {
        Self {
            plan: plan.name.clone(),
            variant: plan.variant.clone(),
            scheduler,
            class: "all".to_owned(),
            metric: "",
            value: 0.0,
            unit: "",
            published: None,
            seed: plan.seed,
            repetitions: 0,
            network: plan.links(origin.is_native()),
            congestion: plan.congestion.to_string(),
            origin: origin.clone(),
        }
    }
}

impl Outcome {
    /// How long the requests of a class took, in all repetitions.
    #[must_use]
    pub fn latencies(&self, class: usize) -> Latencies {
        let samples = self.runs.iter().flat_map(|run| &run.samples).filter(|sample| sample.class == class);
        Latencies::of(samples.map(|sample| sample.latency_ns.map(Duration::from_nanos)))
    }

    /// The median over all repetitions of what a run measured besides latencies.
    #[must_use]
    pub fn figures(&self) -> Vec<(&'static str, f64, &'static str)> {
        let total_ms = median(self.runs.iter().map(|run| run.total_ns as f64 / 1e6));
        let mut figures = vec![("total_ms", total_ms, "ms")];
        figures.extend(self.medians(|run| &run.figures));
        figures
    }

    /// The same for a class.
    #[must_use]
    pub fn class_figures(&self, class: usize) -> Vec<(&'static str, f64, &'static str)> {
        self.medians(|run| run.class_figures.get(class).map_or(&[], Vec::as_slice)).collect()
    }

    fn medians(&self, figures: impl Fn(&Run) -> &[Figure]) -> impl Iterator<Item = (&'static str, f64, &'static str)> {
        let first = self.runs.first().map_or(&[][..], &figures);
        first.iter().map(move |figure| {
            let values = self.runs.iter().filter_map(|run| load::value(figures(run), figure.metric));
            (figure.metric, median(values), figure.unit)
        })
    }

    /// The lines of results of this outcome.
    #[must_use]
    pub fn rows(&self, plan: &Plan, origin: &Origin) -> Vec<Row> {
        let template = Row { repetitions: self.runs.len(), ..Row::of(plan, self.scheduler, origin) };
        let row = |class: &str, metric, value, unit| Row {
            class: class.to_owned(),
            metric,
            value,
            unit,
            published: plan.published(self.scheduler, class, metric),
            ..template.clone()
        };
        let mut rows = Vec::new();
        for (index, Class { name, deadline_ms, .. }) in plan.classes.iter().enumerate() {
            let latencies = self.latencies(index);
            let figures = [
                ("completion_pct", latencies.completion_pct(*deadline_ms), "%"),
                ("latency_mean_ms", latencies.mean_ms(), "ms"),
                ("latency_p50_ms", latencies.quantile_ms(0.5), "ms"),
                ("latency_p95_ms", latencies.quantile_ms(0.95), "ms"),
                ("latency_max_ms", latencies.quantile_ms(1.0), "ms"),
            ];
            rows.extend(figures.into_iter().filter_map(|(metric, value, unit)| Some(row(name, metric, value?, unit))));
            let measured = self.class_figures(index).into_iter();
            rows.extend(measured.map(|(metric, value, unit)| row(name, metric, value, unit)));
        }
        rows.extend(self.figures().into_iter().map(|(metric, value, unit)| row("all", metric, value, unit)));
        rows
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted_ms: Vec<_> = values.collect();
    sorted_ms.sort_by(f64::total_cmp);
    let requests = sorted_ms.len();
    Latencies { sorted_ms, requests }.quantile_ms(0.5).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Sample;

    fn outcome(latencies_ms: &[Option<u64>]) -> Outcome {
        let sample = |ms: &Option<u64>| Sample { class: 0, latency_ns: ms.map(|ms| ms * 1_000_000) };
        let run = Run { samples: latencies_ms.iter().map(sample).collect(), ..Run::default() };
        Outcome { scheduler: Scheduler::Rr, runs: vec![run.clone(), run] }
    }

    #[test]
    fn what_never_came_back_counts_as_a_request_but_has_no_latency() {
        let latencies = outcome(&[Some(10), Some(20), None, Some(40)]).latencies(0);
        assert_eq!(latencies.completion_pct(Some(20)), Some(50.0));
        assert_eq!(latencies.completion_pct(None), Some(75.0));
        assert_eq!([0.0, 0.5, 1.0].map(|share| latencies.quantile_ms(share)), [Some(10.0), Some(20.0), Some(40.0)]);
        assert_eq!(outcome(&[None]).latencies(0).quantile_ms(0.5), None);
        assert_eq!(outcome(&[]).latencies(0).completion_pct(None), None);
    }

    #[test]
    fn quantiles_lie_between_ranks() {
        let latencies = Latencies { sorted_ms: vec![0.0, 10.0, 40.0], requests: 3 };
        assert_eq!([0.25, 0.75, 0.9].map(|share| latencies.quantile_ms(share)), [Some(5.0), Some(25.0), Some(34.0)]);
    }
}
