//! Server-sent events on their way from an engine to a client: complete lines pass, and their billed tokens are noted.

use bytes::{Buf as _, Bytes, BytesMut};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

pub use self::{engine_error::EngineError, malformed::MalformedEvent, token_report::TokenReport};
use self::{
    malformed::MAX_EVENT_BYTES,
    response_event::ResponseEvent,
    usage_filter::{EventLine, UsageFilter},
};

mod engine_error;
mod malformed;
mod response_event;
mod token_report;
mod usage_filter;

/// Checks a stream of events line by line. Bytes of incomplete lines wait for the rest. May take out the events that contain nothing but
/// `usage`.
#[derive(Debug, Default)]
pub struct EventStreamParser {
    /// `None` if all events pass.
    filter: Option<UsageFilter>,
    partial: BytesMut,
    report: TokenReport,
    is_done: bool,
    with_content: u64,
    steps: u64,
    error: Option<EngineError>,
    /// The number of the next event in the stream of a response.
    next_number: u64,
}

/// The keys that are read of an event.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    timings: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    /// The type of an event in the stream of a response.
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    sequence_number: Option<&'a RawValue>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
    /// The model's reasoning, under its older name and its newer one.
    #[serde(borrow, default)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    /// What preceded `tool_calls`.
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
}

impl EventStreamParser {
    /// Begins a stream for a client that did not ask for `usage`, although the engine was asked: events with `usage`
    /// and without choices are noted and do not pass. `usage` within other events does.
    #[must_use]
    pub fn without_usage() -> Self {
        Self { filter: Some(UsageFilter::default()), ..Self::default() }
    }

    /// Takes bytes as they arrive. Returns all lines that are now complete, unchanged: they may pass. A parser that takes out events of
    /// `usage` keeps the lines of an event until its data has come.
    ///
    /// # Errors
    /// The bytes are not an event of the API. No part of the malformed line passes.
    pub fn push(&mut self, mut bytes: Bytes) -> Result<Bytes, MalformedEvent> {
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
            self.keep(&bytes)?;
            return Ok(Bytes::new());
        };
        let rest = bytes.split_off(end + 1);
        let whole = if self.partial.is_empty() {
            bytes
        } else {
            self.keep(&bytes)?;
            self.partial.split().freeze()
        };
        let mut passed = BytesMut::new();
        for line in whole.split_inclusive(|byte| *byte == b'\n') {
            let text = line.strip_suffix(b"\n").unwrap_or(line);
            let kind = self.read(text.strip_suffix(b"\r").unwrap_or(text))?;
            if let Some(filter) = &mut self.filter {
                filter.take(kind, line, &mut passed)?;
            }
        }
        self.keep(&rest)?;
        Ok(if self.filter.is_some() { passed.freeze() } else { whole })
    }

    fn keep(&mut self, bytes: &Bytes) -> Result<(), MalformedEvent> {
        if self.partial.len() + bytes.remaining() > MAX_EVENT_BYTES {
            return Err(MalformedEvent::TooLong);
        }
        self.partial.extend_from_slice(bytes);
        Ok(())
    }

    /// Reads one line. Comments, names of events and empty lines contain nothing that counts.
    fn read(&mut self, line: &[u8]) -> Result<EventLine, MalformedEvent> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(if line.is_empty() { EventLine::End } else { EventLine::Other });
        };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.is_done = true;
            return Ok(EventLine::Data);
        }
        // A list would be read as the values of the keys, in their order.
        if !data.starts_with(b"{") {
            return Err(MalformedEvent::NoJson);
        }
        match serde_json::from_slice::<Event<'_>>(data) {
            Ok(event) => {
                let has_usage = event.usage.is_some_and(|usage| usage.get().starts_with('{'));
                let is_usage = event.choices.is_empty() && has_usage && event.error.is_none();
                self.steps += u64::from(!event.choices.is_empty());
                self.report.note(event.usage, event.timings);
                self.with_content += u64::from(event.choices.iter().any(Choice::has_content));
                self.note_response(&event, data);
                if let Some(error) = event.error.filter(|_| self.error.is_none()) {
                    self.error = Some(EngineError::new(error, data));
                }
                Ok(if is_usage { EventLine::Usage } else { EventLine::Data })
            }
            // Keys with types outside of the API concern only engine and client.
            Err(_) if serde_json::from_slice::<IgnoredAny>(data).is_ok() => {
                self.steps += 1;
                Ok(EventLine::Data)
            }
            Err(_) => Err(MalformedEvent::NoJson),
        }
    }

    /// Notes what an event of a response shows, if it is one.
    fn note_response(&mut self, event: &Event<'_>, data: &[u8]) {
        let has_delta = event.delta.is_some_and(is_content);
        let Some(shown) = event.kind.and_then(|kind| ResponseEvent::of(kind.get(), has_delta)) else { return };
        let number = event.sequence_number.and_then(|number| number.get().parse().ok());
        self.next_number = number.unwrap_or(self.next_number).saturating_add(1);
        self.steps += u64::from(matches!(shown, ResponseEvent::Step | ResponseEvent::Content));
        self.with_content += u64::from(shown == ResponseEvent::Content);
        self.is_done |= shown == ResponseEvent::Ended;
        let last = shown.last(event.response);
        self.report.note(last.as_ref().and_then(|last| last.usage), None);
        if shown == ResponseEvent::Failed && event.error.is_none() && self.error.is_none() {
            let described = last.and_then(|last| last.error).or_else(|| serde_json::from_slice(data).ok());
            self.error = described.map(EngineError::of_response);
        }
    }

    /// Returns the engine's report of tokens so far.
    #[must_use]
    pub const fn report(&self) -> TokenReport {
        self.report
    }

    /// Returns how many events with tokens have passed. The first event of a chat often names a role and contains no token; the first
    /// events of a response repeat the request.
    #[must_use]
    pub const fn with_content(&self) -> u64 {
        self.with_content
    }

    /// Returns how many events have passed that may show that the engine works on the answer: those with a choice or a part of a response,
    /// even without a token, since an engine may keep tokens back, and those with keys outside of the API. Comments and reports of `usage`
    /// are none.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number of the next event in the stream of a response: it follows the newest one, or counts the events if they have none.
    #[must_use]
    pub const fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Returns the first error that the engine has reported, if any.
    #[must_use]
    pub const fn error(&self) -> Option<&EngineError> {
        self.error.as_ref()
    }

    /// Whether the engine has marked the end of the stream.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.is_done
    }
}

impl Choice<'_> {
    fn has_content(&self) -> bool {
        let delta = self.delta.iter().flat_map(|delta| {
            let Delta { content, refusal, reasoning_content, reasoning, tool_calls, function_call } = *delta;
            [content, refusal, reasoning_content, reasoning, tool_calls, function_call]
        });
        delta.chain([self.text]).flatten().any(is_content)
    }
}

fn is_content(value: &RawValue) -> bool {
    !matches!(value.get(), "null" | "\"\"" | "[]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenUsage;

    const CHAT: &str = concat!(
        ": a comment\r\n",
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\\u000ab\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn the_engine_says_how_much_of_a_prompt_it_had_in_its_cache_or_not() {
        let cached = |answer: &str| TokenReport::of_answer(answer.as_bytes()).cached_tokens();
        let usage = |details: &str| {
            format!(r#"{{"usage":{{"prompt_tokens":90,"completion_tokens":2,"prompt_tokens_details":{details}}}}}"#)
        };
        assert_eq!(cached(&usage(r#"{"audio_tokens":0,"cached_tokens":64}"#)), Some(64));
        assert_eq!(cached(&usage(r#"{"cached_tokens":0}"#)), Some(0));
        assert_eq!(cached(&usage(r#"{"cached_tokens":900}"#)), Some(90), "no more than the prompt has");
        for details in ["null", "7", "{}", r#"{"cached_tokens":-1}"#, r#"{"cached_tokens":null}"#] {
            assert_eq!(cached(&usage(details)), None, "{details}");
            let report = TokenReport::of_answer(usage(details).as_bytes());
            assert_eq!(report.usage(), Some(TokenUsage { prompt_tokens: 90, completion_tokens: 2 }), "{details}");
        }
        assert_eq!(cached(r#"{"usage":{"prompt_tokens":90,"completion_tokens":2}}"#), None);
        let timings = r#"{"timings":{"prompt_n":10,"cache_n":80,"predicted_n":2}}"#;
        assert_eq!(cached(timings), Some(80), "llama.cpp");
        let mut events = EventStreamParser::default();
        let event = format!("data: {}\n\n", usage(r#"{"cached_tokens":64}"#));
        events.push(Bytes::from(event)).unwrap();
        assert_eq!(events.report().cached_tokens(), Some(64));
    }

    #[test]
    fn events_pass_unchanged_and_are_billed_as_the_engine_says_however_they_are_cut() {
        for size in 1..=CHAT.len() {
            let (mut events, mut passed) = (EventStreamParser::default(), Vec::new());
            for chunk in CHAT.as_bytes().chunks(size) {
                passed.extend_from_slice(&events.push(Bytes::copy_from_slice(chunk)).unwrap());
            }
            assert_eq!(passed, CHAT.as_bytes(), "in pieces of {size}");
            assert_eq!(events.report().usage(), Some(TokenUsage { prompt_tokens: 3, completion_tokens: 2 }));
            assert!(events.is_done() && events.with_content() == 1);
        }
    }

    #[test]
    fn an_unrequested_usage_event_counts_and_is_removed_at_every_split_of_the_stream() {
        let usage =
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\n";
        let named = CHAT.replace(usage, &format!("event: x\r\nid: 7\n{}", usage.replace('\n', "\r\n")));
        let expected = CHAT.replace(usage, "");
        assert!(expected.len() < CHAT.len() && named.len() > CHAT.len() + 10);
        for stream in [CHAT, &named] {
            for size in 1..=stream.len() {
                let (mut events, mut passed) = (EventStreamParser::without_usage(), Vec::new());
                for chunk in stream.as_bytes().chunks(size) {
                    passed.extend_from_slice(&events.push(Bytes::copy_from_slice(chunk)).unwrap());
                }
                assert_eq!(String::from_utf8_lossy(&passed), expected, "in pieces of {size}");
                assert_eq!(events.report().usage(), Some(TokenUsage { prompt_tokens: 3, completion_tokens: 2 }));
                assert!(events.is_done() && events.with_content() == 1);
            }
        }
    }

    #[test]
    fn all_other_events_pass_to_a_client_that_did_not_ask_for_usage() {
        for kept in [
            ": a comment\n\n",
            "event: ping\n\n",
            "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n",
            "data: {\"choices\":[],\"usage\":null}\n\n",
            "data: {\"choices\":[{\"text\":\"x\"}],\"usage\":{\"prompt_tokens\":3}}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3},\"error\":{\"code\":500}}\n\n",
            "data: [DONE]\n",
        ] {
            assert_eq!(EventStreamParser::without_usage().push(kept.into()), Ok(Bytes::from(kept)), "{kept}");
        }
        let mut events = EventStreamParser::without_usage();
        let end = "data: {\"usage\":{\"prompt_tokens\":3}}\ndata: [DONE]\n\n";
        assert_eq!(events.push(end.into()), Ok(Bytes::from("data: [DONE]\n\n")), "the end is never lost");
    }

    #[test]
    fn lines_without_data_do_not_grow_without_bound() {
        let mut events = EventStreamParser::without_usage();
        let line = Bytes::from(format!(":{}\n", "x".repeat(1 << 16)));
        let end = (0..=16).map(|_| events.push(line.clone())).find(Result::is_err);
        assert_eq!(end, Some(Err(MalformedEvent::TooLong)));
    }

    #[test]
    fn a_role_alone_is_no_token() {
        let mut events = EventStreamParser::default();
        let first = CHAT.find("a\\u").unwrap();
        events.push(Bytes::copy_from_slice(&CHAT.as_bytes()[..first])).unwrap();
        assert!(events.with_content() == 0);
        let nothing = r#"{"choices":[{"delta":{"refusal":null,"reasoning":"","function_call":null,"tool_calls":[]}}]}"#;
        let mut events = EventStreamParser::default();
        events.push(format!("data: {nothing}\n\n").into()).unwrap();
        assert!(events.with_content() == 0);
    }

    #[test]
    fn tokens_of_plain_completions_and_of_tools_count_as_well() {
        for data in [
            r#"{"choices":[{"text":"x"}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{}]}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"x"}}]}"#,
            r#"{"choices":[{"delta":{"content":null,"reasoning":"x"}}]}"#,
            r#"{"choices":[{"delta":{"content":"","refusal":"x"}}]}"#,
            r#"{"choices":[{"delta":{"function_call":{"arguments":"x"}}}]}"#,
        ] {
            let mut events = EventStreamParser::default();
            events.push(format!("data: {data}\n").into()).unwrap();
            assert_eq!(events.with_content(), 1, "{data}");
        }
    }

    #[test]
    fn an_event_may_show_that_the_engine_works_even_if_it_has_no_token() {
        for (line, steps) in [
            (r#"data: {"choices":[{"delta":{"content":""}}]}"#, 1),
            (r#"data: {"choices":[{"delta":{"audio":{"data":"x"}}}]}"#, 1),
            (r#"data: {"choices":"x"}"#, 1),
            (r#"data: {"choices":[],"usage":{"prompt_tokens":3}}"#, 0),
            (": a comment", 0),
            ("event: ping", 0),
            ("data: [DONE]", 0),
        ] {
            let mut events = EventStreamParser::default();
            events.push(format!("{line}\n\n").into()).unwrap();
            assert_eq!((events.steps(), events.with_content()), (steps, 0), "{line}");
        }
    }

    #[test]
    fn events_with_keys_of_other_types_pass_and_bill_nothing() {
        for data in [r#"{"usage":"x"}"#, r#"{"choices":null}"#, r#"{"usage":{"completion_tokens":null}}"#] {
            let mut events = EventStreamParser::default();
            let event = Bytes::from(format!("data: {data}\n"));
            assert_eq!(events.push(event.clone()), Ok(event));
            assert_eq!((events.report().usage(), events.with_content()), (None, 0));
        }
        for usage in [r#"{"prompt_tokens":null}"#, "7", "[]", "{}"] {
            let mut events = EventStreamParser::default();
            events.push(format!("data: {{\"choices\":[{{\"text\":\"x\"}}],\"usage\":{usage}}}\n").into()).unwrap();
            let counted = events.report().count(90, events.with_content(), true);
            assert_eq!(counted, TokenUsage { prompt_tokens: 90, completion_tokens: 1 }, "{usage}");
        }
    }

    #[test]
    fn an_error_among_events_is_noted_and_whether_the_engine_refuses_the_request() {
        let refusal = |data: &str| {
            let mut events = EventStreamParser::default();
            let event = Bytes::from(format!("data: {data}\n\ndata: {{\"error\":{{\"code\":404}}}}\n\n"));
            assert_eq!(events.push(event.clone()), Ok(event));
            let error = events.error().unwrap();
            assert_eq!(error.json, data, "the first one");
            error.refusal
        };
        // vLLM.
        let failed = r#"{"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}"#;
        assert_eq!(refusal(failed), None);
        assert_eq!(refusal(r#"{"error":{"message":"too long","code":400}}"#), Some(400));
        for code in
            ["499", "400.5", "\"400\"", "\"invalid_api_key\"", "-1", "399", "401", "407", "500", "70000", "null"]
        {
            let refused = refusal(&format!(r#"{{"error":{{"code":{code}}}}}"#));
            assert_eq!(refused, (code == "499").then_some(499), "{code}");
        }
        assert_eq!([r#"{"error":"x"}"#, r#"{"error":{}}"#].map(refusal), [None; 2]);
        let mut events = EventStreamParser::default();
        events.push(Bytes::from_static(b"data: {\"error\":null,\"choices\":[{\"text\":\"error\"}]}\n\n")).unwrap();
        assert_eq!((events.error(), events.with_content()), (None, 1));
    }

    #[test]
    fn tokens_are_counted_by_the_engines_newest_word_or_else_by_events() {
        let count = |lines: &[&str], is_whole| {
            let mut events = EventStreamParser::default();
            for data in lines {
                events.push(format!("data: {data}\n\n").into()).unwrap();
            }
            let TokenUsage { prompt_tokens, completion_tokens } =
                events.report().count(90, events.with_content(), is_whole);
            (prompt_tokens, completion_tokens)
        };
        let token = r#"{"choices":[{"text":"x y"}]}"#;
        assert_eq!([true, false].map(|whole| count(&[token, token], whole)), [(90, 2); 2], "nothing is said");
        // llama.cpp, whose last event has `timings`.
        let timed =
            r#"{"choices":[{"text":""}],"timings":{"cache_n":4,"prompt_n":3,"predicted_n":5,"predicted_ms":1.5}}"#;
        assert_eq!(count(&[token, token, timed], true), (7, 5));
        let older = r#"{"choices":[],"timings":{"prompt_n":3,"predicted_n":5}}"#;
        assert_eq!(count(&[token, older], true), (90, 5), "what of the prompt was in the cache is not known");
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":6}}"#;
        assert_eq!([count(&[timed, usage], true), count(&[usage, timed], true)], [(8, 6); 2], "what is billed wins");
        // vLLM with `continuous_usage_stats`.
        let so_far = r#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":8,"completion_tokens":4}}"#;
        assert_eq!(count(&[so_far], false), (8, 4), "an event may have several tokens");
        assert_eq!(count(&[so_far, token, token, token, token], false), (8, 5), "and its word may be old");
        for strange in ["[1]", "{\"predicted_n\":-1,\"prompt_n\":1}", "null", "7"] {
            let event = format!("{{\"choices\":[{{\"text\":\"x\"}}],\"timings\":{strange}}}");
            assert_eq!(count(&[&event], true), (90, 1), "{strange}");
        }
    }

    #[test]
    fn a_line_that_is_no_event_does_not_pass() {
        for data in ["data: {\n", "data: secret\n", "data: 3\n", "data: [{}]\n", "data: {} {}\n"] {
            assert_eq!(EventStreamParser::default().push(data.into()), Err(MalformedEvent::NoJson), "{data}");
        }
        let mut events = EventStreamParser::default();
        let chunk = Bytes::from(vec![b'x'; 1 << 16]);
        let end = (0..=16).map(|_| events.push(chunk.clone())).find(Result::is_err);
        assert_eq!(end, Some(Err(MalformedEvent::TooLong)));
    }
}
