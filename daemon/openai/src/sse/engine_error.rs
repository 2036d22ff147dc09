//! Errors that engines report within answers that they began with success.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::is_about_credentials;

/// An error that an engine reports within an answer that it began with success: vLLM ends every stream that fails with such an event and
/// `[DONE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    /// The status from 400 to 499 that its `code` names, if the engine seems to refuse the request rather than fail. vLLM and SGLang
    /// name 400 for many failures of their own, so this is no proof. A status about the gateway's credentials is no refusal.
    pub refusal: Option<u16>,
    /// The data of the event, or the answer without events, in the form of the API.
    pub json: Bytes,
}

/// The key that is read of an answer without events.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// `error` of an event.
#[derive(Deserialize)]
struct ErrorCode<'a> {
    #[serde(borrow)]
    code: &'a RawValue,
}

impl ErrorCode<'_> {
    /// Returns the status that the code stands for. Most codes that are no numbers say none; those of a response may name what is wrong
    /// with its input.
    fn status(&self) -> Option<u16> {
        match self.code.get() {
            "\"invalid_prompt\"" => Some(400),
            name if name.starts_with('"') => name.contains("image").then_some(400),
            number => number.parse().ok(),
        }
    }
}

impl EngineError {
    /// Reads the error of a complete answer without events; `None` if it is an answer.
    #[must_use]
    pub fn of_answer(body: &[u8]) -> Option<Self> {
        // A list would be read as the values of the keys, in their order.
        if !body.trim_ascii_start().starts_with(b"{") {
            return None;
        }
        Some(Self::new(serde_json::from_slice::<Answer<'_>>(body).ok()?.error?, body))
    }

    pub(super) fn new(error: &RawValue, json: &[u8]) -> Self {
        let code = serde_json::from_str::<ErrorCode<'_>>(error.get()).ok().and_then(|error| error.status());
        let refusal = code.filter(|code| (400..500).contains(code) && !is_about_credentials(*code));
        Self { refusal, json: Bytes::copy_from_slice(json) }
    }

    /// Reads the error of a response that failed, from the part of the event that describes it.
    pub(super) fn of_response(error: &RawValue) -> Self {
        Self::new(error, format!("{{\"error\":{}}}", error.get()).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_events_may_be_an_error_too() {
        let error = |body: &str| EngineError::of_answer(body.as_bytes());
        let refused = r#" {"error":{"message":"m","code":400},"choices":[]} "#;
        assert_eq!(error(refused), Some(EngineError { refusal: Some(400), json: refused.into() }));
        assert_eq!(error(r#"{"error":"x"}"#).unwrap().refusal, None);
        for answer in [r#"{"error":null}"#, r#"{"choices":[{"error":"x"}]}"#, r#"[{"error":1}]"#, "[1]", "x", ""] {
            assert_eq!(error(answer), None, "{answer}");
        }
    }
}
