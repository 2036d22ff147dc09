//! Plans that check the simulator of model serving: the same requests to simulated engines, and to real processes with emulated engines.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use toml::Table;

use super::{
    Varied as _, Verdict,
    bounds::within,
    clock::Clock,
    file::PlanFile,
    serving::{Arrivals, Choose, Latency, Seeds, ServingPlan},
    variants,
};

/// One comparison of the simulator with processes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessesPlan {
    /// The name, the same as the file's.
    pub name: String,
    /// Distinguishes it from other kinds of plans.
    pub kind: Kind,
    /// What the plan measures, in a sentence.
    pub title: String,
    /// The publication that it follows, or `none` and the reason if there is none.
    pub source: String,
    /// The name of the plan of model serving whose simulation is compared.
    pub serving: String,
    /// What changes in that plan, with its structure.
    pub changes: Table,
    /// How many times as fast as in that plan everything happens: arrivals, engines and deadlines, simulated and real.
    pub faster: f64,
    /// The link between edge and gateway.
    pub link: Link,
    /// What happens before the first request that counts.
    pub warm_up: WarmUp,
    /// What its results say about the published claims.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// The plan of model serving with the changes, at its own speed.
    #[serde(skip)]
    base: Option<Box<ServingPlan>>,
    /// The TOML table that it was parsed from, with the changed plan.
    #[serde(skip)]
    table: Table,
}

/// The kind of a plan.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Processes beside the simulator of model serving.
    Processes,
}

/// A link, the same in both directions.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its rate, in Mbit/s of Ethernet frames.
    pub rate_mbit: f64,
    /// How long a packet may wait in the queue in front of it.
    pub queue_ms: u32,
    /// How long a packet travels in the lab, whose kernel has `netem`. On other clocks, the link has no delay.
    pub lab_delay_ms: f64,
}

/// Requests that do not count: a gateway learns from them how fast its engines are. The simulated router knows that.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmUp {
    /// How often each model is asked: at first one request for each of its engines at once, the next time two, and so on.
    pub rounds: u32,
    /// How many tokens each answer has.
    pub tokens: u32,
}

impl ProcessesPlan {
    /// Parses a plan, and reads the plan of model serving that it names.
    ///
    /// # Errors
    /// The mistake, with its line if it has one.
    pub fn from_toml(text: &str) -> Result<Self> {
        let mut plan: Self = toml::from_str(text)?;
        let file = PlanFile::read(&plan.serving)?;
        ensure!(file.is_of("serving")?, "serving: {} is no plan of model serving", plan.serving);
        let of = file.parse(ServingPlan::from_toml, |plan| &plan.name)?;
        let mut changed = of.table().clone();
        variants::merge(&mut changed, &plan.changes);
        // They are about the other plan's results.
        for key in ["published", "goals", "verdicts"] {
            changed.remove(key);
        }
        let base: ServingPlan = changed.clone().try_into().context("changes")?;
        base.validate().context("changes")?;
        plan.table = toml::from_str(text)?;
        plan.table.insert("changes".to_owned(), toml::Value::String(variants::fingerprint(&changed)));
        plan.base = Some(Box::new(base));
        plan.check()?;
        Ok(plan)
    }

    /// The seeds of the evaluation.
    #[must_use]
    pub fn seeds(&self) -> Option<Seeds> {
        self.base.as_ref().map(|base| base.seeds)
    }

    /// Returns the plan of model serving as it is simulated on a clock: with the changes, at this plan's speed, with the link's
    /// delay.
    ///
    /// # Errors
    /// None for a plan that was [parsed](Self::from_toml).
    pub fn simulated(&self, clock: Clock) -> Result<ServingPlan> {
        let mut plan = self.base.as_deref().context("the plan was not parsed")?.clone();
        let faster = self.faster;
        plan.name.clone_from(&self.name);
        plan.per_token_ms /= faster;
        for model in &mut plan.models {
            let times = [&mut model.host_ms, &mut model.gpu_ms, &mut model.gpu_per_sequence_ms];
            let prompts = [&mut model.prefill_ms, &mut model.prefill_per_token_ms];
            times.into_iter().chain(prompts).for_each(|ms| *ms /= faster);
        }
        for workload in &mut plan.workloads {
            match &mut workload.arrivals {
                Arrivals::Stable { rates, duration_s } => {
                    rates.iter_mut().for_each(|rate| *rate *= faster);
                    *duration_s /= faster;
                }
                Arrivals::Bursts { rates, .. } => rates.iter_mut().for_each(|rate| *rate *= faster),
                // Refused by the check.
                Arrivals::Diurnal { .. } | Arrivals::Spikes { .. } => {}
            }
        }
        let one_way_ms = self.delay_ms(clock);
        plan.latency = (one_way_ms > 0.0).then_some(Latency {
            one_way_ms,
            congested: 0.0,
            extra_up_ms: 0.0,
            extra_back_ms: 0.0,
            grace_ms: 0.0,
        });
        Ok(plan)
    }

    /// How long a packet travels over the link on a clock.
    #[must_use]
    pub fn delay_ms(&self, clock: Clock) -> f64 {
        if clock == Clock::Lab { self.link.lab_delay_ms } else { 0.0 }
    }

    /// Returns eight hexadecimal digits that differ between texts of the plan that differ in meaning; see
    /// [`Plan::fingerprint`](super::Plan::fingerprint).
    #[must_use]
    pub fn fingerprint(&self) -> String {
        variants::fingerprint(&self.table)
    }

    fn check(&self) -> Result<()> {
        within("faster", self.faster, 0.1..=100.0)?;
        let Link { rate_mbit, queue_ms, lab_delay_ms } = self.link;
        within("link.rate_mbit", rate_mbit, 0.1..=10_000.0)?;
        within("link.queue_ms", queue_ms, 1..=10_000)?;
        within("link.lab_delay_ms", lab_delay_ms, 0.0..=1_000.0)?;
        let WarmUp { rounds, tokens } = self.warm_up;
        within("warm_up.rounds", rounds, 1..=32)?;
        within("warm_up.tokens", tokens, 2..=1_000)?;
        let Some(base) = self.base.as_deref() else { return Ok(()) };
        ensure!(
            base.latency.is_none() && base.link.is_none(),
            "changes: `latency` and `link` are this plan's own; name a plan of model serving without them"
        );
        ensure!(
            !base.discards,
            "`discards` of the plan of model serving is true, but engines discard nothing; set `changes.discards`"
        );
        ensure!(
            !base.lengths.known,
            "`lengths.known` of the plan of model serving is true, but lengths are not known; set `changes.lengths.known`"
        );
        // Each engine is a thread.
        within("`gpus` of the plan of model serving (see `changes.gpus`)", base.gpus, 1..=16)?;
        for workload in &base.workloads {
            let is_known = matches!(workload.arrivals, Arrivals::Stable { .. } | Arrivals::Bursts { .. });
            ensure!(is_known, "workload {}: only `stable` and `bursts` can be made faster", workload.name);
        }
        for policy in &base.policies {
            let name = &policy.name;
            let is_fixed = matches!(policy.choose, Choose::Fixed(_));
            ensure!(
                policy.guarded != is_fixed,
                "policy {name}: `guarded` is {}, but the product guards all policies, and no fixed model",
                policy.guarded
            );
            ensure!(!policy.blind, "policy {name}: `blind` is true, but the product's policies know the path");
            let trainings = match &policy.choose {
                Choose::Tuned(recipe) => base.tuned.get(recipe).map(|recipe| recipe.trainings),
                Choose::Dqn(recipe) => base.dqn.get(recipe).map(|recipe| recipe.trainings),
                Choose::Rule(margin) => {
                    let product = f64::from(sched::route::MARGIN_PERCENT) / 100.0;
                    let is_products = (margin - product).abs() < 1e-9;
                    ensure!(is_products, "policy {name}: `rule` is {margin}, but the product's margin is {product}");
                    None
                }
                Choose::Fixed(_) | Choose::RoundRobin | Choose::LeastLoaded => None,
            };
            within(format_args!("policy {name}: `trainings` of its recipe"), trainings.unwrap_or(1), 1..=1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> String {
        std::fs::read_to_string(format!("{}/routing-processes.toml", crate::file::FOLDER)).unwrap()
    }

    #[test]
    fn a_faster_plan_has_the_same_requests_in_less_time() {
        let text = text();
        let faster = |times: &str| {
            let changed = text.lines().map(|line| if line.starts_with("faster = ") { times } else { line });
            ProcessesPlan::from_toml(&changed.collect::<Vec<_>>().join("\n")).unwrap()
        };
        let [one, four] = ["faster = 1", "faster = 4"].map(faster);
        assert_ne!(one.fingerprint(), four.fingerprint());
        let plans = [one, four].map(|plan| plan.simulated(Clock::Native).unwrap());
        let setups = plans.each_ref().map(ServingPlan::setup);
        for (slow, fast) in plans[0].workloads.iter().zip(&plans[1].workloads) {
            for ((_, slow), (_, fast)) in slow.runs().into_iter().zip(fast.runs()) {
                let [slow, fast] = [slow.arrivals(&setups[0], 3), fast.arrivals(&setups[1], 3)];
                assert!(!slow.is_empty());
                assert_eq!(slow.len(), fast.len());
                for (slow, fast) in slow.iter().zip(&fast) {
                    assert!(slow.sent_ns.abs_diff(4 * fast.sent_ns) < 1_000_000, "{slow:?} {fast:?}");
                    assert!((slow.deadline_ns - slow.sent_ns).abs_diff(4 * (fast.deadline_ns - fast.sent_ns)) < 4);
                    assert_eq!(slow.output_tokens, fast.output_tokens);
                    assert_eq!(slow.request.class, fast.request.class);
                }
            }
        }
        let costs = setups.map(|setup| setup.engines[0].cost);
        assert!((costs[0].gpu_ns / costs[1].gpu_ns - 4.0).abs() < 1e-9);
    }

    #[test]
    fn the_delay_of_the_lab_is_simulated_there_and_nowhere_else() {
        let plan = ProcessesPlan::from_toml(&text()).unwrap();
        assert!(plan.simulated(Clock::Native).unwrap().latency.is_none());
        let latency = plan.simulated(Clock::Lab).unwrap().latency.unwrap();
        assert!(latency.one_way_ms == plan.link.lab_delay_ms && latency.congested == 0.0);
    }

    #[test]
    fn plans_that_the_product_cannot_run_are_refused() {
        let text = text();
        for (from, to, said) in [
            ("serving = \"routing-fig4-6\"", "serving = \"mptcp\"", "no plan of model serving"),
            ("serving = \"routing-fig4-6\"", "serving = \"routing-table3-4\"", "changes"),
            ("choose.rule = 1.2", "choose.rule = 1.1", "margin"),
            ("choose.rule = 1.2\nguarded = true", "choose.rule = 1.2", "policy rule"),
            ("[link]\n", "[link]\nloss = 1\n", "loss"),
            ("trainings = 1", "trainings = 2", "`trainings` of its recipe: 2 is not 1"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            let error = format!("{:#}", ProcessesPlan::from_toml(&changed).unwrap_err());
            assert!(error.contains(said), "{from}: {error}");
        }
    }
}
