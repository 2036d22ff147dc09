//! Requests that arrive as HTTP/3 streams or over TCP: the gateway reads each, gives it a place at an engine of its model, and
//! passes the answer on as it arrives.
//!
//! | what may go wrong | what the client gets |
//! |---|---|
//! | the request cannot be read, or names an unknown model | an error of the API, 400 to 415 |
//! | the client goes away | nothing; the engine's request ends as well |
//! | an engine fails before its first token passes | the answer of another engine; if there is none, 502 or 504 |
//! | the engines report within their events that they refuse the request, before the first token | the last engine's error, 400 to 499 |
//! | an engine fails while it answers | an event with the error, if events are streamed, or else 502 |
//! | more requests than the engines of a model work on, and than may wait | the answer of the alias's next model; if there is none, 429 and `retry-after` |
//! | an event of more than 1 MiB, as requests can ask for | 502; if a part of the answer has passed, an event with the error |

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Result;
use engines::{
    NO_ENGINE_PERMILLE,
    places::{PrefixHashes, Prefixes, Wish},
};
use masque::h3::{Field, RequestHead};
use openai::{OpenAiError, Operation, RoutingFields, excerpt};
use parking_lot::Mutex;
use quic::clock::Clock;
use role::{
    access::served::{Served, UNTAKEN},
    classes::Classes,
    holder::Holder,
};
use routing::decision::AnswerOutcome;
use sched::{
    class::Late,
    route::{Curve, MeanLengths},
};
use tokio::{runtime::Handle, task::JoinSet};

use crate::{
    LOAD,
    decisions::Decisions,
    learned::{Learned, LearnedClass, LearnedEngine},
    live::{Live, LiveRequest},
    metrics::{GatewayMetrics, ShownGateway},
    routes::{AliasPolicies, AnswerTiming, Route, RouteQuery, Routes, Wanted},
    spending::Spending,
    tenants::Tenants,
};

mod answer;
mod body;
mod caller;
mod exchange;
mod failed_try;
mod held_events;
mod model;
mod overview;
mod own;
mod pieces;
mod silence;
#[cfg(test)]
mod tests;
mod tries;

use self::{
    answer::Done,
    body::Bodies,
    caller::Caller,
    exchange::{ANSWER_TIMEOUT, Ended, Gone},
    held_events::HoldLimits,
    model::Model,
    own::refuse,
};
pub use self::{
    caller::Asker,
    exchange::{Awaited, Exchange, ResponseBody, TcpExchange},
    model::read_key,
};

/// A gateway: its models, and the connections to their engines. A changed configuration needs a new gateway.
pub struct Gateway {
    settings: config::gateway::GatewaySettings,
    models: Vec<Model>,
    policies: AliasPolicies,
    routes: Routes,
    tenants: Tenants,
    prefixes: Prefixes,
    /// The bodies of its requests.
    bodies: Arc<Bodies>,
    metrics: GatewayMetrics,
    live: Arc<Live>,
    decisions: Decisions,
    clock: Clock,
    hold_limits: HoldLimits,
    /// The checks of its engines, and their return after an ejection.
    checking: Mutex<JoinSet<()>>,
}

/// Why a request ended without a complete answer.
enum Failure {
    /// The client is gone.
    Gone,
    /// The client took nothing of the answer for too long.
    Untaken,
    /// It is refused.
    Refused(OpenAiError),
    /// It broke off after a part of the answer had passed.
    Broken(OpenAiError, Ended),
}

impl From<OpenAiError> for Failure {
    fn from(refusal: OpenAiError) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Gone> for Failure {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}

impl Gateway {
    /// Prepares a gateway with idle engines and the knowledge that was `learned` before. It enters its requests in `live` and
    /// their tokens in `spending`, and leaves its aliases' decisions in `decisions` if they are recorded. Open requests of the gateway
    /// `before` at the same engines of the same models still count.
    ///
    /// # Errors
    /// A file with a key cannot be read, or contains characters that no field may; or a file with a policy cannot be used.
    pub fn new(
        settings: &config::gateway::GatewaySettings,
        classes: &Classes,
        ((metrics, live, decisions), spending): ((GatewayMetrics, Arc<Live>, Decisions), &Arc<Spending>),
        (learned, before): (&Learned, Option<&Self>),
    ) -> Result<Arc<Self>> {
        let clock = Clock::system();
        let discipline = classes.policy().schedule.discipline;
        let model = |model| Model::new(model, settings.check_interval, (discipline, clock), &metrics);
        let models: Vec<_> = settings.models.iter().map(model).collect::<Result<_>>()?;
        let engines = models.iter().map(|model| model.engines.clone()).collect();
        let policies = AliasPolicies::read(settings)?;
        let routes = Routes::new(settings, &policies, engines, clock.now_ns);
        routes.recall(learned.averages, |model, engine| {
            let (model, engine) =
                (settings.models.get(model)?, settings.models.get(model)?.engines.get(engine)?.to_string());
            let is_it = |known: &&LearnedEngine| known.model == model.name && known.engine == engine;
            Curve::from_numbers(&learned.engines.iter().find(is_it)?.curve)
        });
        for LearnedClass { class, tokens, used } in &learned.classes {
            routes.recall_lengths(class, MeanLengths { tokens: *tokens, used: *used });
        }
        if let Some(before) = before {
            model::share_requests((&routes, &models), (&before.routes, &before.models));
        }
        Ok(Arc::new(Self {
            policies,
            routes,
            tenants: Tenants::new(&settings.keys, spending, clock.now_ns, before.map(|before| &before.tenants)),
            prefixes: Prefixes::default(),
            models,
            bodies: Bodies::new(settings.bodies_bytes as usize),
            settings: settings.clone(),
            metrics,
            live,
            decisions,
            clock,
            hold_limits: HoldLimits::default(),
            checking: Mutex::default(),
        }))
    }

    /// Starts checks of engines on a runtime, and brings ejected engines back. Call it when the gateway takes effect; the checks last as
    /// long as the gateway.
    pub fn begin(&self, runtime: &Handle) {
        let mut checking = self.checking.lock();
        if checking.is_empty() {
            let models = self.models.iter().filter_map(|model| Some((model, model.checks.as_ref()?)));
            models.for_each(|(model, checks)| checks.begin(&model.urls, &mut checking, runtime));
            for model in &self.models {
                checking.spawn_on(model.engines.clone().readmit(self.clock), runtime);
            }
        }
    }

    /// Returns its engines, and the quotas of its keys, for the metrics.
    #[must_use]
    pub fn shown(&self) -> ShownGateway {
        let quotas = self.settings.keys.iter().filter_map(|key| Some((key.name.as_str().into(), key.monthly_tokens?)));
        let models = self.models.iter().map(|model| (model.name.clone(), model.engines.clone()));
        ShownGateway { models: models.collect(), quotas: quotas.collect(), spending: self.tenants.spending().clone() }
    }

    /// Whether another gateway would handle requests in the same way.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let files = |of: &Self| {
            of.models.iter().map(|model| (model.key.clone(), model.authorities.clone())).collect::<Vec<_>>()
        };
        self.settings == other.settings && files(self) == files(other) && self.policies == other.policies
    }

    /// Returns how long a client may stop reading an answer.
    #[must_use]
    pub const fn stall_timeout(&self) -> Duration {
        self.settings.stall_timeout
    }

    /// Whether a request is for a gateway rather than a proxy: it is not for a tunnel.
    #[must_use]
    pub fn takes(head: &RequestHead) -> bool {
        head.method != b"CONNECT"[..]
    }

    /// Whether it would serve a client with the credentials in this head.
    #[must_use]
    pub fn knows(&self, head: &RequestHead) -> bool {
        self.tenants.of(head, SystemTime::now()).is_ok()
    }

    /// Orders waiting requests by a policy's schedule from now on.
    pub fn follow(&self, classes: &Classes) {
        let discipline = classes.policy().schedule.discipline;
        self.models.iter().for_each(|model| model.engines.reorder(discipline));
    }

    /// Serves a request whose head was read, to its end. Outgoing bytes are in the class that the policy gives the request, moved
    /// as the request's signals ask. Returns the result.
    pub async fn serve(&self, mut exchange: Exchange, head: &RequestHead, classes: &Classes, asker: &Asker) -> Served {
        let began = Instant::now();
        let in_flight = self.metrics.begin();
        let operation = Operation::of(&head.method, head.path.as_deref().unwrap_or_default());
        let admitted = operation.clone().and_then(|operation| match operation {
            Operation::Health => Ok((operation, None)),
            _ => Ok((operation, self.tenants.of(head, SystemTime::now())?)),
        });
        let tenant = admitted.as_ref().ok().and_then(|(_, tenant)| tenant.clone());
        let caller = Caller::new(classes, asker, head, exchange.signal(), tenant);
        exchange.set_terms(&caller.terms(None));
        let entry = self.live.enter(caller.user().cloned());
        let label = operation.as_ref().map_or("unknown", |operation| operation.label());
        let mut served = Served::begin(entry.id(), label, caller.user().cloned(), (asker.listener, asker.client));
        // The fields about the chosen model, if the request is refused.
        let mut decided = Vec::new();
        let ended = match admitted {
            Ok((operation @ (Operation::Health | Operation::Models | Operation::Model), _)) => {
                self.inform(&mut exchange, operation, head).await
            }
            Ok((operation, _)) => {
                let notes = (&mut served, &mut decided);
                self.answer(&mut exchange, operation, head, (&caller, &entry), notes).await
            }
            Err(refusal) => Err(refusal.into()),
        };
        let (mut patience, mut is_untaken) = (self.settings.stall_timeout, false);
        let ended = match ended {
            Ok(()) => {
                (served.status, served.reason) = (served.status.or(Some(200)), "answered");
                Ended::Whole
            }
            Err(Failure::Gone) => {
                served.reason = exchange.why_gone();
                Ended::Cut
            }
            Err(Failure::Untaken) => {
                is_untaken = exchange.note_untaken();
                served.reason = UNTAKEN;
                Ended::Cut
            }
            Err(Failure::Refused(refusal)) => {
                if refusal.is_failure() {
                    self.miss(&served);
                }
                (served.status, served.reason) = (Some(refusal.status()), refusal.code());
                patience = ANSWER_TIMEOUT;
                let model = self.models.iter().find(|model| model.name == served.model);
                // An edge then knows that other requests may be served here.
                let none = (refusal == OpenAiError::NoEngine).then_some(NO_ENGINE_PERMILLE);
                let load = model.map(|model| model.engines.load_permille()).or(none);
                decided.extend(load.map(|load| Field::new(LOAD, load.to_string())));
                refuse(&mut exchange, &refusal, decided, head.method == b"HEAD"[..]).await
            }
            Err(Failure::Broken(refusal, ended)) => {
                tracing::debug!(%refusal, "answer broke off");
                self.miss(&served);
                // The answer had begun with success.
                (served.status, served.reason) = (Some(200), refusal.code());
                ended
            }
        };
        (served.passed_tokens, served.first_token) = entry.passed();
        served.duration = began.elapsed();
        drop(entry);
        if !exchange.end(ended, patience).await {
            is_untaken = true;
            served.reason = if served.reason == "answered" { UNTAKEN } else { served.reason };
        }
        if is_untaken {
            self.metrics.untaken();
        }
        // After the end, so that metrics and the log agree. Over TCP, the client may not have read the last pieces yet.
        self.metrics.ended(&served);
        drop(in_flight);
        served
    }

    /// Serves a request with a body, and notes its properties in `served`. If it fails after a model was chosen, adds
    /// the fields about the choice to `decided`.
    async fn answer(
        &self,
        exchange: &mut Exchange,
        operation: Operation,
        head: &RequestHead,
        (caller, entry): (&Caller<'_>, &LiveRequest),
        (served, decided): (&mut Served, &mut Vec<Field>),
    ) -> Result<(), Failure> {
        if !head.field("content-type").is_none_or(|kind| is_json(kind)) {
            return Err(OpenAiError::ContentType.into());
        }
        let tenant = caller.tenant.clone().map(|tenant| self.tenants.begin(tenant, SystemTime::now())).transpose()?;
        let share = self.bodies.begin(Holder::of(caller.user(), caller.asker.client));
        let body = body::read(exchange, self.settings.max_body_bytes as usize, share).await?;
        let fields = RoutingFields::read(&body.bytes)?;
        let terms = caller.terms(Some(&fields));
        exchange.set_terms(&terms);
        (served.class, served.asked) = (terms.class.policy().name.clone(), excerpt(&fields.model).to_owned());
        let began = Instant::now();
        let wanted = Wanted::of(head, terms.deadline_ns, (operation, &fields), body.bytes.len())?;
        let (mut models, alias) = self.named(&fields.model)?;
        served.has_deadline = wanted.is_limited();
        if let Some(tenant) = &tenant {
            tenant.reserve(self.routes.expected_tokens(&wanted, &terms.class.policy().name))?;
        }
        let prefers = |model: &usize| self.models.get(*model).is_some_and(|model| model.affinity);
        let known = if models.iter().any(prefers) {
            self.prefixes.of(head, caller.user().map(|user| &**user), fields.prompt(&body.bytes))
        } else {
            Default::default()
        };
        let (mut is_retry, mut is_crowded) = (false, false);
        loop {
            let class = &terms.class.policy().name;
            let asked = RouteQuery { models: &models, alias, class, prefix: &known, is_retry };
            let path = caller.asker.path(exchange.ahead(), &terms);
            // A model that failed before has taken a part of the time.
            let passed = began.elapsed();
            let route = self.routes.route(asked, &wanted.after(passed), path);
            // The request may get a place later if only too many wait.
            let none = if is_crowded { OpenAiError::Crowded } else { OpenAiError::NoEngine };
            let mut route = route.ok_or(none)?;
            self.count_decision(&route);
            // Written when it is dropped, however the request ends.
            let most_bytes = u64::from(self.settings.decisions_bytes);
            let mut draft = route.decision.take().map(|decision| self.decisions.draft(decision, most_bytes));
            let model = self.models.get(route.model).ok_or(OpenAiError::NoEngine)?;
            served.model = model.name.clone();
            let prefix = if model.affinity { known.clone() } else { PrefixHashes::default() };
            let wish = Wish { prefix, preferred: self.routes.preferred(&route), weighs_cache: route.weighs_cache() };
            // With a single engine there is no preference.
            if model.urls.len() > 1
                && let Some(engine) = model.engines.foresee(&wish)
            {
                self.routes.moved(&mut route, engine, false);
            }
            entry.waits(&terms.class.policy().name, &model.name, wanted.budget());
            if route.is_late() && terms.class.policy().late == Late::Refuse && !self.routes.is_idle(&route) {
                served.predicted = route.predicted();
                self.note_engine(draft.as_mut(), model, &route);
                *decided = model.fields(&route);
                return Err(OpenAiError::Late.into());
            }
            let may_add_usage = model.ask_usage && operation.may_have_usage_event();
            let added = may_add_usage.then(|| fields.usage_option(&body.bytes)).flatten();
            let sent = fields.for_engine(&body.bytes, &model.engine_name, added.as_ref());
            let payer = answer::Payer { user: caller.user(), class: &terms.class, tenant: tenant.as_ref() };
            let mut pass = answer::Pass {
                gateway: self,
                model,
                route,
                operation,
                request_head: head,
                wants_events: fields.is_streamed,
                adds_usage: added.is_some(),
                began,
                payer,
                entry,
                prefix: wish.prefix,
            };
            let ended = self.try_engines(exchange, &mut pass, &sent, &terms, served).await;
            let route = pass.route;
            served.predicted = route.predicted();
            self.note_engine(draft.as_mut(), model, &route);
            if ended.is_err() {
                // Set even if the alias's other models are tried next: if none of them is usable, the client gets these fields.
                *decided = model.fields(&route);
            }
            match ended {
                // The alias's other models may still answer.
                Err(Failure::Refused(
                    why @ (OpenAiError::OutOfReach { .. } | OpenAiError::NoEngine | OpenAiError::Crowded),
                )) if models.len() > 1 => {
                    is_crowded |= why == OpenAiError::Crowded;
                    self.metrics.retried(&model.name);
                    models.retain(|other| *other != route.model);
                    is_retry = true;
                }
                Err(Failure::Refused(OpenAiError::OutOfReach { .. } | OpenAiError::NoEngine)) if is_crowded => {
                    return Err(OpenAiError::Crowded.into());
                }
                // An error of the engine itself shows nothing about its speed; only 429 counts as a failure.
                Ok(Done { status, .. }) if !(200..300).contains(&status) => {
                    if status == 429 {
                        self.miss(served);
                    }
                    return Ok(());
                }
                Ok(Done { tokens, first_token, .. }) => {
                    let took = began.elapsed();
                    let is_met = wanted.is_met(&AnswerTiming { took, first_token, tokens });
                    if let Some(draft) = &mut draft {
                        let met = is_met.unwrap_or(true);
                        draft.answered(AnswerOutcome { took_ns: (took - passed).as_nanos() as u64, tokens, met });
                    }
                    if let Some(is_met) = is_met {
                        self.metrics.deadline(&model.name, is_met);
                    }
                    self.metrics.finished(&model.name, took - passed, &route);
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Counts a missed deadline for a request with a deadline that got no answer. It counts for the chosen model, or else for the
    /// name that the request asked for.
    fn miss(&self, served: &Served) {
        if served.has_deadline {
            let model = if served.model.is_empty() { &Arc::from(&served.asked[..]) } else { &served.model };
            self.metrics.deadline(model, false);
        }
    }

    /// Counts a decision of an alias's policy, and whether its shadow agreed.
    fn count_decision(&self, Route { model, choice, by, .. }: &Route) {
        let (Some(by), Some(choice), Some(model)) = (by, choice, self.models.get(*model)) else { return };
        let Some(alias) = self.settings.aliases.get(by.alias) else { return };
        self.metrics.decided(&alias.name, by, &model.name, choice);
    }

    /// Returns the indices of the models that a name stands for, and the index of the alias if it is one.
    fn named(&self, name: &str) -> Result<(Vec<usize>, Option<usize>), OpenAiError> {
        let place = |name: &str| self.models.iter().position(|model| &*model.name == name);
        if let Some(place) = place(name) {
            return Ok((vec![place], None));
        }
        let at = self.settings.aliases.iter().position(|alias| alias.name == name);
        let alias = at.and_then(|at| self.settings.aliases.get(at));
        let alias = alias.ok_or_else(|| OpenAiError::unknown_model(name))?;
        Ok((alias.models.iter().filter_map(|name| place(name)).collect(), at))
    }
}

/// Whether a `content-type` is JSON, whatever its parameters.
fn is_json(kind: &[u8]) -> bool {
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
}
