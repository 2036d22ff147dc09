//! The metrics of a gateway.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use ::engines::{
    health::Found,
    places::{Engines, PrefixAffinity},
};
use openai::TokenUsage;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use role::{access::served::Served, user_labels::UserLabels};
use routes::{Decided, Route};
use sched::route::{ModelChoice, Reason};
use tenants::spending::Spending;

use self::{
    engines::ShownEngines,
    genai::{DURATION, GenAi},
    quotas::Quotas,
};

mod engines;
mod genai;
mod quotas;

/// The kind of a request, and its result.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    operation: &'static str,
    model: Arc<str>,
    /// "answered", "cancelled", or the code of a refusal.
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfModel {
    model: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Deadlines {
    model: Arc<str>,
    /// "met" or "missed".
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Placed {
    model: Arc<str>,
    /// "kept", "moved" or "new" ([`PrefixAffinity`]).
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Decision {
    alias: String,
    policy: &'static str,
    model: Arc<str>,
    reason: &'static str,
    /// Why the policy could not decide; empty if it did.
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Shadowed {
    alias: String,
    /// The shadow's kind.
    policy: &'static str,
    /// "same" or "other": whether the shadow would have chosen the same model.
    model: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Checked {
    model: Arc<str>,
    /// The position of the engine in the configuration, from 1.
    engine: usize,
    /// "ready", "not_ready" or "silent".
    result: &'static str,
}

/// The bucket limits of the histogram of durations as multiples of predictions.
const RATIOS: [f64; 11] = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Tokens {
    model: Arc<str>,
    /// "input" or "output", as OpenTelemetry's `gen_ai.token.type`.
    kind: &'static str,
    user: Arc<str>,
    class: String,
}

/// The metrics of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayMetrics {
    ended: Family<Ended, Counter>,
    in_flight: Gauge<i64, AtomicI64>,
    waited: Family<OfModel, Histogram>,
    first_token: Family<OfModel, Histogram>,
    tokens: Family<Tokens, Counter>,
    /// The label sets in this family.
    known_tokens: Arc<Mutex<HashSet<Tokens>>>,
    users: UserLabels,
    retries: Family<OfModel, Counter>,
    deadlines: Family<Deadlines, Counter>,
    ratio: Family<OfModel, Histogram>,
    /// The durations of the same answers, as predicted and as they were.
    predicted: Family<OfModel, Histogram>,
    actual: Family<OfModel, Histogram>,
    placed: Family<Placed, Counter>,
    decisions: Family<Decision, Counter>,
    shadowed: Family<Shadowed, Counter>,
    checks: Family<Checked, Counter>,
    genai: GenAi,
    engines: ShownEngines,
    quotas: Quotas,
    full: Counter,
    handshakes: Family<[(&'static str, &'static str); 1], Counter>,
    evicted: Counter,
    displaced: Counter,
    untaken: Counter,
}

/// The parts of a gateway whose state is read at each scrape; by default none, as without a gateway.
#[derive(Debug, Default)]
pub struct ShownGateway {
    /// The engines of each model.
    pub models: Vec<(Arc<str>, Arc<Engines>)>,
    /// The monthly quotas of keys in tokens, by the names of the keys.
    pub quotas: Vec<(Arc<str>, u64)>,
    /// How much of the quotas is used.
    pub spending: Arc<Spending>,
}

/// A request in service, counted while this lives.
#[derive(Debug)]
pub struct InFlight(Gauge<i64, AtomicI64>);

impl Default for GatewayMetrics {
    fn default() -> Self {
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 16));
        let durations: fn() -> Histogram = || Histogram::new(DURATION);
        Self {
            ended: Family::default(),
            in_flight: Gauge::default(),
            waited: Family::new_with_constructor(seconds),
            first_token: Family::new_with_constructor(seconds),
            tokens: Family::default(),
            known_tokens: Arc::default(),
            users: UserLabels::default(),
            retries: Family::default(),
            deadlines: Family::default(),
            ratio: Family::new_with_constructor(|| Histogram::new(RATIOS)),
            predicted: Family::new_with_constructor(durations),
            actual: Family::new_with_constructor(durations),
            placed: Family::default(),
            decisions: Family::default(),
            shadowed: Family::default(),
            checks: Family::default(),
            genai: GenAi::default(),
            engines: ShownEngines::default(),
            quotas: Quotas::default(),
            full: Counter::default(),
            handshakes: Family::default(),
            evicted: Counter::default(),
            displaced: Counter::default(),
            untaken: Counter::default(),
        }
    }
}

impl GatewayMetrics {
    /// Returns metrics that name users by these labels.
    #[must_use]
    pub fn new(users: UserLabels) -> Self {
        Self { quotas: Quotas::new(users.clone()), users, ..Self::default() }
    }

    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("gateway_requests", "Requests for models that ended", self.ended.clone());
        registry.register("gateway_in_flight", "Requests for models that are served or wait", self.in_flight.clone());
        let help = "How long requests waited for a place at an engine, in seconds";
        registry.register("gateway_wait_seconds", help, self.waited.clone());
        let help = "From a request's last byte to its answer's first token, in seconds";
        registry.register("gateway_first_token_seconds", help, self.first_token.clone());
        registry.register(
            "gateway_tokens",
            "Tokens of prompts and answers, by the best available count",
            self.tokens.clone(),
        );
        let help =
            "Requests retried at another engine or model, because one had failed before the first token or had no room";
        registry.register("gateway_retries", help, self.retries.clone());
        let help = "Requests with a deadline, by whether it was met; failures, and refusals for lack of engines or time, count as missed";
        registry.register("gateway_deadlines", help, self.deadlines.clone());
        let help = "How long answers took, as a multiple of the predicted time";
        registry.register("gateway_predicted_ratio", help, self.ratio.clone());
        let help = "How long answers were predicted to take from the choice of their model, in seconds";
        registry.register("gateway_predicted_seconds", help, self.predicted.clone());
        let help = "How long the answers in gateway_predicted_seconds took, in seconds";
        registry.register("gateway_actual_seconds", help, self.actual.clone());
        let help = "Requests with a session or a long enough prompt, by whether they went to an engine that had served a similar one";
        registry.register("gateway_affinity", help, self.placed.clone());
        let help = "Choices of a model by the policies of aliases, by reason";
        registry.register("gateway_decisions", help, self.decisions.clone());
        let help = "Choices of a model that a shadow policy made as well, by whether it chose the same model";
        registry.register("gateway_shadow_decisions", help, self.shadowed.clone());
        registry.register("gateway_checks", "Checks of engines, by result", self.checks.clone());
        registry.register_collector(Box::new(self.engines.clone()));
        registry.register_collector(Box::new(self.quotas.clone()));
        let help = "TLS handshakes with clients at the gateway's own listeners, by result";
        registry.register("gateway_handshakes", help, self.handshakes.clone());
        let help = "Clients at the gateway's own listeners that were closed before a request was admitted, because others waited";
        registry.register("gateway_evicted_clients", help, self.evicted.clone());
        let help = "Answers that were discarded, because their clients took none of their bytes within stall_timeout_seconds, or held \
                    up an engine for as long while others waited for it";
        registry.register("gateway_untaken_answers", help, self.untaken.clone());
        let help = "Connections to the gateway's own listeners that were closed because all were taken and another client waited";
        registry.register("gateway_displaced_connections", help, self.displaced.clone());
        let help = "Times that a client had to wait, because the gateway's own listener had max_connections";
        registry.register("gateway_connections_full", help, self.full.clone());
    }

    /// Registers metrics whose names other programs share, in a registry without a prefix.
    pub fn register_conventional(&self, registry: &mut Registry) {
        self.genai.register(registry);
    }

    /// Shows exactly these engines and quotas from now on.
    pub fn show(&self, ShownGateway { models, quotas, spending }: ShownGateway) {
        self.engines.replace(models);
        self.quotas.replace(quotas, spending);
    }

    /// Counts that a client has to wait, because the maximum of connections is open.
    pub fn is_full(&self) {
        self.full.inc();
    }

    /// Counts a TLS handshake with a client: "completed", "failed", "timeout", or "crowded" for one that made room for another.
    pub fn handshake(&self, result: &'static str) {
        self.handshakes.get_or_create(&[("result", result)]).inc();
    }

    /// Counts a client that was closed in favour of another before any of its requests was admitted.
    pub(crate) fn evicted(&self) {
        self.evicted.inc();
    }

    /// Counts a known client's connection that was closed in favour of another client.
    pub(crate) fn displaced(&self) {
        self.displaced.inc();
    }

    #[cfg(test)]
    pub(crate) fn displaced_so_far(&self) -> u64 {
        self.displaced.get()
    }

    #[cfg(test)]
    pub(crate) fn evicted_so_far(&self) -> u64 {
        self.evicted.get()
    }

    /// Counts an answer whose rest was discarded because its client stopped reading.
    pub(crate) fn untaken(&self) {
        self.untaken.inc();
    }

    /// Counts a check of an engine.
    pub fn checked(&self, model: &Arc<str>, replica: usize, found: Found) {
        let result = match found {
            Found::Ready => "ready",
            Found::NotReady => "not_ready",
            Found::Silent => "silent",
        };
        self.checks.get_or_create(&Checked { model: model.clone(), engine: replica + 1, result }).inc();
    }

    /// Counts a request with a deadline, by whether it was answered in time. Every failure makes it miss its deadline, except one caused by
    /// its client.
    pub fn deadline(&self, model: &Arc<str>, is_met: bool) {
        let result = if is_met { "met" } else { "missed" };
        self.deadlines.get_or_create(&Deadlines { model: model.clone(), result }).inc();
    }

    /// Counts a complete answer that took `took` since the decision about it, beside its prediction; nothing if there
    /// was none.
    pub fn finished(&self, model: &Arc<str>, took: Duration, route: &Route) {
        if let Some(predicted) = route.predicted() {
            let of = OfModel { model: model.clone() };
            self.ratio.get_or_create(&of).observe(took.as_secs_f64() / predicted.as_secs_f64());
            self.predicted.get_or_create(&of).observe(predicted.as_secs_f64());
            self.actual.get_or_create(&of).observe(took.as_secs_f64());
        }
    }

    /// Counts a decision of an alias's policy, and whether its shadow agreed.
    pub fn decided(&self, alias: &str, by: &Decided, model: &Arc<str>, choice: &ModelChoice) {
        let cause = if let Reason::Fallback(cause) = choice.reason { cause.name() } else { "" };
        let (alias, reason) = (alias.to_owned(), choice.reason.name());
        if let Some(shadow) = by.shadow {
            let same = if shadow.model == Some(choice.model) { "same" } else { "other" };
            let labels = Shadowed { alias: alias.clone(), policy: shadow.policy, model: same };
            self.shadowed.get_or_create(&labels).inc();
        }
        let labels = Decision { alias, policy: by.policy, model: model.clone(), reason, cause };
        self.decisions.get_or_create(&labels).inc();
    }

    /// Counts a request while the returned value lives.
    #[must_use]
    pub fn begin(&self) -> InFlight {
        self.in_flight.inc();
        InFlight(self.in_flight.clone())
    }

    /// Counts the end of a request.
    pub fn ended(&self, served: &Served) {
        let Served { operation, reason: outcome, .. } = *served;
        self.ended.get_or_create(&Ended { operation, model: served.model.clone(), outcome }).inc();
        self.genai.note(served);
    }

    /// Notes how long a request waited for a place.
    pub fn waited(&self, model: &Arc<str>, seconds: f64) {
        self.waited.get_or_create(&OfModel { model: model.clone() }).observe(seconds);
    }

    /// Counts a request that may profit from an engine's cache, by whether it went there.
    pub fn placed(&self, model: &Arc<str>, affinity: PrefixAffinity) {
        self.placed.get_or_create(&Placed { model: model.clone(), result: affinity.name() }).inc();
    }

    /// Notes when the first token passed.
    pub fn first_token(&self, model: &Arc<str>, seconds: f64) {
        self.first_token.get_or_create(&OfModel { model: model.clone() }).observe(seconds);
    }

    /// Counts the tokens of a request, by model, user and class, by the best available count.
    pub fn used(&self, (model, user, class): (&Arc<str>, Option<&Arc<str>>, &str), usage: TokenUsage) {
        let user = user.map(|user| self.users.of(user)).unwrap_or_default();
        let mut known = self.known_tokens.lock();
        for (kind, tokens) in [("input", usage.prompt_tokens), ("output", usage.completion_tokens)] {
            let labels = Tokens { model: model.clone(), kind, user: user.clone(), class: class.to_owned() };
            self.tokens.get_or_create(&labels).inc_by(tokens);
            known.insert(labels);
        }
    }

    /// Removes the counters of classes whose names `exists` does not know, so that they do not accumulate over many policies.
    pub fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.known_tokens.lock().retain(|labels| {
            let is_kept = exists(&labels.class);
            if !is_kept {
                self.tokens.remove(labels);
            }
            is_kept
        });
    }

    /// Counts a request that another engine received.
    pub fn retried(&self, model: &Arc<str>) {
        self.retries.get_or_create(&OfModel { model: model.clone() }).inc();
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn text(metrics: &GatewayMetrics) -> String {
        let (mut registry, mut text) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        encode(&mut text, &registry).unwrap();
        text
    }

    const USAGE: TokenUsage = TokenUsage { prompt_tokens: 5, completion_tokens: 11 };

    #[test]
    fn so_many_users_have_tokens_and_quotas_of_their_own_and_the_rest_is_added_up() {
        for (limit, own) in [(1, 1), (0, 0)] {
            let labels = UserLabels::default();
            labels.limit(limit);
            let metrics = GatewayMetrics::new(labels);
            let users = ["u0", "u1", "u2"].map(Arc::<str>::from);
            for user in &users {
                metrics.used((&"large".into(), Some(user), "plain"), USAGE);
            }
            metrics.used((&"large".into(), None, "plain"), USAGE);
            let quotas = users.into_iter().zip([10, 20, 30]).collect();
            metrics.show(ShownGateway { quotas, ..ShownGateway::default() });
            let (text, rest) = (text(&metrics), 3 - own);
            let tokens = |user: &str, tokens: usize| {
                format!(
                    "gateway_tokens_total{{model=\"large\",kind=\"input\",user=\"{user}\",class=\"plain\"}} {tokens}\n"
                )
            };
            let quota = if own == 0 { 60 } else { 50 };
            for line in [
                tokens("other", 5 * rest),
                tokens("", 5),
                format!("gateway_user_quota_tokens{{user=\"other\"}} {quota}\n"),
                "gateway_user_quota_used_tokens{user=\"other\"} 0\n".to_owned(),
            ] {
                assert!(text.contains(&line), "{line}{text}");
            }
            assert_eq!(text.contains(&tokens("u0", 5)), own == 1, "{text}");
            assert_eq!(text.contains("gateway_user_quota_tokens{user=\"u0\"} 10\n"), own == 1, "{text}");
            assert!(!["u1", "u2"].iter().any(|user| text.contains(user)), "{text}");
        }
    }

    #[test]
    fn tokens_of_classes_that_no_policy_names_any_more_are_dropped() {
        let metrics = GatewayMetrics::default();
        for class in ["kept", "gone"] {
            metrics.used((&"large".into(), None, class), USAGE);
        }
        metrics.retain(|class| class == "kept");
        let text = text(&metrics);
        assert!(text.contains("class=\"kept\"") && !text.contains("class=\"gone\""), "{text}");
    }
}
