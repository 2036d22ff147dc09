//! Checks of plans of model serving.

use anyhow::{Context as _, Result, ensure};
use sched::route::{Cost, serving};

use super::{Choose, Goals, Heavy, Lengths, Link, Published, ServingPlan, Task, Workload};
use crate::{
    MAX_REPETITIONS,
    bounds::{MAX_DELAY_MS, RATES_MBIT, entries, names, within},
    named_once,
};

/// The metrics of results. Metrics of windows, selected models and tasks also name the window, model or task.
pub const METRICS: &[&str] = &["score", "met_pct", "over_best_model", "windows", "selected_pct"];

/// Returns the largest value of a metric that is a share, or `None` if it is no share. As [`whole`](crate::whole).
#[must_use]
pub fn whole(metric: &str) -> Option<f64> {
    match metric {
        "score" => Some(1.0),
        _ => (metric == "met_pct" || metric.starts_with("selected_pct")).then_some(100.0),
    }
}

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
            within(format_args!("recipe {name}: `trainings`"), trainings, 1..=100)?;
            ensure!(!learns_from.is_empty(), "recipe {name}: `learns_from` is empty; name at least one workload");
            for from in learns_from {
                let known = self.workloads.iter().any(|workload| workload.name == *from);
                ensure!(known, "recipe {name}: `learns_from` names {from}, and there is no such workload");
            }
        }
        self.tuned.iter().try_for_each(|(name, recipe)| recipe.check(name))?;
        self.dqn.iter().try_for_each(|(name, recipe)| recipe.check(name))?;
        self.check_seeds()?;
        self.check_goals()?;
        ensure!(!self.policies.is_empty(), "policies: at least one");
        names("policies", self.policies.iter().map(|policy| policy.name.as_str()))?;
        for policy in &self.policies {
            let name = &policy.name;
            match &policy.choose {
                Choose::Fixed(model) => ensure!(self.model(model).is_some(), "policy {name}: no model {model}"),
                Choose::Rule(margin) => within(format_args!("policy {name}: `rule`"), *margin, 1.0..=10.0)?,
                Choose::Tuned(recipe) => ensure!(self.tuned.contains_key(recipe), "policy {name}: no [tuned.{recipe}]"),
                Choose::Dqn(recipe) => ensure!(self.dqn.contains_key(recipe), "policy {name}: no [dqn.{recipe}]"),
                Choose::RoundRobin | Choose::LeastLoaded => {}
            }
        }
        for Published { workload, policy, metric, .. } in &self.published {
            let known = self.workloads.iter().any(|known| known.name == *workload);
            ensure!(known, "published: no workload {workload}");
            let known = self.policies.iter().any(|known| known.name == *policy);
            ensure!(known, "published: no policy {policy}");
            let kind = metric.split('_').next().unwrap_or_default();
            let known = METRICS.contains(&metric.as_str()) || METRICS.contains(&kind);
            ensure!(known, "published: no metric {metric}; known: {}", METRICS.join(", "));
        }
        Ok(())
    }

    fn check_setup(&self) -> Result<()> {
        within("gpus", self.gpus, 1..=1_024)?;
        within("sharing", self.sharing, 0.0..=Cost::MAX_SHARING)?;
        within("per_token_ms", self.per_token_ms, 0.001..=60_000.0)?;
        within("window", self.window, 1..=1_000_000)?;
        within("gap_variation", self.gap_variation, 0.0..=10.0)?;
        entries("models", self.models.len(), 1..=64)?;
        entries("tasks", self.tasks.len(), 1..=256)?;
        names("tasks", self.tasks.iter().map(|task| task.name.as_str()))?;
        names("models", self.models.iter().map(|model| model.name.as_str()))?;
        for Task { name, weight, .. } in &self.tasks {
            within(format_args!("task {name}: `weight`"), *weight, 0.0..=1_000.0)?;
        }
        for model in &self.models {
            let name = &model.name;
            let (rewards, tasks) = (model.rewards.len(), self.tasks.len());
            ensure!(rewards == tasks, "model {name}: `rewards` has {rewards} numbers, but there are {tasks} tasks");
            for reward in &model.rewards {
                within(format_args!("model {name}: `rewards`"), *reward, 0.0..=1.0)?;
            }
            for (key, ms) in [
                ("host_ms", model.host_ms),
                ("gpu_ms", model.gpu_ms),
                ("gpu_per_sequence_ms", model.gpu_per_sequence_ms),
                ("prefill_ms", model.prefill_ms),
                ("prefill_per_token_ms", model.prefill_per_token_ms),
            ] {
                within(format_args!("model {name}: `{key}`"), ms, 0.0..=60_000.0)?;
            }
            within(format_args!("model {name}: `most_running`"), model.most_running, 1..=1_000_000)?;
        }
        let Lengths { prompt_tokens, output_tokens, sigma, known: _ } = self.lengths;
        within("lengths.prompt_tokens", prompt_tokens, 1.0..=1e6)?;
        // Each answer is cut to these.
        within("lengths.output_tokens", output_tokens, serving::Workload::ANSWER_TOKENS)?;
        within("lengths.sigma", sigma, 0.0..=3.0)?;
        ensure!(!self.workloads.is_empty(), "workloads: at least one");
        names("workloads", self.workloads.iter().map(|workload| workload.name.as_str()))?;
        self.workloads.iter().try_for_each(Workload::check)?;
        let Some(latency) = &self.latency else { return Ok(()) };
        for (key, ms) in [
            ("one_way_ms", latency.one_way_ms),
            ("extra_up_ms", latency.extra_up_ms),
            ("extra_back_ms", latency.extra_back_ms),
            ("grace_ms", latency.grace_ms),
        ] {
            within(format_args!("latency.{key}"), ms, 0.0..=600_000.0)?;
        }
        within("latency.congested", latency.congested, 0.0..=1.0)?;
        ensure!(self.link.is_none(), "latency: not together with a link, which has its own; leave one out");
        Ok(())
    }

    fn check_link(&self, link: &Link) -> Result<()> {
        within("link.rate_mbit", link.rate_mbit, RATES_MBIT)?;
        within("link.loss", link.loss, 0.0..=0.9)?;
        within("link.delay_ms", link.delay_ms, 0.0..=MAX_DELAY_MS)?;
        within("link.bytes_per_prompt_token", link.bytes_per_prompt_token, 0.001..=1e6)?;
        within("link.bytes_per_token", link.bytes_per_token, 0.001..=1e6)?;
        names("link.classes", link.classes.iter().map(|class| class.name.as_str()))?;
        link.classes.iter().try_for_each(|class| class.check().context("link.classes"))?;
        ensure!(!link.schedulers.is_empty(), "link.schedulers: at least one");
        named_once(link.schedulers.iter().map(|scheduler| scheduler.name())).context("link.schedulers")?;
        for scheduler in &link.schedulers {
            let known = scheduler.of_streams().is_some() && !scheduler.is_of_packets();
            ensure!(known, "link.schedulers: {} does not order streams on a simulated link", scheduler.name());
        }
        for task in &self.tasks {
            ensure!(
                !task.classes.is_empty(),
                "task {}: `classes` is missing, which a plan with a link needs",
                task.name
            );
            for class in &task.classes {
                let known = link.classes.iter().find(|known| known.name == *class);
                let known = known.with_context(|| format!("task {}: no class {class} in link.classes", task.name))?;
                ensure!(known.deadline_ms.is_some(), "class {class}: `deadline_ms` is missing");
            }
        }
        Ok(())
    }

    fn check_goals(&self) -> Result<()> {
        let Goals { below_best, heavy, edf_score } = &self.goals;
        let shares = [("below_best", below_best), ("edf_score", edf_score)];
        for (name, share) in shares.into_iter().filter_map(|(name, share)| Some((name, (*share)?))) {
            within(format_args!("goals.{name}"), share, 0.0..=1.0)?;
        }
        if let Some(Heavy { rate, met_pct, reason: _ }) = heavy {
            let is_played = self.workloads.iter().flat_map(Workload::runs).any(|(of, _)| of == Some(*rate));
            ensure!(is_played, "goals.heavy.rate: {rate}, and no workload has this steady rate");
            within("goals.heavy.met_pct", *met_pct, 0.0..=100.0)?;
        }
        Ok(())
    }

    fn check_seeds(&self) -> Result<()> {
        let most = |trainings: &mut dyn Iterator<Item = u64>| trainings.max().unwrap_or(0);
        let seeds = self.seeds;
        // An interval needs two.
        within("seeds.evaluations", seeds.evaluations, 2..=MAX_REPETITIONS)?;
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
