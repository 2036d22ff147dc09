//! The classes of a policy, as the data path applies them, and the rules that choose among them.

use std::sync::Arc;

use config::policy::{Policy, RequestSubject, Subject};
use quic::{
    class::{Class, ClassMarks, ClassMetrics, ClassSet, PolicyRole},
    schedule::Schedule,
};

/// A policy and its classes, as one role applies them. All connections share them.
#[derive(Debug)]
pub struct Classes {
    policy: Policy,
    /// In the order of the policy.
    set: ClassSet,
}

impl Classes {
    /// Creates the classes of `policy`; `marks` returns the marks that a class's packets carry for the kernel. A class
    /// whose name existed before continues its counters.
    #[must_use]
    pub fn new(policy: Policy, role: PolicyRole, metrics: &ClassMetrics, marks: impl Fn(&str) -> ClassMarks) -> Self {
        Self { set: ClassSet::new(policy.classes.clone(), role, metrics, marks), policy }
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the class of a stream or tunnel.
    #[must_use]
    pub fn classify(&self, subject: &Subject<'_>) -> &Arc<Class> {
        self.set.at(self.policy.classify(subject).0.into())
    }

    /// Returns the class that a rule gives a request for a model; `None` if no rule matches.
    #[must_use]
    pub fn request_class(&self, subject: &RequestSubject<'_>) -> Option<&Arc<Class>> {
        self.policy.request_class(subject).map(|id| self.set.at(id.0.into()))
    }

    /// Returns the class of a name, or the default class if there is none of that name.
    #[must_use]
    pub fn named(&self, name: Option<&str>) -> &Arc<Class> {
        self.set.named(name)
    }

    /// Returns the class of a name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<Class>> {
        self.set.get(name)
    }

    /// Returns the schedule `name` of the policy, with the machine's clock. Without a name, or without a schedule of that
    /// name, returns the general schedule.
    #[must_use]
    pub fn schedule(&self, name: Option<&str>) -> Schedule {
        let settings = self.policy.schedule_named(name);
        Schedule::late(settings.discipline, settings.low_mark_packets, self.named(None).terms(None))
    }
}

#[cfg(test)]
mod tests {
    use masque::priority::Priority;
    use sched::stream::{DisciplineClock, Streams};

    use super::*;

    #[test]
    fn the_default_policy_is_round_robin_even_if_clients_send_signals() {
        let classes =
            Classes::new(Policy::default(), PolicyRole::Relay, &ClassMetrics::default(), |_| Default::default());
        let mut clock = DisciplineClock::new(classes.schedule(None).discipline, 1);
        let mut streams = Streams::new();
        for (stream, text) in (0..).zip(["u=7, i=?0", "u=0, dl=1", "i", ""]) {
            let service = classes.named(None).service(Priority::parse(text.as_bytes()).as_ref(), 5);
            streams.insert(&mut clock, stream, service);
            streams.wake(&mut clock, stream);
        }
        let mut turn = || {
            let (stream, _) = streams.turn().unwrap();
            streams.end_turn(&mut clock, stream, 1_200, true);
            stream
        };
        assert_eq!([0; 9].map(|_| turn()), [0, 1, 2, 3, 0, 1, 2, 3, 0]);
    }
}
