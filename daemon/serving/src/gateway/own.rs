//! The gateway's own answers, and its own fields of answers.

use std::time::Duration;

use bytes::Bytes;
use masque::{
    h3::{Field, RequestHead, ResponseHead},
    request::ping_response,
};
use openai::{OpenAiError, Operation};
use routes::Route;

use super::{
    Gateway, Model,
    end::{Ended, Failure},
    exchange::{ANSWER_TIMEOUT, Exchange},
};

impl Gateway {
    /// Answers a request about the gateway itself or about its models. The answer has the field `id`.
    pub(super) async fn inform(
        &self,
        exchange: &mut Exchange,
        operation: Operation,
        head: &RequestHead,
        id: Field,
    ) -> Result<(), Failure> {
        let (kind, body) = match operation {
            Operation::Models => ("application/json", self.list()),
            Operation::Model => ("application/json", self.one(head.path.as_deref().unwrap_or_default())?),
            _ => ("text/plain", "ok\n".to_owned()),
        };
        let patience = self.settings.stall_timeout;
        respond(exchange, (200, vec![id]), (kind, body.into()), head.method == b"HEAD"[..], patience).await
    }
}

impl Model {
    /// Returns the fields with which the gateway says that it chose this model, why, and how long the answer is predicted to take.
    pub(super) fn fields(&self, route: &Route) -> Vec<Field> {
        let chosen = [("x-paced-model", self.name.to_string()), ("x-paced-reason", route.reason.to_owned())];
        // There is no prediction for an unknown engine.
        let predicted_ms = route.predicted().map(|predicted| predicted.as_millis()).filter(|ms| *ms > 0);
        let predicted = predicted_ms.map(|ms| ("x-paced-predicted-ms", ms.to_string()));
        chosen.into_iter().chain(predicted).map(|(name, value)| Field::new(name, value)).collect()
    }
}

/// Accepts a request that asks for nothing (`OPTIONS *`, RFC 9110 §9.3.7): with it, edges ask whether their credentials are refused, and a
/// proxy may pass it on.
pub(crate) async fn acknowledge(mut exchange: Exchange) {
    if exchange.respond(&ping_response()).await.is_ok() {
        exchange.end(Ended::Whole, ANSWER_TIMEOUT).await;
    }
}

/// Sends a complete answer with content of this kind; without content and its length if the request `is_head` (RFC 9110 §9.3.2). The
/// client has to take some of it within each `patience`.
async fn respond(
    exchange: &mut Exchange,
    (status, mut fields): (u16, Vec<Field>),
    (kind, body): (&'static str, Bytes),
    is_head: bool,
    patience: Duration,
) -> Result<(), Failure> {
    fields.push(Field::new("content-type", kind));
    if !is_head {
        fields.push(Field::new("content-length", body.len().to_string()));
    }
    exchange.respond(&ResponseHead { status, fields }).await?;
    if !is_head {
        exchange.send(body, patience).await?;
    }
    Ok(())
}

/// Sends an error of the API as the answer, with the `decided` fields about the chosen model; without content if the request `is_head`.
pub(super) async fn refuse(
    exchange: &mut Exchange,
    refusal: &OpenAiError,
    decided: Vec<Field>,
    is_head: bool,
) -> Ended {
    tracing::debug!(%refusal, "request refused");
    let retry = refusal.retry_after_s().map(|seconds| Field::new("retry-after", seconds.to_string()));
    let own = match refusal {
        OpenAiError::Method(operation) => Some(Field::new("allow", operation.methods())),
        // RFC 9110 §15.5.2.
        OpenAiError::Key => Some(Field::new("www-authenticate", "Bearer")),
        _ => None,
    };
    let fields = retry.into_iter().chain(own).chain(decided).collect();
    let content = ("application/json", refusal.body());
    match respond(exchange, (refusal.status(), fields), content, is_head, ANSWER_TIMEOUT).await {
        Ok(()) => Ended::Whole,
        Err(_) => Ended::Cut,
    }
}
