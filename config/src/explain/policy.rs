//! Explains the policy: its schedules, classes and rules, one a line.

use sched::{
    class::{ClassSettings, DropRule, Late},
    path::Placement,
    stream::{Discipline, Expiry, Low},
};

use super::quota::{packet_words, rate_words};
use crate::{
    policy::{Policy, PolicyRule, ScheduleSettings},
    section::Word as _,
    text::joined,
};

/// Returns the lines about the policy.
pub(super) fn policy(policy: &Policy) -> impl Iterator<Item = String> {
    let rule = |(index, rule): (usize, &PolicyRule)| {
        let schedule = rule.schedule.as_ref().map(|schedule| format!("schedule {schedule}"));
        let gives: Vec<_> = policy.class_of(rule).map(str::to_owned).into_iter().chain(schedule).collect();
        format!("  rule {}: {} for {}", index + 1, gives.join(" and "), conditions(rule))
    };
    let named = policy.schedules.iter().map(|(name, of)| format!("  schedule {name}: {}", schedule(of)));
    [format!("policy: {}", schedule(&policy.schedule))]
        .into_iter()
        .chain(named)
        .chain(policy.classes.iter().map(class))
        .chain(policy.rules.iter().enumerate().map(rule))
}

fn schedule(schedule: &ScheduleSettings) -> String {
    let order = match schedule.discipline {
        Discipline::Rr => "each in turn",
        Discipline::Fcfs => "first come, first served",
        Discipline::Edf { expiry: Expiry::Soft } => "by deadline, late ones too",
        Discipline::Edf { expiry: Expiry::Hard } => "by deadline, late ones reset",
        Discipline::Abs => "by priority",
        Discipline::Ml { low: Low::Rr } => "the high level by deadline, then the low one each in turn",
        Discipline::Ml { low: Low::Fcfs } => "the high level by deadline, then the low one first come, first served",
        Discipline::Ml { low: Low::Edf } => "the high level by deadline, then the low one by deadline",
        Discipline::Ml { low: Low::Wfq } => "the high level by deadline, then the low one by weight",
        Discipline::Wfq => "by weight",
        Discipline::Lottery => "lottery, by weight",
    };
    let mark = schedule.low_mark_packets.map_or("adapted to the path".into(), |mark| format!("at least {mark}"));
    format!("{order}; packets committed ahead: {mark}")
}

fn class(class: &ClassSettings) -> String {
    let level = class.level.word();
    let (lowest, highest) = (class.priorities.start(), class.priorities.end());
    let drops = match class.drop {
        DropRule::Oldest => "the oldest when full".into(),
        DropRule::Sojourn(wait) => format!("after {wait:?}"),
        DropRule::CoDel { target, interval } => format!("by CoDel (target {target:?}, interval {interval:?})"),
    };
    let (rate, packets) = (rate_words, packet_words);
    [
        Some(format!("  class {}: level {level}", class.name)),
        Some(format!("priority {} (by signal {lowest} to {highest})", class.priority)),
        Some(format!("weight {}", class.weight)),
        class.deadline.map(|deadline| format!("deadline {deadline:?}")),
        class.shortest_deadline.map(|shortest| format!("by signal {shortest:?} or longer")),
        Some(format!("drops {drops}")),
        rate("up", class.rate_up),
        rate("down", class.rate_down),
        packets("up", class.packets_up),
        packets("down", class.packets_down),
        class.dscp.map(|dscp| format!("DSCP {dscp}")),
        (class.placement != Placement::default()).then(|| format!("placement {}", class.placement.word())),
        (class.late == Late::Refuse).then(|| "late requests for models are refused".to_owned()),
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>()
    .join(", ")
}

fn conditions(rule: &PolicyRule) -> String {
    let conditions: Vec<_> = [
        rule.users.as_ref().map(|users| format!("user {}", users.join(" or "))),
        rule.to.as_ref().map(|to| format!("targets {}", joined(to))),
        rule.ports.as_ref().map(|ports| format!("port {ports}")),
        rule.protocol.map(|protocol| protocol.to_string()),
        rule.listeners.as_ref().map(|listeners| format!("listener {}", joined(listeners))),
        rule.models.as_ref().map(|models| format!("requests for model {}", models.join(" or "))),
        rule.service_tiers.as_ref().map(|tiers| format!("requests of tier {}", tiers.join(" or "))),
        rule.asked_classes.as_ref().map(|classes| format!("requests that ask for class {}", classes.join(" or "))),
    ]
    .into_iter()
    .flatten()
    .collect();
    if conditions.is_empty() { "everything".into() } else { conditions.join(", ") }
}
