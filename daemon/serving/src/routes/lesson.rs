//! What an engine's answer teaches about its costs.

use std::sync::Arc;

use engines::reported::Reported;
use parking_lot::Mutex;
use role::access::served::TokenUsage;
use sched::route::{State, unread_tokens};

use super::{
    Known, Route, Routes,
    flights::{Flight, Flights},
};

/// The weight of the newest answer in an average.
const NEWEST: f64 = 0.05;

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
    /// The maximum of tokens in the answer, and the index of its class.
    max_tokens: Option<u32>,
    class: usize,
    /// The requests at its engine, and its own index there.
    flights: Arc<Mutex<Flights>>,
    flight: usize,
    began_ns: u64,
    /// Whether the engine had no other request, ours or of others, when the request began.
    is_alone: bool,
    /// Whether the client took tokens more slowly than the engine made them.
    is_held_up: bool,
    first_ns: Option<u64>,
    last_ns: u64,
    events: u64,
    /// The sum, over all events, of the number of requests that the engine worked on.
    batches: u64,
}

impl Routes {
    /// Begins to learn from an engine's answer to a request, which the engine gets now.
    #[must_use]
    pub fn begin(&self, route: &Route, replica: usize) -> Lesson<'_> {
        let now_ns = (self.now_ns)();
        let mut known = self.state.lock();
        let is_alone = self.engines.get(route.model).is_some_and(|engines| {
            let (in_flight, others) = engines.at_engine(replica, now_ns);
            in_flight <= 1 && others == Reported::default()
        });
        let at = known.first.get(route.model).map_or(usize::MAX, |first| first.saturating_add(replica));
        let Known { aliases, replicas, .. } = &mut *known;
        if let Some(chooser) = route.by.and_then(|by| aliases.get_mut(by.alias)) {
            let state = State { replicas, admitted: &[], cached: &route.cached, path: route.path };
            chooser.began(at, &route.request, &state);
        }
        let cached_tokens = route.cached.get(at).copied().unwrap_or_default();
        let flights = known.flights.get(at).cloned().unwrap_or_default();
        let flight = flights.lock().begin(Flight {
            left_tokens: route.request.expected_tokens,
            unread_tokens: route.request.unread_tokens(cached_tokens).max(1),
            until_ns: route.until_ns,
            reward: self.worth(route.model),
        });
        Lesson {
            routes: self,
            replica,
            model: route.model,
            prompt_tokens: route.request.prompt_tokens,
            cached_tokens,
            compared_bytes: route.compared_bytes.get(at).copied().unwrap_or_default(),
            user: route.user,
            max_tokens: Some(route.request.max_tokens).filter(|tokens| *tokens > 0),
            class: route.class,
            flights,
            flight,
            began_ns: now_ns,
            is_alone,
            is_held_up: false,
            first_ns: None,
            last_ns: now_ns,
            events: 0,
            batches: 0,
        }
    }
}

impl Lesson<'_> {
    /// Notes an event with one token or several.
    pub fn token(&mut self) {
        let now_ns = (self.routes.now_ns)();
        if !self.is_held_up {
            self.first_ns.get_or_insert(now_ns);
        }
        (self.last_ns, self.events) = (now_ns, self.events + 1);
        // Predictions consider the requests of the engine's other clients, too.
        self.batches += self.routes.engines.get(self.model).map_or(1, |engines| {
            let (in_flight, others) = engines.at_engine(self.replica, now_ns);
            u64::from(in_flight) + u64::from(others.running)
        });
        self.flights.lock().token(self.flight);
    }

    /// Notes that the engine had to wait for the client, so that the times of tokens no longer show how fast the engine is.
    pub const fn held_up(&mut self) {
        self.is_held_up = true;
    }

    /// Returns how many events with tokens have passed.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.events
    }

    /// Learns from a complete answer. Most clients do not ask for `usage` in streams, so the number of events with content also teaches the
    /// lengths of answers. Only `usage` teaches the bytes of a prompt's token. The engine's own counts of tokens and of cached tokens of
    /// the prompt take precedence over the count of events and over the expected number of cached tokens. Later expectations are trusted as
    /// far as these counts confirm this expectation. If an engine that reports cached tokens leaves the count out, the count is 0. Only the
    /// uncached tokens of the prompt cost the engine time.
    pub fn learn(&self, usage: Option<TokenUsage>, cached_tokens: Option<u64>, body_bytes: usize) {
        let cached_tokens = self.routes.engines.get(self.model).zip(usage).map_or(cached_tokens, |(engines, usage)| {
            // By this request's own bytes per token: the mean of all requests may be far off.
            let part = self.compared_bytes as f64 / body_bytes.max(1) as f64;
            let compared = (usage.prompt_tokens as f64 * part) as u32;
            engines.confirm_cached(self.replica, self.user, compared, cached_tokens)
        });
        let tokens = usage.map_or(self.events, |usage| usage.completion_tokens);
        let average = |before: f64, now: f64| before + NEWEST * (now - before);
        let mut known = self.routes.state.lock();
        if usage.is_some() || tokens > 0 {
            known.has_lengths = true;
            known.lengths.learn(self.class, self.max_tokens, tokens);
            known.answer_tokens = average(known.answer_tokens, tokens as f64).max(1.0);
        }
        if let Some(usage) = usage.filter(|usage| usage.prompt_tokens > 0) {
            let ratio = body_bytes as f64 / usage.prompt_tokens as f64;
            known.bytes_per_token = average(known.bytes_per_token, ratio).clamp(0.5, 1_000.0);
        }
        let prompt_tokens = usage.map_or(self.prompt_tokens, |usage| usage.prompt_tokens as u32);
        let Some(first_ns) = self.first_ns else { return };
        // The last request may have come long before this answer's end.
        known.look(&self.routes.engines, (self.routes.now_ns)());
        let Some(replica) = known.replica(self.model, self.replica) else { return };
        let others = replica.load.others_utilisation;
        if self.is_alone {
            let cached = cached_tokens.map_or(self.cached_tokens, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
            replica.curve.observe_first_token(unread_tokens(prompt_tokens, cached), first_ns - self.began_ns);
        }
        let step_ns = (self.last_ns - first_ns).checked_div(tokens.saturating_sub(1));
        if let Some(step_ns) = step_ns.filter(|_| !self.is_held_up) {
            let batch = self.batches.div_ceil(self.events.max(1)).max(1);
            replica.curve.observe_step(batch as u32, others, step_ns);
        }
    }
}

impl Drop for Lesson<'_> {
    fn drop(&mut self) {
        self.flights.lock().end(self.flight);
    }
}
