//! A picture of results, as SVG: bars over cells on a logarithmic scale, a panel for each stream.

use std::fmt::Write as _;

use instruments::rows::distinct;

use super::row::Row;

const BAR: f64 = 9.0;
const GAP: f64 = 16.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 48.0;
const BETWEEN: f64 = 70.0;
const LEGEND: f64 = 170.0;

const COLORS: [&str; 7] = ["#888888", "#c8a060", "#e0c890", "#4878a8", "#2e8b57", "#8e44ad", "#c0392b"];

/// Draws the rows of one variant: completion times with deviations, and a mark at the value of the closed form.
#[must_use]
pub fn picture(rows: &[Row]) -> String {
    let schedulers = distinct(rows.iter().map(|row| row.scheduler));
    let cells = distinct(rows.iter().map(|row| row.cell.as_str()));
    let streams = distinct(rows.iter().map(|row| row.stream.as_str()));
    let group = schedulers.len() as f64 * BAR + GAP;
    let (width, panels) = (LEFT + group * cells.len() as f64 + LEGEND, streams.len() as f64);
    let height = TOP + panels * (HEIGHT + BETWEEN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    if let Some(row) = rows.first() {
        let title = format!("{} ({}): completion in milliseconds, by {}", row.plan, row.variant, row.axis);
        text(&mut svg, (LEFT, 20.0), "start", &title);
    }
    for (panel, stream) in streams.iter().enumerate() {
        let here: Vec<_> = rows.iter().filter(|row| row.stream == *stream).collect();
        let top = TOP + panel as f64 * (HEIGHT + BETWEEN);
        let logs = here.iter().flat_map(|row| [row.completion_ms, row.closed_form_ms]).map(|ms| ms.max(0.01).log10());
        let logs: Vec<_> = logs.collect();
        let lowest = logs.iter().copied().fold(f64::INFINITY, f64::min).floor();
        let highest = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil().max(lowest + 1.0);
        let y = |ms: f64| top + HEIGHT * (highest - ms.max(0.01).log10().clamp(lowest, highest)) / (highest - lowest);
        text(&mut svg, (LEFT, top - 8.0), "start", &format!("stream {stream}"));
        let mut mark = lowest;
        while mark <= highest {
            let at = y(10_f64.powf(mark));
            let right = LEFT + group * cells.len() as f64;
            _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right:.1}\" y2=\"{at:.1}\" stroke=\"#e4e4e4\"/>"
            );
            text(&mut svg, (LEFT - 6.0, at + 4.0), "end", &10_f64.powf(mark).to_string());
            mark += 1.0;
        }
        for (at, cell) in cells.iter().enumerate() {
            let left = LEFT + at as f64 * group + GAP / 2.0;
            text(&mut svg, (left + (group - GAP) / 2.0, top + HEIGHT + 15.0), "middle", cell);
            for (place, (scheduler, color)) in schedulers.iter().zip(COLORS.iter().cycle()).enumerate() {
                let Some(row) = here.iter().find(|row| row.cell == *cell && row.scheduler == *scheduler) else {
                    continue;
                };
                let (x, head) = (left + place as f64 * BAR, y(row.completion_ms));
                let tall = top + HEIGHT - head;
                _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{head:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{color}\"/>",
                    BAR - 1.0
                );
                let middle = x + (BAR - 1.0) / 2.0;
                let [low, high] = [-row.deviation_ms, row.deviation_ms].map(|by| y(row.completion_ms + by));
                _ = writeln!(
                    svg,
                    "<line x1=\"{middle:.1}\" y1=\"{low:.1}\" x2=\"{middle:.1}\" y2=\"{high:.1}\" stroke=\"black\"/>"
                );
                let closed = y(row.closed_form_ms);
                _ = writeln!(
                    svg,
                    "<line x1=\"{x:.1}\" y1=\"{closed:.1}\" x2=\"{:.1}\" y2=\"{closed:.1}\" stroke=\"black\" \
                     stroke-dasharray=\"2 1\"/>",
                    x + BAR - 1.0
                );
            }
        }
    }
    for (at, (scheduler, color)) in schedulers.iter().zip(COLORS.iter().cycle()).enumerate() {
        let (x, y) = (LEFT + group * cells.len() as f64 + 14.0, TOP + 18.0 * at as f64);
        _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"10\" height=\"10\" fill=\"{color}\"/>");
        text(&mut svg, (x + 15.0, y + 9.0), "start", scheduler.name());
    }
    let (x, y) = (LEFT + group * cells.len() as f64 + 14.0, TOP + 18.0 * schedulers.len() as f64 + 9.0);
    text(&mut svg, (x, y), "start", "dashed: closed form");
    svg + "</svg>\n"
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}
