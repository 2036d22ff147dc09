//! Random numbers from a seed, so that every run can be repeated.

/// A generator of random numbers: SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators",
/// OOPSLA 2014). The same seed gives the same numbers; they are not suitable for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence. Sequences of neighbouring seeds are independent for practical purposes.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns a number from the uniform distribution above 0 and at most 1.
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns a whole number below `end`, or 0 if `end` is 0. The bias is below `end` / 2^64.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> u64::BITS) as usize
    }

    /// Returns a number between `low` and `high` whose logarithm is uniform. Both have to be above 0.
    pub fn log_uniform(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.uniform())
    }

    /// Returns a number from the exponential distribution with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -self.uniform().ln() * mean
    }

    /// Returns a number from the gamma distribution with this mean and coefficient of variation (Marsaglia and Tsang, 2000). With a
    /// coefficient of 1, that is the exponential distribution. Returns the mean if the coefficient is 0.
    pub fn gamma(&mut self, mean: f64, variation: f64) -> f64 {
        if variation == 1.0 {
            return self.exponential(mean);
        }
        if variation <= 0.0 {
            return mean;
        }
        let shape = variation.powi(-2);
        // The method needs a shape of at least 1; a power of a uniform number makes up for a larger one.
        let (d, correction) = match shape < 1.0 {
            true => (shape + 2.0 / 3.0, self.uniform().powf(shape.recip())),
            false => (shape - 1.0 / 3.0, 1.0),
        };
        let drawn = loop {
            let x = self.normal();
            let v = (1.0 + x / (9.0 * d).sqrt()).powi(3);
            if v > 0.0 && self.uniform().ln() < x * x / 2.0 + d - d * v + d * v.ln() {
                break d * v;
            }
        };
        drawn * correction * mean / shape
    }

    /// Returns a number from the normal distribution with mean 0 and variance 1 (Box and Muller, 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Returns a number from the log-normal distribution with this mean; `sigma` is the standard deviation of its
    /// logarithm.
    pub fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        mean * (sigma * self.normal() - sigma * sigma / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 40_000;

    fn mean(seed: u64, mut draw: impl FnMut(&mut Random) -> f64) -> f64 {
        let mut random = Random::new(seed);
        (0..DRAWS).map(|_| draw(&mut random)).sum::<f64>() / DRAWS as f64
    }

    #[test]
    fn distributions_have_the_means_that_they_are_asked_for() {
        for seed in 0..3 {
            assert!((mean(seed, Random::uniform) - 0.5).abs() < 0.01);
            assert!((mean(seed, |random| random.exponential(3.0)) - 3.0).abs() < 0.08);
            assert!(mean(seed, Random::normal).abs() < 0.02);
            assert!((mean(seed, |random| random.normal().powi(2)) - 1.0).abs() < 0.04);
            assert!((mean(seed, |random| random.log_normal(200.0, 0.5)) - 200.0).abs() < 3.0);
            assert!((mean(seed, |random| random.below(5) as f64) - 2.0).abs() < 0.04);
        }
    }

    #[test]
    fn gamma_has_the_mean_and_the_variation_that_it_is_asked_for() {
        for (seed, variation) in [(0, 0.3), (1, 0.9), (2, 1.0), (3, 1.1), (4, 2.0)] {
            assert!((mean(seed, |random| random.gamma(3.0, variation)) - 3.0).abs() < 0.1, "{variation}");
            let square = mean(seed, |random| (random.gamma(3.0, variation) - 3.0).powi(2));
            assert!((square.sqrt() / 3.0 / variation - 1.0).abs() < 0.05, "{variation}: {square}");
        }
        let (mut one, mut other) = (Random::new(7), Random::new(7));
        assert_eq!(one.gamma(3.0, 1.0), other.exponential(3.0));
        assert_eq!(one.gamma(3.0, 0.0), 3.0);
    }

    #[test]
    fn bounds_are_kept_at_the_edges() {
        let mut random = Random::new(7);
        assert_eq!(random.below(0), 0);
        assert_eq!(random.below(1), 0);
        for _ in 0..1_000 {
            assert!(random.below(3) < 3);
            assert!((0.25..=48.0).contains(&random.log_uniform(0.25, 48.0)));
            assert!(random.uniform() > 0.0);
        }
    }

    #[test]
    fn a_seed_repeats_its_numbers() {
        let (mut one, mut other) = (Random::new(5), Random::new(5));
        assert!((0..100).all(|_| one.bits() == other.bits()));
    }
}
