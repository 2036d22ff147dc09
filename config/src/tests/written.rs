//! A written configuration reads back as the same: with changes of every key alone, and of several at once.

use std::sync::LazyLock;

use proptest::prelude::*;
use toml::{Table, Value};

use super::*;
use crate::schema::tests::{CONFIG, Step, borders, changed, probes, subjects};

/// A value of one key, in a document in which every table occurs.
struct Change {
    steps: Vec<Step>,
    key: String,
    value: Value,
}

/// Every value of every key for which the document is valid and which it does not contain already.
static CHANGES: LazyLock<Vec<Change>> = LazyLock::new(|| {
    let (document, mut changes) = (document(), Vec::new());
    CONFIG.each_table(&document, &mut |steps, table| {
        for (key, schema) in table["properties"].as_object().unwrap() {
            // Keys, not sections.
            if [schema, &schema["items"]].iter().any(|schema| schema.get("$ref").is_some()) {
                continue;
            }
            for value in probes().into_iter().chain(borders(schema)) {
                let change = Change { steps: steps.to_vec(), key: key.clone(), value };
                let after = change.made_in(&document);
                if after != document && Config::from_toml(&after.to_string()).is_ok() {
                    changes.push(change);
                }
            }
        }
    });
    changes
});

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

    fn made_in(&self, document: &Table) -> Table {
        changed(document, &self.steps, |table| _ = table.insert(self.key.clone(), self.value.clone()))
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
    let document = document();
    for change in &*CHANGES {
        assert_reads_back(&Config::from_toml(&change.made_in(&document).to_string()).unwrap());
    }
    // Each key that is a number was tried with another number.
    CONFIG.each_table(&document, &mut |steps, table| {
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
