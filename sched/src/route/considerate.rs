//! A policy that counts what a request costs the requests that engines already work on.
//!
//! The [rule](super::RoutingPolicy::Rule) judges each request alone. On busy engines it is wrong in two ways:
//!
//! - Its predictions are too early. Waiting prompts, and prompts that arrive later, interrupt an answer; the rule counts
//!   neither.
//! - It ignores costs to others. A request lengthens the steps of its batch, its prompt stops the batch, and it takes time
//!   from other engines on the same processor.
//!
//! This policy computes a worth for each engine: the quality of its answer, times the chance that the answer is in time,
//! less the chances that admitted requests lose. The highest worth wins, so a large model answers as long as no other
//! request pays for it. An engine that is predicted late is chosen only if all are.

use super::{
    admitted::Commitment,
    choice::{ModelChoice, Reason},
    request::{RoutedRequest, Slo},
    state::{Replica, State},
    survey::{self, Candidate, Survey},
};

/// The policy's memory: how busy engines were recently.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    engines: Vec<Engine>,
    last_ns: u64,
}

/// An engine, recently and now.
#[derive(Clone, Copy, Debug, Default)]
struct Engine {
    /// The share of time spent reading its new prompts.
    reading: f64,
    /// The mean number of its requests, and the mean use of its processor by other engines, both at arrivals.
    in_flight: f64,
    others: f64,
    /// Time to read the waiting prompts.
    unread_ns: f64,
    /// The factor by which steps take longer than [`Prediction`](super::Prediction) says, because prompts interrupt them
    /// and a small batch grows to its usual size.
    stretch: f64,
    /// A step with the current batch, stretched.
    step_ns: f64,
}

/// The time constant of the average of reading.
const READING_NS: f64 = 10e9;

/// The largest share of time for reading. At 1, predictions would be infinite.
const READING_MOST: f64 = 0.9;

/// The weight of the newest request in an average. Poisson arrivals see averages over time (Wolff: "Poisson arrivals
/// see time averages", 1982).
const NEWEST: f64 = 0.05;

impl Watch {
    /// Advances time, and measures how busy engines are when a request arrives.
    pub fn look(&mut self, survey: &Survey<'_>) {
        let replicas = survey.state.replicas;
        self.advance(survey.state, survey.now_ns);
        for (engine, replica) in self.engines.iter_mut().zip(replicas) {
            let load = &replica.load;
            let others = if load.others_utilisation.is_finite() { load.others_utilisation.max(0.0) } else { 0.0 };
            engine.in_flight += NEWEST * (f64::from(load.in_flight()) - engine.in_flight);
            engine.others += NEWEST * (others - engine.others);
            engine.unread_ns = 0.0;
        }
        for admitted in survey.state.admitted.iter().filter(|admitted| admitted.unread_tokens > 0) {
            if let (Some(engine), Some(replica)) =
                (self.engines.get_mut(admitted.replica), replicas.get(admitted.replica))
            {
                engine.unread_ns += replica.curve.prefill_ns(admitted.unread_tokens);
            }
        }
        for (at, replica) in replicas.iter().enumerate() {
            let reading = self.reading(replicas, at).min(READING_MOST);
            let Some(engine) = self.engines.get_mut(at) else { continue };
            let (load, curve) = (&replica.load, &replica.curve);
            let batch = batch(replica);
            let now_ns = curve.step_ns(batch, load.others_utilisation);
            let usual = batch.max((engine.in_flight as u32).min(replica.most_running.max(1)));
            let usual_ns = curve.step_ns(usual, load.others_utilisation.max(engine.others));
            engine.stretch = if now_ns > 0.0 { (usual_ns / now_ns).max(1.0) } else { 1.0 } / (1.0 - reading);
            engine.step_ns = engine.stretch * now_ns;
        }
    }

    /// Forgets reading as time passes.
    fn advance(&mut self, state: &State<'_>, now_ns: u64) {
        let gap_ns = now_ns.saturating_sub(self.last_ns) as f64;
        self.last_ns = self.last_ns.max(now_ns);
        self.engines.resize(state.replicas.len(), Engine::default());
        for engine in &mut self.engines {
            engine.reading *= (-gap_ns / READING_NS).exp();
        }
    }

    /// Notes that an engine begins to read the prompt of a request. Many may begin between two decisions of this policy.
    pub fn began(&mut self, at: usize, request: &RoutedRequest, state: &State<'_>, now_ns: u64) {
        self.advance(state, now_ns);
        if let (Some(engine), Some(replica)) = (self.engines.get_mut(at), state.replicas.get(at)) {
            let reading_ns = replica.curve.prefill_ns(request.unread_tokens(state.cached_tokens(at)));
            // No sum of prompts takes more than all time for long.
            engine.reading = (engine.reading + reading_ns / READING_NS).min(4.0);
        }
    }

    /// Returns the candidate as this policy predicts it, from how busy its engine is.
    pub fn predict(&self, candidate: Candidate, slo: &Slo) -> Candidate {
        let engine = self.engines.get(candidate.replica).filter(|engine| engine.stretch > 0.0);
        engine.map_or(candidate, |engine| candidate.later(engine.unread_ns, engine.stretch, slo))
    }

    /// Returns the choice with the highest worth of all in time, or else the cheapest; `None` without a replica. `doubt` is
    /// the factor by which predictions may be wrong.
    pub fn choose(&self, survey: &Survey<'_>, doubt: f64) -> Option<ModelChoice> {
        let worth = |candidate: Candidate| {
            let candidate = self.predict(candidate, &survey.request.slo);
            let chance = chance(candidate.tightness, doubt);
            let worth = f64::from(candidate.reward).mul_add(chance, -self.harm(survey, candidate.replica, doubt));
            (worth, candidate)
        };
        let better = |one: &(f64, Candidate), other: &(f64, Candidate)| {
            (one.0, -one.1.tightness) > (other.0, -other.1.tightness)
        };
        let in_time = survey::open(survey).map(worth).filter(|(_, candidate)| candidate.tightness <= 1.0);
        if let Some((_, best)) = in_time.reduce(|best, next| if better(&next, &best) { next } else { best }) {
            return Some(best.choice(Reason::Worth));
        }
        // A request that is late anyway goes to the cheapest engine, where it delays other requests least.
        let cheapest = survey.cheapest().copied().map(worth);
        cheapest.map(|(_, cheapest)| cheapest.choice(Reason::NoneInTime))
    }

    /// The share of time in which prompts interrupt an engine: its own prompts, and prompts of engines on the same processor.
    fn reading(&self, replicas: &[Replica], at: usize) -> f64 {
        let Some(replica) = replicas.get(at) else { return 0.0 };
        let sharing = replica.curve.cost().sharing.min(1.0);
        let part = |(other, (engine, of)): (usize, (&Engine, &Replica))| match other == at {
            true => engine.reading,
            false if of.group == replica.group => sharing * engine.reading,
            false => 0.0,
        };
        self.engines.iter().zip(replicas).enumerate().map(part).sum()
    }

    /// Returns by how much the worth of the answers in progress falls if the request goes to the engine `at`. A request
    /// that finds no place in the batch waits behind all others and costs them nothing.
    fn harm(&self, survey: &Survey<'_>, at: usize, doubt: f64) -> f64 {
        let replicas = survey.state.replicas;
        let Some(replica) = replicas.get(at) else { return 0.0 };
        if replica.load.in_flight() >= replica.most_running.max(1) {
            return 0.0;
        }
        let curve = &replica.curve;
        let running = replica.load.running;
        let reading_ns = curve.prefill_ns(survey.request.unread_tokens(survey.state.cached_tokens(at)));
        let tokens = f64::from(survey.request.tokens());
        let more = (curve.utilisation(running.saturating_add(1)) - curve.utilisation(running)).max(0.0);
        let lost = |admitted: &Commitment| {
            let (Some(of), Some(engine)) = (replicas.get(admitted.replica), self.engines.get(admitted.replica)) else {
                return 0.0;
            };
            if of.group != replica.group || !admitted.has_limit() {
                return 0.0;
            }
            let left = f64::from(admitted.left_tokens);
            let before_ns = left.mul_add(engine.step_ns, engine.unread_ns);
            let others = of.load.others_utilisation;
            let (then_ns, interrupted_ns) = match admitted.replica == at {
                true => (of.curve.step_ns(batch(of).saturating_add(1), others), reading_ns),
                false => (of.curve.step_ns(batch(of), others + more), of.curve.cost().sharing.min(1.0) * reading_ns),
            };
            let longer_ns = engine.stretch.mul_add(then_ns, -engine.step_ns).max(0.0);
            let after_ns = left.min(tokens).mul_add(longer_ns, before_ns + interrupted_ns);
            let used = |time_ns: f64| time_ns / (admitted.left_ns as f64).max(1.0);
            let taken = chance(used(before_ns), doubt) - chance(used(after_ns), doubt);
            taken.max(0.0) * admitted.sound_reward()
        };
        survey.state.admitted.iter().map(lost).sum()
    }
}

/// The batch size of an engine, at least 1.
fn batch(replica: &Replica) -> u32 {
    replica.load.in_flight().clamp(1, replica.most_running.max(1))
}

/// Returns the chance that an answer is in time if it is predicted to use the fraction `tightness` of its limit, and the
/// prediction is wrong by a factor between 1 / `doubt` and `doubt`, uniform on a logarithmic scale.
fn chance(tightness: f64, doubt: f64) -> f64 {
    if tightness.is_nan() {
        return 0.0;
    }
    // Without any doubt, the logarithm would be 0.
    let spread = doubt.max(1.001).ln();
    (0.5 - tightness.ln() / (2.0 * spread)).clamp(0.0, 1.0)
}

impl Candidate {
    /// Returns the candidate with its first token `by_ns` later, and with steps that take `stretch` times as long.
    fn later(mut self, by_ns: f64, stretch: f64, slo: &Slo) -> Self {
        let steps_ns = self.prediction.finish_ns.saturating_sub(self.prediction.first_ns) as f64;
        let more_ns = (steps_ns * (stretch - 1.0).max(0.0)) as u64;
        let prediction = &mut self.prediction;
        prediction.first_ns = prediction.first_ns.saturating_add(by_ns as u64);
        prediction.finish_ns = prediction.finish_ns.saturating_add(by_ns as u64).saturating_add(more_ns);
        prediction.per_token_ns = (prediction.per_token_ns as f64 * stretch.max(1.0)) as u64;
        self.tightness = self.prediction.tightness(slo);
        self
    }
}

#[cfg(test)]
mod tests;
