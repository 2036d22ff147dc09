//! The files of plans, in `perf/plans/`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use toml::{Table, Value};

/// The folder of the plans.
pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../plans");

/// Returns the names of all plans, sorted.
///
/// # Errors
/// When their folder cannot be read.
pub fn names() -> Result<Vec<String>> {
    let entries = fs::read_dir(FOLDER).with_context(|| format!("failed to read {FOLDER}"))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let plans = paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    Ok(plans
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect())
}

/// Whether a plan is given by the path of its file, which has a slash or ends in `.toml`. Anything else is the name of a file in
/// `perf/plans/`.
#[must_use]
pub fn is_path(plan: &str) -> bool {
    plan.contains('/') || plan.ends_with(".toml")
}

/// Returns the value of a plan's key `kind`. Plans with a network have none.
pub(crate) fn kind(text: &str) -> Result<Option<Value>> {
    Ok(toml::from_str::<Table>(text)?.remove("kind"))
}

/// The file of a plan, not parsed yet.
pub(crate) struct PlanFile {
    path: PathBuf,
    text: String,
}

impl PlanFile {
    /// Reads the file of this name in `perf/plans/`, or at this [path](is_path).
    pub(crate) fn read(name: &str) -> Result<Self> {
        let (path, missing) = if is_path(name) {
            (PathBuf::from(name), format!("failed to read {name}"))
        } else {
            let missing = format!("no plan {name}; `list` names all, and a path has a slash or ends in .toml");
            (Path::new(FOLDER).join(format!("{name}.toml")), missing)
        };
        let text = fs::read_to_string(&path).context(missing)?;
        Ok(Self { path, text })
    }

    /// Whether its plan is of the kind with this name.
    pub(crate) fn is_of(&self, name: &str) -> Result<bool> {
        let kind = kind(&self.text).with_context(|| self.path.display().to_string())?;
        Ok(kind.is_some_and(|kind| kind.as_str() == Some(name)))
    }

    /// Returns its plan, whose name must be the file's.
    pub(crate) fn parse<P>(&self, parse: impl Fn(&str) -> Result<P>, name: impl Fn(&P) -> &str) -> Result<P> {
        let Self { path, text } = self;
        let plan = parse(text).with_context(|| path.display().to_string())?;
        ensure!(
            path.file_stem().is_some_and(|stem| *stem == *name(&plan)),
            "{}: `name` is {}, not the file's name",
            path.display(),
            name(&plan)
        );
        Ok(plan)
    }
}
