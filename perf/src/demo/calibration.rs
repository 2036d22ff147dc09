//! How long each model takes for a request alone, and the deadlines and arrival rates that follow from it.
//!
//! Everything that depends on the machine's speed is decided here, before the first run, by these formulas:
//!
//! - A request has `patience × (first token + (tokens − 1) × each further token)` until its answer is whole, both of the large
//!   model when it has nothing else to do and the link is empty. `patience` is 2 for urgent requests and 6 for batch requests.
//! - A load of 1 is the rate at which the large model would answer the mix one request after the other.

use std::time::Duration;

use instruments::median::median;
use serde::Serialize;

use super::arrivals::{Arrival, Class, arrivals};

/// How long an engine takes for a request alone, including the empty link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Alone {
    /// From the request to the first token, in milliseconds.
    pub first_ms: f64,
    /// From each token to the next, in milliseconds.
    pub token_ms: f64,
}

impl Class {
    /// The budget of a whole answer, as a multiple of the time that the large model takes for the request alone.
    #[must_use]
    pub const fn patience(self) -> f64 {
        match self {
            Self::Urgent => 2.0,
            Self::Batch => 6.0,
        }
    }
}

impl Alone {
    /// Returns the medians of several measurements; zeros if there are none.
    #[must_use]
    pub fn median(measured: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| median(measured.iter().map(of)).unwrap_or_default();
        Self { first_ms: middle(|alone| alone.first_ms), token_ms: middle(|alone| alone.token_ms) }
    }

    /// Returns how long an answer of `tokens` tokens takes, in milliseconds.
    #[must_use]
    pub fn whole_ms(self, tokens: u32) -> f64 {
        self.first_ms + self.token_ms * f64::from(tokens.saturating_sub(1))
    }

    /// Returns a request's budget, if this is the large model; in whole milliseconds, as the request states it.
    #[must_use]
    pub fn budget(self, arrival: &Arrival) -> Duration {
        Duration::from_millis((arrival.class.patience() * self.whole_ms(arrival.tokens)).ceil() as u64)
    }

    /// Returns how many requests of the mix are answered per second, one after the other.
    #[must_use]
    pub fn per_second(self) -> f64 {
        // The mean over a long mix with a fixed seed, so that it does not depend on the offered requests.
        let mix = arrivals(0, 100.0, 100.0);
        let sum_ms: f64 = mix.iter().map(|arrival| self.whole_ms(arrival.tokens)).sum();
        1e3 * mix.len() as f64 / sum_ms.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: Alone = Alone { first_ms: 100.0, token_ms: 20.0 };

    #[test]
    fn a_deadline_is_the_patience_of_the_class_times_what_the_large_model_takes_alone() {
        let request = |class, tokens| Arrival { at_ns: 0, class, prompt: String::new(), tokens };
        assert_eq!(LARGE.budget(&request(Class::Urgent, 11)), Duration::from_millis(2 * 300));
        assert_eq!(LARGE.budget(&request(Class::Batch, 11)), Duration::from_millis(6 * 300));
        assert_eq!(LARGE.budget(&request(Class::Urgent, 0)), Duration::from_millis(2 * 100), "no token less than one");
    }

    #[test]
    fn a_load_of_one_is_the_mix_one_after_the_other() {
        let mix = arrivals(0, 100.0, 100.0);
        let tokens = mix.iter().map(|arrival| f64::from(arrival.tokens)).sum::<f64>() / mix.len() as f64;
        let expected = 1e3 / (100.0 + 20.0 * (tokens - 1.0));
        assert!((LARGE.per_second() - expected).abs() < 1e-9, "{} {expected}", LARGE.per_second());
        let slower = Alone { token_ms: 40.0, ..LARGE };
        assert!(slower.per_second() < LARGE.per_second() && Alone::default().per_second().is_finite());
    }

    #[test]
    fn a_median_is_of_each_figure_by_itself() {
        let of = |first_ms, token_ms| Alone { first_ms, token_ms };
        assert_eq!(Alone::median(&[of(1.0, 9.0), of(5.0, 2.0), of(3.0, 4.0)]), of(3.0, 4.0));
        assert_eq!(Alone::median(&[]), Alone::default());
    }
}
