//! Pictures of results, as SVG: scores over rates as lines, and the models that answered as stacked bars.

use std::fmt::Write as _;

use instruments::{
    rows::distinct,
    svg::{self, text},
};

use super::row::Row;

const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 64.0;
const FOOT: f64 = 44.0;
const GAP: f64 = 34.0;
const LEGEND: f64 = 150.0;

const COLORS: [&str; 12] = [
    "#888888", "#b0b0b0", "#c8a060", "#b8d0b8", "#4878a8", "#c0392b", "#e08060", "#702020", "#2e8b57", "#8e44ad",
    "#c39bd3", "#34495e",
];

/// The name of a picture, and the picture as SVG.
pub type Picture = (String, String);

/// The plot area of one panel.
struct Panel<'a> {
    left: f64,
    top: f64,
    title: &'a str,
    rates: &'a [f64],
}

/// Draws the rows of workloads with rates, for each variant. Returns each picture with a name: the variant, and what it
/// shows.
#[must_use]
pub fn pictures(rows: &[Row]) -> Vec<Picture> {
    let mut pictures = Vec::new();
    for variant in distinct(rows.iter().map(|row| row.variant.as_str())) {
        let with_rates = |row: &&Row| row.variant == variant && row.rate.is_some() && row.task == "all";
        for workload in distinct(rows.iter().filter(with_rates).map(|row| row.workload.as_str())) {
            let here: Vec<_> = rows.iter().filter(|row| row.variant == variant && row.workload == workload).collect();
            pictures.push((format!("{variant}-scores"), lines(&here)));
            if here.iter().any(|row| row.metric.starts_with("selected_pct_")) {
                pictures.push((format!("{variant}-selected"), bars(&here)));
            }
        }
    }
    pictures
}

fn rates(rows: &[&Row]) -> Vec<f64> {
    let mut rates: Vec<_> = rows.iter().filter_map(|row| row.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    rates
}

/// Draws scores over rates: a panel for each scheduler, a line for each policy, with bars for intervals.
fn lines(rows: &[&Row]) -> String {
    let scores: Vec<_> =
        rows.iter().filter(|row| row.metric == "score" && row.task == "all" && row.rate.is_some()).collect();
    let policies = distinct(scores.iter().map(|row| row.policy.as_str()));
    let schedulers = distinct(scores.iter().map(|row| row.scheduler.as_deref().unwrap_or("")));
    let rates = rates(rows);
    let abreast = schedulers.len().clamp(1, 3);
    let down = schedulers.len().div_ceil(abreast);
    let mut svg = begin(rows, abreast, down, "mean score by requests per second; bars are 95 % intervals");
    for (at, scheduler) in schedulers.iter().enumerate() {
        let panel = Panel::at(at % abreast, at / abreast, scheduler, &rates);
        panel.frame(&mut svg, ["0", "0.25", "0.5", "0.75", "1"]);
        for (policy, color) in policies.iter().zip(COLORS.iter().cycle()) {
            let of = scores
                .iter()
                .filter(|row| row.policy == *policy && row.scheduler.as_deref().unwrap_or("") == *scheduler);
            let mut points = String::new();
            for row in of {
                let x = panel.x(row.rate.unwrap_or_default());
                _ = write!(points, "{x:.1},{:.1} ", panel.y(row.value));
                let [low, high] = [row.low, row.high].map(|score| panel.y(score.clamp(0.0, 1.0)));
                _ = writeln!(
                    svg,
                    "<line x1=\"{x:.1}\" y1=\"{low:.1}\" x2=\"{x:.1}\" y2=\"{high:.1}\" stroke=\"{color}\"/>"
                );
            }
            _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.6\"/>",
                points.trim_end()
            );
        }
    }
    legend(&mut svg, abreast, &policies);
    svg + "</svg>\n"
}

/// Draws which models answered: a row of panels for each policy that chooses, a column for each task, a bar for each
/// rate.
fn bars(rows: &[&Row]) -> String {
    let selected: Vec<_> =
        rows.iter().filter(|row| row.metric.starts_with("selected_pct_") && row.rate.is_some()).collect();
    // With a link, under the first of its schedulers.
    let scheduler = selected.first().and_then(|row| row.scheduler.as_deref());
    let selected: Vec<_> = selected.into_iter().filter(|row| row.scheduler.as_deref() == scheduler).collect();
    let policies = distinct(selected.iter().map(|row| row.policy.as_str()));
    let tasks = distinct(selected.iter().map(|row| row.task.as_str()));
    let models = distinct(selected.iter().filter_map(|row| row.metric.strip_prefix("selected_pct_")));
    let rates = rates(rows);
    let under = scheduler.map_or(String::new(), |scheduler| format!(", under {scheduler}"));
    let what = format!("requests by the model that answered, in %, by requests per second{under}");
    let mut svg = begin(rows, tasks.len(), policies.len(), &what);
    for (down, policy) in policies.iter().enumerate() {
        for (across, task) in tasks.iter().enumerate() {
            let title = format!("{policy}: {task}");
            let panel = Panel::at(across, down, &title, &rates);
            panel.frame(&mut svg, ["0", "25", "50", "75", "100"]);
            let width = WIDTH / (rates.len() as f64 + 1.0) * 0.8;
            for rate in &rates {
                let mut below = 0.0;
                for (model, color) in models.iter().zip(["#2c3e50", "#4878a8", "#b5cde3", "#dddddd"].iter().cycle()) {
                    let metric = format!("selected_pct_{model}");
                    let same = |row: &&&&Row| {
                        row.policy == *policy && row.task == *task && row.metric == metric && row.rate == Some(*rate)
                    };
                    let share = selected.iter().find(same).map_or(0.0, |row| row.value / 100.0);
                    let (top, bottom) = (panel.y(below + share), panel.y(below));
                    below += share;
                    _ = writeln!(
                        svg,
                        "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{color}\"/>",
                        panel.x(*rate) - width / 2.0,
                        bottom - top
                    );
                }
            }
        }
    }
    let mut x = 12.0;
    for (model, color) in models.iter().zip(["#2c3e50", "#4878a8", "#b5cde3", "#dddddd"].iter().cycle()) {
        _ = writeln!(svg, "<rect x=\"{x}\" y=\"48\" width=\"12\" height=\"10\" fill=\"{color}\"/>");
        text(&mut svg, (x + 16.0, 57.0), "start", "", model);
        x += 80.0;
    }
    svg + "</svg>\n"
}

fn begin(rows: &[&Row], abreast: usize, down: usize, what: &str) -> String {
    let width = 10.0 + (LEFT + WIDTH + GAP) * abreast as f64 + LEGEND;
    let height = TOP + (HEIGHT + FOOT + GAP) * down as f64;
    let Some(row) = rows.first() else { return svg::begin((width, height), "", "") };
    let title = format!("{} ({}): {}", row.plan, row.variant, row.workload);
    let seeds = format!("{what}; seeds {} to {}", row.seed, row.seed + row.repetitions - 1);
    svg::begin((width, height), &title, &seeds)
}

fn legend(svg: &mut String, abreast: usize, names: &[&str]) {
    let x = 10.0 + (LEFT + WIDTH + GAP) * abreast as f64;
    for (at, (name, color)) in names.iter().zip(COLORS.iter().cycle()).enumerate() {
        let y = TOP + 24.0 + 17.0 * at as f64;
        _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"2.5\"/>",
            x + 18.0
        );
        text(svg, (x + 24.0, y + 4.0), "start", "", name);
    }
}

impl<'a> Panel<'a> {
    fn at(across: usize, down: usize, title: &'a str, rates: &'a [f64]) -> Self {
        let left = 10.0 + LEFT + (LEFT + WIDTH + GAP) * across as f64;
        Self { left, top: TOP + GAP / 2.0 + (HEIGHT + FOOT + GAP) * down as f64, title, rates }
    }

    /// Places rates at equal distances, in the order of the plan: nearly a logarithmic scale.
    fn x(&self, rate: f64) -> f64 {
        let place = self.rates.iter().position(|known| (known - rate).abs() < 1e-9).unwrap_or_default();
        self.left + WIDTH * (place as f64 + 1.0) / (self.rates.len() as f64 + 1.0)
    }

    fn y(&self, share: f64) -> f64 {
        self.top + HEIGHT * (1.0 - share)
    }

    fn frame(&self, svg: &mut String, marks: [&str; 5]) {
        text(svg, (self.left, self.top - 6.0), "start", "font-weight=\"bold\"", self.title);
        for (mark, share) in marks.into_iter().zip([0.0, 0.25, 0.5, 0.75, 1.0]) {
            let y = self.y(share);
            let right = self.left + WIDTH;
            _ = writeln!(
                svg,
                "<line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\" stroke=\"#e4e4e4\"/>",
                self.left
            );
            text(svg, (self.left - 6.0, y + 4.0), "end", "fill=\"#555\"", mark);
        }
        for rate in self.rates {
            text(svg, (self.x(*rate), self.top + HEIGHT + 15.0), "middle", "fill=\"#555\"", &rate.to_string());
        }
        let below = (self.left + WIDTH / 2.0, self.top + HEIGHT + 31.0);
        text(svg, below, "middle", "fill=\"#555\"", "requests per second");
    }
}
