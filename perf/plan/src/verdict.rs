//! What a plan's results say about what was published.

use std::fmt;

use serde::Deserialize;

/// A claim of the paper, and what our measurement makes of it. Written by hand beside the plan, and printed with its tables.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// What the paper says, with its figure or section.
    pub claim: String,
    /// The judgement.
    pub judgement: Judgement,
    /// In a sentence or two: by which figures, and why it is not as published if it is not.
    pub why: String,
}

/// How a measurement compares with what was published.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    /// The same within what chance leaves open, or the same order where only an order is given.
    AsPublished,
    /// Better than published, by more than chance.
    Better,
    /// Some of it.
    InPart,
    /// Something else.
    NotAsPublished,
    /// Nothing was measured.
    NotMeasured,
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsPublished => "as published",
            Self::Better => "better",
            Self::InPart => "in part",
            Self::NotAsPublished => "**not as published**",
            Self::NotMeasured => "not measured",
        })
    }
}
