//! What the head of an engine's answer says, before anything of the answer passes.
//!
//! | the head | the answer |
//! |---|---|
//! | a status that no request can cause, or success with content that does not match the request | is a failed try: [`fault`] |
//! | a status from 400 to 499 that may be about the engine itself, or a refusal for its load | passes if no other engine contradicts it: [`refusal`] |
//! | any other | passes |

use std::time::{Duration, SystemTime};

use config::moment::Moment;
use hyper::{
    Response,
    header::{CONTENT_ENCODING, CONTENT_TYPE, DATE, RETRY_AFTER},
};
use openai::{is_about_credentials, is_json};

/// The names of months in dates of HTTP.
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Returns why the answer is a failure of its engine, if it is one. `wants_events` says whether a stream of events was asked for: an engine
/// may answer with JSON all the same, but a page of a proxy is no answer.
#[must_use]
pub fn fault<B>(answer: &Response<B>, wants_events: bool) -> Option<&'static str> {
    let status = answer.status();
    let kind = answer.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes());
    if is_about_credentials(status.as_u16()) {
        Some("it refused the gateway's key")
    } else if status.is_client_error() || is_for_load(answer) {
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

/// Returns why an engine that answers with this head refuses the request, if the engine itself may be the reason: other engines may take
/// the request. A status such as 400 is about the request's content.
#[must_use]
pub fn refusal<B>(answer: &Response<B>) -> Option<&'static str> {
    match answer.status().as_u16() {
        403 => Some("it refused the request with 403"),
        404 => Some("it refused the request with 404"),
        // The gateway sends the method and the path of the API.
        405 => Some("it refused the request with 405"),
        408 => Some("it refused the request with 408"),
        429 => Some("it refused the request with 429"),
        503 if is_for_load(answer) => Some("it refused the request with 503"),
        _ => None,
    }
}

/// Whether an engine refuses the request because it has too many, so that it would refuse the next one as well. Without `retry-after`, 503
/// may have any cause.
#[must_use]
pub fn is_for_load<B>(answer: &Response<B>) -> bool {
    match answer.status().as_u16() {
        429 => true,
        503 => answer.headers().contains_key(RETRY_AFTER),
        _ => false,
    }
}

/// Returns for how long an engine says that it refuses requests (RFC 9110 §10.2.3), if its answer, which came at `now`, does.
#[must_use]
pub fn retry_after<B>(answer: &Response<B>, now: SystemTime) -> Option<Duration> {
    let field = |name| answer.headers().get(name)?.to_str().ok().map(str::trim);
    let text = field(RETRY_AFTER)?;
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let until = date(text)?;
    // The clocks of the engine and of this host may differ.
    let at = field(DATE).and_then(date).unwrap_or(now);
    Some(until.duration_since(at).unwrap_or_default())
}

/// Reads a date of HTTP in any of its three forms (RFC 9110 §5.6.7).
fn date(text: &str) -> Option<SystemTime> {
    let parts: Vec<_> = text.split([' ', '-']).filter(|part| !part.is_empty()).collect();
    let (day, month, year, time) = match parts[..] {
        [_, day, month, year, time, "GMT"] => (day, month, year, time),
        [_, month, day, time, year] => (day, month, year, time),
        _ => return None,
    };
    let month = 1 + MONTHS.iter().position(|name| *name == month)?;
    let century = if year.len() == 2 { "20" } else { "" };
    Moment::parse(&format!("{century}{year}-{month:02}-{day:0>2}T{time}Z")).map(SystemTime::from)
}

/// Whether the content of an answer is a stream of events.
#[must_use]
pub fn is_events<B>(answer: &Response<B>) -> bool {
    let kind = answer.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_load_names_its_end_in_seconds_or_as_a_date_by_the_engines_own_clock() {
        let head = |status: u16, fields: &[(&str, &str)]| {
            let head = Response::builder().status(status);
            fields.iter().fold(head, |head, (name, value)| head.header(*name, *value)).body(()).unwrap()
        };
        // 1994-11-06T08:49:37Z.
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let named = |value| retry_after(&head(429, &[("retry-after", value)]), now).map(|time| time.as_secs());
        for (value, seconds) in [
            ("0", Some(0)),
            (" 7 ", Some(7)),
            ("99999999999999999999", Some(u64::MAX)),
            ("Sun, 06 Nov 1994 08:49:52 GMT", Some(15)),
            ("Sun Nov  6 08:50:37 1994", Some(60)),
            ("Sun, 06 Nov 1994 08:49:36 GMT", Some(0)),
            ("Sunday, 06-Nov-94 08:49:52 GMT", Some(3_155_760_015)),
            ("Sun, 06 Nov 1994 08:49:52 CET", None),
            ("Sun, 31 Nov 1994 08:49:52 GMT", None),
            ("soon", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("", None),
        ] {
            assert_eq!(named(value), seconds, "{value}");
        }
        let [date, until] = ["Sun, 06 Nov 2094 08:49:37 GMT", "Sunday, 06-Nov-94 08:50:07 GMT"];
        let by_its_clock = head(503, &[("date", date), ("retry-after", until)]);
        assert_eq!(retry_after(&by_its_clock, now), Some(Duration::from_secs(30)));
        let none: &[(&str, &str)] = &[];
        for (status, fields, is_it) in [
            (429, none, true),
            (429, &[("retry-after", "7")], true),
            (503, &[("retry-after", "7")], true),
            (503, none, false),
            (500, &[("retry-after", "7")], false),
            (403, &[("retry-after", "7")], false),
        ] {
            let head = head(status, fields);
            assert_eq!(
                (is_for_load(&head), retry_after(&head, now).is_some()),
                (is_it, !fields.is_empty()),
                "{status}"
            );
            assert_eq!(fault(&head, false).is_some(), status >= 500 && !is_it, "{status}");
            assert_eq!(refusal(&head).is_some(), status < 500 || is_it, "{status}");
        }
    }

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
