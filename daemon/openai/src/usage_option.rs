//! The request for `usage` that is added to a body whose client did not decide about it.

use std::ops::Range;

use serde::{Deserialize, Deserializer, de::IgnoredAny};
use serde_json::value::RawValue;

use super::place::place;

/// The added member of an object, if it has other members.
const MEMBER: &str = r#""include_usage":true,"#;

/// The member of an object without members.
const ONLY_MEMBER: &str = r#""include_usage":true"#;

/// The value in place of `null`.
const VALUE: &str = r#"{"include_usage":true}"#;

/// The whole field, after another one.
const FIELD: &str = r#","stream_options":{"include_usage":true}"#;

/// A text that makes a body ask for `usage` in the stream of its answer (`stream_options.include_usage`), and its place in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageOption {
    /// The range of the body that the text replaces.
    pub(super) at: Range<usize>,
    pub(super) text: &'static str,
}

/// The key that is read of a body.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    stream_options: Option<&'a RawValue>,
}

/// Keeps `null` apart from a missing key.
fn present<'de, D: Deserializer<'de>>(value: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

/// Reads whether there is a value, whatever it is.
fn is_present<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(value).map(|_| true)
}

/// The key that is read of `stream_options`.
#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default, deserialize_with = "is_present")]
    include_usage: bool,
}

impl UsageOption {
    /// Returns the addition to a body in which the value of another field ends at `after`. `null` means the same as no field. `None` if the
    /// client decides about `usage` itself, or if the field has another type or occurs twice: such bodies are for the engine to judge.
    pub(super) fn of(body: &[u8], after: usize) -> Option<Self> {
        let text = std::str::from_utf8(body).ok()?;
        let Some(options) = serde_json::from_str::<Body<'_>>(text).ok()?.stream_options.map(RawValue::get) else {
            return Some(Self { at: after..after, text: FIELD });
        };
        let at = place(options, text)?;
        if options == "null" {
            return Some(Self { at, text: VALUE });
        }
        // A list would be read as the values of the keys, in their order.
        let members = options.strip_prefix('{')?;
        if serde_json::from_str::<StreamOptions>(options).ok()?.include_usage {
            return None;
        }
        let has_members = !members.trim_start().starts_with('}');
        Some(Self { at: at.start + 1..at.start + 1, text: if has_members { MEMBER } else { ONLY_MEMBER } })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use crate::RoutingFields;

    /// Returns what an engine gets of a body, if `usage` is added.
    fn sent(body: &str) -> Option<String> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let fields = RoutingFields::read(&body).unwrap();
        let option = fields.usage_option(&body)?;
        Some(String::from_utf8(fields.for_engine(&body, "of \"it\"", Some(&option)).to_vec()).unwrap())
    }

    #[test]
    fn a_stream_is_asked_for_usage_and_all_else_stays_as_it_is_byte_for_byte() {
        for (body, expected) in [
            (
                r#"{ "stream":true, "model" : "m" , "n":1e3}"#,
                r#"{ "stream":true, "model" : "of \"it\"","stream_options":{"include_usage":true} , "n":1e3}"#,
            ),
            (
                r#"{"stream_options" : null,"stream":true,"model":"m"}"#,
                r#"{"stream_options" : {"include_usage":true},"stream":true,"model":"of \"it\""}"#,
            ),
            (
                r#"{"model":"m","stream_options":{ },"stream":true}"#,
                r#"{"model":"of \"it\"","stream_options":{"include_usage":true },"stream":true}"#,
            ),
            (
                r#"{"model":"m","stream":true,"stream_options": { "a" : {"include_usage":false},"b":[1.0]}}"#,
                r#"{"model":"of \"it\"","stream":true,"stream_options": {"include_usage":true, "a" : {"include_usage":false},"b":[1.0]}}"#,
            ),
        ] {
            assert_eq!(sent(body).as_deref(), Some(expected), "{body}");
            assert!(serde_json::from_str::<serde_json::Value>(expected).is_ok(), "{expected}");
        }
        let body = Bytes::from_static(br#"{"model":"m","stream":true}"#);
        let fields = RoutingFields::read(&body).unwrap();
        let same = fields.for_engine(&body, "m", fields.usage_option(&body).as_ref()).to_vec();
        assert_eq!(same, br#"{"model":"m","stream_options":{"include_usage":true},"stream":true}"#, "the same name");
    }

    #[test]
    fn a_body_that_decides_itself_or_is_strange_gets_no_addition() {
        for options in [
            r#"{"include_usage":true}"#,
            r#"{"a":1,"include_usage":false}"#,
            r#"{"include_usage":null}"#,
            r#"{"include_usage":1}"#,
            r#"{"include_us\u0061ge":false}"#,
            r#"{"include_usage":true,"include_usage":false}"#,
            "[]",
            "[true]",
            "true",
            "7",
            r#""x""#,
            r#"{},"stream_options":{}"#,
        ] {
            let body = format!(r#"{{"model":"m","stream":true,"stream_options":{options}}}"#);
            assert_eq!(sent(&body), None, "{body}");
        }
        for stream in ["", r#","stream":false"#, r#","stream":null"#, r#","stream":"true""#] {
            assert_eq!(sent(&format!(r#"{{"model":"m"{stream}}}"#)), None, "no stream: {stream}");
        }
    }
}
