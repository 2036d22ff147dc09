//! The table of the fast path in `perf/README.md`, made from rows of both benchmarks.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use instruments::{load::one_way::HIGHEST_RATE, relay::Kind};
use serde::Deserialize;

use super::results::{ADDED, LOSS, LOST_NOTE, MARKED_LOSS_PERCENT, Median};

/// Where the table begins in the page, and where it ends.
const MARKS: [&str; 2] = ["<!-- the fast path, by `paced-perf report` -->\n", "<!-- end of the fast path -->\n"];

/// The relays, in the order of the columns.
const KINDS: [Kind; 4] = [Kind::Paced, Kind::Coalescing, Kind::Quinn, Kind::QuicGo];

/// Which figures are divided by which, in the order of the columns after those of the relays.
const RATIOS: [(Kind, Kind); 3] =
    [(Kind::Paced, Kind::Quinn), (Kind::Paced, Kind::QuicGo), (Kind::Coalescing, Kind::QuicGo)];

/// A line of the table: one metric in some steps, whose figures are separated by commas.
struct Line {
    label: &'static str,
    /// Whether time is counted in instructions.
    virtual_time: bool,
    metric: &'static str,
    /// A figure of a row is divided by this.
    divisor: f64,
    /// The names of steps begin with this.
    step: &'static str,
    sizes: &'static [&'static str],
    goal: &'static str,
}

const WINDOWS: &[&str] = &["1 tunnel × 32 in flight", "10 tunnels × 16 in flight", "100 tunnels × 4 in flight"];
const TUNNELS: &[&str] = &["1 tunnel", "10 tunnels", "100 tunnels"];
const IN_TURNS: &[&str] = &["1 tunnel in turns", "10 tunnels in turns", "100 tunnels in turns"];
const PER_GB: &str = "relay CPU per GB";
const PER_PAYLOAD: &str = "relay CPU per payload";
const MEMORY: &str = "resident memory per idle tunnel";

/// A line for each figure that has a goal, and for those that explain one.
const LINES: [Line; 15] = [
    Line::new("relay CPU seconds per GB, echo; 1 × 32, 10 × 16, 100 × 4 in flight", PER_GB, "echo, ", WINDOWS, "0.27"),
    Line::new(
        "the same, 100 tunnels over 100 connections × 4",
        PER_GB,
        "echo, ",
        &["100 tunnels over 100 connections × 4 in flight"],
        "",
    ),
    Line::new(
        "the same, echo at 40 thousand/s; all of 1, 10, 100 tunnels in turns",
        PER_GB,
        "echo at 40 thousand/s, all of ",
        IN_TURNS,
        "",
    ),
    Line::new("thousand echoes/s; 1 × 32, 10 × 16, 100 × 4 in flight", "echoes", "echo, ", WINDOWS, "").divided_by(1e3),
    Line::new(
        "relay CPU seconds per GB, up at 40 thousand/s; 1, 10, 100 tunnels",
        PER_GB,
        "up at 40 thousand/s, ",
        TUNNELS,
        "0.3, 0.3, 0.4",
    ),
    Line::new(
        "relay CPU seconds per GB, up at 120 thousand/s; 1, 10, 100 tunnels",
        PER_GB,
        "up at 120 thousand/s, ",
        TUNNELS,
        "",
    ),
    Line::new(
        "highest rate without loss up, thousand/s; 1, 10, 100 tunnels",
        HIGHEST_RATE,
        "up searched, ",
        TUNNELS,
        "–, 6 times, –",
    )
    .divided_by(1e3),
    Line::new(
        "highest rate without loss down, thousand/s, 10 tunnels",
        HIGHEST_RATE,
        "down searched, ",
        &["10 tunnels"],
        "5 times",
    )
    .divided_by(1e3),
    Line::new("added median round trip, µs", ADDED, "echo, ", &["1 tunnel × 1 in flight"], "0.4"),
    Line::new(
        "tunnels opened per second, existing connection",
        "tunnels opened",
        "set-up ",
        &["on an existing connection"],
        "2.5 times",
    ),
    Line::new(
        "tunnels opened per second, new connection each",
        "tunnels opened",
        "set-up ",
        &["with a new connection each"],
        "3 times",
    ),
    Line::new("KiB per idle tunnel (malloc of glibc, Go runtime)", MEMORY, "idle, ", &["1000 tunnels"], "8 KiB"),
    Line::new(
        "KiB per idle tunnel with a connection of its own",
        MEMORY,
        "idle, ",
        &["1000 tunnels over 1000 connections"],
        "28 KiB",
    ),
    Line::new(
        "thousand instructions per payload, echo; 1 × 32, 10 × 16, 100 × 4 in flight",
        PER_PAYLOAD,
        "echo, ",
        WINDOWS,
        "8.5, 8.5, 11 thousand",
    )
    .in_virtual_time(),
    Line::new(
        "thousand instructions per payload, up at 4 thousand/s; 1, 10, 100 tunnels",
        PER_PAYLOAD,
        "up at 4 thousand/s, ",
        TUNNELS,
        "",
    )
    .in_virtual_time(),
];

impl Line {
    const fn new(
        label: &'static str,
        metric: &'static str,
        step: &'static str,
        sizes: &'static [&'static str],
        goal: &'static str,
    ) -> Self {
        Self { label, virtual_time: false, metric, divisor: 1.0, step, sizes, goal }
    }

    const fn divided_by(mut self, divisor: f64) -> Self {
        self.divisor = divisor;
        self
    }

    const fn in_virtual_time(self) -> Self {
        Self { virtual_time: true, divisor: 1e3, ..self }
    }

    fn render(&self, rows: &[Row], kinds: &[Kind]) -> String {
        let steps: Vec<_> = self.sizes.iter().map(|size| format!("{}{size}", self.step)).collect();
        let find = |step: &str, metric: &str, kind: Kind| {
            let of = |row: &&Row| {
                (row.config.as_str(), row.metric.as_str(), row.peer.as_str()) == (step, metric, kind.name())
            };
            rows.iter().find(of)
        };
        let median = |step: &str, kind| {
            let row = find(step, self.metric, kind)?;
            Some(Median { value: row.value / self.divisor, is_lower_bound: row.lower_bound })
        };
        let loses = |step: &str, kind| find(step, LOSS, kind).is_some_and(|row| row.value > MARKED_LOSS_PERCENT);
        let cells = |cell: &dyn Fn(&str) -> Option<String>| {
            let cells: Vec<_> = steps.iter().map(|step| cell(step).unwrap_or_else(|| "–".to_owned())).collect();
            cells.join(", ")
        };
        let mut line = format!("| {} |", self.label);
        for &kind in kinds {
            _ = write!(line, " {} |", cells(&|step| median(step, kind).map(|median| median.to_string())));
        }
        for (ours, other) in ratios(kinds) {
            let ratio = |step: &str| {
                let ratio = median(step, ours)?.ratio_to(median(step, other)?)?;
                let mark = if [ours, other].iter().any(|kind| loses(step, *kind)) { " †" } else { "" };
                Some(format!("{ratio}{mark}"))
            };
            _ = write!(line, " {} |", cells(&ratio));
        }
        line += &if self.goal.is_empty() { " |\n".to_owned() } else { format!(" {} |\n", self.goal) };
        line
    }
}

/// Returns which figures are divided by which, if these relays were measured.
fn ratios(kinds: &[Kind]) -> impl Iterator<Item = (Kind, Kind)> {
    RATIOS.into_iter().filter(|(ours, other)| kinds.contains(ours) && kinds.contains(other))
}

/// A row of either benchmark, and what it says of its origin.
#[derive(Deserialize)]
struct Row {
    config: String,
    metric: String,
    peer: String,
    value: f64,
    #[serde(default)]
    lower_bound: bool,
    commit: String,
    machine: String,
    kernel: String,
    samples: Vec<f64>,
}

/// Replaces the table in the text of a page by that of the rows in `folder`.
///
/// # Errors
/// When the rows cannot be read, or the page has no place for the table.
pub fn replaced(page: &str, folder: &Path) -> Result<String> {
    let place = || page.split_once(MARKS[0]).and_then(|(before, rest)| Some((before, rest.split_once(MARKS[1])?.1)));
    let (before, after) = place().with_context(|| format!("the page has no lines {MARKS:?}"))?;
    Ok(format!("{before}{}\n{}\n{}{after}", MARKS[0], table(folder)?, MARKS[1]))
}

fn table(folder: &Path) -> Result<String> {
    let [native, counted] = [read(&folder.join("relay-native.json"))?, read(&folder.join("relay-virtual.json"))?];
    // A relay that was not measured has no column.
    let is_measured = |kind: &Kind| native.iter().any(|row| row.peer == kind.name());
    let kinds: Vec<_> = KINDS.into_iter().filter(is_measured).collect();
    let mut table = String::from("| figure |");
    kinds.iter().for_each(|kind| _ = write!(table, " {} |", kind.name()));
    ratios(&kinds).for_each(|(ours, other)| _ = write!(table, " {} to {} |", ours.name(), other.name()));
    table += &format!(" goal |\n|---|{}\n", "--:|".repeat(kinds.len() + ratios(&kinds).count() + 1));
    for line in &LINES {
        table += &line.render(if line.virtual_time { &counted } else { &native }, &kinds);
    }
    if table.contains('†') {
        _ = write!(table, "\n{LOST_NOTE}\n");
    }
    _ = write!(table, "\nInstructions: {}.\nAll other figures: {}.\n", origin(&counted), origin(&native));
    Ok(table)
}

fn read(path: &Path) -> Result<Vec<Row>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let rows = text.lines().map(serde_json::from_str).collect::<Result<Vec<_>, _>>();
    let rows = rows.with_context(|| path.display().to_string())?;
    ensure!(!rows.is_empty(), "{} has no rows", path.display());
    Ok(rows)
}

fn origin(rows: &[Row]) -> String {
    let Row { commit, machine, kernel, .. } = &rows[0];
    let rounds = rows.iter().map(|row| row.samples.len()).max().unwrap_or_default();
    let of_rounds = if rounds == 1 { "one run".to_owned() } else { format!("medians of {rounds} rounds") };
    format!("{of_rounds} at commit {commit} ({machine}, Linux {kernel})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(config: &str, metric: &str, peer: &str, value: f64) -> Row {
        let [config, metric, peer] = [config, metric, peer].map(str::to_owned);
        let [commit, machine, kernel] = ["c", "m", "k"].map(str::to_owned);
        Row { config, metric, peer, value, lower_bound: false, commit, machine, kernel, samples: vec![value] }
    }

    #[test]
    fn a_line_has_a_figure_for_each_size_and_marks_ratios_to_relays_that_lost() {
        let line = Line::new("rate", "echoes", "echo, ", &["1", "10", "100"], "2 times").divided_by(1e3);
        let mut rows = Vec::new();
        for (config, rates) in [("echo, 1", [4e3, 3e3, 2e3, 1e3]), ("echo, 10", [90e3, 45e3, 30e3, 10e3])] {
            rows.extend(KINDS.iter().zip(rates).map(|(kind, rate)| row(config, "echoes", kind.name(), rate)));
        }
        rows.push(row("echo, 10", LOSS, "quic-go", 1.5));
        rows.push(row("echo, 100", "echoes", "paced", 7e3));
        rows[0].lower_bound = true;
        assert_eq!(
            line.render(&rows, &KINDS),
            "| rate | ≥ 4.00, 90.0, 7.00 | 3.00, 45.0, – | 2.00, 30.0, – | 1.00, 10.0, – \
             | ≥ 2.00, 3.00, – | ≥ 4.00, 9.00 †, – | 3.00, 4.50 †, – | 2 times |\n"
        );
    }

    #[test]
    fn a_page_without_a_place_for_the_table_is_refused() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        let error = replaced("# A page\n", &folder).unwrap_err().to_string();
        assert!(error.contains("the fast path, by `paced-perf report`"), "{error}");
    }

    #[test]
    fn the_readme_has_the_table_of_the_rows() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let readme = fs::read_to_string(root.join("README.md")).unwrap();
        assert!(replaced(&readme, &root.join("results")).unwrap() == readme, "make it again: paced-perf report");
    }

    #[test]
    fn every_line_has_figures_of_paced_and_of_the_peer_that_is_always_measured() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        let table = table(&folder).unwrap();
        let rows: Vec<Vec<_>> =
            table.lines().filter(|line| line.starts_with("| ")).map(|line| line.split(" | ").collect()).collect();
        for kind in [Kind::Paced, Kind::Quinn] {
            let column = rows[0].iter().position(|name| *name == kind.name()).unwrap();
            assert!(rows.iter().all(|row| row.len() == rows[0].len() && !row[column].contains('–')), "{table}");
        }
    }
}
