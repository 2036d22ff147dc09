//! Errors in the form of the OpenAI API: each with its status, its code, and when to try again.

use std::time::Duration;

use bytes::Bytes;
use masque::request::Refusal;
use serde_json::{Value, json};

use super::{excerpt::excerpt, operation::Operation};

/// Why no engine answers a request; the client gets each as an error in the form of the API.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenAiError {
    /// The path is unknown.
    #[error(
        "paced serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models and /health"
    )]
    NotFound,
    /// The path names a stored response.
    #[error(
        "paced serves only POST /v1/responses: stored responses stay with the engine that made them, and paced does not know which"
    )]
    StoredResponse,
    /// The path takes another method.
    #[error("use {}", .0.methods())]
    Method(Operation),
    /// The content is not JSON.
    #[error("the content-type has to be application/json")]
    ContentType,
    /// The content is encoded, for example compressed.
    #[error("send the body without content-encoding")]
    ContentEncoding,
    /// The body is larger than allowed.
    #[error("the body is larger than {max_bytes} bytes")]
    TooLarge {
        /// The maximum size.
        max_bytes: usize,
    },
    /// The body did not arrive in time.
    #[error("the body did not arrive in time")]
    BodyTimeout,
    /// The body cannot be read.
    #[error("the body is not a valid request: {0}")]
    Json(String),
    /// The body names no model.
    #[error("the body names no model: `model` has to be a string")]
    NoModel,
    /// A key of the body has a value of another type.
    #[error("`{key}` has to be {expected}")]
    WrongType {
        /// The key.
        key: &'static str,
        /// The type, with its article.
        expected: &'static str,
    },
    /// A key of the body asks for something that paced does not do.
    #[error("`{key}` is not served here: {why}")]
    Unserved {
        /// The key.
        key: &'static str,
        /// Why not, and what to do instead.
        why: &'static str,
    },
    /// The client's key is missing or unknown.
    #[error("the API key is missing or unknown")]
    Key,
    /// A browser sent the request for a web page of another site.
    #[error(
        "a browser sent this request for a web page of another site; if that page may use the models, add its host to `hosts` of this address"
    )]
    ForeignPage,
    /// The request is for a name that the listener does not have.
    #[error("this address takes no requests for that name; if it may, add the name to `hosts` of this address")]
    UnknownHost,
    /// There is no such model.
    #[error("there is no model called {0:?}; GET /v1/models lists them")]
    UnknownModel(String),
    /// Too many requests wait.
    #[error("too many requests are waiting; try again later")]
    Crowded,
    /// The bodies of all requests leave no room for this one.
    #[error("the bodies of other requests leave no room for this one within {bound}; try again later")]
    BodiesFull {
        /// The bound on all bodies.
        bound: &'static str,
    },
    /// The maximum of requests with the key is in flight.
    #[error("this key has reached its limit of requests in flight; try again when one has ended")]
    TooManyRequests,
    /// The key has used its tokens of the minute.
    #[error("this key has used up its tokens of this minute; try again in {retry_after_s} s")]
    TooManyTokens {
        /// The time until there will be enough, in seconds.
        retry_after_s: u32,
    },
    /// Requests in progress have reserved the key's tokens of the minute, and may use fewer.
    #[error("requests in progress have reserved this key's tokens of this minute; try again when one has ended")]
    TokensReserved,
    /// The key has used its tokens of the month.
    #[error("this key has used up its tokens of this month; the next month begins in {retry_after_s} s")]
    MonthUsed {
        /// The time until the next month begins, in seconds.
        retry_after_s: u32,
    },
    /// The relay in front of the gateway grants the client no more, for this reason.
    #[error("the relay refuses the request: {why}; try again in {retry_after_s} s")]
    RelayLimit {
        /// The limit.
        why: &'static str,
        /// The time after which the client may try again, in seconds.
        retry_after_s: u32,
    },
    /// The client has used its bytes of the month at the relay in front of the gateway.
    #[error("this client has used up its bytes for this month; the next month begins in {retry_after_s} s")]
    BytesUsed {
        /// The time until the next month begins, in seconds.
        retry_after_s: u32,
    },
    /// No engine answers.
    #[error("no engine of the model answers; try again later")]
    NoEngine,
    /// A field that sets a time limit is not a whole number of milliseconds.
    #[error("the field {0} has to be a whole number of milliseconds")]
    Limit(&'static str),
    /// HTTP/3 cannot carry the head of the request, with the reason.
    #[error("the head of the request cannot be sent to a gateway: {0}")]
    Head(&'static str),
    /// No gateway can be reached.
    #[error("no gateway can be reached: {why}")]
    NoGateway {
        /// The reason.
        why: String,
        /// The time after which a gateway may be within reach, as far as is known, in seconds.
        retry_after_s: u32,
    },
    /// No model can meet the deadline.
    #[error("no model can answer within the deadline; allow more time, or try again later")]
    Late {
        /// The time after which one may, as far as is known, in seconds.
        retry_after_s: u32,
    },
    /// The engine takes no connections.
    #[error("the engine accepts no connections; try again later")]
    OutOfReach {
        /// Why, for operators only.
        why: String,
    },
    /// The gateway's host lacks descriptors, ports or memory for a connection to the engine.
    #[error("the gateway is short of resources; try again later")]
    Shortage {
        /// What it lacks, for operators only.
        why: String,
    },
    /// The engine's answer was faulty.
    #[error("the engine failed: {0}")]
    Engine(&'static str),
    /// The engine's answer has an event that is longer than 1 MiB, as requests can ask for.
    #[error("the engine's answer contains an event of more than 1 MiB, which the gateway does not pass")]
    EventTooLong,
    /// The engine did not answer in time.
    #[error("the engine did not answer in time")]
    EngineTimeout,
}

/// The seconds after which a client may try again, if no better time is known.
const RETRY_AFTER_S: u32 = 1;

/// The longest time after which a client of an edge without a gateway is asked to try again: a gateway may come within reach earlier than
/// the edge's next attempt to connect is due.
const NO_GATEWAY_MOST_S: u32 = 60;

impl OpenAiError {
    /// Returns the error of a request that names a model that does not exist.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        Self::UnknownModel(excerpt(name).to_owned())
    }

    /// Returns the error of a request for which no gateway can be reached, and the reason `why`. `next_attempt` is the time until an edge
    /// next attempts to connect to one, if that is known; clients are told the next full second of it, within 1 and 60 s.
    #[must_use]
    pub fn no_gateway(why: impl Into<String>, next_attempt: Option<Duration>) -> Self {
        let wait = next_attempt.unwrap_or_default().min(Duration::from_secs(NO_GATEWAY_MOST_S.into()));
        let wait_s = wait.as_secs_f64().ceil() as u32;
        Self::NoGateway { why: why.into(), retry_after_s: wait_s.max(RETRY_AFTER_S) }
    }

    /// Returns the error of a request for a model that the relay in front of the gateway refuses because of its limits; `None` if it
    /// refuses the request for another reason. `retry_after_s` is the time to wait, in seconds, if the relay names one.
    #[must_use]
    pub fn of_relay(refusal: &Refusal, retry_after_s: Option<u32>) -> Option<Self> {
        let retry_after_s = retry_after_s.unwrap_or(RETRY_AFTER_S);
        match refusal {
            Refusal::TunnelLimitReached => Some(Self::RelayLimit { why: "too many requests in flight", retry_after_s }),
            Refusal::ConnectionLimitReached => Some(Self::RelayLimit { why: "too many connections", retry_after_s }),
            Refusal::QuotaUsedUp { .. } => Some(Self::BytesUsed { retry_after_s }),
            _ => None,
        }
    }

    /// Returns the status to answer with (RFC 9110 §15).
    #[must_use]
    pub const fn status(&self) -> u16 {
        match self {
            Self::NotFound | Self::StoredResponse | Self::UnknownModel(_) => 404,
            Self::Method(_) => 405,
            Self::ContentType | Self::ContentEncoding => 415,
            Self::TooLarge { .. } => 413,
            Self::BodyTimeout => 408,
            Self::Json(_)
            | Self::NoModel
            | Self::WrongType { .. }
            | Self::Unserved { .. }
            | Self::Limit(_)
            | Self::Head(_) => 400,
            Self::Key => 401,
            Self::ForeignPage | Self::UnknownHost => 403,
            Self::Crowded
            | Self::BodiesFull { .. }
            | Self::TooManyRequests
            | Self::TokensReserved
            | Self::TooManyTokens { .. }
            | Self::MonthUsed { .. }
            | Self::RelayLimit { .. }
            | Self::BytesUsed { .. } => 429,
            Self::NoEngine
            | Self::OutOfReach { .. }
            | Self::Shortage { .. }
            | Self::NoGateway { .. }
            | Self::Late { .. } => 503,
            Self::Engine(_) | Self::EventTooLong => 502,
            Self::EngineTimeout => 504,
        }
    }

    /// Whether engines, the path or their load prevented an answer, rather than the client's request or its limits.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        self.status() >= 500 || matches!(self, Self::Crowded | Self::BodiesFull { .. })
    }

    /// Returns the seconds after which the same request may succeed, if ever.
    #[must_use]
    pub const fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::TooManyTokens { retry_after_s }
            | Self::MonthUsed { retry_after_s }
            | Self::RelayLimit { retry_after_s, .. }
            | Self::BytesUsed { retry_after_s }
            | Self::NoGateway { retry_after_s, .. }
            | Self::Late { retry_after_s } => Some(*retry_after_s),
            // A request may end at any moment, so no better time is known for the place or the tokens that it takes.
            Self::Crowded
            | Self::BodiesFull { .. }
            | Self::TooManyRequests
            | Self::TokensReserved
            | Self::NoEngine
            | Self::OutOfReach { .. }
            | Self::Shortage { .. } => Some(RETRY_AFTER_S),
            _ => None,
        }
    }

    /// Returns the label for metrics, which is also `code` in the error's body.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotFound | Self::StoredResponse => "not_found",
            Self::Method(_) => "method_not_allowed",
            Self::ContentType | Self::ContentEncoding => "unsupported_media_type",
            Self::TooLarge { .. } => "body_too_large",
            Self::BodyTimeout => "body_timeout",
            Self::Json(_) | Self::WrongType { .. } => "invalid_body",
            Self::Unserved { .. } => "unsupported_parameter",
            Self::Limit(_) => "invalid_limit",
            Self::Head(_) => "invalid_head",
            Self::NoModel => "model_missing",
            Self::Key => "invalid_api_key",
            Self::ForeignPage => "foreign_page",
            Self::UnknownHost => "unknown_host",
            Self::UnknownModel(_) => "model_not_found",
            Self::Crowded | Self::BodiesFull { .. } => "overloaded",
            Self::TooManyRequests | Self::TokensReserved | Self::TooManyTokens { .. } | Self::RelayLimit { .. } => {
                "rate_limit_exceeded"
            }
            Self::MonthUsed { .. } | Self::BytesUsed { .. } => "insufficient_quota",
            Self::NoEngine | Self::OutOfReach { .. } => "no_engine",
            Self::Shortage { .. } => "gateway_shortage",
            Self::NoGateway { .. } => "no_gateway",
            Self::Late { .. } => "deadline_unreachable",
            Self::Engine(_) => "engine_failed",
            Self::EventTooLong => "event_too_long",
            Self::EngineTimeout => "engine_timeout",
        }
    }

    /// Returns the `type` in the error's body, which clients of the API use.
    const fn kind(&self) -> &'static str {
        match self.status() {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Returns the key of the request's body that the error is about, if it is about one.
    const fn param(&self) -> Option<&'static str> {
        match self {
            Self::NoModel => Some("model"),
            Self::WrongType { key, .. } | Self::Unserved { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Returns the body with this error, in the form of the API.
    #[must_use]
    pub fn body(&self) -> Bytes {
        self.json().to_string().into()
    }

    fn json(&self) -> Value {
        let (message, kind, param, code) = (self.to_string(), self.kind(), self.param(), self.code());
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }

    /// Returns the event with this error, for a client of `operation` that has already received a part of its tokens. In the stream of a
    /// response, the event has its `number` in the stream.
    #[must_use]
    pub fn event(&self, operation: Operation, number: u64) -> Bytes {
        let event = match operation {
            Operation::Responses => {
                let (message, param, code) = (self.to_string(), self.param(), self.code());
                let error = json!({
                    "type": "error", "code": code, "message": message, "param": param, "sequence_number": number
                });
                format!("event: error\ndata: {error}\n\n")
            }
            _ => format!("data: {}\n\n", self.json()),
        };
        event.into()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::RoutingFields, *};

    #[test]
    fn an_error_repeats_only_the_beginning_of_a_long_text_of_the_client() {
        let long = "\u{7f}ä".repeat(1 << 18);
        for (key, code) in
            [("max_tokens", "invalid_body"), ("service_tier\":1,\"x", "invalid_body"), (&long, "model_missing")]
        {
            let text = format!(r#"{{"{key}":"{long}"}}"#).replace('\u{7f}', "\\u007f");
            let refusal = RoutingFields::read(text.as_bytes()).unwrap_err();
            assert_eq!(refusal.code(), code);
            assert!(refusal.body().len() < 4_096, "{code}: {} bytes", refusal.body().len());
        }
        let refusal = OpenAiError::unknown_model(&long);
        assert!(refusal.body().len() < 4_096 && refusal.to_string().contains(r"\u{7f}ä"), "{refusal}");
    }

    #[test]
    fn only_what_no_client_can_help_is_a_failure() {
        let engine = OpenAiError::Engine("it stopped");
        let late = OpenAiError::Late { retry_after_s: 1 };
        let failures = [OpenAiError::NoEngine, late, OpenAiError::Crowded, OpenAiError::EngineTimeout, engine];
        assert!(failures.iter().all(OpenAiError::is_failure));
        let too_many = OpenAiError::TooManyTokens { retry_after_s: 1 };
        let own = [OpenAiError::NoModel, OpenAiError::Key, OpenAiError::TooManyRequests, too_many];
        assert!(!own.iter().any(OpenAiError::is_failure));
    }

    #[test]
    fn a_client_without_a_gateway_is_asked_to_wait_for_the_next_attempt_to_connect_within_1_and_60_s() {
        let ms = Duration::from_millis;
        let told = |wait| OpenAiError::no_gateway("it is down", wait).retry_after_s();
        for (wait, expected_s) in [
            (None, 1),
            (Some(Duration::ZERO), 1),
            (Some(ms(1_000)), 1),
            (Some(ms(1_001)), 2),
            (Some(ms(7_900)), 8),
            (Some(ms(60_001)), 60),
            (Some(Duration::MAX), 60),
        ] {
            assert_eq!(told(wait), Some(expected_s), "{wait:?}");
        }
    }

    #[test]
    fn an_error_has_the_form_of_the_api() {
        let body: Value = serde_json::from_slice(&OpenAiError::UnknownModel("x".into()).body()).unwrap();
        assert_eq!(body["error"]["type"], "not_found_error");
        assert_eq!(body["error"]["code"], "model_not_found");
        assert!(body["error"]["message"].as_str().unwrap().contains("\"x\""), "{body}");
        let event = OpenAiError::Engine("it stopped").event(Operation::ChatCompletions, 7);
        assert!(event.starts_with(b"data: {\"error\":{") && event.ends_with(b"}}\n\n"));
        let event = OpenAiError::Engine("it stopped").event(Operation::Responses, 7);
        let event = event.strip_prefix(b"event: error\ndata: ").unwrap().strip_suffix(b"\n\n").unwrap();
        let expected = json!({
            "type": "error", "code": "engine_failed", "message": "the engine failed: it stopped", "param": null,
            "sequence_number": 7
        });
        assert_eq!(serde_json::from_slice::<Value>(event).unwrap(), expected);
    }
}
