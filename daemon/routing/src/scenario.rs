//! Engines, classes and rates, recorded or assumed, on which policies learn and are compared.
//!
//! A scenario is a text that people may change before they use it: what if the rate doubles, what if there were another engine?
//! Requests arrive as Poisson processes, one for each rate; engines are simulated ([`sched::route::serving`]). The gateway's
//! queue by classes is not simulated: requests wait in the engine, first come, first served.

mod calibrate;

use anyhow::{Context as _, Result, ensure};
use sched::route::{
    ClientPath, Cost, Model, ModelSet, Random, RoutedRequest, Slo,
    serving::{Arrival, Knowledge, Lengths, Setup, SimulatedEngine},
};
use serde::{Deserialize, Serialize};

pub use self::calibrate::{Calibrated, calibrate};
use crate::policy;

/// A scenario.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The rates of requests per second; each is simulated separately.
    pub requests_per_sec: Vec<f64>,
    /// How long requests arrive, at each rate, in seconds.
    pub seconds: f64,
    /// The round trip between gateway and clients; a request's half of it lies before its arrival.
    #[serde(default)]
    pub round_trip_ms: f64,
    /// The classes.
    #[serde(rename = "class")]
    pub classes: Vec<ClassSpec>,
    /// The models.
    #[serde(rename = "model")]
    pub models: Vec<ModelSpec>,
    /// The engines.
    #[serde(rename = "engine")]
    pub engines: Vec<EngineSpec>,
}

/// A class of requests. Lengths are log-normal.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClassSpec {
    /// Its name in the gateway's policy.
    pub name: String,
    /// The share of requests in this class, relative to the shares of others.
    pub share: f64,
    /// The time for the whole answer.
    #[serde(default)]
    pub budget_ms: f64,
    /// The time that each token of the answer adds.
    #[serde(default)]
    pub budget_per_token_ms: f64,
    /// The mean length of prompts.
    pub prompt_tokens: f64,
    /// The mean length of answers.
    pub answer_tokens: f64,
    /// The standard deviation of the logarithms of both.
    pub sigma: f64,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Its name.
    pub name: String,
    /// The worth of its answers: one number, or one for each class.
    pub quality_percent: Quality,
}

/// The worth of answers, in percent.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Quality {
    /// The same in all classes.
    Same(f32),
    /// By class, in their order.
    ByClass(Vec<f32>),
}

/// An engine. Times are in milliseconds ([`Cost`]).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSpec {
    /// The name of its model.
    pub model: String,
    /// The number of its GPU.
    pub gpu: u32,
    /// The maximum of requests that it works on at once.
    pub max_in_flight: u32,
    /// The time of a step on the host.
    #[serde(default)]
    pub host_ms: f64,
    /// The time of a step on the GPU, for any batch.
    pub gpu_ms: f64,
    /// The time that each request in the batch adds.
    pub gpu_per_sequence_ms: f64,
    /// The time of a prompt.
    pub prefill_ms: f64,
    /// The time that each token of the prompt adds.
    pub prefill_per_token_ms: f64,
    /// How much one fully busy engine on the same GPU slows this one.
    pub sharing: f64,
}

impl EngineSpec {
    /// Returns the time of a step with one request.
    fn least_step_ms(&self) -> f64 {
        self.host_ms + self.gpu_ms + self.gpu_per_sequence_ms
    }
}

const NS_PER_MS: f64 = 1e6;
const NS_PER_SEC: f64 = 1e9;

/// The maximum of requests at one rate that a search can simulate repeatedly.
const MOST_REQUESTS: f64 = 1e6;

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// The text is not TOML, or has unknown keys, or numbers that cannot be simulated; the error names them.
    pub fn parse(text: &str) -> Result<Self> {
        let scenario: Self = toml::from_str(text).context("no scenario")?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Returns the scenario as TOML.
    ///
    /// # Errors
    /// No error is known: TOML can represent every scenario.
    pub fn to_toml(&self) -> Result<String> {
        Ok(toml::to_string(self)?)
    }

    fn check(&self) -> Result<()> {
        let is_rate = |rate: &f64| rate.is_finite() && *rate > 0.0;
        ensure!(!self.requests_per_sec.is_empty(), "requests_per_sec has no rate");
        ensure!(
            self.requests_per_sec.iter().all(is_rate) && is_rate(&self.seconds),
            "raise requests_per_sec and seconds above 0"
        );
        let most = self.requests_per_sec.iter().fold(0.0, |most: f64, rate| most.max(*rate)) * self.seconds;
        ensure!(
            most <= MOST_REQUESTS,
            "{most} requests at the highest rate are more than {MOST_REQUESTS}: lower seconds"
        );
        ensure!(!self.classes.is_empty() && !self.models.is_empty(), "there is no class, or no model");
        ensure!(self.models.len() <= 64, "there are more than 64 models");
        // A policy is made for names, and its file is refused if one occurs twice.
        let shared = |names: &[String]| names.iter().enumerate().any(|(at, name)| names[..at].contains(name));
        ensure!(!shared(&self.class_names()), "two classes have the same name");
        ensure!(!shared(&self.model_names()), "two models have the same name");
        let is_amount = |number: f64| number.is_finite() && number >= 0.0;
        ensure!(is_amount(self.round_trip_ms), "round_trip_ms is below 0");
        for class in &self.classes {
            let ClassSpec { name, share, budget_ms, budget_per_token_ms, prompt_tokens, answer_tokens, sigma } = class;
            let amounts = [*share, *budget_ms, *budget_per_token_ms, *prompt_tokens, *sigma];
            ensure!(amounts.into_iter().all(is_amount), "a number of class {name} is below 0");
            ensure!((1.0..=1e6).contains(answer_tokens), "answer_tokens of class {name} is not from 1 to 1000000");
            ensure!(*sigma <= 3.0, "sigma of class {name} is above 3");
            ensure!(
                budget_ms + budget_per_token_ms > 0.0,
                "class {name} has no budget: its requests need no policy, leave it out"
            );
        }
        ensure!(self.classes.iter().any(|class| class.share > 0.0), "no class has a share");
        for model in &self.models {
            let ModelSpec { name, quality_percent } = model;
            let qualities = quality_percent.of(self.classes.len());
            let count = qualities.len();
            ensure!(
                count == self.classes.len(),
                "model {name} has {count} qualities, but there are {} classes",
                self.classes.len()
            );
            ensure!(
                qualities.iter().all(|one| (0.0..=100.0).contains(one)),
                "a quality of {name} is not from 0 to 100"
            );
            ensure!(self.engines.iter().any(|engine| engine.model == *name), "model {name} has no engine");
        }
        for engine in &self.engines {
            let EngineSpec { model, max_in_flight, host_ms, gpu_ms, gpu_per_sequence_ms, prefill_ms, .. } = engine;
            ensure!(
                self.models.iter().any(|known| known.name == *model),
                "an engine runs {model}, which is not a model of the scenario"
            );
            ensure!(*max_in_flight > 0, "max_in_flight of an engine of {model} is 0: raise it");
            let costs = [*host_ms, *gpu_ms, *gpu_per_sequence_ms, *prefill_ms];
            let costs = costs.into_iter().chain([engine.prefill_per_token_ms, engine.sharing]);
            ensure!(costs.clone().all(is_amount), "a cost of an engine of {model} is below 0");
            ensure!(engine.least_step_ms() > 0.0, "a step of an engine of {model} takes no time");
        }
        Ok(())
    }

    /// Returns the names of the models, in their order.
    #[must_use]
    pub fn model_names(&self) -> Vec<String> {
        self.models.iter().map(|model| model.name.clone()).collect()
    }

    /// Returns the names of the classes, in their order.
    #[must_use]
    pub fn class_names(&self) -> Vec<String> {
        self.classes.iter().map(|class| class.name.clone()).collect()
    }

    /// Returns the setup of the simulation.
    #[must_use]
    pub fn setup(&self) -> Setup {
        let model = |model: &ModelSpec| Model {
            id: policy::id(&model.name),
            rewards: model.quality_percent.of(self.classes.len()).iter().map(|percent| percent / 100.0).collect(),
        };
        let engine = |engine: &EngineSpec| SimulatedEngine {
            model: self.models.iter().position(|model| model.name == engine.model).unwrap_or_default(),
            group: engine.gpu,
            most_running: engine.max_in_flight,
            cost: Cost {
                host_ns: engine.host_ms * NS_PER_MS,
                gpu_ns: engine.gpu_ms * NS_PER_MS,
                gpu_per_sequence_ns: engine.gpu_per_sequence_ms * NS_PER_MS,
                prefill_ns: engine.prefill_ms * NS_PER_MS,
                prefill_per_token_ns: engine.prefill_per_token_ms * NS_PER_MS,
                sharing: engine.sharing,
            },
        };
        Setup {
            models: self.models.iter().map(model).collect(),
            engines: self.engines.iter().map(engine).collect(),
            weights: vec![1.0; self.classes.len()],
            lengths: Lengths {
                prompt_tokens: self.mean(|class| class.prompt_tokens),
                output_tokens: self.mean(|class| class.answer_tokens),
                sigma: 0.0,
                known: false,
            },
            per_token_ns: 0,
            network: None,
            knowledge: Knowledge::Given,
            discards: false,
            gap_variation: 1.0,
        }
    }

    /// Returns the mean of a property of classes, over requests.
    fn mean(&self, of: impl Fn(&ClassSpec) -> f64) -> f64 {
        let shares: f64 = self.classes.iter().map(|class| class.share).sum();
        self.classes.iter().map(|class| class.share * of(class)).sum::<f64>() / shares
    }

    /// Returns the requests at a rate, for a seed, in the order of arrival.
    #[must_use]
    pub fn arrivals(&self, requests_per_sec: f64, seed: u64) -> Vec<Arrival> {
        let mut random = Random::new(seed);
        // The gateway's estimate is one number for all classes, learned from all answers.
        let expected_tokens = self.mean(|class| class.answer_tokens).round().max(1.0);
        let (mut at_ns, mut arrivals) = (0.0, Vec::new());
        loop {
            at_ns += random.exponential(NS_PER_SEC / requests_per_sec);
            if at_ns >= self.seconds * NS_PER_SEC {
                return arrivals;
            }
            let class = self.draw(&mut random);
            let Some(of) = self.classes.get(class) else { return arrivals };
            let prompt_tokens = random.log_normal(of.prompt_tokens.max(1.0), of.sigma).max(1.0) as u32;
            let output_tokens = random.log_normal(of.answer_tokens, of.sigma).max(1.0) as u32;
            let budget_ns = |tokens: f64| (tokens.mul_add(of.budget_per_token_ms, of.budget_ms) * NS_PER_MS) as u64;
            let (arrived_ns, half_trip_ns) = (at_ns as u64, (self.round_trip_ms * NS_PER_MS / 2.0) as u64);
            arrivals.push(Arrival {
                sent_ns: arrived_ns,
                arrived_ns,
                back_ns: half_trip_ns,
                deadline_ns: arrived_ns.saturating_add(budget_ns(f64::from(output_tokens))),
                output_tokens,
                request: RoutedRequest {
                    class,
                    prompt_tokens,
                    expected_tokens: expected_tokens as u32,
                    max_tokens: 0,
                    slo: Slo::within(budget_ns(expected_tokens)),
                    weight: 1.0,
                    allowed: ModelSet::ALL,
                },
                path: ClientPath { smoothed_rtt_ns: 2 * half_trip_ns, ..ClientPath::default() },
            });
        }
    }

    fn draw(&self, random: &mut Random) -> usize {
        let shares: f64 = self.classes.iter().map(|class| class.share).sum();
        let mut left = random.uniform() * shares;
        let drawn = self.classes.iter().position(|class| {
            left -= class.share;
            left < 0.0
        });
        drawn.unwrap_or(self.classes.len() - 1)
    }
}

impl Quality {
    fn of(&self, classes: usize) -> Vec<f32> {
        match self {
            Self::Same(percent) => vec![*percent; classes],
            Self::ByClass(percents) => percents.clone(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A large and a small model on separate GPUs, with two classes.
    pub const TWO: &str = r#"
        requests_per_sec = [0.5, 2, 6]
        seconds = 60
        round_trip_ms = 40
        [[class]]
        name = "interactive"
        share = 3
        budget_ms = 8_000
        prompt_tokens = 100
        answer_tokens = 150
        sigma = 0.4
        [[class]]
        name = "patient"
        share = 1
        budget_per_token_ms = 200
        prompt_tokens = 100
        answer_tokens = 150
        sigma = 0.4
        [[model]]
        name = "large"
        quality_percent = [100, 90]
        [[model]]
        name = "small"
        quality_percent = 70
        [[engine]]
        model = "large"
        gpu = 0
        max_in_flight = 32
        gpu_ms = 22
        gpu_per_sequence_ms = 3.6
        prefill_ms = 8
        prefill_per_token_ms = 0.1
        sharing = 1
        [[engine]]
        model = "small"
        gpu = 1
        max_in_flight = 64
        gpu_ms = 7
        gpu_per_sequence_ms = 0.3
        prefill_ms = 3
        prefill_per_token_ms = 0.01
        sharing = 1
    "#;

    #[test]
    fn a_scenario_comes_back_as_the_same() {
        let scenario = Scenario::parse(TWO).unwrap();
        assert_eq!(Scenario::parse(&scenario.to_toml().unwrap()).unwrap(), scenario);
    }

    #[test]
    fn requests_are_as_their_classes_say() {
        let scenario = Scenario { seconds: 3_000.0, ..Scenario::parse(TWO).unwrap() };
        let arrivals = scenario.arrivals(2.0, 1);
        assert!((5_700..6_300).contains(&arrivals.len()), "{}", arrivals.len());
        let patient: Vec<_> = arrivals.iter().filter(|arrival| arrival.request.class == 1).collect();
        let share = patient.len() as f64 / arrivals.len() as f64;
        assert!((0.23..0.27).contains(&share), "{share}");
        let one = patient[0];
        assert_eq!(one.deadline_ns - one.arrived_ns, u64::from(one.output_tokens) * 200_000_000);
        assert_eq!(one.request.slo.budget_ns, 150 * 200_000_000);
        let tokens: f64 = arrivals.iter().map(|arrival| f64::from(arrival.output_tokens)).sum();
        let mean = tokens / arrivals.len() as f64;
        assert!((145.0..155.0).contains(&mean), "{mean}");
        assert_eq!(arrivals, scenario.arrivals(2.0, 1), "a seed is a seed");
    }

    #[test]
    fn a_fault_of_a_scenario_is_named() {
        for (from, to, said) in [
            ("[0.5, 2, 6]", "[]", "no rate"),
            ("[0.5, 2, 6]", "[1e9]", "more than"),
            ("budget_ms = 8_000", "", "no budget"),
            ("[100, 90]", "[100]", "1 qualities"),
            ("name = \"patient\"", "name = \"interactive\"", "two classes have the same name"),
            ("name = \"small\"", "name = \"large\"", "two models have the same name"),
            ("model = \"small\"", "model = \"tiny\"", "small has no engine"),
            ("gpu_ms = 7\n        gpu_per_sequence_ms = 0.3", "gpu_ms = 0\ngpu_per_sequence_ms = 0", "takes no time"),
            ("prefill_ms = 3", "prefill_ms = -3", "below 0"),
            ("sharing = 1", "shared = 1", "shared"),
        ] {
            assert!(TWO.contains(from), "{from}");
            let error = format!("{:#}", Scenario::parse(&TWO.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(said), "{from}: {error}");
        }
    }
}
