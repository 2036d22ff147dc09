//! The product version of results: every row names its commit and the git trees of the product's folders.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use instruments::origin::Trees;
use serde::Deserialize;

/// The origin in a row of any kind.
#[derive(Deserialize)]
struct RowOrigin {
    commit: String,
    clock: String,
    #[serde(default)]
    trees: String,
}

/// The origin of rows of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The file's name.
    pub file: String,
    /// The commit.
    pub commit: String,
    /// How many rows of this commit the file has.
    pub rows: usize,
    /// Whether the rows were measured with uncommitted changes.
    pub dirty: bool,
    /// Whether each row names the trees of all folders of the product.
    pub has_trees: bool,
    /// The folders of the product and of the simulators that have changed since, among the folders that the rows depend on.
    pub changed: Vec<String>,
}

impl Provenance {
    /// Reads the origins of all rows of a folder, one value for each file and commit.
    ///
    /// # Errors
    /// When a file cannot be read, or a row does not name its commit and its clock.
    pub fn of_folder(folder: &Path, standing: &Trees) -> Result<Vec<Self>> {
        let mut found = BTreeMap::<(String, String), Self>::new();
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            for (index, line) in text.lines().enumerate() {
                let row: RowOrigin = serde_json::from_str(line)
                    .with_context(|| format!("{}:{} does not name its commit", path.display(), index + 1))?;
                Self::note(&mut found, &file, row, standing);
            }
        }
        Ok(found.into_values().collect())
    }

    fn note(found: &mut BTreeMap<(String, String), Self>, file: &str, row: RowOrigin, standing: &Trees) {
        let trees = Trees::parse(&row.trees);
        let key = (file.to_owned(), row.commit.clone());
        let entry = found.entry(key).or_insert_with(|| Self {
            file: file.to_owned(),
            commit: row.commit.clone(),
            rows: 0,
            dirty: false,
            has_trees: true,
            changed: Vec::new(),
        });
        entry.rows += 1;
        entry.dirty |= row.commit.ends_with("-dirty") || trees.is_dirty();
        entry.has_trees &= trees.is_complete();
        entry.changed.extend(trees.changed(standing, &row.clock));
        entry.changed.sort_unstable();
        entry.changed.dedup();
    }

    /// Returns why the rows are refused, if they are.
    fn refusal(&self) -> Option<&'static str> {
        if self.dirty {
            Some("are of a tree with changes that were not committed; measure again after a commit")
        } else if !self.commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            Some("do not name a commit; measure in a working folder of git, or set PACED_COMMIT and PACED_TREES")
        } else if !self.has_trees {
            Some("do not name the trees of the product's folders; measure with `perf/commit.sh --trees` in PACED_TREES")
        } else {
            None
        }
    }

    fn line(&self) -> String {
        let Self { file, commit, rows, changed, .. } = self;
        let since = match (self.refusal(), changed.as_slice()) {
            (Some(reason), _) => reason.to_owned(),
            (None, []) => "are of the product as it stands".to_owned(),
            (None, folders) => format!("are older than {}", folders.join(", ")),
        };
        format!("{file}: {rows} rows of {commit} {since}")
    }
}

/// Prints the commits of the results in a folder, and which folders of the product have changed since.
///
/// # Errors
/// As [`Provenance::of_folder`]; also if rows are of a tree with changes, or do not name the trees of the product's folders.
pub fn check(folder: &Path) -> Result<()> {
    let found = Provenance::of_folder(folder, &Trees::standing())?;
    found.iter().for_each(|from| api::say!("{}", from.line()));
    let refused: Vec<_> = found.iter().filter(|from| from.refusal().is_some()).map(Provenance::line).collect();
    ensure!(refused.is_empty(), "results are refused:\n{}", refused.join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDING: &str = "bpf 1 config 2 daemon 3 masque 4 sched 5";

    fn of_row(file: &str, commit: &str, trees: &str, clock: &str) -> Provenance {
        let mut found = BTreeMap::new();
        let row = RowOrigin { commit: commit.to_owned(), clock: clock.to_owned(), trees: trees.to_owned() };
        Provenance::note(&mut found, file, row, &Trees::parse(STANDING));
        found.into_values().next().unwrap()
    }

    #[test]
    fn rows_of_a_changed_tree_or_of_no_tree_are_refused() {
        let refused = |commit: &str, trees: &str| of_row("p.json", commit, trees, "wall").refusal().is_some();
        assert!(!refused("0abc123", STANDING));
        assert!(refused("0abc123-dirty", STANDING));
        assert!(refused("0abc123", &format!("{STANDING} dirty")));
        assert!(refused("unknown", STANDING));
        assert!(refused("0abc123", ""));
        assert!(refused("0abc123", "bpf 1 config 2 daemon 3 masque 4"), "without sched");
    }

    #[test]
    fn changed_parts_are_named_as_far_as_rows_depend_on_them() {
        let older = "bpf 1 config 2 daemon 0 masque 4 sched 5";
        let line = |clock| of_row("p.json", "0abc123", older, clock).line();
        assert_eq!(line("wall"), "p.json: 1 rows of 0abc123 are older than daemon");
        assert_eq!(line("simulated"), "p.json: 1 rows of 0abc123 are of the product as it stands");
    }

    #[test]
    fn all_results_name_their_product() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        let found = Provenance::of_folder(&folder, &Trees::parse(STANDING)).unwrap();
        let refused: Vec<_> = found.iter().filter(|from| from.refusal().is_some()).map(Provenance::line).collect();
        assert!(refused.is_empty(), "{refused:#?}");
    }
}
