//! What operators see of engines and requests.

use std::time::{Duration, SystemTime};

use engines::{health::EngineHealth, reported::Reported};
use routes::Tally;
use sched::route::Cost;

/// An engine of a gateway at one time.
#[derive(Clone, Debug)]
pub struct EngineView {
    /// The name of its model.
    pub model: String,
    /// Its URL.
    pub engine: String,
    /// The requests that it works on, and their maximum.
    pub in_flight: (u32, u32),
    /// How many requests wait for any engine of the model, also in gateways that a reload has replaced.
    pub waiting: usize,
    /// The requests of others that it works on, and that wait in it, as it reports.
    pub others: Reported,
    /// Whether it gets requests, and why not.
    pub health: EngineHealth,
    /// Its last problem, until it succeeds again.
    pub trouble: Option<String>,
    /// How many requests it answered.
    pub answered: u64,
    /// How many requests it failed.
    pub failed: u64,
    /// The number of its steps and of its first tokens from which its curve was learned.
    pub samples: (u64, u64),
    /// The learned costs; without samples, a first guess.
    pub cost: Cost,
}

/// A name that stands for several models, and the policy that chooses among them.
#[derive(Clone, Debug)]
pub struct AliasView {
    /// The name.
    pub alias: String,
    /// The models.
    pub models: Vec<String>,
    /// The policy, as the configuration names it.
    pub policy: String,
    /// The policy's kind: that of its file, if it has one.
    pub kind: &'static str,
    /// The policy that only watches, and its kind.
    pub shadow: Option<String>,
    /// See [`AliasView::kind`].
    pub shadow_kind: Option<&'static str>,
    /// The decisions since paced started, or since the alias, its policy or its shadow changed.
    pub tally: Tally,
}

/// A request that a gateway serves, at one time.
#[derive(Clone, Debug)]
pub struct RequestView {
    /// Its ID, which no other request has had since paced started.
    pub id: u64,
    /// The user; empty if clients need no credentials.
    pub user: String,
    /// The name of its class; empty until its body has arrived.
    pub class: String,
    /// The model; empty until one was chosen.
    pub model: String,
    /// Its stage.
    pub stage: Stage,
    /// When it arrived.
    pub since: SystemTime,
    /// The time that it has for the whole answer, if there is a limit.
    pub budget: Option<Duration>,
    /// Tokens that have passed.
    pub tokens: u64,
    /// The rate of tokens after the first; 0 before the second.
    pub tokens_per_sec: f64,
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Its body arrives.
    Arrives,
    /// It waits for an engine.
    Waits,
    /// An engine works on it.
    AtWork,
}

impl Stage {
    pub(crate) const fn of(number: u8) -> Self {
        match number {
            0 => Self::Arrives,
            1 => Self::Waits,
            _ => Self::AtWork,
        }
    }

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arrives => "arriving",
            Self::Waits => "waiting",
            Self::AtWork => "at work",
        }
    }
}
