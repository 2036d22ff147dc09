//! Runs [plans of model serving](plan::serving).
//!
//! A cell is a workload (at one of its rates, if it has several) under a scheduler of the link, if there is one. In each
//! cell every policy answers the same requests, for each seed; each figure over seeds has an interval. Policies that learn
//! do so beforehand, from their own seeds, and several times: their figure for a seed is the mean over their trainings,
//! and results also show the least and the greatest of the trainings' own means.

mod answer;
mod figures;
mod learn;
mod link;
mod pictures;
mod play;
pub mod processes;
mod row;
mod tables;
mod windows;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use plan::serving::ServingPlan;

use self::{
    figures::Figures,
    play::{Cell, Offered},
    row::ByPolicy,
};
pub use self::{
    pictures::{Picture, pictures},
    row::Row,
    tables::tables,
};

/// Trains the policies that learn, plays everything, and returns the rows of results, in the order of the plan.
///
/// # Errors
/// When there are fewer than two seeds, or `only` names no policy of the plan.
pub fn run(plan: &ServingPlan, only: &[String]) -> Result<Vec<Row>> {
    Ok(run_and_draw(plan, only)?.0)
}

/// Runs a plan as [`run`] does, and draws what rows do not tell: how each policy scores from request to request of the first seed, where
/// windows of requests are counted. Returns these pictures with their names, as [`pictures()`] does.
///
/// # Errors
/// As [`run`].
pub fn run_and_draw(plan: &ServingPlan, only: &[String]) -> Result<(Vec<Row>, Vec<Picture>)> {
    ensure!(plan.seeds.evaluations >= 2, "an interval needs at least two seeds");
    for name in only {
        let known = plan.policies.iter().any(|policy| policy.name == *name);
        ensure!(known, "no policy {name} in plan {}", plan.name);
    }
    let mut plan = plan.clone();
    plan.policies.retain(|policy| only.is_empty() || only.contains(&policy.name));
    let setup = plan.setup();
    let learned = learn::all(&plan, &plan.training_setup(&setup));
    let (mut rows, mut drawn) = (Vec::new(), Vec::new());
    // By workload and scheduler, for means over rates.
    let mut rates: BTreeMap<(usize, usize), (Cell, Vec<ByPolicy>)> = BTreeMap::new();
    for cell in Cell::all(&plan) {
        let mut by_policy: ByPolicy = vec![Vec::new(); plan.policies.len()];
        for seed in plan.seeds.evaluation..plan.seeds.evaluation + plan.seeds.evaluations {
            let offered = Offered::new(&plan, &setup, &cell, seed);
            for ((policy, trainings), figures) in plan.policies.iter().zip(&learned).zip(&mut by_policy) {
                let of_each = trainings.iter().map(|training| {
                    let answered = offered.answered(&setup, policy, training.clone());
                    Figures::of(&plan, cell.workload(&plan), &answered)
                });
                figures.push(of_each.collect::<Vec<_>>());
            }
        }
        rows.extend(row::of_cell(&plan, &cell, &by_policy));
        drawn.extend(windows::picture(&plan, &setup, &cell, &learned));
        if cell.rate.is_some() {
            rates.entry((cell.workload, cell.scheduler)).or_insert((cell, Vec::new())).1.push(by_policy);
        }
    }
    rows.extend(rates.values().flat_map(|(cell, by_rate)| row::over_rates(&plan, cell, by_rate)));
    Ok((rows, drawn))
}

#[cfg(test)]
mod tests;
