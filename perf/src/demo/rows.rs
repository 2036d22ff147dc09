//! The results as rows, and the tables printed from them.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use experiment::markdown;
use sched::route::serving::Fate;
use serde::Serialize;

use super::{
    arrivals::Class,
    calibration::Alone,
    client::{Asked, Ended},
    contender::Contender,
    measurement::Offered,
    options::Demo,
    stage::{Choose, Congestion, Kind, MODELS},
};

/// A load served by one contender.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// The engines that answered.
    pub engine: Kind,
    /// What the link carries each way, in Mbit/s.
    pub link_mbit: f64,
    /// The seed of the arrivals.
    pub seed: u64,
    /// The congestion controller of TCP and of paced.
    pub congestion: Congestion,
    /// For how long requests arrived, in seconds.
    pub seconds: f64,
    /// The load, as a multiple of the large model's rate for one request after another.
    pub load: f64,
    /// Requests per second on average, of all classes.
    pub per_second: f64,
    /// How long each model takes alone; deadlines and loads derive from the large one's times.
    pub alone: BTreeMap<&'static str, Alone>,
    /// The contender that chose the engines.
    pub contender: &'static str,
    /// The gateway's policy; `None` without a gateway.
    pub policy: Option<Choose>,
    /// The mean reward of all requests.
    pub score: f64,
    /// The download's goodput, in Mbit/s.
    pub download_mbit: f64,
    /// CPU time of gateway and edge together, in seconds.
    pub cpu_s: f64,
    /// The outcomes by class.
    pub classes: BTreeMap<Class, OfClass>,
}

/// The outcome of a class's requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OfClass {
    /// Number of requests.
    pub requests: usize,
    /// Whole answers in time.
    pub met: usize,
    /// Whole answers that were late, and requests that were given up.
    pub late: usize,
    /// Late requests that the client gave up.
    pub given_up: usize,
    /// Requests answered with a status other than 200.
    pub refused: usize,
    /// Answers that broke off.
    pub failed: usize,
    /// The reason for the first of these.
    pub first_failure: Option<String>,
    /// The mean reward: the worth of the model's answers if the answer was in time, otherwise 0, as in
    /// [`sched::route::serving`].
    pub score: f64,
    /// How many requests each model answered, completely or not.
    pub selected: BTreeMap<String, usize>,
    /// From when a request was due to its first token, in milliseconds: median and 95 % of all requests; requests without a token
    /// count as the slowest. `None` for a quantile that too few requests reached, or if there were no requests.
    pub first_token_ms: [Option<f64>; 2],
    /// The same from when a request was due to the end of its whole answer.
    pub whole_ms: [Option<f64>; 2],
    /// Tokens of whole answers.
    pub tokens: u64,
}

/// An offered load.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    /// As a multiple of the large model's rate for one request after another.
    pub times: f64,
    /// Requests per second.
    pub per_second: f64,
    /// How long each model takes alone.
    pub alone: &'a [Alone; MODELS.len()],
    /// The seed of the arrivals.
    pub seed: u64,
}

impl Run {
    /// Summarizes the measurements of a load.
    #[must_use]
    pub fn of(demo: &Demo, contender: Contender, load: &Load<'_>, seen: &Offered) -> Self {
        let of_class = |class| (class, OfClass::of(seen.asked.iter().filter(|asked| asked.class == class)));
        Self {
            engine: demo.engine,
            link_mbit: demo.mbit,
            congestion: seen.congestion,
            seed: load.seed,
            seconds: demo.seconds,
            load: load.times,
            per_second: rounded(load.per_second),
            alone: MODELS.iter().map(|(model, _)| *model).zip(load.alone.iter().copied()).collect(),
            contender: contender.name(),
            policy: (contender == Contender::Paced).then_some(demo.policy),
            score: OfClass::of(seen.asked.iter()).score,
            download_mbit: rounded(seen.download_mbit),
            cpu_s: rounded(seen.cpu_s),
            classes: Class::ALL.map(of_class).into(),
        }
    }

    /// Returns the requests of all classes.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.classes.values().map(|class| class.requests).sum()
    }
}

impl OfClass {
    fn of<'a>(all: impl Iterator<Item = &'a Asked>) -> Self {
        let (mut sum, mut worth, mut first_token, mut whole) = (Self::default(), 0.0, Vec::new(), Vec::new());
        for asked in all {
            sum.requests += 1;
            match asked.fate() {
                Fate::Met => sum.met += 1,
                Fate::Late => sum.late += 1,
                Fate::Discarded => {}
            }
            worth += reward(asked);
            match &asked.ended {
                Ended::Whole => {
                    whole.push(asked.took);
                    sum.tokens += asked.tokens;
                }
                Ended::GivenUp => sum.given_up += 1,
                Ended::Refused(_) => sum.refused += 1,
                Ended::Failed(why) => {
                    sum.failed += 1;
                    sum.first_failure.get_or_insert_with(|| why.clone());
                }
            }
            first_token.extend(asked.first);
            if let Some(model) = &asked.model {
                *sum.selected.entry(model.clone()).or_default() += 1;
            }
        }
        sum.score = rounded(worth / sum.requests.max(1) as f64);
        (sum.first_token_ms, sum.whole_ms) = (spread(first_token, sum.requests), spread(whole, sum.requests));
        sum
    }

    /// Returns the share of requests that were answered in time, or 0 if there was no request.
    #[must_use]
    pub fn met_share(&self) -> f64 {
        self.met as f64 / self.requests.max(1) as f64
    }
}

/// Returns the worth of an answer in time, by its model; 0 if it was late.
fn reward(asked: &Asked) -> f64 {
    let of = asked.model.as_deref().and_then(|model| MODELS.iter().find(|(name, _)| *name == model));
    of.filter(|_| asked.fate() == Fate::Met).map_or(0.0, |(_, percent)| f64::from(*percent) / 100.0)
}

/// Returns the median and the 95th percentile of `requests` requests, in milliseconds. Requests without a value are the slowest, so
/// that giving up does not look fast.
fn spread(mut values: Vec<Duration>, requests: usize) -> [Option<f64>; 2] {
    values.sort_unstable();
    [0.5, 0.95].map(|share| {
        let rank = (share * requests as f64).ceil() as usize;
        values.get(rank.checked_sub(1)?).map(|value| rounded(value.as_secs_f64() * 1e3))
    })
}

/// Rounds off digits that are noise.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Returns the loads, in their order.
#[must_use]
pub fn loads(runs: &[Run]) -> Vec<f64> {
    let mut loads: Vec<_> = runs.iter().map(|run| run.load).collect();
    loads.dedup();
    loads
}

/// The results of a contender under a load, over all seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Together {
    /// The load.
    pub load: f64,
    /// Requests per second on average.
    pub per_second: f64,
    /// The contender that chose the engines.
    pub contender: &'static str,
    /// The seeds, in their order.
    pub seeds: Vec<u64>,
    /// The mean of the seeds' scores, the least and the greatest.
    pub score: [f64; 3],
    /// By class: met deadlines, and requests.
    pub met: BTreeMap<Class, (usize, usize)>,
}

/// Summarizes runs of several seeds, by load and contender.
#[must_use]
pub fn together(runs: &[Run]) -> Vec<Together> {
    let mut all: Vec<Together> = Vec::new();
    for load in loads(runs) {
        for contender in Contender::ALL.map(Contender::name) {
            let of: Vec<_> = runs.iter().filter(|run| run.load == load && run.contender == contender).collect();
            let Some(first) = of.first() else { continue };
            let scores = || of.iter().map(|run| run.score);
            let met = |class: Class| {
                let classes = || of.iter().filter_map(|run| run.classes.get(&class));
                (class, (classes().map(|of| of.met).sum(), classes().map(|of| of.requests).sum()))
            };
            all.push(Together {
                load,
                per_second: first.per_second,
                contender,
                seeds: of.iter().map(|run| run.seed).collect(),
                score: [
                    rounded(scores().sum::<f64>() / of.len() as f64),
                    scores().fold(f64::INFINITY, f64::min),
                    scores().fold(0.0, f64::max),
                ],
                met: Class::ALL.map(met).into(),
            });
        }
    }
    all
}

/// Describes how long each model takes alone, and the deadlines and rates that follow.
#[must_use]
pub fn calibration(alone: &[Alone; MODELS.len()]) -> String {
    let mut text = String::from("\nalone, over the empty link, by plain HTTP:\n");
    for ((model, quality), Alone { first_ms, token_ms }) in MODELS.iter().zip(alone) {
        let quality = f64::from(*quality) / 100.0;
        _ = writeln!(
            text,
            "  {model:6} first token {first_ms:4.0} ms, each further {token_ms:5.1} ms; an answer in time is worth {quality}"
        );
    }
    let large = alone[0];
    let [urgent, batch] = Class::ALL.map(Class::patience);
    _ = writeln!(
        text,
        "deadlines: an urgent request has {urgent} times what the large model takes for it alone, a batch request {batch} times"
    );
    _ = write!(text, "a load of 1: {:.2} requests a second, the large model's pace one by one", large.per_second());
    text
}

/// Renders tables in Markdown.
#[must_use]
pub fn report(runs: &[Run]) -> String {
    let mut text = String::new();
    if let Some(run) = runs.first() {
        let (engines, congestion) = (run.engine.name(), run.congestion.name());
        _ = writeln!(text, "engines: {engines}; congestion control of TCP and of paced: {congestion}\n");
    }
    let mut seeds: Vec<_> = runs.iter().map(|run| run.seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    if seeds.len() > 1 {
        text += &summary(runs);
    }
    for (load, seed) in loads(runs).into_iter().flat_map(|load| seeds.iter().map(move |seed| (load, *seed))) {
        let here: Vec<_> = runs.iter().filter(|run| run.load == load && run.seed == seed).collect();
        let Some(first) = here.first() else { continue };
        let (requests, per_second) = (first.requests(), first.per_second);
        _ = writeln!(text, "load {load}: {requests} requests, {per_second:.2} a second, seed {seed}\n");
        let cells = here.iter().flat_map(|run| run.classes.iter().map(|(class, of)| cells(run, *class, of)));
        let head = [
            "served by",
            "class",
            "deadline met",
            "score",
            "late, refused, failed",
            "by large, medium, small",
            "first token ms, p50, p95",
            "whole ms, p50, p95",
        ];
        text += &markdown(&head.map(str::to_owned), &cells.collect::<Vec<_>>());
        text.push('\n');
        for run in here {
            let Run { contender, score, download_mbit, cpu_s, .. } = run;
            _ = write!(
                text,
                "{contender}: score {score:.3} over all requests; the download got {download_mbit:.2} Mbit/s"
            );
            if run.contender == Contender::Paced.name() {
                _ = write!(text, "; gateway and edge took {cpu_s:.1} s of CPU");
            }
            text.push('\n');
            for (class, of) in &run.classes {
                if let Some(why) = &of.first_failure {
                    _ = writeln!(text, "  of {} requests, the first that failed: {why}", class.name());
                }
            }
        }
        text.push('\n');
    }
    text + "score: 1 for an answer of the large model in time, 0.91 and 0.69 for one of the others, 0 for what is late\n"
}

/// Renders a table over all seeds.
fn summary(runs: &[Run]) -> String {
    let head = ["load", "served by", "urgent in time", "batch in time", "score, mean", "least and most of a seed"];
    let row = |of: &Together| {
        let met = |class| of.met.get(&class).map_or_else(String::new, |(met, all)| format!("{met} of {all}"));
        vec![
            format!("{} ({:.1} requests/s)", of.load, of.per_second),
            of.contender.to_owned(),
            met(Class::Urgent),
            met(Class::Batch),
            format!("{:.3}", of.score[0]),
            format!("{:.3} to {:.3}", of.score[1], of.score[2]),
        ]
    };
    let together = together(runs);
    let seeds = together.first().map_or(0, |of| of.seeds.len());
    let rows: Vec<_> = together.iter().map(row).collect();
    format!("{seeds} seeds together:\n\n{}\n", markdown(&head.map(str::to_owned), &rows))
}

fn cells(run: &Run, class: Class, of: &OfClass) -> Vec<String> {
    let by: Vec<_> = MODELS.iter().map(|(model, _)| of.selected.get(*model).unwrap_or(&0).to_string()).collect();
    let ms = |spread: [Option<f64>; 2]| {
        if of.requests == 0 {
            return String::new();
        }
        spread.map(|ms| ms.map_or_else(|| "never".to_owned(), |ms| format!("{ms:.0}"))).join(", ")
    };
    vec![
        run.contender.to_owned(),
        class.name().to_owned(),
        format!("{} of {}, {:.0} %", of.met, of.requests, 100.0 * of.met_share()),
        format!("{:.3}", of.score),
        format!("{}, {}, {}", of.late, of.refused, of.failed),
        by.join(", "),
        ms(of.first_token_ms),
        ms(of.whole_ms),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;
    use instruments::origin::{Origin, json_lines};

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        demo: Demo,
    }

    fn asked(class: Class, model: &str, took_ms: u64, ended: Ended) -> Asked {
        Asked {
            class,
            budget: Duration::from_millis(500),
            model: (!matches!(ended, Ended::Refused(_))).then(|| model.to_owned()),
            first: Some(Duration::from_millis(took_ms / 2)),
            took: Duration::from_millis(took_ms),
            tokens: 10,
            ended,
        }
    }

    /// Returns runs of two loads; under the second, paced met no deadline.
    pub fn some() -> Vec<Run> {
        let demo = Arguments::parse_from(["", "--engine", "emulated", "--seed", "7"]).demo;
        let mixed = || {
            vec![
                asked(Class::Urgent, "large", 400, Ended::Whole),
                asked(Class::Urgent, "small", 500, Ended::Whole),
                asked(Class::Urgent, "large", 501, Ended::Whole),
                asked(Class::Urgent, "large", 10, Ended::Refused(429)),
                asked(Class::Batch, "medium", 100, Ended::Whole),
                asked(Class::Batch, "medium", 100, Ended::Failed("it broke off".into())),
                asked(Class::Batch, "large", 1_500, Ended::GivenUp),
            ]
        };
        let late = || vec![asked(Class::Batch, "large", 900, Ended::Whole)];
        let alone = [Alone { first_ms: 100.0, token_ms: 20.0 }; MODELS.len()];
        let make = |contender, times, asked| {
            let load = Load { times, per_second: times * 2.0, alone: &alone, seed: 7 };
            Run::of(
                &demo,
                contender,
                &load,
                &Offered { asked, download_mbit: 0.5, cpu_s: 1.5, congestion: Congestion::Cubic },
            )
        };
        vec![
            make(Contender::RoundRobin, 0.5, mixed()),
            make(Contender::Paced, 0.5, mixed()),
            make(Contender::RoundRobin, 2.0, mixed()),
            make(Contender::Paced, 2.0, late()),
        ]
    }

    #[test]
    fn every_request_is_met_late_refused_or_failed_and_only_what_is_met_is_worth_something() {
        let runs = some();
        for of in runs.iter().flat_map(|run| run.classes.values()) {
            assert_eq!(of.met + of.late + of.refused + of.failed, of.requests);
        }
        let [urgent, batch] = Class::ALL.map(|class| &runs[0].classes[&class]);
        assert_eq!((urgent.requests, urgent.met, urgent.late, urgent.refused, urgent.failed), (4, 2, 1, 1, 0));
        assert_eq!((batch.requests, batch.met, batch.late, batch.given_up, batch.failed), (3, 1, 1, 1, 1));
        // One of four was refused, and one of three given up and one broke off.
        assert_eq!((urgent.whole_ms, urgent.first_token_ms), ([Some(500.0), None], [Some(200.0), Some(250.0)]));
        assert_eq!((batch.whole_ms, batch.first_token_ms), ([None, None], [Some(50.0), Some(750.0)]));
        assert_eq!(urgent.selected, BTreeMap::from([("large".to_owned(), 2), ("small".to_owned(), 1)]));
        assert!((urgent.score - (1.0 + 0.69) / 4.0).abs() < 1e-3, "{urgent:?}");
        assert!((runs[0].score - (1.0 + 0.69 + 0.91) / 7.0).abs() < 1e-3, "{}", runs[0].score);
        assert_eq!((runs[0].requests(), loads(&runs)), (7, vec![0.5, 2.0]));
    }

    #[test]
    fn a_class_without_requests_has_no_times_and_no_score() {
        let none = &some()[3].classes[&Class::Urgent];
        assert_eq!(none, &OfClass::default());
    }

    #[test]
    fn a_report_has_a_table_for_each_load_and_names_engines_and_failures() {
        let text = report(&some());
        for part in [
            "engines: emulated",
            "congestion control of TCP and of paced: cubic",
            "500, never",
            "load 0.5: 7 requests, 1.00 a second, seed 7",
            "load 2: 7 requests, 4.00 a second, seed 7",
            "2 of 4, 50 %",
            "0 of 1, 0 %",
            "paced: score 0.000 over all requests; the download got 0.50 Mbit/s",
            "of batch requests, the first that failed: it broke off",
        ] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
    }

    #[test]
    fn runs_of_several_seeds_are_summed_up_by_load_and_contender() {
        let mut runs = some();
        runs.extend(some().into_iter().map(|run| Run { seed: 8, score: 0.0, ..run }));
        runs.sort_by(|one, other| one.load.total_cmp(&other.load));
        let all = together(&runs);
        assert_eq!(all.len(), 4);
        let first = &all[0];
        assert_eq!((first.load, first.contender, &first.seeds[..]), (0.5, "round robin, HTTP", &[7, 8][..]));
        assert_eq!((first.met[&Class::Urgent], first.met[&Class::Batch]), ((4, 8), (2, 6)));
        let score = some()[0].score;
        assert_eq!(first.score, [rounded(score / 2.0), 0.0, score]);
        let text = report(&runs);
        for part in ["2 seeds together", "4 of 8", "seed 7", "seed 8"] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
        assert!(!report(&some()).contains("together"));
    }

    #[test]
    fn each_run_is_a_line_that_says_where_it_comes_from() {
        let lines = json_lines(&some(), &Origin::of_this_run("wall").unwrap()).unwrap();
        let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 4);
        for key in ["machine", "kernel", "commit", "command", "engine", "contender"] {
            assert!(lines.iter().all(|line| line[key].is_string()), "{key}");
        }
        assert_eq!((&lines[0]["seed"], &lines[0]["classes"]["urgent"]["met"]), (&7.into(), &2.into()));
        assert_eq!(lines[0]["alone"]["large"]["first_ms"], 100.0);
    }
}
