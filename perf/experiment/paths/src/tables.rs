//! Tables of results, made from rows only.

use std::fmt::Write as _;

use instruments::rows::distinct;
use plan::paths::Scheduler;

use super::row::Row;

/// The least share of A's packets on the slower path, in percent, with which A counts as sharing that path with B.
pub(crate) const SHARES_PCT: f64 = 10.0;

/// How many times as fast `paced` is to send A as MPQUIC's own scheduler, where that sends A over the slower path, too.
pub(crate) const TIMES: f64 = 3.0;

/// The longest time of B under `paced`, as a multiple of that under the best placement of whole streams.
pub(crate) const LONGEST: f64 = 1.05;

/// Renders rows as Markdown: for the first variant, a table for each stream, with a line for each cell and a column for
/// each scheduler; after these, tables that hold `paced` to its goals in every variant.
#[must_use]
pub fn tables(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut text = format!(
        "{} ({}): milliseconds from request to last byte, mean ± standard deviation (not an interval) over seeds {} to {}; \
         the closed form in brackets.\n\n",
        first.plan,
        first.variant,
        first.seed,
        first.seed + first.repetitions - 1
    );
    let schedulers = distinct(rows.iter().map(|row| row.scheduler));
    for stream in distinct(rows.iter().map(|row| row.stream.as_str())) {
        let of = |cell: &str, scheduler: &Scheduler| find(rows, &first.variant, cell, *scheduler, stream).map(shown);
        _ = writeln!(text, "Stream {stream}:\n\n{}", table(rows, &schedulers, |scheduler| scheduler.name(), of));
    }
    text += &goals(rows);
    text.trim_end().to_owned() + "\n"
}

/// Compares `paced` in all variants: the first stream with MPQUIC's own scheduler, the last one with the best placement of whole
/// streams. Figures that miss a goal are in bold.
fn goals(rows: &[Row]) -> String {
    let streams = distinct(rows.iter().map(|row| row.stream.as_str()));
    let (Some(first), Some(last)) = (streams.first(), streams.last()) else { return String::new() };
    let variants = distinct(rows.iter().map(|row| row.variant.as_str()));
    let by_variant =
        |shown: &dyn Fn(&str, &str) -> Option<String>| table(rows, &variants, |it| it, |cell, it| shown(cell, it));
    let ratio = |cell: &str, variant: &str, stream: &str, of: Scheduler, to: Scheduler| {
        let time = |scheduler| find(rows, variant, cell, scheduler, stream).map(|row| row.completion_ms);
        Some(time(of)? / time(to)?)
    };
    let of_first = by_variant(&|cell, variant| {
        let slow_pct = find(rows, variant, cell, Scheduler::MpquicLowestRtt, first)?.slow_path_pct;
        let times = |to| ratio(cell, variant, first, Scheduler::MpquicLowestRtt, to);
        let (times, most) = (times(Scheduler::Paced)?, times(Scheduler::BestPerStream)?);
        let times = marked(format!("{times:.2}"), slow_pct > SHARES_PCT && times < TIMES);
        Some(format!("{times} of {most:.2} ({slow_pct:.0} %)"))
    });
    let of_last = by_variant(&|cell, variant| {
        let to_best = |of| ratio(cell, variant, last, of, Scheduler::BestPerStream);
        let (whole, ranges) = (to_best(Scheduler::Paced)?, to_best(Scheduler::PacedRanges)?);
        let whole = marked(format!("{whole:.3}"), whole > LONGEST);
        Some(format!("{whole}; {}", marked(format!("{ranges:.3}"), ranges >= 1.0)))
    });
    let to_packets = by_variant(&|cell, variant| {
        let ratio = ratio(cell, variant, last, Scheduler::PacedRanges, Scheduler::MpquicLowestRtt)?;
        Some(format!("{ratio:.2}"))
    });
    let titles = [
        format!(
            "Stream {first}: time under mpquic-lowest-rtt as a multiple of that under paced, \"of\" the multiple of that under \
             best-per-stream, which no placement exceeds whose requests take the path of their answer; in brackets, the share of {first}'s packets on the slower \
             path under mpquic-lowest-rtt. Bold: this share is more than {SHARES_PCT:.0} %, and paced is not {TIMES:.0} times as fast \
             (goal)."
        ),
        format!(
            "Stream {last}: time as a multiple of that under best-per-stream, under paced; under paced-ranges. Bold: paced takes more \
             than {LONGEST} times as long, or paced-ranges is not faster (goals)."
        ),
        format!("Stream {last}: time under paced-ranges as a multiple of that under mpquic-lowest-rtt."),
    ];
    let tables = titles.into_iter().zip([of_first, of_last, to_packets]).filter(|(_, table)| !table.is_empty());
    tables.map(|(title, table)| format!("{title}\n\n{table}\n")).collect()
}

fn marked(figure: String, is_missed: bool) -> String {
    if is_missed { format!("**{figure}**") } else { figure }
}

/// Renders a table with a line for each cell; nothing if it has no figure.
fn table<C>(
    rows: &[Row],
    columns: &[C],
    name: impl Fn(&C) -> &str,
    shown: impl Fn(&str, &C) -> Option<String>,
) -> String {
    let axis = rows.first().map_or("", |row| row.axis.as_str());
    let names: String = columns.iter().map(|column| format!(" {} |", name(column))).collect();
    let mut text = format!("| {axis} |{names}\n|---|{}\n", "--:|".repeat(columns.len()));
    let mut is_empty = true;
    for cell in distinct(rows.iter().map(|row| row.cell.as_str())) {
        _ = write!(text, "| {cell} |");
        for column in columns {
            let figure = shown(cell, column);
            is_empty &= figure.is_none();
            _ = write!(text, " {} |", figure.as_deref().unwrap_or("–"));
        }
        text.push('\n');
    }
    if is_empty { String::new() } else { text }
}

fn find<'a>(rows: &'a [Row], variant: &str, cell: &str, scheduler: Scheduler, stream: &str) -> Option<&'a Row> {
    let wanted = (variant, cell, scheduler, stream);
    rows.iter().find(|row| (row.variant.as_str(), row.cell.as_str(), row.scheduler, row.stream.as_str()) == wanted)
}

fn shown(row: &Row) -> String {
    let of = |ms: f64| if ms < 100.0 { format!("{ms:.1}") } else { format!("{ms:.0}") };
    format!("{} ± {} ({})", of(row.completion_ms), of(row.deviation_ms), of(row.closed_form_ms))
}
