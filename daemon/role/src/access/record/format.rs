//! The formats of access log records.
//!
//! All formats use one list of keys and values, so that they agree. Values chosen by peers (users of certificates, names
//! of targets) may be anything: in text they are quoted and escaped, in JSON they are strings, in the journal they carry
//! their length.

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

/// Whether a value reads the same without quotes, for humans and programs.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\=".contains(&byte))
}

/// A record for serialisation as JSON.
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
