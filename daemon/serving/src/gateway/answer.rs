//! One engine's answer on its way to the client.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use config::{engine::EngineUrl, moment::rfc3339};
use engines::{
    health::Fault,
    places::{EnginePlace, PrefixHashes},
};
use hyper::{
    Method, Response, StatusCode,
    body::Incoming,
    header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE},
};
use masque::h3::{Field, RequestHead, ResponseHead};
use openai::{
    OpenAiError, Operation, RenamedBody, TokenUsage,
    sse::{EventStreamParser, MalformedEvent, TokenReport},
};
use role::{access::served::Served, holder::Holder};
use routes::{Lesson, Route};
use tokio::time::{Instant, timeout_at};
use upstream::{Dispatch, Silence, Unanswered, engine_head};

use super::{
    Gateway, Model,
    answer_body::AnswerBody,
    end::{Ended, Failure},
    exchange::Exchange,
    failed_try::{EngineRefusal, FailedTry},
    held_events::HeldEvents,
    held_up::HeldUp,
    payer::Payer,
    traced::{REQUEST_ID, answer_id, traced},
};
use crate::{LOAD, live::LiveRequest};

/// The assumed bytes of an answer per token, if its engine reports none.
const BYTES_PER_TOKEN: u64 = 4;

/// The failure of an engine that reports an error within an answer that it began with success.
pub(super) const ERROR_WITHIN: OpenAiError = OpenAiError::Engine("it reported an error within its answer");

/// The failure of an engine that ends the connection of a request without an answer.
const CLOSED: OpenAiError = OpenAiError::Engine("it closed the connection");

/// If a client leaves after it has waited this long for a connection, the engine counts as out of reach. The kernel repeats a lost SYN
/// after a second (RFC 6298 §2.1), so more than one packet is lost.
const SLOW_CONNECTION: Duration = Duration::from_millis(1_500);

/// The failure of an engine that was not reached in time.
const UNREACHED: &str = "no connection was ready in time";

/// Fields of an engine's answer that are passed to the client.
const PASSED: [&str; 4] = ["content-type", "content-encoding", "retry-after", REQUEST_ID];

/// An attempt to get a request answered.
pub(super) struct Pass<'a> {
    pub(super) gateway: &'a Gateway,
    pub(super) model: &'a Model,
    /// Why the model was chosen, and what is predicted of the engine that answers.
    pub(super) route: Route,
    pub(super) operation: Operation,
    pub(super) request_head: &'a RequestHead,
    /// Whether the client asks for a stream of events.
    pub(super) wants_events: bool,
    /// Whether the engine is asked for `usage` in the stream, and the client does not ask for it.
    pub(super) adds_usage: bool,
    /// When the request was complete.
    pub(super) began: Instant,
    pub(super) payer: Payer<'a>,
    /// The holder against whose share the pieces count that are read ahead of the client.
    pub(super) holder: &'a Holder,
    pub(super) entry: &'a LiveRequest,
    /// The hashes of the prompt's beginning, which an engine may know.
    pub(super) prefix: PrefixHashes,
}

/// An answer that has passed completely.
pub(super) struct Done {
    pub(super) status: u16,
    /// How many tokens it had, by the best count.
    pub(super) tokens: u64,
    /// The time from the complete request to the first token; `None` if all came at once.
    pub(super) first_token: Option<Duration>,
}

/// An engine that answers, and what its answer teaches.
pub(super) struct Answering<'a> {
    pub(super) place: &'a EnginePlace,
    pub(super) held_up: HeldUp<'a>,
    pub(super) lesson: Lesson<'a>,
    /// When its first token must have come, or its next.
    until: Instant,
    /// When its first token passed, if tokens are streamed.
    first_token: Option<Duration>,
    /// Whether a connection to it has taken the request.
    is_sent: bool,
    /// Whether it ended the connection that had taken the request, and takes no other.
    is_gone: bool,
    /// The status of its answer, once that has begun.
    status: Option<StatusCode>,
    /// Its answer, if it refuses the request before the first token and another engine may take it.
    pub(super) refusal: Option<EngineRefusal>,
    /// Whether its answer is a stream of events.
    is_events: bool,
    /// Its report of tokens.
    pub(super) report: TokenReport,
    /// The length of a complete answer without streaming, in bytes.
    pub(super) bytes: u64,
}

impl Pass<'_> {
    /// Sends the request to the engine and passes the answer on. The used tokens count even if the answer does not
    /// complete. The inner error is a failed try, after which another engine may answer; the outer one ends the
    /// request.
    pub(super) async fn run(
        &self,
        exchange: &mut Exchange,
        body: &RenamedBody,
        place: &EnginePlace,
        served: &mut Served,
    ) -> Result<Result<Done, FailedTry>, Failure> {
        let asked = Instant::now();
        let mut by = Answering {
            place,
            held_up: HeldUp::new(place, self.gateway.settings.stall_timeout),
            lesson: self.gateway.routes.begin(&self.route, place.replica),
            until: asked + self.gateway.settings.answer_timeout,
            first_token: None,
            is_sent: false,
            is_gone: false,
            status: None,
            refusal: None,
            is_events: false,
            report: TokenReport::default(),
            bytes: 0,
        };
        self.entry.at_work();
        let ended = self.pass(exchange, body, &mut by).await;
        let usage = self.usage(&by, &ended, asked.elapsed());
        let Payer { user, class, tenant } = self.payer;
        if let Some(usage) = usage {
            served.usage = Some(usage);
            self.gateway.metrics.used((&self.model.name, user, &class.policy().name), usage);
        }
        if let Some(tenant) = tenant {
            // A prompt that was noted before its engine failed costs nothing.
            tenant.bill(usage.unwrap_or_default());
        }
        match ended {
            Ok(status) => Ok(Ok(Done {
                status: status.as_u16(),
                tokens: served.usage.map_or(0, |usage| usage.completion_tokens),
                first_token: by.first_token,
            })),
            Err(Failure::Refused(
                failure @ (OpenAiError::Engine(_)
                | OpenAiError::OutOfReach { .. }
                | OpenAiError::Shortage { .. }
                | OpenAiError::EngineTimeout),
            )) => Ok(Err(FailedTry { fault: self.fault(&by, &failure), failure, refusal: by.refusal })),
            Err(failure) => Err(failure),
        }
    }

    /// Returns the engine's fault in a failed try, if it has one. Only an answer that begins once all its tokens are made may just be long.
    fn fault(&self, by: &Answering<'_>, failure: &OpenAiError) -> Option<Fault> {
        let may_be_long = !self.wants_events && self.operation != Operation::Embeddings && by.status.is_none();
        Some(match failure {
            OpenAiError::Shortage { .. } => return None,
            _ if by.is_gone || matches!(failure, OpenAiError::OutOfReach { .. }) => Fault::OutOfReach,
            OpenAiError::EngineTimeout if may_be_long => Fault::Late,
            _ if by.refusal.is_some() => Fault::Refusal,
            _ => Fault::Answer,
        })
    }

    /// Returns the tokens that the engine has used within `elapsed`; `None` if it never got the request, or refused it or
    /// failed, because another engine may still answer, unless it took too long or sent too long an event. Without
    /// streaming, an engine makes tokens long before the answer begins. If the client leaves or the answer takes too
    /// long, the count is an estimate by time.
    fn usage(&self, by: &Answering<'_>, ended: &Result<StatusCode, Failure>, elapsed: Duration) -> Option<TokenUsage> {
        let is_refused = by.status.is_some_and(|status| !status.is_success());
        match ended {
            _ if is_refused || !by.is_sent => return None,
            Err(Failure::Refused(OpenAiError::EngineTimeout | OpenAiError::EventTooLong)) => {}
            Err(Failure::Refused(_)) => return None,
            _ => {}
        }
        let passed = match ended {
            _ if by.is_events => by.lesson.tokens(),
            _ if self.operation == Operation::Embeddings => 0,
            Ok(_) => by.bytes.div_ceil(BYTES_PER_TOKEN),
            Err(_) => self.route.made_within(elapsed),
        };
        Some(by.report.count(u64::from(self.route.prompt_tokens()), passed, ended.is_ok()))
    }

    /// Sends the request to the engine and passes its answer on; returns its status.
    async fn pass(
        &self,
        exchange: &mut Exchange,
        body: &RenamedBody,
        by: &mut Answering<'_>,
    ) -> Result<StatusCode, Failure> {
        let answer = self.ask(exchange, body, by).await?;
        let status = answer.status();
        by.status = Some(status);
        if status.is_success() {
            self.payer.pass(u64::from(self.route.prompt_tokens()));
        }
        by.is_events = engine_head::is_events(&answer) && engine_head::refusal(&answer).is_none();
        if by.is_events {
            self.pass_events(exchange, answer, by).await?;
        } else {
            self.pass_whole(exchange, answer, by).await?;
        }
        let usage = match self.operation {
            Operation::Embeddings => by.report.usage_of_prompt(),
            _ => by.report.usage(),
        };
        by.lesson.learn(usage, by.report.cached_tokens(), body.len());
        Ok(status)
    }

    async fn ask(
        &self,
        exchange: &mut Exchange,
        body: &RenamedBody,
        by: &mut Answering<'_>,
    ) -> Result<Response<Incoming>, Failure> {
        let Answering { place, until, is_sent, is_gone, .. } = by;
        let url = self.model.urls.get(place.replica).ok_or(OpenAiError::NoEngine)?;
        let asked = hyper::Request::builder()
            .method(Method::POST)
            .uri(format!("{url}{}", self.operation.path()))
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json, text/event-stream")
            // The gateway reads events and reports of tokens.
            .header(ACCEPT_ENCODING, "identity");
        let asked = self.model.key.iter().fold(asked, |asked, key| asked.header(AUTHORIZATION, key));
        let asked = traced(self.request_head, self.entry.id())
            .into_iter()
            .fold(asked, |asked, (name, value)| asked.header(name, value));
        let asked = asked.body(body.clone()).map_err(|_| OpenAiError::NoEngine)?;
        let mut dispatch = Dispatch::default();
        let answered = timeout_at(*until, self.model.upstream.ask(asked, &mut dispatch));
        let answered = exchange.unless_gone(answered).await;
        let connecting_for = dispatch.connecting_for();
        *is_sent = connecting_for.is_none();
        if answered.is_err() && connecting_for.is_some_and(|passed| passed >= SLOW_CONNECTION) {
            // Otherwise, an engine that drops packets would look idle as long as no client waits until the attempt ends.
            self.model.engines.failed(place.replica, Fault::OutOfReach, UNREACHED);
        }
        let answered = match answered? {
            Err(_) if !*is_sent => Err(Unanswered::OutOfReach(UNREACHED.to_owned())),
            Err(_) => return Err(OpenAiError::EngineTimeout.into()),
            Ok(answered) => answered,
        };
        // It may have read the request, which may be why it is gone.
        *is_gone = matches!(answered, Err(Unanswered::OutOfReach(_))) && dispatch.may_be_read();
        let answer = match answered {
            Err(_) if *is_gone => return Err(CLOSED.into()),
            Err(Unanswered::OutOfReach(why)) => return Err(OpenAiError::OutOfReach { why }.into()),
            // Unless it may have read the request, and then ended the connection.
            Err(Unanswered::Shortage(why)) if !dispatch.may_be_read() => {
                return Err(OpenAiError::Shortage { why }.into());
            }
            Err(Unanswered::Closed(why) | Unanswered::Shortage(why)) => {
                tracing::debug!(%url, "engine closed the connection: {why}");
                return Err(CLOSED.into());
            }
            Ok(answer) => answer,
        };
        if let Some(why) = engine_head::fault(&answer, self.wants_events) {
            return Err(OpenAiError::Engine(why).into());
        }
        if engine_head::is_for_load(&answer) {
            self.close(place, url, engine_head::retry_after(&answer, SystemTime::now()));
        }
        // An engine that has begun an answer may still hang; an engine that refuses a request for what the request contains works.
        if !answer.status().is_success() && engine_head::refusal(&answer).is_none() {
            self.model.engines.succeeded(place.replica);
        }
        Ok(answer)
    }

    /// Closes an engine that refuses requests for its load, `named` being the time that it names, and tells it once.
    fn close(&self, place: &EnginePlace, url: &EngineUrl, named: Option<Duration>) {
        let named_ns = named.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        if let Some(closed_ns) = self.model.engines.refused(place.replica, named_ns) {
            let until = rfc3339(SystemTime::now() + Duration::from_nanos(closed_ns));
            tracing::info!(model = &*self.model.name, engine = %url, "engine refuses requests until {until}");
        }
    }

    /// Returns the head of an engine's answer as the client gets it.
    pub(super) fn response_head(&self, answer: &Response<Incoming>, content_length: Option<u64>) -> ResponseHead {
        let passed = PASSED.iter().filter_map(|name| Some((*name, answer.headers().get(*name)?)));
        let mut fields: Vec<Field> =
            passed.map(|(name, value)| Field::new(name, Bytes::copy_from_slice(value.as_bytes()))).collect();
        if !answer.headers().contains_key(REQUEST_ID) {
            fields.push(answer_id(self.request_head, self.entry.id()));
        }
        fields.extend(content_length.map(|length| Field::new("content-length", length.to_string())));
        fields.extend(self.model.fields(&self.route));
        // Edges choose between gateways by it.
        fields.push(Field::new(LOAD, self.model.engines.load_permille().to_string()));
        ResponseHead { status: answer.status().as_u16(), fields }
    }

    /// Passes events on as they arrive, from the first token on. If they break off, sends an event with the error. An
    /// event with an error of the engine is a failure of the engine. As long as all events are held back, another
    /// engine may still answer.
    async fn pass_events(
        &self,
        exchange: &mut Exchange,
        answer: Response<Incoming>,
        by: &mut Answering<'_>,
    ) -> Result<(), Failure> {
        let Answering { place, held_up, lesson, until, first_token, report, refusal, .. } = by;
        let head = self.response_head(&answer, None);
        // An engine that has begun an answer may still read the prompt, or have the request in its own queue.
        let mut answer = AnswerBody::new(answer, Silence::until(*until), (&self.gateway.bodies, self.holder));
        let events = if self.adds_usage { EventStreamParser::without_usage() } else { EventStreamParser::default() };
        let (mut events, mut is_first_due) = (events, true);
        // `None` once the client's answer has begun.
        let mut held = Some(HeldEvents::new(head, self.gateway.hold_limits));
        let broken = loop {
            if answer.silence.is_over() {
                // Comments and names of roles prolong nothing, however densely they come.
                break broken(&events, OpenAiError::EngineTimeout);
            }
            let next = match held.as_ref().and_then(HeldEvents::until) {
                Some(until) => timeout_at(until, answer.next(exchange)).await,
                None => Ok(answer.next(exchange).await),
            };
            let Ok(next) = next else {
                let waited = release(exchange, &mut held, Bytes::new(), (held_up, &mut answer, lesson)).await?;
                *until += waited;
                continue;
            };
            let bytes = match next? {
                Ok(Some(bytes)) => bytes,
                Ok(None) => break broken(&events, OpenAiError::Engine("it ended its answer early")),
                Err(refusal) => break broken(&events, refusal),
            };
            let (before, steps) = (events.with_content(), events.steps());
            let whole = match events.push(bytes) {
                Ok(whole) => whole,
                Err(MalformedEvent::TooLong) => break Some(OpenAiError::EventTooLong),
                Err(malformed) => break Some(OpenAiError::Engine(malformed.as_str())),
            };
            if let (Some(error), Some(held), 0) = (events.error(), &held, events.with_content()) {
                *refusal = error.refusal.map(|status| Self::refusal_within(&held.head, status, error.json.clone()));
                break Some(ERROR_WITHIN);
            }
            // After the end or an error, no first token is due any more.
            let was_first_due = is_first_due;
            is_first_due = events.with_content() == 0 && !events.is_done() && events.error().is_none();
            if was_first_due && !is_first_due {
                answer.silence.limit(self.gateway.settings.stall_timeout);
            }
            if whole.is_empty() && held.is_none() {
                // The report may have come in an event that does not pass.
                *report = events.report();
            }
            if whole.is_empty() || held.as_mut().is_some_and(|held| is_first_due && held.hold(&whole)) {
                continue;
            }
            if events.with_content() > 0 && before == 0 {
                let first = *first_token.insert(self.began.elapsed());
                self.gateway.metrics.first_token(&self.model.name, first.as_secs_f64());
                self.model.engines.began(place.replica);
            }
            *report = events.report();
            (before..events.with_content()).for_each(|_| lesson.token());
            self.payer.pass(events.with_content() - before);
            self.entry.pass(events.with_content() - before);
            let waited = release(exchange, &mut held, whole, (held_up, &mut answer, lesson)).await?;
            let now = Instant::now();
            if events.with_content() > before {
                *until = now + self.gateway.settings.answer_timeout;
            } else {
                *until += waited;
            }
            // An engine may make tokens that it does not send, but for no longer than before its first.
            if events.steps() > steps && now < *until && !events.is_done() && events.error().is_none() {
                answer.silence.begin();
            }
        };
        match broken {
            None => {
                self.model.engines.succeeded(place.replica);
                Ok(())
            }
            Some(refusal) if held.is_some() => Err(refusal.into()),
            Some(refusal) => {
                // Clients could take engines from others with requests that engines refuse, or for long events.
                let is_fault = events.error().is_none_or(|error| error.refusal.is_none());
                if is_fault && refusal != OpenAiError::EventTooLong {
                    self.model.engines.failed(place.replica, Fault::Answer, &refusal.to_string());
                }
                if refusal != ERROR_WITHIN {
                    // The leading line end closes an event that broke off.
                    let event = refusal.event(self.operation, events.next_number());
                    held_up.send(exchange, [b"\n", &event[..]].concat().into(), (&mut answer, lesson)).await?;
                }
                Err(Failure::Broken(refusal, Ended::Whole))
            }
        }
    }
}

/// Sends events to the client. If its answer has not begun, begins it with the held head, and sends the held events first. If there is no
/// room at once, further events are read ahead and come in bursts, so `lesson` is told. Returns the time until there was room: it is the
/// client's, and counts as no silence of the engine.
async fn release(
    exchange: &mut Exchange,
    held: &mut Option<HeldEvents>,
    events: Bytes,
    (held_up, answer, lesson): (&mut HeldUp<'_>, &mut AnswerBody<'_>, &mut Lesson<'_>),
) -> Result<Duration, Failure> {
    let events = match held.take() {
        None => events,
        Some(held) => {
            exchange.respond(&held.head).await?;
            held.followed_by(events)
        }
    };
    let began = Instant::now();
    if held_up.send(exchange, events, (answer, lesson)).await? {
        return Ok(Duration::ZERO);
    }
    lesson.held_up();
    let waited = began.elapsed();
    answer.silence.excuse(waited);
    Ok(waited)
}

/// Returns the error of a stream whose engine sends no more, for this reason; `None` if it is complete, however its engine ends it.
fn broken(events: &EventStreamParser, why: OpenAiError) -> Option<OpenAiError> {
    if events.error().is_some() {
        // The client has received the engine's own event.
        return Some(ERROR_WITHIN);
    }
    (!events.is_done()).then_some(why)
}
