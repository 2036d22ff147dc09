//! The outcome of a request.

/// A request's model, and the reward of its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Answered {
    pub task: usize,
    /// `None` if the request never reached a model.
    pub model: Option<usize>,
    pub met: bool,
    /// The model's reward for this task if the answer was in time, otherwise 0.
    pub reward: f64,
}
