//! What the head of an engine's answer says, before anything of the answer passes.
//!
//! | the head | the answer |
//! |---|---|
//! | a status that no request can cause, or success with content that does not match the request | is a failed try: [`fault`] |
//! | a status from 400 to 499 that may be about the engine itself | passes if no other engine contradicts it: [`refusal`] |
//! | any other | passes |

use hyper::{
    Response,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};
use openai::is_about_credentials;

use crate::message::is_json;

/// Returns why the answer is a failure of its engine, if it is one. `wants_events` says whether a stream of events was asked for: an engine
/// may answer with JSON all the same, but a page of a proxy is no answer.
pub(super) fn fault<B>(answer: &Response<B>, wants_events: bool) -> Option<&'static str> {
    let status = answer.status();
    let kind = answer.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes());
    if is_about_credentials(status.as_u16()) {
        Some("it refused the gateway's key")
    } else if status.is_client_error() {
        None
    } else if status.is_redirection() {
        Some("it redirected the request")
    } else if !status.is_success() {
        Some("it answered with an error of its own")
    } else if is_events(answer) {
        let mut encodings = answer.headers().get_all(CONTENT_ENCODING).iter();
        let is_encoded = encodings.any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
        is_encoded.then_some("it encoded its events, and was asked not to")
    } else {
        (wants_events && !kind.is_some_and(is_json)).then_some("it answered with neither events nor JSON")
    }
}

/// Returns why an engine that answers with this status refuses the request, if the engine itself may be the reason: other engines may take
/// the request. A status such as 400 is about the request's content.
pub(super) const fn refusal(status: u16) -> Option<&'static str> {
    match status {
        403 => Some("it refused the request with 403"),
        404 => Some("it refused the request with 404"),
        // The gateway sends the method and the path of the API.
        405 => Some("it refused the request with 405"),
        408 => Some("it refused the request with 408"),
        429 => Some("it refused the request with 429"),
        _ => None,
    }
}

/// Whether the content of an answer is a stream of events.
pub(super) fn is_events<B>(answer: &Response<B>) -> bool {
    let kind = answer.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_no_request_can_cause_is_a_fault() {
        let is_fault = |status: u16, fields: &[(&str, &str)], wants_events| {
            let answer = fields
                .iter()
                .fold(Response::builder().status(status), |answer, (name, value)| answer.header(*name, *value));
            fault(&answer.body(()).unwrap(), wants_events).is_some()
        };
        for wants_events in [true, false] {
            assert!([401, 407, 301, 302, 304, 308, 500, 503, 999].iter().all(|status| is_fault(
                *status,
                &[],
                wants_events
            )));
            assert!(![400, 403, 404, 408, 413, 422, 429].iter().any(|status| is_fault(*status, &[], wants_events)));
        }
        let kind = |kind| [("content-type", kind)];
        for good in [
            "text/event-stream",
            "Text/Event-Stream; charset=utf-8",
            "application/json",
            "application/json;charset=utf-8",
        ] {
            assert!(![true, false].iter().any(|wants| is_fault(200, &kind(good), *wants)), "{good}");
        }
        for page in [&kind("text/html")[..], &kind("application/jsonp"), &[]] {
            assert_eq!([true, false].map(|wants| is_fault(200, page, wants)), [true, false], "{page:?}");
        }
        for (encoding, is_wrong) in [("gzip", true), ("Identity", false)] {
            let of = |kind| [("content-type", kind), ("content-encoding", encoding)];
            assert_eq!(is_fault(200, &of("text/event-stream"), true), is_wrong, "{encoding}");
            assert!(!is_fault(200, &of("application/json"), true), "{encoding} of a whole answer passes");
        }
    }
}
