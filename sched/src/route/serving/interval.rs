//! Means with their statistical uncertainty.

/// A mean over seeds, and its 95 % interval by Student's t distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// The lower end; minus infinity for a single value.
    pub low: f64,
    /// The upper end; infinity for a single value.
    pub high: f64,
}

/// The 0.975 quantiles for 1, 2, … degrees of freedom (Student: "The Probable Error of a Mean", 1908, to three digits).
const QUANTILES: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// The same for more degrees of freedom.
const FURTHER: [(usize, f64); 4] = [(40, 2.021), (60, 2.000), (120, 1.980), (1_000, 1.962)];

/// Returns the quantile for at least one degree of freedom. Between the known ones it is that of the fewer degrees, which is a little
/// too large, so that no interval is too narrow.
fn quantile(freedom: usize) -> f64 {
    let further = FURTHER.iter().rev().find(|(least, _)| *least <= freedom);
    further.map_or(QUANTILES[freedom.clamp(1, QUANTILES.len()) - 1], |(_, quantile)| *quantile)
}

impl Interval {
    /// Takes one value for each seed; the interval is finite only with at least two.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        let freedom = values.len().saturating_sub(1);
        if freedom == 0 {
            return Self { mean, low: f64::NEG_INFINITY, high: f64::INFINITY };
        }
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
        let half = quantile(freedom) * (variance / count).sqrt();
        Self { mean, low: mean - half, high: mean + half }
    }

    /// Cuts the interval of a share at 0 and at `whole`, because no share lies beyond them. Student's t distribution does not know that.
    ///
    /// Wilson's interval would need independent requests, but the requests of one seed meet the same losses and the same load.
    #[must_use]
    pub const fn of_share(self, whole: f64) -> Self {
        Self { low: self.low.clamp(0.0, whole), high: self.high.clamp(0.0, whole), ..self }
    }

    /// Returns the mean with half of the interval, `97.2 ± 1.4`. If a share (from 0 to `whole`, if given) would then reach beyond its
    /// bounds, its interval is [cut](Self::of_share) and given by its ends: `97.2 (91.0 to 100.0)`.
    #[must_use]
    pub fn to_text(self, whole: Option<f64>, decimals: usize) -> String {
        let Self { mean, low, high } = whole.map_or(self, |whole| self.of_share(whole));
        // If one end is cut already, the other tells the half.
        let half = (high - mean).max(mean - low);
        // What counts is what a reader adds up.
        let unit = 10_f64.powi(i32::try_from(decimals).unwrap_or(i32::MAX));
        let [shown, around] = [mean, half].map(|number| (number * unit).round());
        if whole.is_some_and(|whole| shown - around < 0.0 || shown + around > whole * unit) {
            format!("{mean:.decimals$} ({low:.decimals$} to {high:.decimals$})")
        } else {
            format!("{mean:.decimals$} ± {half:.decimals$}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn an_interval_holds_the_true_mean_nineteen_times_in_twenty() {
        let mut random = Random::new(5);
        let rounds = 4_000;
        let holds = (0..rounds).filter(|_| {
            // Sums of uniform numbers are nearly normal.
            let values: Vec<_> = (0..5).map(|_| (0..12).map(|_| random.uniform()).sum::<f64>()).collect();
            let interval = Interval::of(&values);
            interval.low <= 6.0 && 6.0 <= interval.high
        });
        let share = holds.count() as f64 / f64::from(rounds);
        assert!((0.935..0.965).contains(&share), "{share}");
    }

    #[test]
    fn quantiles_of_many_values_are_those_of_the_next_fewer_degrees_in_the_table() {
        for (freedom, expected) in [
            (1, 12.706),
            (30, 2.042),
            (39, 2.042),
            (40, 2.021),
            (99, 2.000),
            (120, 1.980),
            (999, 1.980),
            (1_000, 1.962),
            (50_000, 1.962),
        ] {
            let values: Vec<_> = (0..=freedom).map(|at| f64::from(at as u32 % 2)).collect();
            let Interval { mean, high, .. } = Interval::of(&values);
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
            let quantile = (high - mean) / (variance / values.len() as f64).sqrt();
            assert!((quantile - expected).abs() < 1e-9, "{freedom}: {quantile}");
        }
        assert!((1..2_000).all(|freedom| quantile(freedom + 1) <= quantile(freedom)));
    }

    #[test]
    fn one_value_says_nothing_about_others() {
        let interval = Interval::of(&[3.0]);
        assert_eq!((interval.mean, interval.low, interval.high), (3.0, f64::NEG_INFINITY, f64::INFINITY));
        assert_eq!(Interval::of(&[2.0, 2.0, 2.0]), Interval { mean: 2.0, low: 2.0, high: 2.0 });
    }

    #[test]
    fn no_interval_of_a_share_reaches_beyond_0_and_the_whole() {
        let interval = Interval::of(&[100.0, 100.0, 80.0]);
        assert!(interval.high > 100.0, "{interval:?}");
        let cut = interval.of_share(100.0);
        assert_eq!((cut.mean, cut.low, cut.high), (interval.mean, interval.low, 100.0));
        assert_eq!(interval.to_text(Some(100.0), 1), "93.3 (64.6 to 100.0)");
        assert_eq!(Interval::of(&[0.0, 0.0, 0.2]).to_text(Some(1.0), 2), "0.07 (0.00 to 0.35)");
        assert_eq!(Interval::of(&[100.0; 3]).to_text(Some(100.0), 1), "100.0 ± 0.0", "nothing is cut");
        let hardly = Interval::of(&[100.0, 100.0, 99.99]).to_text(Some(100.0), 1);
        assert_eq!(hardly, "100.0 ± 0.0", "what is cut is too little to be shown");
        assert_eq!(cut.to_text(Some(100.0), 1), "93.3 (64.6 to 100.0)", "it was cut before");
        assert_eq!(Interval::of(&[40.0, 50.0, 60.0]).to_text(Some(100.0), 0), "50 ± 25");
        assert_eq!(interval.to_text(None, 1), "93.3 ± 28.7", "it is no share");
        assert_eq!(Interval::of(&[0.5]).to_text(Some(1.0), 1), "0.5 ± 0.5", "one seed says nothing about chance");
    }
}
