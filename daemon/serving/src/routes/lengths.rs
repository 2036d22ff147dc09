//! How long answers are, by class.
//!
//! One class may hold short questions and another long reports, so a mean over all classes fits neither. If clients set `max_tokens`,
//! the used part of it predicts better than a mean, because it depends on the request.

/// The weight of the newest answer in an average.
const NEWEST: f64 = 0.05;

/// The lengths of answers by class. The policy names the classes, which keeps them few.
#[derive(Debug, Default)]
pub(super) struct Lengths(Vec<OfClass>);

#[derive(Debug, Default)]
struct OfClass {
    name: String,
    /// The mean number of tokens.
    tokens: Option<f64>,
    /// The mean part of the tokens that a request allowed.
    used: Option<f64>,
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
            (Some(most), Some(used)) => used * f64::from(most),
            _ => of.and_then(|of| of.tokens).unwrap_or(usual),
        };
        (tokens.round() as u32).clamp(1, most)
    }

    /// Learns from an answer of `tokens`.
    pub fn learn(&mut self, class: usize, max_tokens: Option<u32>, tokens: u64) {
        let Some(of) = self.0.get_mut(class) else { return };
        let learn = |mean: &mut Option<f64>, now: f64| {
            let before = mean.unwrap_or(now);
            *mean = Some(before + NEWEST * (now - before));
        };
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
