//! The fields of a request by which its traces at the client, the gateway and the engine can be joined.

use hyper::header::HeaderValue;
use masque::h3::RequestHead;

/// The maximum length of a client's ID of a request, in bytes. Longer ones are not passed on.
const ID_BYTES: usize = 128;

/// Returns the fields that join the engine's log and its traces with the client's. Engines confuse or abort requests with the same ID,
/// and clients choose theirs freely, so the gateway's own ID of the request, `own`, makes it unique.
pub(super) fn traced(head: &RequestHead, own: u64) -> Vec<(&'static str, HeaderValue)> {
    let id = head.field("x-request-id").and_then(|id| std::str::from_utf8(id).ok());
    let id = id.filter(|id| (1..=ID_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()));
    let id = id.and_then(|id| HeaderValue::try_from(format!("{id}-{own}")).ok());
    let trace = head.field("traceparent").and_then(|trace| HeaderValue::from_bytes(trace).ok());
    [("x-request-id", id), ("traceparent", trace)].into_iter().filter_map(|(name, of)| Some((name, of?))).collect()
}
