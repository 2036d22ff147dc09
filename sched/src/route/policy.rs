//! Policies: each is a rule that returns a replica, or the cause why it cannot.

use super::{
    choice::{FallbackCause, ModelChoice, Reason},
    considerate::Watch,
    features::{self, Features},
    mlp::{Activations, Mlp, Tensor},
    request::{Model, RoutedRequest, Slo},
    state::State,
    survey::{self, Candidate, Survey},
};

/// How a model is chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum RoutingPolicy {
    /// Always this model, on the replica predicted to be earliest. The baselines of the paper §5.1.2.
    Fixed(usize),
    /// One replica after the other, whatever its model. Replicas that refuse requests are left out while any takes them.
    RoundRobin,
    /// The replica that takes requests and has the fewest; if no replica takes any, the one with the fewest. Among equals, the model with
    /// the largest reward wins.
    LeastLoaded,
    /// The best model that is predicted in time even if its answer took `margin` times as long. If there is none, the
    /// earliest model, provided it is in time; otherwise the cheapest, since a late request should not make others late.
    Rule {
        /// At least 1; [`MARGIN`](super::MARGIN) is good while the curves are right. Smaller values and NaN count as 1.
        margin: f64,
    },
    /// The replica whose answer is worth most, times its chance to be in time, less the chances lost by the requests that
    /// engines [work on](super::State::admitted). Its predictions also count the prompts that interrupt an answer; the
    /// paper has no such policy.
    Considerate {
        /// The factor by which an answer may be earlier or later than predicted. At least 1; smaller values and NaN count
        /// as 1. The paper's simulated workloads scored best with [`DOUBT`].
        doubt: f64,
    },
    /// Limits by model and class, tuned for the workload.
    Thresholds(Thresholds),
    /// A value for each model from a network trained by double deep Q-learning.
    Dqn(Dqn),
}

/// A limit for each model and class, which the rate of requests lowers: of the models below their limits, that with the
/// largest reward answers. If none is below, [the rule's](RoutingPolicy::Rule) fallback applies.
#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds {
    /// The measure that the limits apply to.
    pub measure: Measure,
    /// How many classes there are. Requests of other classes use the limits of the last one.
    pub classes: usize,
    /// By model, then by class.
    pub limits: Vec<f64>,
    /// By model: by how much a pressure of 1 lowers the limits. Pressure is the rate of requests as a fraction of the rate
    /// that the cheapest model can serve in time.
    pub slopes: Vec<f64>,
    /// Above this pressure the cheapest model answers everything: a hard rule, since a slope learned at usual rates is too
    /// weak at extreme ones.
    pub overload: f64,
}

/// The quantity that a threshold is compared with. Either is 1 if an answer is just in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// [`Prediction::tightness`](super::Prediction::tightness), which accounts for the path and for tokens.
    Predicted,
    /// The batch, relative to the batch at which tokens come just fast enough.
    Fill,
}

/// A network that values models, and the setting that it was made for.
#[derive(Clone, Debug, PartialEq)]
pub struct Dqn {
    /// Takes the features, returns a value for each model.
    pub network: Mlp,
    /// What the inputs mean.
    pub features: Features,
    /// How many classes there were.
    pub classes: usize,
    /// [`fingerprint`](features::fingerprint) of the models, classes and features that it was trained with. The network is
    /// not used with others.
    pub fingerprint: u64,
}

/// A policy in use, with the state that it needs besides its rules.
#[derive(Clone, Debug)]
pub(super) struct PolicyInUse {
    policy: RoutingPolicy,
    turn: usize,
    watch: Watch,
    input: Vec<f32>,
    activations: Activations,
    /// Whether the network fits; computed once, since models do not change.
    fits: bool,
}

/// The default doubt for [`RoutingPolicy::Considerate`].
pub const DOUBT: f64 = 1.25;

/// Higher pressures count as this one.
const PRESSURE_MOST: f64 = 4.0;

impl Thresholds {
    /// Returns the same limit for all models and classes, without slopes, and an overload of 0.7: a
    /// [rule](RoutingPolicy::Rule) with a margin of 1 / `limit` that gives way under overload. Tuning begins here.
    #[must_use]
    pub fn uniform(measure: Measure, models: usize, classes: usize, limit: f64) -> Self {
        let classes = classes.max(1);
        Self { measure, classes, limits: vec![limit; models * classes], slopes: vec![0.0; models], overload: 0.7 }
    }

    /// Returns all numbers that can be tuned: limits, slopes, overload.
    #[must_use]
    pub fn parameters(&self) -> Vec<f64> {
        self.limits.iter().chain(&self.slopes).copied().chain([self.overload]).collect()
    }

    /// Returns these thresholds with [other numbers](Thresholds::parameters). Missing numbers keep their values.
    #[must_use]
    pub fn with_parameters(mut self, parameters: &[f64]) -> Self {
        let all = self.limits.iter_mut().chain(&mut self.slopes).chain([&mut self.overload]);
        all.zip(parameters).for_each(|(to, number)| *to = *number);
        self
    }

    fn decide(&self, survey: &Survey<'_>) -> Result<ModelChoice, FallbackCause> {
        let models = survey.models.len();
        if self.classes == 0 || self.slopes.len() != models || self.limits.len() != models.saturating_mul(self.classes)
        {
            return Err(FallbackCause::Fingerprint);
        }
        if self.limits.iter().chain(&self.slopes).chain([&self.overload]).any(|number| !number.is_finite()) {
            return Err(FallbackCause::NotFinite);
        }
        let pressure = survey.pressure().min(PRESSURE_MOST);
        if pressure > self.overload {
            return survey
                .cheapest()
                .map(|cheapest| cheapest.choice(Reason::Overload))
                .ok_or(FallbackCause::Unavailable);
        }
        let class = survey.request.class.min(self.classes - 1);
        let below = |candidate: &Candidate| {
            let limit = self.limits.get(candidate.model * self.classes + class).copied().unwrap_or(0.0);
            let slope = self.slopes.get(candidate.model).copied().unwrap_or(0.0);
            let measured = match self.measure {
                Measure::Predicted => candidate.tightness,
                Measure::Fill => survey.fill(candidate),
            };
            measured <= limit - slope * pressure
        };
        let best = survey.best(below).map(|best| best.choice(Reason::Threshold));
        best.or_else(|| nearest(survey)).ok_or(FallbackCause::Unavailable)
    }
}

impl Dqn {
    /// Creates a policy for these models; the network must have matching numbers of inputs and outputs.
    #[must_use]
    pub fn new(network: Mlp, features: Features, models: &[Model], classes: usize) -> Self {
        Self { network, features, classes, fingerprint: features::fingerprint(models, classes, features) }
    }

    /// Returns the policy of [these tensors](Mlp::tensors) and this metadata, or `None` if a part is missing or wrong: the
    /// name of its `features`, its number of `classes`, and its `fingerprint` in hexadecimal digits. Whether it fits the current models is checked when it is [used](super::Router::new).
    #[must_use]
    pub fn from_parts<'a>(
        tensors: &[Tensor<'_>],
        metadata: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Option<Self> {
        let (mut features, mut classes, mut fingerprint) = (None, None, None);
        for (name, value) in metadata {
            match name {
                "features" => features = Features::from_name(value),
                "classes" => classes = value.parse().ok().filter(|classes| (1..=1024).contains(classes)),
                "fingerprint" => fingerprint = u64::from_str_radix(value, 16).ok(),
                _ => {}
            }
        }
        let network = Mlp::from_tensors(tensors)?;
        Some(Self { network, features: features?, classes: classes?, fingerprint: fingerprint? })
    }

    fn fits(&self, models: &[Model]) -> bool {
        self.network.inputs() == self.features.len(models.len(), self.classes)
            && self.network.outputs() == models.len()
            && self.fingerprint == features::fingerprint(models, self.classes, self.features)
    }
}

impl PolicyInUse {
    pub fn new(policy: RoutingPolicy, models: &[Model]) -> Self {
        let fits = !matches!(&policy, RoutingPolicy::Dqn(dqn) if !dqn.fits(models));
        Self { policy, turn: 0, watch: Watch::default(), input: Vec::new(), activations: Activations::default(), fits }
    }

    /// Whether the policy uses the requests that engines work on.
    pub const fn looks_at_admitted(&self) -> bool {
        matches!(self.policy, RoutingPolicy::Considerate { .. })
    }

    /// Notes that an engine begins to work on a request, even if the guard or a fallback chose the engine.
    pub fn began(&mut self, at: usize, request: &RoutedRequest, state: &State<'_>, now_ns: u64) {
        if self.looks_at_admitted() {
            self.watch.began(at, request, state, now_ns);
        }
    }

    /// Returns the candidate as the policy predicts it.
    pub fn predict(&self, candidate: Candidate, slo: &Slo) -> Candidate {
        if self.looks_at_admitted() { self.watch.predict(candidate, slo) } else { candidate }
    }

    /// Chooses a replica, or returns the cause why it cannot. `stale` says that the state is too old for policies that
    /// learn from it.
    pub fn decide(&mut self, survey: &Survey<'_>, stale: bool) -> Result<ModelChoice, FallbackCause> {
        if self.looks_at_admitted() {
            self.watch.look(survey);
        }
        match &self.policy {
            RoutingPolicy::RoundRobin => self.next(survey),
            RoutingPolicy::LeastLoaded if stale => Err(FallbackCause::Stale),
            RoutingPolicy::LeastLoaded => least_loaded(survey),
            _ if survey.candidates.len() == 1 => {
                survey.earliest().map(|only| only.choice(Reason::Only)).ok_or(FallbackCause::Unavailable)
            }
            RoutingPolicy::Fixed(model) => {
                survey.of(*model).map(|fixed| fixed.choice(Reason::Fixed)).ok_or(FallbackCause::Unavailable)
            }
            RoutingPolicy::Rule { margin } => rule(survey, *margin).ok_or(FallbackCause::Unavailable),
            RoutingPolicy::Considerate { doubt } => self.watch.choose(survey, *doubt).ok_or(FallbackCause::Unavailable),
            RoutingPolicy::Thresholds(_) | RoutingPolicy::Dqn(_) if stale => Err(FallbackCause::Stale),
            RoutingPolicy::Thresholds(thresholds) => thresholds.decide(survey),
            RoutingPolicy::Dqn(_) if !self.fits => Err(FallbackCause::Fingerprint),
            RoutingPolicy::Dqn(dqn) => {
                dqn.features.fill(survey, dqn.classes, &mut self.input);
                highest(dqn.network.forward(&self.input, &mut self.activations), survey)
            }
        }
    }

    fn next(&mut self, survey: &Survey<'_>) -> Result<ModelChoice, FallbackCause> {
        let is_closed = |candidate: &Candidate| survey.replica(candidate).is_some_and(|of| of.load.is_closed());
        let are_closed = survey::open(survey).all(|candidate| is_closed(&candidate));
        let turns = || survey::open(survey).filter(|candidate| are_closed || !is_closed(candidate));
        let turn = self.turn.checked_rem(turns().count()).ok_or(FallbackCause::Unavailable)?;
        self.turn = turn + 1;
        turns().nth(turn).map(|candidate| candidate.choice(Reason::Turn)).ok_or(FallbackCause::Unavailable)
    }
}

/// Follows [`RoutingPolicy::Rule`].
pub(super) fn rule(survey: &Survey<'_>, margin: f64) -> Option<ModelChoice> {
    // `max` turns a margin of NaN into 1 as well.
    let margin = margin.max(1.0);
    let best = survey.best(|candidate| candidate.tightness * margin <= 1.0);
    best.map(|best| best.choice(Reason::InTime)).or_else(|| nearest(survey))
}

/// Returns the choice if no model is good enough, as [`RoutingPolicy::Rule`] says.
fn nearest(survey: &Survey<'_>) -> Option<ModelChoice> {
    let in_time = survey.earliest().filter(|earliest| earliest.tightness <= 1.0);
    in_time.or_else(|| survey.cheapest()).map(|nearest| nearest.choice(Reason::NoneInTime))
}

fn least_loaded(survey: &Survey<'_>) -> Result<ModelChoice, FallbackCause> {
    let load = |candidate: &Candidate| {
        let load = survey.replica(candidate).map(|replica| &replica.load);
        load.map_or((true, u32::MAX), |load| (load.is_closed(), load.in_flight()))
    };
    let least = survey::open(survey).reduce(|best, candidate| {
        let lighter = load(&candidate) < load(&best);
        let better = load(&candidate) == load(&best) && candidate.reward > best.reward;
        if lighter || better { candidate } else { best }
    });
    least.map(|least| least.choice(Reason::LeastLoaded)).ok_or(FallbackCause::Unavailable)
}

/// Returns the candidate with the highest value. Among equals, the larger reward wins.
fn highest(values: &[f32], survey: &Survey<'_>) -> Result<ModelChoice, FallbackCause> {
    if values.iter().any(|value| !value.is_finite()) {
        return Err(FallbackCause::NotFinite);
    }
    let value = |candidate: &Candidate| values.get(candidate.model).copied().unwrap_or(f32::NEG_INFINITY);
    let better = |one: &Candidate, other: &Candidate| (value(one), one.reward) > (value(other), other.reward);
    let best =
        survey.candidates.iter().reduce(|best, candidate| if better(candidate, best) { candidate } else { best });
    best.map(|best| best.choice(Reason::Value)).ok_or(FallbackCause::Unavailable)
}
