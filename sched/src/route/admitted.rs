//! Requests that engines already work on, and that each further request may delay.

use super::request::Slo;

/// A request that an engine works on and whose answer is not complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Commitment {
    /// Its engine: an index into [`State::replicas`](super::State::replicas).
    pub replica: usize,
    /// How many tokens its answer is still expected to have.
    pub left_tokens: u32,
    /// The tokens of its prompt until its first token has come, then 0.
    pub unread_tokens: u32,
    /// How long the engine may still take for it, from now; [`Slo::NONE`] if it has no limit.
    pub left_ns: u64,
    /// The worth of its answer if it is in time. A value below 0, or not finite, counts as 0.
    pub reward: f32,
}

impl Commitment {
    /// Returns the worth of the answer as a finite number of at least 0.
    pub(super) const fn sound_reward(&self) -> f64 {
        if self.reward.is_finite() && self.reward > 0.0 { self.reward as f64 } else { 0.0 }
    }

    /// Whether it can be late.
    pub(super) const fn has_limit(&self) -> bool {
        self.left_ns != Slo::NONE
    }
}
