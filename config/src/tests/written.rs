//! A written configuration reads back as the same: with changes of every key alone, and of several at once.

use std::{
    collections::BTreeSet,
    sync::{Arc, LazyLock},
};

use proptest::prelude::*;
use toml::{Table, Value};

use super::*;
use crate::schema::tests::{CONFIG, Step, borders, changed, probes, subjects};

/// Sections that have names.
const NAMED: [&str; 3] = ["class", "schedule", "hop"];

/// A value of one key.
struct Change {
    /// The section of the key, with the others that it needs.
    section: Arc<Table>,
    steps: Vec<Step>,
    key: String,
    value: Value,
}

/// Every value of every key for which its section is valid and which it does not contain already.
static CHANGES: LazyLock<Vec<Change>> = LazyLock::new(|| {
    let (document, mut changes) = (document(), Vec::new());
    CONFIG.each_table(&document, &mut |steps, table| {
        let section = Arc::new(CONFIG.section(&document, steps));
        for (key, schema) in table["properties"].as_object().unwrap() {
            // Keys, not sections.
            if [schema, &schema["items"]].iter().any(|schema| schema.get("$ref").is_some()) {
                continue;
            }
            for value in probes().into_iter().chain(borders(schema)) {
                let change = Change { section: section.clone(), steps: steps.to_vec(), key: key.clone(), value };
                let after = change.made_in(&section);
                if after != *section && Config::from_toml(&after.to_string()).is_ok() {
                    changes.push(change);
                }
            }
        }
    });
    changes
});

/// A document in which every table occurs.
fn document() -> Table {
    let [(_, document), _] = subjects();
    document
}

impl Change {
    /// Returns whether a document contains the table of the key.
    fn has_place_in(&self, document: &Table) -> bool {
        let whole = Value::Table(document.clone());
        let place = self.steps.iter().try_fold(&whole, |at, step| match step {
            Step::Key(key) => at.get(key),
            Step::Index(index) => at.get(index),
        });
        place.is_some_and(Value::is_table)
    }

    /// Returns the path of the key, without the places and names of sections.
    fn path(&self) -> String {
        let sections = self.steps.iter().enumerate().filter_map(|(place, step)| match step {
            Step::Key(key)
                if place == 0 || !matches!(&self.steps[place - 1], Step::Key(kind) if NAMED.contains(&&kind[..])) =>
            {
                Some(&key[..])
            }
            _ => None,
        });
        sections.chain([&self.key[..]]).collect::<Vec<_>>().join(".")
    }

    fn made_in(&self, document: &Table) -> Table {
        changed(document, &self.steps, |table| _ = table.insert(self.key.clone(), self.value.clone()))
    }

    /// Returns the configuration of the changed section.
    fn config(&self) -> Config {
        Config::from_toml(&self.made_in(&self.section).to_string()).unwrap()
    }
}

/// Asserts that a configuration, written whole, reads back as the same, and its policy also in brief.
fn assert_reads_back(config: &Config) {
    let text = config.to_toml();
    let again = Config::from_toml(&text).unwrap_or_else(|errors| panic!("{text}\nis refused:\n{errors}"));
    assert_eq!(format!("{again:?}"), format!("{config:?}"), "{text}");
    let text = config.policy.to_toml();
    assert_eq!(Policy::from_toml(&text).as_ref(), Ok(&config.policy), "{text}");
}

#[test]
fn every_value_of_every_key_reads_back_as_it_is_written() {
    for change in &*CHANGES {
        assert_reads_back(&change.config());
    }
    // Each key that is a number was tried with another number.
    CONFIG.each_table(&document(), &mut |steps, table| {
        let numbers = table["properties"].as_object().unwrap().iter().filter(|(_, schema)| schema["type"] == "integer");
        for (key, _) in numbers {
            let path = format!("{steps:?}");
            let is_tried = |change: &Change| change.key == *key && format!("{:?}", change.steps) == path;
            // These keys need another value of a neighbouring key; the policy's own tests cover them.
            let goes_with_others = ["target_ms", "interval_ms", "sojourn_ms", "max_connections"].contains(&&key[..]);
            assert!(goes_with_others || CHANGES.iter().any(is_tried), "{path} {key}");
        }
    });
}

const FILE: &str = "`paced check` reads the file, and names it if it cannot be used";
const HASH: &str = "the name beside it is mentioned";
const LOGGING: &str = "it is mentioned only with an access log, which this document does not ask for";

/// Keys whose changes the explanation does not show, each with the reason. This list may only become shorter.
const UNEXPLAINED: &[(&str, &str)] = &[
    ("control.tcp.certificate", FILE),
    ("control.tcp.client_ca", FILE),
    ("control.tcp.client_crl", FILE),
    ("control.tcp.private_key", FILE),
    ("forward.client_certificate", FILE),
    ("forward.client_key", FILE),
    ("forward.token_file", FILE),
    ("gateway.key.sha256", HASH),
    ("gateway.listener.private_key", FILE),
    ("hop.client_certificate", FILE),
    ("hop.client_key", FILE),
    ("hop.token_file", FILE),
    ("log.access_addresses", LOGGING),
    ("log.access_refusals_per_second", LOGGING),
    ("proxy.client_certificate", FILE),
    ("proxy.client_key", FILE),
    ("proxy.token_file", FILE),
    ("relay.client_ca", FILE),
    ("relay.client_crl", FILE),
    ("relay.listener.client_ca", FILE),
    ("relay.listener.client_crl", FILE),
    ("relay.listener.private_key", FILE),
    ("relay.private_key", FILE),
    ("relay.token.sha256", HASH),
    ("serve.client_certificate", FILE),
    ("serve.client_key", FILE),
    ("serve.key.sha256", HASH),
    ("serve.token_file", FILE),
];

#[test]
fn the_explanation_of_a_configuration_changes_with_every_key() {
    let explained = |config: &Config| {
        let text = explain(config, std::time::SystemTime::UNIX_EPOCH);
        text.lines().filter(|line| !line.starts_with("warning: ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let (mut told, mut untold) = (BTreeSet::new(), BTreeSet::new());
    for changes in CHANGES.chunk_by(|a, b| Arc::ptr_eq(&a.section, &b.section)) {
        let config = Config::from_toml(&changes[0].section.to_string()).unwrap();
        let before = explained(&config);
        for change in changes {
            let changed = change.config();
            // The value may be that of the default.
            if format!("{changed:?}") == format!("{config:?}") {
                continue;
            }
            if explained(&changed) == before {
                untold.insert(change.path())
            } else {
                told.insert(change.path())
            };
        }
    }
    let untold: Vec<_> = untold.difference(&told).map(String::as_str).collect();
    let excepted: Vec<_> = UNEXPLAINED.iter().map(|(key, _)| *key).collect();
    assert_eq!(untold, excepted, "`config::explain` has to mention these keys");
    assert!(told.len() > 100, "{}", told.len());
}

proptest! {
    #[test]
    fn values_of_several_keys_read_back_as_they_are_written(
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
    ) {
        let document = picks.iter().map(|pick| pick.get(&CHANGES)).fold(document(), |document, change| {
            // Another change may have removed it.
            if change.has_place_in(&document) { change.made_in(&document) } else { document }
        });
        if let Ok(config) = Config::from_toml(&document.to_string()) {
            assert_reads_back(&config);
        }
    }
}
