//! Random numbers that a seed reproduces.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator with a separate sequence for each pair of numbers.
    #[must_use]
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self(Self(seed).next() ^ purpose)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number from 0 to below 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number below `bound`, which must be small.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.share() * bound as f64) as usize
    }

    /// Returns an exponentially distributed waiting time with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.share()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_repeat_and_differ_by_seed_and_purpose() {
        let first = |seed, purpose| Random::new(seed, purpose).next();
        assert_eq!(first(1, 2), first(1, 2));
        assert!(first(1, 2) != first(2, 2) && first(1, 2) != first(1, 3) && first(1, 2) != first(2, 1));
    }

    #[test]
    fn numbers_have_the_means_they_should() {
        let mut random = Random::new(7, 0);
        let mean = |mut draw: Box<dyn FnMut() -> f64 + '_>| (0..100_000).map(|_| draw()).sum::<f64>() / 1e5;
        assert!((mean(Box::new(|| random.share())) - 0.5).abs() < 0.01);
        assert!((mean(Box::new(|| random.exponential())) - 1.0).abs() < 0.02);
        assert!((mean(Box::new(|| random.below(3) as f64)) - 1.0).abs() < 0.02);
    }
}
