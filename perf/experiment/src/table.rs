//! Tables of results, made from rows only.

use std::fmt::Write as _;

use instruments::rows::distinct;
use plan::{Class, Plan, Scheduler, Varied as _};
use sched::route::serving::Interval;

use super::{Row, outcome::over};

/// The columns for requests, in order: metric, title and decimals.
const REQUESTS: [(&str, &str, usize); 5] = [
    ("completion_pct", "deadline met", 1),
    ("latency_mean_ms", "mean", 0),
    ("latency_p50_ms", "p50", 0),
    ("latency_p95_ms", "p95", 0),
    ("latency_max_ms", "max", 0),
];

/// The columns for the tokens of answers.
const TOKENS: [(&str, &str, usize); 4] = [
    ("first_p50_ms", "first token, p50", 0),
    ("first_p99_ms", "first token, p99", 0),
    ("gap_p50_ms", "between tokens, p50", 1),
    ("gap_p99_ms", "between tokens, p99", 0),
];

/// Renders the rows of a variant as Markdown: a table for each class, and one for figures of all classes. Before ± is the mean over
/// repetitions, after it half of the mean's 95 % interval, and in brackets the paper's value. An interval of a share that reaches 0 or
/// 100 % ends there, and is given by its ends.
#[must_use]
pub fn table(plan: &Plan, rows: &[Row]) -> String {
    let Plan { name, variant, title, .. } = plan;
    let mut text = format!("{name} ({variant}): {title}\n");
    text += &tables(plan, rows);
    text
}

/// As [`table`], without the title.
#[must_use]
pub fn tables(plan: &Plan, rows: &[Row]) -> String {
    let mut text = String::new();
    if let Some(row) = rows.first() {
        let times = if row.repetitions == 1 { "once" } else { &format!("{} repetitions", row.repetitions) };
        _ = writeln!(text, "{}; {}; {times} from seed {}", row.network, row.congestion, row.seed);
    }
    for Class { name, bytes, tokens, deadline_ms, .. } in &plan.classes {
        let of_class: Vec<_> = rows.iter().filter(|row| row.class == *name).collect();
        let within = deadline_ms.map_or(String::new(), |ms| format!(", deadline {ms} ms"));
        let answers = if *tokens > 0 { format!(", answers of {tokens} tokens") } else { String::new() };
        let heading = format!("\n{name}: {bytes} bytes{answers}{within}\n\n");
        let (requests, others): (Vec<_>, Vec<_>) = of_class.into_iter().partition(|row| is_of_requests(row));
        if !requests.is_empty() {
            text += &heading;
            let met = if deadline_ms.is_some() { "deadline met" } else { "completed" };
            let of_tokens = TOKENS.iter().filter(|_| *tokens > 0);
            text += &of_requests(&requests, met, &REQUESTS.iter().chain(of_tokens).copied().collect::<Vec<_>>());
        }
        if !others.is_empty() {
            text += &heading;
            text += &of_figures(&others);
        }
    }
    let all: Vec<_> = rows.iter().filter(|row| row.class == "all" && row.metric != "manage_ms").collect();
    if !all.is_empty() {
        text += "\nall classes\n\n";
        text += &of_figures(&all);
    }
    text
}

/// The metrics for which [`curves`] renders tables, with their descriptions.
const CURVES: [(&str, &str); 15] = [
    ("total_ms", "time from the first packet of an inner connection to the last byte of the last object"),
    ("fairness", "Jain's index of the goodputs of connections while all of them send: 1 if they are equal"),
    ("least_of_most_pct", "the lowest goodput of a connection as a part of the highest"),
    ("wire_kb", "bytes of frames on the link between client and relay, both directions"),
    ("wire_over_no_proxy_pct", "the excess of these bytes over those without a proxy"),
    ("server_packets", "packets that the server sent"),
    ("lost_packets", "packets that the server took for lost"),
    ("dropped_packets", "packets that the link dropped because its queue was full, both directions"),
    ("tunnel_lost_packets", "packets of the tunnel's connection that the relay took for lost"),
    ("relay_dropped_packets", "payloads that the relay dropped because their queue was full"),
    ("rtt_mean_ms", "mean round trip of inner connections, as the server saw it"),
    ("power", "goodput divided by mean round trip (Kleinrock's power): more is better"),
    ("relay_queue_mean_kb", "bytes in the relay's queues, mean over time"),
    ("relay_queue_peak_kb", "bytes in the relay's queues, at most"),
    ("relay_held_peak_kb", "bytes in the relay's queues and bytes that streams may have to send again, at most"),
];

/// Renders all variants of a plan of tunnels: a table for each figure, with a line for each variant and a column for each mode. A mode
/// that has not sent everything has no figures, because sending less costs less; its time is `never`. For time and power, the last
/// line is the geometric mean over the variants in which every mode has sent everything.
#[must_use]
pub fn curves(plan: &Plan, rows: &[Row]) -> String {
    let variants: Vec<&str> = plan.variants().filter(|name| rows.iter().any(|row| row.variant == *name)).collect();
    let all: Vec<_> = rows.iter().collect();
    let modes = schedulers(&all);
    let find = |variant: &str, mode: Scheduler, metric: &str| {
        rows.iter().find(|row| row.variant == variant && row.scheduler == mode && row.metric == metric)
    };
    let is_whole = |variant: &&str| {
        let whole =
            |mode: &Scheduler| find(variant, *mode, "completion_pct").is_some() && is_complete(rows, variant, *mode);
        modes.iter().all(whole)
    };
    let mut text = String::new();
    if let Some(row) = rows.first() {
        _ = writeln!(
            text,
            "base: {}; {}; {} repetitions from seed {}",
            row.network, row.congestion, row.repetitions, row.seed
        );
    }
    for (metric, what) in CURVES.into_iter().filter(|(metric, _)| rows.iter().any(|row| row.metric == *metric)) {
        let names = modes.iter().map(|mode| mode.name().to_owned());
        let head: Vec<_> = std::iter::once("variant".to_owned()).chain(names).collect();
        let line = |variant: &&str| {
            let cells = modes.iter().map(|mode| match (metric, is_complete(rows, variant, *mode)) {
                (_, true) => cell(find(variant, *mode, metric), 2),
                ("total_ms", false) => "never".to_owned(),
                (_, false) => cell(None, 2),
            });
            std::iter::once((*variant).to_owned()).chain(cells).collect::<Vec<_>>()
        };
        let mut lines: Vec<_> = variants.iter().map(line).collect();
        if matches!(metric, "total_ms" | "power") {
            let mean = |mode: &Scheduler| {
                let whole = variants.iter().filter(|variant| is_whole(variant));
                let values: Vec<f64> =
                    whole.filter_map(|variant| find(variant, *mode, metric).and_then(shown)).map(f64::ln).collect();
                let mean = (values.iter().sum::<f64>() / values.len().max(1) as f64).exp();
                if mean < 1_000.0 { format!("{mean:.2}") } else { format!("{mean:.0}") }
            };
            lines.push(std::iter::once("geometric mean".to_owned()).chain(modes.iter().map(mean)).collect());
        }
        _ = write!(text, "\n{metric}: {what}\n\n{}", markdown(&head, &lines));
    }
    if plan.classes.len() > 1 {
        text += &shares(plan, rows, &variants, &modes);
    }
    text
}

/// Renders the goodput of each class's connections while all of them send.
fn shares(plan: &Plan, rows: &[Row], variants: &[&str], modes: &[Scheduler]) -> String {
    let names = modes.iter().map(|mode| mode.name().to_owned());
    let head: Vec<_> = ["variant".to_owned(), "class".to_owned()].into_iter().chain(names).collect();
    let line = |variant: &str, class: &str| {
        let find = |mode: &Scheduler| {
            let metric = "shared_goodput_mbit";
            let of = |row: &&Row| {
                (row.variant.as_str(), row.class.as_str(), row.metric.as_str()) == (variant, class, metric)
            };
            let row = rows.iter().filter(|row| row.scheduler == *mode).find(of);
            cell(row.filter(|_| is_complete(rows, variant, *mode)), 2)
        };
        [variant.to_owned(), class.to_owned()].into_iter().chain(modes.iter().map(find)).collect::<Vec<_>>()
    };
    let of_variant = |variant: &&str| plan.classes.iter().map(|class| line(variant, &class.name)).collect::<Vec<_>>();
    let lines: Vec<_> = variants.iter().flat_map(of_variant).collect();
    format!("\nshared_goodput_mbit: goodput of connections while all of them send\n\n{}", markdown(&head, &lines))
}

/// Whether a mode completed all requests of a variant, of all classes.
fn is_complete(rows: &[Row], variant: &str, mode: Scheduler) -> bool {
    let of = |row: &&Row| row.metric == "completion_pct" && row.variant == variant && row.scheduler == mode;
    rows.iter().filter(of).all(|row| row.value == Some(100.0))
}

/// Renders the cost of managing streams, if there are rows about it.
#[must_use]
pub fn queues(rows: &[Row]) -> String {
    let managed = rows.iter().filter(|row| row.metric == "manage_ms");
    let cells: Vec<_> = managed.map(|row| vec![row.variant.clone(), cell(Some(row), 3)]).collect();
    if cells.is_empty() {
        String::new()
    } else {
        markdown(&["queue".to_owned(), "managing streams".to_owned()], &cells)
    }
}

fn is_of_requests(row: &Row) -> bool {
    REQUESTS.iter().chain(&TOKENS).any(|(metric, ..)| *metric == row.metric)
}

fn of_requests(rows: &[&Row], met: &str, columns: &[(&str, &str, usize)]) -> String {
    let head = ["scheduler", met].into_iter().chain(columns[1..].iter().map(|(_, heading, _)| *heading));
    let line = |scheduler: Scheduler| {
        let find = |metric| rows.iter().find(|row| row.scheduler == scheduler && row.metric == metric).copied();
        let cells = columns.iter().map(|(metric, _, decimals)| cell(find(*metric), *decimals));
        std::iter::once(scheduler.name().to_owned()).chain(cells).collect()
    };
    markdown(&head.map(str::to_owned).collect::<Vec<_>>(), &schedulers(rows).into_iter().map(line).collect::<Vec<_>>())
}

/// Renders a table whose lines are schedulers or metrics, whichever are more.
fn of_figures(rows: &[&Row]) -> String {
    let schedulers = schedulers(rows);
    let metrics = distinct(rows.iter().map(|row| row.metric.as_str()));
    let find = |scheduler: Scheduler, metric: &str| {
        cell(rows.iter().find(|row| row.scheduler == scheduler && row.metric == metric).copied(), 2)
    };
    let names = schedulers.iter().map(|scheduler| scheduler.name().to_owned());
    let titles = metrics.iter().map(|metric| (*metric).to_owned());
    if schedulers.len() >= metrics.len() {
        let head: Vec<_> = std::iter::once("scheduler".to_owned()).chain(titles).collect();
        let line = |scheduler: &Scheduler| {
            let cells = metrics.iter().map(|metric| find(*scheduler, metric));
            std::iter::once(scheduler.name().to_owned()).chain(cells).collect()
        };
        return markdown(&head, &schedulers.iter().map(line).collect::<Vec<_>>());
    }
    let head: Vec<_> = std::iter::once("figure".to_owned()).chain(names).collect();
    let line = |metric: &&str| {
        let cells = schedulers.iter().map(|scheduler| find(*scheduler, metric));
        std::iter::once((*metric).to_owned()).chain(cells).collect()
    };
    markdown(&head, &metrics.iter().map(line).collect::<Vec<_>>())
}

/// Returns the schedulers in the order of the rows.
fn schedulers(rows: &[&Row]) -> Vec<Scheduler> {
    distinct(rows.iter().map(|row| row.scheduler))
}

/// Returns the mean over repetitions with its interval, or `None` if there is no interval. The mean is in the middle, unless the
/// interval of a share is cut at 0 or 100 %.
fn interval(row: &Row) -> Option<Interval> {
    let (low, high) = row.low.zip(row.high)?;
    let of_share = plan::whole(&row.metric).and_then(|_| over(&row.by_seed));
    Some(Interval { mean: of_share.map_or_else(|| f64::midpoint(low, high), |of_share| of_share.mean), low, high })
}

/// Returns the value that tables show: the mean over repetitions if there is an interval, because the interval is the mean's, and
/// else the row's value. Returns `None` if it is infinite.
fn shown(row: &Row) -> Option<f64> {
    row.value.map(|value| interval(row).map_or(value, |interval| interval.mean))
}

/// Renders a value with its interval, the paper's value, and the number of repetitions that have it if others lack it. An infinite
/// value is `never`, and ≥ stands before a lower bound.
fn cell(row: Option<&Row>, decimals: usize) -> String {
    let Some(row) = row else { return "–".to_owned() };
    let Some(value) = shown(row) else { return "never".to_owned() };
    // Large values need no decimals, whatever their metric.
    let decimals = if value.abs() >= 1_000.0 { 0 } else { decimals };
    let mut text = interval(row)
        .map_or_else(|| format!("{value:.decimals$}"), |interval| interval.to_text(plan::whole(&row.metric), decimals));
    if row.lower_bound {
        text.insert_str(0, "≥ ");
    }
    _ = write!(text, " {}", row.unit);
    if let Some(published) = row.published {
        _ = write!(text, " ({published})");
    }
    // A latency without a value is infinite, and counted; any other figure was not measured in that repetition.
    let measured = row.by_seed.iter().flatten().count();
    if !is_of_requests(row) && measured < row.by_seed.len() {
        _ = write!(text, " in {measured} of {}", row.by_seed.len());
    }
    text.trim_end().to_owned()
}

/// Renders a table in which each column is as wide as its widest cell; all but the first are aligned right.
#[must_use]
pub fn markdown(head: &[String], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = std::iter::once(head).chain(rows.iter().map(Vec::as_slice)).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for (index, row) in std::iter::once(head).chain(rows.iter().map(Vec::as_slice)).enumerate() {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            _ = if column == 0 { write!(text, "| {cell:<width$} ") } else { write!(text, "| {cell:>width$} ") };
        }
        text += "|\n";
        if index == 0 {
            let rule = |(column, width): (usize, &usize)| match column {
                0 => "-".repeat(width + 2),
                _ => "-".repeat(width + 1) + ":",
            };
            _ = writeln!(text, "|{}|", widths.iter().enumerate().map(rule).collect::<Vec<_>>().join("|"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use instruments::{load::Figure, origin::Origin};

    use super::*;
    use crate::{Outcome, Run, Sample};

    #[test]
    fn figures_of_the_paper_stand_beside_measured_ones() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let samples = vec![
            Sample { class: 0, latency_ns: Some(400_000_000) },
            Sample { class: 0, latency_ns: Some(1_200_000_000) },
            Sample { class: 1, latency_ns: None },
        ];
        let run = Run { samples, total_ns: 2_000_000_000, ..Run::default() };
        let origin = Origin::of_this_run("lab").unwrap();
        let cells = |runs: Vec<Run>| {
            let text = table(&plan, &Outcome { scheduler: Scheduler::Abs, runs }.rows(&plan, &origin));
            let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
            text.lines().filter(|line| line.starts_with("| abs")).map(cells).collect::<Vec<_>>()
        };
        let rows = cells(vec![run.clone()]);
        assert_eq!(rows[0][1..7], ["abs", "50.0 % (100)", "800 ms", "800 ms", "1160 ms", "1200 ms"]);
        assert_eq!(rows[1][1..7], ["abs", "0.0 %", "never", "never", "never", "never"]);
        assert_eq!(rows[2][1..3], ["abs", "2000 ms"], "nothing was measured of the third class");
        let twice = cells(vec![run.clone(), run]);
        assert_eq!(twice[0][2..4], ["50.0 ± 0.0 % (100)", "800 ± 0 ms"]);
    }

    #[test]
    fn plus_and_minus_stand_around_the_mean_that_they_belong_to() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let origin = Origin::of_this_run("lab").unwrap();
        let run = |ms: u64| {
            let samples = vec![Sample { class: 0, latency_ns: Some(ms * 1_000_000) }];
            Run { samples, total_ns: ms * 1_000_000, ..Run::default() }
        };
        // The median of all is 100, and the mean 400.
        let runs = [100, 100, 1_000].map(run).to_vec();
        let text = table(&plan, &Outcome { scheduler: Scheduler::Abs, runs }.rows(&plan, &origin));
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with("| abs")).collect();
        let interval = Interval::of(&[100.0, 100.0, 1_000.0]);
        let half_ms = (interval.high - interval.low) / 2.0;
        let of_requests: Vec<_> = lines[0].split('|').map(str::trim).collect();
        assert_eq!(of_requests[4], format!("400 ± {half_ms:.0} ms"), "the median of requests, by repetition");
        assert!(lines[1].contains(&format!("400.00 ± {half_ms:.2} ms")), "{text}");
    }

    #[test]
    fn no_share_of_a_table_is_beyond_100_percent_not_even_in_rows_whose_interval_is() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let row = Row {
            class: plan.classes[0].name.clone(),
            metric: "completion_pct".to_owned(),
            unit: "%".to_owned(),
            value: Some(95.0),
            low: Some(80.0),
            high: Some(110.0),
            ..Row::of(&plan, Scheduler::Abs, &Origin::of_this_run("lab").unwrap())
        };
        let text = |row: &Row| table(&plan, std::slice::from_ref(row));
        assert!(text(&row).contains(" 95.0 (80.0 to 100.0) % "), "{}", text(&row));
        let other = Row { class: "all".to_owned(), metric: "cpu_over_plain_pct".to_owned(), ..row };
        assert!(text(&other).contains(" 95.00 ± 15.00 % "), "what is no share may be beyond: {}", text(&other));
    }

    #[test]
    fn a_figure_that_some_runs_lack_says_so() {
        let plan = Plan::read("thesis-fig7-8").unwrap();
        let run = |value: Option<f64>| {
            let figures = value.map(|value| Figure { metric: "goodput_mbit", value, unit: "Mbit/s" });
            Run { figures: figures.into_iter().collect(), ..Run::default() }
        };
        let outcome = Outcome { scheduler: Scheduler::Abs, runs: [None, Some(3.0), Some(4.0)].map(run).to_vec() };
        let text = table(&plan, &outcome.rows(&plan, &Origin::of_this_run("lab").unwrap()));
        assert!(text.contains("3.50 Mbit/s in 2 of 3"), "{text}");
    }

    #[test]
    fn curves_have_a_line_for_each_variant_and_means_leave_out_where_a_mode_never_ends() {
        let plan = Plan::read("masque-loss").unwrap();
        let origin = Origin::of_this_run("virtual-network").unwrap();
        let of = |variant: &str, mode, ms: u64, ended: bool| {
            let samples = vec![Sample { class: 0, latency_ns: ended.then_some(ms * 1_000_000) }];
            let figures = vec![Figure { metric: "rtt_mean_ms", value: if ended { 50.0 } else { 0.0 }, unit: "ms" }];
            let run = Run { samples, total_ns: ms * 1_000_000, figures, ..Run::default() };
            Outcome { scheduler: mode, runs: vec![run] }.rows(&plan.variant(variant).unwrap(), &origin)
        };
        let (datagram, stream) = (Scheduler::Datagram, Scheduler::Stream);
        let mut rows = Vec::new();
        for (variant, by_datagram, by_stream) in [("base", 100, 200), ("loss-01", 400, 800), ("loss-02", 9_000, 100)] {
            rows.extend(of(variant, datagram, by_datagram, variant != "loss-02"));
            rows.extend(of(variant, stream, by_stream, true));
        }
        let text = curves(&plan, &rows);
        let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()[1..4].to_vec();
        let table = |metric: &str| {
            let lines = text.lines().skip_while(|line| !line.starts_with(metric)).skip(4).take(4);
            lines.map(cells).collect::<Vec<_>>()
        };
        let lines = table("total_ms");
        assert_eq!(lines[0], ["base", "100.00 ms", "200.00 ms"]);
        assert_eq!(lines[2], ["loss-02", "never", "100.00 ms"]);
        assert_eq!(lines[3], ["geometric mean", "200.00", "400.00"]);
        assert_eq!(table("rtt_mean_ms")[2], ["loss-02", "–", "50.00 ms"], "sending nothing is not fast");
    }
}
