//! Figures from samples.

use std::time::Duration;

use instruments::{
    load::{self, Figure},
    median::median,
    origin::Origin,
    rows::distinct,
};
use plan::{Class, Plan, Scheduler};
use sched::route::serving::Interval;

use super::{
    Run, Stream,
    row::{ALL, Row},
};

/// All repetitions of a scheduler.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The scheduler that was compared.
    pub scheduler: Scheduler,
    /// The repetitions.
    pub runs: Vec<Run>,
}

/// How long requests took. A request that never received its whole echo, because it was discarded or the run ended, counts
/// as infinitely long: quantiles include it, and a figure that it would make infinite does not exist.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// The latencies of requests that received their whole echo, ascending, in milliseconds.
    sorted_ms: Vec<f64>,
    /// How many requests there were, including those without a latency.
    requests: usize,
}

impl Latencies {
    /// Collects the latencies of requests; `None` stands for a request whose echo never came.
    pub(super) fn of(requests: impl Iterator<Item = Option<Duration>>) -> Self {
        let all: Vec<_> = requests.collect();
        let mut sorted_ms: Vec<_> = all.iter().flatten().map(|latency| latency.as_secs_f64() * 1e3).collect();
        sorted_ms.sort_by(f64::total_cmp);
        Self { sorted_ms, requests: all.len() }
    }

    /// Returns how many requests there were.
    #[must_use]
    pub const fn requests(&self) -> usize {
        self.requests
    }

    /// Returns the latency that the fraction `share` (0 to 1) of all requests do not exceed, by linear interpolation
    /// between ranks. Returns `None` if there were no requests, or too few of them were completed. It is exact, unlike a
    /// histogram's, because there are few values.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        let last = self.requests.checked_sub(1)?;
        let rank = last as f64 * share.clamp(0.0, 1.0);
        let at = |rank: f64| self.sorted_ms.get(rank as usize).copied();
        Some(at(rank)? + (at(rank.ceil())? - at(rank)?) * rank.fract())
    }

    /// Returns the longest latency of a completed request.
    #[must_use]
    pub fn longest_completed_ms(&self) -> Option<f64> {
        self.sorted_ms.last().copied()
    }

    /// Returns the percentage of all requests that were completed within the deadline, or completed at all without one.
    #[must_use]
    pub fn completion_pct(&self, deadline_ms: Option<u64>) -> Option<f64> {
        let met = |latency_ms: &f64| deadline_ms.is_none_or(|deadline| *latency_ms <= deadline as f64);
        (self.requests > 0).then(|| 100.0 * self.sorted_ms.partition_point(met) as f64 / self.requests as f64)
    }

    /// Returns the arithmetic mean of the latencies of all requests, or `None` if there were none, or one was not
    /// completed.
    #[must_use]
    pub fn mean_ms(&self) -> Option<f64> {
        let all = self.requests > 0 && self.sorted_ms.len() == self.requests;
        all.then(|| self.sorted_ms.iter().sum::<f64>() / self.requests as f64)
    }
}

/// A figure of all repetitions together, and of each.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// One of [`METRICS`](plan::METRICS).
    pub metric: &'static str,
    /// The value of all repetitions together; `None` if it is infinite.
    pub value: Option<f64>,
    /// The value of each repetition, in the order of their seeds; `None` if it is infinite or was not measured.
    pub by_seed: Vec<Option<f64>>,
    /// The unit.
    pub unit: &'static str,
}

impl Measured {
    /// Returns the mean of the repetitions with its 95 % interval, or `None` if there are fewer than two repetitions or
    /// one has no value. The interval of a share ends at 0 and 100 %.
    #[must_use]
    pub fn interval(&self) -> Option<Interval> {
        let interval = over(&self.by_seed)?;
        Some(plan::whole(self.metric).map_or(interval, |whole| interval.of_share(whole)))
    }
}

impl Outcome {
    /// Returns the latencies of a class's requests, in all repetitions.
    #[must_use]
    pub fn latencies(&self, class: usize) -> Latencies {
        latencies(self.runs.iter(), class)
    }

    /// Returns the figures of a class's requests: how many met their deadline, and how long they took.
    #[must_use]
    pub fn requests(&self, index: usize, class: &Class) -> Vec<Measured> {
        let all = self.latencies(index);
        if all.requests() == 0 {
            return Vec::new();
        }
        let by_seed: Vec<_> = self.runs.iter().map(|run| latencies(std::iter::once(run), index)).collect();
        let measured = |metric, unit, figure: &dyn Fn(&Latencies) -> Option<f64>| Measured {
            metric,
            value: figure(&all),
            by_seed: by_seed.iter().map(figure).collect(),
            unit,
        };
        let mut figures = vec![
            measured("completion_pct", "%", &|latencies| latencies.completion_pct(class.deadline_ms)),
            measured("latency_mean_ms", "ms", &Latencies::mean_ms),
            measured("latency_p50_ms", "ms", &|latencies| latencies.quantile_ms(0.5)),
            measured("latency_p95_ms", "ms", &|latencies| latencies.quantile_ms(0.95)),
            measured("latency_max_ms", "ms", &|latencies| latencies.quantile_ms(1.0)),
        ];
        figures.extend(self.tokens(index));
        figures
    }

    /// Returns when the first tokens of a class's answers were read, and the times between tokens. A token that was never read counts
    /// as infinitely late. Returns nothing if the requests are not to a model.
    fn tokens(&self, class: usize) -> Vec<Measured> {
        const QUANTILES: [(&str, bool, f64); 4] = [
            ("first_p50_ms", true, 0.5),
            ("first_p99_ms", true, 0.99),
            ("gap_p50_ms", false, 0.5),
            ("gap_p99_ms", false, 0.99),
        ];
        let of = |runs: &[Run], is_first: bool| {
            let streams = runs.iter().flat_map(|run| &run.streams).filter(|stream| stream.class == class);
            Latencies::of(streams.flat_map(|stream| if is_first { vec![stream.first()] } else { stream.gaps() }))
        };
        let measured = |(metric, is_first, share): (&'static str, bool, f64)| Measured {
            metric,
            value: of(&self.runs, is_first).quantile_ms(share),
            by_seed: self.runs.iter().map(|run| of(std::slice::from_ref(run), is_first).quantile_ms(share)).collect(),
            unit: "ms",
        };
        let is_of_models = self.runs.iter().any(|run| !run.streams.is_empty());
        QUANTILES.into_iter().filter(|_| is_of_models).map(measured).collect()
    }

    /// Returns what runs measured besides latencies, as medians over the repetitions that measured it.
    #[must_use]
    pub fn figures(&self) -> Vec<Measured> {
        let totals: Vec<_> = self.runs.iter().map(|run| Some(run.total_ns as f64 / 1e6)).collect();
        let value = median(totals.iter().flatten().copied());
        let mut figures = vec![Measured { metric: "total_ms", value, by_seed: totals, unit: "ms" }];
        figures.extend(self.medians(|run| &run.figures));
        figures
    }

    /// The same for a class.
    #[must_use]
    pub fn class_figures(&self, class: usize) -> Vec<Measured> {
        self.medians(|run| run.class_figures.get(class).map_or(&[], Vec::as_slice)).collect()
    }

    fn medians(&self, figures: impl Fn(&Run) -> &[Figure]) -> impl Iterator<Item = Measured> {
        // Any run, even the first, may lack a figure that another has.
        let all = distinct(self.runs.iter().flat_map(&figures).map(|figure| (figure.metric, figure.unit)));
        all.into_iter().map(move |(metric, unit)| {
            let by_seed: Vec<_> = self.runs.iter().map(|run| load::value(figures(run), metric)).collect();
            Measured { metric, value: median(by_seed.iter().flatten().copied()), by_seed, unit }
        })
    }

    /// Returns the rows of this outcome.
    #[must_use]
    pub fn rows(&self, plan: &Plan, origin: &Origin) -> Vec<Row> {
        let template = Row { repetitions: self.runs.len(), ..Row::of(plan, self.scheduler, origin) };
        let is_cut = |metric| self.runs.iter().any(|run| run.lower_bounds.contains(&metric));
        let row = |class: &str, measured: Measured| {
            let interval = measured.interval();
            Row {
                lower_bound: class == ALL && is_cut(measured.metric),
                class: class.to_owned(),
                metric: measured.metric.to_owned(),
                value: measured.value,
                low: interval.map(|interval| interval.low),
                high: interval.map(|interval| interval.high),
                by_seed: measured.by_seed,
                unit: measured.unit.to_owned(),
                published: plan.published(self.scheduler, class, measured.metric),
                ..template.clone()
            }
        };
        let mut rows = Vec::new();
        for (index, class) in plan.classes.iter().enumerate() {
            let measured = self.requests(index, class).into_iter().chain(self.class_figures(index));
            rows.extend(measured.map(|measured| row(&class.name, measured)));
        }
        rows.extend(self.figures().into_iter().map(|measured| row(ALL, measured)));
        rows
    }
}

impl Stream {
    /// Returns when the first token was read, from the start of the request; `None` if it never was.
    fn first(&self) -> Option<Duration> {
        self.read_ns.first().copied().map(Duration::from_nanos)
    }

    /// Returns the time from each token to the next; `None` for each that was never read.
    fn gaps(&self) -> Vec<Option<Duration>> {
        let read = self.read_ns.windows(2).map(|pair| Some(Duration::from_nanos(pair[1] - pair[0])));
        let unread = self.tokens - self.read_ns.len().max(1).min(self.tokens);
        read.chain(std::iter::repeat_n(None, unread)).collect()
    }
}

/// Returns the mean of all repetitions with its interval, or `None` if there are fewer than two or one has no value.
pub(super) fn over(by_seed: &[Option<f64>]) -> Option<Interval> {
    let values: Option<Vec<f64>> = by_seed.iter().copied().collect();
    values.filter(|values| values.len() > 1).map(|values| Interval::of(&values))
}

fn latencies<'a>(runs: impl Iterator<Item = &'a Run>, class: usize) -> Latencies {
    let samples = runs.flat_map(|run| &run.samples).filter(|sample| sample.class == class);
    Latencies::of(samples.map(|sample| sample.latency_ns.map(Duration::from_nanos)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sample;

    fn outcome(latencies_ms: &[Option<u64>]) -> Outcome {
        let sample = |ms: &Option<u64>| Sample { class: 0, latency_ns: ms.map(|ms| ms * 1_000_000) };
        let run = Run { samples: latencies_ms.iter().map(sample).collect(), ..Run::default() };
        Outcome { scheduler: Scheduler::Rr, runs: vec![run.clone(), run] }
    }

    #[test]
    fn a_request_that_is_never_completed_takes_for_ever() {
        // Two repetitions of each latency.
        let latencies = outcome(&[Some(10), Some(20), None, Some(40)]).latencies(0);
        assert_eq!(latencies.completion_pct(Some(20)), Some(50.0));
        assert_eq!(latencies.completion_pct(None), Some(75.0));
        assert_eq!(
            [0.0, 0.3, 5.0 / 7.0, 0.8, 1.0].map(|share| latencies.quantile_ms(share)),
            [Some(10.0), Some(20.0), Some(40.0), None, None]
        );
        assert_eq!((latencies.mean_ms(), latencies.longest_completed_ms()), (None, Some(40.0)));
        assert_eq!(outcome(&[Some(10), Some(20)]).latencies(0).mean_ms(), Some(15.0));
        assert_eq!(outcome(&[None]).latencies(0).quantile_ms(0.5), None);
        assert_eq!(outcome(&[]).latencies(0).completion_pct(None), None);
    }

    #[test]
    fn an_interval_is_over_repetitions_and_none_where_one_is_infinite() {
        let run = |ms: &[Option<u64>]| outcome(ms).runs[0].clone();
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let of = |runs| {
            let outcome = Outcome { scheduler: Scheduler::Rr, runs };
            outcome.requests(0, &plan.classes[0]).into_iter().find(|of| of.metric == "latency_p50_ms").unwrap()
        };
        let both = of(vec![run(&[Some(10)]), run(&[Some(20)])]);
        assert_eq!((both.value, both.by_seed.as_slice()), (Some(15.0), &[Some(10.0), Some(20.0)][..]));
        let interval = both.interval().unwrap();
        assert!(interval.low < 10.0 && interval.mean == 15.0 && interval.high > 20.0);
        assert_eq!(of(vec![run(&[Some(10)])]).interval(), None, "one repetition says nothing about chance");
        let one = of(vec![run(&[Some(10), Some(10), Some(10)]), run(&[None])]);
        assert_eq!((one.value, one.interval()), (Some(10.0), None));
    }

    #[test]
    fn the_interval_of_a_share_ends_at_0_and_100_percent() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let runs = [&[Some(10), Some(10)][..], &[Some(10), None]].map(|ms| outcome(ms).runs[0].clone()).to_vec();
        let outcome = Outcome { scheduler: Scheduler::Rr, runs };
        let rows = outcome.rows(&plan, &Origin::of_this_run("lab").unwrap());
        let row = rows.iter().find(|row| row.metric == "completion_pct").unwrap();
        assert_eq!((row.value, row.low, row.high), (Some(75.0), Some(0.0), Some(100.0)));
    }

    #[test]
    fn a_figure_of_any_run_is_a_figure_of_all() {
        let run = |figures: &[(&'static str, f64)]| {
            let figure = |&(metric, value)| Figure { metric, value, unit: "ms" };
            Run { figures: figures.iter().map(figure).collect(), ..Run::default() }
        };
        let runs = vec![run(&[("first", 1.0)]), run(&[("later", 3.0)]), run(&[("first", 2.0), ("later", 5.0)])];
        let figures = Outcome { scheduler: Scheduler::Rr, runs }.figures();
        let of = |metric: &str| figures.iter().find(|of| of.metric == metric).map(|of| (of.value, of.by_seed.clone()));
        assert_eq!(of("first"), Some((Some(1.5), vec![Some(1.0), None, Some(2.0)])));
        assert_eq!(of("later"), Some((Some(4.0), vec![None, Some(3.0), Some(5.0)])));
    }

    #[test]
    fn rows_say_which_figures_the_limit_made_too_small() {
        let mut plan = Plan::read("thesis-fig7-8").unwrap();
        plan.workload.limit_s = 2;
        let origin = Origin::of_this_run("virtual-network").unwrap();
        let bounds = |plan: &Plan| {
            let runs = vec![crate::run(plan, Scheduler::Rr, plan::Clock::VirtualNetwork, 1).unwrap()];
            let rows = Outcome { scheduler: Scheduler::Rr, runs }.rows(plan, &origin);
            let written = Row::lines(&rows).unwrap();
            assert_eq!(
                written.matches("\"lower_bound\":true").count(),
                rows.iter().filter(|row| row.lower_bound).count()
            );
            let text = crate::tables(plan, &rows);
            let bounds = rows.iter().filter(|row| row.lower_bound);
            bounds.map(|row| (row.metric.clone(), text.matches("≥ ").count())).collect::<Vec<_>>()
        };
        let cut = bounds(&plan);
        assert_eq!(cut, ["total_ms", "goodput_mbit"].map(|metric| (metric.to_owned(), 2)));
        plan.workload = Plan::read("thesis-fig7-8").unwrap().workload;
        assert!(bounds(&plan).is_empty(), "a run that ends by itself has none");
    }

    #[test]
    fn tokens_that_were_never_read_come_infinitely_late() {
        let of = |tokens, read_ms: &[u64]| Stream {
            class: 0,
            tokens,
            read_ns: read_ms.iter().map(|ms| ms * 1_000_000).collect(),
        };
        let ms = |gaps: Vec<Option<Duration>>| {
            gaps.into_iter().map(|gap| gap.map(|gap| gap.as_millis())).collect::<Vec<_>>()
        };
        assert_eq!(ms(of(3, &[10, 15, 35]).gaps()), [Some(5), Some(20)]);
        assert_eq!(ms(of(4, &[10, 15]).gaps()), [Some(5), None, None]);
        assert_eq!((ms(of(3, &[]).gaps()), of(3, &[]).first()), (vec![None, None], None));
        assert_eq!((ms(of(1, &[7]).gaps()), of(1, &[7]).first()), (vec![], Some(Duration::from_millis(7))));

        let plan = Plan::read("llm-transport").unwrap();
        let sample = |ms: u64| Sample { class: 0, latency_ns: Some(ms * 1_000_000) };
        let run = |streams: Vec<Stream>| Run { samples: vec![sample(40); streams.len()], streams, ..Run::default() };
        let whole = run(vec![of(3, &[10, 15, 35]), of(3, &[30, 35, 45])]);
        let broken = run(vec![of(3, &[10, 15, 35]), of(3, &[])]);
        let figures = |runs| {
            let outcome = Outcome { scheduler: Scheduler::Http3, runs };
            let figures = outcome.requests(0, &plan.classes[0]);
            let tenths = |ms: f64| (ms * 10.0).round() / 10.0;
            let rounded = |of: &Measured| (of.value.map(tenths), of.by_seed.iter().map(|ms| ms.map(tenths)).collect());
            let find = |metric| figures.iter().find(|of| of.metric == metric).map(rounded);
            ["first_p50_ms", "gap_p50_ms", "gap_p99_ms"].map(|metric| find(metric).unwrap())
        };
        assert_eq!(figures(vec![whole.clone()]), [20.0, 7.5, 19.7].map(|ms| (Some(ms), vec![Some(ms)])));
        let [first, gap, late] = figures(vec![whole, broken]);
        assert_eq!(first, (Some(20.0), vec![Some(20.0), None]), "in one run, half of the first tokens never came");
        assert_eq!((gap.1, late), (vec![Some(7.5), None], (None, vec![Some(19.7), None])));
    }

    #[test]
    fn quantiles_lie_between_ranks() {
        let latencies = Latencies { sorted_ms: vec![0.0, 10.0, 40.0], requests: 3 };
        assert_eq!([0.25, 0.75, 0.9].map(|share| latencies.quantile_ms(share)), [Some(5.0), Some(25.0), Some(34.0)]);
    }
}
