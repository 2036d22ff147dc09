//! How long answers are, by class.
//!
//! One class may hold short questions and another long reports, so a mean over all classes fits neither. If clients set `max_tokens`,
//! the used part of it predicts better than a mean, because it depends on the request.

/// A mean remembers about this many answers. Lengths vary by half of their mean, so that a mean of 20 answers is often wrong by a tenth.
/// When load rises, short answers also end first, which pulls a mean of few answers down.
const REMEMBERED: u32 = 200;

/// A mean of numbers: of all of them alike at first, and then with less weight for older ones.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    mean: f64,
    /// How many numbers it is of, up to [`REMEMBERED`].
    count: u32,
}

impl Mean {
    fn learn(&mut self, now: f64) {
        self.count = self.count.saturating_add(1).min(REMEMBERED);
        self.mean += (now - self.mean) / f64::from(self.count);
    }
}

/// The lengths of answers by class. The policy names the classes, which keeps them few.
#[derive(Debug, Default)]
pub(super) struct Lengths(Vec<OfClass>);

#[derive(Debug, Default)]
struct OfClass {
    name: String,
    /// The mean number of tokens.
    tokens: Option<Mean>,
    /// The mean part of the tokens that a request allowed.
    used: Option<Mean>,
}

impl Lengths {
    /// Returns the index of a class, and adds the class at its first request.
    pub fn class(&mut self, name: &str) -> usize {
        self.0.iter().position(|class| class.name == name).unwrap_or_else(|| {
            self.0.push(OfClass { name: name.to_owned(), ..OfClass::default() });
            self.0.len() - 1
        })
    }

    /// Returns the expected number of tokens, at least 1. An unknown class has the `usual` number.
    pub fn expect(&self, class: usize, max_tokens: Option<u32>, usual: f64) -> u32 {
        let of = self.0.get(class);
        let most = max_tokens.unwrap_or(u32::MAX).max(1);
        let tokens = match (max_tokens, of.and_then(|of| of.used)) {
            (Some(most), Some(used)) => used.mean * f64::from(most),
            _ => of.and_then(|of| of.tokens).map_or(usual, |tokens| tokens.mean),
        };
        (tokens.round() as u32).clamp(1, most)
    }

    /// Learns from an answer of `tokens`.
    pub fn learn(&mut self, class: usize, max_tokens: Option<u32>, tokens: u64) {
        let Some(of) = self.0.get_mut(class) else { return };
        let learn = |mean: &mut Option<Mean>, now: f64| mean.get_or_insert_default().learn(now);
        learn(&mut of.tokens, tokens as f64);
        if let Some(most) = max_tokens.filter(|most| *most > 0) {
            learn(&mut of.used, (tokens as f64 / f64::from(most)).min(1.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_answer_of_one_class_is_not_taken_for_the_mean_of_all() {
        let mut lengths = Lengths::default();
        let [urgent, batch] = ["urgent", "batch"].map(|name| lengths.class(name));
        assert_eq!(lengths.expect(batch, Some(96), 33.0), 33, "nothing is known of the class");
        for _ in 0..20 {
            lengths.learn(urgent, Some(12), 12);
            lengths.learn(batch, Some(64), 64);
        }
        assert_eq!((lengths.expect(batch, Some(96), 33.0), lengths.expect(urgent, Some(8), 33.0)), (96, 8));
        assert_eq!((lengths.expect(batch, None, 33.0), lengths.expect(urgent, None, 33.0)), (64, 12));
    }

    #[test]
    fn a_mean_of_a_few_answers_takes_them_all_alike_and_a_mean_of_many_follows_a_change() {
        let mut mean = Mean::default();
        for tokens in [50.0, 350.0, 100.0, 300.0] {
            mean.learn(tokens);
        }
        assert!((mean.mean - 200.0).abs() < 1e-9, "{mean:?}");
        // Answers that vary by half of their mean.
        for turn in 0..2_000 {
            mean.learn(if turn % 2 == 0 { 100.0 } else { 300.0 });
        }
        assert!((mean.mean - 200.0).abs() < 2.0, "{mean:?}");
        // Some short answers in a row, as when load begins to rise.
        (0..10).for_each(|_| mean.learn(60.0));
        assert!(mean.mean > 190.0, "{mean:?}");
        (0..1_000).for_each(|_| mean.learn(60.0));
        assert!(mean.mean < 62.0, "{mean:?}");
    }

    #[test]
    fn clients_that_always_allow_many_tokens_are_known_by_what_they_use() {
        let mut lengths = Lengths::default();
        let class = lengths.class("chat");
        for _ in 0..50 {
            lengths.learn(class, Some(4_096), 205);
        }
        assert_eq!(lengths.expect(class, Some(4_096), 33.0), 205);
        assert_eq!((lengths.expect(class, Some(0), 33.0), lengths.expect(99, None, 0.0)), (1, 1));
    }
}
