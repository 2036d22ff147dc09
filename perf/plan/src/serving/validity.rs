//! Checks of plans of model serving.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use sched::route::serving;

use super::{Choose, Goals, Heavy, Lengths, Link, Published, ServingPlan, Workload};
use crate::{MAX_REPETITIONS, named_once};

/// The metrics of results. Metrics of windows, selected models and tasks also name the window, model or task.
pub const METRICS: &[&str] = &["score", "met_pct", "over_best_model", "windows", "selected_pct"];

impl ServingPlan {
    /// Checks what the types alone do not rule out.
    pub(super) fn check(&self) -> Result<()> {
        self.check_setup()?;
        if let Some(link) = &self.link {
            self.check_link(link)?;
        }
        let learned = || {
            let tuned = self.tuned.iter().map(|(name, recipe)| (name, recipe.trainings, &recipe.learns_from));
            tuned.chain(self.dqn.iter().map(|(name, recipe)| (name, recipe.trainings, &recipe.learns_from)))
        };
        for (name, trainings, learns_from) in learned() {
            ensure!((1..=100).contains(&trainings), "recipe {name}: `trainings` is between 1 and 100");
            ensure!(!learns_from.is_empty(), "recipe {name}: `learns_from` names at least one workload");
            for from in learns_from {
                let known = self.workloads.iter().any(|workload| workload.name == *from);
                ensure!(known, "recipe {name}: no workload {from}");
            }
        }
        for (name, recipe) in &self.dqn {
            let sound = recipe.updates > 0 && recipe.batch > 0 && !recipe.hidden.contains(&0);
            ensure!(sound, "recipe {name}: `updates`, `batch` and `hidden` are at least 1");
            ensure!((0.0..=1.0).contains(&recipe.gamma), "recipe {name}: `gamma` is within 0 to 1");
        }
        self.check_seeds()?;
        self.check_goals()?;
        let names: BTreeSet<_> = self.policies.iter().map(|policy| policy.name.as_str()).collect();
        ensure!(!names.is_empty(), "policies: at least one");
        ensure!(names.len() == self.policies.len(), "policies: two have the same name");
        for policy in &self.policies {
            let name = &policy.name;
            match &policy.choose {
                Choose::Fixed(model) => ensure!(self.model(model).is_some(), "policy {name}: no model {model}"),
                Choose::Rule(margin) => ensure!((1.0..=10.0).contains(margin), "policy {name}: margin within 1 to 10"),
                Choose::Tuned(recipe) => ensure!(self.tuned.contains_key(recipe), "policy {name}: no [tuned.{recipe}]"),
                Choose::Dqn(recipe) => ensure!(self.dqn.contains_key(recipe), "policy {name}: no [dqn.{recipe}]"),
                Choose::RoundRobin | Choose::LeastLoaded => {}
            }
        }
        for Published { workload, policy, metric, .. } in &self.published {
            let known = self.workloads.iter().any(|known| known.name == *workload);
            ensure!(known, "published: no workload {workload}");
            ensure!(names.contains(policy.as_str()), "published: no policy {policy}");
            let kind = metric.split('_').next().unwrap_or_default();
            let known = METRICS.contains(&metric.as_str()) || METRICS.contains(&kind);
            ensure!(known, "published: no metric {metric}; known: {}", METRICS.join(", "));
        }
        Ok(())
    }

    fn check_setup(&self) -> Result<()> {
        ensure!((1..=1_024).contains(&self.gpus), "gpus: between 1 and 1024");
        ensure!((0.0..=10.0).contains(&self.sharing), "sharing: within 0 to 10");
        ensure!(self.per_token_ms > 0.0 && self.per_token_ms.is_finite(), "per_token_ms: above 0");
        ensure!(self.window > 0, "window: at least 1");
        ensure!((0.0..=10.0).contains(&self.gap_variation), "gap_variation: within 0 to 10");
        ensure!((1..=64).contains(&self.models.len()), "models: between 1 and 64");
        ensure!((1..=256).contains(&self.tasks.len()), "tasks: between 1 and 256");
        let (tasks, models) = (self.tasks.len(), self.models.len());
        let names: BTreeSet<_> = self.tasks.iter().map(|task| task.name.as_str()).collect();
        ensure!(names.len() == tasks, "tasks: two have the same name");
        let names: BTreeSet<_> = self.models.iter().map(|model| model.name.as_str()).collect();
        ensure!(names.len() == models, "models: two have the same name");
        for model in &self.models {
            let rewards = model.rewards.iter().all(|reward| (0.0..=1.0).contains(reward));
            ensure!(
                rewards && model.rewards.len() == tasks,
                "model {}: a reward from 0 to 1 for each task",
                model.name
            );
            let times = [model.host_ms, model.gpu_ms, model.gpu_per_sequence_ms, model.prefill_ms];
            let sound = times.iter().chain([&model.prefill_per_token_ms]).all(|ms| (0.0..=60_000.0).contains(ms));
            ensure!(sound && model.most_running > 0, "model {}: times within 0 to 60000, batches of 1", model.name);
        }
        let Lengths { prompt_tokens, output_tokens, sigma, known: _ } = self.lengths;
        ensure!((1.0..=1e6).contains(&prompt_tokens), "lengths.prompt_tokens: within 1 to 1000000");
        let answers = serving::Workload::ANSWER_TOKENS;
        let (shortest, longest) = (answers.start(), answers.end());
        ensure!(
            answers.contains(&output_tokens),
            "lengths.output_tokens: within {shortest} to {longest}, to which each answer is cut"
        );
        ensure!((0.0..=3.0).contains(&sigma), "lengths.sigma: within 0 to 3");
        let names: BTreeSet<_> = self.workloads.iter().map(|workload| workload.name.as_str()).collect();
        ensure!(!names.is_empty(), "workloads: at least one");
        ensure!(names.len() == self.workloads.len(), "workloads: two have the same name");
        for workload in &self.workloads {
            if let Some(mistake) = workload.mistake() {
                anyhow::bail!("workload {}: {mistake}", workload.name);
            }
        }
        if let Some(latency) = &self.latency {
            let times = [latency.one_way_ms, latency.extra_up_ms, latency.extra_back_ms, latency.grace_ms];
            ensure!(times.iter().all(|ms| (0.0..=600_000.0).contains(ms)), "latency: times within 0 to 600000");
            ensure!((0.0..=1.0).contains(&latency.congested), "latency.congested: a share from 0 to 1");
            ensure!(self.link.is_none(), "latency: not together with a link, which has its own");
        }
        Ok(())
    }

    fn check_link(&self, link: &Link) -> Result<()> {
        ensure!(link.rate_mbit > 0.0 && link.rate_mbit.is_finite(), "link.rate_mbit: above 0");
        ensure!((0.0..=0.9).contains(&link.loss), "link.loss: a share from 0 to 0.9");
        ensure!((0.0..=60_000.0).contains(&link.delay_ms), "link.delay_ms: within 0 to 60000");
        ensure!(link.bytes_per_prompt_token > 0.0, "link.bytes_per_prompt_token: above 0");
        ensure!(link.bytes_per_token > 0.0, "link.bytes_per_token: above 0");
        ensure!(!link.schedulers.is_empty(), "link.schedulers: at least one");
        named_once(link.schedulers.iter().map(|scheduler| scheduler.name())).context("link.schedulers")?;
        for scheduler in &link.schedulers {
            let known = scheduler.of_streams().is_some() && !scheduler.is_of_packets();
            ensure!(known, "link.schedulers: {} does not order streams on a simulated link", scheduler.name());
        }
        for task in &self.tasks {
            ensure!(!task.classes.is_empty(), "task {}: `classes` is missing", task.name);
            for class in &task.classes {
                let known = link.classes.iter().find(|known| known.name == *class);
                ensure!(known.is_some(), "task {}: no class {class}", task.name);
                let timed = known.is_some_and(|class| class.deadline_ms.is_some() && class.bytes > 0);
                ensure!(timed, "class {class}: `bytes` and `deadline_ms` are missing");
            }
        }
        Ok(())
    }

    fn check_goals(&self) -> Result<()> {
        let Goals { below_best, heavy, edf_score } = &self.goals;
        let shares = [("below_best", below_best), ("edf_score", edf_score)];
        for (name, share) in shares.into_iter().filter_map(|(name, share)| Some((name, (*share)?))) {
            ensure!((0.0..=1.0).contains(&share), "goals.{name}: a score from 0 to 1");
        }
        if let Some(Heavy { rate, met_pct, reason: _ }) = heavy {
            let is_played = self.workloads.iter().flat_map(Workload::runs).any(|(of, _)| of == Some(*rate));
            ensure!(is_played, "goals.heavy.rate: no workload has this steady rate");
            ensure!((0.0..=100.0).contains(met_pct), "goals.heavy.met_pct: within 0 to 100");
        }
        Ok(())
    }

    fn check_seeds(&self) -> Result<()> {
        let most = |trainings: &mut dyn Iterator<Item = u64>| trainings.max().unwrap_or(0);
        let seeds = self.seeds;
        let several = 2..=MAX_REPETITIONS;
        ensure!(
            several.contains(&seeds.evaluations),
            "seeds.evaluations: between 2, for an interval, and {MAX_REPETITIONS}"
        );
        let mut ranges = [
            (seeds.evaluation, seeds.evaluations),
            (seeds.tuning, most(&mut self.tuned.values().map(|recipe| recipe.trainings))),
            (seeds.training, most(&mut self.dqn.values().map(|recipe| recipe.trainings))),
        ];
        ranges.sort_unstable();
        let apart = ranges.windows(2).all(|pair| pair[0].0.saturating_add(pair[0].1) <= pair[1].0);
        ensure!(apart, "seeds: ranges overlap, so results would cover seeds used in training");
        Ok(())
    }
}
