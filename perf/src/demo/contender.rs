//! The contenders of the demo: who chooses the engine that answers.

use super::{
    client::Way,
    stage::{MODELS, Stage},
};

/// Chooses the engine that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The client: each engine in turn, over plain HTTP.
    RoundRobin,
    /// A gateway, behind an edge.
    Paced,
}

impl Contender {
    /// Both contenders, in the order of tables.
    pub const ALL: [Self; 2] = [Self::RoundRobin, Self::Paced];

    /// The name in tables and results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round robin, HTTP",
            Self::Paced => "paced",
        }
    }

    /// Returns where the request with this number goes.
    pub(super) fn way(self, stage: &Stage, number: usize) -> Way {
        match self {
            Self::RoundRobin => stage.engine(number % MODELS.len()),
            Self::Paced => Stage::paced("auto"),
        }
    }

    /// Returns where a request for one model goes.
    pub(super) fn way_to(self, stage: &Stage, at: usize) -> Way {
        match self {
            Self::RoundRobin => stage.engine(at),
            Self::Paced => Stage::paced(MODELS[at].0),
        }
    }
}
