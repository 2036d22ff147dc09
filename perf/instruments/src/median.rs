//! The middle of measurements.

/// Returns the median of values: of an even number, the mean of the two in the middle. Returns `None` without values.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<_> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let is_even = sorted.len().is_multiple_of(2);
    Some(if is_even { f64::midpoint(sorted[sorted.len() / 2 - 1], upper) } else { upper })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_values_are_on_each_side() {
        assert_eq!(
            [&[3.0][..], &[9.0, 1.0, 2.0], &[4.0, 1.0]].map(|values| median(values.to_vec())),
            [Some(3.0), Some(2.0), Some(2.5)]
        );
        assert_eq!(median([]), None);
    }
}
