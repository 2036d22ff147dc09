//! How a policy is read from text.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use sched::stream::{Discipline, Expiry, Level, Low};
use serde_json::{Value as Json, json};
use toml::Spanned;
use toml::de::DeValue;

use super::{Class, ClassId, DEFAULT, DropRule, MAX_CLASSES, MAX_SCHEDULES, Policy, Rule, Schedule};
use crate::error::Problem;
use crate::section::{ClassName, ScheduleName, Section, Value, text, unsigned, whole_number, words};
use crate::targets::Ports;

/// Reads the sections of a policy, which may stand among others.
pub(crate) fn read(root: &mut Section<'_>) -> Policy {
    let (schedule, mut schedules) = root.section("schedule", |section| {
        let own = schedule(section);
        let named = section.own_named_sections().read(|name, section| (name.to_owned(), schedule(section)));
        (own, named)
    });
    if schedules.len() > MAX_SCHEDULES {
        let cause = "there are more than 64 schedules with names";
        root.refuse("schedule", Problem::Contradiction { cause, remedy: "join some of them" });
        schedules.truncate(MAX_SCHEDULES);
    }
    let schedules: BTreeMap<_, _> = schedules.into_iter().collect();
    let mut sections = root.named_sections("class", DEFAULT);
    if sections.len() > MAX_CLASSES {
        let cause = "there are more than 255 classes, of which one is \"default\"";
        root.refuse("class", Problem::Contradiction { cause, remedy: "join some of them" });
        sections.truncate(MAX_CLASSES);
    }
    let names = sections.names();
    let classes = sections.read_like("like", |name, section| {
        section.place_in::<ClassName>(&names, "like");
        class(name, section)
    });
    let rules = root.sections("rule", |section| rule(section, &names, &schedules));
    Policy { schedule, schedules, classes, rules }
}

impl Policy {
    /// Reads the name of one of its classes.
    pub(crate) fn class_named_in(&self, section: &mut Section<'_>) -> Option<String> {
        let names: Vec<&str> = self.classes.iter().map(|class| &class.name[..]).collect();
        section.place_in::<ClassName>(&names, "class").map(|place| names[place].to_owned())
    }

    /// Reads the name of one of its schedules.
    pub(crate) fn schedule_named_in(&self, section: &mut Section<'_>) -> Option<String> {
        schedule_named_in(section, &self.schedules)
    }
}

words! {
    /// A discipline without what some of them add to it.
    #[derive(Default)]
    pub enum DisciplineWord {
        /// Round robin.
        Rr = "rr",
        /// In the order of arrival.
        Fcfs = "fcfs",
        /// By deadline.
        Edf = "edf",
        /// By priority.
        Abs = "abs",
        /// By level.
        #[default]
        Ml = "ml",
        /// By weight.
        Wfq = "wfq",
        /// By weight, drawn by lot.
        Lottery = "lottery",
    }
}

fn schedule_named_in(section: &mut Section<'_>, schedules: &BTreeMap<String, Schedule>) -> Option<String> {
    let names: Vec<&str> = schedules.keys().map(String::as_str).collect();
    section.place_in::<ScheduleName>(&names, "schedule").map(|place| names[place].to_owned())
}

fn schedule(section: &mut Section<'_>) -> Schedule {
    let word = section.get("discipline").unwrap_or_default();
    let remedy = "write discipline = \"ml\", or remove it";
    section.refuse_unless(word == DisciplineWord::Ml, "low", "only the discipline \"ml\" has a low level", remedy);
    let remedy = "write discipline = \"edf\", or remove it";
    section.refuse_unless(
        word == DisciplineWord::Edf,
        "expiry",
        "only the discipline \"edf\" lets streams expire",
        remedy,
    );
    let (low, expiry) = (section.get("low").unwrap_or(Low::Rr), section.get("expiry").unwrap_or(Expiry::Soft));
    let discipline = match word {
        DisciplineWord::Rr => Discipline::Rr,
        DisciplineWord::Fcfs => Discipline::Fcfs,
        DisciplineWord::Edf => Discipline::Edf { expiry },
        DisciplineWord::Abs => Discipline::Abs,
        DisciplineWord::Ml => Discipline::Ml { low },
        DisciplineWord::Wfq => Discipline::Wfq,
        DisciplineWord::Lottery => Discipline::Lottery,
    };
    Schedule { discipline, low_mark_packets: section.optional_number("low_mark_packets", 1..=1_024) }
}

words! { for Low { Rr = "rr", Fcfs = "fcfs", Edf = "edf", Wfq = "wfq", } }
words! { for Expiry { Soft = "soft", Hard = "hard", } }
words! { for Level { High = "high", Low = "low", } }

/// An hour: what may wait for longer is not in a hurry.
const MAX_DEADLINE_MS: u64 = 3_600_000;

fn class(name: &str, section: &mut Section<'_>) -> Class {
    let default = Class::named(name);
    let priority = section.number("priority", 0..=255, default.priority);
    let priorities = section.get("priorities").unwrap_or(0..=priority);
    if !priorities.contains(&priority) {
        let cause = "the priority of the class is not within its priorities";
        section.refuse_pair(["priorities", "priority"], cause, "widen priorities, or move priority");
    }
    let deadline = section.optional_millis("deadline_ms", 1..=MAX_DEADLINE_MS);
    let shortest_deadline = section.optional_millis("shortest_deadline_ms", 1..=MAX_DEADLINE_MS).or(deadline);
    if deadline.zip(shortest_deadline).is_some_and(|(own, shortest)| own < shortest) {
        let cause = "the deadline of the class is shorter than the shortest that it allows";
        let remedy = "lower shortest_deadline_ms, or raise deadline_ms";
        section.refuse_pair(["shortest_deadline_ms", "deadline_ms"], cause, remedy);
    }
    Class {
        level: section.get("level").unwrap_or(default.level),
        priority,
        priorities,
        weight: section.number("weight", 1..=u64::from(u16::MAX), default.weight),
        deadline,
        shortest_deadline,
        drop: drop_rule(section),
        rate_up: section.get("rate_up").map(|Rate(rate)| rate),
        rate_down: section.get("rate_down").map(|Rate(rate)| rate),
        packets_up: section.optional_number("packets_up", PACKETS),
        packets_down: section.optional_number("packets_down", PACKETS),
        dscp: section.optional_number("dscp", 0..=63),
        ..default
    }
}

words! {
    /// A drop rule without its times.
    #[derive(Default)]
    pub enum DropWord {
        /// When the queue is full.
        #[default]
        Oldest = "oldest",
        /// After a wait.
        Sojourn = "sojourn",
        /// RFC 8289.
        CoDel = "codel",
    }
}

fn drop_rule(section: &mut Section<'_>) -> DropRule {
    const WAIT_MS: RangeInclusive<u64> = 1..=60_000;
    let rule = section.get("drop").unwrap_or_default();
    let (cause, remedy) = ("only drop = \"sojourn\" drops after a wait", "write drop = \"sojourn\", or remove it");
    section.refuse_unless(rule == DropWord::Sojourn, "sojourn_ms", cause, remedy);
    let (cause, remedy) = ("only drop = \"codel\" has it", "write drop = \"codel\", or remove it");
    section.refuse_unless(rule == DropWord::CoDel, "target_ms", cause, remedy);
    section.refuse_unless(rule == DropWord::CoDel, "interval_ms", cause, remedy);
    let sojourn = section.optional_millis("sojourn_ms", WAIT_MS).unwrap_or_default();
    if rule == DropWord::Sojourn && section.lacks("sojourn_ms") {
        section.refuse("drop", Problem::Missing { key: "sojourn_ms", expected: "a whole number of milliseconds" });
    }
    // RFC 8289 §4.3 recommends both.
    let target = section.millis("target_ms", WAIT_MS, Duration::from_millis(5));
    let interval = section.millis("interval_ms", WAIT_MS, Duration::from_millis(100));
    if rule == DropWord::CoDel && target >= interval {
        let cause = "a wait that is acceptable for ever cannot be longer than one that is acceptable for a while";
        section.refuse_pair(["target_ms", "interval_ms"], cause, "lower target_ms, or raise interval_ms");
    }
    match rule {
        DropWord::Oldest => DropRule::Oldest,
        DropWord::Sojourn => DropRule::Sojourn(sojourn),
        DropWord::CoDel => DropRule::CoDel { target, interval },
    }
}

/// How many packets a second may be the most.
pub(crate) const PACKETS: RangeInclusive<u64> = 1..=1_000_000_000;

/// A rate in bytes per second.
pub(crate) struct Rate(pub(crate) u64);

impl Value for Rate {
    const EXPECTED: &'static str = "a rate as a whole number, a space and kbit/s, Mbit/s or Gbit/s, such as \"5 Mbit/s\", \
                                    from 8 kbit/s to 1000 Gbit/s";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let (number, unit) = value.as_str()?.split_once(' ')?;
        let unit = match unit {
            "kbit/s" => 1_000,
            "Mbit/s" => 1_000_000,
            "Gbit/s" => 1_000_000_000,
            _ => return None,
        };
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        let bits = number.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit)?;
        (8_000..=1_000_000_000_000).contains(&bits).then_some(Self(bits / 8))
    }

    fn schema() -> Json {
        text("^[0-9]+ [kMG]bit/s$")
    }
}

/// Two ends of a range of priorities.
impl Value for RangeInclusive<u8> {
    const EXPECTED: &'static str = "the lowest and the highest priority from 0 to 255 in brackets, such as [0, 159]";

    fn read(value: &DeValue<'_>) -> Option<Self> {
        let end = |end: &Spanned<DeValue<'_>>| unsigned(end.get_ref()).and_then(|end| u8::try_from(end).ok());
        let ends: Option<Vec<u8>> = value.as_array()?.iter().map(end).collect();
        match ends?[..] {
            [lowest, highest] if lowest <= highest => Some(lowest..=highest),
            _ => None,
        }
    }

    fn schema() -> Json {
        json!({ "type": "array", "items": whole_number(&(0..=255)), "minItems": 2, "maxItems": 2 })
    }
}

fn rule(section: &mut Section<'_>, names: &[&str], schedules: &BTreeMap<String, Schedule>) -> Option<Rule> {
    let class = section.place_in::<ClassName>(names, "class").and_then(|place| u16::try_from(place).ok()).map(ClassId);
    let schedule = schedule_named_in(section, schedules);
    section.require_one_of(["class", "schedule"], ClassName::EXPECTED);
    let users = section.one_or_list("user");
    let to = section.one_or_list("to");
    let ports = section.one_or_list("ports").map(Ports);
    let protocol = section.get("protocol");
    let listeners = section.one_or_list("listener");
    for key in ["to", "ports", "protocol"] {
        let cause = "a schedule is for all of a connection, and this is about single tunnels";
        section.refuse_unless(!section.has("schedule"), key, cause, "give the schedule in a rule without it");
    }
    Some(Rule { class, schedule, users, to, ports, protocol, listeners })
}
