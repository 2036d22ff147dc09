//! A log as a JSON text sequence (RFC 7464): a record that describes the file, then one for each event
//! (draft-ietf-quic-qlog-main-schema, "qlog to JSON Text Sequences mapping").

use std::{
    collections::{HashMap, VecDeque},
    time::SystemTime,
};

use serde::Serialize;
use serde_json::json;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    Entry, Tracing,
    event::{Event, ms},
};
use crate::class_key::ClassKey;

/// The draft that defines these events.
const SCHEMA: &str = "urn:ietf:params:qlog:events:quic-12";

/// The identifier of our own namespace, `paced`, which the main schema requires for the events of `docs/looking-at-it.md`. No page is
/// there: the name is reserved (RFC 2606 §2).
const OWN_SCHEMA: &str = "https://paced.invalid/qlog#paced";

/// Text produced at once, in bytes; the last record may exceed it.
const TEXT_BYTES: usize = 256 * 1024;

/// Most tunnels whose numbers are remembered; later ones are known by their streams only.
const TUNNELS: usize = 65_536;

/// On which side of its connection the log was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum VantagePoint {
    /// The side that opened it.
    Client,
    /// The side that accepted it.
    Server,
}

/// Names for the numbers in a log.
#[derive(Debug, Default)]
pub struct Names {
    /// The names of classes.
    pub classes: HashMap<ClassKey, String>,
    /// The open tunnels of the connection, by the streams of their requests.
    pub tunnels: HashMap<u64, u64>,
}

/// The text of a running log.
#[derive(Debug)]
pub struct Sequence {
    tracing: Tracing,
    header: Option<String>,
    waiting: VecDeque<Entry>,
    names: Names,
    is_over: bool,
}

impl Sequence {
    /// Returns the text of a trace from now on, for one side of the connection that the control plane calls
    /// `connection`, on the path of this name; it is empty without paths.
    #[must_use]
    pub fn new(tracing: Tracing, (connection, path): (u64, &str), vantage_point: VantagePoint) -> Self {
        let header = Some(header((connection, path), vantage_point, SystemTime::now()));
        Self { tracing, header, waiting: VecDeque::new(), names: Names::default(), is_over: false }
    }

    /// Whether there is text to be written at once.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.header.is_some() || !self.waiting.is_empty()
    }

    /// Returns the records of events since the last call, maybe none, and whether more will come. Tunnels that have
    /// closed are remembered.
    pub fn text(&mut self, names: Names) -> (String, bool) {
        self.names.classes = names.classes;
        if self.names.tunnels.len() < TUNNELS {
            self.names.tunnels.extend(names.tunnels);
        }
        if self.waiting.is_empty() {
            // Checked first, so that the events taken next are all there are.
            self.is_over = self.tracing.is_over();
            self.waiting = self.tracing.take(self.is_over).into();
        }
        let mut text = self.header.take().unwrap_or_default();
        while text.len() < TEXT_BYTES
            && let Some((ns, event)) = self.waiting.pop_front()
        {
            text.push_str(&event_record(ns, &event, &self.names));
        }
        (text, !self.is_over || !self.waiting.is_empty())
    }
}

fn header((connection, path): (u64, &str), vantage_point: VantagePoint, begun: SystemTime) -> String {
    // Formatting fails for years of more than four digits.
    let begun = OffsetDateTime::from(begun).format(&Rfc3339).unwrap_or_default();
    let mut common_fields = json!({
        "reference_time": { "clock_type": "monotonic", "epoch": "unknown", "wall_clock_time": begun },
        "time_format": "relative_to_epoch",
    });
    let mut title = format!("connection {connection} of paced {}", env!("CARGO_PKG_VERSION"));
    if !path.is_empty() {
        title.push_str(&format!(" over {path}"));
        // A field of our own, as the schema allows; its `path` is about addresses.
        common_fields["paced_path"] = path.into();
    }
    record(&json!({
        "file_schema": "urn:ietf:params:qlog:file:sequential",
        "serialization_format": "application/qlog+json-seq",
        "title": title,
        "trace": {
            "common_fields": common_fields,
            "event_schemas": [SCHEMA, OWN_SCHEMA],
            "vantage_point": { "name": "paced", "type": vantage_point },
        },
    }))
}

fn event_record(ns: u64, event: &Event, names: &Names) -> String {
    #[derive(Serialize)]
    struct Whole<'a> {
        time: f64,
        name: &'static str,
        data: Data<'a>,
    }
    #[derive(Serialize)]
    struct Data<'a> {
        #[serde(flatten)]
        event: &'a Event,
        #[serde(skip_serializing_if = "Option::is_none")]
        class: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tunnel: Option<u64>,
    }
    let served = event.served();
    let class = served.and_then(|(_, class)| names.classes.get(&class?)).map(String::as_str);
    let tunnel = served.and_then(|(stream_id, _)| names.tunnels.get(&stream_id)).copied();
    record(&Whole { time: ms(ns), name: event.name(), data: Data { event, class, tunnel } })
}

/// A record between a record separator and a line feed (RFC 7464 §2.2).
fn record(of: &impl Serialize) -> String {
    // Only keys that are not strings, and writers, can fail.
    let json = serde_json::to_string(of).unwrap_or_default();
    format!("\u{1e}{json}\n")
}
