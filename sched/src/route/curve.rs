//! The cost of an engine's work: the time of a step by its batch, and the time of a prompt by its tokens; guessed at first,
//! then learned from the engine's behaviour.

use super::rls::{Factor, Fit, Line};

/// The numbers of a [`Curve`], as configured or as learned. All are at least 0.
///
/// An engine with continuous batching gives every running sequence one token per step (Yu et al.: "Orca", OSDI 2022). Its
/// step takes `host_ns + (gpu_ns + gpu_per_sequence_ns · batch) · (1 + sharing · others)`, where `others` is the summed
/// utilisation of the same GPU by other engines, from 0 to 1 each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// The time of a step on the host, independent of the batch; load on the GPU does not slow it.
    pub host_ns: f64,
    /// The time of a step on the GPU with no sequence: mostly reading the weights.
    pub gpu_ns: f64,
    /// The time that each running sequence adds to a step.
    pub gpu_per_sequence_ns: f64,
    /// The time of the first token apart from the prompt's tokens.
    pub prefill_ns: f64,
    /// The time that each token of a prompt adds to the first token.
    pub prefill_per_token_ns: f64,
    /// How much one fully busy other engine on the same GPU slows this one: 0 not at all, 1 by half.
    pub sharing: f64,
}

impl Cost {
    /// No GPU makes a step longer by more than this for each neighbour.
    pub const MAX_SHARING: f64 = 4.0;
}

/// An engine's costs, learned online by recursive least squares with forgetting (500 samples of steps, 100 prompts).
///
/// It accepts any samples: none makes a coefficient negative, infinite or NaN. Only `host_ns` stays as configured, since a
/// client of an engine cannot tell it apart from the rest. If it is 0, a busy engine counts as one that uses all of its GPU:
/// then `sharing` says how much a busy neighbour slows this engine on average.
///
/// The step's line and `sharing` are fitted in turns, each to what the other leaves unexplained. While neighbours are always
/// equally busy, samples cannot tell the two apart; predictions are right then, whatever the line and `sharing` are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curve {
    host_ns: f64,
    sharing: Factor,
    step: Line,
    prefill: Line,
}

const STEP: Fit = Fit { forgetting: 0.998, scale: 8.0 };
const PREFILL: Fit = Fit { forgetting: 0.99, scale: 256.0 };

/// A line that has learned from fewer steps says nothing about what neighbours add.
const WARM_STEPS: f64 = 8.0;

/// Longer steps, and longer waits for a first token, say nothing about a working engine.
const LONGEST_STEP_NS: u64 = 60_000_000_000;
const LONGEST_FIRST_NS: u64 = 600_000_000_000;

/// More utilisation by other engines than this many of them could cause on a GPU is an error of the caller.
const OTHERS_MOST: f64 = 64.0;

/// How many tokens of an answer a gateway takes together as one sample of steps. An answer has many such windows, so that an engine
/// is known within a second, and from more different batches than the means of whole answers would show.
pub const WINDOW_TOKENS: u16 = 16;

impl Curve {
    /// How many numbers [`Curve::to_numbers`] returns.
    pub const NUMBERS: usize = 1 + Factor::NUMBERS + 2 * Line::NUMBERS;

    /// Creates a curve from a first guess, which the first samples outweigh. A number that is not finite, or below 0,
    /// counts as 0.
    #[must_use]
    pub fn new(cost: Cost) -> Self {
        let sound = |number: f64| if number.is_finite() { number.max(0.0) } else { 0.0 };
        Self {
            host_ns: sound(cost.host_ns),
            sharing: Factor::new(cost.sharing),
            step: Line::new(cost.gpu_ns, cost.gpu_per_sequence_ns),
            prefill: Line::new(cost.prefill_ns, cost.prefill_per_token_ns),
        }
    }

    /// Returns the current costs.
    #[must_use]
    pub const fn cost(&self) -> Cost {
        Cost {
            host_ns: self.host_ns,
            gpu_ns: self.step.intercept(),
            gpu_per_sequence_ns: self.step.slope(),
            prefill_ns: self.prefill.intercept(),
            prefill_per_token_ns: self.prefill.slope(),
            sharing: self.sharing.get(),
        }
    }

    /// Returns how many steps and how many first tokens it has learned from.
    #[must_use]
    pub const fn samples(&self) -> (u64, u64) {
        (self.step.samples() as u64, self.prefill.samples() as u64)
    }

    /// Whether it has been given or has learned any time at all: an engine of which nothing is known seems to work in no time.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.step_ns(1, 0.0) > 0.0 || self.prefill_ns(1) > 0.0
    }

    /// Returns how long a step takes with `batch` sequences while other engines use `others` of the GPU. If `others` is not
    /// finite, or below 0, it counts as 0.
    #[must_use]
    pub fn step_ns(&self, batch: u32, others: f64) -> f64 {
        self.host_ns + self.step.at(f64::from(batch)) * self.slowdown(others)
    }

    /// Returns how long the engine needs to read a prompt and produce the first token, once it begins.
    #[must_use]
    pub fn prefill_ns(&self, prompt_tokens: u32) -> f64 {
        self.prefill.at(f64::from(prompt_tokens))
    }

    /// Returns the fraction of the GPU's time, from 0 to 1, that the engine would use with `batch` sequences if it were
    /// alone.
    #[must_use]
    pub fn utilisation(&self, batch: u32) -> f64 {
        let gpu_ns = self.step.at(f64::from(batch));
        if batch == 0 || gpu_ns <= 0.0 { 0.0 } else { gpu_ns / (self.host_ns + gpu_ns) }
    }

    /// Returns the largest batch, possibly fractional, whose steps take no longer than `step_ns`: 0 if none does, infinite
    /// if sequences cost nothing.
    #[must_use]
    pub fn batch_within(&self, step_ns: f64, others: f64) -> f64 {
        let left_ns = (step_ns - self.host_ns) / self.slowdown(others) - self.step.intercept();
        match left_ns > 0.0 {
            false => 0.0,
            true if self.step.slope() <= 0.0 => f64::INFINITY,
            true => left_ns / self.step.slope(),
        }
    }

    /// Learns from a step, or from the mean of several: with `batch` sequences, and while other engines used `others` of the GPU, tokens
    /// came `step_ns` apart. Returns whether it counted as a sample: no batch, a time of 0, a time of more than a minute, and a batch of
    /// tens of thousands do not.
    pub fn observe_step(&mut self, batch: f64, others: f64, step_ns: u64) -> bool {
        if batch.is_nan() || batch <= 0.0 || step_ns == 0 || step_ns > LONGEST_STEP_NS {
            return false;
        }
        let gpu_ns = (step_ns as f64 - self.host_ns).max(0.0);
        let alone_ns = self.step.at(batch);
        if self.step.samples() >= WARM_STEPS && alone_ns > 0.0 {
            let others = at_most(OTHERS_MOST, others);
            self.sharing.learn(others, (gpu_ns / alone_ns - 1.0).min(Cost::MAX_SHARING * others), STEP.forgetting);
        }
        self.step.learn(batch, gpu_ns / self.slowdown(others), STEP)
    }

    /// Learns from a first token that came `first_ns` after a request with `prompt_tokens` tokens was sent. Only a request
    /// that did not wait for another says something about the engine; the caller leaves out the rest. Returns whether it
    /// counted as a sample: a time of 0, a time of more than ten minutes, and a prompt of millions of tokens do not.
    pub fn observe_first_token(&mut self, prompt_tokens: u32, first_ns: u64) -> bool {
        if first_ns == 0 || first_ns > LONGEST_FIRST_NS {
            return false;
        }
        self.prefill.learn(f64::from(prompt_tokens), first_ns as f64, PREFILL)
    }

    /// Sets the first guess of the time of a first token, whatever its prompt, unless one has been observed.
    pub(super) fn guess_first_token(&mut self, first_ns: f64) {
        if self.prefill.samples() <= 0.0 {
            self.prefill = Line::new(first_ns, 0.0);
        }
    }

    /// Returns the learned state as numbers for a state file. [`Curve::from_numbers`] reads them.
    #[must_use]
    pub fn to_numbers(&self) -> [f64; Self::NUMBERS] {
        let mut numbers = [0.0; Self::NUMBERS];
        let lines = self.step.to_numbers().into_iter().chain(self.prefill.to_numbers());
        let all = [self.host_ns].into_iter().chain(self.sharing.to_numbers()).chain(lines);
        numbers.iter_mut().zip(all).for_each(|(to, number)| *to = number);
        numbers
    }

    /// Returns the curve of [these numbers](Curve::to_numbers), or `None` if no curve has such numbers.
    #[must_use]
    pub fn from_numbers(numbers: &[f64]) -> Option<Self> {
        let [host_ns, sharing, certainty, lines @ ..] = <&[f64; Self::NUMBERS]>::try_from(numbers).ok()?;
        let (step, prefill) = lines.split_at(Line::NUMBERS);
        (host_ns.is_finite() && *host_ns >= 0.0).then_some(())?;
        let sharing = Factor::from_numbers([*sharing, *certainty])?;
        let step = Line::from_numbers(step.try_into().ok()?)?;
        let prefill = Line::from_numbers(prefill.try_into().ok()?)?;
        Some(Self { host_ns: *host_ns, sharing, step, prefill })
    }

    fn slowdown(&self, others: f64) -> f64 {
        self.sharing.get().mul_add(at_most(OTHERS_MOST, others), 1.0)
    }
}

/// Returns a number from 0 to `most`: 0 if `number` is not finite.
const fn at_most(most: f64, number: f64) -> f64 {
    if number.is_finite() { number.clamp(0.0, most) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: f64 = 1e6;

    fn cost() -> Cost {
        Cost {
            host_ns: 4.0 * MS,
            gpu_ns: 18.0 * MS,
            gpu_per_sequence_ns: 3.6 * MS,
            prefill_ns: 8.0 * MS,
            prefill_per_token_ns: 0.1 * MS,
            sharing: 0.5,
        }
    }

    #[test]
    fn a_step_costs_more_with_more_sequences_and_with_busy_neighbours() {
        let curve = Curve::new(cost());
        assert!((curve.step_ns(5, 0.0) - 40.0 * MS).abs() < 1.0);
        assert!((curve.step_ns(5, 1.0) - 58.0 * MS).abs() < 1.0);
        assert!((curve.prefill_ns(100) - 18.0 * MS).abs() < 1.0);
        assert!((curve.batch_within(40.0 * MS, 0.0) - 5.0).abs() < 1e-6);
        assert!((curve.batch_within(58.0 * MS, 1.0) - 5.0).abs() < 1e-6);
        assert!(curve.batch_within(10.0 * MS, 0.0) == 0.0);
    }

    #[test]
    fn an_idle_engine_uses_nothing_of_the_gpu_and_a_busy_one_less_than_all() {
        let curve = Curve::new(cost());
        assert!(curve.utilisation(0) == 0.0);
        assert!((curve.utilisation(5) - 0.9).abs() < 1e-9);
        assert!(Curve::new(Cost::default()).utilisation(5) == 0.0);
    }

    #[test]
    fn samples_that_cannot_be_are_refused() {
        let mut curve = Curve::new(cost());
        assert!(!curve.observe_step(0.0, 0.0, 1_000_000));
        assert!(!curve.observe_step(1.0, 0.0, 0));
        assert!(!curve.observe_step(1.0, 0.0, u64::MAX));
        assert!(!curve.observe_step(f64::NAN, 0.0, 1_000_000));
        assert!(!curve.observe_first_token(10, 0));
        assert!(!curve.observe_first_token(10, u64::MAX));
        assert_eq!(curve, Curve::new(cost()));
    }

    #[test]
    fn numbers_that_no_curve_gives_are_refused() {
        let numbers = Curve::new(cost()).to_numbers();
        assert_eq!(Curve::from_numbers(&numbers), Some(Curve::new(cost())));
        assert_eq!(Curve::from_numbers(&numbers[1..]), None);
        for place in 0..numbers.len() {
            for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut numbers = numbers;
                numbers[place] = wrong;
                assert_eq!(Curve::from_numbers(&numbers), None, "{wrong} at {place}");
            }
        }
    }

    #[test]
    fn the_slowdown_by_a_busy_neighbour_is_learned_from_steps() {
        let truth = Curve::new(Cost { host_ns: 0.0, sharing: 0.3, ..cost() });
        let mut curve = Curve::new(Cost::default());
        let mut random = crate::random::Random::new(7);
        for _ in 0..2_000 {
            let (batch, others) = (1 + random.below(12) as u32, f64::from(random.below(3) as u32));
            curve.observe_step(f64::from(batch), others, truth.step_ns(batch, others) as u64);
        }
        assert!((curve.cost().sharing - 0.3).abs() < 0.05, "{curve:?}");
        for (batch, others) in [(1, 0.0), (1, 2.0), (12, 0.0), (12, 2.0)] {
            let error = curve.step_ns(batch, others) / truth.step_ns(batch, others) - 1.0;
            assert!(error.abs() < 0.05, "step of {batch} beside {others}: {error}");
        }
    }

    #[test]
    fn neighbours_that_are_always_busy_are_part_of_the_step() {
        let truth = Curve::new(Cost { host_ns: 0.0, sharing: 0.3, ..cost() });
        let mut curve = Curve::new(Cost::default());
        for step in 0..2_000 {
            let batch = 1 + step % 12;
            curve.observe_step(f64::from(batch), 2.0, truth.step_ns(batch, 2.0) as u64);
        }
        assert!((curve.step_ns(5, 2.0) / truth.step_ns(5, 2.0) - 1.0).abs() < 0.01, "{curve:?}");
    }

    proptest! {
        #[test]
        fn costs_are_learned_although_neighbours_disturb(
            seed in any::<u64>(), guess_ms in 0.0..200.0f64, noise in 0.0..0.1f64,
        ) {
            let truth = Curve::new(cost());
            let guess = Cost { gpu_ns: guess_ms * MS, gpu_per_sequence_ns: 0.0, prefill_ns: 0.0, ..cost() };
            let mut curve = Curve::new(Cost { prefill_per_token_ns: 0.0, ..guess });
            let mut random = crate::random::Random::new(seed);
            for _ in 0..3_000 {
                let (batch, others) = (1 + random.below(24) as u32, 2.0 * random.uniform());
                let disturbed = 1.0 + noise * (2.0 * random.uniform() - 1.0);
                curve.observe_step(f64::from(batch), others, (truth.step_ns(batch, others) * disturbed) as u64);
                let prompt_tokens = 1 + random.below(2_000) as u32;
                curve.observe_first_token(prompt_tokens, (truth.prefill_ns(prompt_tokens) * disturbed) as u64);
            }
            for batch in [1, 5, 20] {
                let error = curve.step_ns(batch, 1.0) / truth.step_ns(batch, 1.0) - 1.0;
                prop_assert!(error.abs() < 0.05, "step of {batch}: {error}");
            }
            let error = curve.prefill_ns(1_000) / truth.prefill_ns(1_000) - 1.0;
            prop_assert!(error.abs() < 0.05, "prefill: {error}");
        }

        #[test]
        fn no_samples_make_a_cost_negative_or_infinite(
            samples in prop::collection::vec((any::<u32>(), any::<f64>(), any::<u64>()), 0..200),
        ) {
            let mut curve = Curve::new(Cost { host_ns: f64::NAN, gpu_ns: -1.0, ..cost() });
            for (count, others, time_ns) in samples {
                curve.observe_step(f64::from(count), others, time_ns % (2 * LONGEST_STEP_NS));
                curve.observe_first_token(count, time_ns);
                for predicted in [curve.step_ns(count, others), curve.prefill_ns(count), curve.utilisation(count)] {
                    prop_assert!(predicted.is_finite() && predicted >= 0.0, "{curve:?}");
                }
                prop_assert_eq!(Curve::from_numbers(&curve.to_numbers()), Some(curve));
            }
        }
    }
}
