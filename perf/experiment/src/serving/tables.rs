//! Tables of results, made from rows only, so that published tables can be checked against the rows.

use std::fmt::Write as _;

use instruments::rows::distinct;
use plan::serving::{Goals, Heavy, whole};

use super::row::Row;
use crate::table;

/// The rows of one variant and workload.
struct View<'a> {
    rows: Vec<&'a Row>,
    goals: &'a Goals,
    /// Policies that are compared with single models, in any workload.
    choosers: Vec<&'a str>,
}

/// Renders rows as Markdown: scores, met deadlines, met goals, windows and selected models of the first variant; scores of the
/// others.
#[must_use]
pub fn tables(rows: &[Row], goals: &Goals) -> String {
    let mut text = String::new();
    let variants = distinct(rows.iter().map(|row| row.variant.as_str()));
    let Some((first, others)) = variants.split_first() else { return text };
    let of_first: Vec<_> = rows.iter().filter(|row| row.variant == *first).collect();
    if let Some(row) = of_first.first() {
        _ = writeln!(
            text,
            "{} ({first}): means over seeds {} to {} ± half of the 95 % interval.\n",
            row.plan,
            row.seed,
            row.seed + row.repetitions - 1
        );
    }
    let workloads = distinct(of_first.iter().map(|row| row.workload.as_str()));
    let choosers = of_first.iter().filter(|row| row.metric == "over_best_model");
    let choosers = distinct(choosers.map(|row| row.policy.as_str()));
    let mut single = Vec::new();
    for workload in &workloads {
        let rows = of_first.iter().filter(|row| row.workload == **workload).copied().collect();
        let view = View { rows, goals, choosers: choosers.clone() };
        if view.rows.iter().any(|row| row.scheduler.is_some()) {
            text += &view.by_scheduler(workload);
        } else if view.rates().is_empty() {
            single.push((*workload, view));
        } else {
            text += &view.by_rate(workload);
        }
    }
    if !single.is_empty() {
        text += &scores(&single);
        for (workload, view) in &single {
            text += &view.windows(workload);
        }
    }
    if !others.is_empty() {
        text += &of_variants(rows, &variants);
    }
    text.trim_end().to_owned() + "\n"
}

/// A mean with its interval.
fn cell(row: Option<&&Row>, decimals: usize) -> String {
    row.map_or("–".to_owned(), |row| row.interval().to_text(whole(&row.metric), decimals))
}

/// The same, with the least and greatest mean of several trainings, and the paper's value in brackets.
fn full(row: Option<&&Row>, decimals: usize) -> String {
    let mut text = cell(row, decimals);
    if let Some(row) = row {
        if row.training_count > 1 {
            let [least, most] = row.trainings;
            _ = write!(text, ", {least:.decimals$} to {most:.decimals$}");
        }
        if let Some(published) = row.published {
            _ = write!(text, " ({published})");
        }
    }
    text
}

fn markdown(head: &[String], rows: &[Vec<String>]) -> String {
    table::markdown(head, rows) + "\n"
}

fn head<'a>(first: &'a str, others: impl Iterator<Item = &'a str>) -> Vec<String> {
    std::iter::once(first).chain(others).map(str::to_owned).collect()
}

impl View<'_> {
    fn find(&self, rate: Option<f64>, policy: &str, task: &str, metric: &str) -> Option<&&Row> {
        self.rows
            .iter()
            .find(|row| row.rate == rate && row.policy == policy && row.task == task && row.metric == metric)
    }

    fn rates(&self) -> Vec<f64> {
        distinct(self.rows.iter().filter_map(|row| row.rate))
    }

    fn policies(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|row| row.policy.as_str()))
    }

    fn by_rate(&self, workload: &str) -> String {
        let rates = self.rates();
        let names: Vec<_> = rates.iter().map(f64::to_string).collect();
        let mut text = format!(
            "`{workload}`, mean score by requests per second; for several trainings, the least and the greatest mean \
             follow:\n\n"
        );
        let row = |policy: &&str, metric: &str, decimals| -> Vec<String> {
            rates.iter().map(|rate| cell(self.find(Some(*rate), policy, "all", metric), decimals)).collect()
        };
        let of_scores = self.policies().into_iter().map(|policy| {
            let mean = full(self.find(None, policy, "all", "score"), 3);
            [vec![policy.to_owned(), mean], row(&policy, "score", 2)].concat()
        });
        let all = ["all rates"].into_iter().chain(names.iter().map(String::as_str));
        text += &markdown(&head("policy", all), &of_scores.collect::<Vec<_>>());
        _ = writeln!(text, "`{workload}`, score less that of the best model alone at this rate, seed by seed:\n");
        let over =
            self.choosers.iter().map(|policy| [vec![(*policy).to_owned()], row(policy, "over_best_model", 3)].concat());
        text += &markdown(&head("policy", names.iter().map(String::as_str)), &over.collect::<Vec<_>>());
        _ = writeln!(text, "`{workload}`, deadlines met, in %:\n");
        let met =
            self.policies().into_iter().map(|policy| [vec![policy.to_owned()], row(&policy, "met_pct", 1)].concat());
        text += &markdown(&head("policy", names.iter().map(String::as_str)), &met.collect::<Vec<_>>());
        text + &self.goals(workload, &rates) + &self.selected(workload, &rates)
    }

    /// Renders the plan's goals at steady rates, and whether they were met; nothing if it has none.
    fn goals(&self, workload: &str, rates: &[f64]) -> String {
        let Goals { below_best, heavy, edf_score: _ } = self.goals;
        if below_best.is_none() && heavy.is_none() {
            return String::new();
        }
        let over = |policy, rate| self.find(Some(rate), policy, "all", "over_best_model");
        let rows = self.choosers.iter().map(|policy| {
            let all = rates.iter().filter_map(|rate| Some((*rate, over(policy, *rate)?.value)));
            let worst = all.clone().min_by(|(_, one), (_, other)| one.total_cmp(other));
            let near = below_best.map(|near| {
                worst.map_or("–".to_owned(), |(rate, value)| {
                    let verdict = if value >= -near { "met" } else { "failed" };
                    format!("{verdict}: {value:+.3} at {rate}")
                })
            });
            let above = rates.iter().filter(|rate| over(policy, **rate).is_some_and(|row| row.low > 0.0));
            let above: Vec<_> = above.map(f64::to_string).collect();
            let far = heavy.as_ref().map(|Heavy { rate, met_pct, .. }| {
                let met = self.find(Some(*rate), policy, "all", "met_pct");
                met.zip(over(policy, *rate)).map_or("–".to_owned(), |(met, over)| {
                    let verdict = if met.value >= *met_pct && over.value > 0.0 { "met" } else { "failed" };
                    format!("{verdict}: {:.1} %, {:+.3}", met.value, over.value)
                })
            });
            [Some((*policy).to_owned()), near, Some(above.join(", ")), far].into_iter().flatten().collect()
        });
        let rows: Vec<_> = rows.collect();
        let titles = [
            Some("policy".to_owned()),
            below_best.map(|near| format!("at most {near} below the best model alone at each rate; the worst")),
            Some("rates at which it is above the best model alone by more than chance".to_owned()),
            heavy.as_ref().map(|Heavy { rate, met_pct, reason }| {
                format!("at {rate}/s, {reason}: {met_pct} % of deadlines met, and above the best model alone")
            }),
        ];
        let titles: Vec<_> = titles.into_iter().flatten().collect();
        format!("`{workload}`, goals:\n\n") + &markdown(&titles, &rows)
    }

    fn selected(&self, workload: &str, rates: &[f64]) -> String {
        let chosen = self.rows.iter().filter_map(|row| row.metric.strip_prefix("selected_pct_"));
        let models = distinct(chosen);
        let tasks: Vec<_> = distinct(self.rows.iter().map(|row| row.task.as_str()));
        let tasks: Vec<_> = tasks.into_iter().filter(|task| *task != "all").collect();
        let last = rates.len().saturating_sub(3);
        let spans = [("all", rates), ("the highest three", rates.get(last..).unwrap_or_default())];
        let mut rows = Vec::new();
        let counted = self.rows.iter().filter(|row| row.metric.starts_with("selected_pct_"));
        for policy in distinct(counted.map(|row| row.policy.as_str())) {
            for (name, rates) in spans {
                let share = |task: &str, model: &str| {
                    let metric = format!("selected_pct_{model}");
                    let values = rates.iter().filter_map(|rate| self.find(Some(*rate), policy, task, &metric));
                    values.map(|row| row.value).sum::<f64>() / rates.len().max(1) as f64
                };
                let of_task = |task: &&str| {
                    let shares: Vec<_> = models.iter().map(|model| format!("{:.0}", share(task, model))).collect();
                    shares.join(" / ")
                };
                rows.push([vec![policy.to_owned(), name.to_owned()], tasks.iter().map(of_task).collect()].concat());
            }
        }
        let title = format!(
            "`{workload}`, part of each task's requests that went to {}, in %, mean over rates:\n\n",
            models.join(" / ")
        );
        title + &markdown(&head("policy", ["rates"].into_iter().chain(tasks)), &rows)
    }

    fn windows(&self, workload: &str) -> String {
        let thresholds = distinct(self.rows.iter().filter_map(|row| row.metric.strip_prefix("windows_")));
        let find = |policy, threshold: &str| self.find(None, policy, "all", &format!("windows_{threshold}"));
        let policies = self.policies();
        let Some(base) = policies.first() else { return String::new() };
        let Some(some) = thresholds.first().and_then(|threshold| find(base, threshold)) else { return String::new() };
        // Ratios are of means over seeds, or of the paper's counts.
        let ratio = |value: f64, base: Option<f64>| {
            base.filter(|base| *base > 0.0).map_or(String::new(), |base| format!(", {:.2}×", value / base))
        };
        let mut rows = Vec::new();
        for policy in &policies {
            let cells = thresholds.iter().map(|threshold| {
                find(policy, threshold).map_or("–".to_owned(), |row| {
                    let of_base = find(base, threshold).map(|row| row.value).filter(|_| policy != base);
                    cell(Some(row), 0) + &ratio(row.value, of_base)
                })
            });
            rows.push([vec![(*policy).to_owned()], cells.collect()].concat());
        }
        for policy in &policies {
            let counts = || thresholds.iter().map(|threshold| find(policy, threshold)?.published);
            if counts().all(|count| count.is_none()) {
                continue;
            }
            let cells = thresholds.iter().zip(counts()).map(|(threshold, count)| {
                count.map_or("–".to_owned(), |count| {
                    let of_base = find(base, threshold).and_then(|row| row.published).filter(|_| policy != base);
                    format!("{count}{}", ratio(count, of_base))
                })
            });
            rows.push([vec![format!("published: {policy}")], cells.collect()].concat());
        }
        let windows = some.samples as f64 / some.repetitions as f64;
        let title = format!(
            "`{workload}`, number of windows with at least this mean score, of {windows:.0} for each seed, and its ratio to \
             the number of `{base}`:\n\n"
        );
        title + &markdown(&head("policy", thresholds.into_iter()), &rows)
    }

    /// Renders the content of the paper's tables 3 and 4: the schedulers of the link, and the policies.
    fn by_scheduler(&self, workload: &str) -> String {
        let policies = self.policies();
        let schedulers = distinct(self.rows.iter().filter_map(|row| row.scheduler.as_deref()));
        let find = |scheduler: &str, policy: &str, metric: &str| {
            let of = self.rows.iter().filter(|row| row.scheduler.as_deref() == Some(scheduler) && row.rate.is_none());
            let mut of = of.filter(|row| row.policy == policy && row.task == "all" && row.metric == metric);
            of.next()
        };
        let (mut text, choosers) = (String::new(), &self.choosers);
        for (metric, what, decimals) in [("score", "mean score", 3), ("met_pct", "deadlines met, in %", 1)] {
            let rows = schedulers.iter().map(|scheduler| {
                let cells = policies.iter().map(|policy| full(find(scheduler, policy, metric), decimals));
                [vec![(*scheduler).to_owned()], cells.collect()].concat()
            });
            _ = writeln!(text, "`{workload}`, {what}:\n");
            text += &markdown(&head("scheduler", policies.iter().copied()), &rows.collect::<Vec<_>>());
        }
        if schedulers.iter().any(|at| policies.iter().any(|policy| find(at, policy, "over_best_model").is_some())) {
            _ = writeln!(text, "`{workload}`, score less that of the best model alone, seed by seed:\n");
            let rows = schedulers.iter().map(|scheduler| {
                let cells = choosers.iter().map(|policy| full(find(scheduler, policy, "over_best_model"), 3));
                [vec![(*scheduler).to_owned()], cells.collect()].concat()
            });
            text += &markdown(&head("scheduler", choosers.iter().copied()), &rows.collect::<Vec<_>>());
        }
        let alone: Vec<_> = policies.iter().filter(|policy| !choosers.contains(policy)).collect();
        let rows = choosers.iter().map(|policy| {
            let score = |scheduler: &str, policy: &str| find(scheduler, policy, "score").map(|row| row.value);
            let least = |other: &str| {
                let over = schedulers.iter().filter_map(|at| Some((*at, score(at, policy)? - score(at, other)?)));
                over.min_by(|(_, one), (_, other)| one.total_cmp(other))
            };
            let against = alone.iter().map(|other| {
                least(other).map_or("–".to_owned(), |(scheduler, over)| {
                    let verdict = if over > 0.0 { "met" } else { "failed" };
                    format!("{verdict}: {over:+.3} under {scheduler}")
                })
            });
            let edf = schedulers.iter().find(|scheduler| scheduler.starts_with("edf"));
            let edf = self.goals.edf_score.map(|wanted| {
                edf.and_then(|edf| score(edf, policy)).map_or("–".to_owned(), |value| {
                    let verdict = if value >= wanted { "met" } else { "failed" };
                    format!("{verdict}: {value:.3}, {:+.3}", value - wanted)
                })
            });
            [vec![(*policy).to_owned()], against.collect(), edf.into_iter().collect()].concat()
        });
        let rows: Vec<_> = rows.collect();
        let over = alone.iter().map(|other| format!("above {other} under every scheduler; the smallest lead"));
        let edf = self.goals.edf_score.map(|wanted| format!("at least {wanted:.2} under edf"));
        let titles = [vec!["policy".to_owned()], over.collect(), edf.into_iter().collect()].concat();
        text + &format!("`{workload}`, goals:\n\n") + &markdown(&titles, &rows)
    }
}

/// Renders the scores of workloads without rates.
fn scores(single: &[(&str, View<'_>)]) -> String {
    let Some((_, view)) = single.first() else { return String::new() };
    let rows = view.policies().into_iter().map(|policy| {
        let cells = single.iter().map(|(_, view)| full(view.find(None, policy, "all", "score"), 3));
        [vec![policy.to_owned()], cells.collect()].concat()
    });
    let rows: Vec<_> = rows.collect();
    "Mean score at changing rates; for several trainings, the least and the greatest mean follow:\n\n".to_owned()
        + &markdown(&head("policy", single.iter().map(|(workload, _)| *workload)), &rows)
}

/// Renders mean scores by variant, in the order of policies.
fn of_variants(rows: &[Row], variants: &[&str]) -> String {
    let of_scores = || rows.iter().filter(|row| row.rate.is_none() && row.task == "all" && row.metric == "score");
    let policies = distinct(of_scores().map(|row| row.policy.as_str()));
    let mut text = String::new();
    for workload in distinct(of_scores().map(|row| row.workload.as_str())) {
        let mut lines = Vec::new();
        for variant in variants {
            let here = || of_scores().filter(|row| row.workload == workload && row.variant == *variant);
            let schedulers = distinct(here().map(|row| row.scheduler.as_deref().unwrap_or_default()));
            for scheduler in schedulers {
                let cells = policies.iter().map(|policy| {
                    let same =
                        |row: &&Row| row.policy == *policy && row.scheduler.as_deref().unwrap_or_default() == scheduler;
                    cell(here().find(same).as_ref(), 3)
                });
                let name = if scheduler.is_empty() { (*variant).to_owned() } else { format!("{variant}, {scheduler}") };
                lines.push([vec![name], cells.collect()].concat());
            }
        }
        _ = writeln!(text, "`{workload}`, mean score by variant:\n");
        text += &markdown(&head("variant", policies.iter().copied()), &lines);
    }
    text
}
