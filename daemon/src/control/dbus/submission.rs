//! A policy and its options, as callers of `SetPolicy` send them.

use std::{collections::HashMap, time::Duration};

use zbus::OwnedVariant;

use super::denial::Denial;
use crate::policy::Submission;

/// Reads the options of `SetPolicy`.
pub(super) fn submission(text: String, options: HashMap<String, OwnedVariant>) -> Result<Submission, Denial> {
    let mut submission = Submission { text, ..Submission::default() };
    for (key, value) in options {
        let unfit = |_| Denial::Invalid(format!("the option {key} has the wrong type"));
        match key.as_str() {
            "expected_revision" => submission.expected = Some(u64::try_from(value).map_err(unfit)?),
            "dry_run" => submission.dry_run = bool::try_from(value).map_err(unfit)?,
            "confirm_within_s" => {
                let time = Duration::from_secs(u64::try_from(value).map_err(unfit)?);
                submission.confirm_within = Some(time).filter(|time| !time.is_zero());
            }
            "save" => submission.save = bool::try_from(value).map_err(unfit)?,
            _ => {
                return Err(Denial::Invalid(format!(
                    "there is no option {key}; known: expected_revision, dry_run, confirm_within_s, save"
                )));
            }
        }
    }
    Ok(submission)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_of_zero_seconds_counts_as_none() {
        let read = |expected: u64, seconds: u64| {
            let options = [("expected_revision", expected), ("confirm_within_s", seconds)];
            let options = options.map(|(key, value)| (key.to_owned(), value.into()));
            let read = submission(String::new(), options.into()).unwrap();
            (read.expected, read.confirm_within)
        };
        assert_eq!(read(0, 0), (Some(0), None));
        assert_eq!(read(7, 60), (Some(7), Some(Duration::from_secs(60))));
    }
}
