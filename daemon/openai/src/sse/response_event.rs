//! Events in the stream of a response (`POST /v1/responses`). Each names its type; the last one has the whole response, with `usage`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::token_report::object;

/// What an event of a response shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseEvent {
    /// The engine has accepted the request. An engine may repeat such an event while the request waits.
    Accepted,
    /// The engine works on the answer, for example by a call of a tool, but the event has no content.
    Step,
    /// A part of the text, the reasoning, a refusal or the arguments of a call.
    Content,
    /// The response is complete, or has reached its limit of tokens.
    Ended,
    /// The response has failed.
    Failed,
}

/// The keys that are read of the response in the last event.
#[derive(Deserialize)]
pub(super) struct LastResponse<'a> {
    #[serde(borrow, default)]
    pub(super) error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
}

impl ResponseEvent {
    /// Returns what an event of the type `kind` (JSON text) shows; `has_delta` says whether it has a `delta` that is not empty. `None` if it
    /// is no event of a response.
    pub(super) fn of(kind: &str, has_delta: bool) -> Option<Self> {
        Some(match kind.strip_prefix('"')?.strip_suffix('"')? {
            "error" | "response.failed" => Self::Failed,
            "response.completed" | "response.incomplete" => Self::Ended,
            "response.created" | "response.queued" | "response.in_progress" => Self::Accepted,
            other if !other.starts_with("response.") => return None,
            other if has_delta && other.ends_with(".delta") => Self::Content,
            _ => Self::Step,
        })
    }

    /// Returns what is read of the response in an event, if that is the last one.
    pub(super) fn last<'a>(self, response: Option<&'a RawValue>) -> Option<LastResponse<'a>> {
        response.filter(|_| matches!(self, Self::Ended | Self::Failed)).and_then(object)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use crate::{TokenUsage, sse::EventStreamParser};

    /// The stream of a response as vLLM and OpenAI write it, in short; llama.cpp leaves the numbers out.
    const RESPONSE: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"usage\":null}}\n\n",
        "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"sequence_number\":1,\"response\":{}}\n\n",
        "data: {\"type\":\"response.output_item.added\",\"sequence_number\":2,\"item\":{\"type\":\"message\"}}\n\n",
        "data: {\"type\":\"response.reasoning_text.delta\",\"sequence_number\":3,\"delta\":\"a\"}\n\n",
        "data: {\"type\":\"response.output_text.delta\",\"sequence_number\":4,\"delta\":\"b\\u000a\"}\n\n",
        "data: {\"type\":\"response.output_text.done\",\"sequence_number\":5,\"text\":\"b\\u000a\"}\n\n",
        "event: response.completed\n",
        "data: {\"type\":\"response.completed\",\"sequence_number\":6,\"response\":{\"output\":[],\"error\":null,",
        "\"usage\":{\"input_tokens\":9,\"output_tokens\":4,\"input_tokens_details\":{\"cached_tokens\":8}}}}\n\n",
    );

    fn read(stream: &str) -> EventStreamParser {
        let mut events = EventStreamParser::default();
        assert_eq!(events.push(Bytes::copy_from_slice(stream.as_bytes())), Ok(stream.to_owned().into()));
        events
    }

    #[test]
    fn a_response_passes_unchanged_and_ends_with_its_last_event_which_has_its_usage() {
        for size in 1..=RESPONSE.len() {
            let (mut events, mut passed) = (EventStreamParser::default(), Vec::new());
            for chunk in RESPONSE.as_bytes().chunks(size) {
                passed.extend_from_slice(&events.push(Bytes::copy_from_slice(chunk)).unwrap());
            }
            assert_eq!(passed, RESPONSE.as_bytes(), "in pieces of {size}");
            assert_eq!(events.report().usage(), Some(TokenUsage { prompt_tokens: 9, completion_tokens: 4 }));
            assert_eq!((events.report().cached_tokens(), events.next_number()), (Some(8), 7));
            assert!(events.is_done() && events.error().is_none());
            assert_eq!((events.with_content(), events.steps()), (2, 4));
        }
        let last = RESPONSE.find("event: response.completed").unwrap();
        assert!(!read(&RESPONSE[..last]).is_done());
        assert!(read(&RESPONSE.replace("response.completed", "response.incomplete")).is_done());
    }

    #[test]
    fn only_a_delta_that_is_not_empty_is_content_and_an_accepted_request_is_no_work() {
        for (event, steps, with_content) in [
            (r#"{"type":"response.created","response":{"usage":{"input_tokens":1,"output_tokens":1}}}"#, 0, 0),
            (r#"{"type":"response.queued"}"#, 0, 0),
            (r#"{"type":"response.in_progress"}"#, 0, 0),
            (r#"{"type":"keepalive"}"#, 0, 0),
            (r#"{"type":7,"delta":"x"}"#, 0, 0),
            (r#"{"type":"response.content_part.added"}"#, 1, 0),
            (r#"{"type":"response.web_search_call.searching"}"#, 1, 0),
            (r#"{"type":"response.output_text.delta","delta":""}"#, 1, 0),
            (r#"{"type":"response.output_text.delta"}"#, 1, 0),
            (r#"{"type":"response.output_text.done","delta":"x"}"#, 1, 0),
            (r#"{"type":"response.refusal.delta","delta":"x"}"#, 1, 1),
            (r#"{"type":"response.reasoning_summary_text.delta","delta":"x"}"#, 1, 1),
            (r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#, 1, 1),
        ] {
            let events = read(&format!("data: {event}\n\n"));
            assert_eq!((events.steps(), events.with_content()), (steps, with_content), "{event}");
            assert!(!events.is_done() && events.report().usage().is_none(), "{event}");
        }
    }

    #[test]
    fn a_failed_response_is_an_error_of_the_engine_and_tells_whether_the_request_is_refused() {
        let usage = r#""usage":{"input_tokens":9,"output_tokens":4}"#;
        for (event, refusal, json) in [
            (
                format!(r#"{{"type":"response.failed","response":{{"error":{{"code":"server_error"}},{usage}}}}}"#),
                None,
                r#"{"error":{"code":"server_error"}}"#,
            ),
            (
                format!(r#"{{"type":"response.failed","response":{{"error":{{"code":"invalid_prompt"}},{usage}}}}}"#),
                Some(400),
                r#"{"error":{"code":"invalid_prompt"}}"#,
            ),
            (
                r#"{"type":"error","code":"invalid_image","message":"m","param":null,"sequence_number":3}"#.into(),
                Some(400),
                r#"{"error":{"type":"error","code":"invalid_image","message":"m","param":null,"sequence_number":3}}"#,
            ),
            // What OpenAI sends, although its reference has the form above.
            (r#"{"type":"error","error":{"code":422}}"#.into(), Some(422), r#"{"type":"error","error":{"code":422}}"#),
            (r#"{"type":"response.failed"}"#.into(), None, r#"{"error":{"type":"response.failed"}}"#),
            (
                r#"{"type":"error","code":"invalid_api_key"}"#.into(),
                None,
                r#"{"error":{"type":"error","code":"invalid_api_key"}}"#,
            ),
        ] {
            let events = read(&format!("data: {event}\n\ndata: {{\"type\":\"error\",\"code\":404}}\n\n"));
            let error = events.error().unwrap();
            assert_eq!((error.refusal, &error.json[..]), (refusal, json.as_bytes()), "{event}");
            assert_eq!(events.report().usage().is_some(), event.contains("usage"), "{event}");
            assert!(!events.is_done());
        }
    }

    #[test]
    fn the_next_number_follows_the_newest_one_or_the_count_of_events() {
        let number = |lines: &[&str]| {
            read(&lines.iter().map(|data| format!("data: {data}\n\n")).collect::<String>()).next_number()
        };
        let unnumbered = r#"{"type":"response.output_text.delta","delta":"x"}"#;
        let numbered = r#"{"type":"response.output_text.delta","delta":"x","sequence_number":41}"#;
        assert_eq!([number(&[]), number(&[unnumbered; 3]), number(&[numbered, unnumbered])], [0, 3, 43]);
        let most = format!(r#"{{"type":"response.x","sequence_number":{}}}"#, u64::MAX);
        assert_eq!(number(&[&most, unnumbered]), u64::MAX);
    }
}
