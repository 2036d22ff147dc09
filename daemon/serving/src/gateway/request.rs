//! A request from its head to its end: who sent it, which model answers it, and what becomes of it.

use std::{sync::Arc, time::SystemTime};

use engines::{
    NO_ENGINE_PERMILLE,
    places::{PrefixHashes, Wish},
};
use masque::h3::{Field, RequestHead};
use openai::{OpenAiError, Operation, RoutingFields, excerpt, is_json};
use role::{
    access::served::{Served, UNTAKEN},
    classes::Classes,
    holder::Holder,
};
use routes::{AnswerTiming, Route, RouteQuery, Wanted};
use routing::decision::AnswerOutcome;
use sched::class::Late;
use tokio::time::Instant;

use super::{
    Gateway,
    answer::{Done, Pass},
    body,
    caller::{Asker, Caller},
    end::{Ended, Failure},
    exchange::{ANSWER_TIMEOUT, Exchange},
    own::refuse,
    payer::Payer,
    traced::{answer_id, client_id},
};
use crate::{LOAD, live::LiveRequest};

impl Gateway {
    /// Serves a request whose head was read, to its end. Outgoing bytes are in the class that the policy gives the request, moved
    /// as the request's signals ask. Returns the result.
    pub async fn serve(&self, mut exchange: Exchange, head: RequestHead, classes: &Classes, asker: &Asker) -> Served {
        let began = Instant::now();
        let in_flight = self.metrics.begin();
        let operation = Operation::of(&head.method, head.path.as_deref().unwrap_or_default());
        let asked = asker.refusal.clone().map_or_else(|| operation.clone(), Err);
        let admitted = asked.and_then(|operation| match operation {
            Operation::Health => Ok((operation, None)),
            _ => Ok((operation, asker.tenant.clone()?)),
        });
        let tenant = admitted.as_ref().ok().and_then(|(_, tenant)| tenant.clone());
        let caller = Caller::new(classes, asker, &head, exchange.signal(), tenant);
        exchange.set_terms(&caller.terms(None));
        let entry = self.live.enter(caller.user().cloned());
        let label = operation.as_ref().map_or("unknown", |operation| operation.label());
        let mut served = Served::begin(entry.id(), label, caller.user().cloned(), (asker.listener, asker.client));
        served.client_request = client_id(&head).map(Into::into);
        // The fields about the chosen model, if the request is refused.
        let mut decided = Vec::new();
        let ended = match admitted {
            Ok((operation @ (Operation::Health | Operation::Models | Operation::Model), _)) => {
                self.inform(&mut exchange, operation, &head, answer_id(&head, entry.id())).await
            }
            Ok((operation, _)) => {
                let notes = (&mut served, &mut decided);
                // In a box, for which a request that is refused before, as a stranger's is, needs no room.
                Box::pin(self.answer(&mut exchange, operation, &head, (&caller, &entry), notes)).await
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
                decided.push(answer_id(&head, entry.id()));
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
        // The client may take long for the end of its answer, and its head takes memory.
        drop(head);
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
        let mut encodings = head.fields.iter().filter(|field| field.name == "content-encoding");
        if encodings.any(|field| !field.value.eq_ignore_ascii_case(b"identity")) {
            return Err(OpenAiError::ContentEncoding.into());
        }
        let tenant = caller.tenant.clone().map(|tenant| self.tenants.begin(tenant, SystemTime::now())).transpose()?;
        let holder = Holder::of(caller.user(), caller.asker.client);
        let share = self.bodies.begin(holder.clone()).with_head(head);
        let body = body::read(exchange, self.settings.max_body_bytes as usize, share).await?;
        let fields = RoutingFields::of(operation, &body.bytes)?;
        let terms = caller.terms(Some(&fields));
        exchange.set_terms(&terms);
        (served.class, served.asked) = (terms.class.policy().name.clone(), excerpt(&fields.model).to_owned());
        let began = Instant::now();
        let wanted = Wanted::of(head, terms.deadline_ns, (operation, &fields), body.bytes.len())?;
        let (mut models, alias) = self.named(&fields.model)?;
        fields.fits(models.iter().filter_map(|model| self.models.get(*model)).map(|model| model.urls.len()).sum())?;
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
        // The model that failed before, if any.
        let (mut before, mut is_crowded) = (None, false);
        loop {
            let class = &terms.class.policy().name;
            let (is_retry, refuses_late) = (before.is_some(), terms.class.policy().late == Late::Refuse);
            let asked = RouteQuery { models: &models, alias, class, prefix: &known, is_retry, refuses_late };
            let path = caller.asker.path(exchange.ahead(), &terms);
            // A model that failed before has taken a part of the time.
            let passed = began.elapsed();
            let route = self.routes.route(asked, &wanted.after(passed), path);
            // The request may get a place later if only too many wait.
            let none = if is_crowded { OpenAiError::Crowded } else { OpenAiError::NoEngine };
            let mut route = route.ok_or(none)?;
            if let Some(before) = before {
                self.metrics.retried(before);
            }
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
            if route.is_late() && refuses_late && !self.routes.is_idle(&route) {
                served.predicted = route.predicted();
                self.note_engine(draft.as_mut(), model, &route);
                *decided = model.fields(&route);
                return Err(OpenAiError::Late { retry_after_s: self.routes.opens_in_s(&route).max(1) }.into());
            }
            let may_add_usage = model.ask_usage && operation.may_have_usage_event();
            let added = may_add_usage.then(|| fields.usage_option(&body.bytes)).flatten();
            let sent = fields.for_engine(&body.bytes, &model.engine_name, added.as_ref());
            let payer = Payer { user: caller.user(), class: &terms.class, tenant: tenant.as_ref() };
            let mut pass = Pass {
                gateway: self,
                model,
                route,
                operation,
                request_head: head,
                wants_events: fields.is_streamed,
                adds_usage: added.is_some(),
                began,
                payer,
                holder: &holder,
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
                    why @ (OpenAiError::OutOfReach { .. }
                    | OpenAiError::Shortage { .. }
                    | OpenAiError::NoEngine
                    | OpenAiError::Crowded),
                )) if models.len() > 1 => {
                    is_crowded |= why == OpenAiError::Crowded;
                    models.retain(|other| *other != route.model);
                    before = Some(&model.name);
                }
                Err(Failure::Refused(OpenAiError::OutOfReach { .. } | OpenAiError::NoEngine)) if is_crowded => {
                    return Err(OpenAiError::Crowded.into());
                }
                // An error of the engine itself shows nothing about its speed; only a refusal for its load counts as a failure.
                Ok(Done { status, .. }) if !(200..300).contains(&status) => {
                    if [429, 503].contains(&status) {
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
}
