//! Tables of results, made from rows only.

use std::fmt::Write as _;

use instruments::rows::distinct;
use plan::paths::Scheduler;

use super::row::Row;

/// Renders rows as Markdown: for the first variant, a table for each stream, with a line for each cell and a column for
/// each scheduler; for every variant, a comparison with `paced`.
#[must_use]
pub fn tables(rows: &[Row]) -> String {
    let mut text = String::new();
    let variants = distinct(rows.iter().map(|row| row.variant.as_str()));
    for (at, variant) in variants.into_iter().enumerate() {
        let here: Vec<_> = rows.iter().filter(|row| row.variant == variant).collect();
        let Some(first) = here.first() else { continue };
        if at > 0 {
            _ = writeln!(text, "{} ({variant}):\n", first.plan);
            text += &compared(&here);
            continue;
        }
        let last = first.seed + first.repetitions - 1;
        _ = writeln!(
            text,
            "{} ({variant}): milliseconds from request to last byte, mean ± standard deviation (not an interval) over seeds \
             {} to {last}; the closed form in brackets.\n",
            first.plan, first.seed
        );
        let schedulers = distinct(here.iter().map(|row| row.scheduler));
        for stream in distinct(here.iter().map(|row| row.stream.as_str())) {
            _ = writeln!(text, "Stream {stream}:\n");
            _ = write!(text, "| {} |", first.axis);
            schedulers.iter().for_each(|scheduler| _ = write!(text, " {} |", scheduler.name()));
            _ = writeln!(text, "\n|---|{}", "--:|".repeat(schedulers.len()));
            for cell in distinct(here.iter().map(|row| row.cell.as_str())) {
                _ = write!(text, "| {cell} |");
                for scheduler in &schedulers {
                    let found = find(&here, cell, *scheduler, stream);
                    _ = write!(text, " {} |", found.map_or("–".to_owned(), shown));
                }
                text.push('\n');
            }
            text.push('\n');
        }
        text += &compared(&here);
    }
    text.trim_end().to_owned() + "\n"
}

/// Compares `paced`: for the first stream with MPQUIC's own scheduler, for the last one with the best placement of whole
/// streams.
fn compared(rows: &[&Row]) -> String {
    let streams = distinct(rows.iter().map(|row| row.stream.as_str()));
    let (Some(first), Some(last)) = (streams.first(), streams.last()) else { return String::new() };
    let cells = distinct(rows.iter().map(|row| row.cell.as_str()));
    let ratio = |stream: &str, cell: &str, of: Scheduler, to: Scheduler| {
        let time = |scheduler| find(rows, cell, scheduler, stream).map(|row| row.completion_ms);
        Some(time(of)? / time(to)?)
    };
    let pairs = [
        (first, Scheduler::MpquicLowestRtt, Scheduler::Paced),
        (last, Scheduler::Paced, Scheduler::BestPerStream),
        (last, Scheduler::PacedRanges, Scheduler::BestPerStream),
        (last, Scheduler::PacedRanges, Scheduler::MpquicLowestRtt),
    ];
    let mut text = String::new();
    for (stream, of, to) in pairs {
        let ratios = cells.iter().filter_map(|cell| Some(format!("{cell}: {:.2}", ratio(stream, cell, of, to)?)));
        let ratios: Vec<_> = ratios.collect();
        if !ratios.is_empty() {
            let (of, to, ratios) = (of.name(), to.name(), ratios.join("; "));
            _ = writeln!(text, "Stream {stream}: time under {of} as a multiple of that under {to}: {ratios}.\n");
        }
    }
    let slow = cells.iter().filter_map(|cell| {
        let row = find(rows, cell, Scheduler::MpquicLowestRtt, first)?;
        Some(format!("{cell}: {:.0} %", row.slow_path_pct))
    });
    let slow: Vec<_> = slow.collect();
    if !slow.is_empty() {
        _ = writeln!(
            text,
            "Share of {first}'s packets on the slower path under mpquic-lowest-rtt: {}.\n",
            slow.join("; ")
        );
    }
    text
}

fn find<'a>(rows: &[&'a Row], cell: &str, scheduler: Scheduler, stream: &str) -> Option<&'a Row> {
    let wanted = (cell, scheduler, stream);
    rows.iter().copied().find(|row| (row.cell.as_str(), row.scheduler, row.stream.as_str()) == wanted)
}

fn shown(row: &Row) -> String {
    let of = |ms: f64| if ms < 100.0 { format!("{ms:.1}") } else { format!("{ms:.0}") };
    format!("{} ± {} ({})", of(row.completion_ms), of(row.deviation_ms), of(row.closed_form_ms))
}
