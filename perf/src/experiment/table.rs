//! Results for people.

use std::fmt::Write as _;

use super::Outcome;
use crate::plan::{Class, Plan};

/// Renders outcomes of a plan as Markdown: a table for each class, with what the paper gives in brackets.
#[must_use]
pub fn table(plan: &Plan, outcomes: &[Outcome]) -> String {
    let mut text =
        format!("{} ({}): {}\n{}, {}\n", plan.name, plan.variant, plan.title, plan.network, plan.congestion.name());
    for (index, Class { name, bytes, deadline_ms, .. }) in plan.classes.iter().enumerate() {
        let within = deadline_ms.map_or("no deadline".to_owned(), |ms| format!("within {ms} ms"));
        _ = write!(
            text,
            "\n{name}: {bytes} bytes, {within}\n\n| scheduler | completed | p50 | p95 | max |\n|---|--:|--:|--:|--:|\n"
        );
        for outcome in outcomes {
            let latencies = outcome.latencies(index);
            let cell = |metric, value: Option<f64>, unit, decimals| {
                let published = plan.published(outcome.scheduler, name, metric);
                let measured = value.map_or("–".to_owned(), |value| format!("{value:.decimals$} {unit}"));
                published.map_or(measured.clone(), |published| format!("{measured} ({published:.decimals$})"))
            };
            _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} |",
                outcome.scheduler.name(),
                cell("completion_pct", latencies.completion_pct(*deadline_ms), "%", 1),
                cell("latency_p50_ms", latencies.quantile_ms(0.5), "ms", 0),
                cell("latency_p95_ms", latencies.quantile_ms(0.95), "ms", 0),
                cell("latency_max_ms", latencies.quantile_ms(1.0), "ms", 0),
            );
        }
    }
    text += "\nall classes:";
    for outcome in outcomes {
        let figures = outcome.figures().into_iter().map(|(metric, value, _)| format!("{metric} {value:.1}"));
        _ = write!(text, "\n{}: {}", outcome.scheduler.name(), figures.collect::<Vec<_>>().join(", "));
    }
    text.push('\n');
    text
}
