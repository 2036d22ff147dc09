//! How long answers are, on average: by class, from all answers, including answers that have not ended.
//!
//! One class may hold short questions and another long reports, so a mean over all classes fits neither. A class that
//! has ended few answers is assumed to have the mean from before a restart or, without one, the mean of all classes,
//! which itself starts from before the restart. If clients limit an answer's tokens, the used part of the limit
//! predicts better than a mean, because it depends on the request.

use std::collections::VecDeque;

/// A mean remembers about this many answers. Lengths vary by half of their mean, so that a mean of 20 answers is often wrong by a tenth.
const REMEMBERED: usize = 200;

/// The most answers that a mean remembers, open ones included. It forgets its oldest answer for each further one.
const MOST: usize = 4_096;

/// How many answers the assumed mean counts for before the first has ended.
const ASSUMED: f64 = 8.0;

/// After this many answers, the assumed mean no longer counts.
const KNOWN: f64 = 32.0;

/// The length of an answer so far, in tokens or as a part of the allowed tokens.
#[derive(Clone, Copy, Debug)]
struct Length {
    length: f64,
    end: End,
}

/// Whether an answer has ended, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It may get longer.
    Open,
    /// It is complete.
    Complete,
    /// It ended early: it would have become longer.
    Cut,
}

/// A mean of lengths. Answers that are not complete count as at least as long as they are: the mean is the area under the Kaplan–Meier
/// estimate (Kaplan, Meier: "Nonparametric estimation from incomplete observations", JASA 53, 1958). A mean of complete answers would be
/// too small whenever load has just begun to rise, because short answers end first.
///
/// **Invariant:** the mean is finite and at least 0, and at most twice the longest length; while it depends on an assumed mean, at most the
/// sum of both if that is more. The number of lengths is at most [`MOST`].
#[derive(Debug, Default)]
struct Mean {
    /// In the order in which the answers began.
    lengths: VecDeque<Length>,
    /// The number of the first of them.
    first: u64,
    complete: usize,
    /// The mean before a restart, which is assumed in place of any other.
    before: Option<f64>,
    /// The mean when it was last computed, with the assumed mean that it was computed from.
    known: Option<(f64, f64)>,
    /// How many lengths have changed since.
    changes: usize,
}

impl Mean {
    /// Adds an answer without a token, and returns its number.
    fn begin(&mut self) -> u64 {
        if self.lengths.len() >= MOST {
            self.forget_first();
        }
        self.lengths.push_back(Length { length: 0.0, end: End::Open });
        self.first + (self.lengths.len() as u64 - 1)
    }

    fn forget_first(&mut self) {
        if let Some(Length { end, .. }) = self.lengths.pop_front() {
            self.first += 1;
            self.complete -= usize::from(end == End::Complete);
        }
    }

    /// Notes how long an answer is. An answer that has ended, or is forgotten, stays as it is.
    fn note(&mut self, number: u64, length: f64, end: End) {
        let at = number.checked_sub(self.first).and_then(|at| self.lengths.get_mut(at as usize));
        let Some(open) = at.filter(|open| open.end == End::Open) else { return };
        let length = if length.is_finite() { length.max(open.length) } else { open.length };
        *open = Length { length, end };
        self.changes += 1;
        self.complete += usize::from(end == End::Complete);
        // An open answer keeps later ones: without them, an answer that outlasts many others would never count.
        while self.complete > REMEMBERED && self.lengths.front().is_some_and(|first| first.end != End::Open) {
            self.forget_first();
        }
    }

    /// Returns the mean; `assumed` is the mean that counts as long as few answers have ended, if none from before a restart is known.
    fn get(&mut self, assumed: f64) -> f64 {
        let assumed = self.before.unwrap_or(assumed);
        // Computing it takes a time in proportion to the number of lengths, so it is done for several changes at once if there are many.
        let is_due = self.changes > self.lengths.len() / 64;
        let is_same = |of: f64| self.assumed_weight() == 0.0 || of.to_bits() == assumed.to_bits();
        if let Some((mean, _)) = self.known.filter(|(_, of)| !is_due && is_same(*of)) {
            return mean;
        }
        let mean = self.mean(assumed);
        (self.known, self.changes) = (Some((mean, assumed)), 0);
        mean
    }

    /// Returns the mean if it depends on no other.
    fn own(&mut self) -> Option<f64> {
        (self.before.is_some() || self.assumed_weight() == 0.0).then(|| self.get(0.0))
    }

    /// Returns how many answers the assumed mean counts for.
    fn assumed_weight(&self) -> f64 {
        ASSUMED * (1.0 - self.complete as f64 / KNOWN).max(0.0)
    }

    fn mean(&self, assumed: f64) -> f64 {
        let mut ends: Vec<_> = self.lengths.iter().map(|it| (it.length, it.end != End::Complete)).collect();
        // Of equal lengths, the complete answers first: the others were at least that long.
        ends.sort_unstable_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        let longest = ends.last().map_or(0.0, |(length, _)| *length);
        let (mut mean, mut longer, mut before) = (0.0, 1.0, 0.0);
        // How many ended in the upper half of the lengths, and how many tokens all answers had there.
        let (mut ended_late, mut tokens_late) = (0.0, 0.0);
        for (&(length, is_censored), at_risk) in ends.iter().zip((1..=ends.len()).rev()) {
            let at_risk = at_risk as f64;
            mean += longer * (length - before);
            if !is_censored {
                longer *= 1.0 - 1.0 / at_risk;
            }
            if length > longest / 2.0 {
                ended_late += f64::from(u8::from(!is_censored));
                tokens_late += at_risk * (length - before.max(longest / 2.0));
            }
            before = length;
        }
        // If the longest answers are open, the tokens that they still get are estimated by how often answers ended in
        // the upper half of the lengths. While few have ended, the assumed mean counts as well. If hardly any ended
        // there, this estimate would grow with the number of open and cut answers, beyond anything that was seen: an
        // answer is expected to go on for no longer than the longest has lasted.
        let weight = self.assumed_weight();
        let assumed_rest = (assumed - longest).max(assumed / 2.0);
        let most_rest = if weight > 0.0 { longest.max(assumed) } else { longest };
        let rest = ((tokens_late + weight * assumed_rest) / (ended_late + weight).max(1.0)).min(most_rest);
        let mean = if longer > 0.0 { longer.mul_add(rest, mean) } else { mean };
        let complete = self.complete as f64;
        (mean * complete + assumed * weight) / (complete + weight)
    }
}

/// The lengths of some answers, in tokens and in parts of the allowed tokens.
#[derive(Debug, Default)]
struct Means {
    tokens: Mean,
    used: Mean,
}

/// The mean lengths of a class's answers, in a form that survives a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanLengths {
    /// In tokens; `None` if fewer than 32 answers have ended, and nothing is known from before a restart.
    pub tokens: Option<f64>,
    /// As a part of the allowed tokens; `None` as above, for answers with a limit.
    pub used: Option<f64>,
}

/// The lengths of answers by class. The caller numbers the classes from 0, and keeps them few.
#[derive(Debug, Default)]
pub struct AnswerLengths {
    all: Means,
    classes: Vec<Means>,
}

/// An answer whose length is learned. Pass it to [`AnswerLengths::end`] or [`AnswerLengths::cut`] once.
#[derive(Clone, Copy, Debug)]
pub struct OpenAnswer {
    class: usize,
    /// The allowed tokens, if there is a limit.
    most: Option<f64>,
    /// Its numbers among all answers, and among its class's.
    all: (u64, u64),
    own: (u64, u64),
}

impl AnswerLengths {
    /// Restores the mean lengths of a class, which count until 32 answers of the class have ended. Ignores numbers that are no lengths.
    pub fn recall(&mut self, class: usize, before: MeanLengths) {
        self.add_class(class);
        if let Some(own) = self.classes.get_mut(class) {
            own.tokens.before = before.tokens.filter(|tokens| (0.0..=1e6).contains(tokens));
            own.used.before = before.used.filter(|used| (0.0..=1.0).contains(used));
        }
    }

    /// Returns the mean lengths of a class, as far as they are known.
    pub fn learned(&mut self, class: usize) -> MeanLengths {
        let own = self.classes.get_mut(class);
        own.map_or_else(MeanLengths::default, |own| MeanLengths { tokens: own.tokens.own(), used: own.used.own() })
    }

    fn add_class(&mut self, class: usize) {
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Means::default);
        }
    }

    /// Adds an answer that begins: of a class, with at most `max_tokens`, 0 for no limit.
    pub fn begin(&mut self, class: usize, max_tokens: u32) -> OpenAnswer {
        self.add_class(class);
        let most = (max_tokens > 0).then_some(f64::from(max_tokens));
        let begin = |of: &mut Means| (of.tokens.begin(), if most.is_some() { of.used.begin() } else { 0 });
        let own = self.classes.get_mut(class).map(begin).unwrap_or_default();
        OpenAnswer { class, most, all: begin(&mut self.all), own }
    }

    /// Notes that an answer has `tokens` so far.
    pub fn grow(&mut self, answer: &OpenAnswer, tokens: f64) {
        self.note(answer, tokens, End::Open);
    }

    /// Notes that an answer is complete, with `tokens`.
    pub fn end(&mut self, answer: &OpenAnswer, tokens: f64) {
        self.note(answer, tokens, End::Complete);
    }

    /// Notes that an answer ended early. It counts as at least as long as it is known to be. Does nothing if the answer is complete.
    pub fn cut(&mut self, answer: &OpenAnswer) {
        self.note(answer, 0.0, End::Cut);
    }

    fn note(&mut self, answer: &OpenAnswer, tokens: f64, end: End) {
        let own = self.classes.get_mut(answer.class).map(|own| (own, answer.own));
        for (of, number) in [Some((&mut self.all, answer.all)), own].into_iter().flatten() {
            of.tokens.note(number.0, tokens, end);
            if let Some(most) = answer.most {
                of.used.note(number.1, (tokens / most).min(1.0), end);
            }
        }
    }

    /// Returns the mean length of all answers, in tokens, at least 1; `assumed` until answers have ended.
    pub fn mean(&mut self, assumed: f64) -> f64 {
        self.all.tokens.get(assumed).max(1.0)
    }

    /// Returns the expected tokens of an answer of a class, from 1 to `max_tokens`, 0 for no limit. `assumed` is the mean of all answers
    /// until some have ended.
    pub fn expect(&mut self, class: usize, max_tokens: u32, assumed: f64) -> u32 {
        let most = if max_tokens > 0 { max_tokens } else { u32::MAX };
        let of_all = self.mean(assumed);
        let mut tokens = self.classes.get_mut(class).map_or(of_all, |own| own.tokens.get(of_all));
        if max_tokens > 0 {
            let most = f64::from(max_tokens);
            let used = self.all.used.get((tokens / most).min(1.0));
            tokens = self.classes.get_mut(class).map_or(used, |own| own.used.get(used)) * most;
        }
        (tokens.round() as u32).clamp(1, most)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::Random;

    /// Notes complete answers of a class.
    fn complete(lengths: &mut AnswerLengths, class: usize, max_tokens: u32, tokens: &[f64]) {
        for tokens in tokens {
            let answer = lengths.begin(class, max_tokens);
            lengths.end(&answer, *tokens);
        }
    }

    #[test]
    fn a_long_answer_of_one_class_is_not_taken_for_the_mean_of_all() {
        let mut lengths = AnswerLengths::default();
        let [urgent, batch] = [0, 1];
        assert_eq!(lengths.expect(batch, 96, 33.0), 33, "nothing is known of the class");
        for _ in 0..40 {
            complete(&mut lengths, urgent, 12, &[12.0]);
            complete(&mut lengths, batch, 96, &[64.0]);
        }
        assert_eq!((lengths.expect(batch, 48, 33.0), lengths.expect(urgent, 8, 33.0)), (32, 8));
        assert_eq!((lengths.expect(batch, 0, 33.0), lengths.expect(urgent, 0, 33.0)), (64, 12));
        assert!((lengths.mean(33.0) - 38.0).abs() < 1e-9);
    }

    #[test]
    fn clients_that_always_allow_many_tokens_are_known_by_what_they_use() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 4_096, &[205.0; 50]);
        assert_eq!(lengths.expect(0, 4_096, 33.0), 205);
        assert_eq!((lengths.expect(0, 1, 33.0), lengths.expect(99, 0, 0.0)), (1, 205));
        assert_eq!(AnswerLengths::default().expect(99, 0, 0.0), 1);
    }

    #[test]
    fn a_class_with_few_answers_is_assumed_to_be_like_all() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 0, &[200.0; 100]);
        complete(&mut lengths, 1, 0, &[60.0]);
        assert!((180..190).contains(&lengths.expect(1, 0, 50.0)), "{}", lengths.expect(1, 0, 50.0));
        complete(&mut lengths, 1, 0, &[60.0; 40]);
        assert_eq!(lengths.expect(1, 0, 50.0), 60);
    }

    #[test]
    fn long_answers_count_before_they_end() {
        // Answers begin together, and short ones end first. Their lengths are spread as in conversations; their mean is 206.
        let spread = [70, 90, 105, 120, 135, 150, 165, 180, 200, 220, 245, 270, 310, 370, 460];
        let mut lengths = AnswerLengths::default();
        let answers: Vec<_> = (0..60).map(|at| (lengths.begin(0, 0), f64::from(spread[at % spread.len()]))).collect();
        let mut complete = (0.0, 0.0);
        for (tokens, of_complete) in [(100.0, 80.0), (150.0, 112.0), (200.0, 135.0), (300.0, 163.0), (500.0, 206.0)] {
            complete = answers
                .iter()
                .filter(|(_, length)| *length <= tokens)
                .fold((0.0, 0.0), |sum, it| (sum.0 + it.1, sum.1 + 1.0));
            for (answer, length) in &answers {
                if *length > tokens { lengths.grow(answer, tokens) } else { lengths.end(answer, *length) }
            }
            assert!((complete.0 / complete.1 - of_complete).abs() < 1.0, "{complete:?}");
            let mean = lengths.mean(200.0);
            assert!((195.0..275.0).contains(&mean), "after {tokens} tokens: {mean}");
        }
        assert_eq!(complete.1, 60.0);
    }

    #[test]
    fn one_long_open_answer_among_many_short_ones_says_little() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 0, &[100.0; 40]);
        let long = lengths.begin(0, 0);
        lengths.grow(&long, 4_000.0);
        // As if it ended after half as many tokens again.
        let mean = lengths.mean(1.0);
        assert!((mean - (4_000.0 + 6_000.0) / 41.0).abs() < 1.0, "{mean}");
    }

    #[test]
    fn open_answers_do_not_change_a_mean_that_is_right() {
        let (mut lengths, mut random) = (AnswerLengths::default(), Random::new(3));
        let mut open: Vec<(OpenAnswer, f64, f64)> = Vec::new();
        let mut means = Vec::new();
        for step in 0..40_000 {
            if step % 10 == 0 {
                open.push((lengths.begin(0, 0), 0.0, 50.0 + 300.0 * random.uniform()));
            }
            open.retain_mut(|(answer, so_far, length)| {
                *so_far += 1.0;
                if so_far >= length {
                    lengths.end(answer, *length)
                } else {
                    lengths.grow(answer, *so_far)
                }
                so_far < length
            });
            if step > 5_000 && step % 100 == 0 {
                means.push(lengths.mean(1.0));
            }
        }
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        assert!((mean - 200.0).abs() < 4.0, "{mean}");
    }

    #[test]
    fn answers_that_are_cut_are_at_least_as_long_as_they_were() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 0, &[[100.0; 50], [300.0; 50]].concat());
        for _ in 0..100 {
            let answer = lengths.begin(0, 0);
            lengths.grow(&answer, 100.0);
            lengths.cut(&answer);
            lengths.end(&answer, 1.0);
        }
        // Of 200 answers, 50 ended at 100 tokens, and all others were longer.
        let mean = lengths.mean(1.0);
        assert!((mean - 250.0).abs() < 1.0, "{mean}");
    }

    #[test]
    fn many_answers_of_which_none_ends_are_expected_to_become_twice_as_long_at_most() {
        for (tokens, is_cut) in [(1_000.0, true), (1_000.0, false), (4_000.0, false)] {
            let mut lengths = AnswerLengths::default();
            complete(&mut lengths, 0, 0, &[100.0; 200]);
            for _ in 0..50 {
                let answer = lengths.begin(0, 0);
                lengths.grow(&answer, tokens);
                if is_cut {
                    lengths.cut(&answer);
                }
            }
            // Of 250 answers, 200 ended at 100 tokens.
            let mean = (200.0 * 100.0 + 50.0 * 2.0 * tokens) / 250.0;
            assert!((lengths.mean(1.0) - mean).abs() < 1.0, "{} and {mean}", lengths.mean(1.0));
            assert_eq!(lengths.expect(0, 0, 1.0), mean as u32);
        }
    }

    #[test]
    fn a_mean_of_many_follows_a_change() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 0, &[300.0; 2_000]);
        // Some short answers in a row, as chance has it.
        complete(&mut lengths, 0, 0, &[60.0; 10]);
        assert!(lengths.mean(1.0) > 285.0);
        complete(&mut lengths, 0, 0, &[60.0; 200]);
        assert!(lengths.mean(1.0) < 63.0);
    }

    #[test]
    fn a_mean_keeps_so_many_lengths() {
        let mut lengths = AnswerLengths::default();
        let oldest = lengths.begin(0, 100);
        complete(&mut lengths, 0, 100, &[50.0; 3 * MOST]);
        for of in [&lengths.all, &lengths.classes[0]] {
            assert!(of.tokens.lengths.len() <= MOST && of.used.lengths.len() <= MOST);
        }
        lengths.end(&oldest, 100.0);
        assert_eq!(lengths.expect(0, 100, 1.0), 50, "the oldest is forgotten");
        complete(&mut lengths, 0, 100, &[50.0]);
        assert!(lengths.all.tokens.lengths.len() <= REMEMBERED + 1);
    }

    #[test]
    fn a_class_is_like_before_the_restart_until_its_own_answers_count() {
        let mut lengths = AnswerLengths::default();
        complete(&mut lengths, 0, 100, &[40.0; 31]);
        assert_eq!(lengths.learned(0), MeanLengths::default(), "few answers");
        complete(&mut lengths, 0, 100, &[40.0]);
        let learned = lengths.learned(0);
        assert_eq!(learned, MeanLengths { tokens: Some(40.0), used: Some(0.4) });
        assert_eq!(lengths.learned(1), MeanLengths::default(), "no such class");

        let mut after = AnswerLengths::default();
        after.recall(2, learned);
        assert_eq!(after.learned(2), learned, "a second restart finds the same");
        assert_eq!((after.expect(2, 0, 200.0), after.expect(2, 1_000, 200.0)), (40, 400));
        assert_eq!((after.expect(1, 0, 200.0), after.mean(200.0)), (200, 200.0), "other classes do not know");
        complete(&mut after, 2, 0, &[80.0; 32]);
        assert_eq!(after.expect(2, 0, 200.0), 80);
        let nonsense = MeanLengths { tokens: Some(f64::NAN), used: Some(2.0) };
        after.recall(3, nonsense);
        assert_eq!(after.learned(3), MeanLengths::default());
    }

    proptest! {
        #[test]
        fn no_lengths_make_a_mean_absurd(
            steps in prop::collection::vec((0..3usize, 0..300u32, any::<f64>(), 0..3u8), 0..400), assumed in any::<f64>(),
        ) {
            let mut lengths = AnswerLengths::default();
            let mut open = Vec::new();
            let assumed = if assumed.is_finite() { assumed.clamp(0.0, 1e6) } else { 0.0 };
            for (class, max_tokens, tokens, what) in steps {
                open.push((lengths.begin(class, max_tokens), max_tokens));
                let tokens = tokens.clamp(-1.0, 1e6);
                let (answer, _) = open[open.len() * 2 / 3];
                match what {
                    0 => lengths.grow(&answer, tokens),
                    1 => lengths.end(&answer, tokens),
                    _ => lengths.cut(&answer),
                }
                let mean = lengths.mean(assumed);
                prop_assert!((1.0..=2e6).contains(&mean), "{}", mean);
                let expected = lengths.expect(class, max_tokens, assumed);
                prop_assert!(expected >= 1 && (max_tokens == 0 || expected <= max_tokens));
            }
        }
    }
}
