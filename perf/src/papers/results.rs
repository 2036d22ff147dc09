//! Files of rows, by plan: `PLAN-lab.json` from the VM lab, `PLAN.json` from everywhere else.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use instruments::origin::Trees;
use serde::Deserialize;

use super::Cell;

/// The fields of a row of any kind that say where it belongs.
#[derive(Clone, Debug, Deserialize)]
struct Head {
    plan: String,
    variant: String,
    clock: String,
    #[serde(default)]
    trees: String,
    #[serde(default)]
    fingerprint: String,
    #[serde(default)]
    repetitions: u64,
    #[serde(default)]
    scheduler: String,
}

/// The rows of all plans.
#[derive(Debug)]
pub struct Results {
    folder: PathBuf,
    /// By file name: each line, with its parsed head. Files of other benchmarks are not here.
    files: BTreeMap<String, Vec<(Head, String)>>,
}

impl Results {
    /// Reads all files of a folder.
    ///
    /// # Errors
    /// When a file cannot be read, a line is not JSON, or a file of rows has a line that is no row; the error has the line's
    /// number.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(".json"))
            else {
                continue;
            };
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let lines = parse(&text).with_context(|| path.display().to_string())?;
            if !lines.is_empty() {
                files.insert(name.to_owned(), lines);
            }
        }
        Ok(Self { folder: folder.to_owned(), files })
    }

    /// Whether the rows of a cell are of the current product: its folders have the same trees, the plan's fingerprint is the
    /// same, there are enough repetitions, and each scheduler that can run here has rows.
    #[must_use]
    pub fn is_current(&self, cell: &Cell, trees: &Trees) -> bool {
        // Rows of schedulers that cannot run here could not become newer.
        let mut rows = self.of(cell).filter(|row| !cell.absent.contains(&row.scheduler)).peekable();
        let has_rows = |scheduler: &String| self.of(cell).any(|row| row.scheduler == *scheduler);
        rows.peek().is_some()
            && cell.schedulers.iter().all(has_rows)
            && rows.all(|row| {
                Trees::parse(&row.trees).same(trees, &cell.clock)
                    && (cell.fingerprint == row.fingerprint || row.fingerprint.is_empty() && cell.older_without)
                    && row.repetitions >= cell.repetitions
            })
    }

    /// Returns how many repetitions the rows of a cell have; 0 if there are no rows.
    #[must_use]
    pub fn repetitions(&self, cell: &Cell) -> u64 {
        self.of(cell).map(|row| row.repetitions).max().unwrap_or_default()
    }

    fn of<'a>(&'a self, cell: &'a Cell) -> impl Iterator<Item = &'a Head> {
        let rows = self.files.get(&file(&cell.plan, &cell.clock)).into_iter().flatten().map(|(head, _)| head);
        rows.filter(|row| row.plan == cell.plan && row.variant == cell.variant && row.clock == cell.clock)
    }

    /// Replaces a cell's rows by lines of JSON, and writes the file. A scheduler of the plan that has no new rows, because it cannot
    /// run here, keeps its existing ones: their trees say that they are older.
    ///
    /// # Errors
    /// When the file cannot be written or belongs to another benchmark, a line is no row, or the existing rows have more repetitions.
    pub fn replace(&mut self, cell: &Cell, lines: &str) -> Result<()> {
        let name = file(&cell.plan, &cell.clock);
        let mut new: Vec<(Head, String)> = Vec::new();
        for line in lines.lines().filter(|line| !line.trim().is_empty()) {
            new.push((serde_json::from_str(line).context("a row without plan, variant or clock")?, line.to_owned()));
        }
        let least = new.iter().filter(|(head, _)| head.variant == cell.variant).map(|(head, _)| head.repetitions).min();
        let standing = self.repetitions(cell);
        ensure!(
            least.is_none_or(|least| least >= standing),
            "the existing rows have {standing} repetitions, the new ones {}",
            least.unwrap_or_default()
        );
        let path = self.folder.join(&name);
        let is_known = self.files.contains_key(&name) || !path.exists();
        ensure!(is_known, "{} has no rows of plans", path.display());
        let rows = self.files.entry(name).or_default();
        // Rows of other variants also belong to this cell: the costs of queues, which no other cell has.
        let key = |head: &Head| (head.variant.clone(), head.clock.clone());
        let at = rows.iter().position(|(head, _)| (&head.variant, &head.clock) == (&cell.variant, &cell.clock));
        let at = at.unwrap_or(rows.len());
        let before =
            rows[..at].iter().filter(|(head, _)| !new.iter().any(|(of_new, _)| key(of_new) == key(head))).count();
        let is_replaced = |head: &Head| new.iter().any(|(of_new, _)| key(of_new) == key(head));
        let was_not_run = |head: &Head| {
            (&head.variant, &head.clock) == (&cell.variant, &cell.clock)
                && cell.schedulers.iter().chain(&cell.absent).any(|scheduler| *scheduler == head.scheduler)
                && !new.iter().any(|(of_new, _)| key(of_new) == key(head) && of_new.scheduler == head.scheduler)
        };
        let kept: Vec<_> = rows.iter().filter(|(head, _)| is_replaced(head) && was_not_run(head)).cloned().collect();
        rows.retain(|(head, _)| !is_replaced(head));
        rows.splice(before..before, new.into_iter().chain(kept));
        let text: String = rows.iter().map(|(_, line)| format!("{line}\n")).collect();
        // As a whole, so that an interruption leaves the previous rows.
        state::replace_with_mode(&path, text.as_bytes(), 0o666).with_context(|| path.display().to_string())
    }

    /// Returns the existing lines of a plan in one of its two files.
    #[must_use]
    pub fn lines(&self, plan: &str, lab: bool) -> String {
        let name = if lab { file(plan, "lab") } else { file(plan, "") };
        let lines = self.files.get(&name).into_iter().flatten().filter(|(head, _)| head.plan == plan);
        lines.map(|(_, line)| format!("{line}\n")).collect()
    }
}

/// Parses the lines of a file; none if they are of another benchmark.
fn parse(text: &str) -> Result<Vec<(Head, String)>> {
    let (mut heads, mut foreign) = (Vec::new(), None);
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("line {} is no row", at + 1);
        let row: serde_json::Value = serde_json::from_str(line).with_context(place)?;
        match serde_json::from_value(row).with_context(place) {
            Ok(head) => heads.push((head, line.to_owned())),
            Err(error) => foreign = foreign.or(Some(error)),
        }
    }
    // A file of rows would lose such a line when a cell is replaced.
    match foreign {
        Some(error) if !heads.is_empty() => Err(error),
        _ => Ok(heads),
    }
}

fn file(plan: &str, clock: &str) -> String {
    if clock == "lab" { format!("{plan}-lab.json") } else { format!("{plan}.json") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(variant: &str, trees: &str, value: u32) -> String {
        format!(
            "{{\"plan\":\"p\",\"variant\":\"{variant}\",\"clock\":\"virtual-network\",\"commit\":\"c\",\"trees\":\"{trees}\",\
             \"fingerprint\":\"f\",\"repetitions\":3,\"scheduler\":\"rr\",\"value\":{value}}}"
        )
    }

    fn cell(variant: &str) -> Cell {
        Cell { older_without: false, repetitions: 3, ..Cell::of_test(variant, "virtual-network") }
    }

    #[test]
    fn rows_of_a_cell_take_the_place_of_its_earlier_ones_and_leave_others_alone() {
        let folder = std::env::temp_dir().join(format!("paced-results-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("other.json"), "{\"no\":\"plan\"}\n").unwrap();
        let (now, before) = ("daemon 1 sched 2 masque 3", "daemon 0 sched 2 masque 3");
        let [a, b] = [row("base", before, 1), row("more", now, 2)];
        fs::write(folder.join("p.json"), format!("{a}\n{b}\n")).unwrap();
        let mut results = Results::open(&folder).unwrap();
        let trees = Trees::parse(now);
        assert!(!results.is_current(&cell("base"), &trees) && results.is_current(&cell("more"), &trees));
        assert!(!results.is_current(&cell("none"), &trees), "without rows there is nothing");
        assert!(!results.is_current(&Cell { repetitions: 4, ..cell("more") }, &trees));
        let of = |scheduler: &str| Cell { schedulers: vec![scheduler.to_owned()], ..cell("more") };
        assert!(
            results.is_current(&of("rr"), &trees) && !results.is_current(&of("abs"), &trees),
            "of abs there are no rows"
        );
        let changed = Cell { fingerprint: "g".to_owned(), ..cell("more") };
        assert!(!results.is_current(&changed, &trees));
        assert!(!results.is_current(&Cell { older_without: true, ..changed }, &trees), "its rows have one");

        let new = row("base", now, 7);
        results.replace(&cell("base"), &format!("{new}\n")).unwrap();
        assert_eq!(fs::read_to_string(folder.join("p.json")).unwrap(), format!("{new}\n{b}\n"), "in its place");
        assert!(results.is_current(&cell("base"), &trees));
        let third = row("third", now, 8);
        results.replace(&cell("third"), &third).unwrap();
        assert!(results.lines("p", false).ends_with(&format!("{third}\n")));
        assert!(results.replace(&cell("base"), "{}").is_err());
        let fewer = new.replace("\"repetitions\":3", "\"repetitions\":2");
        let error = results.replace(&cell("base"), &fewer).unwrap_err().to_string();
        assert!(error.contains("3 repetitions"), "{error}");
        assert!(results.lines("p", false).contains(&new), "rows of more repetitions stay");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn rows_of_a_scheduler_that_cannot_run_here_stay_and_do_not_make_the_cell_older() {
        let folder = std::env::temp_dir().join(format!("paced-results-absent-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (now, before) = ("daemon 1 sched 2 masque 3", "daemon 0 sched 2 masque 3");
        let of = |scheduler: &str, trees: &str| row("base", trees, 1).replace("\"rr\"", &format!("\"{scheduler}\""));
        let [ours, peer, dropped] = ["rr", "quic-go", "no-longer-planned"].map(|name| of(name, before));
        let other = row("more", now, 2);
        fs::write(folder.join("p.json"), format!("{ours}\n{peer}\n{dropped}\n{other}\n")).unwrap();
        let mut results = Results::open(&folder).unwrap();
        let here = Cell { schedulers: vec!["rr".to_owned()], absent: vec!["quic-go".to_owned()], ..cell("base") };
        let new = of("rr", now);
        results.replace(&here, &new).unwrap();
        let kept = fs::read_to_string(folder.join("p.json")).unwrap();
        assert_eq!(kept, format!("{new}\n{peer}\n{other}\n"));
        let everywhere = Cell { schedulers: vec!["rr".to_owned(), "quic-go".to_owned()], ..cell("base") };
        let trees = Trees::parse(now);
        assert!(results.is_current(&here, &trees), "it cannot become newer here");
        assert!(!results.is_current(&everywhere, &trees), "it is measured again where it can run");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_line_that_is_no_row_is_refused_by_its_number_and_not_lost() {
        let folder = std::env::temp_dir().join(format!("paced-results-lines-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let good = row("base", "sched 1", 1);
        let path = folder.join("p.json");
        for (bad, message) in [
            (&good[..40], "line 2 is no row: EOF"),
            ("{\"plan\":\"p\",\"variant\":\"more\"}", "line 2 is no row: missing field `clock`"),
            ("{\"no\":\"plan\"}", "line 2 is no row: missing field `plan`"),
        ] {
            fs::write(&path, format!("{good}\n{bad}\n")).unwrap();
            let error = format!("{:#}", Results::open(&folder).unwrap_err());
            assert!(error.contains("p.json") && error.contains(message), "{error}");
        }
        let foreign = "{\"no\":\"plan\"}\n";
        fs::write(&path, foreign).unwrap();
        assert!(Results::open(&folder).unwrap().replace(&cell("base"), &good).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_written_whole_stays_as_it_was() {
        let folder = std::env::temp_dir().join(format!("paced-results-whole-{}", std::process::id()));
        fs::create_dir_all(folder.join("p.json.new")).unwrap();
        let (path, old) = (folder.join("p.json"), format!("{}\n", row("base", "sched 1", 1)));
        fs::write(&path, &old).unwrap();
        // The folder takes the place of the new file, so that it cannot be written.
        let mut results = Results::open(&folder).unwrap();
        assert!(results.replace(&cell("base"), &row("base", "sched 2", 2)).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), old);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn no_plan_asks_for_fewer_repetitions_than_its_rows_have() {
        let results = Results::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results")).unwrap();
        for cell in super::super::cell::all(&[], true).unwrap() {
            let standing = results.repetitions(&cell);
            assert!(cell.repetitions >= standing, "{cell}: {} repetitions, rows have {standing}", cell.repetitions);
        }
    }
}
