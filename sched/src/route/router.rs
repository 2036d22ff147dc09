//! The router: a policy, the guard over it, and counters of its choices.

use super::{
    choice::{FallbackCause, ModelChoice, Reason},
    policy::{self, PolicyInUse, RoutingPolicy},
    rate::Rate,
    request::{Model, RoutedRequest},
    state::State,
    survey::{self, Candidate, Survey, survey},
};

/// Chooses the model and replica for each request.
///
/// **Invariant:** a guarded router never chooses a model that is predicted late while another permitted model is predicted
/// in time. [`RoutingPolicy::Considerate`] makes better predictions than the guard and is not guarded. A wrong curve
/// misleads the guard like any rule.
///
/// When the policy cannot decide, the [rule](RoutingPolicy::Rule) does, and the cause is counted. The same calls give the
/// same choices.
#[derive(Clone, Debug)]
pub struct Router {
    models: Vec<Model>,
    policy: PolicyInUse,
    guarded: bool,
    margin: f64,
    rate: Rate,
    candidates: Vec<Candidate>,
    counters: RouterCounters,
}

/// Counts since the router was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterCounters {
    /// Requests with a choice.
    pub chosen: u64,
    /// Requests that no usable, permitted replica could answer.
    pub refused: u64,
    /// Choices that the guard replaced.
    pub guarded: u64,
    /// Choices that the rule made instead of the policy, in the order of [`FallbackCause::ALL`].
    pub fallbacks: [u64; FallbackCause::ALL.len()],
}

/// The default margin of a rule, in per cent: an answer may take a fifth longer than predicted. With a tenth, too many answers
/// that were predicted in time are late, because later requests join their batches.
pub const MARGIN_PERCENT: u16 = 120;

/// [`MARGIN_PERCENT`] as a factor.
pub const MARGIN: f64 = MARGIN_PERCENT as f64 / 100.0;

impl Router {
    /// Creates a router, guarded unless its policy is [`RoutingPolicy::Considerate`]. Its fallback rule has the margin [`MARGIN`].
    #[must_use]
    pub fn new(models: Vec<Model>, policy: RoutingPolicy) -> Self {
        let policy = PolicyInUse::new(policy, &models);
        Self {
            models,
            guarded: !policy.looks_at_admitted(),
            policy,
            margin: MARGIN,
            rate: Rate::default(),
            candidates: Vec::new(),
            counters: RouterCounters::default(),
        }
    }

    /// Permits the policy to choose models that are predicted late, for comparisons.
    #[must_use]
    pub fn unguarded(mut self) -> Self {
        self.guarded = false;
        self
    }

    /// Sets the margin of the rule that decides in place of the policy; values below 1 and NaN count as 1.
    #[must_use]
    pub fn with_margin(mut self, margin: f64) -> Self {
        self.margin = margin;
        self
    }

    /// Returns the models, by index.
    #[must_use]
    pub fn models(&self) -> &[Model] {
        &self.models
    }

    /// Returns whether the policy depends on [`State::admitted`].
    #[must_use]
    pub fn looks_at_admitted(&self) -> bool {
        self.policy.looks_at_admitted()
    }

    /// Returns the counts so far.
    #[must_use]
    pub const fn counters(&self) -> &RouterCounters {
        &self.counters
    }

    /// Chooses the model and replica for a request that arrived at `now_ns`. Returns `None` only if no usable replica
    /// belongs to a permitted model. Allocates nothing once it has seen as many models and run the policy's network.
    pub fn route(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
        self.rate.arrived(now_ns);
        let survey = survey(&mut self.candidates, &self.models, request, state, (self.rate.per_sec(), now_ns));
        if survey.candidates.is_empty() {
            self.counters.refused += 1;
            return None;
        }
        // The engines of other models have no part in the decision.
        let stale = (state.replicas.iter())
            .filter(|replica| survey::is_open(&self.models, request, replica))
            .any(|replica| replica.load.is_stale(now_ns));
        let mut choice = match self.policy.decide(&survey, stale) {
            Ok(choice) => choice,
            Err(cause) => {
                if let Some(count) = self.counters.fallbacks.get_mut(cause.index()) {
                    *count += 1;
                }
                ModelChoice { reason: Reason::Fallback(cause), ..policy::rule(&survey, self.margin)? }
            }
        };
        if let Some(better) = guard(&survey, choice, self.margin).filter(|_| self.guarded) {
            self.counters.guarded += 1;
            choice = better;
        }
        self.counters.chosen += 1;
        Some(choice)
    }

    /// Notes that the engine `at` begins to work on a request at `now_ns`: the chosen one, or another one. Without this call, the request
    /// costs later ones nothing but its part of [`EngineLoad`](super::EngineLoad).
    pub fn began(&mut self, at: usize, request: &RoutedRequest, state: &State<'_>, now_ns: u64) {
        self.policy.began(at, request, state, now_ns);
    }

    /// Returns the choice for a request that the engine `to` serves, `waited_ns` after [`Router::route`] chose another one for
    /// it: for example because `to` has its session in a cache, or has the only free place. The new prediction counts from the
    /// time of the choice; reason and model stay. `state` is the current state, without the request itself. If there is no
    /// engine `to`, the choice stays as it was.
    #[must_use]
    pub fn moved(
        &self,
        choice: ModelChoice,
        (to, waited_ns): (usize, u64),
        request: &RoutedRequest,
        state: &State<'_>,
    ) -> ModelChoice {
        let Some(candidate) = survey::at(&self.models, request, state, to) else { return choice };
        let mut candidate = self.policy.predict(candidate, &request.slo);
        let prediction = &mut candidate.prediction;
        prediction.first_ns = prediction.first_ns.saturating_add(waited_ns);
        prediction.finish_ns = prediction.finish_ns.saturating_add(waited_ns);
        candidate.tightness = prediction.tightness(&request.slo);
        ModelChoice { model: choice.model, ..candidate.choice(choice.reason) }
    }
}

/// Returns a replacement for a choice that is predicted late, if any model is predicted in time.
fn guard(survey: &Survey<'_>, choice: ModelChoice, margin: f64) -> Option<ModelChoice> {
    if choice.in_time {
        return None;
    }
    let instead = policy::rule(survey, margin).filter(|choice| choice.in_time);
    instead.map(|instead| ModelChoice { reason: Reason::Guard, ..instead })
}

#[cfg(test)]
mod tests;
