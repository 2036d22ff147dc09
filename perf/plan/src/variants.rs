//! Variants: plans that change single keys of another plan.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use sched::hash::fnv1a;
use serde::de::DeserializeOwned;
use toml::Table;

/// The variant that changes nothing.
pub const BASE: &str = "base";

/// Returns the name of a plan that is no variant of another.
pub(crate) fn base() -> String {
    BASE.to_owned()
}

/// A kind of plan that has variants.
pub trait Varied: Clone + DeserializeOwned {
    /// Checks what the types alone do not rule out.
    ///
    /// # Errors
    /// The mistake.
    fn validate(&self) -> Result<()>;

    /// The changes of each variant, by name.
    fn changes(&self) -> &BTreeMap<String, Table>;

    /// The TOML table that variants change.
    fn table(&self) -> &Table;

    /// Returns the plan as the variant of this name, which was parsed from `table`.
    #[must_use]
    fn named(self, variant: &str, table: Table) -> Self;

    /// Parses a plan and all its variants.
    ///
    /// # Errors
    /// The mistake, with its line or the variant's name.
    fn from_toml(text: &str) -> Result<Self> {
        let plan: Self = toml::from_str(text)?;
        plan.validate()?;
        let mut table: Table = toml::from_str(text)?;
        table.remove("variants");
        let plan = plan.named(BASE, table);
        for name in plan.changes().keys() {
            plan.variant(name)?;
        }
        Ok(plan)
    }

    /// The names of its variants, [`BASE`] first.
    fn variants(&self) -> impl Iterator<Item = &str> {
        std::iter::once(BASE).chain(self.changes().keys().map(String::as_str))
    }

    /// Returns the plan with the changes of a variant.
    ///
    /// # Errors
    /// When there is no such variant, or it makes the plan invalid.
    fn variant(&self, name: &str) -> Result<Self> {
        if name == BASE {
            return Ok(self.clone());
        }
        let known = || self.variants().collect::<Vec<_>>().join(", ");
        let changes = self.changes().get(name).with_context(|| format!("no variant {name}; known: {}", known()))?;
        let mut table = self.table().clone();
        merge(&mut table, changes);
        let changed: Self = table.clone().try_into().with_context(|| format!("variant {name}"))?;
        changed.validate().with_context(|| format!("variant {name}"))?;
        Ok(changed.named(name, table))
    }
}

/// Implements [`Varied`] for a type with the fields `variants`, `variant` and `table`, and a method `check`.
macro_rules! varied {
    ($plan:ty) => {
        impl $crate::variants::Varied for $plan {
            fn validate(&self) -> anyhow::Result<()> {
                self.check()
            }

            fn changes(&self) -> &std::collections::BTreeMap<String, toml::Table> {
                &self.variants
            }

            fn table(&self) -> &toml::Table {
                &self.table
            }

            fn named(self, variant: &str, table: toml::Table) -> Self {
                Self { variant: variant.to_owned(), table, ..self }
            }
        }

        impl $plan {
            /// Returns eight hexadecimal digits that differ between variants, and between texts of the plan that differ in meaning.
            /// Rows with equal digits were made by the same variant, whatever its repetitions.
            #[must_use]
            pub fn fingerprint(&self) -> String {
                $crate::variants::fingerprint(&self.table)
            }
        }
    };
}
pub(crate) use varied;

/// The keys that decide nothing about a row: words about the plan, and how many rows there are.
const WORDS: [&str; 9] = [
    "title",
    "source",
    "published",
    "goals",
    "repetitions",
    "lab_repetitions",
    "verdicts",
    "schedulers",
    "lab_schedulers",
];

/// Returns eight hexadecimal digits of a variant's table, without [`WORDS`] and the number of seeds.
pub(crate) fn fingerprint(table: &Table) -> String {
    let mut table = table.clone();
    for key in WORDS {
        table.remove(key);
    }
    if let Some(toml::Value::Table(seeds)) = table.get_mut("seeds") {
        seeds.remove("evaluations");
    }
    let hash = fnv1a(table.to_string().bytes());
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

/// Applies `changes` to `table`: tables key by key, other values as a whole.
pub(crate) fn merge(table: &mut Table, changes: &Table) {
    for (key, change) in changes {
        match (table.get_mut(key), change) {
            (Some(toml::Value::Table(inner)), toml::Value::Table(change)) => merge(inner, change),
            _ => _ = table.insert(key.clone(), change.clone()),
        }
    }
}
