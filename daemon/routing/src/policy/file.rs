//! A policy, with the names of the models and classes that it is for.

use anyhow::{Result, bail};
use sched::{
    hash::fnv1a,
    route::{Model, RoutingPolicy},
};

/// A policy, and the names of its models and classes.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyFile {
    /// The models, in the policy's order.
    pub models: Vec<String>,
    /// The classes, in the policy's order. Requests of other classes count as of the last class with thresholds, and as of no
    /// class with a network.
    pub classes: Vec<String>,
    /// The policy: [`RoutingPolicy::Thresholds`] or [`RoutingPolicy::Dqn`].
    pub policy: RoutingPolicy,
}

impl PolicyFile {
    /// Returns the models for a router, with their rewards; `reward` gets the names of a model and of a class.
    pub fn router_models(&self, reward: impl Fn(&str, &str) -> f32) -> Vec<Model> {
        let model = |name: &String| Model {
            id: id(name),
            rewards: self.classes.iter().map(|class| reward(name, class)).collect(),
        };
        self.models.iter().map(model).collect()
    }

    /// Checks that the policy is for these models, in any order.
    ///
    /// # Errors
    /// A model is missing on either side.
    pub fn check(&self, models: &[String]) -> Result<()> {
        let missing = |from: &[String], among: &[String]| from.iter().find(|name| !among.contains(name)).cloned();
        if let Some(name) = missing(models, &self.models) {
            bail!("it does not know the model {name}: make a new one for {}", models.join(", "));
        }
        if let Some(name) = missing(&self.models, models) {
            bail!(
                "it is also for the model {name}, which does not exist here: make a new one for {}",
                models.join(", ")
            );
        }
        Ok(())
    }
}

/// Returns an ID that a model has in every process and configuration: the FNV-1a hash of its name.
#[must_use]
pub fn id(model: &str) -> u64 {
    fnv1a(model.bytes())
}
