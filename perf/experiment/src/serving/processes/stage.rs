//! The processes of a seed: engines, a gateway and an edge, in network namespaces of their own.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{
    engine::{Batching, Engine, Gpu},
    models::Models,
    netns::Chain,
    process::wait_for,
    site::{Counts, Folder, SOON},
};
use plan::{
    Clock,
    processes::{ProcessesPlan, WarmUp},
    serving::{Choose, Task},
};
use routing::policy::PolicyFile;
use sched::route::{
    RoutingPolicy,
    serving::{Arrival, Setup},
};

use super::{
    client::{Asked, Ended, Question, ask_all},
    compared::Compared,
};
use crate::emulated::block_on;

/// The first engine's port.
const PORT: u16 = 8_001;

/// How long a request before the measurement may take.
const LONG: Duration = Duration::from_secs(120);

/// More requests than wait in any plan.
const MOST_WAITING: u32 = 65_536;

/// Returns the name of the alias whose model a policy chooses.
pub fn alias(policy: &str) -> String {
    format!("auto-{policy}")
}

/// Engines, gateway and edge, which run until this is dropped.
pub struct Stage {
    models: Models,
    engines: Vec<(usize, Engine)>,
    /// The names of the models.
    names: Vec<String>,
    link: String,
    _policies: Folder,
}

/// What gateway and engines have counted.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Decisions of policies, by alias and kind of policy.
    pub decided: BTreeMap<(String, String), u64>,
    /// How many of them the guard replaced.
    pub guarded: u64,
    /// How many of them the rule made, because the policy could not.
    pub fell_back: u64,
    /// Requests that reached engines, by model.
    pub reached: Vec<u64>,
    /// The longest time by which an engine made a token too late.
    pub made_late: Duration,
}

impl Counters {
    /// Returns what was counted since an earlier time.
    pub fn since(mut self, before: &Self) -> Self {
        for (key, count) in &mut self.decided {
            *count -= before.decided.get(key).copied().unwrap_or_default();
        }
        self.guarded -= before.guarded;
        self.fell_back -= before.fell_back;
        self.reached.iter_mut().zip(&before.reached).for_each(|(count, before)| *count -= before);
        self
    }
}

impl Stage {
    /// Starts all processes. The gateway knows nothing about its engines yet.
    ///
    /// # Errors
    /// Without root, when a process does not start, or in the lab without `netem`.
    pub fn new(plan: &ProcessesPlan, compared: &Compared, clock: Clock) -> Result<Self> {
        let Compared { simulated, setup, learned } = compared;
        let chain = Chain::new().context("the namespaces cannot be created; processes need root")?;
        let gpus: Vec<_> = (0..simulated.gpus).map(|_| Gpu::new(simulated.models.len())).collect();
        let start = |(port, engine): (u16, &sched::route::serving::SimulatedEngine)| {
            let gpu = gpus.get(engine.group as usize).context("an engine without a GPU")?.clone();
            let batching = Batching { cost: engine.cost, most_running: engine.most_running, gpu, place: engine.model };
            let name = &simulated.models[engine.model].name;
            Ok((engine.model, Engine::start_batching(&chain.target, port, name, batching)?))
        };
        let engines = (PORT..).zip(&setup.engines).map(start).collect::<Result<Vec<_>>>()?;
        let link = link(&chain, plan, clock)?;
        let policies = Folder::new(&format!("{}-policies", chain.relay.name()))?;
        let sections = gateway(compared, &chain, &policies, learned)?;
        let models = Models::on(chain, &sections, SCHEDULE).context("gateway and edge did not start")?;
        let names = simulated.models.iter().map(|model| model.name.clone()).collect();
        Ok(Self { models, engines, names, link, _policies: policies })
    }

    /// Describes the link between edge and gateway.
    pub fn link(&self) -> &str {
        &self.link
    }

    /// Returns what the gateway has written to its log.
    pub fn said(&self) -> String {
        self.models.site.relay.output()
    }

    /// Lets the gateway learn how fast its engines are, and how long answers are: for each class one answer of the expected length.
    ///
    /// # Errors
    /// When an answer is not whole.
    pub fn warm_up(&self, warm_up: WarmUp, compared: &Compared) -> Result<()> {
        let Compared { simulated, setup, .. } = compared;
        let question = Question {
            at: Duration::ZERO,
            model: String::new(),
            class: None,
            budget: None,
            prompt_tokens: simulated.lengths.prompt_tokens as u32,
            tokens: warm_up.tokens,
        };
        for model in &self.names {
            for round in 1..=warm_up.rounds {
                let each = (0..simulated.gpus * round).map(|number| {
                    // Prompts of several lengths, around the mean.
                    let prompt_tokens = (question.prompt_tokens * (1 + (number + round) % 4) / 2).max(2);
                    Question { model: model.clone(), prompt_tokens, ..question.clone() }
                });
                self.ask_before(&each.collect::<Vec<_>>())?;
            }
        }
        let fastest = self.names.last().context("no model")?;
        let of_class = |task: &Task| Question {
            model: fastest.clone(),
            class: Some(task.name.clone()),
            tokens: setup.lengths.output_tokens as u32,
            ..question.clone()
        };
        self.ask_before(&simulated.tasks.iter().map(of_class).collect::<Vec<_>>())?;
        self.settle().map(drop)
    }

    fn ask_before(&self, questions: &[Question]) -> Result<()> {
        let failed = self.ask(questions, LONG)?.into_iter().find(|asked| !matches!(asked.ended, Ended::Whole { .. }));
        ensure!(failed.is_none(), "{failed:?}; the gateway said:\n{}", self.said());
        Ok(())
    }

    /// Sends requests to a model or an alias when they are due, until all have ended or the last deadline has passed.
    ///
    /// # Errors
    /// Without root.
    pub fn offer(&self, arrivals: &[Arrival], setup: &Setup, tasks: &[Task], model: &str) -> Result<Vec<Asked>> {
        let question = |arrival: &Arrival| {
            let request = &arrival.request;
            let budget_ns = setup.per_token_ns.saturating_mul(u64::from(request.expected_tokens));
            Question {
                at: Duration::from_nanos(arrival.sent_ns),
                model: model.to_owned(),
                class: tasks.get(request.class).map(|task| task.name.clone()),
                budget: Some(Duration::from_nanos(budget_ns)),
                prompt_tokens: request.prompt_tokens,
                tokens: arrival.output_tokens,
            }
        };
        let end_ns = arrivals.iter().map(|arrival| arrival.deadline_ns).max().unwrap_or_default();
        self.ask(&arrivals.iter().map(question).collect::<Vec<_>>(), Duration::from_nanos(end_ns))
    }

    fn ask(&self, questions: &[Question], end: Duration) -> Result<Vec<Asked>> {
        self.models.site.chain.client.run(|| block_on(async { Ok(ask_all(questions, end).await) }))?
    }

    /// Waits until gateway and engines have nothing to do, and returns what they have counted.
    ///
    /// # Errors
    /// When they still have.
    pub fn settle(&self) -> Result<Counters> {
        let site = &self.models.site;
        wait_for("the gateway to be idle", SOON, || {
            site.counts().ok().filter(|counts| counts.of("gateway_in_flight") == 0)
        })?;
        let is_idle = |(_, engine): &(usize, Engine)| {
            let [asked, finished, cancelled] = engine.counts();
            asked == finished + cancelled
        };
        wait_for("the engines to be idle", SOON, || self.engines.iter().all(is_idle).then_some(()))?;
        self.counters()
    }

    /// Returns what gateway and engines have counted.
    ///
    /// # Errors
    /// When the gateway does not answer.
    pub fn counters(&self) -> Result<Counters> {
        let counts: Counts = self.models.site.counts()?;
        let mut counters = Counters { reached: vec![0; self.names.len()], ..Counters::default() };
        for labels in counts.labels("gateway_decisions_total") {
            let of = |name: &str| labels.iter().find(|(label, _)| label == name).map_or("", |(_, value)| value);
            let sample: Vec<_> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
            let count = counts.of(&format!("gateway_decisions_total{{{}}}", sample.join(","))) as u64;
            *counters.decided.entry((of("alias").to_owned(), of("policy").to_owned())).or_default() += count;
            match of("reason") {
                "guard" => counters.guarded += count,
                "fallback" => counters.fell_back += count,
                _ => {}
            }
        }
        for (model, engine) in &self.engines {
            counters.reached[*model] += engine.counts()[0];
            counters.made_late = counters.made_late.max(engine.late());
        }
        Ok(counters)
    }
}

/// Limits both directions of the link between edge and gateway, and describes it.
fn link(chain: &Chain, plan: &ProcessesPlan, clock: Clock) -> Result<String> {
    let (rate_mbit, queue_ms, delay_ms) = (plan.link.rate_mbit, plan.link.queue_ms, plan.delay_ms(clock));
    let rate = (rate_mbit * 1e6) as u64;
    let (qdisc, text) = if delay_ms > 0.0 {
        // Packets of 1,514 bytes in the queue and on the way.
        let packets = (rate as f64 * (f64::from(queue_ms) + delay_ms) / 1e3 / 8.0 / 1_514.0).ceil();
        let delay_us = delay_ms * 1e3;
        (
            format!("netem limit {packets:.0} rate {rate}bit delay {delay_us:.0}us"),
            format!("netem, {rate_mbit} Mbit/s and {delay_ms} ms each way"),
        )
    } else {
        (
            format!("tbf rate {rate}bit burst 16kb latency {queue_ms}ms"),
            format!("tbf, {rate_mbit} Mbit/s each way, without delay"),
        )
    };
    for end in [&chain.access.near, &chain.access.far] {
        end.segment()?;
        end.set_qdisc(&qdisc)?;
    }
    Ok(text)
}

/// The schedule that perf/README.md recommends, for both daemons.
const SCHEDULE: &str = "[schedule]\ndiscipline = \"ml\"\nlow = \"edf\"\n";

/// Returns the gateway's sections. Policies that need a file get one in the folder.
fn gateway(compared: &Compared, chain: &Chain, folder: &Folder, learned: &[RoutingPolicy]) -> Result<String> {
    let Compared { simulated, setup, .. } = compared;
    let mut text = "[gateway]\n".to_owned();
    for (at, model) in simulated.models.iter().enumerate() {
        let engines = (PORT..).zip(&setup.engines).filter(|(_, engine)| engine.model == at);
        let engines: Vec<_> = engines
            .map(|(port, engine)| (format!("http://{}:{port}", chain.egress.far.v4), engine.group.to_string()))
            .collect();
        let (urls, gpus): (Vec<_>, Vec<_>) = engines.into_iter().unzip();
        let quality = model.rewards.iter().sum::<f32>() / model.rewards.len() as f32;
        write!(
            text,
            "[[gateway.model]]\nname = {name:?}\nengines = {urls:?}\ngpus = {gpus:?}\nmax_in_flight = {most_running}\n\
             max_waiting = {MOST_WAITING}\naffinity = false\nquality_percent = {quality:.0}\n",
            name = model.name,
            most_running = model.most_running,
            quality = quality * 100.0,
        )?;
    }
    let [models, classes] = [
        simulated.models.iter().map(|model| model.name.clone()).collect::<Vec<_>>(),
        simulated.tasks.iter().map(|task| task.name.clone()).collect(),
    ];
    for (policy, learned) in simulated.policies.iter().zip(learned) {
        let chooses = match &policy.choose {
            Choose::Fixed(_) => continue,
            Choose::RoundRobin => "round-robin".to_owned(),
            Choose::LeastLoaded => "least-loaded".to_owned(),
            Choose::Rule(_) => "rule".to_owned(),
            Choose::Tuned(_) | Choose::Dqn(_) => {
                let file = PolicyFile { models: models.clone(), classes: classes.clone(), policy: learned.clone() };
                let path = folder.path().join(&policy.name);
                std::fs::write(&path, file.to_bytes(&simulated.name)?)?;
                path.display().to_string()
            }
        };
        let name = alias(&policy.name);
        write!(text, "[[gateway.alias]]\nname = {name:?}\nmodels = {models:?}\npolicy = {chooses:?}\n")?;
    }
    text += SCHEDULE;
    for class in &classes {
        write!(text, "[class.{class}]\n[[rule]]\nclass = {class:?}\nasked_class = {class:?}\n")?;
    }
    Ok(text)
}
