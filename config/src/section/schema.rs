//! The keys that a reader asks for, as JSON Schema (draft 2020-12).

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use serde_json::{Map, Value as Json, json};

use super::{Value, whole_number};

/// The pattern of names of named sections.
pub(super) const NAME: &str = "^[a-z0-9-]{1,32}$";

/// The name that stands for all names in a schema.
pub(super) const ANY: &str = "NAME";

/// The tables of a document by their paths; the path of the document itself is empty.
#[derive(Default)]
pub(crate) struct Schema(BTreeMap<String, Table>);

#[derive(Default)]
struct Table {
    about: Option<String>,
    keys: BTreeMap<&'static str, Key>,
    required: BTreeSet<&'static str>,
    /// Pairs of keys. One key of each pair is required.
    one_of: BTreeSet<[&'static str; 2]>,
    /// The schema of tables under names of the operator's choice, if there may be any.
    named: Option<Json>,
}

struct Key {
    about: Option<String>,
    schema: Json,
}

impl Schema {
    /// Adds a key to the table at `path`.
    pub(super) fn add(&mut self, path: &str, key: &'static str, schema: Json) {
        self.0.entry(path.to_owned()).or_default().keys.insert(key, Key { about: None, schema });
    }

    /// Makes a key required in the table at `path`.
    pub(super) fn demand(&mut self, path: &str, key: &'static str) {
        self.0.entry(path.to_owned()).or_default().required.insert(key);
    }

    /// Requires one of two keys in the table at `path`.
    pub(super) fn demand_one_of(&mut self, path: &str, keys: [&'static str; 2]) {
        self.0.entry(path.to_owned()).or_default().one_of.insert(keys);
    }

    /// Allows tables of any name in the table at `path`, beside its keys.
    pub(super) fn add_named(&mut self, path: &str) {
        self.0.entry(path.to_owned()).or_default().named = Some(table(&format!("{path}.{ANY}")));
    }

    /// Describes the table at `path`, or one of its keys. The first description is kept; descriptions of unknown tables
    /// and keys are ignored.
    pub(crate) fn explain(&mut self, path: &str, key: Option<&str>, about: &str) {
        let Some(table) = self.table(path) else { return };
        let place = match key {
            Some(key) => table.keys.get_mut(key).map(|key| &mut key.about),
            None => Some(&mut table.about),
        };
        if let Some(place) = place.filter(|_| !about.is_empty()) {
            place.get_or_insert_with(|| about.to_owned());
        }
    }

    /// Sets the value that applies if `key` is omitted.
    pub(crate) fn default(&mut self, path: &str, key: &str, default: Json) {
        if let Some(key) = self.table(path).and_then(|table| table.keys.get_mut(key)) {
            key.schema["default"] = default;
        }
    }

    /// Finds a table; for a named one, the table of all names.
    fn table(&mut self, path: &str) -> Option<&mut Table> {
        if self.0.contains_key(path) {
            return self.0.get_mut(path);
        }
        let (parent, _) = path.rsplit_once('.')?;
        self.0.get_mut(&format!("{parent}.{ANY}"))
    }

    /// Returns the schema of the document, with its tables as definitions.
    pub(crate) fn into_json(mut self, title: &str, about: &str) -> Json {
        let root = Table { about: Some(about.to_owned()), ..self.0.remove("").unwrap_or_default() };
        let mut schema = root.into_json();
        schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
        schema["title"] = json!(title);
        schema["$defs"] = self.0.into_iter().map(|(path, table)| (path, table.into_json())).collect();
        schema
    }
}

impl Table {
    fn into_json(self) -> Json {
        let names = self.named.is_some().then(|| self.keys.keys().copied().collect::<Vec<_>>());
        let properties: Map<_, _> =
            self.keys.into_iter().map(|(key, value)| (key.to_owned(), value.into_json())).collect();
        let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
        if let (Some(named), Some(keys)) = (self.named, names) {
            schema["additionalProperties"] = named;
            schema["propertyNames"] = json!({ "anyOf": [{ "enum": keys }, { "pattern": NAME }] });
        }
        if !self.required.is_empty() {
            schema["required"] = json!(self.required);
        }
        if !self.one_of.is_empty() {
            let one = |keys: [&str; 2]| json!({ "anyOf": keys.map(|key| json!({ "required": [key] })) });
            schema["allOf"] = self.one_of.into_iter().map(one).collect();
        }
        if let Some(about) = self.about {
            schema["description"] = json!(about);
        }
        schema
    }
}

impl Key {
    /// Puts the description of the key before that of its values.
    fn into_json(mut self) -> Json {
        if let Some(about) = self.about {
            let write = self.schema["description"].as_str().map(|write| format!("\n\n{write}")).unwrap_or_default();
            self.schema["description"] = json!(about + &write);
        }
        self.schema
    }
}

pub(super) fn one<T: Value>() -> Json {
    described(T::schema(), T::EXPECTED)
}

pub(super) fn list<T: Value>() -> Json {
    described(array(T::schema()), &format!("a list in brackets, each element {}", T::EXPECTED))
}

/// A list with at least one element.
pub(super) fn filled_list<T: Value>() -> Json {
    let mut schema = list::<T>();
    schema["minItems"] = json!(1);
    schema
}

/// A list with at most this many elements.
pub(super) fn limited_list<T: Value>(most: usize) -> Json {
    let mut schema = list::<T>();
    schema["maxItems"] = json!(most);
    schema
}

pub(super) fn one_or_list<T: Value>() -> Json {
    let mut several = array(T::schema());
    several["minItems"] = json!(1);
    described(json!({ "anyOf": [T::schema(), several] }), &format!("{}, or a list of such in brackets", T::EXPECTED))
}

pub(super) fn number(range: &RangeInclusive<u64>) -> Json {
    described(whole_number(range), &format!("a whole number from {} to {}", range.start(), range.end()))
}

/// The table at `path`.
pub(super) fn table(path: &str) -> Json {
    json!({ "$ref": format!("#/$defs/{path}") })
}

/// A list of tables of the kind at `path`.
pub(super) fn tables(path: &str) -> Json {
    array(table(path))
}

/// A list of tables of the kind at `path`, and of values.
pub(super) fn list_or_tables<T: Value>(path: &str) -> Json {
    let schema = array(json!({ "anyOf": [T::schema(), table(path)] }));
    described(schema, &format!("a list in brackets, each element {}; or a table with it as `to`", T::EXPECTED))
}

/// Tables of the kind at `path`, by their names.
pub(super) fn named_tables(path: &str) -> Json {
    json!({ "type": "object", "patternProperties": { NAME: table(path) }, "additionalProperties": false })
}

fn array(items: Json) -> Json {
    json!({ "type": "array", "items": items })
}

fn described(mut schema: Json, expected: &str) -> Json {
    schema["description"] = json!(format!("Write {expected}."));
    schema
}
