//! Numbers fitted online by recursive least squares (RLS) with exponential forgetting: a line, and a factor.

/// The line `intercept + slope · x`, which follows its samples.
///
/// A sample makes the fit forget only information about its own direction (directional forgetting: Cao, Schwartz: "A
/// directional forgetting algorithm based on the decomposition of the information matrix", Automatica 36, 2000). An engine
/// that has the same batch for hours says nothing about the slope: the known slope stays; it neither ages nor hinders the
/// line from following a change. Forgetting everything would make the fit nervous (covariance wind-up).
///
/// **Invariants:** both coefficients are finite and at least 0, since times are not negative and do not shrink with more
/// work; the information is a positive definite matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    intercept: f64,
    slope: f64,
    /// How much is known of intercept and slope, in samples: the inverse of the covariance, `[[r0, r1], [r1, r2]]`.
    information: [f64; 3],
    samples: f64,
}

/// How a line is fitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// The weight of a sample falls by this factor with each later sample; 1 / (1 − `forgetting`) samples are remembered.
    pub forgetting: f64,
    /// A typical `x`: divided by it, both coefficients have the same order, which keeps the arithmetic well conditioned.
    pub scale: f64,
}

/// The initial information: the first guess counts like a tenth of a sample.
const GUESS: [f64; 3] = [0.1, 0.0, 0.1];

/// From this many samples on, a sample of more than [`ABSURD`] times the expected value is clamped to that.
const WARM: f64 = 8.0;
const ABSURD: f64 = 10.0;

/// An `x` this many times the typical one would leave nothing of the other coefficient's information but rounding errors.
const FAR: f64 = 1e3;

/// A determinant below this fraction of its first term is a rounding error.
const SINGULAR: f64 = 1e-12;

impl Line {
    /// How many numbers [`Line::to_numbers`] returns.
    pub const NUMBERS: usize = 6;

    /// Creates a line from a first guess. A number that is not finite, or below 0, counts as 0.
    pub fn new(intercept: f64, slope: f64) -> Self {
        Self { intercept: at_least_0(intercept), slope: at_least_0(slope), information: GUESS, samples: 0.0 }
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

    /// Moves the line towards a sample. A `y` that is not finite or below 0, or an `x` below 0 or more than a thousand
    /// times the typical one, is no sample: the line stays, and the result is `false`.
    pub fn learn(&mut self, x: f64, y: f64, fit: Fit) -> bool {
        if !(y.is_finite() && y >= 0.0 && (0.0..=FAR * fit.scale).contains(&x)) {
            return false;
        }
        let expected = self.at(x);
        let y = if self.samples >= WARM && expected > 0.0 { y.min(ABSURD * expected) } else { y };
        let x = x / fit.scale;
        let [r0, r1, r2] = self.information;
        // Of the information R, the part R φ φᵀ R / φᵀ R φ concerns the direction φ = (1, x) of this sample.
        let (v0, v1) = (x.mul_add(r1, r0), x.mul_add(r2, r1));
        let forgotten = (1.0 - fit.forgetting) / x.mul_add(v1, v0);
        let r0 = 1.0 + r0 - forgotten * v0 * v0;
        let r1 = x + r1 - forgotten * v0 * v1;
        let r2 = x.mul_add(x, r2) - forgotten * v1 * v1;
        let error = (y - expected) / (r0 * r2 - r1 * r1);
        // The slope is per `scale` here, as in the information.
        let mut intercept = error.mul_add(r2 - r1 * x, self.intercept);
        let mut slope = error.mul_add(r0 * x - r1, self.slope * fit.scale);
        // A negative coefficient becomes 0, and the other one takes its most likely value given that.
        if intercept < 0.0 {
            slope += intercept * r1 / r2;
            intercept = 0.0;
        }
        if slope < 0.0 {
            intercept += slope * r1 / r0;
            slope = 0.0;
        }
        if !(intercept.is_finite() && slope.is_finite() && is_information([r0, r1, r2])) {
            // Rounding has destroyed the information matrix: the coefficients stay, their certainty does not.
            self.information = GUESS;
            return false;
        }
        (self.intercept, self.slope, self.information) = (at_least_0(intercept), slope / fit.scale, [r0, r1, r2]);
        self.samples += 1.0;
        true
    }

    pub const fn to_numbers(self) -> [f64; Self::NUMBERS] {
        let [r0, r1, r2] = self.information;
        [self.intercept, self.slope, r0, r1, r2, self.samples]
    }

    /// Returns the line of these numbers, or `None` if they break the invariants.
    pub fn from_numbers(numbers: [f64; Self::NUMBERS]) -> Option<Self> {
        let [intercept, slope, r0, r1, r2, samples] = numbers;
        let times = [intercept, slope, samples].iter().all(|number| number.is_finite() && *number >= 0.0);
        let information = [r0, r1, r2];
        (times && is_information(information)).then_some(Self { intercept, slope, information, samples })
    }
}

/// The factor of `factor · x`, which follows its samples and is at least 0.
///
/// The first guess counts like one sample at `x = 1`. A sample at `x = 0` says nothing about the factor and changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Factor {
    factor: f64,
    /// The weighted sum of the squares of `x`.
    information: f64,
}

impl Factor {
    /// How many numbers [`Factor::to_numbers`] returns.
    pub const NUMBERS: usize = 2;

    /// Creates a factor from a first guess. A number that is not finite, or below 0, counts as 0.
    pub fn new(factor: f64) -> Self {
        Self { factor: at_least_0(factor), information: 1.0 }
    }

    pub const fn get(&self) -> f64 {
        self.factor
    }

    /// Moves the factor towards a sample. `forgetting` is as in [`Fit`]. If `x` is 0, or a number is not finite, it stays.
    pub fn learn(&mut self, x: f64, y: f64, forgetting: f64) {
        let information = x.mul_add(x, forgetting * self.information);
        let factor = (x / information).mul_add(y - self.factor * x, self.factor);
        if x > 0.0 && information.is_finite() && factor.is_finite() {
            *self = Self { factor: factor.max(0.0), information };
        }
    }

    pub const fn to_numbers(self) -> [f64; Self::NUMBERS] {
        [self.factor, self.information]
    }

    /// Returns the factor of these numbers, or `None` if there is none.
    pub fn from_numbers([factor, information]: [f64; Self::NUMBERS]) -> Option<Self> {
        let is_sound = factor.is_finite() && factor >= 0.0 && information.is_finite() && information > 0.0;
        is_sound.then_some(Self { factor, information })
    }
}

/// Returns whether a matrix is positive definite and can be inverted in doubles.
fn is_information([r0, r1, r2]: [f64; 3]) -> bool {
    let sound = |r: f64| r.is_finite() && r > 0.0;
    sound(r0) && sound(r2) && r0 * r2 - r1 * r1 > SINGULAR * r0 * r2
}

const fn at_least_0(number: f64) -> f64 {
    if number.is_finite() { number.max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FIT: Fit = Fit { forgetting: 0.99, scale: 8.0 };

    proptest! {
        #[test]
        fn a_line_is_found_from_any_first_guess(
            guess in (0.0..20.0, 0.0..20.0), truth in (1e3..1e8f64, 1e2..1e7f64), seed in any::<u64>(),
        ) {
            let mut line = Line::new(guess.0 * truth.0, guess.1 * truth.1);
            let mut random = crate::random::Random::new(seed);
            for _ in 0..2_000 {
                let x = 1.0 + random.below(63) as f64;
                line.learn(x, truth.0 + truth.1 * x, FIT);
            }
            for x in [1.0, 20.0, 63.0] {
                let is = truth.0 + truth.1 * x;
                prop_assert!((line.at(x) - is).abs() < 0.05 * is, "{line:?} instead of {truth:?}");
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
                prop_assert!(line.intercept >= 0.0 && line.slope >= 0.0 && is_information(line.information), "{line:?}");
                prop_assert_eq!(Line::from_numbers(line.to_numbers()), Some(line));
            }
        }
    }

    proptest! {
        #[test]
        fn a_factor_is_found_from_any_first_guess(guess in 0.0..4.0f64, truth in 0.0..4.0f64, seed in any::<u64>()) {
            let mut factor = Factor::new(guess);
            let mut random = crate::random::Random::new(seed);
            for _ in 0..2_000 {
                let x = f64::from(random.below(3) as u32);
                factor.learn(x, truth * x, FIT.forgetting);
            }
            prop_assert!((factor.get() - truth).abs() < 0.01, "{factor:?} instead of {truth}");
        }

        #[test]
        fn no_samples_make_a_factor_negative_or_infinite(
            guess in any::<f64>(), samples in prop::collection::vec((any::<f64>(), any::<f64>()), 0..100),
        ) {
            let mut factor = Factor::new(guess);
            for (x, y) in samples {
                factor.learn(x, y, FIT.forgetting);
                prop_assert_eq!(Factor::from_numbers(factor.to_numbers()), Some(factor));
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
    fn a_long_time_of_equal_samples_makes_it_neither_nervous_nor_stubborn() {
        let mut line = Line::new(0.0, 0.0);
        for sample in 0..500 {
            let x = f64::from(1 + sample % 9);
            line.learn(x, 20.0 + 3.0 * x, FIT);
        }
        for _ in 0..100_000 {
            line.learn(5.0, 35.0, FIT);
        }
        let mut disturbed = line;
        disturbed.learn(5.0, 38.5, FIT);
        assert!((disturbed.at(9.0) - 47.0).abs() < 0.2, "{disturbed:?}");
        for _ in 0..500 {
            line.learn(5.0, 70.0, FIT);
        }
        assert!((line.at(5.0) - 70.0).abs() < 1.0, "{line:?}");
        assert!(line.at(9.0) > line.at(1.0), "what was known of the slope is kept: {line:?}");
    }
}
