//! The formats of access log records.
//!
//! All formats agree, because they use one list of keys and values. Peers choose some values (users of certificates,
//! names of targets), and these may contain anything: text quotes and escapes them, JSON writes strings, and the
//! journal adds their length.

use std::fmt::Write as _;

use config::moment::rfc3339;
use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{AccessRecord, Value};

impl AccessRecord {
    /// Formats the keys and values after the time as text: `event key=value key="quoted value"`.
    #[must_use]
    pub fn text(&self, addresses: bool) -> String {
        let mut line = String::from(self.event());
        for (key, value) in self.fields(addresses) {
            // Writing to a string cannot fail.
            _ = match value {
                Value::Number(number) => write!(line, " {key}={number}"),
                Value::Text(text) if is_plain(&text) => write!(line, " {key}={text}"),
                Value::Text(text) => write!(line, " {key}=\"{}\"", text.escape_default()),
            };
        }
        line
    }

    /// Formats a line of text with the time, without a newline.
    #[must_use]
    pub fn line(&self, addresses: bool) -> String {
        format!("{} {}", rfc3339(self.time), self.text(addresses))
    }

    /// Formats a JSON object, without a newline.
    ///
    /// # Errors
    /// None: serialising numbers and strings cannot fail.
    pub fn json(&self, addresses: bool) -> serde_json::Result<String> {
        serde_json::to_string(&Json { record: self, addresses })
    }
}

/// Whether humans and programs read a value the same without quotes.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\=".contains(&byte))
}

/// A record that serialises as JSON.
struct Json<'a> {
    record: &'a AccessRecord,
    addresses: bool,
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time", &rfc3339(self.record.time))?;
        map.serialize_entry("event", self.record.event())?;
        for (key, value) in self.record.fields(self.addresses) {
            match value {
                Value::Number(number) => map.serialize_entry(&key, &number)?,
                Value::Text(text) => map.serialize_entry(&key, &text)?,
            }
        }
        map.end()
    }
}
