//! Checks of single keys. Each error names the key, its value, and the values that the key may have.

use std::{
    collections::BTreeSet,
    fmt::Display,
    ops::{Range, RangeInclusive},
};

use anyhow::{Result, ensure};
pub(crate) use routing::bounds::within;

/// The name that results use for the figures of all classes, tasks or streams together.
pub(crate) const ALL: &str = "all";

/// The lowest and the highest rate of a link or of a class, in Mbit/s. A packet then takes fifteen seconds at most.
pub(crate) const RATES_MBIT: RangeInclusive<f64> = 0.001..=1_000_000.0;

/// The longest delay of a packet, in milliseconds.
pub(crate) const MAX_DELAY_MS: f64 = 60_000.0;

/// Checks that a share is within bounds, of which the upper is not allowed.
///
/// # Errors
/// When it is not, or is not a number.
pub(crate) fn share(key: impl Display, value: f64, bounds: Range<f64>) -> Result<()> {
    ensure!(bounds.contains(&value), "{key}: {value} is not a share from {} to below {}", bounds.start, bounds.end);
    Ok(())
}

/// Checks that there are `count` entries of a list at least and at most.
///
/// # Errors
/// When there are fewer or more.
pub(crate) fn entries(key: impl Display, count: usize, bounds: RangeInclusive<usize>) -> Result<()> {
    ensure!(bounds.contains(&count), "{key}: there are {count} entries, not {} to {}", bounds.start(), bounds.end());
    Ok(())
}

/// Checks that the names of a list's entries can tell rows apart: none is empty, [`ALL`], or there twice.
///
/// # Errors
/// When one is; the error names it.
pub(crate) fn names<'a>(key: &str, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        ensure!(!name.is_empty(), "{key}: a `name` is empty");
        ensure!(
            name != ALL,
            "{key}: `name` is `{ALL}`, which results reserve for figures of all together; take another"
        );
        ensure!(seen.insert(name), "{key}: two have the same name, {name}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_no_share() {
        assert!(share("loss", f64::NAN, 0.0..1.0).is_err() && share("loss", 1.0, 0.0..1.0).is_err());
    }

    #[test]
    fn names_that_rows_could_not_tell_apart_are_refused() {
        for (wrong, said) in [("all", "`name` is `all`"), ("", "empty"), ("one", "two have the same name, one")] {
            let error = names("classes", ["one", wrong]).unwrap_err().to_string();
            assert!(error.starts_with("classes: ") && error.contains(said), "{error}");
        }
    }
}
