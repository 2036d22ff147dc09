//! What paced needs to know of the OpenAI API: its paths, the fields of a request that decide where it goes, and the form
//! of errors. The rest of a body passes unchanged, except that paced may ask for `usage`.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::{json, value::RawValue};

pub use self::{renamed::RenamedBody, usage_option::UsageOption};

mod renamed;
mod usage_option;

/// How much of a client's own text errors and records repeat, in bytes. A body may consist of one name, and neither of them counts
/// against the bound on bodies.
const EXCERPT_BYTES: usize = 256;

/// Returns the beginning of a client's text, for errors and records: at most 256 bytes, in whole letters.
#[must_use]
pub fn excerpt(text: &str) -> &str {
    text.get(..text.floor_char_boundary(EXCERPT_BYTES)).unwrap_or_default()
}

/// The served operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/embeddings`.
    Embeddings,
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`.
    Model,
    /// `GET /health`, or HEAD.
    Health,
}

impl Operation {
    /// The operations that a path names completely.
    const WHOLE: [Self; 5] = [Self::ChatCompletions, Self::Completions, Self::Embeddings, Self::Models, Self::Health];

    /// Returns the operation that a request's method and path name; the query does not count.
    ///
    /// # Errors
    /// The path is unknown, or takes another method.
    pub fn of(method: &[u8], path: &[u8]) -> Result<Self, OpenAiError> {
        let operation = match model_in(path) {
            Some(_) => Self::Model,
            None => {
                let path = without_query(path);
                let operation = Self::WHOLE.into_iter().find(|operation| operation.path().as_bytes() == path);
                operation.ok_or(OpenAiError::NotFound)?
            }
        };
        let is_allowed = operation.methods().split(", ").any(|allowed| allowed.as_bytes() == method);
        if is_allowed { Ok(operation) } else { Err(OpenAiError::Method(operation)) }
    }

    /// Returns the path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Models => "/v1/models",
            Self::Model => "/v1/models/{id}",
            Self::Health => "/health",
        }
    }

    /// Whether its streams may end with an event of `usage`, if the request asks for it (`stream_options.include_usage`).
    #[must_use]
    pub const fn may_have_usage_event(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }

    /// Returns the allowed methods, as in `allow` (RFC 9110 §10.2.1).
    #[must_use]
    pub const fn methods(self) -> &'static str {
        match self {
            // Some monitors ask for the head only.
            Self::Health => "GET, HEAD",
            Self::Models | Self::Model => "GET",
            _ => "POST",
        }
    }

    /// Returns the label for metrics, as OpenTelemetry's conventions for generative AI name operations
    /// (`gen_ai.operation.name`).
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat",
            Self::Completions => "text_completion",
            Self::Embeddings => "embeddings",
            Self::Models => "models",
            Self::Model => "model",
            Self::Health => "health",
        }
    }
}

fn without_query(path: &[u8]) -> &[u8] {
    path.split(|byte| *byte == b'?').next().unwrap_or_default()
}

/// Returns the encoded name of the model in the path of [`Operation::Model`]. Names may contain slashes.
fn model_in(path: &[u8]) -> Option<&[u8]> {
    without_query(path).strip_prefix(b"/v1/models/").filter(|name| !name.is_empty())
}

/// Returns the name of the model in the path of [`Operation::Model`], percent-decoded (RFC 3986 §2.1).
///
/// # Errors
/// It is not UTF-8, or not encoded in this way.
pub fn model_name(path: &[u8]) -> Result<String, OpenAiError> {
    let mut encoded = model_in(path).unwrap_or_default().iter().copied();
    let mut name = Vec::new();
    while let Some(byte) = encoded.next() {
        let mut digit = || char::from(encoded.next()?).to_digit(16);
        name.push(match byte {
            b'%' => digit().zip(digit()).map(|(high, low)| (16 * high + low) as u8).ok_or(OpenAiError::NotFound)?,
            other => other,
        });
    }
    String::from_utf8(name).map_err(|_| OpenAiError::NotFound)
}

/// The fields of a request's body that decide where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingFields {
    /// The model, as the client names it.
    pub model: String,
    /// The range of its name in the body, quotes included.
    model_at: Range<usize>,
    /// The range of its messages or its prompt; empty if there is neither.
    prompt_at: Range<usize>,
    /// Its `service_tier`, if it names one.
    pub service_tier: Option<String>,
    /// Whether it asks for a stream of events.
    pub is_streamed: bool,
    /// The maximum of tokens in the answer, if the client sets one. As engines do, rounds a fraction, and takes a negative number for none.
    pub max_tokens: Option<u32>,
}

/// The keys that are read of a body.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(default)]
    service_tier: Option<String>,
    #[serde(default)]
    max_tokens: Option<f64>,
    #[serde(default)]
    max_completion_tokens: Option<f64>,
}

impl RoutingFields {
    /// Reads a request's body.
    ///
    /// # Errors
    /// The body is not a JSON object, names no model, or contains one of these keys twice or with another type.
    pub fn read(body: &[u8]) -> Result<Self, OpenAiError> {
        let text = std::str::from_utf8(body).map_err(|_| OpenAiError::Json("the body is not UTF-8".into()))?;
        // A list would be read as the values of the keys, in their order.
        if !text.trim_start().starts_with('{') {
            return Err(OpenAiError::Json("it is not an object".into()));
        }
        let read: Body<'_> = serde_json::from_str(text).map_err(|error| OpenAiError::unreadable(&error))?;
        let raw = read.model.ok_or(OpenAiError::NoModel)?.get();
        let model: String = serde_json::from_str(raw).map_err(|_| OpenAiError::NoModel)?;
        let prompt = read.messages.or(read.prompt);
        Ok(Self {
            model,
            model_at: place(raw, text).ok_or(OpenAiError::NoModel)?,
            prompt_at: prompt.and_then(|prompt| place(prompt.get(), text)).unwrap_or_default(),
            service_tier: read.service_tier,
            is_streamed: read.stream.is_some_and(|stream| stream.get() == "true"),
            max_tokens: read.max_completion_tokens.or(read.max_tokens).and_then(tokens_limit),
        })
    }

    /// Returns the messages or the prompt as they occur in `body`, from which this was read; empty if there are none.
    #[must_use]
    pub fn prompt<'a>(&self, body: &'a [u8]) -> &'a [u8] {
        body.get(self.prompt_at.clone()).unwrap_or_default()
    }

    /// Returns the addition to `body`, from which this was read, that asks for `usage` in the stream of its answer. `None` if it asks for no
    /// stream, or decides about `usage` itself, or if its `stream_options` cannot be read.
    #[must_use]
    pub fn usage_option(&self, body: &[u8]) -> Option<UsageOption> {
        if self.is_streamed { UsageOption::of(body, self.model_at.end) } else { None }
    }

    /// Returns `body`, from which this was read, with another model's name and with an addition that [`RoutingFields::usage_option`] returned
    /// for it. It is otherwise unchanged, byte for byte; the rest is not copied.
    #[must_use]
    pub fn for_engine(&self, body: &Bytes, model: &str, added: Option<&UsageOption>) -> RenamedBody {
        let name = (self.model != model)
            .then(|| (self.model_at.clone(), Bytes::from(serde_json::Value::from(model).to_string())));
        let added = added.map(|added| (added.at.clone(), Bytes::from_static(added.text.as_bytes())));
        let mut changes = [name, added];
        changes.sort_by_key(|change| change.as_ref().map(|(at, _)| at.start));
        RenamedBody::changed(body, changes.into_iter().flatten())
    }
}

/// Returns the range of a raw value in the text that it was read from, of which it is a part.
fn place(raw: &str, text: &str) -> Option<Range<usize>> {
    let start = (raw.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    Some(start..start + raw.len())
}

/// Returns the limit of tokens that a number of a body stands for.
fn tokens_limit(number: f64) -> Option<u32> {
    // Larger numbers become the largest.
    (number >= 0.0).then(|| number.round() as u32)
}

/// Whether an engine's status is about the gateway's own credentials (RFC 9110 §15.5.2, §15.5.8), so that it means nothing to a client. An edge
/// would take 407 for a refusal of its own credentials. 403 is not among them: an engine may forbid the content of a request, and clients
/// must not be able to make engines count as failed (RFC 9110 §15.5.4).
pub(crate) const fn is_about_credentials(status: u16) -> bool {
    matches!(status, 401 | 407)
}

/// Why no engine answers a request; the client gets each as an error in the form of the API.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenAiError {
    /// The path is unknown.
    #[error("paced serves /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models and /health")]
    NotFound,
    /// The path takes another method.
    #[error("use {}", .0.methods())]
    Method(Operation),
    /// The content is not JSON.
    #[error("the content-type has to be application/json")]
    ContentType,
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
    #[error("the body names no model")]
    NoModel,
    /// The client's key is missing or unknown.
    #[error("the API key is missing or unknown")]
    Key,
    /// There is no such model.
    #[error("there is no model called {0:?}; GET /v1/models lists them")]
    UnknownModel(String),
    /// Too many requests wait.
    #[error("too many requests are waiting; try again later")]
    Crowded,
    /// The maximum of requests with the key is in flight.
    #[error("this key has reached its limit of requests in flight; try again when one has ended")]
    TooManyRequests,
    /// The key has used its tokens of the minute.
    #[error("this key has used up its tokens of this minute; try again in {retry_after_s} s")]
    TooManyTokens {
        /// The time until there will be enough, in seconds.
        retry_after_s: u32,
    },
    /// The key has used its tokens of the month.
    #[error("this key has used up its tokens of this month; the next month begins in {retry_after_s} s")]
    MonthUsed {
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
    /// No gateway can be reached, with the reason.
    #[error("no gateway can be reached: {0}")]
    NoGateway(String),
    /// No model can meet the deadline.
    #[error("no model can answer within the deadline; allow more time, or try again later")]
    Late,
    /// The engine takes no connections.
    #[error("the engine accepts no connections; try again later")]
    OutOfReach {
        /// Why, for operators only.
        why: String,
    },
    /// The engine's answer was faulty.
    #[error("the engine failed: {0}")]
    Engine(&'static str),
    /// The engine did not answer in time.
    #[error("the engine did not answer in time")]
    EngineTimeout,
}

/// The seconds after which a client may try again, if no better time is known.
const RETRY_AFTER_S: u32 = 1;

impl OpenAiError {
    /// Returns the error of a request that names a model that does not exist.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        Self::UnknownModel(excerpt(name).to_owned())
    }

    /// Returns the error of a body that is not a request. The parser's text may quote a whole value of the body.
    fn unreadable(error: &serde_json::Error) -> Self {
        let (text, line, column) = (error.to_string(), error.line(), error.column());
        match excerpt(&text) {
            whole if whole.len() == text.len() => Self::Json(text),
            start => Self::Json(format!("{start}… at line {line} column {column}")),
        }
    }

    /// Returns the status to answer with (RFC 9110 §15).
    #[must_use]
    pub const fn status(&self) -> u16 {
        match self {
            Self::NotFound | Self::UnknownModel(_) => 404,
            Self::Method(_) => 405,
            Self::ContentType => 415,
            Self::TooLarge { .. } => 413,
            Self::BodyTimeout => 408,
            Self::Json(_) | Self::NoModel | Self::Limit(_) | Self::Head(_) => 400,
            Self::Key => 401,
            Self::Crowded | Self::TooManyRequests | Self::TooManyTokens { .. } | Self::MonthUsed { .. } => 429,
            Self::NoEngine | Self::OutOfReach { .. } | Self::NoGateway(_) | Self::Late => 503,
            Self::Engine(_) => 502,
            Self::EngineTimeout => 504,
        }
    }

    /// Whether engines, the path or their load prevented an answer, rather than the client's request or its limits.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        self.status() >= 500 || matches!(self, Self::Crowded)
    }

    /// Returns the seconds after which the same request may succeed, if ever.
    #[must_use]
    pub const fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::TooManyTokens { retry_after_s } | Self::MonthUsed { retry_after_s } => Some(*retry_after_s),
            Self::Crowded
            | Self::TooManyRequests
            | Self::NoEngine
            | Self::OutOfReach { .. }
            | Self::NoGateway(_)
            | Self::Late => Some(RETRY_AFTER_S),
            _ => None,
        }
    }

    /// Returns the label for metrics, which is also `code` in the error's body.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Method(_) => "method_not_allowed",
            Self::ContentType => "unsupported_media_type",
            Self::TooLarge { .. } => "body_too_large",
            Self::BodyTimeout => "body_timeout",
            Self::Json(_) => "invalid_body",
            Self::Limit(_) => "invalid_limit",
            Self::Head(_) => "invalid_head",
            Self::NoModel => "model_missing",
            Self::Key => "invalid_api_key",
            Self::UnknownModel(_) => "model_not_found",
            Self::Crowded => "overloaded",
            Self::TooManyRequests | Self::TooManyTokens { .. } => "rate_limit_exceeded",
            Self::MonthUsed { .. } => "insufficient_quota",
            Self::NoEngine => "no_engine",
            Self::NoGateway(_) => "no_gateway",
            Self::Late => "deadline_unreachable",
            Self::OutOfReach { .. } => "no_engine",
            Self::Engine(_) => "engine_failed",
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

    /// Returns the body with this error, in the form of the API.
    #[must_use]
    pub fn body(&self) -> Bytes {
        let (message, kind, code) = (self.to_string(), self.kind(), self.code());
        json!({ "error": { "message": message, "type": kind, "param": null, "code": code } }).to_string().into()
    }

    /// Returns the event with this error, for a client that has already received a part of its tokens.
    #[must_use]
    pub fn event(&self) -> Bytes {
        let body = self.body();
        let mut event = BytesMut::with_capacity(body.len() + 8);
        for part in [b"data: ", &body[..], b"\n\n"] {
            event.extend_from_slice(part);
        }
        event.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_known_by_its_method_and_path_whatever_its_query() {
        assert_eq!(Operation::of(b"POST", b"/v1/chat/completions?a=b"), Ok(Operation::ChatCompletions));
        assert_eq!(Operation::of(b"GET", b"/v1/models"), Ok(Operation::Models));
        assert_eq!(Operation::of(b"GET", b"/v1/completions"), Err(OpenAiError::Method(Operation::Completions)));
        assert_eq!(Operation::of(b"POST", b"/v1/completions/"), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"POST", b""), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"GET", b"/v1/models/"), Err(OpenAiError::NotFound));
        assert_eq!(Operation::of(b"GET", b"/v1/models/a/b?c"), Ok(Operation::Model));
        assert_eq!(Operation::of(b"DELETE", b"/v1/models/a"), Err(OpenAiError::Method(Operation::Model)));
        assert_eq!(
            [&b"GET"[..], b"HEAD"].map(|method| Operation::of(method, b"/health")),
            [const { Ok(Operation::Health) }; 2]
        );
    }

    #[test]
    fn a_model_in_a_path_may_be_encoded_and_may_contain_slashes() {
        for path in ["/v1/models/meta/L%20%C3%A4?x=%", "/v1/models/meta%2fL%20ä"] {
            assert_eq!(model_name(path.as_bytes()), Ok("meta/L ä".to_owned()), "{path}");
        }
        for path in ["/v1/models/%", "/v1/models/%4", "/v1/models/%+4", "/v1/models/%ff", "/v1/models/%zz"] {
            assert_eq!(model_name(path.as_bytes()), Err(OpenAiError::NotFound), "{path}");
        }
    }

    #[test]
    fn only_the_models_name_is_rewritten() {
        let body = Bytes::from_static(br#"{ "unknown" : {"model":"x"}, "model" : "a\u0062", "stream":true , "n":1e3}"#);
        let fields = RoutingFields::read(&body).unwrap();
        assert_eq!((&fields.model[..], fields.service_tier.as_deref(), fields.max_tokens), ("ab", None, None));
        let rewritten = fields.for_engine(&body, "big \"one\"", None).to_vec();
        assert_eq!(rewritten, br#"{ "unknown" : {"model":"x"}, "model" : "big \"one\"", "stream":true , "n":1e3}"#[..]);
        assert_eq!(fields.for_engine(&body, "ab", None).to_vec(), body, "the same model in other letters stays");
        assert_eq!(RoutingFields::read(&rewritten).unwrap().model, "big \"one\"");
    }

    #[test]
    fn only_true_asks_for_a_stream() {
        for (key, is_streamed) in [("true", true), ("false", false), ("null", false), ("1", false), ("\"true\"", false)]
        {
            let read = RoutingFields::read(format!(r#"{{"model":"m","stream": {key} }}"#).as_bytes()).unwrap();
            assert_eq!(read.is_streamed, is_streamed, "{key}");
        }
        assert!(!RoutingFields::read(br#"{"model":"m"}"#).unwrap().is_streamed);
    }

    #[test]
    fn the_prompt_is_the_messages_or_the_prompt_as_they_stand_in_the_body() {
        let prompt = |body: &'static str| RoutingFields::read(body.as_bytes()).unwrap().prompt(body.as_bytes());
        assert_eq!(prompt(r#"{"model":"m", "messages" : [ {"a":1} ] }"#), br#"[ {"a":1} ]"#);
        assert_eq!(prompt(r#"{"prompt":"x y","model":"m"}"#), br#""x y""#);
        assert_eq!(prompt(r#"{"model":"m","prompt":null}"#), b"");
    }

    #[test]
    fn both_names_of_the_tokens_limit_count_and_the_newer_one_wins() {
        let limit =
            |keys: &str| RoutingFields::read(format!(r#"{{"model":"m"{keys}}}"#).as_bytes()).unwrap().max_tokens;
        assert_eq!(limit(""), None);
        assert_eq!(limit(r#","max_tokens":7"#), Some(7));
        assert_eq!(limit(r#","max_completion_tokens":9,"max_tokens":7"#), Some(9));
        assert_eq!(limit(r#","max_tokens":null,"stream":null"#), None);
        assert_eq!(limit(r#","max_completion_tokens":-1,"max_tokens":7"#), None, "llama.cpp's number for no limit");
        assert_eq!([limit(r#","max_tokens":50.0"#), limit(r#","max_tokens":2.6"#)], [Some(50), Some(3)]);
        assert_eq!(limit(r#","max_tokens":99999999999"#), Some(u32::MAX));
    }

    #[test]
    fn a_body_that_cannot_be_routed_is_refused_with_the_reason() {
        for (body, code) in [
            (&b"{"[..], "invalid_body"),
            (b"[]", "invalid_body"),
            (br#"["m", true]"#, "invalid_body"),
            (b"", "invalid_body"),
            (b"\xff", "invalid_body"),
            (b"{}", "model_missing"),
            (br#"{"model":null}"#, "model_missing"),
            (br#"{"model":3}"#, "model_missing"),
            (br#"{"model":"a","model":"b"}"#, "invalid_body"),
            (br#"{"model":"a","service_tier":1}"#, "invalid_body"),
            (br#"{"model":"a","max_tokens":true}"#, "invalid_body"),
        ] {
            let refusal = RoutingFields::read(body).unwrap_err();
            assert_eq!((refusal.code(), refusal.status()), (code, 400), "{}", String::from_utf8_lossy(body));
        }
    }

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
        let failures =
            [OpenAiError::NoEngine, OpenAiError::Late, OpenAiError::Crowded, OpenAiError::EngineTimeout, engine];
        assert!(failures.iter().all(OpenAiError::is_failure));
        let too_many = OpenAiError::TooManyTokens { retry_after_s: 1 };
        let own = [OpenAiError::NoModel, OpenAiError::Key, OpenAiError::TooManyRequests, too_many];
        assert!(!own.iter().any(OpenAiError::is_failure));
    }

    #[test]
    fn an_error_has_the_form_of_the_api() {
        let body: serde_json::Value = serde_json::from_slice(&OpenAiError::UnknownModel("x".into()).body()).unwrap();
        assert_eq!(body["error"]["type"], "not_found_error");
        assert_eq!(body["error"]["code"], "model_not_found");
        assert!(body["error"]["message"].as_str().unwrap().contains("\"x\""), "{body}");
        let event = OpenAiError::Engine("it stopped").event();
        assert!(event.starts_with(b"data: {") && event.ends_with(b"}\n\n"));
    }
}
