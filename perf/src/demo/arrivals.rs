//! The times and the contents of requests. A seed decides both, so every contender gets the same requests, however fast it is.

use instruments::random::Random;
use serde::Serialize;

/// How many of a hundred requests are urgent.
const URGENT_PERCENT: f64 = 60.0;

/// The class that a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Short questions and answers, for which a user waits.
    Urgent,
    /// Longer requests that have more time.
    Batch,
}

/// A request of the mix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When it is due, from the start of the load.
    pub at_ns: u64,
    /// Its class.
    pub class: Class,
    /// The text of the request.
    pub prompt: String,
    /// How many tokens its answer has: engines are told not to end earlier.
    pub tokens: u32,
}

impl Class {
    /// Both classes, in the order of tables.
    pub const ALL: [Self; 2] = [Self::Urgent, Self::Batch];

    /// The name in tables, results and the policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Urgent => "urgent",
            Self::Batch => "batch",
        }
    }

    /// The least and the most words of a prompt, and tokens of an answer.
    const fn sizes(self) -> [(usize, usize); 2] {
        match self {
            Self::Urgent => [(8, 24), (8, 16)],
            Self::Batch => [(24, 72), (32, 96)],
        }
    }
}

/// Returns the requests that are due within `seconds`, `per_second` on average (a Poisson process), in order.
#[must_use]
pub fn arrivals(seed: u64, per_second: f64, seconds: f64) -> Vec<Arrival> {
    let mut random = Random::new(seed, 0x6d69_7865);
    let mut arrivals = Vec::new();
    let mut at_s = random.exponential() / per_second;
    while at_s < seconds {
        let class = if random.share() * 100.0 < URGENT_PERCENT { Class::Urgent } else { Class::Batch };
        arrivals.push(Arrival { at_ns: (at_s * 1e9) as u64, ..request(class, &mut random) });
        at_s += random.exponential() / per_second;
    }
    arrivals
}

/// Returns a request that is due at once.
pub fn request(class: Class, random: &mut Random) -> Arrival {
    let mut between = |(least, most): (usize, usize)| least + random.below(most - least + 1);
    let [words, tokens] = class.sizes().map(&mut between);
    Arrival { at_ns: 0, class, prompt: prompt(words, random), tokens: tokens as u32 }
}

/// Makes a prompt of random words, so that no engine has cached the beginning of a similar prompt.
fn prompt(words: usize, random: &mut Random) -> String {
    let mut word = || -> String {
        let mut syllable = || {
            let (consonants, vowels) = (b"bdfgklmnprst", b"aeiou");
            [consonants[random.below(consonants.len())], vowels[random.below(vowels.len())]]
        };
        [syllable(), syllable()].concat().into_iter().map(char::from).collect()
    };
    (0..words).map(|_| word()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_arrivals_and_another_has_others() {
        assert_eq!(arrivals(1, 5.0, 20.0), arrivals(1, 5.0, 20.0));
        assert_ne!(arrivals(1, 5.0, 20.0), arrivals(2, 5.0, 20.0));
    }

    #[test]
    fn arrivals_have_the_rate_and_the_mix_that_they_should() {
        let all = arrivals(3, 50.0, 200.0);
        assert!((9_500..10_500).contains(&all.len()), "{}", all.len());
        assert!(all.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
        let urgent: Vec<_> = all.iter().filter(|arrival| arrival.class == Class::Urgent).collect();
        assert!((5_700..6_300).contains(&urgent.len()), "{}", urgent.len());
        assert!(urgent.iter().all(|arrival| (8..=16).contains(&arrival.tokens)));
        let mut prompts: Vec<_> = all.iter().map(|arrival| &arrival.prompt).collect();
        prompts.sort();
        prompts.dedup();
        assert!(all.len() - prompts.len() < 3, "prompts differ");
    }
}
