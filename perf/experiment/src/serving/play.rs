//! One run: the requests of a seed, and how a policy answers them.

use ::plan::serving::{self as plan, ServingPlan};
use sched::route::{
    ClientPath, ModelChoice, RoutedRequest, Router, RoutingPolicy, Slo, State,
    serving::{self, Arrival, Decide, Fate, RunOutcome, Setup},
};

use super::{answer::Answered, link};

/// A workload at one of its rates, under one of the link's schedulers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    /// Its index in the plan.
    pub workload: usize,
    /// Its index among the link's schedulers; 0 without a link.
    pub scheduler: usize,
    pub rate: Option<f64>,
    run: serving::Workload,
}

impl Cell {
    /// Returns all cells of a plan: each scheduler at each rate of each workload.
    pub fn all(plan: &ServingPlan) -> Vec<Self> {
        let schedulers = plan.schedulers().len();
        let runs = plan.workloads.iter().enumerate();
        let runs = runs.flat_map(|(at, workload)| workload.runs().into_iter().map(move |run| (at, run)));
        let cells =
            |(workload, (rate, run))| (0..schedulers).map(move |scheduler| Self { workload, scheduler, rate, run });
        runs.flat_map(cells).collect()
    }

    pub fn workload<'a>(&self, plan: &'a ServingPlan) -> &'a plan::Workload {
        &plan.workloads[self.workload]
    }
}

/// The requests of a seed, as they arrive at the gateway.
pub(super) struct Offered {
    /// What the gateway sees.
    arrivals: Vec<Arrival>,
    /// With a link: what the gateway does not see.
    carried: Option<link::Carried>,
}

impl Offered {
    pub fn new(plan: &ServingPlan, setup: &Setup, cell: &Cell, seed: u64) -> Self {
        let arrivals = cell.run.arrivals(setup, seed);
        let (Some(link), Some(Some(scheduler))) = (&plan.link, plan.schedulers().get(cell.scheduler).copied()) else {
            return Self { arrivals, carried: None };
        };
        let (arrivals, carried) = link::up(plan, link, scheduler, arrivals, seed);
        Self { arrivals, carried: Some(carried) }
    }

    /// Returns the requests, in the order in which the gateway receives them.
    pub fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Returns a policy's answers to the requests, in the order in which they were sent.
    pub fn answered(&self, setup: &Setup, policy: &plan::Policy, choose: RoutingPolicy) -> Vec<Answered> {
        self.played(setup, choose, policy.guarded, policy.blind)
    }

    pub fn played(&self, setup: &Setup, policy: RoutingPolicy, guarded: bool, blind: bool) -> Vec<Answered> {
        let router = Router::new(setup.models.clone(), policy);
        let mut router = Asked { router: if guarded { router } else { router.unguarded() }, blind, setup };
        let outcomes = serving::run(setup, &self.arrivals, &mut router);
        if let Some(carried) = &self.carried {
            return carried.back(setup, &self.arrivals, &outcomes);
        }
        outcomes.iter().map(answered).collect()
    }
}

fn answered(outcome: &RunOutcome) -> Answered {
    Answered {
        task: outcome.class,
        model: outcome.choice.map(|choice| choice.model),
        met: outcome.fate == Fate::Met,
        reward: f64::from(outcome.reward),
    }
}

/// Returns the mean score of requests, weighted by their tasks.
pub(super) fn score(plan: &ServingPlan, answered: &[Answered]) -> f64 {
    let weight = |one: &Answered| plan.tasks.get(one.task).map_or(1.0, |task| f64::from(task.weight));
    let sum: f64 = answered.iter().map(|one| weight(one) * one.reward).sum();
    sum / answered.iter().map(weight).sum::<f64>().max(1e-9)
}

/// A router that may be prevented from knowing about the network.
struct Asked<'a> {
    router: Router,
    blind: bool,
    setup: &'a Setup,
}

impl Decide for Asked<'_> {
    fn decide(&mut self, request: &RoutedRequest, state: &State<'_>, now_ns: u64) -> Option<ModelChoice> {
        if !self.blind {
            return self.router.decide(request, state, now_ns);
        }
        let slo = Slo::normalised(self.setup.per_token_ns, request.tokens());
        self.router.decide(&RoutedRequest { slo, ..*request }, &State { path: ClientPath::default(), ..*state }, now_ns)
    }

    fn ended(&mut self, outcome: &RunOutcome) {
        self.router.ended(outcome);
    }
}
