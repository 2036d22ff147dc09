//! Reads a policy and its tables from text.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use sched::{
    class::{ClassSettings, DEFAULT, DropRule, Late},
    path::Placement,
    stream::{Discipline, Expiry, Level, Low},
};
use serde_json::{Value as Json, json};
use toml::{Spanned, de::DeValue};

use super::{ClassId, MAX_CLASSES, MAX_SCHEDULES, Policy, PolicyRule, ScheduleSettings};
use crate::{
    error::{Errors, Problem},
    section::{ClassName, FilePart, ScheduleName, Section, Value, read_document, text, unsigned, whole_number, words},
    targets::Ports,
    text::quoted,
};

/// Reads the sections of a policy, which may be mixed with others.
pub(crate) fn read(root: &mut Section<'_>) -> Policy {
    let (schedule, mut schedules) = root.section("schedule", |section| {
        let plain = ScheduleSettings::default();
        let own = schedule(section, &plain);
        let named =
            section.own_named_sections("schedule").read(|name, section| (name.to_owned(), schedule(section, &plain)));
        (own, named)
    });
    if schedules.len() > MAX_SCHEDULES {
        let cause = "there are more than 64 schedules with names";
        root.refuse_excess("schedule", cause, "merge some of them");
        schedules.truncate(MAX_SCHEDULES);
    }
    let schedules: BTreeMap<_, _> = schedules.into_iter().collect();
    let mut sections = root.named_sections("class", Some(DEFAULT));
    if sections.len() > MAX_CLASSES {
        let cause = "there are more than 255 classes, including \"default\"";
        root.refuse_excess("class", cause, "merge some of them");
        sections.truncate(MAX_CLASSES);
    }
    let names = sections.names();
    let classes = sections.read_like("like", |name, section| {
        section.name::<ClassName>("like", &names, None);
        class(section, &ClassSettings::named(name))
    });
    let rules = root.sections("rule", |section| rule(section, None, &names, &schedules));
    Policy { schedule, schedules, classes, rules }
}

impl Policy {
    /// Reads a policy from TOML text that contains only `[schedule]`, `[schedule.NAME]`, `[class.NAME]` and `[[rule]]`.
    ///
    /// # Errors
    /// The first hundred errors of the text, as far as they can be told apart, each with its position and what to write
    /// instead.
    pub fn from_toml(text: &str) -> Result<Self, Errors> {
        read_document(&[FilePart::from(text)], |root| Some(read(root)))
    }

    /// Asks for the name of one of its classes.
    pub(crate) fn class_named_in(&self, section: &mut Section<'_>, of: Option<String>) -> Option<String> {
        section.name::<ClassName>("class", &self.names(), of)
    }

    /// Asks for the name of one of its schedules.
    pub(crate) fn schedule_named_in(&self, section: &mut Section<'_>, of: Option<String>) -> Option<String> {
        schedule_named_in(section, of, &self.schedules)
    }
}

words! {
    /// A discipline without its further options.
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

fn schedule_named_in(
    section: &mut Section<'_>,
    of: Option<String>,
    schedules: &BTreeMap<String, ScheduleSettings>,
) -> Option<String> {
    let names: Vec<&str> = schedules.keys().map(String::as_str).collect();
    section.name::<ScheduleName>("schedule", &names, of)
}

/// Walks through a schedule.
pub(super) fn schedule(section: &mut Section<'_>, of: &ScheduleSettings) -> ScheduleSettings {
    let (word, low, expiry) = match of.discipline {
        Discipline::Rr => (DisciplineWord::Rr, LOW, EXPIRY),
        Discipline::Fcfs => (DisciplineWord::Fcfs, LOW, EXPIRY),
        Discipline::Edf { expiry } => (DisciplineWord::Edf, LOW, expiry),
        Discipline::Abs => (DisciplineWord::Abs, LOW, EXPIRY),
        Discipline::Ml { low } => (DisciplineWord::Ml, low, EXPIRY),
        Discipline::Wfq => (DisciplineWord::Wfq, LOW, EXPIRY),
        Discipline::Lottery => (DisciplineWord::Lottery, LOW, EXPIRY),
    };
    let word = section.value("discipline", word);
    let by = ["discipline"];
    let why = ("only the discipline \"ml\" has a low level", "write discipline = \"ml\", or remove it");
    section.refuse_unless(word == DisciplineWord::Ml, "low", &by, why);
    let why = ("only the discipline \"edf\" lets streams expire", "write discipline = \"edf\", or remove it");
    section.refuse_unless(word == DisciplineWord::Edf, "expiry", &by, why);
    let low = section.unless(low == LOW, |section| section.value("low", low));
    let expiry = section.unless(expiry == EXPIRY, |section| section.value("expiry", expiry));
    let discipline = match word {
        DisciplineWord::Rr => Discipline::Rr,
        DisciplineWord::Fcfs => Discipline::Fcfs,
        DisciplineWord::Edf => Discipline::Edf { expiry },
        DisciplineWord::Abs => Discipline::Abs,
        DisciplineWord::Ml => Discipline::Ml { low },
        DisciplineWord::Wfq => Discipline::Wfq,
        DisciplineWord::Lottery => Discipline::Lottery,
    };
    let low_mark_packets = section.optional_number("low_mark_packets", 1..=1_024, of.low_mark_packets);
    ScheduleSettings { discipline, low_mark_packets }
}

/// Defaults of `ml` and `edf`.
const LOW: Low = Low::Rr;
const EXPIRY: Expiry = Expiry::Soft;

words! { for Low { Rr = "rr", Fcfs = "fcfs", Edf = "edf", Wfq = "wfq", } }
words! { for Expiry { Soft = "soft", Hard = "hard", } }
words! { for Late { Serve = "serve", Refuse = "refuse", } }
words! { for Placement {
    Paced = "paced", FStream = "fstream", LowestRtt = "lowest-rtt", SaEcf = "sa-ecf", RoundRobin = "round-robin",
    Redundant = "redundant",
} }
words! { for Level { High = "high", Low = "low", } }

/// Up to an hour: traffic that may wait longer is not urgent.
const DEADLINE_MS: RangeInclusive<u64> = 1..=3_600_000;
const WEIGHT: RangeInclusive<u64> = 1..=u16::MAX as u64;

/// Walks through a class. The default of a key may follow from another key's value, for which the value just read
/// counts.
pub(super) fn class(section: &mut Section<'_>, of: &ClassSettings) -> ClassSettings {
    let plain = ClassSettings::named(&of.name);
    let priority =
        section.unless(of.priority == plain.priority, |section| section.number("priority", 0..=255, of.priority));
    let follows = of.priorities == (0..=of.priority);
    let priorities = if follows { 0..=priority } else { of.priorities.clone() };
    let priorities = section.unless(follows, |section| section.value("priorities", priorities));
    if !priorities.contains(&priority) {
        let cause = "the priority of the class is not within its priorities";
        section.refuse_pair(["priorities", "priority"], cause, "widen priorities, or move priority");
    }
    let deadline = section.optional_millis("deadline_ms", DEADLINE_MS, of.deadline);
    let follows = of.shortest_deadline == of.deadline;
    let shortest = if follows { deadline } else { of.shortest_deadline };
    let shortest_deadline =
        section.unless(follows, |section| section.optional_millis("shortest_deadline_ms", DEADLINE_MS, shortest));
    if deadline.zip(shortest_deadline).is_some_and(|(own, shortest)| own < shortest) {
        let cause = "the deadline of the class is shorter than the shortest that it allows";
        let remedy = "lower shortest_deadline_ms, or raise deadline_ms";
        section.refuse_pair(["shortest_deadline_ms", "deadline_ms"], cause, remedy);
    }
    ClassSettings {
        name: of.name.clone(),
        level: section.unless(of.level == plain.level, |section| section.value("level", of.level)),
        priority,
        priorities,
        weight: section.unless(of.weight == plain.weight, |section| section.number("weight", WEIGHT, of.weight)),
        deadline,
        shortest_deadline,
        drop: drop_rule(section, of.drop),
        rate_up: rate(section, "rate_up", of.rate_up),
        rate_down: rate(section, "rate_down", of.rate_down),
        packets_up: section.optional_number("packets_up", PACKETS, of.packets_up),
        packets_down: section.optional_number("packets_down", PACKETS, of.packets_down),
        dscp: section.optional_number("dscp", 0..=63, of.dscp),
        late: section.unless(of.late == plain.late, |section| section.value("late", of.late)),
        placement: section.unless(of.placement == plain.placement, |section| section.value("placement", of.placement)),
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

fn drop_rule(section: &mut Section<'_>, of: DropRule) -> DropRule {
    const WAIT_MS: RangeInclusive<u64> = 1..=60_000;
    // RFC 8289 §4.3 recommends both.
    let codel = (Duration::from_millis(5), Duration::from_millis(100));
    let (word, sojourn, (target, interval)) = match of {
        DropRule::Oldest => (DropWord::Oldest, None, codel),
        DropRule::Sojourn(wait) => (DropWord::Sojourn, Some(wait), codel),
        DropRule::CoDel { target, interval } => (DropWord::CoDel, None, (target, interval)),
    };
    let word = section.unless(of == DropRule::Oldest, |section| section.value("drop", word));
    let by = ["drop"];
    let why = ("only drop = \"sojourn\" drops after a wait", "write drop = \"sojourn\", or remove it");
    section.refuse_unless(word == DropWord::Sojourn, "sojourn_ms", &by, why);
    let why = ("only drop = \"codel\" has it", "write drop = \"codel\", or remove it");
    section.refuse_unless(word == DropWord::CoDel, "target_ms", &by, why);
    section.refuse_unless(word == DropWord::CoDel, "interval_ms", &by, why);
    let sojourn = section.optional_millis("sojourn_ms", WAIT_MS, sojourn).unwrap_or_default();
    if word == DropWord::Sojourn && section.lacks("sojourn_ms") {
        section.refuse("drop", Problem::Missing { key: "sojourn_ms", expected: "a whole number of milliseconds" });
    }
    let target = section.millis("target_ms", WAIT_MS, target);
    let interval = section.millis("interval_ms", WAIT_MS, interval);
    if word == DropWord::CoDel && target >= interval {
        let cause = "target_ms is not below interval_ms";
        section.refuse_pair(["target_ms", "interval_ms"], cause, "lower target_ms, or raise interval_ms");
    }
    match word {
        DropWord::Oldest => DropRule::Oldest,
        DropWord::Sojourn => DropRule::Sojourn(sojourn),
        DropWord::CoDel => DropRule::CoDel { target, interval },
    }
}

/// Asks for a rate in bytes per second.
pub(crate) fn rate(section: &mut Section<'_>, key: &'static str, of: Option<u64>) -> Option<u64> {
    section.optional(key, of.map(Rate)).map(|Rate(rate)| rate)
}

/// The range of a limit in packets per second.
pub(crate) const PACKETS: RangeInclusive<u64> = 1..=1_000_000_000;

/// A rate in bytes per second.
struct Rate(u64);

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

    fn write(&self) -> String {
        quoted(&crate::text::rate(self.0))
    }

    fn schema() -> Json {
        text("^[0-9]+ [kMG]bit/s$")
    }
}

/// The two ends of a range of priorities.
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

    fn write(&self) -> String {
        format!("[{}, {}]", self.start(), self.end())
    }

    fn schema() -> Json {
        json!({ "type": "array", "items": whole_number(&(0..=255)), "minItems": 2, "maxItems": 2 })
    }
}

/// Walks through a rule that gives a class among `names`, a schedule among `schedules`, or both.
pub(super) fn rule(
    section: &mut Section<'_>,
    of: Option<&PolicyRule>,
    names: &[&str],
    schedules: &BTreeMap<String, ScheduleSettings>,
) -> Option<PolicyRule> {
    let class = of.and_then(|of| of.class).and_then(|ClassId(id)| names.get(usize::from(id)));
    let class = section.name::<ClassName>("class", names, class.map(|&name| name.to_owned()));
    let class = class.and_then(|class| names.iter().position(|name| *name == class));
    let class = class.and_then(|place| u16::try_from(place).ok()).map(ClassId);
    let schedule = schedule_named_in(section, of.and_then(|of| of.schedule.clone()), schedules);
    section.require_one_of(["class", "schedule"], ClassName::EXPECTED);
    let users = section.one_or_list("user", of.and_then(|of| of.users.clone()));
    let to = section.one_or_list("to", of.and_then(|of| of.to.clone()));
    let ports = of.and_then(|of| of.ports.as_ref()).map(|Ports(ports)| ports.clone());
    let ports = section.one_or_list("ports", ports).map(Ports);
    let protocol = section.optional("protocol", of.and_then(|of| of.protocol));
    let listeners = section.one_or_list("listener", of.and_then(|of| of.listeners.clone()));
    let models = section.one_or_list("model", of.and_then(|of| of.models.clone()));
    let service_tiers = section.one_or_list("service_tier", of.and_then(|of| of.service_tiers.clone()));
    let asked_classes = section.one_or_list("asked_class", of.and_then(|of| of.asked_classes.clone()));
    let (about_targets, about_requests) = (["to", "ports", "protocol"], ["model", "service_tier", "asked_class"]);
    for key in about_targets.into_iter().chain(about_requests) {
        let cause = "a schedule applies to whole connections, and this key to single tunnels or requests";
        let why = (cause, "give the schedule in a rule without this key");
        section.refuse_unless(!section.has("schedule"), key, &[], why);
    }
    let is_about_targets = about_targets.into_iter().any(|key| section.has(key));
    for key in about_requests {
        let cause = "this key is about requests for models, which have no target";
        section.refuse_unless(
            !is_about_targets,
            key,
            &[],
            (cause, "write a rule for tunnels and another for requests"),
        );
    }
    Some(PolicyRule { class, schedule, users, to, ports, protocol, listeners, models, service_tiers, asked_classes })
}
