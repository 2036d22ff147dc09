//! What paced needs to know of the OpenAI API: its paths, the fields of a request that decide where it goes, the form of errors, and
//! the events of an answer ([`sse`]). The rest of a body passes unchanged, except that paced may ask for `usage`.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

use self::place::place;
pub use self::{
    error::OpenAiError, excerpt::excerpt, operation::Operation, path::model_name, renamed::RenamedBody,
    usage_option::UsageOption,
};

mod error;
mod excerpt;
mod operation;
mod path;
mod place;
mod renamed;
pub mod sse;
mod usage_option;

/// The tokens that an engine bills (`usage`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// The prompt's tokens.
    pub prompt_tokens: u64,
    /// The answer's tokens.
    pub completion_tokens: u64,
}

/// The fields of a request's body that decide where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingFields {
    /// The model, as the client names it.
    pub model: String,
    /// The range of its name in the body, quotes included.
    model_at: Range<usize>,
    /// The ranges of what an engine reads first and then: its messages or its prompt, or its instructions and its input. The range of a
    /// missing part is empty.
    prompt_at: [Range<usize>; 2],
    /// Its `service_tier`, if it names one.
    pub service_tier: Option<String>,
    /// Whether it asks for a stream of events.
    pub is_streamed: bool,
    /// The maximum of tokens in each answer, if the client sets one: `max_output_tokens` of a response, and else the larger one of
    /// `max_completion_tokens` and `max_tokens`, because an engine may know only one of them. Engines round a fraction and take a negative
    /// number for no maximum, and so does this.
    pub max_tokens: Option<u32>,
    /// How many answers the client wants to a prompt, at least 1.
    choices: u32,
    /// How many prompts `prompt` has, at least 1.
    prompts: u32,
    /// The key, if there is one, that names an earlier response or a conversation, which only one engine may have stored.
    continues: Option<&'static str>,
}

/// The keys that are read of a body for [`Operation::Responses`].
#[derive(Deserialize)]
struct ResponseBody<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default)]
    service_tier: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    background: Option<&'a RawValue>,
    #[serde(borrow, default)]
    previous_response_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    conversation: Option<&'a RawValue>,
}

/// The keys that are read of any other body.
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
    #[serde(borrow, default)]
    service_tier: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    n: Option<&'a RawValue>,
    #[serde(borrow, default)]
    best_of: Option<&'a RawValue>,
}

impl RoutingFields {
    /// Reads a request's body, which has the fields of `operation`.
    ///
    /// # Errors
    /// The body is not a JSON object, names no model, or contains one of these keys twice or with another type. Or it asks for a response
    /// in the background: its client would have to ask the same engine for it later.
    pub fn of(operation: Operation, body: &[u8]) -> Result<Self, OpenAiError> {
        if operation != Operation::Responses {
            return Self::read(body);
        }
        let (text, read): (_, ResponseBody<'_>) = keys(body)?;
        if is_true(read.background) {
            return Err(OpenAiError::Unserved {
                key: "background",
                why: "paced stores no responses; ask for a stream",
            });
        }
        let max_tokens = typed::<f64>("max_output_tokens", "a number", read.max_output_tokens)?;
        let service_tier = typed("service_tier", "a string", read.service_tier)?;
        let (model, model_at) = model(read.model, text)?;
        let earlier = [("previous_response_id", read.previous_response_id), ("conversation", read.conversation)];
        Ok(Self {
            model,
            model_at,
            prompt_at: [read.instructions, read.input]
                .map(|part| part.and_then(|part| place(part.get(), text)).unwrap_or_default()),
            service_tier,
            is_streamed: is_true(read.stream),
            max_tokens: max_tokens.and_then(whole),
            choices: 1,
            prompts: 1,
            continues: earlier.into_iter().find_map(|(key, earlier)| earlier.map(|_| key)),
        })
    }

    /// Reads a request's body with the fields that all operations but [`Operation::Responses`] have.
    ///
    /// # Errors
    /// The body is not a JSON object, names no model, or contains one of these keys twice or with another type.
    pub fn read(body: &[u8]) -> Result<Self, OpenAiError> {
        let (text, read): (_, Body<'_>) = keys(body)?;
        let limit = |key, value| typed::<f64>(key, "a number", value);
        let limits =
            [limit("max_completion_tokens", read.max_completion_tokens)?, limit("max_tokens", read.max_tokens)?];
        let service_tier = typed("service_tier", "a string", read.service_tier)?;
        let (model, model_at) = model(read.model, text)?;
        let prompt = read.messages.or(read.prompt);
        Ok(Self {
            model,
            model_at,
            prompt_at: [prompt.and_then(|prompt| place(prompt.get(), text)).unwrap_or_default(), 0..0],
            service_tier,
            is_streamed: is_true(read.stream),
            max_tokens: larger(limits),
            choices: choices(read.n).max(choices(read.best_of)),
            prompts: read.prompt.map_or(1, |prompt| prompts(prompt.get())),
            continues: None,
        })
    }

    /// Checks that one of `engines` engines can answer the request, whichever gets it.
    ///
    /// # Errors
    /// It continues a response or a conversation that one of several engines may have stored, and nothing says which.
    pub fn fits(&self, engines: usize) -> Result<(), OpenAiError> {
        match self.continues {
            Some(key) if engines > 1 => {
                let why =
                    "any of several engines may answer, and only one may know it; send the earlier items as `input`";
                Err(OpenAiError::Unserved { key, why })
            }
            _ => Ok(()),
        }
    }

    /// Returns how many answers an engine makes for it: none for embeddings, and else `n` or `best_of`, whichever is
    /// more, for each prompt of a completion. An engine may make fewer, or refuse.
    #[must_use]
    pub const fn answers(&self, operation: Operation) -> u32 {
        match operation {
            Operation::Embeddings => 0,
            Operation::Completions => self.choices.saturating_mul(self.prompts),
            _ => self.choices,
        }
    }

    /// Returns what an engine reads of the request, in the order in which it reads, as it occurs in `body`, from which this was read: the
    /// messages or the prompt, or the instructions and the input of a response. What is missing is empty.
    #[must_use]
    pub fn prompt<'a>(&self, body: &'a [u8]) -> [&'a [u8]; 2] {
        self.prompt_at.clone().map(|at| body.get(at).unwrap_or_default())
    }

    /// Returns the addition to `body`, from which this was read, that asks for `usage` in the stream of its answer.
    /// `None` if it asks for no stream, or decides about `usage` itself, or if its `stream_options` cannot be read.
    #[must_use]
    pub fn usage_option(&self, body: &[u8]) -> Option<UsageOption> {
        if self.is_streamed { UsageOption::of(body, self.model_at.end) } else { None }
    }

    /// Returns `body`, from which this was read, with another model's name and with an addition that
    /// [`RoutingFields::usage_option`] returned for it. It is otherwise unchanged, byte for byte; the rest is not
    /// copied.
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

/// Returns the text of a body, and the keys that are read of it.
fn keys<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<(&'a str, T), OpenAiError> {
    let text = std::str::from_utf8(body).map_err(|_| OpenAiError::Json("the body is not UTF-8".into()))?;
    if text.trim_ascii().is_empty() {
        return Err(OpenAiError::Json("the body is empty".into()));
    }
    // It would reach the engine, since the body passes unchanged, and not all engines ignore it.
    if text.starts_with('\u{feff}') {
        return Err(OpenAiError::Json("it begins with a byte order mark; send it without one".into()));
    }
    // A list would be read as the values of the keys, in their order.
    if !text.trim_start().starts_with('{') {
        return Err(OpenAiError::Json("it is not an object".into()));
    }
    Ok((text, serde_json::from_str(text).map_err(|error| OpenAiError::Json(error.to_string()))?))
}

/// Reads the name of the model, and its place in the text of the body.
fn model(value: Option<&RawValue>, text: &str) -> Result<(String, Range<usize>), OpenAiError> {
    let raw = value.ok_or(OpenAiError::NoModel)?.get();
    let model = serde_json::from_str(raw).map_err(|_| OpenAiError::NoModel)?;
    Ok((model, place(raw, text).ok_or(OpenAiError::NoModel)?))
}

fn is_true(value: Option<&RawValue>) -> bool {
    value.is_some_and(|value| value.get() == "true")
}

/// Reads the value of a key, if there is one.
fn typed<'a, T: Deserialize<'a>>(
    key: &'static str,
    expected: &'static str,
    value: Option<&'a RawValue>,
) -> Result<Option<T>, OpenAiError> {
    let read = value.map(|value| serde_json::from_str(value.get())).transpose();
    read.map_err(|_| OpenAiError::WrongType { key, expected })
}

/// Returns the whole number that a number of a body stands for; `None` below 0.
fn whole(number: f64) -> Option<u32> {
    // A number above `u32::MAX` becomes `u32::MAX`.
    (number >= 0.0).then(|| number.round() as u32)
}

/// Returns the larger one of the given limits; `None` if there is none, or if one of them is a number for no limit.
fn larger(limits: [Option<f64>; 2]) -> Option<u32> {
    limits.into_iter().flatten().map(whole).reduce(|one, other| Some(one?.max(other?))).flatten()
}

/// Returns how many answers `n` or `best_of` asks for, at least 1. The engine judges what is no number.
fn choices(number: Option<&RawValue>) -> u32 {
    number.and_then(|number| number.get().parse().ok()).and_then(whole).unwrap_or(1).max(1)
}

/// Returns how many prompts there are in a JSON value of `prompt`, at least 1: it is a text, the tokens of one, or a list of either.
fn prompts(json: &str) -> u32 {
    let first = json.strip_prefix('[').and_then(|list| list.trim_start().bytes().next());
    if !matches!(first, Some(b'"' | b'[')) {
        return 1;
    }
    // Such a vector takes no memory.
    let count = serde_json::from_str::<Vec<IgnoredAny>>(json).map_or(1, |all| all.len());
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Whether an engine's status is about the gateway's own credentials (RFC 9110 §15.5.2, §15.5.8), so that it means
/// nothing to a client. An edge would take 407 for a refusal of its own credentials. 403 is not among them: an engine
/// may forbid the content of a request, and clients must not be able to make engines count as failed (RFC 9110
/// §15.5.4).
#[must_use]
pub const fn is_about_credentials(status: u16) -> bool {
    matches!(status, 401 | 407)
}

/// Whether a `content-type` is JSON, whatever its parameters.
#[must_use]
pub fn is_json(kind: &[u8]) -> bool {
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(prompt(r#"{"model":"m", "messages" : [ {"a":1} ] }"#), [&br#"[ {"a":1} ]"#[..], b""]);
        assert_eq!(prompt(r#"{"prompt":"x y","model":"m"}"#), [&br#""x y""#[..], b""]);
        assert_eq!(prompt(r#"{"model":"m","prompt":null}"#), [b""; 2]);
    }

    fn response(body: &str) -> Result<RoutingFields, OpenAiError> {
        RoutingFields::of(Operation::Responses, body.as_bytes())
    }

    #[test]
    fn a_response_has_fields_of_its_own_and_one_answer() {
        let body = r#"{"input":[ "a" ],"model":"m","stream":true,"service_tier":"flex","instructions":"b","n":7,"prompt":[1],
            "max_tokens":"x","best_of":9,"max_output_tokens":5.0}"#;
        let fields = response(body).unwrap();
        assert_eq!(
            (&fields.model[..], fields.service_tier.as_deref(), fields.max_tokens),
            ("m", Some("flex"), Some(5))
        );
        assert_eq!((fields.is_streamed, fields.answers(Operation::Responses)), (true, 1));
        assert_eq!(fields.prompt(body.as_bytes()), [&br#""b""#[..], br#"[ "a" ]"#], "as the engine reads them");
        let only = r#"{"model":"m","input":"a","instructions":null,"max_output_tokens":null}"#;
        let fields = response(only).unwrap();
        assert_eq!((fields.prompt(only.as_bytes()), fields.max_tokens), ([&b""[..], br#""a""#], None));
        let chat = RoutingFields::of(Operation::ChatCompletions, br#"{"model":"m","max_output_tokens":"x"}"#).unwrap();
        assert_eq!(chat.max_tokens, None);
    }

    /// The status and the code of a refusal, and the key that it is about.
    fn told(refusal: &OpenAiError) -> (u16, &'static str, serde_json::Value) {
        let body: serde_json::Value = serde_json::from_slice(&refusal.body()).unwrap();
        (refusal.status(), refusal.code(), body["error"]["param"].clone())
    }

    #[test]
    fn what_needs_the_engine_that_stored_a_response_is_refused_unless_there_is_only_one() {
        for (keys, param) in [
            (r#""previous_response_id":"resp_1""#, "previous_response_id"),
            (r#""conversation":{"id":"conv_1"}"#, "conversation"),
        ] {
            let fields = response(&format!(r#"{{"model":"m",{keys}}}"#)).unwrap();
            assert_eq!((fields.fits(0), fields.fits(1)), (Ok(()), Ok(())), "{keys}");
            assert_eq!(told(&fields.fits(2).unwrap_err()), (400, "unsupported_parameter", param.into()));
        }
        let plain = r#"{"model":"m","previous_response_id":null,"conversation":null,"background":false,"store":true}"#;
        assert_eq!(response(plain).unwrap().fits(2), Ok(()));
        let refusal = response(r#"{"model":"m","background":true}"#).unwrap_err();
        assert_eq!(told(&refusal), (400, "unsupported_parameter", "background".into()));
    }

    #[test]
    fn both_names_of_the_tokens_limit_count_and_the_larger_one_wins() {
        let limit =
            |keys: &str| RoutingFields::read(format!(r#"{{"model":"m"{keys}}}"#).as_bytes()).unwrap().max_tokens;
        assert_eq!(limit(""), None);
        assert_eq!(limit(r#","max_tokens":7"#), Some(7));
        assert_eq!(limit(r#","max_completion_tokens":9,"max_tokens":7"#), Some(9));
        assert_eq!(limit(r#","max_completion_tokens":7,"max_tokens":9"#), Some(9));
        assert_eq!(limit(r#","max_completion_tokens":7,"max_tokens":-1"#), None);
        assert_eq!(limit(r#","max_tokens":null,"stream":null"#), None);
        assert_eq!(limit(r#","max_completion_tokens":-1,"max_tokens":7"#), None, "llama.cpp's number for no limit");
        assert_eq!([limit(r#","max_tokens":50.0"#), limit(r#","max_tokens":2.6"#)], [Some(50), Some(3)]);
        assert_eq!(limit(r#","max_tokens":99999999999"#), Some(u32::MAX));
    }

    #[test]
    fn a_request_wants_as_many_answers_as_it_says_for_each_of_its_prompts_and_embeddings_have_none() {
        for (keys, chat, completions) in [
            ("", 1, 1),
            (r#","n":64"#, 64, 64),
            (r#","n":2,"best_of":5.0"#, 5, 5),
            (r#","n":5,"best_of":null"#, 5, 5),
            (r#","n":0,"best_of":-3"#, 1, 1),
            (r#","n":"3","best_of":[4]"#, 1, 1),
            (r#","n":1e99"#, u32::MAX, u32::MAX),
            (r#","n":3,"prompt": [ "a", "b]\"," ]"#, 3, 6),
            (r#","n":3,"prompt":[[1,2],[3],[4]]"#, 3, 9),
            (r#","n":3,"prompt":[1,2,3]"#, 3, 3),
            (r#","n":3,"prompt":"[" "#, 3, 3),
            (r#","n":3,"prompt":[]"#, 3, 3),
            (r#","n":1e9,"prompt":["a","b","c","d","e"]"#, 1_000_000_000, u32::MAX),
        ] {
            let fields = RoutingFields::read(format!(r#"{{"model":"m"{keys}}}"#).as_bytes()).unwrap();
            let answers = [Operation::ChatCompletions, Operation::Completions, Operation::Embeddings];
            assert_eq!(answers.map(|operation| fields.answers(operation)), [chat, completions, 0], "{keys}");
        }
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
        for (body, param, told) in [
            ("", None, "the body is empty"),
            (" \r\n", None, "the body is empty"),
            ("\u{feff}{\"model\":\"a\"}", None, "it begins with a byte order mark; send it without one"),
            (r#"{"model":3}"#, Some("model"), "`model` has to be a string"),
            (r#"{"model":"a","service_tier":[]}"#, Some("service_tier"), "`service_tier` has to be a string"),
            (r#"{"model":"a","max_tokens":"7"}"#, Some("max_tokens"), "`max_tokens` has to be a number"),
            (
                r#"{"model":"a","max_completion_tokens":{}}"#,
                Some("max_completion_tokens"),
                "`max_completion_tokens` has to be a number",
            ),
        ] {
            let refusal = RoutingFields::read(body.as_bytes()).unwrap_err();
            let answer: serde_json::Value = serde_json::from_slice(&refusal.body()).unwrap();
            assert!(answer["error"]["message"].as_str().unwrap().ends_with(told), "{body}: {answer}");
            assert_eq!(answer["error"]["param"].as_str(), param, "{body}");
        }
    }
}
