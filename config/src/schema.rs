//! The JSON Schema of configurations and policies: the keys that their readers ask for, with descriptions from the
//! sample.

use serde_json::json;
use toml::{Table, Value};

use crate::{
    Config,
    policy::{self, Policy},
    sample::entries,
    section::{Schema, describe},
};

#[cfg(test)]
pub(crate) mod tests;

impl Config {
    /// Returns the JSON Schema (draft 2020-12) of a configuration, for checks and completion in editors.
    ///
    /// It accepts every configuration that [`Config::from_toml`] accepts. It refuses unknown keys, keys missing that
    /// every such table needs, and values that are of the wrong type, out of range, or malformed. It cannot check what
    /// depends on other keys: contradictions, duplicate or unknown names, keys that only some values require; nor
    /// whether numbers and addresses within a text are in range, or an integer is written as `1.0`.
    #[must_use]
    pub fn schema() -> String {
        let about = "A configuration of paced. `paced check FILE` also finds contradictions, which no schema can.";
        text(describe(Self::read), "paced.toml", about)
    }
}

impl Policy {
    /// Returns the JSON Schema of a policy, as [`Config::schema`] does of a configuration.
    #[must_use]
    pub fn schema() -> String {
        let about = "A policy of paced. `pacectl policy check` also finds contradictions, which no schema can.";
        text(describe(policy::read), "policy of paced", about)
    }
}

fn text(mut schema: Schema, title: &str, about: &str) -> String {
    explain(&mut schema);
    let (least, whole) = least_and_whole();
    add_defaults(&mut schema, "", &whole, Some(&least));
    format!("{:#}\n", schema.into_json(title, about))
}

/// Adds the sample's descriptions of tables and keys. A key without its own comment shares that of the key before it.
fn explain(schema: &mut Schema) {
    let (mut path, mut words) = ("", String::new());
    for entry in entries() {
        let own = entry.comment.join(" ");
        if entry.setting.starts_with('[') {
            path = entry.setting.trim_matches(['[', ']']);
            schema.explain(path, None, &own);
            words.clear();
        } else if let Some((key, _)) = entry.setting.split_once(" = ") {
            words = if own.is_empty() { words } else { own };
            schema.explain(path, Some(key), &words);
        } else {
            words.clear();
        }
    }
}

/// The smallest configuration that has every section with defaults.
const LEAST: &str = r#"
[relay]
templates = ["https://relay.example/{target_host}/{target_port}/"]
[[relay.listener]]
address = "127.0.0.1:443"
certificate = "/relay.pem"
private_key = "/relay.key"
auth = "none"
[[forward]]
listen = "127.0.0.1:5353"
relay = "https://relay.example/{target_host}/{target_port}/"
target = "dns.example:53"
[[proxy]]
listen = "127.0.0.1:1080"
relay = "https://relay.example/{target_host}/{target_port}/"
[schedule.any]
"#;

/// Returns [`LEAST`], and the same configuration with every default.
fn least_and_whole() -> (Table, Table) {
    let config = Config::from_toml(LEAST).expect("nothing that has to be said is missing");
    let table = |text: &str| text.parse().expect("what is read or written as a configuration is TOML");
    (table(LEAST), table(&config.to_toml()))
}

/// Adds as defaults the values that `whole` has in the table at `path` and `said` lacks.
fn add_defaults(schema: &mut Schema, path: &str, whole: &Table, said: Option<&Table>) {
    for (key, value) in whole {
        let said = said.and_then(|said| said.get(key));
        match (first_table(value), said) {
            (Some(below), said) => {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                add_defaults(schema, &path, below, said.and_then(first_table));
            }
            (None, None) => schema.default(path, key, json!(value)),
            (None, Some(_)) => {}
        }
    }
}

/// Returns a table, or the first of several.
fn first_table(value: &Value) -> Option<&Table> {
    match value {
        Value::Array(elements) => elements.first().and_then(Value::as_table),
        other => other.as_table(),
    }
}
