//! Pictures of results: a box plot of latencies for each class, as SVG.
//! The whiskers end at the fastest and the slowest value.

use std::fmt::Write as _;

use instruments::svg::{begin, line, text};
use plan::{Class, Plan, Scheduler};

use super::{Latencies, Outcome};

const ROW: f64 = 26.0;
const BOX: f64 = 14.0;
const NAMES: f64 = 78.0;
const AXIS: f64 = 250.0;
const SHARES: f64 = 62.0;
const PANEL: f64 = NAMES + AXIS + SHARES;
const TITLE: f64 = 58.0;
const HEAD: f64 = 34.0;
const FOOT: f64 = 50.0;
const PANELS_ABREAST: usize = 3;
const MARGIN: f64 = 12.0;

/// The width of a character: of the title, which is bold, and of other text. Browsers have other fonts, so this is a little more than
/// the mean.
const TITLE_CHARACTER: f64 = 8.6;
const CHARACTER: f64 = 6.2;

/// The colors of the legend, and their meanings.
const LEGEND: [(&str, &str); 4] = [
    (OURS, "scheduled by paced"),
    (OTHERS, "not scheduled"),
    (DEADLINE, "deadline; percentages met it"),
    ("black", "median; boxes: quartiles; whiskers: fastest and slowest; open to the right: never completed"),
];

/// The width of an entry of the legend beside its meaning: the color before it, and the distance to the next entry.
const SAMPLE: f64 = 20.0;
const ENTRY: f64 = 44.0;

const OURS: &str = "#4878a8";
const OTHERS: &str = "#a0a0a0";
const DEADLINE: &str = "#c0392b";

/// Renders outcomes of a plan: a panel for each class, a row for each scheduler.
#[must_use]
pub fn plot(plan: &Plan, outcomes: &[Outcome]) -> String {
    let panel_height = HEAD + ROW * outcomes.len() as f64 + FOOT;
    let abreast = plan.classes.len().min(PANELS_ABREAST);
    let height = TITLE + panel_height * plan.classes.len().div_ceil(abreast) as f64 + 30.0;
    let title = format!("{}: {}", plan.name, plan.title);
    let conditions = format!(
        "variant {}; {}, {}; {} requests, {} repetitions from seed {}",
        plan.variant, plan.network, plan.congestion, plan.workload.requests, plan.repetitions, plan.seed
    );
    let width = (PANEL * abreast as f64 + 20.0).max(least_width(&title, &conditions));
    let mut svg = begin((width, height), &title, &conditions);
    for (index, class) in plan.classes.iter().enumerate() {
        let (column, row) = (index % abreast, index / abreast);
        let (left, top) = (10.0 + PANEL * column as f64, TITLE + panel_height * row as f64);
        _ = writeln!(svg, "<g transform=\"translate({left} {top})\">");
        panel(&mut svg, class, index, outcomes);
        svg += "</g>\n";
    }
    legend(&mut svg, height - 14.0);
    svg + "</svg>\n"
}

/// Returns the width that title, conditions and legend need.
fn least_width(title: &str, conditions: &str) -> f64 {
    let of = |text: &str, character: f64| text.chars().count() as f64 * character;
    let entries = LEGEND.iter().map(|(_, meaning)| ENTRY + of(meaning, CHARACTER));
    let legend = entries.sum::<f64>() + SAMPLE - ENTRY;
    let needed = of(title, TITLE_CHARACTER).max(of(conditions, CHARACTER)).max(legend);
    (needed + 2.0 * MARGIN).ceil()
}

/// Draws one class: its schedulers in rows over a common time axis.
fn panel(svg: &mut String, class: &Class, index: usize, outcomes: &[Outcome]) {
    let latencies: Vec<_> = outcomes.iter().map(|outcome| outcome.latencies(index)).collect();
    let longest = latencies.iter().filter_map(Latencies::longest_completed_ms).fold(1.0, f64::max);
    let deadline_ms = class.deadline_ms.map(|ms| ms as f64);
    let step_ms = step(longest.max(deadline_ms.unwrap_or(0.0)) * 1.02);
    let end_ms = (longest.max(deadline_ms.unwrap_or(0.0)) * 1.02 / step_ms).ceil() * step_ms;
    let x = |ms: f64| NAMES + ms / end_ms * AXIS;
    let bottom = HEAD + ROW * outcomes.len() as f64;

    let heading = format!("{}, {} bytes", class.name, class.bytes);
    text(svg, (NAMES, 18.0), "start", "font-weight=\"bold\"", &heading);
    for tick in 0..=(end_ms / step_ms).round() as u32 {
        let ms = f64::from(tick) * step_ms;
        line(svg, (x(ms), HEAD), (x(ms), bottom), "stroke=\"#e4e4e4\"");
        text(svg, (x(ms), bottom + 15.0), "middle", "fill=\"#555\"", &seconds(ms));
    }
    line(svg, (NAMES, bottom), (NAMES + AXIS, bottom), "stroke=\"#888\"");
    text(svg, (NAMES + AXIS / 2.0, bottom + 31.0), "middle", "fill=\"#555\"", "latency in seconds");
    for (row, (outcome, latencies)) in outcomes.iter().zip(&latencies).enumerate() {
        let middle = HEAD + ROW * (row as f64 + 0.5);
        text(svg, (NAMES - 6.0, middle + 4.0), "end", "", outcome.scheduler.name());
        if let Some(share) = latencies.completion_pct(class.deadline_ms) {
            text(svg, (NAMES + AXIS + 8.0, middle + 4.0), "start", "", &format!("{share:.0} %"));
        }
        let color = if is_baseline(outcome.scheduler) { OTHERS } else { OURS };
        if latencies.quantile_ms(0.0).is_none() {
            continue;
        }
        // An infinite value is drawn to the end of the axis, without a whisker.
        let at = |share| latencies.quantile_ms(share).map_or(NAMES + AXIS, x);
        let [min, low, median, high, max] = [0.0, 0.25, 0.5, 0.75, 1.0].map(at);
        line(svg, (min, middle), (max, middle), &format!("stroke=\"{color}\""));
        let last = latencies.quantile_ms(1.0).map(x);
        for end in [Some(min), last].into_iter().flatten() {
            line(svg, (end, middle - BOX / 4.0), (end, middle + BOX / 4.0), &format!("stroke=\"{color}\""));
        }
        let (top, width) = (middle - BOX / 2.0, (high - low).max(1.0));
        _ = writeln!(
            svg,
            "<rect x=\"{low:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{BOX}\" fill=\"{color}\" fill-opacity=\"0.45\" \
             stroke=\"{color}\"/>"
        );
        line(svg, (median, top), (median, top + BOX), "stroke=\"black\" stroke-width=\"2\"");
    }
    if let Some(ms) = deadline_ms {
        line(svg, (x(ms), HEAD - 6.0), (x(ms), bottom), &deadline_stroke());
    }
}

fn legend(svg: &mut String, y: f64) {
    let mut x = MARGIN;
    for (color, meaning) in LEGEND {
        if color == DEADLINE {
            line(svg, (x + 7.0, y - 10.0), (x + 7.0, y + 2.0), &deadline_stroke());
        } else if color == "black" {
            line(svg, (x + 7.0, y - 10.0), (x + 7.0, y + 2.0), "stroke=\"black\" stroke-width=\"2\"");
        } else {
            _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{:.1}\" width=\"14\" height=\"10\" fill=\"{color}\" fill-opacity=\"0.45\" stroke=\"{color}\"/>",
                y - 9.0
            );
        }
        text(svg, (x + SAMPLE, y), "start", "fill=\"#333\"", meaning);
        x += ENTRY + CHARACTER * meaning.len() as f64;
    }
}

fn deadline_stroke() -> String {
    format!("stroke=\"{DEADLINE}\" stroke-width=\"1.5\" stroke-dasharray=\"5 3\"")
}

/// Returns a round distance between ticks, for at most six ticks up to `end_ms`.
fn step(end_ms: f64) -> f64 {
    let rough = end_ms / 6.0;
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough).unwrap_or(rough)
}

fn seconds(ms: f64) -> String {
    // At most three digits, without trailing zeros.
    format!("{}", (ms).round() / 1e3)
}

/// Whether a scheduler is only a baseline for comparison.
fn is_baseline(scheduler: Scheduler) -> bool {
    use Scheduler::{Http1, Http2, Plain, Tls1, TlsN};
    matches!(scheduler, Plain | TlsN | Tls1 | Http2 | Http1) || scheduler.is_of_quic_go()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Run, Sample};

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!([1_000.0, 7_140.0, 10_500.0, 90.0].map(step), [200.0, 2_000.0, 2_000.0, 20.0]);
        assert_eq!([0.0, 500.0, 2_000.0].map(seconds), ["0", "0.5", "2"]);
    }

    #[test]
    fn a_picture_of_one_panel_is_as_wide_as_its_title_conditions_and_legend() {
        let width = |plan: &Plan| {
            let svg = plot(plan, &[Outcome { scheduler: Scheduler::Rr, runs: vec![Run::default()] }]);
            let (_, after) = svg.split_once(" width=\"").unwrap();
            after.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        let mut plan = Plan::read("urgent").unwrap();
        assert_eq!(plan.classes.len(), 1);
        plan.title = "short".to_owned();
        let legend: usize = LEGEND.iter().map(|(_, meaning)| meaning.len()).sum();
        let of_legend = width(&plan);
        assert!(of_legend >= 12.0 + legend as f64 * 6.2 + 3.0 * 44.0 + 20.0, "{of_legend}");
        plan.title = "x".repeat(200);
        assert!(width(&plan) >= 12.0 + 200.0 * 8.6);
        (plan.title, plan.variant) = ("short".to_owned(), "x".repeat(300));
        assert!(width(&plan) >= 12.0 + 300.0 * 6.2);
        // Three panels are wide enough.
        let three = Plan::read("thesis-fig7-8").unwrap();
        assert_eq!((three.classes.len(), width(&three)), (3, 3.0 * PANEL + 20.0));
    }

    #[test]
    fn every_class_has_a_panel_with_its_deadline_and_every_scheduler_a_row_in_it() {
        let mut plan = Plan::read("thesis-fig7-8").unwrap();
        plan.title = "a < b & c".to_owned();
        let samples = (0..3).map(|class| Sample { class, latency_ns: Some(1_500_000_000) }).collect();
        let runs = vec![Run { samples, ..Run::default() }];
        let outcomes = [Scheduler::Plain, Scheduler::MlRr].map(|scheduler| Outcome { scheduler, runs: runs.clone() });
        let svg = plot(&plan, &outcomes);
        assert!(svg.contains("a &lt; b &amp; c"));
        for (content, count) in [("realtime-short, 8000 bytes", 1), (">ml-rr<", 3), (">100 %<", 4), (">0 %<", 2)] {
            assert_eq!(svg.matches(content).count(), count, "{content}");
        }
        assert_eq!(svg.matches("stroke-dasharray").count(), 3 + 1, "deadlines, and the legend's");
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    }
}
