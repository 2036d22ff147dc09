//! The formats of access log records.
//!
//! All formats agree, because they use one list of keys and values. Peers choose some values (users of certificates,
//! names of targets), and these may contain anything: text quotes and escapes them, JSON writes strings, and the
//! journal adds their length.

use std::fmt::Write as _;

use config::moment::rfc3339;
use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::record::{AccessRecord, Value};

impl AccessRecord {
    /// Formats the keys and values after the time as text: `event key=value key="quoted value"`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut line = String::from(self.event());
        for (key, value) in self.fields() {
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
    pub fn line(&self) -> String {
        format!("{} {}", rfc3339(self.time), self.text())
    }

    /// Formats a JSON object, without a newline.
    ///
    /// # Errors
    /// None: serialising numbers and strings cannot fail.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&Json(self))
    }
}

/// Whether humans and programs read a value the same without quotes.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\=".contains(&byte))
}

/// A record that serialises as JSON.
struct Json<'a>(&'a AccessRecord);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time", &rfc3339(self.0.time))?;
        map.serialize_entry("event", self.0.event())?;
        for (key, value) in self.0.fields() {
            match value {
                Value::Number(number) => map.serialize_entry(&key, &number)?,
                Value::Text(text) => map.serialize_entry(&key, &text)?,
            }
        }
        map.end()
    }
}
