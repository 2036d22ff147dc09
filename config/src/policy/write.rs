//! How a policy is written as text: what [`Policy::from_toml`] reads back as the same policy.

use sched::stream::{Discipline, Expiry, Low};

use super::read::{DisciplineWord, DropWord};
use super::{Class, DEFAULT, DropRule, Policy, Rule, Schedule};
use crate::text::{Keys, Text};

impl Policy {
    /// Writes the policy as TOML, without what goes without saying: keys that have their default, and what a class took
    /// from another with `like`, which it now has by itself.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = Text::brief();
        self.write(&mut text);
        text.into_string()
    }

    pub(crate) fn write(&self, text: &mut Text) {
        text.section("[schedule]", |section| schedule(&self.schedule, section));
        for (name, schedule) in &self.schedules {
            text.section(&format!("[schedule.{name}]"), |section| self::schedule(schedule, section));
        }
        for class in &self.classes {
            let plain = Class::named(&class.name);
            if class.name != DEFAULT || *class != plain || text.is_whole() {
                text.section(&format!("[class.{}]", class.name), |section| self::class(class, &plain, section));
            }
        }
        for rule in &self.rules {
            text.section("[[rule]]", |section| self::rule(rule, self.class_of(rule), section));
        }
    }
}

fn schedule(schedule: &Schedule, section: &mut Keys<'_>) {
    section.word(
        "discipline",
        match schedule.discipline {
            Discipline::Rr => DisciplineWord::Rr,
            Discipline::Fcfs => DisciplineWord::Fcfs,
            Discipline::Edf { .. } => DisciplineWord::Edf,
            Discipline::Abs => DisciplineWord::Abs,
            Discipline::Ml { .. } => DisciplineWord::Ml,
            Discipline::Wfq => DisciplineWord::Wfq,
            Discipline::Lottery => DisciplineWord::Lottery,
        },
    );
    match schedule.discipline {
        Discipline::Ml { low } => section.unless(low == Low::Rr, |section| section.word("low", low)),
        Discipline::Edf { expiry } => section.unless(expiry == Expiry::Soft, |section| section.word("expiry", expiry)),
        _ => {}
    }
    section.number("low_mark_packets", schedule.low_mark_packets);
}

fn class(class: &Class, plain: &Class, section: &mut Keys<'_>) {
    section.unless(class.level == plain.level, |section| section.word("level", class.level));
    section.unless(class.priority == plain.priority, |section| section.number("priority", Some(class.priority)));
    let (lowest, highest) = (class.priorities.start(), class.priorities.end());
    let follows = class.priorities == (0..=class.priority);
    section.unless(follows, |section| section.number("priorities", Some(format!("[{lowest}, {highest}]"))));
    section.unless(class.weight == plain.weight, |section| section.number("weight", Some(class.weight)));
    section.millis("deadline_ms", class.deadline);
    let follows = class.shortest_deadline == class.deadline;
    section.unless(follows, |section| section.millis("shortest_deadline_ms", class.shortest_deadline));
    match class.drop {
        DropRule::Oldest => section.unless(true, |section| section.word("drop", DropWord::Oldest)),
        DropRule::Sojourn(wait) => {
            section.word("drop", DropWord::Sojourn);
            section.millis("sojourn_ms", Some(wait));
        }
        DropRule::CoDel { target, interval } => {
            section.word("drop", DropWord::CoDel);
            section.millis("target_ms", Some(target));
            section.millis("interval_ms", Some(interval));
        }
    }
    section.rate("rate_up", class.rate_up);
    section.rate("rate_down", class.rate_down);
    section.number("packets_up", class.packets_up);
    section.number("packets_down", class.packets_down);
    section.number("dscp", class.dscp);
}

fn rule(rule: &Rule, class: Option<&str>, section: &mut Keys<'_>) {
    section.optional_text("class", class);
    section.optional_text("schedule", rule.schedule.as_ref());
    section.list("user", rule.users.as_ref());
    section.list("to", rule.to.as_ref());
    section.ports("ports", rule.ports.as_ref());
    if let Some(protocol) = rule.protocol {
        section.word("protocol", protocol);
    }
    section.list("listener", rule.listeners.as_ref());
}
