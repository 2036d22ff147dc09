//! The question which model answers a request, and the decision.

use std::time::Duration;

use engines::places::PrefixHashes;
use routing::decision::Decision;
use sched::route::{ClientPath, ModelChoice, Reason, RoutedRequest};

use super::trials::SpeedTrial;

/// The question which model answers a request.
#[derive(Clone, Copy, Debug)]
pub struct RouteQuery<'a> {
    /// The models that may answer, by their indices in the configuration.
    pub models: &'a [usize],
    /// The index of the alias that stands for them; `None` if the request names its model.
    pub alias: Option<usize>,
    /// The name of its class.
    pub class: &'a str,
    /// The part of its prompt that earlier prompts may share.
    pub prefix: &'a PrefixHashes,
    /// Whether another model has already failed to answer it.
    pub is_retry: bool,
    /// Whether its class refuses it if it is predicted late.
    pub refuses_late: bool,
}

/// The decision about a request.
#[derive(Clone, Debug)]
pub struct Route {
    /// The model, by its index in the configuration.
    pub model: usize,
    /// The reason for this model, as text for people.
    pub reason: &'static str,
    /// The prediction, if anything is known.
    pub choice: Option<ModelChoice>,
    /// The policy that decided, if the request named an alias whose policy was used.
    pub by: Option<Decided>,
    /// Its record, if decisions are recorded.
    pub decision: Option<Box<Decision>>,
    /// The request, the path back, and the time of the decision.
    pub(super) request: RoutedRequest,
    /// How many tokens all its answers are expected to have together, and how many answers it wants.
    pub(super) all_tokens: u64,
    pub(super) answers: u32,
    pub(super) path: ClientPath,
    pub(super) at_ns: u64,
    /// How many tokens of its prompt each engine of all models probably has in its cache; empty if no engine has had
    /// any part of it.
    pub(super) cached: Vec<u32>,
    /// For each of these engines, how many bytes of its prompt are in blocks that an earlier prompt there also had; empty like
    /// `cached`.
    pub(super) compared_bytes: Vec<usize>,
    /// The hash of its user.
    pub(super) user: u64,
    /// Whether the choice weighed the prompt in the cache of an engine of the model against the load there.
    pub(super) weighs_cache: bool,
    /// The index of its class among the known lengths.
    pub(super) class: usize,
    /// When the engine must be done, by the gateway's clock; `None` without a limit.
    pub(super) until_ns: Option<u64>,
}

/// The policy that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// The index of its alias in the configuration.
    pub alias: usize,
    /// The policy's kind.
    pub policy: &'static str,
    /// The policy that only watches, if there is one.
    pub shadow: Option<Shadow>,
}

/// The decision of the shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadow {
    /// The policy's kind.
    pub policy: &'static str,
    /// The model that it would have chosen, if any.
    pub model: Option<usize>,
}

impl Route {
    /// Returns the estimated number of tokens in the prompt.
    #[must_use]
    pub const fn prompt_tokens(&self) -> u32 {
        self.request.prompt_tokens
    }

    /// Returns how many tokens the request is expected to use, prompt and all answers.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.request.prompt_tokens as u64 + self.all_tokens
    }

    /// Returns how many tokens each answer is expected to have. An engine works on all answers to a request at once, so
    /// this number says how long they take.
    #[must_use]
    pub const fn answer_tokens(&self) -> u64 {
        self.request.expected_tokens as u64
    }

    /// Returns how long the whole answer is predicted to take; `None` for an unknown engine.
    #[must_use]
    pub fn predicted(&self) -> Option<Duration> {
        let ns = self.choice.map(|choice| choice.predicted_ns).filter(|ns| *ns > 0);
        ns.map(Duration::from_nanos)
    }

    /// Returns how many tokens of all answers an engine has probably made within this time: with half of the predicted time, half of the
    /// expected tokens, and never more than all. 0 for an unknown engine.
    #[must_use]
    pub fn made_within(&self, elapsed: Duration) -> u64 {
        let part = self.predicted().map_or(0.0, |predicted| elapsed.div_duration_f64(predicted).min(1.0));
        (part * self.all_tokens as f64).round() as u64
    }

    /// Whether the choice weighed the prompt in the cache of an engine of the model against the load there, or is of this engine alone.
    #[must_use]
    pub fn weighs_cache(&self) -> bool {
        self.weighs_cache || self.trial().is_some()
    }

    /// Whether it is predicted to miss its limits, and is not there to show that this is wrong.
    #[must_use]
    pub fn is_late(&self) -> bool {
        self.choice.is_some_and(|choice| !choice.in_time && choice.reason != Reason::Trial)
    }

    /// Returns the trial of the model, if the request is one.
    pub(super) fn trial(&self) -> Option<SpeedTrial> {
        let (slo, at_ns, return_ns) = (self.request.slo, self.at_ns, self.path.return_ns());
        let is_trial = self.choice.is_some_and(|choice| choice.reason == Reason::Trial);
        is_trial.then_some(SpeedTrial { model: self.model, slo, at_ns, return_ns })
    }
}
