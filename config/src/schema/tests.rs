//! Compares the schemas with the readers, using an independent implementation of JSON Schema.

use std::{collections::BTreeSet, sync::LazyLock};

use boon::{Compiler, SchemaIndex, Schemas};
use proptest::prelude::*;
use serde_json::Value as Json;
use toml::Value;

use super::*;
use crate::{
    error::{Error, Errors, Problem},
    sample::switched_on,
};

pub(crate) static CONFIG: LazyLock<Judge> =
    LazyLock::new(|| Judge::new(&Config::schema(), |text| errors(Config::from_toml(text))));
pub(crate) static POLICY: LazyLock<Judge> =
    LazyLock::new(|| Judge::new(&Policy::schema(), |text| errors(Policy::from_toml(text))));

fn errors<T>(outcome: Result<T, Errors>) -> Vec<Error> {
    outcome.err().iter().flat_map(Errors::iter).cloned().collect()
}

/// A schema, and its reader.
pub(crate) struct Judge {
    schema: Json,
    schemas: Schemas,
    index: SchemaIndex,
    read: fn(&str) -> Vec<Error>,
}

impl Judge {
    fn new(schema: &str, read: fn(&str) -> Vec<Error>) -> Self {
        const PLACE: &str = "urn:schema";
        let schema: Json = serde_json::from_str(schema).unwrap();
        let (mut compiler, mut schemas) = (Compiler::new(), Schemas::new());
        compiler.add_resource(PLACE, schema.clone()).unwrap();
        // Refuses an invalid schema.
        let index = compiler.compile(PLACE, &mut schemas).unwrap();
        Self { schema, schemas, index, read }
    }

    /// Returns the schema's objection to a document.
    fn objection(&self, document: &Table) -> Option<String> {
        self.schemas.validate(&json!(document), self.index).err().map(|error| format!("{error:#}"))
    }

    /// Asserts that the schema accepts a text, as its reader does.
    pub(crate) fn assert_takes(&self, text: &str) {
        assert_eq!(self.objection(&text.parse().unwrap()), None, "{text}");
    }

    /// Asserts that reader and schema agree about `document`, as far as a schema can.
    fn assert_agrees(&self, document: &Table) {
        let text = document.to_string();
        let plain: Vec<_> = (self.read)(&text).into_iter().filter(is_plain).collect();
        let objection = self.objection(document);
        assert_eq!(objection.is_none(), plain.is_empty(), "{text}\n{objection:?}\n{plain:?}");
    }

    /// Returns the section of `document` that the steps lead to, and the other sections that it needs: a short document is read
    /// in a fraction of the time. The whole document if there are no steps.
    pub(crate) fn section(&self, document: &Table, steps: &[Step]) -> Table {
        let Some(Step::Key(section)) = steps.first() else { return document.clone() };
        let mut least = document.clone();
        for other in document.keys().filter(|key| *key != section) {
            let mut less = least.clone();
            less.remove(other);
            if (self.read)(&less.to_string()).is_empty() {
                least = less;
            }
        }
        least
    }

    /// Calls `look` with every table of the schema, and with the steps to a table of its kind in `document`.
    pub(crate) fn each_table(&self, document: &Table, look: &mut impl FnMut(&[Step], &Json)) {
        self.look_at(&self.schema, &Value::Table(document.clone()), &mut Vec::new(), look);
    }

    fn look_at(&self, table: &Json, at: &Value, steps: &mut Vec<Step>, look: &mut impl FnMut(&[Step], &Json)) {
        look(steps, table);
        for (key, schema) in table["properties"].as_object().unwrap() {
            let items = &schema["items"];
            let below = [schema, items, &items["anyOf"][1], &schema["patternProperties"]["^[a-z0-9-]{1,32}$"]];
            let Some(path) = below.into_iter().find_map(|schema| schema["$ref"].as_str()) else { continue };
            let below = &self.schema["$defs"][path.strip_prefix("#/$defs/").unwrap()];
            let start = steps.len();
            steps.push(Step::Key(key.clone()));
            let mut at = at.get(key).unwrap_or_else(|| panic!("{steps:?} is missing in the document"));
            if let Value::Array(elements) = at {
                let first = elements.iter().position(Value::is_table).expect("a table of this kind exists");
                steps.push(Step::Index(first));
                at = &elements[first];
            } else if schema.get("patternProperties").is_some() {
                let (name, section) = at.as_table().unwrap().iter().next_back().unwrap();
                steps.push(Step::Key(name.clone()));
                at = section;
            }
            self.look_at(below, at, steps, look);
            steps.truncate(start);
        }
        // Tables of any name beside the keys.
        if let Some(path) = table["additionalProperties"]["$ref"].as_str() {
            let below = &self.schema["$defs"][path.strip_prefix("#/$defs/").unwrap()];
            let is_named = |(name, _): &(&String, &Value)| table["properties"].get(&name[..]).is_none();
            let (name, section) = at.as_table().unwrap().iter().find(is_named).expect("a table of this kind exists");
            steps.push(Step::Key(name.clone()));
            self.look_at(below, section, steps, look);
            steps.pop();
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Key(String),
    Index(usize),
}

/// Returns a copy of `document` in which the table at `steps` is changed.
pub(crate) fn changed(document: &Table, steps: &[Step], change: impl FnOnce(&mut Table)) -> Table {
    let mut whole = Value::Table(document.clone());
    let place = steps.iter().fold(&mut whole, |at, step| match step {
        Step::Key(key) => &mut at[&key[..]],
        Step::Index(index) => &mut at[*index],
    });
    change(place.as_table_mut().unwrap());
    let Value::Table(whole) = whole else { panic!("{whole}") };
    whole
}

/// Returns whether a schema can detect the error, which must not depend on other keys.
fn is_plain(error: &Error) -> bool {
    let is_foreign = |c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-';
    match &error.problem {
        Problem::Contradiction { .. } | Problem::Cycle(_) => false,
        // Not a key that another key requires.
        Problem::Missing { key, .. } => error.key.ends_with(key),
        // Only if the name could not be a name at all.
        Problem::UnknownName { name, .. } => !(1..=32).contains(&name.len()) || name.contains(is_foreign),
        _ => true,
    }
}

/// Both schemas, with documents in which every table occurs.
pub(crate) fn subjects() -> [(&'static Judge, Table); 2] {
    let deny = ("\"*.blocked.example\"]", "{ to = \"*.blocked.example\" }]");
    let text = switched_on();
    assert!(text.contains(deny.0));
    let config: Table = text.replace(deny.0, deny.1).parse().unwrap();
    let policy = config.clone().into_iter().filter(|(key, _)| ["schedule", "class", "rule"].contains(&&key[..]));
    [(&CONFIG, config.clone()), (&POLICY, policy.collect())]
}

/// Values of every type, and texts of almost every form.
const PROBES: &str = r#"_ = [
    true, -1, 0, 1, 255, 256, 65535, 65536, 1.5, 2026-01-01, "", "ü", "a b", "a/b", "/a", "-", ".", "a*b",
    [], [true], [-1], [0], [1.5], [[]], ["ü"], ["a/b"], ["/a"], [65536], [0, 255], [0, 256], [0, 1, 2], [{ zzz = 1 }],
    {}, { zzz = 1 }, { zzz = {} }, { Zzz = {} },
    "192.0.2.1", "192.0.2.1:0", "192.0.2.1:443", "192.0.2.1:65536", "[2001:db8::1]:65535", "2001:db8::1", "192.0.2.1443",
    "10.0.0.0/8", "*.example.org", ".example.org", "example.org.", "*", "example.org", "example.org:443", "[example.org]:443",
    "80", "80-90", "080", "+80", "80-", "0-80", "80-65536", "5 Mbit/s", "5 mbit/s", "5Mbit/s", "Mbit/s", "5 Gbit/s ",
    "system", "session", "unix:path=/a", "unix:path", "sixteen-letters-", "fifteen-letters", "a:b",
    "https://a.example/{target_host}/{target_port}/", "https://a.example/{target_host}/", "http://a.example/{target_host}/{target_port}/",
    "01:23456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "01:23456789abcdef0123456789abcdef0123456789abcdef0123456789abcde", "01:23456789abcdef0123456789abcdef0123456789abcdef0123456789abcdeg",
]"#;

pub(crate) fn probes() -> Vec<Value> {
    let probes = PROBES.parse::<Table>().unwrap().remove("_").unwrap();
    probes.as_array().unwrap().clone()
}

/// Returns values to try, from `schema` itself: its words and near misses, the ends of its range and the values beyond.
pub(crate) fn borders(schema: &Json) -> Vec<Value> {
    let words = schema["enum"].as_array().into_iter().flatten().filter_map(Json::as_str);
    let words = words.flat_map(|word| [word.to_owned(), word.to_uppercase(), format!("{word}s")]).map(Value::String);
    let ends = [&schema["minimum"], &schema["maximum"]].into_iter().filter_map(Json::as_i64);
    words.chain(ends.flat_map(|end| [end - 1, end, end + 1]).map(Value::Integer)).collect()
}

#[test]
fn reader_and_schema_agree_on_every_value_of_every_key() {
    let probes = probes();
    let [(judge, document), _] = subjects();
    judge.each_table(&document, &mut |steps, table| {
        let document = judge.section(&document, steps);
        for (key, schema) in table["properties"].as_object().unwrap() {
            for value in probes.iter().cloned().chain(borders(schema)) {
                judge.assert_agrees(&changed(&document, steps, |table| _ = table.insert(key.clone(), value)));
            }
        }
    });
}

proptest! {
    #[test]
    fn the_schema_accepts_every_valid_name_of_targets_and_listeners(
        text in "([*.]{0,2}[a-zA-Z0-9.-]{1,12}|[0-9a-f:.]{2,20}|[0-9]{1,2}(\\.[0-9]{1,2}){3}|\\[[0-9a-f:]{2,20}\\])([:/-][0-9]{1,5})?",
    ) {
        for key in ["to", "ports", "listener"] {
            let text = format!("[[rule]]\nclass = \"default\"\n{key} = {text:?}");
            if Policy::from_toml(&text).is_ok() {
                POLICY.assert_takes(&text);
            }
        }
    }
}

#[test]
fn reader_and_schema_know_the_same_keys_and_agree_on_those_that_have_to_be_there() {
    for (judge, document) in subjects() {
        judge.each_table(&document, &mut |steps, table| {
            let keys: BTreeSet<&str> = table["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            let stray = changed(&document, steps, |table| _ = table.insert("zzz".into(), Value::Integer(0)));
            let errors = (judge.read)(&stray.to_string());
            let [Error { problem: Problem::UnknownKey { known, .. }, .. }] = &errors[..] else { panic!("{errors:?}") };
            assert_eq!(known.iter().copied().collect::<BTreeSet<_>>(), keys, "{steps:?}");
            judge.assert_agrees(&stray);
            // Keys that every listener needs may be its own or the relay's.
            for key in keys.iter().filter(|key| !["certificate", "private_key"].contains(*key)) {
                judge.assert_agrees(&changed(&document, steps, |table| _ = table.remove(*key)));
            }
        });
    }
}

#[test]
fn the_schema_describes_each_key_and_says_what_to_write() {
    for (judge, document) in subjects() {
        judge.each_table(&document, &mut |steps, table| {
            for (key, schema) in table["properties"].as_object().unwrap() {
                let is_table = schema.to_string().contains("$ref") && schema["items"]["anyOf"].is_null();
                let description = schema["description"].as_str().unwrap_or_default();
                assert!(is_table || description.contains("Write "), "{steps:?} {key}: {schema}");
            }
        });
    }
    let [limits, class] = ["relay.limits", "class.NAME"].map(|table| &CONFIG.schema["$defs"][table]);
    let expected = json!({
        "type": "integer", "minimum": 1, "maximum": 1 << 24, "default": 10_000,
        "description": "QUIC connections at once.\n\nWrite a whole number from 1 to 16777216.",
    });
    assert_eq!(limits["properties"]["connections"], expected);
    assert!(limits["description"].as_str().unwrap().starts_with("Metrics count requests that are refused"));
    assert_eq!(
        (&class["properties"]["level"]["default"], &class["properties"]["like"]["default"]),
        (&json!("low"), &Json::Null)
    );
}

#[test]
fn a_policy_is_described_as_in_a_configuration() {
    for key in ["schedule", "class", "rule"] {
        assert_eq!(POLICY.schema["properties"][key], CONFIG.schema["properties"][key]);
    }
    let tables: Vec<_> = POLICY.schema["$defs"].as_object().unwrap().iter().collect();
    assert_eq!(tables.len(), 4);
    assert!(tables.into_iter().all(|(path, table)| *table == CONFIG.schema["$defs"][path]));
}
