//! Tables of results, made from rows only.

use std::fmt::Write as _;

use instruments::rows::distinct;
use plan::trees::TreesScheduler;

use super::row::Row;

/// The least delay that is reported, as a fraction of the faster time. Users do not notice less.
const FELT: f64 = 0.02;

/// Renders rows as Markdown: a comparison of schedulers with `paced` over all cells, the cells where `paced` is behind, and for each
/// page a table of both figures.
#[must_use]
pub fn tables(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let schedulers = distinct(rows.iter().map(|row| row.scheduler));
    let mut text = format!("{}: seeds {} to {}.\n\n", first.plan, first.seed, first.seed + first.repetitions - 1);
    text += &summary(rows, &schedulers);
    text += &behind(rows);
    for page in distinct(rows.iter().map(|row| row.page.as_str())) {
        _ = writeln!(
            text,
            "Page {page}: milliseconds until the resources that block rendering have arrived / until the whole page \
             has, each ± half of the 95 % interval.\n"
        );
        _ = write!(text, "| browser | {} |", first.axis);
        schedulers.iter().for_each(|scheduler| _ = write!(text, " {} |", scheduler.name()));
        _ = writeln!(text, "\n|---|---|{}", "--:|".repeat(schedulers.len()));
        let here: Vec<_> = rows.iter().filter(|row| row.page == page).collect();
        for (browser, cell) in distinct(here.iter().map(|row| (row.browser, row.cell.as_str()))) {
            _ = write!(text, "| {} | {cell} |", browser.name());
            for scheduler in &schedulers {
                let found = here
                    .iter()
                    .find(|row| (row.browser, row.cell.as_str(), row.scheduler) == (browser, cell, *scheduler));
                let shown = found.map_or("–".to_owned(), |row| {
                    format!(
                        "{:.0} ± {:.0} / {:.0} ± {:.0}",
                        row.render_ms, row.render_ci_ms, row.load_ms, row.load_ci_ms
                    )
                });
                _ = write!(text, " {shown} |");
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text.trim_end().to_owned() + "\n"
}

/// For each scheduler: its time as a multiple of that under `paced`, and in how many cells it is ahead or behind by more than random
/// variation.
fn summary(rows: &[Row], schedulers: &[TreesScheduler]) -> String {
    let mut text = String::from(
        "Time as a multiple of that under paced (geometric mean over pages, browsers and paths), and number of cells in \
         which it is earlier, later:\n\n\
         | scheduler | render | earlier, later | whole page | earlier, later |\n|---|--:|--:|--:|--:|\n",
    );
    for scheduler in schedulers.iter().filter(|scheduler| **scheduler != TreesScheduler::Paced) {
        let here: Vec<_> = rows.iter().filter(|row| row.scheduler == *scheduler).collect();
        let figure = |of: fn(&Row) -> [f64; 3]| {
            let figures: Vec<_> = here.iter().map(|row| of(row)).collect();
            let logs: f64 = figures.iter().map(|[time, later, _]| (time / (time - later)).ln()).sum();
            let earlier = figures.iter().filter(|[_, later, ci]| later + ci < 0.0).count();
            let later = figures.iter().filter(|[_, later, ci]| later - ci > 0.0).count();
            format!("{:.2} | {earlier}, {later} of {}", (logs / figures.len() as f64).exp(), figures.len())
        };
        let render = figure(|row| [row.render_ms, row.render_later_ms, row.render_later_ci_ms]);
        let load = figure(|row| [row.load_ms, row.load_later_ms, row.load_later_ci_ms]);
        _ = writeln!(text, "| {} | {render} | {load} |", scheduler.name());
    }
    text + "\n"
}

/// Lists where `paced` is slower than a scheduler that does not know the outcome, by more than random variation and by more than
/// [`FELT`]: for each page and setting of paths, each such scheduler with its largest lead.
fn behind(rows: &[Row]) -> String {
    let (mut text, all) = (String::new(), distinct(rows.iter().map(|row| row.browser)).len());
    for (figure, of) in [
        ("Rendering", (|row| [row.render_ms, row.render_later_ms, row.render_later_ci_ms]) as fn(&Row) -> [f64; 3]),
        ("The whole page", |row| [row.load_ms, row.load_later_ms, row.load_later_ci_ms]),
    ] {
        let is_behind = |row: &&Row| {
            let [time, later, ci] = of(row);
            let is_known = matches!(row.scheduler, TreesScheduler::Paced | TreesScheduler::BestPerGroup);
            !is_known && later + ci < 0.0 && -later > FELT * time
        };
        let ahead: Vec<_> = rows.iter().filter(is_behind).collect();
        _ = writeln!(
            text,
            "{figure} is earlier than under paced, by more than chance and more than {:.0} %{}\n",
            100.0 * FELT,
            if ahead.is_empty() { ": nowhere." } else { ":" }
        );
        for (page, cell) in distinct(ahead.iter().map(|row| (row.page.as_str(), row.cell.as_str()))) {
            let here: Vec<_> =
                ahead.iter().filter(|row| (row.page.as_str(), row.cell.as_str()) == (page, cell)).collect();
            let most = |scheduler| {
                let rows: Vec<_> = here.iter().filter(|row| row.scheduler == scheduler).collect();
                let most = rows.iter().max_by(|a, b| of(b)[1].total_cmp(&of(a)[1]))?;
                let [time, later, _] = of(most);
                let browsers: Vec<_> = rows.iter().map(|row| row.browser.name()).collect();
                let name = most.scheduler.name();
                Some(format!(
                    "{name} by {:.0} of {:.0} ms ({})",
                    -later,
                    time - later,
                    if browsers.len() == all { "all".to_owned() } else { browsers.join(", ") }
                ))
            };
            let schedulers = distinct(here.iter().map(|row| row.scheduler)).into_iter().filter_map(most);
            _ = writeln!(text, "- {page}, {cell}: {}", schedulers.collect::<Vec<_>>().join("; "));
        }
        if !ahead.is_empty() {
            text.push('\n');
        }
    }
    text
}
