//! The decisions of another policy about recorded requests.
//!
//! Each decision is repeated in the recorded state. That shows how often a policy would have decided differently, and whether
//! its choices were predicted in time. Only a simulation can show their results, and the load that they would have left
//! ([`crate::learn::evaluate`]).

use std::collections::BTreeMap;

use sched::route::{Model, ModelChoice, ModelSet, Replica, Router, RoutingPolicy, State};

use crate::{decision::Decision, policy};

/// A policy with the names of its models and classes; without names, it takes any.
#[derive(Clone, Copy, Debug)]
pub struct NamedPolicy<'a> {
    /// The policy. The margin of a rule is the recorded one, in place of its own.
    pub policy: &'a RoutingPolicy,
    /// The models, in the policy's order. If empty, each record's own models.
    pub models: &'a [String],
    /// The classes, in the same way.
    pub classes: &'a [String],
}

impl NamedPolicy<'_> {
    /// Returns a router as a gateway with this margin has it.
    fn router(&self, names: &[String], rewards: &[f32], margin: f64) -> Router {
        let model = |(name, reward): (&String, &f32)| Model { id: policy::id(name), rewards: vec![*reward] };
        let policy = match self.policy {
            RoutingPolicy::Rule { .. } => RoutingPolicy::Rule { margin },
            other => other.clone(),
        };
        Router::new(names.iter().zip(rewards).map(model).collect(), policy).with_margin(margin)
    }
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replayed {
    /// Repeated decisions.
    pub asked: usize,
    /// Decisions that were skipped, because they are about models that the policy does not know.
    pub other_models: usize,
    /// Choices that equal the recorded one.
    pub same: usize,
    /// Counts by the recorded model and the model that the policy would have chosen; `None` if no engine was usable.
    pub pairs: BTreeMap<(Option<String>, Option<String>), usize>,
    /// Choices that were predicted in time: recorded ones, and the policy's.
    pub in_time: (usize, usize),
    /// The sums of the worths of choices that were predicted in time, in the same order.
    pub worth: (f64, f64),
    /// How many complete answers of recorded choices were in time, and how many there were.
    pub met: (usize, usize),
}

/// Asks a policy about decisions, in the order of their time, with the guard on.
#[must_use]
pub fn replay(decisions: &[Decision], asked: NamedPolicy<'_>) -> Replayed {
    let mut replayed = Replayed::default();
    // A gateway gets another router when it gets another configuration.
    let mut routers: BTreeMap<(Vec<String>, Vec<u32>, u16), Router> = BTreeMap::new();
    // The last known reward of each model. A record names only the models that were open to its request.
    let mut rewards: BTreeMap<&str, f32> = BTreeMap::new();
    for decision in decisions {
        let names = match asked.models {
            [] => decision.models.iter().map(|open| open.name.clone()).collect(),
            of_policy => of_policy.to_vec(),
        };
        if decision.models.iter().any(|open| !names.contains(&open.name)) {
            replayed.other_models += 1;
            continue;
        }
        rewards.extend(decision.models.iter().map(|open| (&open.name[..], open.reward)));
        let known: Vec<f32> = names.iter().map(|name| rewards.get(&name[..]).copied().unwrap_or_default()).collect();
        let bits = known.iter().map(|reward| reward.to_bits()).collect();
        let key = (names.clone(), bits, decision.margin_percent);
        let router = routers.entry(key).or_insert_with(|| asked.router(&names, &known, decision.margin()));
        let choice = ask(router, decision, &names, asked.classes);
        replayed.note(decision, choice.and_then(|choice| Some((names.get(choice.model)?, choice))));
    }
    replayed
}

fn ask(router: &mut Router, decision: &Decision, names: &[String], classes: &[String]) -> Option<ModelChoice> {
    let place = |model: &str| names.iter().position(|name| name == model);
    let class = classes.iter().position(|class| *class == decision.class).unwrap_or(classes.len());
    // A model that the policy does not know keeps its position among engines, where the router skips it.
    let replicas: Vec<Replica> = (decision.engines.iter())
        .map(|engine| engine.replica(place(&engine.model).unwrap_or(usize::MAX), decision.at_ns))
        .collect();
    let open = decision.models.iter().filter_map(|open| place(&open.name));
    let mut request = decision.request(class);
    request.allowed = open.fold(ModelSet::NONE, ModelSet::with);
    let cached: Vec<u32> = decision.engines.iter().map(|engine| engine.cached_tokens).collect();
    let state = State { replicas: &replicas, admitted: &[], cached: &cached, path: decision.path.path() };
    let choice = router.route(&request, &state, decision.at_ns)?;
    // A record does not say whether an engine began, so each request counts.
    router.began(choice.replica, &request, &state, decision.at_ns);
    Some(choice)
}

impl Replayed {
    fn note(&mut self, decision: &Decision, choice: Option<(&String, ModelChoice)>) {
        let recorded = decision.choice.as_ref();
        let worth =
            |model: &str| decision.models.iter().find(|open| open.name == model).map_or(0.0, |open| open.reward.into());
        self.asked += 1;
        let (before, now) = (recorded.map(|chosen| chosen.model.clone()), choice.map(|(name, _)| name.clone()));
        self.same += usize::from(before == now);
        if let Some(chosen) = recorded.filter(|chosen| chosen.in_time) {
            self.in_time.0 += 1;
            self.worth.0 += worth(&chosen.model);
        }
        if let Some((name, _)) = choice.filter(|(_, choice)| choice.in_time) {
            self.in_time.1 += 1;
            self.worth.1 += worth(name);
        }
        if let Some(outcome) = decision.outcome {
            self.met = (self.met.0 + usize::from(outcome.met), self.met.1 + 1);
        }
        *self.pairs.entry((before, now)).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::tests::decision;

    fn asked(policy: &RoutingPolicy) -> NamedPolicy<'_> {
        NamedPolicy { policy, models: &[], classes: &[] }
    }

    /// Decisions of the rule; the later ones find the large model's engine busy.
    fn recorded() -> Vec<Decision> {
        let rule = RoutingPolicy::Rule { margin: 1.1 };
        let mut decisions: Vec<_> = (0..10).map(|at| decision(at * 100, at as u32 * 2, 9_000)).collect();
        let mut router = Router::new(
            decisions[0]
                .models
                .iter()
                .map(|open| Model { id: policy::id(&open.name), rewards: vec![open.reward] })
                .collect(),
            rule,
        );
        let names = ["large".to_owned(), "small".to_owned()];
        for decision in &mut decisions {
            let choice = ask(&mut router, decision, &names, &[]).unwrap();
            decision.decide(&names[choice.model], 0, &choice);
        }
        decisions
    }

    #[test]
    fn the_same_policy_decides_the_same() {
        let decisions = recorded();
        let rule = RoutingPolicy::Rule { margin: 1.1 };
        let replayed = replay(&decisions, asked(&rule));
        assert_eq!((replayed.asked, replayed.same, replayed.other_models), (10, 10, 0));
        assert_eq!(replayed.in_time.0, replayed.in_time.1);
        let models: Vec<_> = replayed.pairs.keys().map(|(before, _)| before.clone().unwrap()).collect();
        assert_eq!(models, ["large", "small"], "the rule leaves the busy engine alone");
    }

    #[test]
    fn a_record_is_judged_by_its_own_margin_and_rewards() {
        let rule = RoutingPolicy::Rule { margin: 1.1 };
        let chosen = |decisions: &[Decision]| {
            let replayed = replay(decisions, asked(&rule));
            replayed.pairs.into_iter().map(|((_, now), count)| (now.unwrap(), count)).collect::<Vec<_>>()
        };
        let of = |model: &str, count| (model.to_owned(), count);
        // The large model needs about 5 s.
        let narrow = decision(0, 0, 6_500);
        let wide = Decision { margin_percent: 1_000, ..decision(100, 0, 6_500) };
        assert_eq!(chosen(&[narrow.clone(), wide]), [of("large", 1), of("small", 1)]);
        let mut other = decision(100, 0, 6_500);
        other.models[1].reward = 2.0;
        assert_eq!(chosen(&[narrow, other]), [of("large", 1), of("small", 1)]);
    }

    #[test]
    fn cached_tokens_count_in_a_replay() {
        let names = ["large".to_owned(), "small".to_owned()];
        let rule = RoutingPolicy::Rule { margin: 1.1 };
        let mut decision = Decision { prompt_tokens: 100_000, ..decision(0, 0, 9_000) };
        let models = names.iter().map(|name| Model { id: policy::id(name), rewards: vec![1.0] });
        let mut router = Router::new(models.collect(), rule);
        let mut in_time = |decision: &Decision| ask(&mut router, decision, &names, &[]).unwrap().in_time;
        assert!(!in_time(&decision), "reading the prompt takes 10 s");
        decision.engines[0].cached_tokens = 99_000;
        assert!(in_time(&decision));
    }

    #[test]
    fn a_load_that_was_stale_leaves_the_decision_to_the_rule_in_a_replay_as_well() {
        let names = ["large".to_owned(), "small".to_owned()];
        let models = names.iter().map(|name| Model { id: policy::id(name), rewards: vec![1.0] });
        let mut router = Router::new(models.collect(), RoutingPolicy::LeastLoaded);
        let mut decision = decision(5_000, 3, 9_000);
        let mut reason = |decision: &Decision| ask(&mut router, decision, &names, &[]).unwrap().reason.name();
        let fresh = reason(&decision);
        decision.engines[1].is_stale = true;
        assert_eq!([fresh == "fallback", reason(&decision) == "fallback"], [false, true]);
    }

    #[test]
    fn another_policy_decides_otherwise_but_never_late_while_one_is_in_time() {
        let decisions = recorded();
        let fixed = replay(&decisions, asked(&RoutingPolicy::Fixed(1)));
        assert!(fixed.same < 10 && fixed.worth.1 < fixed.worth.0);
        let late = replay(&decisions, asked(&RoutingPolicy::Fixed(0)));
        assert_eq!(late.in_time, (10, 10), "the guard is in force");
        assert_eq!(fixed.met, (10, 10));
    }

    #[test]
    fn a_policy_for_other_models_is_not_asked() {
        let names = ["large".to_owned(), "other".to_owned()];
        let replayed = replay(&recorded(), NamedPolicy { models: &names, ..asked(&RoutingPolicy::RoundRobin) });
        assert_eq!((replayed.asked, replayed.other_models), (0, 10));
    }
}
