//! Results for people.

use std::fmt::Write as _;

use super::{Outcome, Row};
use crate::plan::{Class, Plan};

/// Renders outcomes of a plan as Markdown: a table for each class, and for what concerns all. What the paper gives
/// stands in brackets.
#[must_use]
pub fn table(plan: &Plan, outcomes: &[Outcome]) -> String {
    let Plan { name, variant, title, congestion, .. } = plan;
    let mut text = format!("{name} ({variant}): {title}\n{}; {congestion}\n", plan.links(false));
    for (index, Class { name, bytes, deadline_ms, .. }) in plan.classes.iter().enumerate() {
        let figures = outcomes.iter().any(|outcome| !outcome.class_figures(index).is_empty());
        if !figures && outcomes.iter().all(|outcome| outcome.latencies(index).completion_pct(None).is_none()) {
            continue;
        }
        let within = deadline_ms.map_or(String::new(), |ms| format!(", deadline {ms} ms"));
        _ = writeln!(text, "\n{name}: {bytes} bytes{within}\n");
        let rows = outcomes.iter().map(|outcome| {
            let latencies = outcome.latencies(index);
            let cell = |metric, value: Option<f64>, unit, decimals| {
                let measured = value.map_or("–".to_owned(), |value| format!("{value:.decimals$} {unit}"));
                match plan.published(outcome.scheduler, name, metric) {
                    Some(published) => format!("{measured} ({published})"),
                    None => measured,
                }
            };
            [
                outcome.scheduler.name().to_owned(),
                cell("completion_pct", latencies.completion_pct(*deadline_ms), "%", 1),
                cell("latency_mean_ms", latencies.mean_ms(), "ms", 0),
                cell("latency_p50_ms", latencies.quantile_ms(0.5), "ms", 0),
                cell("latency_p95_ms", latencies.quantile_ms(0.95), "ms", 0),
                cell("latency_max_ms", latencies.quantile_ms(1.0), "ms", 0),
            ]
        });
        let figures = outcomes.iter().flat_map(|outcome| {
            let name = outcome.scheduler.name();
            outcome
                .class_figures(index)
                .into_iter()
                .map(move |(metric, value, unit)| [name.to_owned(), metric.to_owned(), format!("{value:.4} {unit}")])
        });
        if outcomes.iter().any(|outcome| !outcome.class_figures(index).is_empty()) {
            text += &markdown(["scheduler", "metric", "median"], figures);
            continue;
        }
        let met = if deadline_ms.is_some() { "deadline met" } else { "completed" };
        text += &markdown(["scheduler", met, "mean", "p50", "p95", "max"], rows);
    }
    text += "\nall classes\n\n";
    let rows = outcomes.iter().flat_map(|outcome| {
        outcome.figures().into_iter().map(|(metric, value, unit)| {
            let published = plan.published(outcome.scheduler, "all", metric);
            let published = published.map_or(String::new(), |value| format!(" ({value})"));
            [outcome.scheduler.name().to_owned(), metric.to_owned(), format!("{value:.1} {unit}{published}")]
        })
    });
    text + &markdown(["scheduler", "metric", "median"], rows)
}

/// Renders what managing streams cost.
#[must_use]
pub fn queues(rows: &[Row]) -> String {
    let rows = rows.iter().map(|Row { variant, value, unit, published, .. }| {
        let published = published.map_or(String::new(), |value| format!(" ({value})"));
        [variant.clone(), format!("{value:.3} {unit}{published}")]
    });
    markdown(["queue", "managing streams"], rows)
}

/// A table whose columns have the width of their widest cell; all but the first are aligned right.
fn markdown<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            _ = if column == 0 { write!(text, "| {cell:<width$} ") } else { write!(text, "| {cell:>width$} ") };
        }
        text += "|\n";
        if index == 0 {
            let rule = |(column, width): (usize, usize)| match column {
                0 => "-".repeat(width + 2),
                _ => "-".repeat(width + 1) + ":",
            };
            _ = writeln!(text, "|{}|", widths.into_iter().enumerate().map(rule).collect::<Vec<_>>().join("|"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        experiment::{Run, Sample},
        plan::Scheduler,
    };

    #[test]
    fn what_the_paper_gives_stands_beside_what_was_measured() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let samples = vec![
            Sample { class: 0, latency_ns: Some(400_000_000) },
            Sample { class: 0, latency_ns: Some(1_200_000_000) },
            Sample { class: 1, latency_ns: None },
        ];
        let runs = vec![Run { samples, total_ns: 2_000_000_000, ..Run::default() }];
        let text = table(&plan, &[Outcome { scheduler: Scheduler::Abs, runs }]);
        let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| abs")).map(cells).collect();
        assert_eq!(rows[0][1..7], ["abs", "50.0 % (100)", "800 ms", "800 ms", "1160 ms", "1200 ms"]);
        assert_eq!(rows[1][1..7], ["abs", "0.0 %", "–", "–", "–", "–"]);
        assert_eq!(rows[2][1..4], ["abs", "total_ms", "2000.0 ms"], "nothing was measured of the third class");
    }
}
