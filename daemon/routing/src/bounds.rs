//! Checks of numbers in files that people write.

use std::{fmt::Display, ops::RangeInclusive};

use anyhow::{Result, ensure};

/// Checks that a number is within bounds, which both are allowed.
///
/// # Errors
/// The error names the key, its value, and the values that the key may have. NaN is within no bounds.
pub fn within<T: PartialOrd + Display>(key: impl Display, value: T, bounds: RangeInclusive<T>) -> Result<()> {
    let (least, most) = (bounds.start(), bounds.end());
    ensure!(least != most || value == *least, "{key}: {value} is not {least}, the only value that works");
    ensure!(bounds.contains(&value), "{key}: {value} is not within {least} to {most}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_is_allowed_and_what_is_no_number_is_within_no_bounds() {
        let said = |value, bounds| within("key", value, bounds).unwrap_err().to_string();
        assert_eq!(said(f64::NAN, 0.001..=1_000_000.0), "key: NaN is not within 0.001 to 1000000");
        assert_eq!(said(2.0, 1.0..=1.0), "key: 2 is not 1, the only value that works");
        assert!(within("key", 1, 1..=1).is_ok() && within("key", 3, 1..=3).is_ok());
    }
}
