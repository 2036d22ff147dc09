//! A request, its time limits, and the models that may answer it.

/// What the router knows about a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutedRequest {
    /// The class ("task" in the paper, §5.1.1): an index into [`Model::rewards`].
    pub class: usize,
    /// How many tokens the prompt has, or is estimated to have.
    pub prompt_tokens: u32,
    /// How many tokens the answer is expected to have; 0 counts as 1.
    pub expected_tokens: u32,
    /// The largest number of tokens that the answer may have; it bounds `expected_tokens`. 0 means unknown.
    pub max_tokens: u32,
    /// How soon the client needs the answer.
    pub slo: Slo,
    /// How much the request counts relative to others: the paper's §5.3 gives more weight to the rewards of one class. Only
    /// networks see it, and learn from it; the other policies treat all requests alike. A weight that is not finite, or
    /// below 0, counts as 1.
    pub weight: f32,
    /// Which models may answer. A request that names one model allows no other.
    pub allowed: ModelSet,
}

impl RoutedRequest {
    /// Returns how many tokens to plan for, at least 1.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        let expected = if self.expected_tokens == 0 { 1 } else { self.expected_tokens };
        if self.max_tokens != 0 && self.max_tokens < expected { self.max_tokens } else { expected }
    }

    /// Returns how many tokens of the prompt an engine with `cached_tokens` of them in its cache reads; see [`unread_tokens`].
    #[must_use]
    pub const fn unread_tokens(&self, cached_tokens: u32) -> u32 {
        unread_tokens(self.prompt_tokens, cached_tokens)
    }

    /// Returns the weight, or 1 if it is not valid.
    #[must_use]
    pub const fn sound_weight(&self) -> f32 {
        if self.weight.is_finite() && self.weight >= 0.0 { self.weight } else { 1.0 }
    }
}

/// Returns how many tokens of a prompt an engine reads that has `cached_tokens` of them in its cache. It reads at least the
/// last token, from which the first of the answer follows.
#[must_use]
pub const fn unread_tokens(prompt_tokens: u32, cached_tokens: u32) -> u32 {
    match prompt_tokens.saturating_sub(cached_tokens) {
        0 if prompt_tokens > 0 => 1,
        unread => unread,
    }
}

/// Time limits of an answer as the client sees it, including the way back. [`Slo::NONE`] in a field means no such limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// Time to the first token (TTFT), from now.
    pub first_token_ns: u64,
    /// Time per output token (TPOT): the mean gap between tokens after the first.
    pub per_token_ns: u64,
    /// The time left for the whole answer, from now. 0 is already too late.
    pub budget_ns: u64,
}

impl Slo {
    /// No limit.
    pub const NONE: u64 = u64::MAX;

    /// Returns limits that cannot be missed.
    #[must_use]
    pub const fn unlimited() -> Self {
        Self { first_token_ns: Self::NONE, per_token_ns: Self::NONE, budget_ns: Self::NONE }
    }

    /// Returns a limit for the whole answer only.
    #[must_use]
    pub const fn within(budget_ns: u64) -> Self {
        Self { budget_ns, ..Self::unlimited() }
    }

    /// Returns the limit of the paper's §5.1.1: `per_token_ns` for each expected token, including the time before the first
    /// one.
    #[must_use]
    pub const fn normalised(per_token_ns: u64, tokens: u32) -> Self {
        Self::within(per_token_ns.saturating_mul(tokens as u64))
    }
}

/// A model that can answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// A number that stays the same for the same model, whatever else is configured: for example a hash of its name.
    /// Learned policies are bound to it by their [fingerprint](super::fingerprint).
    pub id: u64,
    /// The worth of an answer in time, by class: the model's accuracy relative to that of the best one (the paper, table
    /// 1). Classes beyond the last use the last reward; a reward that is not finite counts as 0, and so does an empty list.
    pub rewards: Vec<f32>,
}

impl Model {
    /// Returns the worth of an answer in time to a request of this class.
    #[must_use]
    pub fn reward(&self, class: usize) -> f32 {
        self.rewards.get(class).or(self.rewards.last()).copied().filter(|reward| reward.is_finite()).unwrap_or(0.0)
    }
}

/// A set of models by index. Only indices below 64 can be in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSet(u64);

impl ModelSet {
    /// Every model.
    pub const ALL: Self = Self(u64::MAX);

    /// No model.
    pub const NONE: Self = Self(0);

    /// Returns the set with `model` added; an index of 64 or more adds nothing.
    #[must_use]
    pub const fn with(self, model: usize) -> Self {
        if model < u64::BITS as usize { Self(self.0 | 1 << model) } else { self }
    }

    /// Returns whether `model` is in the set.
    #[must_use]
    pub const fn contains(self, model: usize) -> bool {
        model < u64::BITS as usize && self.0 >> model & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_of_tokens_bounds_the_expected_one() {
        let request = |expected_tokens, max_tokens| RoutedRequest {
            class: 0,
            prompt_tokens: 0,
            expected_tokens,
            max_tokens,
            slo: Slo::unlimited(),
            weight: 1.0,
            allowed: ModelSet::ALL,
        };
        assert_eq!(request(200, 0).tokens(), 200);
        assert_eq!(request(200, 50).tokens(), 50);
        assert_eq!(request(0, 0).tokens(), 1);
        assert!(RoutedRequest { weight: f32::NAN, ..request(1, 1) }.sound_weight() == 1.0);
    }

    #[test]
    fn a_set_holds_the_models_that_were_added() {
        let set = ModelSet::NONE.with(0).with(63).with(64);
        assert!(set.contains(0) && set.contains(63) && !set.contains(1) && !set.contains(64));
    }

    #[test]
    fn a_reward_that_is_missing_is_the_last_and_what_is_no_number_is_0() {
        let model = |rewards| Model { id: 1, rewards };
        assert_eq!([0, 1, 2].map(|class| model(vec![0.5, 0.25]).reward(class)), [0.5, 0.25, 0.25]);
        assert_eq!(model(vec![f32::NAN]).reward(0), 0.0);
        assert_eq!(model(Vec::new()).reward(0), 0.0);
    }
}
