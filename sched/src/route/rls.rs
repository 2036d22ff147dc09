//! A line that is fitted online: recursive least squares (RLS) with exponential forgetting, for two coefficients.

/// The line `intercept + slope · x`, which follows its samples (Ljung: "System Identification", 2nd edition, §11.2).
///
/// **Invariants:** both coefficients are finite and at least 0, since times neither are negative nor shrink with more
/// work; the covariance is finite, and no larger than at the beginning. So a long time of equal samples, which says
/// nothing about the slope, does not make the fit nervous (covariance wind-up, §11.2 there).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    intercept: f64,
    slope: f64,
    /// The covariance of intercept and slope, relative to the samples' variance: `[[p0, p1], [p1, p2]]`.
    covariance: [f64; 3],
    samples: f64,
}

/// How a line is fitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// The weight of a sample falls by this factor with each later one; 1 / (1 − it) samples are remembered.
    pub forgetting: f64,
    /// A usual `x`: both coefficients are then of the same order, which keeps the arithmetic well conditioned.
    pub scale: f64,
}

/// The covariance at the beginning: the first guess counts like a tenth of a sample.
const UNSURE: f64 = 10.0;

/// From this many samples on, a sample of more than [`ABSURD`] times what was expected is taken to be that.
const WARM: f64 = 8.0;
const ABSURD: f64 = 10.0;

/// So many times the usual `x` would leave nothing of the other coefficient's covariance but rounding.
const FAR: f64 = 1e4;

/// What `Line::to_numbers` gives.
pub(super) const NUMBERS: usize = 6;

impl Line {
    /// Creates a line from a first guess. What is not finite, or below 0, counts as 0.
    pub fn new(intercept: f64, slope: f64) -> Self {
        Self {
            intercept: at_least_0(intercept),
            slope: at_least_0(slope),
            covariance: [UNSURE, 0.0, UNSURE],
            samples: 0.0,
        }
    }

    pub const fn intercept(&self) -> f64 {
        self.intercept
    }

    pub const fn slope(&self) -> f64 {
        self.slope
    }

    pub const fn samples(&self) -> f64 {
        self.samples
    }

    pub fn at(&self, x: f64) -> f64 {
        self.slope.mul_add(x, self.intercept)
    }

    /// Moves the line towards a sample. What is not finite, or below 0, or ten thousand times as far out as usual, is no
    /// sample: the line stays, and the answer is `false`.
    pub fn learn(&mut self, x: f64, y: f64, fit: Fit) -> bool {
        if !(y.is_finite() && y >= 0.0 && (0.0..=FAR * fit.scale).contains(&x)) {
            return false;
        }
        let expected = self.at(x);
        let y = if self.samples >= WARM && expected > 0.0 { y.min(ABSURD * expected) } else { y };
        let x = x / fit.scale;
        let [p0, p1, p2] = self.covariance;
        let (g0, g1) = (x.mul_add(p1, p0), x.mul_add(p2, p1));
        let denominator = fit.forgetting + x.mul_add(g1, g0);
        let (k0, k1) = (g0 / denominator, g1 / denominator);
        let error = y - expected;
        let intercept = k0.mul_add(error, self.intercept);
        let slope = self.slope + k1 * error / fit.scale;
        let mut covariance = [p0 - k0 * g0, p1 - k0 * g1, p2 - k1 * g1];
        if covariance[0].max(covariance[2]) / fit.forgetting <= UNSURE {
            covariance = covariance.map(|p| p / fit.forgetting);
        }
        if !(intercept.is_finite() && slope.is_finite() && is_covariance(covariance)) {
            // Rounding has eaten the covariance: what was learned stays, how sure it is does not.
            self.covariance = [UNSURE, 0.0, UNSURE];
            return false;
        }
        (self.intercept, self.slope, self.covariance) = (at_least_0(intercept), at_least_0(slope), covariance);
        self.samples += 1.0;
        true
    }

    pub const fn to_numbers(self) -> [f64; NUMBERS] {
        let [p0, p1, p2] = self.covariance;
        [self.intercept, self.slope, p0, p1, p2, self.samples]
    }

    /// Returns the line of these numbers, unless they break the invariants.
    pub fn from_numbers(numbers: [f64; NUMBERS]) -> Option<Self> {
        let [intercept, slope, p0, p1, p2, samples] = numbers;
        let times = [intercept, slope, samples].iter().all(|number| number.is_finite() && *number >= 0.0);
        let covariance = [p0, p1, p2];
        (times && is_covariance(covariance)).then_some(Self { intercept, slope, covariance, samples })
    }
}

/// Tells whether a matrix is positive definite, and no larger than at the beginning.
fn is_covariance([p0, p1, p2]: [f64; 3]) -> bool {
    let sound = |p: f64| p > 0.0 && p <= UNSURE;
    sound(p0) && sound(p2) && p1 * p1 < p0 * p2
}

const fn at_least_0(number: f64) -> f64 {
    if number.is_finite() { number.max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIT: Fit = Fit { forgetting: 0.99, scale: 8.0 };

    proptest! {
        #[test]
        fn a_line_is_found_from_any_first_guess(
            guess in (0.0..1e9, 0.0..1e8), truth in (1e3..1e8f64, 1e2..1e7f64),
            xs in prop::collection::vec(1..64u32, 150..300),
        ) {
            let mut line = Line::new(guess.0, guess.1);
            for x in xs.iter().cycle().take(2_000) {
                line.learn(f64::from(*x), truth.0 + truth.1 * f64::from(*x), FIT);
            }
            for x in [1.0, 20.0, 63.0] {
                let is = truth.0 + truth.1 * x;
                prop_assert!((line.at(x) - is).abs() < 0.01 * is, "{line:?} instead of {truth:?}");
            }
        }

        #[test]
        fn no_samples_break_the_invariants(
            guess in (any::<f64>(), any::<f64>()), samples in prop::collection::vec((any::<f64>(), any::<f64>()), 0..300),
        ) {
            let mut line = Line::new(guess.0, guess.1);
            for (x, y) in samples {
                line.learn(x, y, FIT);
                prop_assert!(line.intercept.is_finite() && line.slope.is_finite(), "{line:?}");
                prop_assert!(line.intercept >= 0.0 && line.slope >= 0.0 && is_covariance(line.covariance), "{line:?}");
                prop_assert_eq!(Line::from_numbers(line.to_numbers()), Some(line));
            }
        }
    }

    #[test]
    fn one_absurd_sample_moves_a_warm_line_by_less_than_a_tenth() {
        let mut line = Line::new(0.0, 0.0);
        for sample in 0..500 {
            let x = f64::from(1 + sample % 9);
            line.learn(x, 20.0 + 3.0 * x, FIT);
        }
        line.learn(5.0, 1e15, FIT);
        assert!((line.at(5.0) - 35.0).abs() < 3.5, "{line:?}");
    }

    #[test]
    fn an_engine_that_became_slower_is_followed() {
        let mut line = Line::new(20.0, 3.0);
        for sample in 0..2_000 {
            let x = f64::from(1 + sample % 9);
            line.learn(x, if sample < 1_000 { 20.0 + 3.0 * x } else { 900.0 + 70.0 * x }, FIT);
        }
        assert!((line.at(5.0) - 1_250.0).abs() < 12.5, "{line:?}");
    }

    #[test]
    fn a_long_time_of_equal_samples_does_not_make_it_nervous() {
        let mut line = Line::new(0.0, 0.0);
        for sample in 0..500 {
            let x = f64::from(1 + sample % 9);
            line.learn(x, 20.0 + 3.0 * x, FIT);
        }
        for _ in 0..100_000 {
            line.learn(5.0, 35.0, FIT);
        }
        line.learn(5.0, 38.5, FIT);
        assert!((line.at(9.0) - 47.0).abs() < 4.7, "{line:?}");
    }
}
