//! The router: a policy, the guard over it, perhaps a second policy that only watches, and counts of how it went.

use super::choice::{FallbackCause, ModelChoice, Reason};
use super::policy::{self, RoutingPolicy, Seat};
use super::rate::Rate;
use super::request::{Model, RoutedRequest};
use super::state::State;
use super::survey::{Candidate, Survey, survey};

/// Chooses who answers each request.
///
/// **Invariant:** a router that is guarded never chooses a model that is predicted late while another one that may answer
/// is predicted in time. [`RoutingPolicy::Considerate`] makes better predictions than the guard and is not guarded. A
/// wrong curve misleads the guard like any rule.
///
/// Whenever the policy cannot decide, the [rule](RoutingPolicy::Rule) does, and the cause is counted. The same calls
/// give the same choices.
#[derive(Clone, Debug)]
pub struct Router {
    models: Vec<Model>,
    seat: Seat,
    shadow: Option<Seat>,
    last_shadow: Option<ModelChoice>,
    guarded: bool,
    margin: f64,
    stale_ns: u64,
    rate: Rate,
    candidates: Vec<Candidate>,
    counters: RouterCounters,
}

/// What became of a request that was routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// What the router had said.
    pub choice: ModelChoice,
    /// When the last token was with the client, or handed to the transport where nobody says more, from the time of the
    /// choice.
    pub actual_ns: u64,
    /// Whether all limits were kept.
    pub met: bool,
}

/// Counts since the router was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterCounters {
    /// Requests with a choice.
    pub chosen: u64,
    /// Requests that no usable replica was allowed to answer.
    pub refused: u64,
    /// Choices that the guard replaced.
    pub guarded: u64,
    /// Choices that the rule made instead of the policy, in the order of [`FallbackCause::ALL`].
    pub fallbacks: [u64; FallbackCause::ALL.len()],
    /// Choices of a model that the shadow would have chosen as well.
    pub shadow_same: u64,
    /// Choices of a model for which the shadow would have taken another one, or could not decide.
    pub shadow_other: u64,
    /// Outcomes, predicted in time, that were.
    pub met_as_predicted: u64,
    /// Outcomes, predicted in time, that were late.
    pub late_unexpectedly: u64,
    /// Outcomes, predicted late, that were in time.
    pub met_unexpectedly: u64,
    /// Outcomes, predicted late, that were.
    pub late_as_predicted: u64,
    /// The sum of the differences between predicted and actual times, whatever their sign.
    pub error_ns: u64,
}

/// Defaults: a tenth more than predicted is allowed for, and a second makes a load unbelievable.
const MARGIN: f64 = 1.1;
const STALE_NS: u64 = 1_000_000_000;

impl Router {
    /// Creates a router without a shadow, guarded unless its policy is [`RoutingPolicy::Considerate`]. Its rule for
    /// fallbacks has a margin of 1.1, and loads older than a second are stale.
    #[must_use]
    pub fn new(models: Vec<Model>, policy: RoutingPolicy) -> Self {
        let seat = Seat::new(policy, &models);
        Self {
            models,
            guarded: !seat.looks_at_admitted(),
            seat,
            shadow: None,
            last_shadow: None,
            margin: MARGIN,
            stale_ns: STALE_NS,
            rate: Rate::default(),
            candidates: Vec::new(),
            counters: RouterCounters::default(),
        }
    }

    /// Lets the policy choose models that are predicted late, for comparisons.
    #[must_use]
    pub fn unguarded(mut self) -> Self {
        self.guarded = false;
        self
    }

    /// Sets the margin of the rule that decides in place of the policy; what is below 1 or no number counts as 1.
    #[must_use]
    pub fn with_margin(mut self, margin: f64) -> Self {
        self.margin = margin;
        self
    }

    /// Sets how old a load may be before only the rule uses it.
    #[must_use]
    pub fn with_stale_after(mut self, stale_ns: u64) -> Self {
        self.stale_ns = stale_ns;
        self
    }

    /// Adds a policy that is asked about each request, and counted, but never followed. The guard leaves alone what it says.
    #[must_use]
    pub fn with_shadow(mut self, policy: RoutingPolicy) -> Self {
        self.shadow = Some(Seat::new(policy, &self.models));
        self
    }

    /// Replaces the policy; counters and the rate stay.
    pub fn set_policy(&mut self, policy: RoutingPolicy) {
        self.seat = Seat::new(policy, &self.models);
    }

    /// Replaces the policy that only watches, or does without.
    pub fn set_shadow(&mut self, policy: Option<RoutingPolicy>) {
        self.shadow = policy.map(|policy| Seat::new(policy, &self.models));
        self.last_shadow = None;
    }

    /// Returns the models, by index.
    #[must_use]
    pub fn models(&self) -> &[Model] {
        &self.models
    }

    /// Tells whether the policy, or its shadow, depends on [`State::admitted`].
    #[must_use]
    pub fn looks_at_admitted(&self) -> bool {
        self.seat.looks_at_admitted() || self.shadow.as_ref().is_some_and(Seat::looks_at_admitted)
    }

    /// Returns what happened so far.
    #[must_use]
    pub const fn counters(&self) -> &RouterCounters {
        &self.counters
    }

    /// Returns what the shadow would have done about the last request; nothing if there is none or it could not decide.
    #[must_use]
    pub const fn last_shadow(&self) -> Option<ModelChoice> {
        self.last_shadow
    }

    /// Returns the smoothed rate of requests per second: 1 until more is known.
    #[must_use]
    pub fn requests_per_sec(&self) -> f64 {
        self.rate.per_sec()
    }

    /// Chooses who answers a request that came at `now_ns`. Returns nothing only if no usable replica belongs to a model
    /// that may answer it. Allocates nothing once it has seen as many models and the policy's network.
    pub fn route(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
        self.rate.arrived(now_ns);
        let survey = survey(&mut self.candidates, &self.models, request, state, (self.rate.per_sec(), now_ns));
        if survey.candidates.is_empty() {
            self.counters.refused += 1;
            self.last_shadow = None;
            return None;
        }
        let stale = (state.replicas.iter())
            .any(|replica| replica.usable && now_ns.saturating_sub(replica.load.updated_ns) > self.stale_ns);
        let mut choice = match self.seat.decide(&survey, stale) {
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
        self.seat.given(&choice, &survey);
        if let Some(shadow) = &mut self.shadow {
            self.last_shadow = shadow.decide(&survey, stale).ok();
            shadow.given(&choice, &survey);
            match self.last_shadow {
                Some(other) if other.model == choice.model => self.counters.shadow_same += 1,
                _ => self.counters.shadow_other += 1,
            }
        }
        Some(choice)
    }

    /// Counts an outcome against its prediction. Curves are taught by their owner, the state's.
    pub fn observe(&mut self, outcome: &Observed) {
        let counters = &mut self.counters;
        let count = match (outcome.choice.in_time, outcome.met) {
            (true, true) => &mut counters.met_as_predicted,
            (true, false) => &mut counters.late_unexpectedly,
            (false, true) => &mut counters.met_unexpectedly,
            (false, false) => &mut counters.late_as_predicted,
        };
        *count += 1;
        let error_ns = outcome.actual_ns.abs_diff(outcome.choice.predicted_ns);
        counters.error_ns = counters.error_ns.saturating_add(error_ns);
    }
}

/// Returns what is to be done instead of a choice that is predicted late, if anything is predicted in time.
fn guard(survey: &Survey<'_>, choice: ModelChoice, margin: f64) -> Option<ModelChoice> {
    if choice.in_time {
        return None;
    }
    let instead = policy::rule(survey, margin).filter(|choice| choice.in_time);
    instead.map(|instead| ModelChoice { reason: Reason::Guard, ..instead })
}

#[cfg(test)]
mod tests;
