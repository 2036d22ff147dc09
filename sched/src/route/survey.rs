//! What each model would do with a request: the common basis of all policies.

use super::{
    choice::{ModelChoice, Reason},
    request::{Model, RoutedRequest},
    state::{Prediction, Replica, State},
};

/// The best replica of a model, and its prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub model: usize,
    pub replica: usize,
    pub prediction: Prediction,
    /// [`Prediction::tightness`]: at most 1 is in time.
    pub tightness: f64,
    /// The reward of an answer in time.
    pub reward: f32,
}

impl Candidate {
    pub fn choice(&self, reason: Reason) -> ModelChoice {
        ModelChoice {
            model: self.model,
            replica: self.replica,
            predicted_ns: if self.prediction.is_known { self.prediction.finish_ns } else { 0 },
            in_time: self.tightness <= 1.0,
            reason,
        }
    }
}

/// The input of a decision, with one candidate for each model that is available, allowed and usable, in the order of
/// models.
#[derive(Clone, Copy)]
pub(super) struct Survey<'a> {
    pub models: &'a [Model],
    pub request: &'a RoutedRequest,
    pub state: &'a State<'a>,
    /// The rate of requests, smoothed.
    pub requests_per_sec: f64,
    pub now_ns: u64,
    pub candidates: &'a [Candidate],
}

/// Returns whether this request may go to the replica.
pub(super) fn is_open(models: &[Model], request: &RoutedRequest, replica: &Replica) -> bool {
    replica.usable && replica.model < models.len() && request.allowed.contains(replica.model)
}

/// Surveys the replicas that may answer `request`: the candidate of a model is its replica with the lowest predicted
/// tightness; among equals, the replica with the fewest requests, then the first. Replaces the contents of
/// `candidates` and reuses its allocation.
pub(super) fn survey<'a>(
    candidates: &'a mut Vec<Candidate>,
    models: &'a [Model],
    request: &'a RoutedRequest,
    state: &'a State<'a>,
    (requests_per_sec, now_ns): (f64, u64),
) -> Survey<'a> {
    candidates.clear();
    for (at, replica) in state.replicas.iter().enumerate() {
        if !is_open(models, request, replica) {
            continue;
        }
        let candidate = candidate(models, request, state, at, replica);
        let in_flight = |at: usize| state.replicas.get(at).map_or(u32::MAX, |replica| replica.load.in_flight());
        // Engines with unknown costs all have equal predictions, and the first engine must not get all requests.
        let is_better = |other: &Candidate| {
            is_before(&candidate, other)
                || (!is_before(other, &candidate) && in_flight(candidate.replica) < in_flight(other.replica))
        };
        match candidates.iter_mut().find(|other| other.model == replica.model) {
            Some(other) if is_better(other) => *other = candidate,
            Some(_) => {}
            None => candidates.push(candidate),
        }
    }
    candidates.sort_unstable_by_key(|candidate| candidate.model);
    Survey { models, request, state, requests_per_sec, now_ns, candidates }
}

/// Returns every replica that may answer, each as a candidate of its own.
pub(super) fn open<'a>(survey: &'a Survey<'a>) -> impl Iterator<Item = Candidate> {
    let replicas = survey.state.replicas.iter().enumerate();
    replicas
        .filter(|(_, replica)| is_open(survey.models, survey.request, replica))
        .map(|(at, replica)| candidate(survey.models, survey.request, survey.state, at, replica))
}

fn candidate(models: &[Model], request: &RoutedRequest, state: &State<'_>, at: usize, replica: &Replica) -> Candidate {
    let prediction = Prediction::of(request, replica, state.cached_tokens(at), &state.path);
    let reward = models.get(replica.model).map_or(0.0, |model| model.reward(request.class));
    let tightness = prediction.tightness(&request.slo);
    Candidate { model: replica.model, replica: at, prediction, tightness, reward }
}

/// Returns whether an answer is earlier relative to its limits, or earlier in time if the limits give a tie.
fn is_before(one: &Candidate, other: &Candidate) -> bool {
    (one.tightness, one.prediction.finish_ns) < (other.tightness, other.prediction.finish_ns)
}

/// Returns the prediction for one engine, whether or not it may be chosen; `None` if it does not exist.
pub(super) fn at(models: &[Model], request: &RoutedRequest, state: &State<'_>, at: usize) -> Option<Candidate> {
    state.replicas.get(at).map(|replica| candidate(models, request, state, at, replica))
}

impl Survey<'_> {
    /// Returns the candidate of a model.
    pub fn of(&self, model: usize) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.model == model)
    }

    /// Returns the candidate with the largest reward that `suits` accepts. Among equals, the candidate that is earlier
    /// relative to its limits wins.
    pub fn best(&self, suits: impl Fn(&Candidate) -> bool) -> Option<&Candidate> {
        let better = |one: &Candidate, other: &Candidate| {
            one.reward > other.reward || (one.reward == other.reward && is_before(one, other))
        };
        self.candidates
            .iter()
            .filter(|candidate| suits(candidate))
            .reduce(|best, candidate| if better(candidate, best) { candidate } else { best })
    }

    /// Returns the candidate with the lowest predicted tightness.
    pub fn earliest(&self) -> Option<&Candidate> {
        self.candidates.iter().reduce(|best, candidate| if is_before(candidate, best) { candidate } else { best })
    }

    /// Returns the candidate of the model whose sequences cost a GPU least: the one to use if no other is fast enough. Engines that take
    /// requests come first.
    pub fn cheapest(&self) -> Option<&Candidate> {
        let cost = |candidate: &Candidate| {
            let replica = self.replica(candidate);
            replica.map_or((true, f64::INFINITY), |of| (of.load.is_closed(), of.curve.cost().gpu_per_sequence_ns))
        };
        self.candidates.iter().reduce(|best, candidate| if cost(candidate) < cost(best) { candidate } else { best })
    }

    pub fn replica(&self, candidate: &Candidate) -> Option<&Replica> {
        self.state.replicas.get(candidate.replica)
    }

    /// Returns how long each token of this request may take on average.
    pub fn per_token_limit_ns(&self) -> f64 {
        let slo = &self.request.slo;
        let left_ns = slo.budget_ns.saturating_sub(self.state.path.return_ns());
        let budget_ns = left_ns as f64 / f64::from(self.request.tokens());
        budget_ns.min(slo.per_token_ns as f64)
    }

    /// Returns which fraction of the largest batch that keeps the limit would be in use with this request; more than 1 is
    /// too many. An engine that refuses requests has no room for any: the fraction is infinite.
    pub fn fill(&self, candidate: &Candidate) -> f64 {
        let Some(replica) = self.replica(candidate).filter(|of| !of.load.is_closed()) else { return f64::INFINITY };
        let within = replica.curve.batch_within(self.per_token_limit_ns(), replica.load.others_utilisation);
        let room = within.min(f64::from(replica.most_running.max(1)));
        let batch = f64::from(replica.load.in_flight()) + 1.0;
        if room > 0.0 { batch / room } else { f64::INFINITY }
    }

    /// Returns the rate of requests as a fraction of the rate at which the cheapest model could answer requests like this
    /// one within the limit if it had all GPUs to itself. It is infinite if the cheapest model can serve none in time.
    pub fn pressure(&self) -> f64 {
        let limit_ns = self.per_token_limit_ns();
        let Some(cheapest) = self.cheapest() else { return f64::INFINITY };
        let capacity_per_sec: f64 = (self.state.replicas.iter())
            .filter(|replica| replica.model == cheapest.model && is_open(self.models, self.request, replica))
            .map(|replica| {
                let curve = &replica.curve;
                let batch = curve.batch_within(limit_ns, 0.0).min(f64::from(replica.most_running.max(1))).floor();
                let steps = f64::from(self.request.tokens()) / batch;
                let each_ns =
                    steps.mul_add(curve.step_ns(batch as u32, 0.0), curve.prefill_ns(self.request.prompt_tokens));
                // A batch of less than 1 serves no request in time. Costs of 0 must not give infinity.
                if batch < 1.0 { 0.0 } else { 1e9 / each_ns.max(1.0) }
            })
            .sum();
        if capacity_per_sec > 0.0 { self.requests_per_sec / capacity_per_sec } else { f64::INFINITY }
    }
}
