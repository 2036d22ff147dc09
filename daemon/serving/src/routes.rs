//! Which model answers, as [`sched::route`] decides it: what it is told of engines, and what engines teach it.
//!
//! A request with a deadline that leaves the choice open goes to the best model that is predicted to meet it. What a request
//! costs an engine is learned from the tokens that pass, so that nobody has to measure an engine before.

use std::{sync::Arc, time::Duration};

use masque::h3::RequestHead;
use parking_lot::Mutex;
use sched::route::{
    Choice, Cost, Curve, Load, Model, ModelSet, Observed, Path, Policy, Replica, Request, Router, Slo, State,
    share_groups,
};

use crate::{openai::Ask, places::Engines, sse::Usage};

/// How long answers are taken to be before any was seen, in tokens.
const FIRST_TOKENS: f64 = 200.0;

/// How many bytes of a body make a token of a prompt, before any was billed.
const FIRST_BYTES_PER_TOKEN: f64 = 4.0;

/// How much of an average the newest answer is.
const NEWEST: f64 = 0.05;

/// What a token takes on the path: an event of a chat with its frame, about.
const BYTES_PER_TOKEN: u32 = 220;

/// How much a whole other engine on the same GPU slows an engine: they take turns on it. Seen from outside, it cannot be told
/// from the engine's own costs, so it is not learned.
const SHARING: f64 = 1.0;

const NS_PER_MS: u64 = 1_000_000;

/// The models of a gateway, and what is known of their engines.
#[derive(Debug)]
pub struct Routes {
    state: Mutex<Known>,
    /// The engines of each model.
    engines: Vec<Arc<Engines>>,
    now_ns: fn() -> u64,
}

#[derive(Debug)]
struct Known {
    router: Router,
    /// Model by model, each with its engines in their order.
    replicas: Vec<Replica>,
    /// Where the engines of each model begin.
    first: Vec<usize>,
    answer_tokens: f64,
    bytes_per_token: f64,
    /// Whether anything was billed.
    is_billed: bool,
}

/// What a request is allowed, by what its client says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    slo: Slo,
    body_bytes: usize,
    max_tokens: Option<u32>,
}

/// What was decided for a request.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The model, by its place in the configuration.
    pub model: usize,
    /// Why it was this one, for people.
    pub reason: &'static str,
    /// What was predicted, if anything is known.
    pub choice: Option<Choice>,
    /// How many tokens the answer is taken to have.
    expected_tokens: u32,
    prompt_tokens: u32,
}

/// An answer as its tokens pass, of which the engine's costs are learned.
#[derive(Debug)]
pub struct Lesson<'a> {
    routes: &'a Routes,
    replica: usize,
    model: usize,
    prompt_tokens: u32,
    /// Tokens that the engine is still taken to owe.
    owed: u64,
    began_ns: u64,
    /// Whether the engine had nothing else to do when it began.
    is_alone: bool,
    first_ns: Option<u64>,
    last_ns: u64,
    events: u64,
    /// The sum of how many requests the engine worked on, event by event.
    batches: u64,
}

impl Wanted {
    /// Reads what a request says of its deadline: `x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-paced-budget-ms`, the time for the
    /// whole answer. Without a budget of its own it has that of its class, which may be none.
    #[must_use]
    pub fn of(head: &RequestHead, class_ns: Option<u64>, ask: &Ask, body_bytes: usize) -> Self {
        let limit = |name: &str| -> Option<u64> {
            let text = std::str::from_utf8(head.field(name)?).ok()?;
            Some(text.trim().parse::<u64>().ok()?.saturating_mul(NS_PER_MS))
        };
        let slo = Slo {
            first_token_ns: limit("x-slo-ttft-ms").unwrap_or(Slo::NONE),
            per_token_ns: limit("x-slo-tpot-ms").unwrap_or(Slo::NONE),
            budget_ns: limit("x-paced-budget-ms").or(class_ns).unwrap_or(Slo::NONE),
        };
        Self { slo, body_bytes, max_tokens: ask.max_tokens }
    }

    /// Whether an answer that took so long met its budget; `None` if it had none.
    #[must_use]
    pub fn is_met(&self, took: Duration) -> Option<bool> {
        let has_budget = self.slo.budget_ns != Slo::NONE;
        has_budget.then(|| took.as_nanos() <= u128::from(self.slo.budget_ns))
    }

    /// Whether there is any limit.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.slo != Slo::unlimited()
    }
}

impl Route {
    /// How many tokens the prompt is taken to have.
    #[must_use]
    pub const fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Whether it is predicted to miss its limits.
    #[must_use]
    pub fn is_late(&self) -> bool {
        self.choice.is_some_and(|choice| !choice.in_time)
    }
}

impl Routes {
    /// Returns the routes to models of which nothing is known but what they are worth, from 0 to 1, and their engines, each
    /// with the number of its GPU.
    #[must_use]
    pub fn new(
        models: &[(&str, f32)],
        engines: Vec<Arc<Engines>>,
        groups: &[Vec<u32>],
        margin: f64,
        now_ns: fn() -> u64,
    ) -> Self {
        let model = |(name, reward): &(&str, f32)| Model { id: hash(name), rewards: vec![*reward] };
        let router = Router::new(models.iter().map(model).collect(), Policy::Rule { margin }).with_margin(margin);
        let (mut replicas, mut first) = (Vec::new(), Vec::new());
        for (model, (engines, groups)) in engines.iter().zip(groups).enumerate() {
            first.push(replicas.len());
            replicas.extend(groups.iter().map(|group| Replica {
                model,
                group: *group,
                usable: true,
                most_running: engines.most_in_flight(),
                load: Load::default(),
                curve: Curve::new(Cost { sharing: SHARING, ..Cost::default() }),
            }));
        }
        let (answer_tokens, bytes_per_token) = (FIRST_TOKENS, FIRST_BYTES_PER_TOKEN);
        Self {
            state: Mutex::new(Known { router, replicas, first, answer_tokens, bytes_per_token, is_billed: false }),
            engines,
            now_ns,
        }
    }

    /// Takes over what was known before: averages, and the curves of engines by their model's place and their own.
    pub fn recall(&self, averages: Option<(f64, f64)>, curve: impl Fn(usize, usize) -> Option<Curve>) {
        let mut known = self.state.lock();
        if let Some((answer_tokens, bytes_per_token)) =
            averages.filter(|(tokens, bytes)| *tokens >= 1.0 && *bytes >= 0.5)
        {
            let (answer_tokens, bytes_per_token) = (answer_tokens.min(1e6), bytes_per_token.min(1e3));
            (known.answer_tokens, known.bytes_per_token, known.is_billed) = (answer_tokens, bytes_per_token, true);
        }
        let Known { replicas, first, .. } = &mut *known;
        for (at, replica) in replicas.iter_mut().enumerate() {
            let place = at - first.get(replica.model).copied().unwrap_or_default();
            replica.curve = curve(replica.model, place).unwrap_or(replica.curve);
        }
    }

    /// Returns the averages, if anything was billed, and the curves of all engines, model by model.
    #[must_use]
    pub fn learned(&self) -> (Option<(f64, f64)>, Vec<Curve>) {
        let known = self.state.lock();
        let averages = known.is_billed.then_some((known.answer_tokens, known.bytes_per_token));
        (averages, known.replicas.iter().map(|replica| replica.curve).collect())
    }

    /// How many tokens a request is expected to use, prompt and answer.
    #[must_use]
    pub fn expected_tokens(&self, wanted: &Wanted) -> u64 {
        let (prompt, answer) = self.state.lock().expect(wanted);
        u64::from(prompt) + u64::from(answer)
    }

    /// Decides which of `models` answers a request to a client over `path`; `None` if none of them has an engine that has not
    /// failed. A request without limits goes to the best model with room, or else to the one for which the fewest wait.
    pub fn route(&self, models: &[usize], wanted: &Wanted, path: Path) -> Option<Route> {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        known.look(&self.engines, now_ns);
        let allowed = |models: &[usize]| models.iter().fold(ModelSet::NONE, |set, model| set.with(*model));
        let open = match (models, wanted.is_limited()) {
            ([_], _) | (_, true) => allowed(models),
            _ => allowed(&[self.with_room(&known.router, models)?]),
        };
        let (prompt_tokens, expected_tokens) = known.expect(wanted);
        let request = Request {
            class: 0,
            prompt_tokens,
            expected_tokens,
            max_tokens: wanted.max_tokens.unwrap_or_default(),
            slo: wanted.slo,
            weight: 1.0,
            allowed: open,
        };
        let Known { router, replicas, .. } = &mut *known;
        let path = Path { bytes_per_token: BYTES_PER_TOKEN, ..path };
        let choice = router.route(&request, &State { replicas, path }, now_ns)?;
        let reason = match (models, wanted.is_limited()) {
            ([_], _) => "named",
            (_, true) => choice.reason.name(),
            _ => "best-with-room",
        };
        Some(Route { model: choice.model, reason, choice: Some(choice), expected_tokens, prompt_tokens })
    }

    /// The model with the largest reward that has room, or else the one for which the fewest wait.
    fn with_room(&self, router: &Router, models: &[usize]) -> Option<usize> {
        let engines = |model: &usize| self.engines.get(*model);
        let reward = |model: &usize| router.models().get(*model).map_or(0.0, |model| model.reward(0));
        let with_room = models.iter().filter(|model| engines(model).is_some_and(|engines| engines.has_room()));
        // Of equals, the first.
        let best = with_room.reduce(|best, model| if reward(model) > reward(best) { model } else { best });
        let alive = || models.iter().filter(|model| engines(model).is_some_and(|engines| engines.is_alive()));
        best.or_else(|| alive().min_by_key(|model| engines(model).map(|engines| engines.waiting()))).copied()
    }

    /// Begins to learn from an engine's answer to a request.
    #[must_use]
    pub fn begin(&self, route: &Route, replica: usize) -> Lesson<'_> {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        let owed = u64::from(route.expected_tokens);
        let is_alone = self.engines.get(route.model).is_some_and(|engines| engines.in_flight(replica) <= 1);
        if let Some(replica) = known.replica(route.model, replica) {
            replica.load.outstanding_tokens = replica.load.outstanding_tokens.saturating_add(owed);
        }
        Lesson {
            routes: self,
            replica,
            model: route.model,
            prompt_tokens: route.prompt_tokens,
            owed,
            began_ns: now_ns,
            is_alone,
            first_ns: None,
            last_ns: now_ns,
            events: 0,
            batches: 0,
        }
    }

    /// Notes what became of a request: how long it took in all, if it was answered.
    pub fn observe(&self, route: &Route, wanted: &Wanted, took_ns: u64) {
        let Some(choice) = route.choice else { return };
        let met = took_ns <= wanted.slo.budget_ns;
        self.state.lock().router.observe(&Observed { choice, actual_ns: took_ns, met });
    }

    /// Whether the engine that a prediction is about has nothing to do. A request costs nobody else anything there, and
    /// shows whether what was learned of the engine still holds.
    #[must_use]
    pub fn is_idle(&self, route: &Route) -> bool {
        let first = |known: &Known| known.first.get(route.model).copied().unwrap_or_default();
        let replica = route.choice.map(|choice| choice.replica.saturating_sub(first(&self.state.lock())));
        let engines = self.engines.get(route.model);
        engines.zip(replica).is_some_and(|(engines, replica)| engines.in_flight(replica) == 0)
    }

    /// What is known of an engine's costs.
    #[must_use]
    pub fn cost(&self, model: usize, replica: usize) -> Option<Cost> {
        self.state.lock().replica(model, replica).map(|replica| replica.curve.cost())
    }
}

impl Known {
    /// Takes over what engines have to do at `now_ns`.
    fn look(&mut self, engines: &[Arc<Engines>], now_ns: u64) {
        for (engines, first) in engines.iter().zip(&self.first) {
            let loads = engines.loads();
            // What waits for any of them waits for each in equal parts.
            let waiting = engines.waiting().div_ceil(loads.len().max(1)) as u32;
            for (replica, (in_flight, is_usable)) in self.replicas.iter_mut().skip(*first).zip(loads) {
                replica.usable = is_usable;
                (replica.load.running, replica.load.waiting) = (in_flight, waiting);
                replica.load.updated_ns = now_ns;
            }
        }
        share_groups(&mut self.replicas);
    }

    /// How many tokens a request's prompt is taken to have, and its answer.
    fn expect(&self, wanted: &Wanted) -> (u32, u32) {
        let prompt = (wanted.body_bytes as f64 / self.bytes_per_token) as u32;
        (prompt, (self.answer_tokens as u32).min(wanted.max_tokens.unwrap_or(u32::MAX)).max(1))
    }

    fn replica(&mut self, model: usize, replica: usize) -> Option<&mut Replica> {
        let first = *self.first.get(model)?;
        self.replicas.get_mut(first + replica).filter(|replica| replica.model == model)
    }
}

impl Lesson<'_> {
    /// Notes that a token passed, or several at once.
    pub fn token(&mut self) {
        let now_ns = (self.routes.now_ns)();
        self.first_ns.get_or_insert(now_ns);
        (self.last_ns, self.events) = (now_ns, self.events + 1);
        self.batches +=
            self.routes.engines.get(self.model).map_or(1, |engines| u64::from(engines.in_flight(self.replica)));
        if self.owed > 1 {
            self.owed -= 1;
            if let Some(replica) = self.routes.state.lock().replica(self.model, self.replica) {
                replica.load.outstanding_tokens = replica.load.outstanding_tokens.saturating_sub(1);
            }
        }
    }

    /// Learns from an answer that came to its end. The engine's own count of tokens is believed before that of events.
    pub fn learn(&self, usage: Option<Usage>, body_bytes: usize) {
        let mut known = self.routes.state.lock();
        if let Some(usage) = usage {
            let average = |before: f64, now: f64| before + NEWEST * (now - before);
            known.is_billed = true;
            known.answer_tokens = average(known.answer_tokens, usage.completion_tokens as f64).max(1.0);
            if usage.prompt_tokens > 0 {
                let ratio = body_bytes as f64 / usage.prompt_tokens as f64;
                known.bytes_per_token = average(known.bytes_per_token, ratio).clamp(0.5, 1_000.0);
            }
        }
        let prompt_tokens = usage.map_or(self.prompt_tokens, |usage| usage.prompt_tokens as u32);
        let tokens = usage.map_or(self.events, |usage| usage.completion_tokens);
        let Some(first_ns) = self.first_ns else { return };
        let Some(replica) = known.replica(self.model, self.replica) else { return };
        let others = replica.load.others_utilisation;
        if self.is_alone {
            replica.curve.observe_first_token(prompt_tokens, first_ns - self.began_ns);
        }
        if let Some(step_ns) = (self.last_ns - first_ns).checked_div(tokens.saturating_sub(1)) {
            let batch = self.batches.div_ceil(self.events.max(1)).max(1);
            replica.curve.observe_step(batch as u32, others, step_ns);
        }
    }
}

impl Drop for Lesson<'_> {
    fn drop(&mut self) {
        if let Some(replica) = self.routes.state.lock().replica(self.model, self.replica) {
            replica.load.outstanding_tokens = replica.load.outstanding_tokens.saturating_sub(self.owed);
        }
    }
}

/// FNV-1a of a name: the same for the same model in every process, whatever else is configured.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sched::stream::{Discipline, Service};

    use super::*;
    use crate::places::{Fault, Place, Turn};

    thread_local! { static NOW_NS: Cell<u64> = const { Cell::new(1) }; }

    fn now_ns() -> u64 {
        NOW_NS.get()
    }

    fn pass(ms: u64) {
        NOW_NS.set(NOW_NS.get() + ms * NS_PER_MS);
    }

    /// A large and a small model, of one engine each.
    fn routes(most_in_flight: u32) -> (Routes, Vec<Arc<Engines>>) {
        let engines: Vec<_> = (0..2).map(|_| Engines::new(1, most_in_flight, 8, Discipline::Fcfs, now_ns)).collect();
        (Routes::new(&[("large", 1.0), ("small", 0.7)], engines.clone(), &[vec![0], vec![1]], 1.1, now_ns), engines)
    }

    fn wanted(budget_ms: Option<u64>) -> Wanted {
        let budget_ns = budget_ms.map_or(Slo::NONE, |ms| ms * NS_PER_MS);
        Wanted { slo: Slo { budget_ns, ..Slo::unlimited() }, body_bytes: 400, max_tokens: Some(20) }
    }

    fn take(engines: &Arc<Engines>) -> Place {
        match engines.take(Service::default(), &[]) {
            Ok(Turn::Now(place)) => place,
            other => panic!("{other:?}"),
        }
    }

    /// Has a model answer with 20 tokens, of which the first takes `first_ms` and the others `step_ms` each.
    fn answer(routes: &Routes, engines: &[Arc<Engines>], model: usize, (first_ms, step_ms): (u64, u64)) {
        let route = routes.route(&[model], &wanted(None), Path::default()).unwrap();
        let place = take(&engines[model]);
        let mut lesson = routes.begin(&route, place.replica);
        pass(first_ms);
        lesson.token();
        for _ in 1..20 {
            pass(step_ms);
            lesson.token();
        }
        lesson.learn(Some(Usage { prompt_tokens: 100, completion_tokens: 20 }), 400);
    }

    #[test]
    fn the_best_model_that_meets_the_deadline_answers_once_its_engine_is_known() {
        let (routes, engines) = routes(8);
        let choose = |budget_ms| routes.route(&[0, 1], &wanted(Some(budget_ms)), Path::default()).unwrap();
        assert_eq!(choose(100).model, 0, "of an engine that nothing is known of, the best is thought");
        for _ in 0..30 {
            answer(&routes, &engines, 0, (50, 40));
            answer(&routes, &engines, 1, (10, 5));
        }
        let slow = choose(2_000);
        assert_eq!((slow.model, slow.reason), (0, "in_time"));
        let predicted_ms = slow.choice.unwrap().predicted_ns / NS_PER_MS;
        assert!((700..950).contains(&predicted_ms), "{predicted_ms} ms for 50 ms and 19 steps of 40");
        assert_eq!(choose(500).model, 1, "the large one would take 810 ms");
        assert_eq!(choose(10).reason, "none_in_time");
        let far = Path { smoothed_rtt_ns: 4_000 * NS_PER_MS, ..Path::default() };
        assert_eq!(routes.route(&[0, 1], &wanted(Some(2_900)), far).unwrap().model, 1, "the way back takes 2 s");
        assert_eq!(routes.route(&[0], &wanted(Some(10)), far).unwrap().model, 0, "a name is a name");
    }

    #[test]
    fn without_a_deadline_the_best_model_with_room_answers_or_the_one_with_the_shortest_queue() {
        let (routes, engines) = routes(1);
        let choose = || routes.route(&[1, 0], &wanted(None), Path::default()).map(|route| route.model);
        assert_eq!(choose(), Some(0));
        let large = take(&engines[0]);
        assert_eq!(choose(), Some(1));
        let _small = take(&engines[1]);
        let _waits = engines[1].take(Service::default(), &[]);
        assert_eq!(choose(), Some(0));
        engines[0].failed(large.replica, Fault::OutOfReach);
        assert_eq!(choose(), Some(1), "none waits for an engine that failed");
        engines[1].failed(0, Fault::OutOfReach);
        assert_eq!(choose(), None);
    }

    #[test]
    fn tokens_that_an_engine_owes_are_counted_down_and_forgotten_with_their_request() {
        let (routes, engines) = routes(8);
        let route = routes.route(&[0], &wanted(None), Path::default()).unwrap();
        let owed = || routes.state.lock().replicas[0].load.outstanding_tokens;
        let place = take(&engines[0]);
        let mut lesson = routes.begin(&route, place.replica);
        assert_eq!(owed(), 20);
        (0..3).for_each(|_| lesson.token());
        assert_eq!(owed(), 17);
        drop(lesson);
        assert_eq!(owed(), 0);
    }

    #[test]
    fn limits_are_read_from_the_fields_and_else_from_the_class() {
        let field = |name: &'static str, value: &'static str| masque::h3::Field::new(name, value);
        let head = |fields| RequestHead {
            method: "POST".into(),
            scheme: None,
            authority: None,
            path: None,
            protocol: None,
            fields,
        };
        let ask = Ask::read(br#"{"model":"m"}"#).unwrap();
        let limits = |fields, class_ns| Wanted::of(&head(fields), class_ns, &ask, 0).slo;
        assert_eq!(limits(vec![], None), Slo::unlimited());
        assert_eq!(limits(vec![], Some(7)), Slo::within(7));
        let fields = vec![field("x-paced-budget-ms", "20"), field("x-slo-ttft-ms", "3"), field("x-slo-tpot-ms", "x")];
        let expected = Slo { budget_ns: 20_000_000, first_token_ns: 3_000_000, per_token_ns: Slo::NONE };
        assert_eq!(limits(fields, Some(7)), expected);
    }
}
