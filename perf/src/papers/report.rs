//! `perf/RESULTS.md`: all plans, with published claims beside our measurements. It is made from rows and verdicts only; nothing in it
//! is typed by hand.

use std::{collections::BTreeSet, fmt::Write as _, path::Path};

use anyhow::{Context as _, Result};
use experiment::{self, Row, serving};
use plan::{self, Any, BASE, Clock, Plan, Topology, Varied as _, Verdict};

use super::Results;

/// Renders the report, with the pictures that lie beside the rows in `folder`.
///
/// # Errors
/// When a plan is not valid, or its file of results has a line that is no row.
pub fn report(results: &Results, folder: &Path) -> Result<String> {
    let plans: Vec<_> = plan::names()?.iter().map(|name| Any::read(name)).collect::<Result<_>>()?;
    let mut text = String::from(
        "# Results\n\n`paced-perf report` writes this page from the rows in [results](results) and the verdicts in [plans](plans); a test compares it with\n\
         them. [README.md](README.md) says how everything was measured, and `make papers` makes all rows again. ± is half of the 95 % interval\n\
         of the mean over repetitions (Student's t). The number before it is this mean, for a quantile the mean of the repetitions' quantiles.\n\
         An interval of shares that reaches 0 or 100 % (or a score's 0 or 1) is cut there, and given by its ends: `97.2 (91.0 to 100.0) %`.\n\
         A cell without ± was measured once, or by a commit that computed no intervals, or has a repetition without a value: it shows the\n\
         quantile of the requests of all repetitions together, or the median of other figures. Verdicts quote these where they give no ±. In\n\
         the tables of FStream's figures, ± is the standard deviation. `never` is a quantile that too few requests reached. A mode of tunnels\n\
         that has not sent everything has no other figure than `never`. The paper's values stand in brackets.\n\
         ≥ stands before a figure of repetitions that their limit ended before all requests were completed.\n\n\
         ## What was published, and what is measured here\n\n| plan | claim | here | why |\n|---|---|---|---|\n",
    );
    for plan in &plans {
        for Verdict { claim, judgement, why } in plan.verdicts() {
            _ = writeln!(text, "| [{0}](#{0}) | {claim} | {judgement} | {why} |", plan.name());
        }
    }
    for plan in &plans {
        _ = writeln!(text, "\n## {}\n\n{} ({}).", plan.name(), sentence(plan.title()), plan.source());
        match plan {
            Any::Network(plan) => {
                for lab in [false, true] {
                    text += &of_network(plan, results, lab, folder)?;
                }
            }
            Any::Serving(plan) => {
                let lines = results.lines(&plan.name, false);
                let rows = serving::Row::parse_all(&lines).with_context(|| plan.name.clone())?;
                text += &origins(&lines, "simulated engines")?;
                _ = write!(text, "\n{}", serving::tables(&rows, &plan.goals));
                text += &pictures(&plan.name, folder)?;
            }
            Any::Trees(plan) => {
                let lines = results.lines(&plan.name, false);
                let rows = paths::trees::Row::parse_all(&lines).with_context(|| plan.name.clone())?;
                text += &origins(&lines, "simulated paths")?;
                _ = write!(text, "\n{}", paths::trees::tables(&rows));
            }
            Any::Stack(plan) => {
                let lines = results.lines(&plan.name, true);
                let rows = paths::stack::Row::parse_all(&lines).with_context(|| plan.name.clone())?;
                text += &origins(&lines, Clock::Lab.name())?;
                _ = write!(text, "\n{}", paths::stack::tables(&rows));
            }
            Any::Processes(plan) => {
                for lab in [false, true] {
                    let lines = results.lines(&plan.name, lab);
                    let rows = serving::processes::Row::parse_all(&lines).with_context(|| plan.name.clone())?;
                    if !rows.is_empty() {
                        let clock = if lab { Clock::Lab } else { Clock::Native };
                        text += &origins(&lines, clock.name())?;
                        _ = write!(text, "\n{}", serving::processes::tables(&rows));
                    }
                }
            }
            Any::Paths(plan) => {
                let lines = results.lines(&plan.name, false);
                let rows = paths::Row::parse_all(&lines).with_context(|| plan.name.clone())?;
                text += &origins(&lines, "simulated paths")?;
                _ = write!(text, "\n{}", paths::tables(&rows));
                if folder.join(format!("{}.svg", plan.name)).exists() {
                    _ = write!(text, "\n![{0}](results/{0}.svg)\n", plan.name);
                }
            }
        }
    }
    Ok(text)
}

fn of_network(plan: &Plan, results: &Results, lab: bool, folder: &Path) -> Result<String> {
    let lines = results.lines(&plan.name, lab);
    if lines.is_empty() {
        return Ok(String::new());
    }
    let rows = Row::parse_all(&lines).with_context(|| plan.name.clone())?;
    let clock = rows.first().map_or("", |row| row.origin.clock());
    let mut text = format!("\n### By the clock `{clock}`\n{}", origins(&lines, clock)?);
    let is_of_curves = plan.topology == Topology::Tunnelled;
    if is_of_curves {
        _ = write!(text, "\n{}", experiment::curves(plan, &rows));
    }
    for variant in plan.variants().filter(|_| !is_of_curves) {
        let of_variant: Vec<_> = rows.iter().filter(|row| row.variant == variant).cloned().collect();
        if of_variant.is_empty() {
            continue;
        }
        let tables = experiment::tables(&plan.variant(variant)?, &of_variant);
        if variant == BASE {
            _ = write!(text, "\n{tables}");
        } else {
            _ = write!(text, "\n<details><summary>{variant}</summary>\n\n{tables}\n</details>\n");
        }
    }
    let queues = experiment::queues(&rows);
    if !queues.is_empty() {
        _ = write!(text, "\n{queues}");
    }
    let name = if lab { format!("{}-lab", plan.name) } else { plan.name.clone() };
    if folder.join(format!("{name}.svg")).exists() {
        _ = write!(text, "\n![{name}](results/{name}.svg)\n");
    }
    Ok(text)
}

/// Lists the commits, kernels and machines of rows.
fn origins(lines: &str, clock: &str) -> Result<String> {
    let mut from = BTreeSet::new();
    for line in lines.lines() {
        let row: serde_json::Value = serde_json::from_str(line)?;
        let word = |key: &str| row.get(key).and_then(serde_json::Value::as_str).unwrap_or("unknown").to_owned();
        from.insert((word("commit"), word("kernel"), word("machine")));
    }
    let all: Vec<_> = from.iter().map(|(commit, kernel, machine)| format!("{commit} ({kernel}, {machine})")).collect();
    Ok(format!("\nRows of {clock}, by commit: {}.\n", all.join("; ")))
}

/// Lists the pictures of a plan of model serving, by name.
fn pictures(plan: &str, folder: &Path) -> Result<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(&format!("{plan}-")) && name.ends_with(".svg"))
        .collect();
    names.sort();
    Ok(names.iter().map(|name| format!("\n![{}](results/{name})\n", name.trim_end_matches(".svg"))).collect())
}

/// Capitalizes the first letter.
fn sentence(title: &str) -> String {
    let mut letters = title.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_that_is_committed_is_what_rows_and_verdicts_say() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("results");
        let made = report(&Results::open(&folder).unwrap(), &folder).unwrap();
        let committed = std::fs::read_to_string(root.join("RESULTS.md")).unwrap();
        assert!(made == committed, "make it again: paced-perf report");
    }

    #[test]
    fn every_plan_of_a_paper_has_a_verdict() {
        for name in plan::names().unwrap() {
            let plan = Any::read(&name).unwrap();
            assert!(!plan.is_of_a_paper() || !plan.verdicts().is_empty(), "{name}: `verdicts` are missing");
        }
    }
}
