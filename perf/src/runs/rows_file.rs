//! The file for the rows of a run: other variants' rows stay in it.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use instruments::origin::Origin;
use rustix::fs::{Access, access};

/// The file for rows.
pub(super) struct RowsFile {
    path: PathBuf,
}

impl RowsFile {
    /// Reads the file, if there is one, for rows of a plan.
    ///
    /// # Errors
    /// When the file cannot be read or written, or has something else than rows of this plan, which would be lost. The file has not been
    /// changed then.
    pub(super) fn open(path: &Path, plan: &str) -> Result<Self> {
        check_writable("--json", path)?;
        let file = Self { path: path.to_owned() };
        for (index, line) in file.rows()?.lines().enumerate() {
            let is_of_plan = Place::of(line).is_some_and(|place| place.plan == plan);
            let (file, line) = (path.display(), index + 1);
            ensure!(
                is_of_plan,
                "--json: line {line} of {file} is no row of {plan} and would be lost; name another file"
            );
        }
        Ok(file)
    }

    /// Writes all lines of the run so far, in place of the rows of their variants.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(&self, lines: &str) -> Result<()> {
        // Another run may have written rows meanwhile.
        write(&self.path, &with_other_variants(&self.rows()?, lines))
    }

    /// Returns the rows that the file has now.
    fn rows(&self) -> Result<String> {
        // A terminal or a pipe has no rows from before, and would wait for some.
        if !self.path.is_file() {
            return Ok(String::new());
        }
        fs::read_to_string(&self.path).with_context(|| format!("--json: failed to read {}", self.path.display()))
    }

    /// Writes all rows of the run so far, each with the fingerprint of its variant.
    ///
    /// # Errors
    /// When the file cannot be written, or a row has no fingerprint.
    pub(super) fn write_rows<R: serde::Serialize>(
        &self,
        rows: &[R],
        origin: &Origin,
        fingerprint: impl Fn(&R) -> Result<String>,
    ) -> Result<()> {
        let line = |row| Ok(serde_json::to_string(&Line { row, fingerprint: fingerprint(row)?, origin })? + "\n");
        self.write(&rows.iter().map(line).collect::<Result<String>>()?)
    }
}

/// Writes a file.
///
/// # Errors
/// When it cannot be written; the error names it.
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}

/// Checks before a run that the file of an option can be written afterwards. Neither makes nor changes it.
///
/// # Errors
/// When it cannot be written; the error names the option.
pub(super) fn check_writable(option: &str, path: &Path) -> Result<()> {
    let checked = match (fs::metadata(path), path.parent()) {
        (Ok(existing), _) if existing.is_dir() => Err(ErrorKind::IsADirectory.into()),
        (Ok(_), _) => access(path, Access::WRITE_OK).map_err(io::Error::from),
        (Err(error), Some(folder)) if error.kind() == ErrorKind::NotFound => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from)
        }
        (Err(error), _) => Err(error),
    };
    checked.with_context(|| format!("{option}: {} cannot be written", path.display()))
}

/// A line of results.
#[derive(serde::Serialize)]
struct Line<'a, R> {
    #[serde(flatten)]
    row: &'a R,
    fingerprint: String,
    #[serde(flatten)]
    origin: &'a Origin,
}

/// Where a line of results belongs.
#[derive(PartialEq, serde::Deserialize)]
struct Place {
    plan: String,
    variant: String,
    clock: String,
}

impl Place {
    fn of(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// Returns lines of results with those of a new run: other variants of their plan stay.
pub(super) fn with_other_variants(existing: &str, new: &str) -> String {
    let places: Vec<_> = new.lines().filter_map(Place::of).collect();
    let stays = |line: &&str| {
        let place = Place::of(line);
        place.is_some_and(|place| places.iter().all(|new| new.plan == place.plan && *new != place))
    };
    let kept: String = existing.lines().filter(stays).map(|line| format!("{line}\n")).collect();
    kept + new
}
