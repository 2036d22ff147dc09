//! Records of decisions: all inputs of a decision, and no content of the request.

use config::gateway::GatewaySettings;
use routing::decision::{Candidate, Decision, EngineSnapshot, ReturnPath, TimeLimits};
use sched::route::{ModelChoice, Replica, RoutedRequest, State};

use super::{Decided, RouteQuery, chooser::worth};

/// Makes records of decisions, with the configuration's names of models and aliases.
#[derive(Debug)]
pub(super) struct Recorder {
    aliases: Vec<String>,
    /// The models, with the worth of an answer of each.
    models: Vec<Candidate>,
    margin_percent: u16,
}

impl Recorder {
    /// Returns a recorder if decisions should be recorded.
    pub(super) fn of(settings: &GatewaySettings) -> Option<Self> {
        let candidate = |model| Candidate { reward: worth(model), name: model.name.clone() };
        (settings.decisions_bytes > 0).then(|| Self {
            aliases: settings.aliases.iter().map(|alias| alias.name.clone()).collect(),
            models: settings.models.iter().map(candidate).collect(),
            margin_percent: settings.margin_percent,
        })
    }

    /// Records a choice that the policy of an alias made at `at_ns`.
    pub(super) fn record(
        &self,
        (asked, by): (RouteQuery<'_>, &Decided),
        (request, state): (&RoutedRequest, State<'_>),
        choice: &ModelChoice,
        at_ns: u64,
    ) -> Box<Decision> {
        let name = |model: usize| self.models.get(model).map(|model| model.name.clone()).unwrap_or_default();
        // The engines of a model are adjacent, in their order.
        let place = |at: usize| {
            let model = state.replicas.get(at).map(|replica| replica.model);
            state.replicas.iter().take(at).filter(|other| Some(other.model) == model).count()
        };
        let engine = |(at, replica): (usize, &Replica)| {
            EngineSnapshot::of(&name(replica.model), place(at), replica, state.cached_tokens(at), at_ns)
        };
        let mut decision = Decision {
            at_ms: unix_ms(),
            at_ns,
            alias: self.aliases.get(by.alias).cloned().unwrap_or_default(),
            class: asked.class.to_owned(),
            prompt_tokens: request.prompt_tokens,
            expected_tokens: request.expected_tokens,
            max_tokens: request.max_tokens,
            retry: asked.is_retry,
            limits: TimeLimits::of(&request.slo),
            path: ReturnPath::of(&state.path),
            models: asked.models.iter().filter_map(|model| self.models.get(*model)).cloned().collect(),
            engines: state.replicas.iter().enumerate().map(engine).collect(),
            policy: by.policy.to_owned(),
            margin_percent: self.margin_percent,
            choice: None,
            shadow: by.shadow.and_then(|shadow| shadow.model).map(name),
            outcome: None,
        };
        decision.decide(&name(choice.model), place(choice.replica), choice);
        Box::new(decision)
    }
}

fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
