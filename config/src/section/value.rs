//! The types of TOML values, and the same types as JSON Schema.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use ipnet::IpNet;
use masque::{target::Target, template::Template};
use serde_json::{Value as Json, json};
use toml::de::DeValue;

use crate::{
    engine::{EngineUrl, UrlPath},
    error::Problem,
    hash,
    nat64::Nat64Prefix,
    pattern::{NotAPattern, Pattern},
    routing::Routing,
    text::{is_text, quoted},
};

/// A value that is written as one word.
pub(crate) trait Word {
    /// Returns the word.
    fn word(&self) -> &'static str;
}

/// Defines a closed set of words: the enum, its `as_str` and `Display`, and how it is read. With `for`, the enum is
/// another crate's, and only reading and writing are defined.
macro_rules! words {
    (for $name:ident { $($variant:ident = $word:literal,)+ }) => {
        impl $crate::section::Word for $name {
            fn word(&self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl $crate::section::Value for $name {
            const EXPECTED: &'static str = concat!("one of", $(" \"", $word, "\""),+);

            fn read(value: &toml::de::DeValue<'_>) -> Option<Self> {
                match value.as_str()? { $($word => Some(Self::$variant),)+ _ => None }
            }

            fn write(&self) -> String {
                $crate::text::quoted($crate::section::Word::word(self))
            }

            fn schema() -> serde_json::Value {
                serde_json::json!({ "enum": [$($word),+] })
            }
        }
    };
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// Returns the word that the configuration uses.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                $crate::section::Word::word(&self)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        $crate::section::words! { for $name { $($variant = $word,)+ } }
    };
}
pub(crate) use words;

/// The type of one TOML value.
pub(crate) trait Value: Sized {
    /// What to write, as the end of the sentence "write …".
    const EXPECTED: &'static str;

    fn read(value: &DeValue<'_>) -> Option<Self>;

    /// Returns TOML that [`read`](Self::read) reads as the same value.
    fn write(&self) -> String;

    /// Returns a JSON Schema that accepts every value that [`read`](Self::read) accepts, and otherwise is as strict as
    /// a schema can be without parsing.
    fn schema() -> Json;

    /// Returns why [`read`](Self::read) refused `value`.
    fn problem(value: &DeValue<'_>) -> Problem {
        unfit(value, Self::EXPECTED)
    }
}

// Parts of patterns: an IPv4 address; an IPv6 address; a DNS name, whose last label is no number; a port from 1 to 65535.
const V4: &str = r"[0-9]{1,3}(\.[0-9]{1,3}){3}";
const V6: &str = "[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*";
const NAME: &str = concat!(
    r"([0-9A-Za-z]([0-9A-Za-z-]*[0-9A-Za-z])?\.)*",
    r"(([0-9][0-9-]*)?[A-Za-z]([0-9A-Za-z-]*[0-9A-Za-z])?|[0-9]+-[0-9-]*[0-9])\.?"
);
const PORT: &str = "0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])";

/// The schema of texts that match `pattern`.
pub(crate) fn text(pattern: &str) -> Json {
    json!({ "type": "string", "pattern": pattern })
}

/// The schema of whole numbers within `range`.
pub(crate) fn whole_number(range: &RangeInclusive<u64>) -> Json {
    json!({ "type": "integer", "minimum": range.start(), "maximum": range.end() })
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_bool()
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn schema() -> Json {
        json!({ "type": "boolean" })
    }
}

impl Value for SocketAddr {
    const EXPECTED: &'static str = "an address and a port, such as \"192.0.2.1:443\" or \"[2001:db8::1]:443\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok().filter(|address: &Self| address.port() != 0)
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(&format!(r"^({V4}|\[{V6}(%[0-9]+)?\]):{PORT}$"))
    }
}

impl Value for Pattern {
    const EXPECTED: &'static str =
        "a network, an address, a name or a name suffix, such as \"10.0.0.0/8\" or \"*.example.org\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn problem(value: &DeValue<'_>) -> Problem {
        bits_behind_the_prefix(value).unwrap_or_else(|| unfit(value, Self::EXPECTED))
    }

    fn schema() -> Json {
        text(&format!(r"^((\*?\.)?{NAME}|({V4}|{V6})(/[0-9]{{1,3}})?)$"))
    }
}

/// Returns the problem of a value that is a network with bits set after its prefix; `None` for other values.
fn bits_behind_the_prefix(value: &DeValue<'_>) -> Option<Problem> {
    match value.as_str()?.parse::<Pattern>() {
        Err(problem @ NotAPattern::HostBits(_)) => Some(problem.into()),
        _ => None,
    }
}

impl Value for IpAddr {
    const EXPECTED: &'static str = "an address, such as \"192.0.2.1\" or \"2001:db8::1\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(&format!("^({V4}|{V6})$"))
    }
}

/// A network without host bits, or an address as a network of full length.
impl Value for IpNet {
    const EXPECTED: &'static str = "a network or an address, such as \"203.0.113.0/28\" or \"2001:db8::1\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        match value.as_str()?.parse().ok()? {
            Pattern::Network(network) => Some(network),
            Pattern::Name(_) | Pattern::Suffix(_) => None,
        }
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn problem(value: &DeValue<'_>) -> Problem {
        bits_behind_the_prefix(value).unwrap_or_else(|| unfit(value, Self::EXPECTED))
    }

    fn schema() -> Json {
        text(&format!("^({V4}|{V6})(/[0-9]{{1,3}})?$"))
    }
}

impl Value for Nat64Prefix {
    const EXPECTED: &'static str = "an IPv6 prefix of 32, 40, 48, 56, 64 or 96 bits, such as \"2001:db8:64::/96\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(&format!("^{V6}/(32|40|48|56|64|96)$"))
    }
}

impl Value for Target {
    const EXPECTED: &'static str = "a host and a port, such as \"example.org:443\" or \"[2001:db8::1]:443\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        Self::from_authority(value.as_str()?).ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(&format!(r"^({NAME}|{V4}|\[{V6}\]):{PORT}$"))
    }
}

impl Value for EngineUrl {
    const EXPECTED: &'static str = "the URL of an engine, such as \"http://127.0.0.1:8000\" or \"https://gpu.example\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(&format!(r"^https?://({NAME}|{V4}|\[{V6}\])(:{PORT})?(/[0-9A-Za-z/._~%-]*)?$"))
    }
}

impl Value for UrlPath {
    const EXPECTED: &'static str = "the path of a URL, such as \"/health\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text(r"^/[0-9A-Za-z/._~%?=&-]*$")
    }
}

impl Value for Routing {
    const EXPECTED: &'static str = "\"rule\", \"considerate\", \"least-loaded\", \"round-robin\", or the path of a file, which begins with a slash";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str()?.parse().ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text("^(rule|considerate|least-loaded|round-robin|/.*)$")
    }
}

impl Value for Template {
    const EXPECTED: &'static str =
        "an absolute URI template, such as \"https://relay.example/masque/{target_host}/{target_port}/\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        Self::parse(value.as_str()?).ok()
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        let variables = ["target_host", "target_port"].map(|variable| json!({ "pattern": variable }));
        json!({ "type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]://[^/?#{]+/[!-~]*$", "allOf": variables })
    }

    fn problem(value: &DeValue<'_>) -> Problem {
        match value.as_str().map(Self::parse) {
            Some(Err(error)) => Problem::Template { found: shown(value), error },
            _ => unfit(value, Self::EXPECTED),
        }
    }
}

/// One port as a number, or several as text.
impl Value for RangeInclusive<u16> {
    const EXPECTED: &'static str = "a port from 1 to 65535, or several such as \"8000-8099\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let (first, last) = match value {
            DeValue::Integer(_) => {
                let port = unsigned(value)?.try_into().ok()?;
                (port, port)
            }
            _ => {
                let text = value.as_str().filter(|text| !text.contains('+'))?;
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                (first.parse().ok()?, last.parse().ok()?)
            }
        };
        (1 <= first && first <= last).then_some(first..=last)
    }

    fn write(&self) -> String {
        match (self.start(), self.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => quoted(&format_args!("{first}-{last}")),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [whole_number(&(1..=65_535)), text(&format!("^{PORT}(-{PORT})?$"))] })
    }
}

/// A SHA-256 hash, or any other 32 bytes, in hexadecimal digits; colons may separate the bytes.
impl Value for [u8; 32] {
    const EXPECTED: &'static str = "a SHA-256 hash: 64 hexadecimal digits in quotes";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        hash::read(value.as_str()?)
    }

    fn write(&self) -> String {
        quoted(&hash::hex(self))
    }

    fn schema() -> Json {
        text("^(:*[0-9A-Fa-f]){64}:*$")
    }
}

impl Value for String {
    const EXPECTED: &'static str = "a text of 1 to 255 printable ASCII characters in quotes";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().filter(|text| is_text(text)).map(str::to_owned)
    }

    fn write(&self) -> String {
        quoted(self)
    }

    fn schema() -> Json {
        text("^[ -~]{1,255}$")
    }
}

impl Value for PathBuf {
    const EXPECTED: &'static str = "an absolute path in quotes, such as \"/etc/paced/file.pem\"";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        value.as_str().map(Self::from).filter(|path| path.is_absolute())
    }

    fn write(&self) -> String {
        quoted(&self.display())
    }

    fn schema() -> Json {
        text("^/")
    }
}

/// Reads a whole number that is not negative, in any radix.
pub(crate) fn unsigned(value: &DeValue<'_>) -> Option<u64> {
    let number = value.as_integer()?;
    u64::from_str_radix(number.as_str(), number.radix()).ok()
}

pub(super) fn unfit(value: &DeValue<'_>, expected: &'static str) -> Problem {
    Problem::Unfit { found: shown(value), expected }
}

/// Shows a value in a message: scalars as written, other values by type, so that a message stays one short line.
pub(super) fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) if text.chars().count() <= 60 => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Boolean(yes) => yes.to_string(),
        other => format!("this {}", other.type_str()),
    }
}
