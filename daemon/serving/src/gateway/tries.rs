//! The engines of a model that try to answer a request, one after the other.

use engines::places::{Claim, EnginePlace, NoPlace, Turn, Wish};
use openai::{OpenAiError, RenamedBody};
use quic::class::Terms;
use role::access::served::Served;
use routes::Route;
use tokio::time::Instant;

use super::{
    Gateway, Model,
    answer::{Done, Pass},
    end::Failure,
    exchange::Exchange,
    failed_try::FailedTry,
};
use crate::decisions::Draft;

/// How many engines one request may make fail.
const MOST_TRIES: usize = 2;

/// How often a request may find each engine out of reach, on average. In the meantime it waits for another place.
const MOST_ROUNDS: usize = 16;

impl Gateway {
    /// Sends the request to one engine of a model after another, until one of them answers. A refusal that an engine sends as an event, or
    /// with a status that may be about the engine itself, is the answer only if no other engine contradicts it: vLLM and SGLang report many
    /// failures of their own as refusals.
    pub(super) async fn try_engines(
        &self,
        exchange: &mut Exchange,
        pass: &mut Pass<'_>,
        body: &RenamedBody,
        terms: &Terms,
        served: &mut Served,
    ) -> Result<Done, Failure> {
        let (model, began) = (pass.model, Instant::now());
        // A deadline counts from the complete request, even if another model was tried before.
        let passed_ns = pass.began.elapsed().as_nanos() as u64;
        let mut claim = Claim {
            service: terms.service_since((self.clock.now_ns)().saturating_sub(passed_ns)),
            class: terms.class.policy().name.as_str().into(),
            tenant: pass.payer.tenant.map(|request| (request.tenant().name.clone(), request.tenant().weight)),
            user: pass.payer.user.cloned(),
            tokens: pass.route.tokens(),
            answer_tokens: pass.route.answer_tokens(),
            has_waited: false,
            wish: Wish {
                prefix: pass.prefix.clone(),
                preferred: self.routes.preferred(&pass.route),
                weighs_cache: pass.route.weighs_cache(),
            },
        };
        let (mut tried, mut faults, mut failed) = (Vec::new(), 0, None);
        let (mut refusals, mut refusal, mut is_short) = (0, None, false);
        loop {
            // Until an engine has seen the request, it may wait again: the engines that it found out of reach get no requests by now.
            claim.has_waited = failed.is_some();
            if claim.has_waited {
                pass.entry.waits_again();
            }
            let seen = if faults == 0 && !is_short { &[] } else { &tried[..] };
            let place = match self.place(exchange, model, claim.clone(), seen).await {
                Ok(place) => place,
                Err(Failure::Refused(OpenAiError::Crowded)) if failed.is_some() && faults == 0 => {
                    return Err(OpenAiError::Crowded.into());
                }
                // There is no other engine to try.
                Err(Failure::Refused(_)) if failed.is_some() => break,
                Err(failure) => return Err(failure),
            };
            if failed.is_none() {
                // A single engine needs no preference.
                if !pass.prefix.is_empty() && model.urls.len() > 1 {
                    self.metrics.placed(&model.name, place.affinity);
                }
                self.metrics.waited(&model.name, began.elapsed().as_secs_f64());
            } else if tried.last() != Some(&place.replica) {
                self.metrics.retried(&model.name);
            }
            self.routes.moved(&mut pass.route, place.replica, true);
            served.engine = model.urls.get(place.replica).map(ToString::to_string);
            let FailedTry { failure, fault, refusal: refused } = match pass.run(exchange, body, &place, served).await? {
                Ok(done) => {
                    served.status = Some(done.status);
                    return Ok(done);
                }
                Err(failed) => failed,
            };
            // The engine may be well, and others may have connections that are open.
            is_short |= matches!(failure, OpenAiError::Shortage { .. });
            let why = match &failure {
                OpenAiError::Shortage { why } => why.clone(),
                OpenAiError::OutOfReach { why } => format!("it accepts no connections: {why}"),
                other => other.to_string(),
            };
            // An engine that accepts no connections has not seen the request, unless it has just ended the request's own.
            let is_unseen = matches!(failure, OpenAiError::OutOfReach { .. } | OpenAiError::Shortage { .. });
            faults += usize::from(!is_unseen);
            refusals += usize::from(refused.is_some());
            refusal = refused.or(refusal);
            if let Some(fault) = fault {
                model.engines.failed(place.replica, fault, &why);
                tracing::info!(model = &*model.name, engine = served.engine, "engine failed: {why}");
            } else {
                self.short.note(|unsaid| {
                    tracing::warn!(
                        engine = served.engine,
                        unsaid,
                        "paced has no room for a connection to an engine: {why}"
                    );
                });
            }
            tried.push(place.replica);
            // A request that took too long once would do so again, and a request that made two engines fail would make
            // a third fail.
            let is_suspect = failure == OpenAiError::EngineTimeout || faults >= MOST_TRIES;
            // An engine that has failed the request counts before one that has not seen it: other models could fail, too.
            if !is_unseen || faults == 0 {
                failed = Some(failure);
            }
            if is_suspect || tried.len() >= MOST_ROUNDS * model.urls.len() {
                break;
            }
        }
        match refusal.filter(|_| refusals == faults) {
            // Each engine that has seen the request refuses it.
            Some(refusal) => {
                let done = pass.pass_refusal(exchange, refusal).await?;
                served.status = Some(done.status);
                Ok(done)
            }
            None => Err(failed.unwrap_or(OpenAiError::NoEngine).into()),
        }
    }

    /// Waits for a place at an engine of the model.
    async fn place(
        &self,
        exchange: &mut Exchange,
        model: &Model,
        claim: Claim,
        tried: &[usize],
    ) -> Result<EnginePlace, Failure> {
        let refuse = |reason| match reason {
            NoPlace::Crowded => OpenAiError::Crowded,
            NoPlace::NoEngine => OpenAiError::NoEngine,
        };
        match model.engines.take(claim, tried).map_err(refuse)? {
            Turn::Now(place) => Ok(place),
            Turn::Later(waiting) => exchange.unless_gone(waiting).await?.map_err(|reason| refuse(reason).into()),
        }
    }

    /// Notes in the record of a decision the engine that serves the request, or would have.
    pub(super) fn note_engine(&self, draft: Option<&mut Draft>, model: &Model, route: &Route) {
        if let (Some(draft), Some(engine), Some(choice)) = (draft, self.routes.engine(route), route.choice) {
            draft.served_by(&model.name, engine, &choice);
        }
    }
}
