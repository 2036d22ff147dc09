//! Which model answers, as [`sched::route`] decides: its inputs about engines, and what engines' answers teach it.
//!
//! A request with a deadline that leaves the choice open goes to the best model that is predicted to meet it. The gateway learns
//! from passing tokens what a request costs an engine, so operators need not measure engines in advance.
//!
//! | module | what it holds |
//! |---|---|
//! | `route`, [`limits`] | the question and the decision; the time limits of a request |
//! | `chooser`, `record` | the policy of an alias, and its shadow; its decisions as [`routing`] writes them |
//! | `flights`, `lesson` | the requests that engines work on; what an answer teaches |
//! | `trials` | requests that show whether a model that was too slow still is |

use std::sync::Arc;

use config::gateway::{Alias, GatewaySettings};
use engines::places::{CachedBytes, Engines};
use parking_lot::Mutex;
use sched::route::{
    AnswerDurations, AnswerLengths, ClientPath, Commitment, Cost, Curve, EngineLoad, MeanLengths, ModelSet, Replica,
    RoutedRequest, Slo, State, share_groups,
};

mod chooser;
mod flights;
mod lesson;
pub mod limits;
mod record;
mod route;
#[cfg(test)]
mod tests;
mod trials;

use self::{chooser::Chooser, flights::Flights, record::Recorder, trials::SpeedTrials};
pub use self::{
    chooser::{AliasPolicies, Tally, read_policy},
    lesson::Lesson,
    limits::{AnswerTiming, Wanted},
    route::{Decided, Route, RouteQuery, Shadow},
};

/// The assumed length of answers before the first, in tokens.
const FIRST_TOKENS: f64 = 200.0;

/// The assumed bytes of a body per token of its prompt, before an engine has billed a prompt.
const FIRST_BYTES_PER_TOKEN: f64 = 4.0;

/// The least and the most bytes per token that one answer can teach. A body may consist of spaces, or of a picture, and expectations about
/// all other prompts depend on the average.
const SOUND_BYTES_PER_TOKEN: (f64, f64) = (1.0, 16.0);

/// The bytes of a token on the path: about an event of a chat with its frame.
const BYTES_PER_TOKEN: u32 = 220;

const NS_PER_S: u64 = 1_000_000_000;

/// How many prompts an engine must read alone before predictions weigh its cache against its load.
const KNOWN_PROMPTS: u64 = 8;

/// The models of a gateway, and what is known of their engines.
#[derive(Debug)]
pub struct Routes {
    state: Mutex<Known>,
    /// The engines of each model.
    engines: Vec<Arc<Engines>>,
    /// The worth of an answer of each model, from 0 to 1.
    worths: Vec<f32>,
    /// Records decisions, if the configuration wants that.
    recorder: Option<Recorder>,
    now_ns: fn() -> u64,
}

#[derive(Debug)]
struct Known {
    /// For requests that name a model.
    named: Chooser,
    /// For each alias.
    aliases: Vec<Chooser>,
    /// The engines model by model, in their order.
    replicas: Vec<Replica>,
    /// The index of each model's first engine.
    first: Vec<usize>,
    /// The requests at each engine.
    flights: Vec<Arc<Mutex<Flights>>>,
    /// A copy of them for the policy that decides.
    admitted: Vec<Commitment>,
    /// What the durations of answers without events have shown of each engine.
    durations: Vec<AnswerDurations>,
    trials: SpeedTrials,
    /// The names of the classes that `lengths` knows; the policy keeps them few.
    classes: Vec<String>,
    lengths: AnswerLengths,
    /// The mean length of answers until some have ended, in tokens.
    assumed_tokens: f64,
    bytes_per_token: f64,
    /// How many tokens an event of each engine has on average, if it has said how many tokens an answer had.
    tokens_per_event: Vec<Option<f64>>,
    /// Whether the length of any answer is known.
    has_lengths: bool,
}

impl Routes {
    /// Returns the routes to the engines of each model; nothing is known of the engines yet.
    #[must_use]
    pub fn new(
        settings: &GatewaySettings,
        policies: &AliasPolicies,
        engines: Vec<Arc<Engines>>,
        now_ns: fn() -> u64,
    ) -> Self {
        let (mut replicas, mut first) = (Vec::new(), Vec::new());
        for (model, (engines, groups)) in engines.iter().zip(groups(&settings.models)).enumerate() {
            first.push(replicas.len());
            replicas.extend(groups.into_iter().map(|group| Replica {
                model,
                group,
                usable: true,
                most_running: engines.most_in_flight(),
                load: EngineLoad::default(),
                curve: Curve::new(Cost::default()),
            }));
        }
        let flights = replicas.iter().map(|_| Arc::default()).collect();
        let tokens_per_event = vec![None; replicas.len()];
        let worths: Vec<_> = settings.models.iter().map(chooser::worth).collect();
        let trials = SpeedTrials::new(&worths, replicas.len(), chooser::margin(settings), now_ns());
        let known = Known {
            named: Chooser::named(settings),
            aliases: policies.choosers(settings),
            durations: vec![AnswerDurations::default(); replicas.len()],
            trials,
            replicas,
            first,
            flights,
            admitted: Vec::new(),
            classes: Vec::new(),
            lengths: AnswerLengths::default(),
            assumed_tokens: FIRST_TOKENS,
            bytes_per_token: FIRST_BYTES_PER_TOKEN,
            tokens_per_event,
            has_lengths: false,
        };
        Self { state: Mutex::new(known), engines, worths, recorder: Recorder::of(settings), now_ns }
    }

    /// Shares the requests at an engine with the routes `before`, so policies also see open requests from there. `(model, engine)` are the
    /// engine's indices here, and `known` its indices in `before`. Call this before the first request.
    pub fn share(&self, (model, engine): (usize, usize), before: &Self, known: (usize, usize)) {
        let shared = before.state.lock().flights_at(known.0, known.1).cloned();
        if let (Some(flights), Some(shared)) = (self.state.lock().flights_at(model, engine), shared) {
            *flights = shared;
        }
    }

    /// Restores earlier knowledge: averages, and the curves of engines. `curve` takes the index of the model and the index of the engine in
    /// it.
    pub fn recall(&self, averages: Option<(f64, f64)>, curve: impl Fn(usize, usize) -> Option<Curve>) {
        let mut known = self.state.lock();
        if let Some((answer_tokens, bytes_per_token)) =
            averages.filter(|(tokens, bytes)| *tokens >= 1.0 && *bytes >= 0.5)
        {
            let (least, most) = SOUND_BYTES_PER_TOKEN;
            (known.assumed_tokens, known.has_lengths) = (answer_tokens.min(1e6), true);
            known.bytes_per_token = bytes_per_token.clamp(least, most);
        }
        let Known { replicas, first, .. } = &mut *known;
        for (at, replica) in replicas.iter_mut().enumerate() {
            let place = at - first.get(replica.model).copied().unwrap_or_default();
            replica.curve = curve(replica.model, place).unwrap_or(replica.curve);
        }
    }

    /// Restores the mean lengths of a class's answers.
    pub fn recall_lengths(&self, class: &str, lengths: MeanLengths) {
        let mut known = self.state.lock();
        let class = known.class(class);
        known.lengths.recall(class, lengths);
    }

    /// Returns the mean lengths of answers of each class that has enough of them.
    #[must_use]
    pub fn learned_lengths(&self) -> Vec<(String, MeanLengths)> {
        let mut known = self.state.lock();
        let Known { classes, lengths, .. } = &mut *known;
        let of_each = classes.iter().enumerate().map(|(at, class)| (class.clone(), lengths.learned(at)));
        of_each.filter(|(_, learned)| *learned != MeanLengths::default()).collect()
    }

    /// Returns the averages, if the length of any answer is known, and the curves of all engines, model by model.
    #[must_use]
    pub fn learned(&self) -> (Option<(f64, f64)>, Vec<Curve>) {
        let mut known = self.state.lock();
        let assumed = known.assumed_tokens;
        let averages = known.has_lengths.then(|| (known.lengths.mean(assumed), known.bytes_per_token));
        (averages, known.replicas.iter().map(|replica| replica.curve).collect())
    }

    /// Returns how many tokens a request is expected to use, prompt and all answers.
    #[must_use]
    pub fn expected_tokens(&self, wanted: &Wanted, class: &str) -> u64 {
        let mut known = self.state.lock();
        let class = known.class(class);
        let (prompt, answer) = known.expect(wanted, class);
        drop(known);
        u64::from(prompt) + wanted.in_all(answer)
    }

    /// Decides which model answers a request; the answer reaches the client over `path`. `None` if every model that may answer has only
    /// failed engines. The policy of its alias decides about a request with limits. A request without limits goes to the best model with
    /// room, or else to a model whose engines take requests, the one with the fewest waiting, unless the policy balances engines.
    pub fn route(&self, asked: RouteQuery<'_>, wanted: &Wanted, path: ClientPath) -> Option<Route> {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        known.look(&self.engines, now_ns);
        let class = known.class(asked.class);
        let (prompt_tokens, expected_tokens) = known.expect(wanted, class);
        let slo = wanted.at_the_gateway(&path);
        let request = RoutedRequest {
            class: 0,
            prompt_tokens,
            expected_tokens,
            max_tokens: wanted.max_tokens.unwrap_or_default(),
            slo,
            weight: 1.0,
            allowed: ModelSet::NONE,
        };
        let path = ClientPath { bytes_per_token: BYTES_PER_TOKEN, ..path };
        let until_ns =
            (slo.budget_ns != Slo::NONE).then(|| now_ns.saturating_add(slo.budget_ns).saturating_sub(path.return_ns()));
        let (cached, compared_bytes) = known.cached(&self.engines, asked);
        let Known { named, aliases, replicas, flights, admitted, trials, .. } = &mut *known;
        admitted.clear();
        if asked.alias.and_then(|alias| aliases.get(alias)).is_some_and(Chooser::looks_at_admitted) {
            for (replica, flights) in flights.iter().enumerate() {
                admitted.extend(flights.lock().admitted(replica, now_ns));
            }
        }
        let state = State { replicas, admitted, cached: &cached, path };
        let route = |model, reason, choice, by, decision| Route {
            model,
            reason,
            choice,
            by,
            decision,
            request,
            all_tokens: wanted.in_all(expected_tokens),
            answers: wanted.answers,
            path,
            at_ns: now_ns,
            cached: cached.clone(),
            compared_bytes,
            user: asked.prefix.user,
            weighs_cache: weighs_cache(&state, model),
            class,
            until_ns,
        };
        let mut chooser = asked.alias.and_then(|alias| Some((alias, aliases.get_mut(alias)?)));
        if let Some((alias, chooser)) =
            chooser.as_mut().filter(|(_, chooser)| wanted.is_limited() || chooser.takes_unlimited())
        {
            // Only the time of a single answer shows how fast an engine is. A request that one model has failed has waited enough.
            let trials = Some((trials, asked.refuses_late)).filter(|_| wanted.answers == 1 && !asked.is_retry);
            let choice = chooser.route(request, (asked.models, asked.class), (state, trials), now_ns)?;
            let (by, reason) = (chooser.decided(*alias), choice.reason.name());
            let record = |recorder: &Recorder| recorder.record((asked, &by), (&request, state), &choice, now_ns);
            let decision = self.recorder.as_ref().map(record);
            let (model, choice, by) = (choice.model, Some(choice), Some(by));
            return Some(route(model, reason, choice, by, decision));
        }
        let (best, reason);
        let open = match asked.alias {
            None => {
                reason = "named";
                asked.models
            }
            Some(_) => {
                reason = "best-with-room";
                best = [self.with_room(asked.models)?];
                &best[..]
            }
        };
        let choice = named.route(request, (open, asked.class), (state, None), now_ns)?;
        let (model, choice) = (choice.model, Some(choice));
        Some(route(model, reason, choice, None, None))
    }

    /// Goes on with the counts of decisions of the aliases that have the same name, policy and shadow in the routes `before`, which count
    /// there as well. Call this before the first request.
    pub fn share_tallies(
        &self,
        (aliases, policies): (&[Alias], &AliasPolicies),
        (before, known, known_policies): (&Self, &[Alias], &AliasPolicies),
    ) {
        let before = before.state.lock();
        for (at, (alias, chooser)) in aliases.iter().zip(&mut self.state.lock().aliases).enumerate() {
            let known_at = known.iter().position(|known| known.name == alias.name);
            let same = known_at.filter(|known_at| policies.are_alike(at, (known_policies, *known_at)));
            if let Some(before) = same.and_then(|known_at| before.aliases.get(known_at)) {
                chooser.share_tally(before);
            }
        }
    }

    /// Returns the decisions of each alias's policy so far.
    #[must_use]
    pub fn tallies(&self) -> Vec<Tally> {
        self.state.lock().aliases.iter().map(Chooser::tally).collect()
    }

    fn worth(&self, model: usize) -> f32 {
        self.worths.get(model).copied().unwrap_or_default()
    }

    /// Returns the model with the largest reward that has room. If there is none, returns the model with the fewest waiting requests; models
    /// whose engines all refuse requests come last.
    fn with_room(&self, models: &[usize]) -> Option<usize> {
        let engines = |model: &usize| self.engines.get(*model);
        let with_room = models.iter().filter(|model| engines(model).is_some_and(|engines| engines.has_room()));
        // Among equals, the first.
        let best = with_room.reduce(|best, model| if self.worth(*model) > self.worth(*best) { model } else { best });
        let alive = || models.iter().filter(|model| engines(model).is_some_and(|engines| engines.is_alive()));
        best.or_else(|| {
            alive().min_by_key(|model| engines(model).map(|engines| (engines.is_closed(), engines.waiting())))
        })
        .copied()
    }

    /// Returns the engine of the choice, by its index in the model.
    #[must_use]
    pub fn engine(&self, route: &Route) -> Option<usize> {
        let first = self.state.lock().first.get(route.model).copied()?;
        route.choice?.replica.checked_sub(first)
    }

    /// Returns the chosen engine if limits, a policy or cached prompts chose it; otherwise, the request goes to the least busy engine of
    /// the model.
    #[must_use]
    pub fn preferred(&self, route: &Route) -> Option<usize> {
        let is_chosen = route.by.is_some() || route.request.slo != Slo::unlimited() || route.weighs_cache;
        self.engine(route).filter(|_| is_chosen)
    }

    /// Changes the choice to the engine with the index `engine` in the same model, because that engine serves the request.
    /// `is_there` says whether the engine's load already includes this request.
    pub fn moved(&self, route: &mut Route, engine: usize, is_there: bool) {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        let to = known.first.get(route.model).map(|first| first.saturating_add(engine));
        let (Some(choice), Some(to)) = (route.choice, to) else { return };
        if choice.replica == to {
            return;
        }
        known.look(&self.engines, now_ns);
        let Known { named, aliases, replicas, .. } = &mut *known;
        if let Some(load) = replicas.get_mut(to).map(|replica| &mut replica.load).filter(|_| is_there) {
            // The engine has it now, whether or not it takes others.
            (load.running, load.closed_ns) = (load.running.saturating_sub(1), 0);
        }
        let chooser = route.by.and_then(|by| aliases.get(by.alias)).unwrap_or(named);
        let (waited_ns, state) = (
            now_ns.saturating_sub(route.at_ns),
            State { replicas, admitted: &[], cached: &route.cached, path: route.path },
        );
        route.choice = Some(chooser.moved(choice, (to, waited_ns), &route.request, &state));
    }

    /// Whether the predicted engine is idle and takes requests. A request there costs other requests nothing, and shows whether the
    /// knowledge about the engine still holds.
    #[must_use]
    pub fn is_idle(&self, route: &Route) -> bool {
        let engines = self.engines.get(route.model).zip(self.engine(route));
        engines.is_some_and(|(engines, replica)| engines.in_flight(replica) == 0) && self.opens_in_s(route) == 0
    }

    /// Returns for how many seconds the predicted engine still refuses requests; 0 if it takes them.
    #[must_use]
    pub fn opens_in_s(&self, route: &Route) -> u32 {
        let closed_ns =
            self.engines.get(route.model).zip(self.engine(route)).map(|(of, replica)| of.closed_ns(replica));
        closed_ns.unwrap_or_default().div_ceil(NS_PER_S) as u32
    }
}

impl Known {
    /// Takes over the loads of engines at `now_ns`.
    fn look(&mut self, engines: &[Arc<Engines>], now_ns: u64) {
        for (engines, first) in engines.iter().zip(&self.first) {
            // Waiting requests of a model count for its usable engines in equal parts.
            let (waiting, waiting_tokens) = engines.waiting_each();
            let loads = engines.loads().into_iter().zip(engines.closed_each_ns()).zip(engines.others());
            let replicas = self.replicas.iter_mut().zip(&self.flights).skip(*first);
            for ((replica, flights), (((in_flight, is_usable), closed_ns), reported)) in replicas.zip(loads) {
                let others = reported.unwrap_or_default();
                replica.usable = is_usable;
                replica.load.closed_ns = closed_ns;
                replica.load.running = in_flight.saturating_add(others.running);
                replica.load.waiting = waiting.saturating_add(others.waiting);
                // An engine's report does not contain the lengths of answers.
                let of_others = match others.running.saturating_add(others.waiting) {
                    0 => 0.0,
                    count => f64::from(count) * self.lengths.mean(self.assumed_tokens),
                };
                replica.load.outstanding_tokens =
                    flights.lock().left_tokens().saturating_add(waiting_tokens).saturating_add(of_others as u64);
                // Our own counts are always new, but without a recent report about the others' requests, the load counts as stale, and
                // policies do not decide by it.
                replica.load.updated_ns = if reported.is_some() { now_ns } else { 0 };
            }
        }
        share_groups(&mut self.replicas);
    }

    /// Returns the estimated tokens of a request's prompt, and of each of its answers; 0 if it has none.
    fn expect(&mut self, wanted: &Wanted, class: usize) -> (u32, u32) {
        let prompt = (wanted.body_bytes as f64 / self.bytes_per_token) as u32;
        if wanted.answers == 0 {
            return (prompt, 0);
        }
        // A limit of 0 tokens is as good as 1.
        let most = wanted.max_tokens.map_or(0, |most| most.max(1));
        (prompt, self.lengths.expect(class, most, self.assumed_tokens))
    }

    /// Returns how many tokens an event of an engine has on average.
    fn tokens_per_event(&self, model: usize, replica: usize) -> f64 {
        self.at(model, replica).and_then(|at| self.tokens_per_event.get(at).copied().flatten()).unwrap_or(1.0)
    }

    /// Returns the index of a class among the lengths of answers, and adds it at its first request.
    fn class(&mut self, name: &str) -> usize {
        self.classes.iter().position(|class| class == name).unwrap_or_else(|| {
            self.classes.push(name.to_owned());
            self.classes.len() - 1
        })
    }

    /// Returns for each engine of all models how many tokens of the prompt it probably has in its cache, and how many bytes of the prompt
    /// are in blocks that an earlier prompt there also had. Both lists are empty if all numbers would be 0.
    fn cached(&self, engines: &[Arc<Engines>], asked: RouteQuery<'_>) -> (Vec<u32>, Vec<usize>) {
        let (mut cached, mut compared) = (Vec::new(), Vec::new());
        if asked.prefix.is_empty() {
            return (cached, compared);
        }
        let tokens = |bytes: usize| (bytes as f64 / self.bytes_per_token) as u32;
        for model in asked.models {
            let (Some(engines), Some(first)) = (engines.get(*model), self.first.get(*model)) else { continue };
            let of_each = engines.cached_bytes(asked.prefix).into_iter().enumerate();
            for (place, bytes) in of_each.filter(|(_, bytes)| *bytes != CachedBytes::default()) {
                cached.resize(self.replicas.len(), 0);
                compared.resize(self.replicas.len(), 0);
                let at = first + place;
                if let (Some(cached), Some(compared)) = (cached.get_mut(at), compared.get_mut(at)) {
                    (*cached, *compared) = (tokens(bytes.expected), bytes.compared);
                }
            }
        }
        (cached, compared)
    }

    /// Notes that a sample of an engine's speed has come.
    fn heard(&mut self, model: usize, replica: usize, now_ns: u64) {
        if let Some(at) = self.at(model, replica) {
            self.trials.heard(at, now_ns);
        }
    }

    /// Returns the index of an engine among the engines of all models.
    fn at(&self, model: usize, replica: usize) -> Option<usize> {
        Some(self.first.get(model)? + replica)
    }

    fn flights_at(&mut self, model: usize, replica: usize) -> Option<&mut Arc<Mutex<Flights>>> {
        let at = self.at(model, replica)?;
        self.flights.get_mut(at)
    }

    fn replica(&mut self, model: usize, replica: usize) -> Option<&mut Replica> {
        let at = self.at(model, replica)?;
        self.replicas.get_mut(at).filter(|replica| replica.model == model)
    }
}

/// Whether a choice of this model weighs the prompt in the cache of an engine against the load there: part of the prompt is cached at an
/// engine of the model, and all its usable engines have shown what prompts cost them.
fn weighs_cache(state: &State<'_>, model: usize) -> bool {
    let of_model = || state.replicas.iter().enumerate().filter(|(_, replica)| replica.model == model);
    let mut usable = of_model().filter(|(_, replica)| replica.usable);
    of_model().any(|(at, _)| state.cached_tokens(at) > 0)
        && usable.all(|(_, replica)| replica.curve.samples().1 >= KNOWN_PROMPTS)
}

/// Returns the GPU of each engine, model by model, as a number; an engine without a configured GPU has its own.
fn groups(models: &[config::gateway::ModelSettings]) -> Vec<Vec<u32>> {
    let mut names = Vec::new();
    let mut group = |name: Option<String>| {
        let known = names.iter().position(|known| name.is_some() && *known == name);
        known.unwrap_or_else(|| {
            names.push(name);
            names.len() - 1
        }) as u32
    };
    let of = |config::gateway::ModelSettings { engines, gpus, .. }: &config::gateway::ModelSettings| {
        (0..engines.len()).map(|place| group(gpus.as_ref().and_then(|gpus| gpus.get(place).cloned()))).collect()
    };
    models.iter().map(of).collect()
}
