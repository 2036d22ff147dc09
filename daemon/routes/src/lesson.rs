//! What an engine's answer teaches about its costs.

use std::sync::Arc;

use engines::reported::Reported;
use openai::TokenUsage;
use parking_lot::Mutex;
use sched::route::{AnswerDuration, OpenAnswer, State, WINDOW_TOKENS, unread_tokens};

use super::{
    Known, Route, Routes, SOUND_BYTES_PER_TOKEN,
    flights::{Flight, Flights},
    trials::SpeedTrial,
};

/// The weight of the newest answer in an average.
const NEWEST: f64 = 0.05;

/// How many events make a window, whose mean is a sample of the engine's steps.
const WINDOW: u64 = WINDOW_TOKENS as u64;

/// An answer whose passing tokens teach the engine's costs.
#[derive(Debug)]
pub struct Lesson<'a> {
    routes: &'a Routes,
    replica: usize,
    model: usize,
    prompt_tokens: u32,
    /// The tokens of the prompt that the engine probably has in its cache.
    cached_tokens: u32,
    /// The bytes of the prompt in blocks that an earlier prompt at the engine had, too.
    compared_bytes: usize,
    /// The hash of the request's user.
    user: u64,
    /// How many answers the request wants.
    answers: u32,
    /// Their place among the lengths of answers, by the mean of all; `None` for embeddings, which have no answer.
    answer: Option<OpenAnswer>,
    /// The requests at its engine, and its own index there until the engine has sent all of the answer.
    flights: Arc<Mutex<Flights>>,
    flight: Option<usize>,
    /// The time that all requests together had spent at the engine when the request began, and the requests of other clients then.
    spent_before_ns: u128,
    others_before: u32,
    /// If the request tries a model that is predicted late.
    trial: Option<SpeedTrial>,
    began_ns: u64,
    /// Whether the engine had no other request, ours or of others, when the request began.
    is_alone: bool,
    /// Whether the times of events do not show how long the engine's steps are: the client took tokens more slowly than
    /// the engine made them, or a step adds tokens to several answers.
    is_untimed: bool,
    first_ns: Option<u64>,
    last_ns: u64,
    /// When the engine had sent all of an answer, which the client may take later, and the time that all requests together had spent at the
    /// engine by then; `None` for a stream that the client takes as the engine makes it.
    ended: Option<(u64, u128)>,
    events: u64,
    /// The events since the last sample.
    window: Window,
}

/// Events of an answer, after the event at `began_ns`.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    began_ns: u64,
    events: u64,
    /// The sum, over the events, of the number of requests that the engine worked on.
    batches: u64,
    /// The use of its GPU by other engines when the window began, if that is known.
    others: Option<f64>,
}

impl Routes {
    /// Begins to learn from an engine's answer to a request, which the engine gets now.
    #[must_use]
    pub fn begin(&self, route: &Route, replica: usize) -> Lesson<'_> {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        let engines = self.engines.get(route.model);
        let (in_flight, others) = engines.map(|engines| engines.at_engine(replica, now_ns)).unwrap_or_default();
        let at = known.first.get(route.model).map_or(usize::MAX, |first| first.saturating_add(replica));
        let answer = (route.answers > 0).then(|| known.lengths.begin(route.class, route.request.max_tokens));
        let Known { aliases, replicas, .. } = &mut *known;
        // The prompt interrupts the answers there, whichever alias has chosen the engine, or none.
        for chooser in aliases {
            let state = State { replicas, admitted: &[], cached: &route.cached, path: route.path };
            chooser.began(at, &route.request, &state, now_ns);
        }
        let cached_tokens = route.cached.get(at).copied().unwrap_or_default();
        let flights = known.flights.get(at).cloned().unwrap_or_default();
        let flight = Flight {
            left_tokens: route.request.expected_tokens,
            unread_tokens: route.request.unread_tokens(cached_tokens).max(1),
            until_ns: route.until_ns,
            reward: self.worth(route.model),
        };
        let (flight, spent_before_ns) = {
            let mut flights = flights.lock();
            (flights.begin(flight, now_ns), flights.spent_ns(now_ns))
        };
        Lesson {
            routes: self,
            replica,
            model: route.model,
            prompt_tokens: route.request.prompt_tokens,
            cached_tokens,
            compared_bytes: route.compared_bytes.get(at).copied().unwrap_or_default(),
            user: route.user,
            answers: route.answers,
            answer,
            flights,
            flight: Some(flight),
            spent_before_ns,
            others_before: others.running,
            trial: route.trial(),
            began_ns: now_ns,
            is_alone: engines.is_some() && in_flight <= 1 && others == Reported::default(),
            is_untimed: route.answers > 1,
            first_ns: None,
            last_ns: now_ns,
            ended: None,
            events: 0,
            window: Window::default(),
        }
    }
}

impl Lesson<'_> {
    /// Notes an event with one token or several.
    pub fn token(&mut self) {
        let now_ns = (self.routes.now_ns)();
        (self.last_ns, self.events) = (now_ns, self.events + 1);
        // A step adds a token to each answer.
        let answers = u64::from(self.answers.max(1));
        if let Some(flight) = self.flight.filter(|_| self.events % answers == 1 % answers) {
            self.flights.lock().token(flight);
        }
        if self.events.is_multiple_of(WINDOW) {
            self.grow();
        }
        if self.is_untimed {
            return;
        }
        if self.first_ns.is_none() {
            self.first_ns = Some(now_ns);
            self.window.began_ns = now_ns;
            return;
        }
        self.window.events += 1;
        // Predictions consider the requests of the engine's other clients, too.
        self.window.batches += self.routes.engines.get(self.model).map_or(1, |engines| {
            let (in_flight, others) = engines.at_engine(self.replica, now_ns);
            u64::from(in_flight) + u64::from(others.running)
        });
        if self.window.events >= WINDOW {
            self.learn_window(now_ns);
        }
    }

    /// Notes how long the answer is at least, whatever the times of its events show; several answers count as one of their mean length.
    fn grow(&self) {
        if let Some(answer) = &self.answer {
            let mut known = self.routes.state.lock();
            let tokens = self.events as f64 * known.tokens_per_event(self.model, self.replica);
            known.lengths.grow(answer, tokens / f64::from(self.answers));
        }
    }

    /// Learns from the window that ends now how long steps were, and begins the next.
    fn learn_window(&mut self, now_ns: u64) {
        let Window { began_ns, events, batches, others: others_before } =
            std::mem::replace(&mut self.window, Window { began_ns: now_ns, ..Window::default() });
        let mut known = self.routes.state.lock();
        // The last request may have come long ago.
        known.look(&self.routes.engines, now_ns);
        let per_event = known.tokens_per_event(self.model, self.replica);
        let tokens = events as f64 * per_event;
        let Some(replica) = known.replica(self.model, self.replica) else { return };
        let step_ns = now_ns.saturating_sub(began_ns) as f64 / tokens;
        // Requests come and go within a window: as whole numbers, such batches would make steps of that many look too short.
        let batch = (batches as f64 / events as f64).max(1.0);
        let others = replica.load.others_utilisation;
        replica.curve.observe_step(batch, f64::midpoint(others_before.unwrap_or(others), others), step_ns as u64);
        self.window.others = Some(others);
        known.heard(self.model, self.replica, now_ns);
    }

    /// Learns from an answer that came as a whole how long steps were.
    fn learn_duration(&self, tokens: u64, unread_tokens: u32) {
        let (now_ns, spent_ns) = self.ended.unwrap_or_else(|| self.spent_until_now());
        let took_ns = now_ns.saturating_sub(self.began_ns);
        let spent_ns = spent_ns - self.spent_before_ns;
        let others =
            self.routes.engines.get(self.model).map_or(0, |engines| engines.at_engine(self.replica, now_ns).1.running);
        let others = f64::midpoint(self.others_before.into(), others.into());
        let batch = (spent_ns as f64 / took_ns as f64).max(1.0) + others;
        let mut known = self.routes.state.lock();
        known.look(&self.routes.engines, now_ns);
        let Some(at) = known.at(self.model, self.replica) else { return };
        let Known { replicas, durations, .. } = &mut *known;
        if let (Some(replica), Some(durations)) = (replicas.get_mut(at), durations.get_mut(at)) {
            let others = replica.load.others_utilisation;
            let is_alone = self.is_alone;
            let answer = AnswerDuration { unread_tokens, tokens, batch, others, took_ns, is_alone };
            if durations.observe(&mut replica.curve, &answer) {
                known.heard(self.model, self.replica, now_ns);
            }
        }
    }

    /// Notes that the engine has sent all of its answer, and so does not work on the request any more: the client may take some of it
    /// later. Only the first call counts.
    pub fn ended(&mut self) {
        if self.ended.is_none() {
            self.ended = Some(self.spent_until_now());
            self.leave();
        }
    }

    /// Takes the request out of those at its engine.
    fn leave(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.flights.lock().end(flight, (self.routes.now_ns)());
        }
    }

    /// Returns the time, and the time that all requests together have spent at the engine.
    fn spent_until_now(&self) -> (u64, u128) {
        let now_ns = (self.routes.now_ns)();
        (now_ns, self.flights.lock().spent_ns(now_ns))
    }

    /// Notes that the engine had to wait for the client, so that the times of tokens no longer show how fast the engine is.
    pub const fn held_up(&mut self) {
        self.is_untimed = true;
    }

    /// Returns how many events with tokens have passed.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.events
    }

    /// Learns from a complete answer, or from all answers to a request. Most clients do not ask for `usage` in streams, so the number of
    /// events with content also teaches the lengths of answers: several answers count as one of their mean length, and embeddings do not
    /// count. If an answer had no events, its time teaches the speed of its engine, provided that `usage` says how many tokens it had. Only
    /// `usage` teaches the bytes of a prompt's token. The engine's own counts of tokens and of cached tokens of the prompt take precedence
    /// over the count of events and over the expected number of cached tokens. Later expectations are trusted as far as these counts
    /// confirm this expectation. If an engine that reports cached tokens leaves the count out, the count is 0. Only the uncached tokens of
    /// the prompt cost the engine time.
    pub fn learn(&mut self, usage: Option<TokenUsage>, cached_tokens: Option<u64>, body_bytes: usize) {
        let cached_tokens = self.routes.engines.get(self.model).zip(usage).map_or(cached_tokens, |(engines, usage)| {
            // By this request's own bytes per token: the mean of all requests may be far off.
            let part = self.compared_bytes as f64 / body_bytes.max(1) as f64;
            let compared = (usage.prompt_tokens as f64 * part) as u32;
            engines.confirm_cached(self.replica, self.user, compared, cached_tokens)
        });
        let tokens = usage.map_or(self.events, |usage| usage.completion_tokens);
        let average = |before: f64, now: f64| before + NEWEST * (now - before);
        let mut known = self.routes.state.lock();
        if let Some(answer) = self.answer.filter(|_| usage.is_some() || tokens > 0) {
            known.has_lengths = true;
            known.lengths.end(&answer, tokens as f64 / f64::from(self.answers));
        }
        let at = known.at(self.model, self.replica);
        if let Some(usage) = usage.filter(|usage| usage.completion_tokens > 0 && self.events > 0)
            && let Some(per_event) = at.and_then(|at| known.tokens_per_event.get_mut(at))
        {
            let ratio = usage.completion_tokens as f64 / self.events as f64;
            *per_event = Some(average(per_event.unwrap_or(ratio), ratio).clamp(0.1, 1_000.0));
        }
        if let Some(usage) = usage.filter(|usage| usage.prompt_tokens > 0) {
            let (least, most) = SOUND_BYTES_PER_TOKEN;
            let ratio = (body_bytes as f64 / usage.prompt_tokens as f64).clamp(least, most);
            known.bytes_per_token = average(known.bytes_per_token, ratio);
        }
        drop(known);
        let prompt_tokens = usage.map_or(self.prompt_tokens, |usage| usage.prompt_tokens as u32);
        let cached = cached_tokens.map_or(self.cached_tokens, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        self.learn_speed(tokens, unread_tokens(prompt_tokens, cached));
        if let Some(trial) = self.trial.filter(|_| tokens > 0) {
            let end_ns = self.ended.map_or_else(|| (self.routes.now_ns)(), |(end_ns, _)| end_ns);
            self.routes.state.lock().trials.answered(&trial, self.first_ns, tokens, end_ns);
        }
    }

    /// Learns from a complete answer of `tokens` what the prompt and the last steps cost.
    fn learn_speed(&mut self, tokens: u64, unread_tokens: u32) {
        let Some(first_ns) = self.first_ns else {
            if self.events == 0 && !self.is_untimed {
                self.learn_duration(tokens, unread_tokens);
            }
            return;
        };
        if self.is_alone
            && let Some(replica) = self.routes.state.lock().replica(self.model, self.replica)
        {
            replica.curve.observe_first_token(unread_tokens, first_ns - self.began_ns);
        }
        // An answer that is too short for a window is a sample as a whole.
        if self.window.events > 0 && self.events <= WINDOW && !self.is_untimed {
            self.learn_window(self.last_ns);
        }
    }
}

impl Drop for Lesson<'_> {
    fn drop(&mut self) {
        self.leave();
        self.grow();
        if let Some(answer) = &self.answer {
            self.routes.state.lock().lengths.cut(answer);
        }
    }
}
