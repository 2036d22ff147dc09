//! How long cells took, and estimates for others.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};

use super::Cell;

/// The file of earlier durations, beside the results.
const FILE: &str = "durations.toml";

/// How long each cell took last time, in seconds, by its name.
#[derive(Debug, Default)]
pub struct Durations(BTreeMap<String, f64>);

impl Durations {
    /// Reads the durations of a folder; a missing or unreadable file counts as empty, since it holds only estimates.
    pub fn read(folder: &Path) -> Self {
        let text = fs::read_to_string(folder.join(FILE)).unwrap_or_default();
        Self(toml::from_str(&text).unwrap_or_default())
    }

    /// Returns how long a cell took last time, or `None` if it was not timed.
    pub fn of(&self, cell: &Cell) -> Option<Duration> {
        self.0.get(&cell.to_string()).and_then(|seconds| Duration::try_from_secs_f64(*seconds).ok())
    }

    /// Estimates how long a cell will take: as long as last time, or else its assumed duration times the median ratio of
    /// measured to assumed durations of the timed cells of its clock and kind.
    pub fn expected(&self, cell: &Cell, all: &[Cell]) -> Duration {
        if let Some(took) = self.of(cell) {
            return took;
        }
        let is_alike = |timed: &&Cell| (&timed.clock, timed.kind) == (&cell.clock, cell.kind);
        let alike = all.iter().filter(is_alike).filter(|timed| !timed.assumed.is_zero());
        let mut ratios: Vec<_> =
            alike.filter_map(|timed| Some(self.of(timed)?.as_secs_f64() / timed.assumed.as_secs_f64())).collect();
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios.get(ratios.len() / 2).copied().unwrap_or(1.0);
        Duration::try_from_secs_f64(cell.assumed.as_secs_f64() * ratio).unwrap_or(Duration::MAX)
    }

    /// Records how long a cell took.
    pub fn set(&mut self, cell: &Cell, took: Duration) {
        self.0.insert(cell.to_string(), took.as_secs_f64().round());
    }

    /// Writes all durations into a folder.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let text = format!(
            "# Seconds that each cell of `make papers` took last, wherever that was.\n{}",
            toml::to_string(&self.0)?
        );
        fs::write(&path, text).with_context(|| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::cell::Kind, *};

    fn cell(variant: &str, clock: &str, assumed_s: u64) -> Cell {
        Cell { assumed: Duration::from_secs(assumed_s), ..Cell::of_test(variant, clock) }
    }

    #[test]
    fn a_cell_that_was_never_timed_is_expected_by_those_of_its_clock() {
        let all = [cell("a", "lab", 100), cell("b", "lab", 10), cell("c", "lab", 50), cell("d", "native", 7)];
        let mut durations = Durations::default();
        let expected = |durations: &Durations, at: usize| durations.expected(&all[at], &all).as_secs();
        assert_eq!([0, 1, 2, 3].map(|at| expected(&durations, at)), [100, 10, 50, 7], "nothing was timed");
        durations.set(&all[0], Duration::from_secs(300));
        assert_eq!([0, 1, 2, 3].map(|at| expected(&durations, at)), [300, 30, 150, 7]);
        durations.set(&all[1], Duration::from_secs(10));
        assert_eq!([0, 1, 2].map(|at| expected(&durations, at)), [300, 10, 150], "the upper of two");
        let other = Cell { kind: Kind::Serving, ..cell("e", "lab", 600) };
        assert_eq!(durations.expected(&other, &all).as_secs(), 600, "simulators of another kind are not as slow");
    }

    #[test]
    fn every_cell_of_the_project_has_a_duration_to_begin_with() {
        let all = super::super::cell::all(&[], true).unwrap();
        let none: Vec<_> = all.iter().filter(|cell| cell.assumed.is_zero()).map(ToString::to_string).collect();
        assert!(none.is_empty(), "{none:?}");
    }
}
