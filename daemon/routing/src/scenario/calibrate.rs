//! A scenario made from recorded decisions.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use sched::route::Cost;

use super::{ClassSpec, EngineSpec, MOST_MS, ModelSpec, Quality, Scenario};
use crate::decision::Decision;

/// A scenario, and how many records were used for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    /// The scenario.
    pub scenario: Scenario,
    /// Decisions that it is made from. A request whose first model failed counts once.
    pub used: usize,
    /// Decisions about requests without a budget for the whole answer, which are left out.
    pub without_budget: usize,
}

/// Fewer requests show nothing about rates and lengths.
const FEWEST: usize = 20;

/// The records of a class.
#[derive(Default)]
struct Seen {
    budgets_ms: Vec<f64>,
    prompts: Vec<f64>,
    answers: Vec<f64>,
}

/// Makes a scenario from decisions about one alias, which must be in order of time: engines as they were last known, classes
/// with the median of their budgets and with their recorded lengths, and rates from half the lowest to twice the highest of a
/// minute.
///
/// # Errors
/// There are too few decisions, or the costs of an engine are not known yet.
pub fn calibrate(decisions: &[Decision], alias: &str) -> Result<Calibrated> {
    let mut classes: BTreeMap<&str, Seen> = BTreeMap::new();
    let mut used = Vec::new();
    let mut without_budget = 0;
    for decision in decisions.iter().filter(|decision| decision.alias == alias) {
        let Some(budget_ns) = decision.limits.budget_ns else {
            without_budget += usize::from(!decision.retry);
            continue;
        };
        let seen = classes.entry(&decision.class).or_default();
        // The record of the first try has the whole budget, and all models.
        if !decision.retry {
            used.push(decision);
            seen.budgets_ms.push(budget_ns as f64 / 1e6);
            seen.prompts.push(f64::from(decision.prompt_tokens.max(1)));
        }
        if let Some(outcome) = decision.outcome.filter(|outcome| outcome.tokens > 0) {
            seen.answers.push(outcome.tokens as f64);
        }
    }
    // For this class, only retries are recorded: its first tries came before the records began.
    classes.retain(|_, seen| !seen.budgets_ms.is_empty());
    let count = used.len();
    let last = used.last().with_context(|| match without_budget {
        0 => format!("there is no decision about {alias}: send requests to {alias}, each with a limit"),
        _ => format!(
            "none of the {without_budget} decisions about {alias} has a budget for the whole answer, which a scenario needs: send requests with \
             x-paced-budget-ms, or give their class a deadline"
        ),
    })?;
    ensure!(
        count >= FEWEST,
        "{count} decisions about {alias} with a budget for the whole answer are fewer than {FEWEST}{}: record for longer",
        if without_budget > 0 { format!(" ({without_budget} without one are left out)") } else { String::new() }
    );
    let mean_answer = f64::from(last.expected_tokens.max(1));
    let class = |(name, seen): (&str, Seen)| {
        let (prompt_tokens, sigma_prompt) = log_normal(&seen.prompts).unwrap_or((1.0, 0.0));
        let (answer_tokens, sigma) = log_normal(&seen.answers).unwrap_or((mean_answer, sigma_prompt));
        ClassSpec {
            name: name.to_owned(),
            share: rounded(seen.budgets_ms.len() as f64 / count as f64),
            budget_ms: rounded(median(seen.budgets_ms)).min(MOST_MS),
            budget_per_token_ms: 0.0,
            prompt_tokens: rounded(prompt_tokens),
            answer_tokens: rounded(answer_tokens.max(1.0)),
            sigma: rounded(sigma.min(3.0)),
        }
    };
    let runs = |engine: &crate::decision::EngineSnapshot| {
        let ms = engine.cost.map(|ns| rounded(ns / 1e6));
        EngineSpec {
            model: engine.model.clone(),
            gpu: engine.gpu,
            max_in_flight: engine.most_running,
            host_ms: ms[0],
            gpu_ms: ms[1],
            gpu_per_sequence_ms: ms[2],
            prefill_ms: ms[3],
            prefill_per_token_ms: ms[4],
            sharing: engine.cost[5].min(Cost::MAX_SHARING),
        }
    };
    let is_open = |model: &str| last.models.iter().any(|open| open.name == *model);
    let engines: Vec<EngineSpec> = last.engines.iter().filter(|engine| is_open(&engine.model)).map(runs).collect();
    if let Some(unknown) = engines.iter().find(|engine| engine.least_step_ms() <= 0.0) {
        anyhow::bail!(
            "the costs of an engine of {0} are unknown, because no answer has shown its speed yet: send requests to {0} by \
             its own name, as streams or with `usage` in answers of at least 8 tokens, and record for longer",
            unknown.model
        );
    }
    let served = |open: &crate::decision::Candidate| ModelSpec {
        name: open.name.clone(),
        quality_percent: Quality::Same((open.reward * 100.0).round()),
    };
    let scenario = Scenario {
        requests_per_sec: rates(&used),
        seconds: 60.0,
        round_trip_ms: rounded(median(used.iter().map(|one| one.path.smoothed_rtt_ns as f64 / 1e6).collect())),
        classes: classes.into_iter().map(class).collect(),
        models: last.models.iter().map(served).collect(),
        engines,
    };
    scenario.check()?;
    Ok(Calibrated { scenario, used: count, without_budget })
}

/// Returns six rates in geometric progression: from half the lowest to twice the highest rate in any minute with requests.
fn rates(decisions: &[&Decision]) -> Vec<f64> {
    let mut minutes: BTreeMap<u64, u32> = BTreeMap::new();
    decisions.iter().for_each(|decision| *minutes.entry(decision.at_ms / 60_000).or_default() += 1);
    let per_sec = |count: u32| f64::from(count) / 60.0;
    let least = minutes.values().min().map_or(1.0, |count| per_sec(*count)) / 2.0;
    let most = minutes.values().max().map_or(1.0, |count| per_sec(*count)) * 2.0;
    const STEPS: u8 = 5;
    (0..=STEPS).map(|step| rounded(least * (most / least).powf(f64::from(step) / f64::from(STEPS)))).collect()
}

/// Returns the mean of values above 0, and the standard deviation of their logarithms, for a log-normal distribution.
fn log_normal(values: &[f64]) -> Option<(f64, f64)> {
    let count = values.len() as f64;
    let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / count)?;
    let logs = || values.iter().map(|value| value.ln());
    let center = logs().sum::<f64>() / count;
    let variance = logs().map(|log| (log - center).powi(2)).sum::<f64>() / count;
    Some((mean, variance.sqrt()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Rounds to four significant digits, for people who read and change the text.
fn rounded(number: f64) -> f64 {
    if number == 0.0 || !number.is_finite() {
        return number;
    }
    let scale = 10f64.powf(3.0 - number.abs().log10().floor());
    (number * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::tests::decision;

    #[test]
    fn a_scenario_shows_what_was_recorded() {
        // One per second for a minute, then four per second for another.
        let seconds = (0..60).map(|at| at * 1_000).chain((0..240).map(|at| 60_000 + at * 250));
        let mut decisions: Vec<_> = seconds.map(|at_ms| decision(at_ms, 2, 3_000 + at_ms % 3)).collect();
        for late in decisions.iter_mut().step_by(3) {
            late.class = "batch".to_owned();
        }
        decisions[7].limits.budget_ns = None;
        decisions[8].alias = "other".to_owned();
        let Calibrated { scenario, used, without_budget } = calibrate(&decisions, "auto").unwrap();
        assert_eq!((used, without_budget), (298, 1));
        assert_eq!(scenario.class_names(), ["batch", "interactive"]);
        assert_eq!(scenario.classes[0].answer_tokens, 180.0);
        assert!((3_000.0..3_003.0).contains(&scenario.classes[1].budget_ms));
        assert_eq!(scenario.engines[0].gpu_ms, 20.0);
        assert_eq!(scenario.round_trip_ms, 40.0);
        let (first, last) = (scenario.requests_per_sec[0], scenario.requests_per_sec[5]);
        assert!((first - 58.0 / 60.0 / 2.0).abs() < 1e-3 && (last - 8.0).abs() < 1e-3, "{first} to {last}");
    }

    #[test]
    fn a_request_that_another_model_had_failed_counts_once_and_with_all_its_models() {
        let mut decisions: Vec<_> = (0..60).map(|at| decision(at * 1_000, 0, 3_000)).collect();
        let retry = |first: &mut Decision| {
            first.outcome = None;
            let mut retry = Decision { at_ms: first.at_ms + 1, retry: true, ..decision(0, 0, 10) };
            retry.models.remove(0);
            retry
        };
        let retries: Vec<_> = decisions.iter_mut().map(retry).collect();
        decisions.extend(retries);
        decisions.sort_by_key(|decision| decision.at_ms);
        let Calibrated { scenario, used, without_budget } = calibrate(&decisions, "auto").unwrap();
        assert_eq!((used, without_budget, scenario.model_names().len(), scenario.engines.len()), (60, 0, 2, 2));
        let class = &scenario.classes[0];
        assert_eq!((class.budget_ms, class.answer_tokens), (3_000.0, 180.0), "the answer is that of the last try");
        assert_eq!(scenario.requests_per_sec[5], 2.0);
    }

    #[test]
    fn retries_alone_are_no_class_and_no_requests_without_a_budget() {
        let retry = |at| Decision { retry: true, class: "batch".to_owned(), ..decision(at, 0, 3_000) };
        let with_retries = |count| {
            let first = (0..count).map(|at| decision(at * 1_000, 0, 3_000));
            first.chain((0..count).map(|at| retry(count * 1_000 + at))).collect::<Vec<_>>()
        };
        let Calibrated { scenario, used, without_budget } = calibrate(&with_retries(60), "auto").unwrap();
        assert_eq!((scenario.class_names(), used, without_budget), (vec!["interactive".to_owned()], 60, 0));
        let said = calibrate(&with_retries(5), "auto").unwrap_err().to_string();
        assert!(said.starts_with("5 decisions") && !said.contains("left out"), "{said}");
        let mut without = with_retries(5);
        without.iter_mut().for_each(|decision| decision.limits.budget_ns = None);
        let said = calibrate(&without, "auto").unwrap_err().to_string();
        assert!(said.starts_with("none of the 5 decisions"), "{said}");
    }

    #[test]
    fn a_known_engine_may_have_steps_that_cost_only_by_their_sequences() {
        let mut decisions: Vec<_> = (0..50).map(|at| decision(at, 0, 1_000)).collect();
        decisions.iter_mut().for_each(|decision| decision.engines[1].cost = [0.0, 0.0, 3e6, 0.0, 0.0, 0.0]);
        let scenario = calibrate(&decisions, "auto").unwrap().scenario;
        assert_eq!((scenario.engines[1].gpu_ms, scenario.engines[1].gpu_per_sequence_ms), (0.0, 3.0));
    }

    #[test]
    fn too_little_is_no_scenario() {
        let few: Vec<_> = (0..5).map(|at| decision(at, 0, 1_000)).collect();
        assert!(calibrate(&few, "auto").unwrap_err().to_string().contains("record for longer"));
        assert!(calibrate(&few, "other").unwrap_err().to_string().contains("no decision about other: send"));
        let mut without: Vec<_> = (0..50).map(|at| decision(at, 0, 1_000)).collect();
        without[5..].iter_mut().for_each(|decision| decision.limits.budget_ns = None);
        let said = calibrate(&without, "auto").unwrap_err().to_string();
        assert!(said.starts_with("5 decisions") && said.contains("(45 without one are left out)"), "{said}");
        without.iter_mut().for_each(|decision| decision.limits.budget_ns = None);
        let said = calibrate(&without, "auto").unwrap_err().to_string();
        assert!(said.starts_with("none of the 50 decisions") && said.contains("x-paced-budget-ms"), "{said}");
        let mut unknown: Vec<_> = (0..50).map(|at| decision(at, 0, 1_000)).collect();
        unknown.iter_mut().for_each(|decision| decision.engines[1].cost = [0.0; 6]);
        let said = calibrate(&unknown, "auto").unwrap_err().to_string();
        assert!(
            said.contains("of an engine of small are unknown, because no answer has shown its speed yet"),
            "{said}"
        );
    }

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!([0.0, 1.0 / 3.0, 12_345.6, 2e-5].map(rounded), [0.0, 0.3333, 12_350.0, 2e-5]);
    }
}
