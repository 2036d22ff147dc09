//! A gateway's decision, and its result.
//!
//! A line contains all inputs of the decision, so that another policy can be asked the same question ([`crate::replay`]), and no
//! part of the request's or the answer's content.

use sched::route::{ClientPath, Cost, Curve, EngineLoad, ModelChoice, ModelSet, Replica, RoutedRequest, Slo};
use serde::{Deserialize, Serialize};

/// A decision about a request that left the choice of its model open, as one line of JSON.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Decision {
    /// The time, in milliseconds since 1970.
    pub at_ms: u64,
    /// The same on a monotonic clock, in nanoseconds since an arbitrary time.
    pub at_ns: u64,
    /// The alias, which stands for several models.
    pub alias: String,
    /// The name of the request's class.
    pub class: String,
    /// The estimated tokens of the prompt.
    pub prompt_tokens: u32,
    /// The estimated tokens of the answer.
    pub expected_tokens: u32,
    /// The maximum of tokens in the answer; 0 if the request set none.
    #[serde(default)]
    pub max_tokens: u32,
    /// Whether a model had failed the request before, so that an earlier record is about the same request. Records of earlier versions lack
    /// it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub retry: bool,
    /// Its limits: what is left of them after earlier tries.
    pub limits: TimeLimits,
    /// The path back.
    pub path: ReturnPath,
    /// The models that could be chosen, with the worth of each.
    pub models: Vec<Candidate>,
    /// The engines, with their loads and known costs.
    pub engines: Vec<EngineSnapshot>,
    /// The kind of the policy.
    pub policy: String,
    /// The gateway's `margin_percent`: of the rule, and of the rule that decides if a policy cannot. Records of earlier
    /// versions lack it, and count with the default of that time.
    #[serde(default = "default_margin_percent")]
    pub margin_percent: u16,
    /// The decision; `None` if no engine was usable.
    pub choice: Option<Chosen>,
    /// The model that the shadow would have chosen, if there is one and it could decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<String>,
    /// The result; `None` if the answer was not completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<AnswerOutcome>,
}

/// The time limits of a request, in nanoseconds; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct TimeLimits {
    /// To the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_ns: Option<u64>,
    /// For each further token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_token_ns: Option<u64>,
    /// For the whole answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_ns: Option<u64>,
}

/// The path back to the client ([`ClientPath`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct ReturnPath {
    /// The smoothed round-trip time.
    pub smoothed_rtt_ns: u64,
    /// The bytes that leave before the answer.
    pub backlog_bytes: u64,
    /// The rate; 0 if it is unknown.
    pub bytes_per_sec: u64,
    /// The answer's share of the rate; 0 if it is all of it, or unknown. Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub share_bytes_per_sec: u64,
    /// The bytes of a token.
    pub bytes_per_token: u32,
}

/// A model that may answer.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// The worth of an answer in time, from 0 to 1.
    pub reward: f32,
}

/// An engine at the time of a decision.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct EngineSnapshot {
    /// The name of its model.
    pub model: String,
    /// Its index among the engines of the model.
    pub place: usize,
    /// The number of its GPU.
    pub gpu: u32,
    /// Whether it got requests.
    pub usable: bool,
    /// The maximum of requests that it works on at once.
    pub most_running: u32,
    /// The number of requests that it worked on.
    pub running: u32,
    /// The number of requests that waited for it.
    pub waiting: u32,
    /// The tokens that it was expected to make for all of these.
    pub outstanding_tokens: u64,
    /// The use of its GPU by other engines, from 0 to 1 each.
    pub others: f64,
    /// Its known costs, in nanoseconds: of a step on the host and on the GPU, of each sequence in the step, of a prompt, and of
    /// each token of the prompt; and the fraction by which one fully busy engine on the same GPU slows it.
    pub cost: [f64; 6],
    /// The expected number of the prompt's tokens in its cache. Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cached_tokens: u32,
    /// How long it still refused further requests ([`EngineLoad::closed_ns`]). Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub closed_ns: u64,
    /// Whether its load was too old for policies that decide by loads ([`EngineLoad::is_stale`]). Records of earlier versions lack it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub is_stale: bool,
}

/// A decision.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Chosen {
    /// The model.
    pub model: String,
    /// The index, in the model, of the engine that answered; if none did, of the chosen engine.
    pub place: usize,
    /// The reason, as in `x-paced-reason`.
    pub reason: String,
    /// When the last token was expected to reach the client; 0 if nothing was known of the engine.
    pub predicted_ns: u64,
    /// Whether that was in time.
    pub in_time: bool,
}

/// The result of an answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct AnswerOutcome {
    /// How long it took since the decision, without earlier models of the alias.
    pub took_ns: u64,
    /// The tokens of the answer, as the engine billed them or as they passed.
    pub tokens: u64,
    /// Whether it met all its limits, which count from the complete request.
    pub met: bool,
}

const fn default_margin_percent() -> u16 {
    110
}

/// Whether a field has its default, so that a record leaves it out.
fn is_default<T: Default + PartialEq>(field: &T) -> bool {
    *field == T::default()
}

impl TimeLimits {
    /// Returns the limits of a request.
    #[must_use]
    pub fn of(slo: &Slo) -> Self {
        let limit = |ns: u64| (ns != Slo::NONE).then_some(ns);
        Self {
            first_token_ns: limit(slo.first_token_ns),
            per_token_ns: limit(slo.per_token_ns),
            budget_ns: limit(slo.budget_ns),
        }
    }

    /// Returns the limits for a router.
    #[must_use]
    pub fn slo(&self) -> Slo {
        Slo {
            first_token_ns: self.first_token_ns.unwrap_or(Slo::NONE),
            per_token_ns: self.per_token_ns.unwrap_or(Slo::NONE),
            budget_ns: self.budget_ns.unwrap_or(Slo::NONE),
        }
    }
}

impl ReturnPath {
    /// Returns the path of a request.
    #[must_use]
    pub const fn of(path: &ClientPath) -> Self {
        let ClientPath { smoothed_rtt_ns, backlog_bytes, bytes_per_sec, share_bytes_per_sec, bytes_per_token } = *path;
        Self { smoothed_rtt_ns, backlog_bytes, bytes_per_sec, share_bytes_per_sec, bytes_per_token }
    }

    /// Returns the path for a router.
    #[must_use]
    pub const fn path(&self) -> ClientPath {
        let Self { smoothed_rtt_ns, backlog_bytes, bytes_per_sec, share_bytes_per_sec, bytes_per_token } = *self;
        ClientPath { smoothed_rtt_ns, backlog_bytes, bytes_per_sec, share_bytes_per_sec, bytes_per_token }
    }
}

impl EngineSnapshot {
    /// Returns the snapshot of the model's engine `place` at `now_ns`, with `cached_tokens` of the prompt in its cache.
    #[must_use]
    pub fn of(model: &str, place: usize, replica: &Replica, cached_tokens: u32, now_ns: u64) -> Self {
        let Cost { host_ns, gpu_ns, gpu_per_sequence_ns, prefill_ns, prefill_per_token_ns, sharing } =
            replica.curve.cost();
        Self {
            model: model.to_owned(),
            place,
            gpu: replica.group,
            usable: replica.usable,
            most_running: replica.most_running,
            running: replica.load.running,
            waiting: replica.load.waiting,
            outstanding_tokens: replica.load.outstanding_tokens,
            others: replica.load.others_utilisation,
            cost: [host_ns, gpu_ns, gpu_per_sequence_ns, prefill_ns, prefill_per_token_ns, sharing],
            cached_tokens,
            closed_ns: replica.load.closed_ns,
            is_stale: replica.load.is_stale(now_ns),
        }
    }

    /// Returns its known costs.
    #[must_use]
    pub const fn cost(&self) -> Cost {
        let [host_ns, gpu_ns, gpu_per_sequence_ns, prefill_ns, prefill_per_token_ns, sharing] = self.cost;
        Cost { host_ns, gpu_ns, gpu_per_sequence_ns, prefill_ns, prefill_per_token_ns, sharing }
    }

    /// Returns the engine for a router that knows its model by the index `model` and decides at `now_ns`.
    #[must_use]
    pub fn replica(&self, model: usize, now_ns: u64) -> Replica {
        Replica {
            model,
            group: self.gpu,
            usable: self.usable,
            most_running: self.most_running,
            load: EngineLoad {
                running: self.running,
                waiting: self.waiting,
                outstanding_tokens: self.outstanding_tokens,
                others_utilisation: self.others,
                closed_ns: self.closed_ns,
                updated_ns: if self.is_stale { 0 } else { now_ns },
            },
            curve: Curve::new(self.cost()),
        }
    }
}

impl Decision {
    /// Returns the request for a router, in the class with this number.
    #[must_use]
    pub fn request(&self, class: usize) -> RoutedRequest {
        RoutedRequest {
            class,
            prompt_tokens: self.prompt_tokens,
            expected_tokens: self.expected_tokens,
            max_tokens: self.max_tokens,
            slo: self.limits.slo(),
            weight: 1.0,
            allowed: ModelSet::ALL,
        }
    }

    /// Returns the margin of the rule.
    #[must_use]
    pub fn margin(&self) -> f64 {
        f64::from(self.margin_percent) / 100.0
    }

    /// Notes the decision, or the engine of the model that serves in place of the chosen one.
    pub fn decide(&mut self, model: &str, place: usize, choice: &ModelChoice) {
        self.choice = Some(Chosen {
            model: model.to_owned(),
            place,
            reason: choice.reason.name().to_owned(),
            predicted_ns: choice.predicted_ns,
            in_time: choice.in_time,
        });
    }

    /// Returns the decision as a line, line end included.
    #[must_use]
    pub fn line(&self) -> String {
        // JSON cannot represent numbers that are not finite, but no curve contains these.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// Reads lines; lines of other versions and truncated lines are counted and skipped. Returns the decisions in order of time.
#[must_use]
pub fn read(text: &str) -> (Vec<Decision>, usize) {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let (read, wrong): (Vec<_>, Vec<_>) = lines.map(serde_json::from_str::<Decision>).partition(Result::is_ok);
    let mut decisions: Vec<Decision> = read.into_iter().flatten().collect();
    decisions.sort_by_key(|decision| (decision.at_ms, decision.at_ns));
    (decisions, wrong.len())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A decision between a large and a small model with one engine each; the large model's engine works on `running` requests.
    pub fn decision(at_ms: u64, running: u32, budget_ms: u64) -> Decision {
        let engine = |model: &str, gpu, running, step_ms: f64| EngineSnapshot {
            model: model.to_owned(),
            place: 0,
            gpu,
            usable: true,
            most_running: 32,
            running,
            waiting: 0,
            outstanding_tokens: u64::from(running) * 100,
            others: 0.0,
            cost: [0.0, step_ms * 1e6, step_ms * 1e5, 5e6, 1e5, 1.0],
            cached_tokens: 0,
            closed_ns: 0,
            is_stale: false,
        };
        let open = |name: &str, reward| Candidate { name: name.to_owned(), reward };
        Decision {
            at_ms,
            at_ns: at_ms * 1_000_000,
            alias: "auto".to_owned(),
            class: "interactive".to_owned(),
            prompt_tokens: 100,
            expected_tokens: 200,
            max_tokens: 0,
            retry: false,
            limits: TimeLimits { budget_ns: Some(budget_ms * 1_000_000), ..TimeLimits::default() },
            path: ReturnPath { smoothed_rtt_ns: 40_000_000, ..ReturnPath::default() },
            models: vec![open("large", 1.0), open("small", 0.7)],
            engines: vec![engine("large", 0, running, 20.0), engine("small", 1, 0, 5.0)],
            policy: "rule".to_owned(),
            margin_percent: 110,
            choice: None,
            shadow: None,
            outcome: Some(AnswerOutcome { took_ns: 1_000_000_000, tokens: 180, met: true }),
        }
    }

    #[test]
    fn lines_come_back_in_the_order_of_time_and_others_are_counted() {
        let [one, two] = [decision(1_000, 0, 8_000), decision(2_000, 3, 8_000)];
        let text = format!("{}{}\nnot one\n{{\"at_ms\":1}}\n{}", two.line(), one.line(), &one.line()[..40]);
        assert_eq!(read(&text), (vec![one, two], 3));
    }

    #[test]
    fn a_record_of_an_earlier_version_has_the_default_margin() {
        let wide = Decision { margin_percent: 150, ..decision(1_000, 0, 8_000) };
        let earlier = wide.line().replace("\"margin_percent\":150,", "");
        assert_eq!(read(&(earlier + &wide.line())).0.iter().map(Decision::margin).collect::<Vec<_>>(), [1.1, 1.5]);
    }

    #[test]
    fn an_engine_is_what_it_was_for_a_router() {
        let replica = decision(1, 3, 1).engines[0].replica(0, 77);
        assert_eq!(EngineSnapshot::of("large", 0, &replica, 0, 77), decision(1, 3, 1).engines[0]);
        assert_eq!((replica.load.running, replica.load.updated_ns), (3, 77));
    }

    #[test]
    fn a_record_says_what_was_cached_and_one_of_an_earlier_version_reads_as_nothing_cached() {
        let mut new = decision(1, 3, 1);
        assert!(!new.line().contains("cached"), "{}", new.line());
        assert_eq!(read(&new.line()), (vec![new.clone()], 0));
        new.engines[1].cached_tokens = 90;
        assert_eq!(read(&new.line()), (vec![new.clone()], 0));
        assert_eq!(EngineSnapshot::of("small", 0, &new.engines[1].replica(0, 0), 90, 0), new.engines[1]);
    }

    #[test]
    fn a_record_says_which_engines_were_closed_or_stale_and_one_of_an_earlier_version_reads_as_open_and_fresh() {
        let mut new = decision(5_000, 3, 1);
        assert!(!["stale", "closed"].iter().any(|word| new.line().contains(word)), "{}", new.line());
        (new.engines[0].closed_ns, new.engines[1].is_stale) = (5, true);
        assert_eq!(read(&new.line()), (vec![new.clone()], 0));
        for engine in &new.engines {
            let replica = engine.replica(0, new.at_ns);
            assert_eq!(EngineSnapshot::of(&engine.model, 0, &replica, 0, new.at_ns), *engine);
        }
    }

    #[test]
    fn limits_that_are_none_are_not_said() {
        assert_eq!(TimeLimits::of(&Slo::unlimited()), TimeLimits::default());
        assert_eq!(TimeLimits::default().slo(), Slo::unlimited());
        assert!(!decision(1, 1, 1).line().contains("per_token_ns"));
    }
}
