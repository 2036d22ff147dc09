//! The fields of a request and its answer by which its traces at the client, the gateway and the engine can be joined.

use hyper::header::HeaderValue;
use masque::h3::{Field, RequestHead};

/// The field with the ID of a request.
pub(crate) const REQUEST_ID: &str = "x-request-id";

/// The maximum length of a client's ID of a request, in bytes. Longer ones are neither passed on nor recorded.
const ID_BYTES: usize = 128;

/// Returns the fields that join the engine's log and its traces with the client's. An engine gets no ID of a request whose client sent
/// none: other gateways have requests with the same number.
pub(super) fn traced(head: &RequestHead, own: u64) -> Vec<(&'static str, HeaderValue)> {
    let id = unique_id(head, own).and_then(|id| HeaderValue::try_from(id).ok());
    let trace = head.field("traceparent").and_then(|trace| HeaderValue::from_bytes(trace).ok());
    [(REQUEST_ID, id), ("traceparent", trace)].into_iter().filter_map(|(name, of)| Some((name, of?))).collect()
}

/// Returns the field of an answer with the ID of its request: the ID that its engine gets, or else the gateway's own.
pub(super) fn answer_id(head: &RequestHead, own: u64) -> Field {
    Field::new(REQUEST_ID, unique_id(head, own).unwrap_or_else(|| own.to_string()))
}

/// Returns the client's ID of a request, if there is a usable one, made unique. Engines confuse or abort requests with the same ID, and
/// clients choose theirs freely, so the gateway's own ID of the request, `own`, is added.
fn unique_id(head: &RequestHead, own: u64) -> Option<String> {
    client_id(head).map(|id| format!("{id}-{own}"))
}

/// Returns the client's ID of a request, if there is one of up to [`ID_BYTES`] in visible ASCII.
pub(crate) fn client_id(head: &RequestHead) -> Option<&str> {
    let id = head.field(REQUEST_ID).and_then(|id| std::str::from_utf8(id).ok());
    id.filter(|id| (1..=ID_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()))
}
