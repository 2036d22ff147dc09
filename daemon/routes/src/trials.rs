//! Single requests to a model that would get none, because its engines were once too slow.
//!
//! An alias's policy chooses by predictions. A model that is predicted late gets no request with a deadline. If all requests have one and
//! none names the model, nothing shows that its engines have become faster. Policies themselves do not try models: they are functions of
//! what is known, and the simulations in which they are compared, tuned and trained have engines whose speed does not change. So the
//! gateway tries them.

use sched::route::{Cost, Curve, ModelChoice, Prediction, Reason, Replica, RoutedRequest, Slo, State};

/// After this time without a sample of its speed, an engine may have become faster unnoticed; also the first pause between two trials of a
/// model.
const SILENCE_NS: u64 = 30_000_000_000;

/// The longest pause between two trials of a model that stays too slow: each of them costs a request its deadline.
const LONGEST_PAUSE_NS: u64 = 3_600_000_000_000;

/// When models may be tried.
#[derive(Debug)]
pub(super) struct SpeedTrials {
    models: Vec<ModelTrials>,
    /// When the last sample of each engine came, model by model.
    heard_ns: Vec<u64>,
    /// The factor by which an answer has to be faster than its limits, as for the rule.
    margin: f64,
}

#[derive(Clone, Copy, Debug)]
struct ModelTrials {
    /// The worth of an answer of the model.
    worth: f32,
    /// When its last trial began.
    tried_ns: u64,
    /// The pause from then to the next one; 0 if the last one was in time.
    pause_ns: u64,
}

/// A trial of a model by a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpeedTrial {
    pub model: usize,
    /// The limits of the request from the time of the decision, which was `at_ns`.
    pub slo: Slo,
    pub at_ns: u64,
    /// How long a token needs on its way back.
    pub return_ns: u64,
}

impl SpeedTrials {
    /// Returns trials of models with these worths, whose `engines` in total were last heard of at `now_ns`.
    pub fn new(worths: &[f32], engines: usize, margin: f64, now_ns: u64) -> Self {
        let model = |worth: &f32| ModelTrials { worth: *worth, tried_ns: now_ns, pause_ns: SILENCE_NS };
        Self { models: worths.iter().map(model).collect(), heard_ns: vec![now_ns; engines], margin }
    }

    /// Notes a sample of the speed of the engine `at` among those of all models.
    pub fn heard(&mut self, at: usize, now_ns: u64) {
        if let Some(heard_ns) = self.heard_ns.get_mut(at) {
            *heard_ns = now_ns;
        }
    }

    /// Begins a trial in place of a policy's choice, if one is due, and returns the engine. The engine is idle and long unheard of. Its model
    /// is one of `open`, has no engine that is predicted in time, and is better than the chosen model; if the chosen model is late as well,
    /// it may be any other. `refuses_late` says whether the class of the request refuses requests that are late.
    pub fn begin(
        &mut self,
        (choice, request): (&ModelChoice, &RoutedRequest),
        (open, refuses_late): (&[usize], bool),
        state: &State<'_>,
        now_ns: u64,
    ) -> Option<(usize, usize)> {
        // These pass over a model for other reasons than its predicted time.
        if matches!(choice.reason, Reason::Turn | Reason::LeastLoaded | Reason::Overload) {
            return None;
        }
        let is_idle = |replica: &Replica| {
            let load = &replica.load;
            load.in_flight() == 0 && !load.is_closed() && !load.is_stale(now_ns)
        };
        // It is refused if it is late at a busy engine, and a trial would serve it.
        if refuses_late && !choice.in_time && !state.replicas.get(choice.replica).is_some_and(is_idle) {
            return None;
        }
        let worth = self.models.get(choice.model)?.worth;
        let engines = || state.replicas.iter().enumerate().filter(|(_, replica)| replica.usable);
        let is_due = |(at, replica): &(usize, &Replica)| {
            let Some(model) = self.models.get(replica.model) else { return false };
            let heard_ns = self.heard_ns.get(*at).copied().unwrap_or(now_ns);
            (model.worth > worth || !choice.in_time && replica.model != choice.model)
                && open.contains(&replica.model)
                && is_idle(replica)
                && now_ns.saturating_sub(heard_ns) >= SILENCE_NS.min(model.pause_ns)
                && now_ns.saturating_sub(model.tried_ns) >= model.pause_ns
        };
        let in_time = |at: usize, replica: &Replica| {
            let prediction = Prediction::of(request, replica, state.cached_tokens(at), &state.path);
            self.is_in_time(&prediction, &request.slo)
        };
        let is_passed_over = |model: usize| {
            let mut of_model = engines().filter(|(_, replica)| replica.model == model);
            of_model.all(|(at, replica)| !in_time(at, replica))
        };
        // On a path that takes all the time, no engine is fast enough.
        let may_succeed = |(at, replica): &(usize, &Replica)| {
            in_time(*at, &Replica { curve: Curve::new(Cost::default()), ..**replica })
        };
        let due = engines().filter(is_due).filter(|(_, replica)| is_passed_over(replica.model)).filter(may_succeed);
        let rank = |(at, replica): &(usize, &Replica)| {
            let worth = self.models.get(replica.model).map_or(0.0, |model| model.worth);
            // Of a model's engines, the one that was not heard of for the longest time.
            (worth, now_ns.saturating_sub(self.heard_ns.get(*at).copied().unwrap_or(now_ns)))
        };
        let (at, model) = due
            .reduce(|best, next| if rank(&next) > rank(&best) { next } else { best })
            .map(|(at, replica)| (at, replica.model))?;
        self.heard(at, now_ns);
        let tried = self.models.get_mut(model)?;
        // A trial is late until its answer is complete: its client may leave.
        tried.pause_ns = tried.pause_ns.saturating_mul(2).clamp(SILENCE_NS, LONGEST_PAUSE_NS);
        tried.tried_ns = now_ns;
        Some((model, at))
    }

    /// Notes the complete answer to a trial, which had `tokens` and ended at `now_ns`. If it was fast enough to be chosen, the next trial
    /// may follow at once, until the prediction has learned from them.
    pub fn answered(&mut self, trial: &SpeedTrial, first_ns: Option<u64>, tokens: u64, now_ns: u64) {
        let since = |ns: u64| ns.saturating_sub(trial.at_ns).saturating_add(trial.return_ns);
        let finish_ns = since(now_ns);
        let first_ns = first_ns.map_or(finish_ns, since);
        let per_token_ns = (finish_ns - first_ns.min(finish_ns)).checked_div(tokens.saturating_sub(1)).unwrap_or(0);
        let is_in_time = self.is_in_time(&Prediction { first_ns, per_token_ns, finish_ns, is_known: true }, &trial.slo);
        if let Some(model) = self.models.get_mut(trial.model).filter(|_| is_in_time) {
            model.pause_ns = 0;
        }
    }

    fn is_in_time(&self, prediction: &Prediction, slo: &Slo) -> bool {
        prediction.tightness(slo) * self.margin <= 1.0
    }
}
