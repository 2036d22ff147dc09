//! How a policy is written as text: what [`Policy::from_toml`] reads back as the same policy.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use sched::stream::{Discipline, Expiry, Low};
use toml::Value;

use super::read::{DisciplineWord, DropWord};
use super::{Class, DEFAULT, DropRule, Policy, Rule, Schedule};
use crate::section::Word;
use crate::targets::Ports;

impl Policy {
    /// Writes the policy as TOML, without what goes without saying: keys that have their default, and what a class took
    /// from another with `like`, which it now has by itself.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = Text::default();
        text.section("[schedule]", |section| schedule(&self.schedule, section));
        for class in &self.classes {
            let plain = Class::named(&class.name);
            if class.name != DEFAULT || *class != plain {
                text.section(&format!("[class.{}]", class.name), |section| self::class(class, &plain, section));
            }
        }
        for rule in &self.rules {
            text.section("[[rule]]", |section| self::rule(rule, &self.class(rule.class).name, section));
        }
        text.0
    }
}

fn schedule(schedule: &Schedule, section: &mut Section<'_>) {
    let (word, low, expiry) = match schedule.discipline {
        Discipline::Rr => (DisciplineWord::Rr, Low::Rr, Expiry::Soft),
        Discipline::Fcfs => (DisciplineWord::Fcfs, Low::Rr, Expiry::Soft),
        Discipline::Edf { expiry } => (DisciplineWord::Edf, Low::Rr, expiry),
        Discipline::Abs => (DisciplineWord::Abs, Low::Rr, Expiry::Soft),
        Discipline::Ml { low } => (DisciplineWord::Ml, low, Expiry::Soft),
        Discipline::Wfq => (DisciplineWord::Wfq, Low::Rr, Expiry::Soft),
        Discipline::Lottery => (DisciplineWord::Lottery, Low::Rr, Expiry::Soft),
    };
    section.word("discipline", word);
    section.unless(low == Low::Rr, |section| section.word("low", low));
    section.unless(expiry == Expiry::Soft, |section| section.word("expiry", expiry));
    section.number("low_mark_packets", schedule.low_mark_packets);
}

fn class(class: &Class, plain: &Class, section: &mut Section<'_>) {
    section.unless(class.level == plain.level, |section| section.word("level", class.level));
    section.number("priority", (class.priority != plain.priority).then_some(class.priority));
    let (lowest, highest) = (class.priorities.start(), class.priorities.end());
    let follows = class.priorities == (0..=class.priority);
    section.number("priorities", (!follows).then(|| format!("[{lowest}, {highest}]")));
    section.number("weight", (class.weight != plain.weight).then_some(class.weight));
    section.millis("deadline_ms", class.deadline);
    let own = class.shortest_deadline.filter(|_| class.shortest_deadline != class.deadline);
    section.millis("shortest_deadline_ms", own);
    match class.drop {
        DropRule::Oldest => {}
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
    section.number("dscp", class.dscp);
}

fn rule(rule: &Rule, class: &str, section: &mut Section<'_>) {
    section.text("class", class);
    section.list("user", rule.users.as_ref());
    section.list("to", rule.to.as_ref());
    let ports = |Ports(ports): &Ports| {
        let of = |range: &std::ops::RangeInclusive<u16>| format!("\"{}-{}\"", range.start(), range.end());
        format!("[{}]", ports.iter().map(of).collect::<Vec<_>>().join(", "))
    };
    section.number("ports", rule.ports.as_ref().map(ports));
    if let Some(protocol) = rule.protocol {
        section.word("protocol", protocol);
    }
    section.list("listener", rule.listeners.as_ref());
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn section(&mut self, header: &str, fill: impl FnOnce(&mut Section<'_>)) {
        let gap = if self.0.is_empty() { "" } else { "\n" };
        // Writing to a string cannot fail.
        _ = writeln!(self.0, "{gap}{header}");
        fill(&mut Section(&mut self.0));
    }
}

/// One table, key by key.
struct Section<'a>(&'a mut String);

impl Section<'_> {
    fn line(&mut self, key: &str, value: impl Display) {
        _ = writeln!(self.0, "{key} = {value}");
    }

    fn unless(&mut self, is_default: bool, write: impl FnOnce(&mut Self)) {
        if !is_default {
            write(self);
        }
    }

    fn text(&mut self, key: &str, text: &str) {
        self.line(key, quoted(text));
    }

    fn word(&mut self, key: &str, word: impl Word) {
        self.line(key, quoted(word.word()));
    }

    fn number(&mut self, key: &str, number: Option<impl Display>) {
        if let Some(number) = number {
            self.line(key, number);
        }
    }

    fn millis(&mut self, key: &str, time: Option<Duration>) {
        self.number(key, time.map(|time| time.as_millis()));
    }

    /// A rate in bytes per second, in the largest unit that it is a whole number of.
    fn rate(&mut self, key: &str, bytes_per_sec: Option<u64>) {
        let Some(bits) = bytes_per_sec.map(|rate| rate * 8) else { return };
        let units = [(1_000_000_000, "Gbit/s"), (1_000_000, "Mbit/s"), (1_000, "kbit/s")];
        if let Some((unit, name)) = units.into_iter().find(|(unit, _)| bits % unit == 0) {
            self.text(key, &format!("{} {name}", bits / unit));
        }
    }

    fn list(&mut self, key: &str, items: Option<&Vec<impl Display>>) {
        let of = |items: &Vec<_>| items.iter().map(|item| quoted(&format!("{item}"))).collect::<Vec<_>>().join(", ");
        self.number(key, items.map(|items| format!("[{}]", of(items))));
    }
}

fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}
