//! The policies before a run: unchanged, tuned, or trained.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use plan::serving::{Choose, ServingPlan, Tuned};
use sched::route::{
    RoutingPolicy, Thresholds,
    serving::{self, Setup},
    train::double_dqn,
    tune::cross_entropy,
};

use super::play::{Cell, Offered, score};

/// Returns for each policy of the plan its results after each of its trainings in `setup`; a policy that learns nothing appears once.
///
/// Trainings run on all cores. Each depends only on its own seed, so their order does not matter.
pub(super) fn all(plan: &ServingPlan, setup: &Setup) -> Vec<Vec<RoutingPolicy>> {
    let trainings = |choose: &Choose| match choose {
        Choose::Tuned(recipe) => plan.tuned.get(recipe).map_or(0, |recipe| recipe.trainings),
        Choose::Dqn(recipe) => plan.dqn.get(recipe).map_or(0, |recipe| recipe.trainings),
        _ => 1,
    };
    // Two policies of one recipe, one of them guarded, have the same trainings.
    let mut jobs: Vec<(&Choose, u64)> = Vec::new();
    for policy in &plan.policies {
        let wanted = (0..trainings(&policy.choose)).map(|training| (&policy.choose, training));
        for job in wanted {
            if !jobs.contains(&job) {
                jobs.push(job);
            }
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((choose, training)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push(((*choose, *training), learned(plan, setup, choose, *training)));
        }
        done
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let done: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a training does not panic")).collect()
    });
    let find = |job: (&Choose, u64)| done.iter().find(|(of, _)| *of == job).map(|(_, policy)| policy.clone());
    let of_policy = |choose| (0..trainings(choose)).filter_map(|training| find((choose, training))).collect();
    plan.policies.iter().map(|policy| of_policy(&policy.choose)).collect()
}

fn learned(plan: &ServingPlan, setup: &Setup, choose: &Choose, training: u64) -> RoutingPolicy {
    match choose {
        Choose::Fixed(model) => RoutingPolicy::Fixed(plan.model(model).unwrap_or_default()),
        Choose::RoundRobin => RoutingPolicy::RoundRobin,
        Choose::LeastLoaded => RoutingPolicy::LeastLoaded,
        Choose::Rule(margin) => RoutingPolicy::Rule { margin: *margin },
        Choose::Tuned(recipe) => {
            let tuned = plan.tuned.get(recipe).map(|recipe| tuned(plan, setup, recipe, training));
            tuned.map_or(RoutingPolicy::RoundRobin, RoutingPolicy::Thresholds)
        }
        Choose::Dqn(recipe) => {
            let Some(recipe) = plan.dqn.get(recipe) else { return RoutingPolicy::RoundRobin };
            let training = recipe.training(plan.gpus, plan.seeds.training + training);
            RoutingPolicy::Dqn(double_dqn(setup, &workloads(plan, &recipe.learns_from), &training).dqn)
        }
    }
}

fn workloads(plan: &ServingPlan, names: &[String]) -> Vec<serving::Workload> {
    let named = plan.workloads.iter().filter(|workload| names.contains(&workload.name));
    named.flat_map(|workload| workload.runs()).map(|(_, run)| run).collect()
}

/// Tunes for the mean score over workloads, each request by its weight. The guard is off: tuned thresholds have to be good without
/// it. With a link, each workload is played under one of the link's schedulers, in turns.
fn tuned(plan: &ServingPlan, setup: &Setup, recipe: &Tuned, training: u64) -> Thresholds {
    let (models, tasks) = (setup.models.len(), setup.classes());
    let start = Thresholds::uniform(recipe.measure.measure(), models, tasks, 0.9);
    let deviations = [(models * tasks, 0.2), (models, 0.4), (1, 0.2)];
    let spread: Vec<f64> = deviations.into_iter().flat_map(|(count, spread)| vec![spread; count]).collect();
    let cells: Vec<_> =
        Cell::all(plan).into_iter().filter(|cell| recipe.learns_from.contains(&cell.workload(plan).name)).collect();
    let schedulers = plan.schedulers().len();
    let (mut played, mut generation) = (None, 0);
    let mut offered = Vec::new();
    let search = recipe.search(plan.seeds.tuning + training);
    let numbers = cross_entropy(&search, &start.parameters(), &spread, |numbers, seed| {
        if played != Some(seed) {
            played = Some(seed);
            generation += 1;
            // Cells are ordered by workload, then by rate, then by scheduler.
            let turns = cells.chunks(schedulers).enumerate();
            let drawn = turns.filter_map(|(at, cells)| cells.get((at + generation) % schedulers));
            offered = (0..).zip(drawn).map(|(at, cell)| Offered::new(plan, setup, cell, seed ^ at)).collect();
        }
        let policy = RoutingPolicy::Thresholds(start.clone().with_parameters(numbers));
        let scores = offered.iter().map(|offered| score(plan, &offered.played(setup, policy.clone(), false, false)));
        scores.sum::<f64>() / offered.len().max(1) as f64
    });
    start.with_parameters(&numbers)
}
