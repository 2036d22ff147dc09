//! Verdicts on published claims from a plan's results.

use std::fmt;

use serde::Deserialize;

/// A paper's claim, and what our measurement shows about it. Written by hand in the plan, and printed with its tables.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// What the paper says, with its figure or section.
    pub claim: String,
    /// The judgement.
    pub judgement: Judgement,
    /// The reason, in a sentence or two: the figures, and why the result differs from the published one if it does.
    pub why: String,
}

/// How a measurement compares with the published claim.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    /// The same within random variation, or the same order if the paper gives only an order.
    AsPublished,
    /// Better than published, by more than random variation.
    Better,
    /// The claim is confirmed in part.
    InPart,
    /// The measurement contradicts the claim.
    NotAsPublished,
    /// The paper claims nothing about it; the reason says what was measured.
    Measured,
    /// The claim was not measured.
    NotMeasured,
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsPublished => "as published",
            Self::Better => "better",
            Self::InPart => "in part",
            Self::NotAsPublished => "**not as published**",
            Self::Measured => "measured",
            Self::NotMeasured => "not measured",
        })
    }
}
