//! Tables of results, made from rows only.

use instruments::rows::distinct;
use sched::route::serving::Interval;

use super::row::{Row, Side};
use crate::table::markdown;

/// Renders rows as Markdown: whether the same policy is first with processes and in the simulator, and the scores of each policy; nothing
/// without rows.
#[must_use]
pub fn tables(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let seeds = distinct(rows.iter().map(|row| row.seed)).len();
    let links = distinct(rows.iter().map(|row| row.link.as_str())).join("; ");
    let most = |of: fn(&Row) -> f64| rows.iter().map(of).fold(0.0, f64::max);
    let failed: usize = rows.iter().map(|row| row.failed).sum();
    let mut text = format!(
        "{}: {seeds} seeds; the link between edge and gateway: {links}. Of {} requests, {failed} were refused or broke off. The client sent \
         each at most {:.1} ms late, and engines made each token at most {:.1} ms late. Differences are seed by seed.\n\n",
        first.plan,
        rows.iter().map(|row| row.requests).sum::<usize>(),
        most(|row| row.sent_late_ms),
        most(|row| row.made_late_ms),
    );
    let cells = distinct(rows.iter().map(Row::cell));
    let cells: Vec<_> = cells.into_iter().map(|name| Cell::new(name, rows)).collect();
    let head = [
        "requests",
        "first, simulated",
        "first, processes",
        "with processes, the simulated first less the best other policy",
        "pairs of policies in the same order",
    ];
    text += &markdown(&head.map(str::to_owned), &cells.iter().map(Cell::ranking).collect::<Vec<_>>());
    for cell in &cells {
        text += &format!("\n`{}`:\n\n{}", cell.name, cell.scores());
    }
    text
}

/// The rows of a workload at one of its rates.
struct Cell<'a> {
    name: String,
    /// By policy, in the order of the first seeds' rows.
    policies: Vec<(&'a str, Vec<&'a Row>)>,
}

impl<'a> Cell<'a> {
    fn new(name: String, rows: &'a [Row]) -> Self {
        let here: Vec<_> = rows.iter().filter(|row| row.cell() == name).collect();
        let mut names = distinct(here.iter().map(|row| row.policy.as_str()));
        // The order of runs changes from cell to cell.
        names.sort_by_key(|name| rows.iter().position(|row| row.policy == *name));
        let of = |name| {
            let mut rows: Vec<_> = here.iter().filter(|row| row.policy == name).copied().collect();
            rows.sort_by_key(|row| row.seed);
            (name, rows)
        };
        Self { name, policies: names.into_iter().map(of).collect() }
    }

    /// Returns the mean scores of all policies on a side.
    fn means(&self, side: fn(&Row) -> &Side) -> Vec<f64> {
        let mean = |rows: &[&Row]| rows.iter().map(|row| side(row).score).sum::<f64>() / rows.len().max(1) as f64;
        self.policies.iter().map(|(_, rows)| mean(rows)).collect()
    }

    fn ranking(&self) -> Vec<String> {
        let [simulated, processes] = [simulated, processes].map(|side| self.means(side));
        let (Some(wanted), Some(found)) = (highest(&simulated, None), highest(&processes, None)) else {
            return vec![self.name.clone()];
        };
        let lead = highest(&processes, Some(wanted)).map_or("–".to_owned(), |other| {
            let of = |policy: usize| self.policies[policy].1.iter().map(|row| row.processes.score);
            let lead: Vec<_> = of(wanted).zip(of(other)).map(|(one, other)| one - other).collect();
            format!("{} (`{}`)", difference(&lead), self.policies[other].0)
        });
        let pairs = || (0..simulated.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
        let order = |means: &[f64], (one, other): (usize, usize)| means[one].total_cmp(&means[other]);
        let same = pairs().filter(|pair| order(&simulated, *pair) == order(&processes, *pair)).count();
        let named = |policy: usize, means: &[f64]| format!("`{}` ({:.3})", self.policies[policy].0, means[policy]);
        vec![
            self.name.clone(),
            named(wanted, &simulated),
            named(found, &processes),
            lead,
            format!("{same} of {}", pairs().count()),
        ]
    }

    fn scores(&self) -> String {
        let head = [
            "policy",
            "score, processes",
            "simulated",
            "difference",
            "met, processes",
            "simulated",
            "answered by, processes",
        ];
        let rows = self.policies.iter().map(|(name, rows)| {
            let scores = |side: fn(&Row) -> &Side| rows.iter().map(|row| side(row).score).collect::<Vec<_>>();
            let apart: Vec<_> = rows.iter().map(|row| row.processes.score - row.simulated.score).collect();
            let requests: usize = rows.iter().map(|row| row.requests).sum();
            let met = |side: fn(&Row) -> &Side| {
                let met: usize = rows.iter().map(|row| side(row).met).sum();
                format!("{:.1} %", 100.0 * met as f64 / requests.max(1) as f64)
            };
            let models = distinct(rows.iter().flat_map(|row| row.processes.selected.keys()));
            let answered = models.into_iter().filter_map(|model| {
                let count: usize = rows.iter().filter_map(|row| row.processes.selected.get(model)).sum();
                (count > 0).then(|| format!("{model}: {count}"))
            });
            vec![
                (*name).to_owned(),
                mean(&scores(processes), Some(1.0)),
                mean(&scores(simulated), Some(1.0)),
                difference(&apart),
                met(processes),
                met(simulated),
                answered.collect::<Vec<_>>().join(", "),
            ]
        });
        markdown(&head.map(str::to_owned), &rows.collect::<Vec<_>>())
    }
}

fn processes(row: &Row) -> &Side {
    &row.processes
}

fn simulated(row: &Row) -> &Side {
    &row.simulated
}

/// Returns the place of the highest mean, but for one; among equals, the first.
fn highest(means: &[f64], but: Option<usize>) -> Option<usize> {
    let others = (0..means.len()).filter(|place| Some(*place) != but);
    others.reduce(|best, place| if means[place] > means[best] { place } else { best })
}

/// Returns the mean of scores or, if there is no `whole`, of their differences, with its interval over at least two values.
fn mean(values: &[f64], whole: Option<f64>) -> String {
    let interval = Interval::of(values);
    if interval.high.is_finite() { interval.to_text(whole, 3) } else { format!("{:.3}", interval.mean) }
}

fn difference(values: &[f64]) -> String {
    let text = mean(values, None);
    if text.starts_with('-') { text } else { format!("+{text}") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(policy: &str, seed: u64, scores: [f64; 2]) -> Row {
        let side = |score: f64| Side {
            score,
            met: (score * 10.0) as usize,
            selected: BTreeMap::from([("big".to_owned(), 10)]),
        };
        Row {
            plan: "p".to_owned(),
            variant: "base".to_owned(),
            workload: "stable".to_owned(),
            rate: Some(2.0),
            policy: policy.to_owned(),
            seed,
            repetitions: 2,
            link: "tbf".to_owned(),
            requests: 10,
            failed: 0,
            processes: side(scores[0]),
            simulated: side(scores[1]),
            guarded: 0,
            sent_late_ms: 1.25,
            made_late_ms: 3.0,
        }
    }

    #[test]
    fn the_first_of_both_sides_and_its_lead_are_named_seed_by_seed() {
        let rows = [
            row("a", 1, [0.5, 0.9]),
            row("b", 1, [0.6, 0.7]),
            row("c", 1, [0.1, 0.2]),
            row("b", 2, [0.8, 0.7]),
            row("c", 2, [0.1, 0.2]),
            row("a", 2, [0.7, 0.9]),
        ];
        let text = tables(&rows);
        let ranking = text.lines().find(|line| line.starts_with("| stable, 2/s")).unwrap();
        let cells: Vec<_> = ranking.trim_matches('|').split(" | ").map(str::trim).collect();
        assert_eq!(cells, ["stable, 2/s", "`a` (0.900)", "`b` (0.700)", "-0.100 ± 0.000 (`b`)", "2 of 3"], "{text}");
        assert!(text.contains("2 seeds") && text.contains("Of 60 requests, 0 were refused"), "{text}");
        let b = text.lines().find(|line| line.starts_with("| b ")).unwrap();
        assert!(b.contains("| 0.700 ± ") && b.contains("+0.000 ± ") && b.contains("70.0 %"), "{b}");
        assert_eq!(tables(&[]), "");
    }

    #[test]
    fn rows_come_back_from_their_lines() {
        let rows = [row("a", 1, [0.5, 0.9]), row("b", 1, [0.6, 0.7])];
        let text: String = rows.iter().map(|row| serde_json::to_string(row).unwrap() + "\n").collect();
        assert_eq!(Row::parse_all(&text).unwrap(), rows);
        assert!(crate::serving::Row::parse_all(&text).is_err());
    }
}
