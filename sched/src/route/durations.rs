//! What the durations of answers teach about an engine whose tokens nobody saw pass.

use super::{
    curve::Curve,
    rls::{Fit, Line},
};

/// An answer of which only the end was seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerDuration {
    /// How many tokens of its prompt the engine read.
    pub unread_tokens: u32,
    /// How many tokens it had.
    pub tokens: u64,
    /// The mean number of requests that the engine worked on meanwhile, this one included.
    pub batch: f64,
    /// The use of the same GPU by other engines, as in [`Curve::observe_step`].
    pub others: f64,
    /// The time from the request to the last token.
    pub took_ns: u64,
    /// Whether the request found its engine idle, so that its prompt did not wait.
    pub is_alone: bool,
}

/// How the durations of an engine's answers depend on their lengths.
///
/// An answer of `n` tokens takes `first + (n - 1) · step`. One answer cannot tell the two apart; answers of different lengths can. The line
/// is fitted to the time of each answer per step, `step + first / (n - 1)`, because durations vary by a part of themselves: in the sum of
/// both, the longest answers would hide the first token. As long as all answers are about equally long, nearly all of their time counts as
/// steps, which is right for answers of that length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerDurations(Option<Line>);

/// Shorter answers say more about the prompt than about steps. Longer answers pass in parts, and their engine may wait for the client.
const FEWEST_TOKENS: u64 = 8;
const MOST_TOKENS: u64 = 8_192;

/// In a larger mean batch, others made steps longer, and the prompt may have been interrupted.
const ALONE: f64 = 1.5;

/// With this scale, answers of one length leave less than a tenth of their time to the first token if they have 26 tokens or more.
const FIT: Fit = Fit { forgetting: 0.99, scale: 1.0 / FEWEST_TOKENS as f64 };

impl AnswerDurations {
    /// Learns from an answer how long steps are and, as long as no first token has been observed, how long that takes. An answer is a
    /// single sample, however long it is. Returns whether it counted as one: an answer of fewer than 8 or more than 8,192 tokens does not,
    /// and neither does an answer whose steps [`Curve::observe_step`] refuses.
    pub fn observe(&mut self, curve: &mut Curve, answer: &AnswerDuration) -> bool {
        let AnswerDuration { unread_tokens, tokens, batch, others, took_ns, is_alone } = *answer;
        if took_ns == 0 || !(FEWEST_TOKENS..=MOST_TOKENS).contains(&tokens) {
            return false;
        }
        let (steps, took_ns) = ((tokens - 1) as f64, took_ns as f64);
        if is_alone && batch < ALONE {
            let line = self.0.get_or_insert_with(|| Line::new(curve.step_ns(1, 0.0), curve.prefill_ns(0)));
            line.learn(1.0 / steps, took_ns / steps, FIT);
            curve.guess_first_token(line.slope());
        }
        let steps_ns = took_ns - curve.prefill_ns(unread_tokens);
        curve.observe_step(batch, others, (steps_ns / steps) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::Random, route::Cost};

    const MS: f64 = 1e6;

    fn truth() -> Curve {
        Curve::new(Cost { gpu_ns: 9.0 * MS, gpu_per_sequence_ns: MS, prefill_ns: 400.0 * MS, ..Cost::default() })
    }

    fn took_ns(tokens: u64, batch: u32) -> f64 {
        (tokens - 1) as f64 * truth().step_ns(batch, 0.0) + truth().prefill_ns(100)
    }

    /// Returns what is learned from answers with one of these lengths and these batches, whose durations vary by a tenth.
    fn learned(lengths: [u64; 3], batches: u64) -> Curve {
        let (mut curve, mut durations, mut random) =
            (Curve::new(Cost::default()), AnswerDurations::default(), Random::new(5));
        for _ in 0..120 {
            let (tokens, batch) = (lengths[random.below(3)], 1 + random.below(batches as usize) as u32);
            let took_ns = (took_ns(tokens, batch) * (0.9 + 0.2 * random.uniform())) as u64;
            let answer = AnswerDuration {
                unread_tokens: 100,
                tokens,
                batch: batch.into(),
                others: 0.0,
                took_ns,
                is_alone: batch == 1,
            };
            assert!(durations.observe(&mut curve, &answer));
        }
        curve
    }

    fn error(curve: &Curve, tokens: u64, batch: u32) -> f64 {
        let predicted_ns = curve.prefill_ns(100) + (tokens - 1) as f64 * curve.step_ns(batch, 0.0);
        (predicted_ns / took_ns(tokens, batch) - 1.0).abs()
    }

    #[test]
    fn answers_of_different_lengths_tell_the_first_token_from_the_steps() {
        let curve = learned([20, 60, 400], 1);
        let errors = [10, 20, 100, 400, 1_000].map(|tokens| error(&curve, tokens, 1));
        assert!(errors.iter().all(|error| *error < 0.25), "{errors:?}: {curve:?}");
        let steps_alone = |tokens: u64| took_ns(tokens, 1) / (tokens - 1) as f64;
        assert!(steps_alone(20) > 2.5 * steps_alone(400), "one time per token would be wrong for either");
        assert_eq!(curve.samples(), (120, 0), "a guess is no sample of a first token");
    }

    #[test]
    fn a_step_is_learned_by_its_batch() {
        let curve = learned([40, 100, 400], 9);
        let errors = [1, 5, 9].map(|batch| error(&curve, 200, batch));
        assert!(errors.iter().all(|error| *error < 0.25), "{errors:?}: {curve:?}");
    }

    #[test]
    fn answers_of_one_length_are_predicted_as_they_were_and_count_nearly_whole_as_steps() {
        let curve = learned([100; 3], 1);
        assert!(error(&curve, 100, 1) < 0.05, "{curve:?}");
        assert!(curve.prefill_ns(100) < 0.02 * took_ns(100, 1), "{curve:?}");
    }

    #[test]
    fn a_first_token_that_was_observed_is_not_guessed_again() {
        let (mut curve, mut durations) = (Curve::new(Cost::default()), AnswerDurations::default());
        (0..40).for_each(|_| _ = curve.observe_first_token(100, 400_000_000));
        let (before, known_ns) = (curve.samples().1, curve.prefill_ns(100));
        for tokens in [20, 400, 20, 400] {
            let took_ns = took_ns(tokens, 1) as u64;
            let answer =
                AnswerDuration { unread_tokens: 100, tokens, batch: 1.0, others: 0.0, took_ns, is_alone: true };
            durations.observe(&mut curve, &answer);
        }
        assert_eq!((curve.samples().1, curve.prefill_ns(100)), (before, known_ns));
        assert!(error(&curve, 1_000, 1) < 0.1, "{curve:?}");
    }

    #[test]
    fn answers_that_are_too_short_or_too_long_teach_nothing() {
        let (mut curve, mut durations) = (Curve::new(Cost::default()), AnswerDurations::default());
        for tokens in [0, 1, 7, 8_193, u64::MAX] {
            let took_ns = 1_000_000_000;
            let answer = AnswerDuration { unread_tokens: 9, tokens, batch: 1.0, others: 0.0, took_ns, is_alone: true };
            assert!(!durations.observe(&mut curve, &answer));
        }
        assert_eq!((curve, durations), (Curve::new(Cost::default()), AnswerDurations::default()));
    }
}
