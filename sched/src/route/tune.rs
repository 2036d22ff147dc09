//! The cross-entropy method (CEM; Rubinstein, 1999; de Boer et al.: "A Tutorial on the Cross-Entropy Method", 2005): sets of
//! numbers are drawn from a normal distribution, which then moves towards the best ones.

use crate::random::Random;

/// How long and how widely to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// How often the distribution moves.
    pub generations: usize,
    /// How many sets are drawn for each move.
    pub candidates: usize,
    /// How many of the best sets move it; at least 1.
    pub elites: usize,
    /// The weight of the old distribution in each move, from 0 to 1.
    pub inertia: f64,
    /// Deviations do not fall below this fraction of the initial ones, so that the search does not end too early.
    pub least_spread: f64,
    /// The seed of all random choices.
    pub seed: u64,
}

impl Default for Search {
    /// Returns 60 generations of 48 candidates. The best 8 candidates move the distribution by seven tenths.
    fn default() -> Self {
        Self { generations: 60, candidates: 48, elites: 8, inertia: 0.3, least_spread: 0.05, seed: 1 }
    }
}

/// Searches for the numbers with the highest score, and returns the mean of the last distribution, which depends less on
/// luck than the best candidate.
///
/// The search begins at `start`, with the deviations `spread`; a number without a deviation stays fixed. `score` receives a
/// candidate and a seed, which is the same for all candidates of a generation, so that they are compared under equal
/// conditions. A score of NaN counts as the worst.
pub fn cross_entropy(
    search: &Search,
    start: &[f64],
    spread: &[f64],
    mut score: impl FnMut(&[f64], u64) -> f64,
) -> Vec<f64> {
    let mut random = Random::new(search.seed);
    let mut center: Vec<(f64, f64)> =
        start.iter().enumerate().map(|(at, mean)| (*mean, spread.get(at).copied().unwrap_or(0.0))).collect();
    let least: Vec<f64> = center.iter().map(|(_, deviation)| deviation * search.least_spread).collect();
    for _ in 0..search.generations {
        let seed = random.bits();
        let mut scored: Vec<(f64, Vec<f64>)> = (0..search.candidates)
            .map(|_| {
                let candidate: Vec<f64> =
                    center.iter().map(|(mean, deviation)| deviation.mul_add(random.normal(), *mean)).collect();
                let value = score(&candidate, seed);
                (if value.is_nan() { f64::NEG_INFINITY } else { value }, candidate)
            })
            .collect();
        scored.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        scored.truncate(search.elites.max(1));
        let count = scored.len() as f64;
        for (at, ((mean, deviation), least)) in center.iter_mut().zip(&least).enumerate() {
            let of_elites = || scored.iter().filter_map(|(_, candidate)| candidate.get(at));
            if count > 0.0 {
                let new_mean = of_elites().sum::<f64>() / count;
                let variance = of_elites().map(|number| (number - new_mean).powi(2)).sum::<f64>() / count;
                let mix = |old: f64, new: f64| search.inertia.mul_add(old - new, new);
                *mean = mix(*mean, new_mean);
                *deviation = mix(*deviation, variance.sqrt()).max(*least);
            }
        }
    }
    center.into_iter().map(|(mean, _)| mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_method_finds_the_top_of_a_hill() {
        for seed in 0..5 {
            let search = Search { generations: 40, candidates: 40, seed, ..Search::default() };
            let hill = |at: &[f64], _| -(at[0] - 3.0).powi(2) - 5.0 * (at[1] + 1.0).powi(2);
            let found = cross_entropy(&search, &[0.0, 0.0, 7.0], &[1.0, 1.0, 0.0], hill);
            assert!((found[0] - 3.0).abs() < 0.1 && (found[1] + 1.0).abs() < 0.1, "seed {seed}: {found:?}");
            assert_eq!(found[2], 7.0);
        }
    }

    #[test]
    fn scores_that_are_no_numbers_lose() {
        let search = Search { generations: 30, ..Search::default() };
        let cliff = |at: &[f64], _| if at[0] > 1.0 { f64::NAN } else { at[0] };
        let found = cross_entropy(&search, &[0.0], &[1.0], cliff);
        assert!((0.5..1.1).contains(&found[0]), "{found:?}");
        let none = cross_entropy(&Search { candidates: 0, elites: 0, ..search }, &[4.0], &[1.0], cliff);
        assert_eq!(none, [4.0]);
    }
}
