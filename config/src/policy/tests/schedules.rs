//! Named schedules, and the connections that use them.

use super::*;
use crate::{Config, explain, sample::switched_on};

#[test]
fn every_refusal_of_a_schedule_says_where_what_and_what_instead() {
    let rows = [
        (
            "[schedule.a]\nlow = \"rr\"\ndisciplien = 1",
            "line 3, column 1: schedule.a.disciplien: ",
            "unknown key",
            "did you mean discipline?",
        ),
        (
            "[schedule.a]\ndiscipline = \"rr\"\nlow = \"rr\"",
            "line 3, column 7: schedule.a.low: ",
            "only the discipline \"ml\"",
            "write discipline = \"ml\"",
        ),
        ("[schedule.a.b]", "line 1, column 13: schedule.a.b: ", "unknown key", "known here: discipline, low"),
        (
            "[schedule.Bulk]",
            "line 1, column 11: schedule.Bulk: ",
            "\"Bulk\" does not fit",
            "1 to 32 lower-case letters",
        ),
        ("[schedule.low]", "line 1, column 1: schedule.low: ", "this table does not fit", "\"wfq\""),
        (
            "[schedule]\ndisciplien = \"rr\"",
            "line 2, column 1: schedule.disciplien: ",
            "unknown key",
            "did you mean discipline?",
        ),
        (
            "[schedule.shares]\n[[rule]]\nschedule = \"shraes\"",
            "line 3, column 12: rule.schedule: ",
            "there is no \"shraes\"",
            "did you mean shares?",
        ),
        (
            "[[rule]]\nschedule = \"a\"",
            "line 2, column 12: rule.schedule: ",
            "there is no \"a\"",
            "none is defined yet",
        ),
        (
            "[[rule]]\nschedule = 1",
            "line 2, column 12: rule.schedule: ",
            "1 does not fit",
            "the name of a [schedule.NAME]",
        ),
        (
            "[schedule.a]\n[[rule]]\nschedule = \"a\"\nprotocol = \"udp\"",
            "line 4, column 12: rule.protocol: ",
            "this key to single tunnels",
            "in a rule without this key",
        ),
    ];
    for (text, position, cause, remedy) in rows {
        assert_refused(text, &refusals(text), [position, cause, remedy]);
    }
}

#[test]
fn there_are_at_most_64_schedules_with_names() {
    let schedules = |count: usize| (0..count).map(|name| format!("[schedule.s{name}]\n")).collect::<String>();
    assert_eq!(valid(&schedules(64)).schedules.len(), MAX_SCHEDULES);
    assert!(refusals(&schedules(65)).contains("more than 64 schedules"));
}

#[test]
fn a_users_rule_sets_the_schedule_before_the_listener_and_the_listener_before_the_default() {
    let policy = valid(
        r#"
[schedule]
discipline = "rr"
[schedule.shares]
discipline = "wfq"
low_mark_packets = 3
[schedule.urgent]
[schedule.office]
discipline = "abs"
[class.a]
[[rule]]
class = "a"
user = "ann"
[[rule]]
schedule = "shares"
class = "default"
user = ["ann", "bob"]
[[rule]]
schedule = "urgent"
user = "ann"
[[rule]]
schedule = "office"
user = "cat"
listener = "192.0.2.1:443"
"#,
    );
    let [one, other] = ["192.0.2.1:443", "192.0.2.1:444"].map(|address| address.parse().unwrap());
    for (user, listener, own, expected) in [
        (None, one, None, None),
        (None, one, Some("urgent"), Some("urgent")),
        (None, one, Some("gone"), None),
        (Some("dan"), one, Some("urgent"), Some("urgent")),
        (Some("ann"), one, None, Some("shares")),
        (Some("bob"), one, Some("urgent"), Some("shares")),
        (Some("cat"), one, Some("urgent"), Some("office")),
        (Some("cat"), other, Some("urgent"), Some("urgent")),
    ] {
        assert_eq!(policy.schedule_of(user, listener, own), expected, "{user:?} {listener} {own:?}");
    }
    let shares = ScheduleSettings { discipline: Discipline::Wfq, low_mark_packets: Some(3) };
    assert_eq!(*policy.schedule_named(Some("shares")), shares);
    // Keys that a named schedule omits are not taken from the general one.
    assert_eq!(*policy.schedule_named(Some("urgent")), ScheduleSettings::default());
    for name in [None, Some("gone")] {
        assert_eq!(policy.schedule_named(name).discipline, Discipline::Rr);
    }
    // Rules without a class assign no class.
    let (user, protocol) = (Some("cat"), Protocol::Udp);
    let subject = Subject { user, name: None, address: other, translated: None, protocol, listener: one };
    assert_eq!(policy.classify(&subject), ClassId::default());
    assert_eq!(policy.class(policy.classify(&Subject { user: Some("ann"), ..subject })).name, "a");
}

#[test]
fn a_check_says_which_schedules_there_are_and_what_goes_by_them() {
    let config = Config::from_toml(&switched_on()).unwrap();
    let said = explain(&config, std::time::SystemTime::UNIX_EPOCH);
    for (begins, part) in [
        ("  schedule shares: by weight", "packets committed ahead: adapted to the path"),
        ("  schedule by-deadline: by deadline, late ones reset", ""),
        ("  listens on 192.0.2.1:8443 ", "class realtime-short, schedule by-deadline"),
        ("forward 127.0.0.1:5353 ", "schedule shares, tries again after"),
        ("proxy 127.0.0.1:1080 ", "schedule shares, tries again after"),
        ("  rule 5: schedule shares for user branch-office", ""),
    ] {
        let is_said = said.lines().any(|line| line.starts_with(begins) && line.contains(part));
        assert!(is_said, "{begins} … {part} is not in\n{said}");
    }
}
