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
use crate::{bounds::within, policy};

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
    /// How much one fully busy engine on the same GPU slows this one: 0 not at all, 1 makes its steps twice as long. At most
    /// [`Cost::MAX_SHARING`].
    pub sharing: f64,
}

impl ClassSpec {
    fn check(&self) -> Result<()> {
        let Self { name, share, budget_ms, budget_per_token_ms, prompt_tokens, answer_tokens, sigma } = self;
        let key = |key: &str| format!("class {name}: `{key}`");
        within(key("share"), *share, 0.0..=1e6)?;
        within(key("budget_ms"), *budget_ms, 0.0..=MOST_MS)?;
        within(key("budget_per_token_ms"), *budget_per_token_ms, 0.0..=MOST_MS)?;
        within(key("prompt_tokens"), *prompt_tokens, 0.0..=1e9)?;
        within(key("answer_tokens"), *answer_tokens, 1.0..=1e6)?;
        within(key("sigma"), *sigma, 0.0..=3.0)?;
        ensure!(
            budget_ms + budget_per_token_ms > 0.0,
            "class {name} has no budget (`budget_ms` or `budget_per_token_ms` above 0): its requests need no policy, leave it out"
        );
        Ok(())
    }
}

impl EngineSpec {
    fn check(&self) -> Result<()> {
        let key = |key: &str| format!("an engine of {}: `{key}`", self.model);
        within(key("max_in_flight"), self.max_in_flight, 1..=1_000_000)?;
        for (name, ms) in [
            ("host_ms", self.host_ms),
            ("gpu_ms", self.gpu_ms),
            ("gpu_per_sequence_ms", self.gpu_per_sequence_ms),
            ("prefill_ms", self.prefill_ms),
            ("prefill_per_token_ms", self.prefill_per_token_ms),
        ] {
            within(key(name), ms, 0.0..=MOST_MS)?;
        }
        within(key("sharing"), self.sharing, 0.0..=Cost::MAX_SHARING)?;
        ensure!(
            self.least_step_ms() > 0.0,
            "a step of an engine of {} takes no time: raise `host_ms`, `gpu_ms` or `gpu_per_sequence_ms`",
            self.model
        );
        Ok(())
    }

    /// Returns the time of a step with one request.
    fn least_step_ms(&self) -> f64 {
        self.host_ms + self.gpu_ms + self.gpu_per_sequence_ms
    }
}

const NS_PER_MS: f64 = 1e6;
const NS_PER_SEC: f64 = 1e9;

/// The maximum of requests at one rate that a search can simulate repeatedly.
const MOST_REQUESTS: f64 = 1e6;

/// With fewer requests at one rate on average, hardly any seed has one.
const FEWEST_REQUESTS: f64 = 0.1;

/// The longest time that a scenario can contain: eleven days and a half.
const MOST_MS: f64 = 1e9;

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
        let Self { requests_per_sec, seconds, round_trip_ms, classes, models, engines } = self;
        ensure!(!requests_per_sec.is_empty(), "requests_per_sec has no rate");
        within("seconds", *seconds, 0.001..=1e6)?;
        for (at, rate) in requests_per_sec.iter().enumerate() {
            within("requests_per_sec", *rate, 1e-6..=1e9)?;
            ensure!(!requests_per_sec[..at].contains(rate), "requests_per_sec: {rate} is there twice; remove one");
            let requests = rate * seconds;
            ensure!(
                requests <= MOST_REQUESTS,
                "requests_per_sec: {rate} for {seconds} seconds is {requests} requests, more than {MOST_REQUESTS}: lower the rate \
                 or `seconds`"
            );
            ensure!(
                requests >= FEWEST_REQUESTS,
                "requests_per_sec: {rate} for {seconds} seconds is {requests} requests, fewer than {FEWEST_REQUESTS}: raise the \
                 rate or `seconds`"
            );
        }
        within("round_trip_ms", *round_trip_ms, 0.0..=MOST_MS)?;
        ensure!(!classes.is_empty(), "there is no [[class]]");
        ensure!(!models.is_empty(), "there is no [[model]]");
        ensure!(models.len() <= 64, "there are {} models, more than 64", models.len());
        // A policy is made for names, and its file is refused if one occurs twice.
        let shared = |names: &[String]| names.iter().enumerate().any(|(at, name)| names[..at].contains(name));
        ensure!(!shared(&self.class_names()), "two classes have the same name");
        ensure!(!shared(&self.model_names()), "two models have the same name");
        classes.iter().try_for_each(ClassSpec::check)?;
        ensure!(classes.iter().any(|class| class.share > 0.0), "`share` is 0 in all classes: raise one");
        for ModelSpec { name, quality_percent } in models {
            let qualities = quality_percent.of(classes.len());
            let count = qualities.len();
            ensure!(
                count == classes.len(),
                "model {name}: `quality_percent` has {count} qualities, but there are {} classes",
                classes.len()
            );
            let key = format!("model {name}: `quality_percent`");
            qualities.iter().try_for_each(|quality| within(&key, *quality, 0.0..=100.0))?;
            ensure!(engines.iter().any(|engine| engine.model == *name), "model {name} has no engine");
        }
        for engine in engines {
            let model = &engine.model;
            ensure!(
                models.iter().any(|known| known.name == *model),
                "an engine runs {model}, which is not a model of the scenario"
            );
            engine.check()?;
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
            ("prefill_ms = 3", "prefill_ms = -3", "an engine of small: `prefill_ms`: -3 is not within 0 to 1000000000"),
            ("[0.5, 2, 6]", "[0.5, 2, 0.5]", "requests_per_sec: 0.5 is there twice"),
            ("[0.5, 2, 6]", "[1e-5]", "fewer than 0.1"),
            ("[0.5, 2, 6]", "[nan]", "requests_per_sec: NaN is not within"),
            ("budget_ms = 8_000", "budget_ms = nan", "class interactive: `budget_ms`: NaN is not within"),
            ("budget_ms = 8_000", "budget_ms = inf", "class interactive: `budget_ms`: inf is not within"),
            (
                "quality_percent = 70",
                "quality_percent = 170",
                "model small: `quality_percent`: 170 is not within 0 to 100",
            ),
            ("max_in_flight = 32", "max_in_flight = 0", "an engine of large: `max_in_flight`: 0 is not within"),
            ("sharing = 1", "sharing = 5.0", "an engine of large: `sharing`: 5 is not within 0 to 4"),
            ("sharing = 1", "shared = 1", "shared"),
        ] {
            assert!(TWO.contains(from), "{from}");
            let error = format!("{:#}", Scenario::parse(&TWO.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(said), "{from}: {error}");
        }
    }
}
