//! A plan that is being run: the requests and engines of its simulation, and its policies as they were learned.

use anyhow::{Context as _, Result, ensure};
use plan::{Clock, processes::ProcessesPlan, serving::ServingPlan};
use routing::policy;
use sched::route::{RoutingPolicy, serving::Setup};

use crate::serving::learn;

/// What is run of a plan.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The clock, which decides about the link's delay.
    pub clock: Clock,
    /// Only these policies, or all if empty.
    pub policies: &'a [String],
    /// How many seeds; `None` for the plan's number.
    pub seeds: Option<u64>,
}

/// A plan that is being run.
pub(super) struct Compared {
    pub(super) simulated: ServingPlan,
    pub(super) setup: Setup,
    /// The policies as they were learned, in the order of the plan's.
    pub(super) learned: Vec<RoutingPolicy>,
}

impl Compared {
    /// Lets the policies of a part of a plan learn.
    ///
    /// # Errors
    /// When the part names a policy that is not in the plan.
    pub(super) fn of(plan: &ProcessesPlan, part: &Part<'_>) -> Result<Self> {
        let mut simulated = plan.simulated(part.clock)?;
        for name in part.policies {
            ensure!(simulated.policies.iter().any(|of| of.name == *name), "no policy {name} in plan {}", plan.name);
        }
        simulated.policies.retain(|policy| part.policies.is_empty() || part.policies.contains(&policy.name));
        simulated.seeds.evaluations = part.seeds.unwrap_or(simulated.seeds.evaluations);
        let mut setup = simulated.setup();
        // As the product numbers models, so that it accepts a network that was trained here.
        for (of, model) in setup.models.iter_mut().zip(&simulated.models) {
            of.id = policy::id(&model.name);
        }
        let learned = learn::all(&simulated, &simulated.training_setup(&setup))
            .into_iter()
            .map(|trainings| trainings.into_iter().next());
        let learned = learned.collect::<Option<_>>().context("a policy was not learned")?;
        Ok(Self { simulated, setup, learned })
    }
}
