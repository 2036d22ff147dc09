//! The policy: the classes of traffic, their terms, and the rules that assign a class to a stream or tunnel.
//!
//! A policy is one immutable value. A class bounds the effect of a client's signals (RFC 9218): a signal moves a stream only
//! between the bounds in [`ClassSettings`].

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use sched::{
    class::{ClassSettings, DEFAULT},
    stream::{Discipline, Low},
};

use crate::targets::{Pattern, Ports, Protocol, judged_by};

mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use read::{PACKETS, rate, read};

/// The most classes of a policy, including [`DEFAULT`]: packet marks have 8 bits for the class, and one value of them
/// means none.
pub const MAX_CLASSES: usize = 255;

/// The most named schedules of a policy.
pub const MAX_SCHEDULES: usize = 64;

/// The longest text of a policy, in bytes: some thousand classes and rules.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// All classes, how they share a connection, and the rules that assign them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How classes share a connection if no rule or listener names another schedule.
    pub schedule: ScheduleSettings,
    /// The named schedules, at most [`MAX_SCHEDULES`].
    pub schedules: BTreeMap<String, ScheduleSettings>,
    /// The classes, at most [`MAX_CLASSES`]: [`DEFAULT`] first, the others in the order of the text. No name occurs
    /// twice.
    pub classes: Vec<ClassSettings>,
    /// The rules that assign classes, and schedules to connections. For each of the two, the first matching rule that
    /// gives one decides.
    pub rules: Vec<PolicyRule>,
}

/// How the streams and tunnels of one connection share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleSettings {
    /// Which stream or tunnel has the next turn.
    pub discipline: Discipline,
    /// The least number of packets that are handed to the transport ahead of their first transmission. Fewer let urgent
    /// bytes overtake sooner, more keep the path filled between turns. `None` adapts it to the path's rate.
    pub low_mark_packets: Option<u32>,
}

/// The index of a class in [`Policy::classes`]. The default is [`DEFAULT`]'s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u16);

/// Gives a class, a schedule, or both to traffic that meets all conditions of the rule; without conditions, to all traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRule {
    /// The class of the traffic.
    pub class: Option<ClassId>,
    /// The name of the schedule for connections of clients. A rule that gives a schedule has no conditions other than
    /// users and listeners.
    pub schedule: Option<String>,
    /// The client must be authenticated as one of these users; `None` for any client, authenticated or not.
    pub users: Option<Vec<String>>,
    /// Targets, by address or by the name in the request.
    pub to: Option<Vec<Pattern>>,
    /// The target's ports.
    pub ports: Option<Ports>,
    /// How the target is reached.
    pub protocol: Option<Protocol>,
    /// The relay's listeners, by address.
    pub listeners: Option<Vec<SocketAddr>>,
    /// The request must name one of these models. With this condition or one of the next two, the rule applies only to requests
    /// for models.
    pub models: Option<Vec<String>>,
    /// A request must have one of these values of `service_tier`.
    pub service_tiers: Option<Vec<String>>,
    /// The header field `x-paced-class`, in which clients request a class, must have one of these names.
    pub asked_classes: Option<Vec<String>>,
}

/// What rules can test of a stream or tunnel.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The authenticated user, if there is one.
    pub user: Option<&'a str>,
    /// The target's name, if the client asked by name.
    pub name: Option<&'a str>,
    /// The target's address.
    pub address: SocketAddr,
    /// The IPv4 address to which the operator's own NAT64 translates the target's, if it does
    /// ([`TargetRules::translated`](crate::targets::TargetRules::translated)).
    pub translated: Option<Ipv4Addr>,
    /// How the target is reached.
    pub protocol: Protocol,
    /// The listener's address, as configured.
    pub listener: SocketAddr,
}

/// What rules can test of a request for a model.
#[derive(Clone, Copy, Debug)]
pub struct RequestSubject<'a> {
    /// The authenticated user, if there is one.
    pub user: Option<&'a str>,
    /// The listener's address, as configured.
    pub listener: SocketAddr,
    /// The `model` field of the body. `None` before the gateway or the edge reads the body.
    pub model: Option<&'a str>,
    /// The `service_tier` field of the body. `None` if the body has none, and before the gateway or the edge reads the body.
    pub service_tier: Option<&'a str>,
    /// The class in the header field `x-paced-class`.
    pub asked_class: Option<&'a str>,
}

impl Policy {
    /// Returns the class of `subject`: that of the first matching rule that gives a class, otherwise [`DEFAULT`]. Takes time
    /// proportional to the number of rules.
    #[must_use]
    pub fn classify(&self, subject: &Subject<'_>) -> ClassId {
        self.rules.iter().find_map(|rule| rule.class.filter(|_| rule.matches(subject))).unwrap_or_default()
    }

    /// Returns the class of a request for a model: that of the first matching rule that gives a class; `None` if there is no such
    /// rule. Takes time proportional to the number of rules.
    #[must_use]
    pub fn request_class(&self, subject: &RequestSubject<'_>) -> Option<ClassId> {
        self.rules.iter().find_map(|rule| rule.class.filter(|_| rule.matches_request(subject)))
    }

    /// Whether any rule has a condition on the body of a request for a model.
    #[must_use]
    pub fn asks_for_bodies(&self) -> bool {
        self.rules.iter().any(|rule| rule.models.is_some() || rule.service_tiers.is_some())
    }

    /// Returns the name of the schedule for a client's connection: from the first matching rule that names one, otherwise from its
    /// listener. Returns `None`, which means [`Policy::schedule`], if neither names one, or if the policy has no schedule of that
    /// name. `user` is the connection's user, once known. Takes time proportional to the number of rules.
    #[must_use]
    pub fn schedule_of<'a>(
        &'a self,
        user: Option<&str>,
        listener: SocketAddr,
        listeners_own: Option<&'a str>,
    ) -> Option<&'a str> {
        let by_rule =
            |rule: &'a PolicyRule| rule.schedule.as_deref().filter(|_| rule.matches_connection(user, listener));
        let name = self.rules.iter().find_map(by_rule).or(listeners_own)?;
        self.schedules.contains_key(name).then_some(name)
    }

    /// Returns the schedule `name`; [`Policy::schedule`] without a name, or if there is no schedule of that name.
    #[must_use]
    pub fn schedule_named(&self, name: Option<&str>) -> &ScheduleSettings {
        name.and_then(|name| self.schedules.get(name)).unwrap_or(&self.schedule)
    }

    /// Returns the name of the class that a rule gives, if it gives one.
    pub(crate) fn class_of(&self, rule: &PolicyRule) -> Option<&str> {
        rule.class.map(|id| self.class(id).name.as_str())
    }

    /// Returns the class `id`, or [`DEFAULT`]'s if this policy has no class for an `id` of another policy.
    #[must_use]
    pub fn class(&self, id: ClassId) -> &ClassSettings {
        self.classes.get(usize::from(id.0)).unwrap_or(&self.classes[0])
    }

    /// Returns the names of all classes, in order.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.classes.iter().map(|class| class.name.as_str()).collect()
    }

    /// Returns the ID of the class `name`.
    #[must_use]
    pub fn id_of(&self, name: &str) -> Option<ClassId> {
        let place = self.classes.iter().position(|class| class.name == name)?;
        u16::try_from(place).ok().map(ClassId)
    }

    /// Returns the rules that are never reached, each with the rule without conditions that stands before it. Both are counted
    /// from 1.
    pub(crate) fn unreached_rules(&self) -> impl Iterator<Item = (usize, usize)> {
        let always =
            |gives: fn(&PolicyRule) -> bool| self.rules.iter().position(|rule| rule.is_unconditional() && gives(rule));
        let always = [always(|rule| rule.class.is_some()), always(|rule| rule.schedule.is_some())];
        (0..).zip(&self.rules).filter_map(move |(place, rule)| {
            // The rule after which everything that this rule gives is without effect.
            let gives = [rule.class.is_some(), rule.schedule.is_some()];
            let before = gives.into_iter().zip(always).filter(|(gives, _)| *gives);
            let before: Option<Vec<usize>> =
                before.map(|(_, always)| always.filter(|always| *always < place)).collect();
            let behind = before?.into_iter().max()?;
            Some((place + 1, behind + 1))
        })
    }
}

impl Default for Policy {
    /// One class, served by round robin.
    fn default() -> Self {
        let (schedule, classes) = (ScheduleSettings::default(), vec![ClassSettings::named(DEFAULT)]);
        Self { schedule, schedules: BTreeMap::new(), classes, rules: Vec::new() }
    }
}

impl Default for ScheduleSettings {
    /// Two levels, the low one by round robin. As long as no class is on the high level, every stream and tunnel takes
    /// its turn, whatever clients signal, as an operator who configured nothing expects; and a class needs only
    /// `level = "high"` and a deadline to overtake them.
    fn default() -> Self {
        Self { discipline: Discipline::Ml { low: Low::Rr }, low_mark_packets: None }
    }
}

impl PolicyRule {
    fn is_unconditional(&self) -> bool {
        self.users.is_none() && self.listeners.is_none() && !self.is_about_targets() && !self.is_about_requests()
    }

    fn matches(&self, subject: &Subject<'_>) -> bool {
        let ip = subject.address.ip();
        let judged = judged_by(subject.translated.map_or(ip, IpAddr::V4)).chain([ip]);
        let is_target = |to: &Pattern| to.covers_name(subject.name) || judged.clone().any(|ip| to.covers(ip));
        self.matches_connection(subject.user, subject.listener)
            && !self.is_about_requests()
            && self.to.as_ref().is_none_or(|to| to.iter().any(is_target))
            && self.ports.as_ref().is_none_or(|ports| ports.contains(subject.address.port()))
            && self.protocol.is_none_or(|protocol| protocol == subject.protocol)
    }

    /// Returns whether any condition concerns a target.
    const fn is_about_targets(&self) -> bool {
        self.to.is_some() || self.ports.is_some() || self.protocol.is_some()
    }

    /// Returns whether any condition concerns a request for a model.
    const fn is_about_requests(&self) -> bool {
        self.models.is_some() || self.service_tiers.is_some() || self.asked_classes.is_some()
    }

    fn matches_request(&self, subject: &RequestSubject<'_>) -> bool {
        let is_one_of = |names: &Option<Vec<String>>, given: Option<&str>| {
            names.as_ref().is_none_or(|names| given.is_some_and(|given| names.iter().any(|name| name == given)))
        };
        self.matches_connection(subject.user, subject.listener)
            && !self.is_about_targets()
            && is_one_of(&self.models, subject.model)
            && is_one_of(&self.service_tiers, subject.service_tier)
            && is_one_of(&self.asked_classes, subject.asked_class)
    }

    /// Returns whether the conditions on connections hold.
    fn matches_connection(&self, user: Option<&str>, listener: SocketAddr) -> bool {
        self.users.as_ref().is_none_or(|users| user.is_some_and(|user| users.iter().any(|own| own == user)))
            && self.listeners.as_ref().is_none_or(|listeners| listeners.contains(&listener))
    }
}
