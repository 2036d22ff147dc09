//! The simulation loop, from event to event.

use super::{
    Setup, SimulatedEngine,
    engine::Fluid,
    score::{Fate, RunOutcome},
    workload::Arrival,
};
use crate::route::{
    admitted::Commitment,
    choice::ModelChoice,
    curve::{Curve, WINDOW_TOKENS},
    lengths::{AnswerLengths, OpenAnswer},
    request::{RoutedRequest, Slo},
    router::Router,
    state::{Replica, State},
};

/// Makes the decisions in a simulation.
pub trait Decide {
    /// Decides about a request that the gateway received at `now_ns`. If it returns `None`, or a replica that does not
    /// exist, the request is discarded.
    fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice>;

    /// Returns whether decisions depend on [`State::admitted`], which takes time to fill in.
    fn looks_at_admitted(&self) -> bool {
        false
    }

    /// Reports the outcome of a request when it has ended. Decisions are numbered from 0.
    fn ended(&mut self, outcome: &RunOutcome) {
        let _ = outcome;
    }
}

impl Decide for Router {
    fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
        let choice = self.route(request, state, now_ns)?;
        self.began(choice.replica, request, state, now_ns);
        Some(choice)
    }

    fn looks_at_admitted(&self) -> bool {
        Self::looks_at_admitted(self)
    }
}

/// Plays requests in order of arrival until the last one ends. Returns the outcome of each, in that order.
///
/// The same arguments give the same outcomes. Each request takes O(E + log B), with E engines in all and a batch of B.
pub fn run(setup: &Setup, arrivals: &[Arrival], decide: &mut impl Decide) -> Vec<RunOutcome> {
    let mut run = Run::new(setup, arrivals, decide);
    let mut next = 0;
    loop {
        let arrival_s = arrivals.get(next).map_or(f64::INFINITY, |arrival| arrival.arrived_ns as f64 / 1e9);
        let engine = (run.fluids.iter().map(Fluid::next_s).enumerate())
            .min_by(|(_, one), (_, other)| one.total_cmp(other))
            .filter(|(_, event_s)| event_s.is_finite());
        match engine {
            Some((at, event_s)) if event_s <= arrival_s => run.event(at, event_s),
            _ if next < arrivals.len() => {
                run.arrive(next, arrival_s);
                next += 1;
            }
            _ => break,
        }
    }
    run.outcomes.sort_unstable_by_key(|outcome| outcome.number);
    run.outcomes
}

struct Run<'a, D> {
    setup: &'a Setup,
    arrivals: &'a [Arrival],
    decide: &'a mut D,
    fluids: Vec<Fluid>,
    replicas: Vec<Replica>,
    /// For each engine: the engines on its GPU, including itself.
    groups: Vec<Vec<usize>>,
    flights: Vec<Flight>,
    lengths: AnswerLengths,
    outcomes: Vec<RunOutcome>,
    admitted: Vec<Commitment>,
}

/// A request after its decision.
#[derive(Clone, Copy)]
struct Flight {
    choice: Option<ModelChoice>,
    /// The request as the router sees it.
    request: RoutedRequest,
    /// Its place among the lengths of answers, if they are learned.
    answer: Option<OpenAnswer>,
    first_s: f64,
    /// Whether its prompt had nothing ahead of it.
    undisturbed: bool,
    window: Window,
    /// The tokens of all complete windows.
    tokens: f64,
}

/// Part of an answer: a sample of its engine's steps.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    took_s: f64,
    tokens: f64,
    /// The batch, and the use of the GPU by others, as integrals over seconds.
    batch_s: f64,
    others_s: f64,
}

impl<'a, D: Decide> Run<'a, D> {
    fn new(setup: &'a Setup, arrivals: &'a [Arrival], decide: &'a mut D) -> Self {
        let fluid = |engine: &SimulatedEngine| Fluid::new(Curve::new(engine.cost), engine.most_running);
        let on_gpu = |engine: &SimulatedEngine| {
            let same = setup.engines.iter().enumerate().filter(|(_, other)| other.group == engine.group);
            same.map(|(at, _)| at).collect()
        };
        Self {
            setup,
            arrivals,
            decide,
            fluids: setup.engines.iter().map(fluid).collect(),
            replicas: setup.replicas(),
            groups: setup.engines.iter().map(on_gpu).collect(),
            flights: Vec::with_capacity(arrivals.len()),
            lengths: AnswerLengths::default(),
            outcomes: Vec::with_capacity(arrivals.len()),
            admitted: Vec::new(),
        }
    }

    fn arrive(&mut self, number: usize, now_s: f64) {
        let Some(arrival) = self.arrivals.get(number) else { return };
        self.replicas.iter_mut().for_each(|replica| replica.load.updated_ns = arrival.arrived_ns);
        if self.decide.looks_at_admitted() {
            self.look_at_admitted(now_s);
        }
        let state = State { replicas: &self.replicas, admitted: &self.admitted, cached: &[], path: arrival.path };
        let mut request = arrival.request;
        let is_learned = self.setup.is_learning() && !self.setup.lengths.known;
        if is_learned {
            let usual = self.setup.lengths.output_tokens;
            request.expected_tokens = self.lengths.expect(request.class, request.max_tokens, usual);
        }
        let choice = self.decide.decide(&request, &state, arrival.arrived_ns);
        let choice = choice.filter(|choice| choice.replica < self.fluids.len());
        let answer = (is_learned && choice.is_some()).then(|| self.lengths.begin(request.class, request.max_tokens));
        let window = Window::default();
        self.flights.push(Flight { choice, request, answer, first_s: 0.0, undisturbed: false, window, tokens: 0.0 });
        let Some(choice) = choice else { return self.end(number, None) };
        self.advance(choice.replica, now_s);
        if let (Some(fluid), Some(flight)) = (self.fluids.get_mut(choice.replica), self.flights.get_mut(number)) {
            flight.undisturbed = !fluid.is_stalled() && fluid.waiting() == 0;
            fluid.enqueue(number);
        }
        self.admit(choice.replica, now_s);
        self.refresh(choice.replica);
    }

    /// Handles an engine's next event: the end of its prompts, or of a sequence.
    fn event(&mut self, at: usize, now_s: f64) {
        let stalled = self.fluids.get(at).is_some_and(Fluid::is_stalled);
        self.advance(at, now_s);
        if !stalled {
            if let Some(number) = self.fluids.get_mut(at).and_then(Fluid::finish) {
                self.end(number, Some(now_s));
            }
            self.admit(at, now_s);
        }
        self.refresh(at);
    }

    /// Fills in the admitted requests as a gateway sees them: it knows the number of tokens so far, but not the final
    /// number.
    fn look_at_admitted(&mut self, now_s: f64) {
        for at in 0..self.groups.len() {
            // Once for each GPU.
            if self.groups.get(at).and_then(|group| group.first()) == Some(&at) {
                self.advance(at, now_s);
            }
        }
        self.admitted.clear();
        for (at, fluid) in self.fluids.iter().enumerate() {
            for (number, left) in fluid.sequences() {
                let (Some(arrival), Some(flight)) = (self.arrivals.get(number), self.flights.get(number)) else {
                    continue;
                };
                let (Arrival { path, arrived_ns, .. }, Flight { request, .. }) = (arrival, flight);
                let come = left.map_or(0.0, |left| (f64::from(arrival.output_tokens) - left).max(0.0)) as u32;
                let is_read = left.is_some() && flight.first_s <= now_s;
                let end_ns = arrived_ns.saturating_add(request.slo.budget_ns).saturating_sub(path.return_ns());
                let is_limited = request.slo.budget_ns != Slo::NONE;
                let model = flight.choice.and_then(|choice| self.setup.models.get(choice.model));
                self.admitted.push(Commitment {
                    replica: at,
                    left_tokens: request.tokens().saturating_sub(come).max(1),
                    unread_tokens: if is_read { 0 } else { request.prompt_tokens.max(1) },
                    left_ns: if is_limited { end_ns.saturating_sub((now_s * 1e9) as u64) } else { Slo::NONE },
                    reward: model.map_or(0.0, |model| model.reward(request.class)),
                });
            }
        }
    }

    fn admit(&mut self, at: usize, now_s: f64) {
        while let Some(number) = self.fluids.get_mut(at).and_then(Fluid::next_waiting) {
            let Some(arrival) = self.arrivals.get(number) else { continue };
            if self.setup.discards && now_s * 1e9 > arrival.deadline_ns as f64 {
                self.end(number, None);
                continue;
            }
            if let (Some(fluid), Some(flight)) = (self.fluids.get_mut(at), self.flights.get_mut(number)) {
                flight.undisturbed &= !fluid.is_stalled();
                flight.first_s = fluid.admit(number, arrival.request.prompt_tokens, arrival.output_tokens);
            }
        }
    }

    fn end(&mut self, number: usize, finished_s: Option<f64>) {
        let (Some(arrival), Some(flight)) = (self.arrivals.get(number), self.flights.get(number)) else { return };
        let finished_ns =
            finished_s.map_or(0, |finished_s| ((finished_s * 1e9) as u64).saturating_add(arrival.back_ns));
        let fate = match finished_s {
            None => Fate::Discarded,
            Some(_) if finished_ns <= arrival.deadline_ns => Fate::Met,
            Some(_) => Fate::Late,
        };
        let class = arrival.request.class;
        let model = flight.choice.and_then(|choice| self.setup.models.get(choice.model));
        let reward = model.filter(|_| fate == Fate::Met).map_or(0.0, |model| model.reward(class));
        let (choice, arrived_ns) = (flight.choice, arrival.arrived_ns);
        let outcome = RunOutcome { number, class, choice, arrived_ns, finished_ns, fate, reward };
        match (&flight.answer, finished_s) {
            (Some(answer), Some(_)) => self.lengths.end(answer, f64::from(arrival.output_tokens)),
            (Some(answer), None) => self.lengths.cut(answer),
            (None, _) => {}
        }
        if finished_s.is_some() && self.setup.is_learning() {
            self.learn_prompt(number);
        }
        self.decide.ended(&outcome);
        self.outcomes.push(outcome);
    }

    /// Learns from an answer's first token, if nothing was ahead of its prompt.
    fn learn_prompt(&mut self, number: usize) {
        let (Some(arrival), Some(flight)) = (self.arrivals.get(number), self.flights.get(number)) else { return };
        let Some(replica) = flight.choice.and_then(|choice| self.replicas.get_mut(choice.replica)) else { return };
        if flight.undisturbed {
            let first_ns = flight.first_s * 1e9 - arrival.arrived_ns as f64;
            replica.curve.observe_first_token(arrival.request.prompt_tokens, first_ns as u64);
        }
    }

    /// Advances all engines on the GPU of an engine.
    fn advance(&mut self, at: usize, now_s: f64) {
        for other in self.groups.get(at).into_iter().flatten() {
            let (Some(fluid), Some(replica)) = (self.fluids.get_mut(*other), self.replicas.get_mut(*other)) else {
                continue;
            };
            if self.setup.is_learning() {
                learn_steps(fluid, replica, (&mut self.flights, &mut self.lengths), now_s);
            }
            fluid.advance(now_s);
        }
    }

    /// Sets the step time and the visible load of all engines of a GPU after a change of one. The router sees only what a
    /// gateway can count: it knows the mean number of tokens, not the actual one.
    fn refresh(&mut self, at: usize) {
        let Some(group) = self.groups.get(at) else { return };
        let expected = self.setup.lengths.output_tokens as u64;
        let sum = |used: &dyn Fn(usize) -> f64| group.iter().map(|other| used(*other)).sum::<f64>();
        let truly = sum(&|other| self.fluids.get(other).map_or(0.0, Fluid::utilisation));
        for other in group {
            let (Some(fluid), Some(replica)) = (self.fluids.get_mut(*other), self.replicas.get_mut(*other)) else {
                continue;
            };
            fluid.pace(truly - fluid.utilisation());
            replica.load.running = fluid.running();
            replica.load.waiting = fluid.waiting();
            replica.load.outstanding_tokens =
                u64::from(fluid.running()) * expected / 2 + u64::from(fluid.waiting()) * expected;
        }
        let seen = |replica: &Replica| replica.curve.utilisation(replica.load.running);
        let visible: f64 = group.iter().filter_map(|other| self.replicas.get(*other)).map(seen).sum();
        for other in group {
            if let Some(replica) = self.replicas.get_mut(*other) {
                replica.load.others_utilisation = (visible - seen(replica)).max(0.0);
            }
        }
    }
}

/// Learns from the tokens that an engine makes until `now_s` what a gateway can learn from them: in windows of each answer, the mean time
/// of a step, prompts in between included, the mean batch, and the mean use of the GPU by others.
fn learn_steps(
    fluid: &Fluid,
    replica: &mut Replica,
    (flights, lengths): (&mut [Flight], &mut AnswerLengths),
    now_s: f64,
) {
    let others = replica.load.others_utilisation;
    for (number, _) in fluid.sequences().filter(|(_, left)| left.is_some()) {
        let Some(flight) = flights.get_mut(number) else { continue };
        let took_s = (now_s - fluid.now_s().max(flight.first_s)).max(0.0);
        let window = &mut flight.window;
        window.took_s += took_s;
        window.batch_s += took_s * f64::from(fluid.running());
        window.others_s += took_s * others;
        if !fluid.is_stalled() {
            window.tokens += took_s / fluid.step_s().max(1e-9);
        }
        if window.tokens >= f64::from(WINDOW_TOKENS) {
            let Window { took_s, tokens, batch_s, others_s } = std::mem::take(window);
            let step_ns = (took_s / tokens * 1e9) as u64;
            replica.curve.observe_step(batch_s / took_s, others_s / took_s, step_ns);
            flight.tokens += tokens;
            if let Some(answer) = &flight.answer {
                lengths.grow(answer, flight.tokens);
            }
        }
    }
}
