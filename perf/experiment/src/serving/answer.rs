//! What became of a request.

/// A request's model, and what its answer was worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Answered {
    pub task: usize,
    /// Nothing where a request never came to a model.
    pub model: Option<usize>,
    pub met: bool,
    /// The model's for this task if the answer was in time, else 0.
    pub reward: f64,
}
