//! Requests that arrive as HTTP/3 streams or over TCP: the gateway reads each, gives it a place at an engine of its model, and
//! passes the answer on as it arrives.
//!
//! | what may go wrong | what the client gets |
//! |---|---|
//! | the request cannot be read, or names an unknown model | an error of the API, 400 to 415 |
//! | the client goes away | nothing; the engine's request ends as well |
//! | an engine fails before its first token passes | the answer of another engine; if there is none, 502 or 504 |
//! | the engines refuse the request with an error instead of an answer: in their events before the first token, or as a whole answer | the last engine's error, 400 to 499 |
//! | the engines refuse the request with 403, 404, 405, 408 or 429, or with 503 and `retry-after` | the last engine's answer |
//! | an engine fails while it answers | an event with the error, if events are streamed, or else 502 |
//! | more requests than the engines of a model work on, and than may wait | the answer of the alias's next model; if there is none, 429 and `retry-after` |
//! | an event of more than 1 MiB, as requests can ask for | 502; if a part of the answer has passed, an event with the error |

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use engines::places::Prefixes;
use masque::h3::RequestHead;
use openai::OpenAiError;
use parking_lot::Mutex;
use quic::clock::Clock;
use role::{classes::Classes, seldom::Seldom};
use routes::{AliasPolicies, Routes};
use sched::route::{Curve, MeanLengths};
use tenants::{Tenant, Tenants, spending::Spending};
use tokio::{runtime::Handle, task::JoinSet};

use crate::{
    decisions::Decisions,
    learned::{Learned, LearnedClass, LearnedEngine},
    live::Live,
    metrics::{GatewayMetrics, ShownGateway},
};

mod answer;
mod answer_body;
mod body;
mod body_source;
mod caller;
mod end;
mod exchange;
mod failed_try;
mod held_events;
mod held_up;
mod model;
mod overview;
mod own;
mod payer;
mod request;
#[cfg(test)]
pub(crate) mod tests;
mod traced;
mod tries;
mod whole;

pub(crate) use self::{
    body::{Bodies, Body, BodyShare, read as read_body},
    end::Failure,
    own::acknowledge,
    traced::{REQUEST_ID, client_id},
};
pub use self::{
    caller::Asker,
    exchange::{Awaited, Exchange, ResponseBody, TcpExchange},
    model::read_key,
};
use self::{held_events::HoldLimits, model::Model};

/// A gateway: its models, and the connections to their engines. A changed configuration needs a new gateway.
pub struct Gateway {
    settings: config::gateway::GatewaySettings,
    models: Vec<Model>,
    policies: AliasPolicies,
    routes: Routes,
    tenants: Tenants,
    prefixes: Prefixes,
    /// The bodies of its requests, and what is read ahead of slow clients.
    bodies: Arc<Bodies>,
    metrics: GatewayMetrics,
    live: Arc<Live>,
    decisions: Decisions,
    clock: Clock,
    hold_limits: HoldLimits,
    /// The message about a shortage of this host.
    short: Seldom,
    /// The checks of its engines, and their return after an ejection.
    checking: Mutex<JoinSet<()>>,
}

impl Gateway {
    /// Prepares a gateway with idle engines and the knowledge that was `learned` before. It enters its requests in `live` and
    /// their tokens in `spending`, and leaves its aliases' decisions in `decisions` if they are recorded. Open requests of the gateway
    /// `before` at the same engines of the same models still count, and an engine that is down stays down.
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
            model::share_engines((&routes, &models), (&before.routes, &before.models));
            let known = (&before.routes, &*before.settings.aliases, &before.policies);
            routes.share_tallies((&settings.aliases, &policies), known);
        }
        Ok(Arc::new(Self {
            policies,
            routes,
            tenants: Tenants::new(&settings.keys, spending, clock.now_ns, before.map(|before| &before.tenants)),
            // The same prompts then have the same hashes.
            prefixes: before.map(|before| before.prefixes.clone()).unwrap_or_default(),
            models,
            bodies: Bodies::new(settings.bodies_bytes as usize, "bodies_bytes"),
            settings: settings.clone(),
            metrics,
            live,
            decisions,
            clock,
            hold_limits: HoldLimits::default(),
            short: Seldom::default(),
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

    /// Whether clients need a key.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        !self.settings.keys.is_empty()
    }

    /// Whether a request is for a gateway rather than a proxy: it is not for a tunnel.
    #[must_use]
    pub fn takes(head: &RequestHead) -> bool {
        head.method != b"CONNECT"[..]
    }

    /// Returns the holder of the key in this head; `None` if clients need no key.
    ///
    /// # Errors
    /// There is no key, or it is unknown or has expired.
    pub fn tenant(&self, head: &RequestHead) -> Result<Option<Arc<Tenant>>, OpenAiError> {
        self.tenants.of(head, SystemTime::now())
    }

    /// Orders waiting requests by a policy's schedule from now on.
    pub fn follow(&self, classes: &Classes) {
        let discipline = classes.policy().schedule.discipline;
        self.models.iter().for_each(|model| model.engines.reorder(discipline));
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
