//! Decides what a request gets: reads its head, waits for its turn, asks [`request`], and records and answers refusals.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use masque::{
    h3::{Code, Field, Part, RequestHead, ResponseHead, data_frame},
    priority::Priority,
    proxy_status::ProxyName,
    request::{Refusal, is_ping},
};
use openai::OpenAiError;
use quic::h3::{self, Error, Request};
use role::{
    access::record::{self, RefusedRequest},
    holder::Holder,
};
use serving::gateway::{Asker, Gateway};
use tokio::time::timeout;

use crate::{
    Relay, RelayClient, Resources, Rules,
    request::{self, Admitted, Attempt, HeldPlaces, NotAdmitted, await_turn},
};

/// How long a client may take to send the head of a request it has begun.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client may take to receive the response to a refused request. A client that gives no flow-control credit would
/// never receive it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How a rejected request was handled; the stream still has to be ended with the code. With `NoError`, it ends normally.
pub(super) enum Rejected {
    /// With a response.
    Answered(Code),
    /// With a response, after which the connection has to end: its user has too many connections.
    Last,
    /// Without a response: the client was gone, or there was nothing to say.
    Unanswered(Code),
}

/// The decision about a request.
pub(super) enum Decision {
    /// It gets a tunnel.
    Tunnel(Box<Admitted>),
    /// A model answers it.
    Model(Box<ForModel>),
    /// It asks for nothing, and gets an empty response.
    Ping,
}

/// A request that a model answers.
pub(super) struct ForModel {
    pub(super) gateway: Arc<Gateway>,
    pub(super) head: RequestHead,
    pub(super) asker: Asker,
    pub(super) places: HeldPlaces,
}

/// Reads the head of a request and decides about it; sends the response if the decision is a refusal.
pub(super) async fn admit(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    request: &mut Request,
    mut attempt: Attempt,
) -> Result<Decision, Rejected> {
    let head = match timeout(HEAD_TIMEOUT, request.recv.part()).await {
        Ok(Ok(Some(Part::Request(head)))) => head,
        Ok(Err(Error::Protocol(error))) => {
            let too_large = error.code() == Code::ExcessiveLoad;
            let reason = if too_large { "field_section_too_large" } else { "malformed" };
            note_refusal(
                relay,
                client,
                Attempt::default(),
                RefusedRequest { status: error.answer(), error: None, reason },
            );
            let Some(status) = error.answer() else { return Err(Rejected::Unanswered(error.code())) };
            tracing::debug!(%error, "malformed request");
            return Err(answer(request, &ResponseHead { status, fields: Vec::new() }, error.code()).await);
        }
        Ok(_) => return Err(Rejected::Unanswered(Code::RequestIncomplete)),
        Err(_) => {
            let refused = RefusedRequest { status: None, error: None, reason: "head_timeout" };
            note_refusal(relay, client, Attempt::default(), refused);
            return Err(Rejected::Unanswered(Code::RequestRejected));
        }
    };
    let asks_model = Gateway::takes(&head) && relay.gateway().is_some();
    let is_head = head.method == b"HEAD"[..];
    let (signal, send) = (request.signal, &mut request.send);
    let decided = tokio::select! {
        decided = decide(relay, rules, client, head, signal, &mut attempt) => decided,
        // The client has given up; the places that the request took are free again.
        () = poll_fn(|cx| if send.poll_stopped(cx).is_err() { Poll::Ready(()) } else { Poll::Pending }) => {
            return Err(Rejected::Unanswered(Code::RequestCancelled));
        }
    };
    match decided {
        Ok(decision) => Ok(decision),
        Err(NotAdmitted::TooMany) => Err(reject_too_many(relay, client, attempt)),
        Err(NotAdmitted::Refused(refusal)) => {
            let (status, error) = (Some(refusal.status()), Some(refusal.error_type().name()));
            note_refusal(relay, client, attempt, RefusedRequest { status, error, reason: refusal.label() });
            tracing::debug!(%refusal, "request refused");
            let code = match refusal {
                Refusal::Malformed(_) | Refusal::Target(_) => Code::MessageError,
                _ => Code::NoError,
            };
            let (response, content) = response(&refusal, &rules.name, asks_model);
            match answer_with(request, &response, content.filter(|_| !is_head), code).await {
                Rejected::Answered(_) if refusal == Refusal::ConnectionLimitReached => Err(Rejected::Last),
                rejected => Err(rejected),
            }
        }
    }
}

/// Counts and records a request whose turn would be too far away.
pub(super) fn reject_too_many(relay: &Relay, client: &RelayClient, attempt: Attempt) -> Rejected {
    let refused = RefusedRequest { status: None, error: None, reason: "requests_per_second" };
    note_refusal(relay, client, attempt, refused);
    Rejected::Unanswered(Code::RequestRejected)
}

/// Returns the response to a refused request. A client that asks for a model, and not for a tunnel, gets a refusal because of limits in the
/// form of the API that it uses, with content.
fn response(refusal: &Refusal, proxy: &ProxyName, asks_model: bool) -> (ResponseHead, Option<OpenAiError>) {
    let mut response = refusal.response(proxy);
    let retry = response.field("retry-after").and_then(|seconds| std::str::from_utf8(seconds).ok()?.parse().ok());
    let Some(error) = OpenAiError::of_relay(refusal, retry).filter(|_| asks_model) else { return (response, None) };
    response.fields.retain(|field| field.name != "retry-after");
    response.fields.extend(error.retry_after_s().map(|seconds| Field::new("retry-after", seconds.to_string())));
    response.fields.push(Field::new("content-type", "application/json"));
    response.fields.push(Field::new("content-length", error.body().len().to_string()));
    (response, Some(error))
}

/// Decides about a request by its head, and notes in `attempt` who makes it, and for which target. The first request of a connection waits
/// for its turn here, because it makes the client known.
async fn decide(
    relay: &Relay,
    rules: &Rules,
    client: &RelayClient,
    head: RequestHead,
    signal: Option<Priority>,
    attempt: &mut Attempt,
) -> Result<Decision, NotAdmitted> {
    let user = request::identify(relay, rules, client, &head, attempt)?;
    await_turn(relay, client, attempt).await?;
    if is_ping(&head) {
        // Where no credentials are required, every client with a permitted request counts as a user.
        request::admit_client(relay, rules, client, &Holder::of(attempt.user.as_ref(), client.address))?;
        await_turn(relay, client, attempt).await?;
        return Ok(Decision::Ping);
    }
    if let Some(gateway) = relay.gateway().filter(|_| Gateway::takes(&head)) {
        let places = request::admit_model(relay, rules, client, user.as_ref())?;
        await_turn(relay, client, attempt).await?;
        let asker = Asker {
            user: user.map(|user| user.name),
            tenant: gateway.tenant(&head),
            listener: client.listener,
            client: client.address,
            path: client.path.clone(),
            // No web page gets here through a browser: the browser would need a token, or would have to trust the relay's certificate.
            refusal: None,
        };
        return Ok(Decision::Model(Box::new(ForModel { gateway, head, asker, places })));
    }
    let admitted = request::admit(relay, rules, client, (&head, user), signal, attempt).await?;
    Ok(Decision::Tunnel(Box::new(admitted)))
}

/// Counts and records a refused request.
fn note_refusal(relay: &Relay, client: &RelayClient, Attempt { user, target, .. }: Attempt, refused: RefusedRequest) {
    let Resources { metrics, usages, access, .. } = &relay.resources;
    metrics.refused(refused.reason);
    if let Some(user) = &user {
        usages.of(user).refused.inc();
    }
    if access.is_wanted() {
        let (protocol, target) = target.unzip();
        let RelayClient { id: connection, listener, address: client, .. } = *client;
        let connection = Some(connection);
        let request = record::RecordedRequest { connection, listener, client, user, protocol, target, way: None };
        access.refused(request, refused);
    }
}

pub(super) async fn answer(request: &mut Request, head: &ResponseHead, code: Code) -> Rejected {
    answer_with(request, head, None, code).await
}

async fn answer_with(request: &mut Request, head: &ResponseHead, content: Option<OpenAiError>, code: Code) -> Rejected {
    if request.send.respond(head).await.is_err() {
        return Rejected::Unanswered(code);
    }
    if let Some(content) = content {
        request.send.push(data_frame(&content.body()));
    }
    Rejected::Answered(code)
}

/// Ends the stream of a request that is not served. This finishes soon, whether or not the client receives the response.
pub(super) async fn turn_away(http: &h3::Client, request: Request, rejected: Rejected) {
    let Request { stream_id, recv, mut send, flow, .. } = request;
    drop(flow);
    let (code, answered) = match rejected {
        Rejected::Answered(code) => (code, true),
        Rejected::Last => (Code::NoError, true),
        Rejected::Unanswered(code) => (code, false),
    };
    recv.stop(code);
    http.forget(stream_id);
    if answered {
        if code == Code::NoError {
            send.finish();
        }
        // A reset may overtake unacknowledged data, or discard it at the client.
        let taken = timeout(ANSWER_TIMEOUT, poll_fn(|cx| send.poll_acknowledged(cx))).await;
        if code == Code::NoError && taken.is_ok() {
            return;
        }
    }
    send.reset(if code == Code::NoError { Code::RequestCancelled } else { code });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_asks_for_a_model_reads_of_the_relays_limits_as_of_those_of_its_key() {
        for (refusal, retry_after, code) in [
            (Refusal::TunnelLimitReached, "1", "rate_limit_exceeded"),
            (Refusal::ConnectionLimitReached, "10", "rate_limit_exceeded"),
            (Refusal::QuotaUsedUp { retry_after_s: 86_400 }, "86400", "insufficient_quota"),
        ] {
            let (head, content) = response(&refusal, &ProxyName::default(), true);
            let content = content.unwrap().body();
            let values = |name: &str| head.fields.iter().filter(|field| field.name == name).collect::<Vec<_>>();
            let value = |name: &str| std::str::from_utf8(head.field(name).unwrap()).unwrap();
            assert_eq!(
                (head.status, value("retry-after"), value("content-type")),
                (429, retry_after, "application/json")
            );
            assert_eq!((values("retry-after").len(), value("content-length")), (1, &*content.len().to_string()));
            assert!(value("proxy-status").contains("http_request_denied"));
            let text = String::from_utf8(content.to_vec()).unwrap();
            assert!(text.contains(&format!("\"code\":\"{code}\"")) && text.contains("rate_limit_error"), "{text}");
            assert_eq!(response(&refusal, &ProxyName::default(), false).0, refusal.response(&ProxyName::default()));
        }
        let (head, content) = response(&Refusal::CredentialsMissing, &ProxyName::default(), true);
        assert_eq!((head.status, content), (407, None));
        assert_eq!(response(&Refusal::TunnelLimitReached, &ProxyName::default(), false).1, None);
    }
}
