//! Rows of results.

use anyhow::Result;
use instruments::rows::parse_lines;
use plan::{
    BASE,
    serving::{Choose, ServingPlan, whole},
};
use sched::route::serving::Interval;
use serde::{Deserialize, Serialize};

use super::{
    figures::{Figures, Task},
    play::Cell,
};

/// One line of results, without its origin.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Row {
    /// The plan's name.
    pub plan: String,
    /// The variant's name.
    pub variant: String,
    /// The workload's name.
    pub workload: String,
    /// Requests per second, if the workload has several rates; `None` for the mean over them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// The link's scheduler, if there is a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<String>,
    /// The policy's name.
    pub policy: String,
    /// The task's name, or `all`.
    pub task: String,
    /// One of [`METRICS`](plan::serving::METRICS), with its subject: `windows_0.99`, `selected_pct_6.7b`.
    pub metric: String,
    /// The mean over seeds; for each seed, over trainings.
    pub value: f64,
    /// The lower end of the 95 % interval over seeds.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
    /// The unit.
    pub unit: String,
    /// The number of requests or windows over all seeds; each is counted once, whatever the number of trainings.
    pub samples: usize,
    /// The least and the greatest of the trainings' own means.
    pub trainings: [f64; 2],
    /// How many trainings there were.
    pub training_count: usize,
    /// The paper's value, if it gives one.
    pub published: Option<f64>,
    /// The first seed; further ones count up.
    pub seed: u64,
    /// How many seeds there were.
    pub repetitions: u64,
}

impl Row {
    /// Reads lines of JSON; the origin in each line is ignored.
    ///
    /// # Errors
    /// When a line is no row; the error has its number.
    pub fn parse_all(text: &str) -> Result<Vec<Self>> {
        parse_lines(text)
    }

    /// Returns its value with its interval.
    pub(super) const fn interval(&self) -> Interval {
        Interval { mean: self.value, low: self.low, high: self.high }
    }
}

/// The runs of a cell: by policy, by seed, by training.
pub(super) type ByPolicy = Vec<Vec<Vec<Figures>>>;

/// The runs of one policy in one cell.
type Runs = [Vec<Figures>];

/// Returns the rows of a cell; `by_policy` has its runs in the order of the plan's policies.
pub(super) fn of_cell(plan: &ServingPlan, cell: &Cell, by_policy: &[Vec<Vec<Figures>>]) -> Vec<Row> {
    let mut rows = Vec::new();
    let best = best_alone(plan, by_policy);
    // For variants, and for the rates of each scheduler, only the scores matter: files with all figures would take
    // megabytes.
    let whole = plan.variant == BASE;
    if !whole && cell.rate.is_some() {
        return rows;
    }
    let brief = plan.link.is_some() && cell.rate.is_some();
    for (policy, runs) in plan.policies.iter().zip(by_policy) {
        let maker = Maker { plan, cell, rate: cell.rate, policy: &policy.name };
        let fixed = matches!(policy.choose, Choose::Fixed(_) | Choose::RoundRobin | Choose::LeastLoaded);
        // The scores show the effect of the guard.
        let by_task = whole && !fixed && !policy.guarded && plan.link.is_none();
        let tasks = (0..plan.tasks.len()).filter(|_| by_task).map(Some);
        for task in std::iter::once(None).chain(tasks) {
            let samples = runs.iter().filter_map(|of_seed| of_seed.first()).map(|run| run.of_task(task).requests).sum();
            let of_task = |figure: fn(&Task) -> Option<f64>| Values::of(runs, |run| figure(&run.of_task(task)));
            rows.extend(maker.row(task, "score".to_owned(), "", &of_task(Task::score), samples));
            if task.is_none() && !brief {
                rows.extend(maker.row(task, "met_pct".to_owned(), "%", &of_task(Task::met_pct), samples));
            }
            for (at, model) in plan.models.iter().enumerate().filter(|_| by_task) {
                let values = Values::of(runs, |run| run.of_task(task).selected_pct(at));
                rows.extend(maker.row(task, format!("selected_pct_{}", model.name), "%", &values, samples));
            }
        }
        for (at, threshold) in cell.workload(plan).thresholds.iter().enumerate() {
            let count = |run: &Figures| Some(run.windows.1.get(at).copied().unwrap_or_default() as f64);
            let samples = runs.iter().filter_map(|of_seed| of_seed.first()).map(|run| run.windows.0).sum();
            rows.extend(maker.row(
                None,
                format!("windows_{threshold:.2}"),
                "windows",
                &Values::of(runs, count),
                samples,
            ));
        }
        if !matches!(policy.choose, Choose::Fixed(_)) && !brief {
            rows.extend(maker.over(best.as_deref(), runs));
        }
    }
    rows
}

/// Returns the rows of a workload's means over its rates, all rates weighted equally; `by_rate` has the runs of each
/// rate.
pub(super) fn over_rates(plan: &ServingPlan, cell: &Cell, by_rate: &[ByPolicy]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (at, policy) in plan.policies.iter().enumerate() {
        let maker = Maker { plan, cell, rate: None, policy: &policy.name };
        for (metric, unit, figure) in
            [("score", "", Task::score as fn(&Task) -> Option<f64>), ("met_pct", "%", Task::met_pct)]
        {
            let of_rates: Vec<_> =
                by_rate.iter().map(|by_policy| Values::of(&by_policy[at], |run| figure(&run.of_task(None)))).collect();
            let samples = by_rate.iter().flat_map(|by_policy| &by_policy[at]);
            let samples = samples.filter_map(|of_seed| of_seed.first()).map(|run| run.of_task(None).requests).sum();
            rows.extend(maker.row(None, metric.to_owned(), unit, &Values::mean(&of_rates), samples));
        }
    }
    rows
}

/// The values of a figure, by seed and by training.
#[derive(Clone, Debug)]
struct Values(Vec<Vec<f64>>);

impl Values {
    /// Omits seeds for which the figure has no value.
    fn of(runs: &Runs, figure: impl Fn(&Figures) -> Option<f64>) -> Self {
        Self(runs.iter().filter_map(|of_seed| of_seed.iter().map(&figure).collect()).collect())
    }

    /// Returns the mean of several, seed by seed and training by training; no values if some have fewer seeds than
    /// others.
    fn mean(several: &[Self]) -> Self {
        if several.windows(2).any(|pair| pair[0].0.len() != pair[1].0.len()) {
            return Self(Vec::new());
        }
        let mut sum = several.first().map_or(Vec::new(), |first| first.0.clone());
        for other in several.iter().skip(1) {
            for (sum, other) in sum.iter_mut().zip(&other.0) {
                sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
            }
        }
        sum.iter_mut().flatten().for_each(|value| *value /= several.len().max(1) as f64);
        Self(sum)
    }

    fn by_seed(&self) -> Vec<f64> {
        self.0.iter().map(|of_seed| mean(of_seed)).collect()
    }

    /// Returns the least and the greatest of the trainings' means over seeds, and the number of trainings.
    fn trainings(&self) -> ([f64; 2], usize) {
        let count = self.0.first().map_or(0, Vec::len);
        let means = (0..count).map(|at| {
            let of_training: Vec<_> = self.0.iter().filter_map(|of_seed| of_seed.get(at)).copied().collect();
            mean(&of_training)
        });
        let (least, most) =
            means.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), mean| (least.min(mean), most.max(mean)));
        ([least, most], count)
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Returns the values by seed of the single model with the highest mean.
fn best_alone(plan: &ServingPlan, by_policy: &[Vec<Vec<Figures>>]) -> Option<Vec<f64>> {
    let alone = plan.policies.iter().zip(by_policy).filter(|(policy, _)| matches!(policy.choose, Choose::Fixed(_)));
    alone
        .map(|(_, runs)| Values::of(runs, Figures::score).by_seed())
        .max_by(|one, other| mean(one).total_cmp(&mean(other)))
}

/// Makes rows of a policy in a cell.
struct Maker<'a> {
    plan: &'a ServingPlan,
    cell: &'a Cell,
    rate: Option<f64>,
    policy: &'a str,
}

impl Maker<'_> {
    /// Makes a row. Returns `None` if fewer than two seeds have a value.
    fn row(&self, task: Option<usize>, metric: String, unit: &str, values: &Values, samples: usize) -> Option<Row> {
        let Self { plan, cell, rate, policy } = *self;
        (values.0.len() >= 2).then_some(())?;
        let interval = Interval::of(&values.by_seed());
        let Interval { mean, low, high } = whole(&metric).map_or(interval, |whole| interval.of_share(whole));
        let (trainings, training_count) = values.trainings();
        let workload = &cell.workload(plan).name;
        let scheduler = plan.schedulers().get(cell.scheduler).copied().flatten();
        let wanted = rate.is_none() && task.is_none();
        Some(Row {
            plan: plan.name.clone(),
            variant: plan.variant.clone(),
            workload: workload.clone(),
            rate,
            scheduler: scheduler.map(|scheduler| scheduler.name().to_owned()),
            policy: policy.to_owned(),
            task: task.and_then(|task| plan.tasks.get(task)).map_or("all", |task| &task.name).to_owned(),
            published: plan.published(workload, scheduler, policy, &metric).filter(|_| wanted),
            metric,
            value: rounded(mean),
            low: rounded(low),
            high: rounded(high),
            unit: unit.to_owned(),
            samples,
            trainings: trainings.map(rounded),
            training_count,
            seed: plan.seeds.evaluation,
            repetitions: plan.seeds.evaluations,
        })
    }

    /// Returns how far a policy is above the best single model, seed by seed.
    fn over(&self, best: Option<&[f64]>, runs: &Runs) -> Option<Row> {
        let mut values = Values::of(runs, Figures::score);
        for (of_seed, best) in values.0.iter_mut().zip(best?) {
            of_seed.iter_mut().for_each(|value| *value -= best);
        }
        let samples = runs.iter().filter_map(|of_seed| of_seed.first()).map(|run| run.of_task(None).requests).sum();
        self.row(None, "over_best_model".to_owned(), "", &values, samples)
    }
}

/// Rounds to the precision of results, so that files stay readable.
fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}
