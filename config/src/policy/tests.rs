use std::time::Duration;

use masque::priority::{DEFAULT_URGENCY, of_urgency};
use sched::{
    class::{DEFAULT_PRIORITY, DropRule, Late},
    path::Placement,
    stream::{Expiry, Level},
};

use super::*;
use crate::{schema::tests::POLICY, tests::assert_refused};

mod properties;
mod requests;
mod schedules;

/// Reads a text, and asserts that the schema accepts it as well.
fn valid(text: &str) -> Policy {
    let policy = Policy::from_toml(text).unwrap_or_else(|errors| panic!("{text}\nis refused:\n{errors}"));
    POLICY.assert_takes(text);
    policy
}

fn refusals(text: &str) -> String {
    Policy::from_toml(text).expect_err(text).to_string()
}

/// Returns the class `a` of a text that defines it after the default one.
fn class_a(text: &str) -> ClassSettings {
    let class = valid(text).classes.remove(1);
    assert_eq!(class.name, "a");
    class
}

const fn millis(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

#[test]
fn without_sections_there_is_one_class_and_no_rule() {
    assert_eq!(valid(""), Policy::default());
    assert_eq!(valid("[schedule]\n[class.default]\n"), Policy::default());
    assert_eq!(Policy::default().classes.len(), 1);
}

#[test]
fn every_discipline_has_its_word() {
    let rows = [
        ("discipline = \"rr\"", Discipline::Rr),
        ("discipline = \"fcfs\"", Discipline::Fcfs),
        ("discipline = \"edf\"", Discipline::Edf { expiry: Expiry::Soft }),
        ("discipline = \"edf\"\nexpiry = \"hard\"", Discipline::Edf { expiry: Expiry::Hard }),
        ("discipline = \"abs\"", Discipline::Abs),
        ("low = \"fcfs\"", Discipline::Ml { low: Low::Fcfs }),
        ("discipline = \"ml\"\nlow = \"edf\"", Discipline::Ml { low: Low::Edf }),
        ("low = \"wfq\"", Discipline::Ml { low: Low::Wfq }),
        ("discipline = \"wfq\"", Discipline::Wfq),
        ("discipline = \"lottery\"", Discipline::Lottery),
    ];
    for (text, discipline) in rows {
        assert_eq!(valid(&format!("[schedule]\n{text}")).schedule.discipline, discipline, "{text}");
    }
    assert_eq!(valid("schedule.low_mark_packets = 4").schedule.low_mark_packets, Some(4));
}

#[test]
fn a_class_is_read_as_written() {
    let text = r#"
[class.a]
level = "high"
priority = 100
priorities = [50, 200]
weight = 65535
deadline_ms = 1000
shortest_deadline_ms = 200
drop = "codel"
target_ms = 10
rate_up = "64 kbit/s"
rate_down = "5 Mbit/s"
packets_up = 700
packets_down = 900
dscp = 46
late = "refuse"
placement = "sa-ecf"
"#;
    let expected = ClassSettings {
        name: "a".into(),
        level: Level::High,
        priority: 100,
        priorities: 50..=200,
        weight: u16::MAX,
        deadline: millis(1_000),
        shortest_deadline: millis(200),
        drop: DropRule::CoDel { target: Duration::from_millis(10), interval: Duration::from_millis(100) },
        rate_up: Some(8_000),
        rate_down: Some(625_000),
        packets_up: Some(700),
        packets_down: Some(900),
        dscp: Some(46),
        late: Late::Refuse,
        placement: Placement::SaEcf,
    };
    assert_eq!(class_a(text), expected);
}

#[test]
fn signals_may_lower_but_not_raise_unless_the_class_says_so() {
    let class = class_a("[class.a]\npriority = 200\ndeadline_ms = 300\n");
    assert_eq!((class.priorities, class.shortest_deadline), (0..=200, millis(300)));
    assert_eq!(class_a("[class.a]\nshortest_deadline_ms = 5\n").deadline, None);
}

#[test]
fn a_class_takes_the_keys_it_leaves_out_from_the_one_it_is_like() {
    let text = r#"
[class.c]
like = "b"
weight = 3
[class.b]
like = "a"
drop = "sojourn"
sojourn_ms = 50
priority = 90
[class.a]
drop = "codel"
target_ms = 7
priority = 120
dscp = 10
weight = 2
"#;
    let policy = valid(text);
    let [_, c, b, a] = &policy.classes[..] else { panic!("{policy:?}") };
    assert_eq!((c.dscp, b.dscp, a.dscp), (Some(10), Some(10), Some(10)));
    assert_eq!((c.weight, b.weight, a.weight), (3, 2, 2));
    assert_eq!((c.drop, b.drop), (DropRule::Sojourn(Duration::from_millis(50)), c.drop));
    // A default that follows from another key uses the class's own value of that key.
    assert_eq!((&c.priorities, &b.priorities, &a.priorities), (&(0..=90), &(0..=90), &(0..=120)));
    let default = valid("[class.b]\nlike = \"default\"\n[class.default]\nweight = 9\n");
    assert_eq!((&default.classes[0].name[..], default.classes[1].weight), (DEFAULT, 9));
    assert_eq!(class_a("[class.a]\nlike = \"default\""), ClassSettings::named("a"));
}

#[test]
fn a_mistake_in_a_key_is_reported_where_it_stands_and_not_where_another_class_copies_it() {
    let text = r#"
[class.b]
like = "a"
[class.a]
weight = 0
drop = "sojourn"
priorities = [0, 100]
target_ms = 200
[class.c]
like = "b"
drop = "codel"
shortest_deadline_ms = 1
[class.d]
like = "c"
"#;
    let errors = Policy::from_toml(text).unwrap_err();
    let positions: Vec<_> = errors.iter().map(|error| (error.line, &error.key[..])).collect();
    let expected = [(5, "class.a.weight"), (6, "class.a.drop"), (7, "class.a.priorities"), (8, "class.a.target_ms")];
    assert_eq!(positions, expected);
}

#[test]
fn every_refusal_says_where_which_key_what_and_what_instead() {
    let a = |more: &str| format!("[class.a]\n{more}");
    let rows = [
        ("[relay]", "line 1, column 2: relay: ", "unknown key", "known here: schedule, class, rule"),
        ("[classes.a]", "line 1, column 2: classes: ", "unknown key", "did you mean class?"),
        ("class = 3", "line 1, column 9: class: ", "3 does not fit", "such as [class.bulk]"),
        ("[class]\nweight = 3", "line 2, column 1: class.weight: ", "3 does not fit", "such as [class.bulk]"),
        ("[[class]]", "line 1, column 1: class: ", "this array does not fit", "such as [class.bulk]"),
        ("[class.Bulk]", "line 1, column 8: class.Bulk: ", "\"Bulk\" does not fit", "1 to 32 lower-case letters"),
        ("[class.\"\"]", "line 1, column 8: class.: ", "\"\" does not fit", "1 to 32"),
        (&a("wieght = 1"), "line 2, column 1: class.a.wieght: ", "unknown key", "did you mean weight?"),
        (&a("weight = 0"), "line 2, column 10: class.a.weight: ", "0 is out of range", "from 1 to 65535"),
        (&a("weight = 65536"), "line 2, column 10: class.a.weight: ", "out of range", "from 1 to 65535"),
        (&a("priority = 256"), "line 2, column 12: class.a.priority: ", "out of range", "from 0 to 255"),
        (&a("priority = -1"), "line 2, column 12: class.a.priority: ", "out of range", "from 0 to 255"),
        (&a("deadline_ms = 0"), "line 2, column 15: class.a.deadline_ms: ", "0 is out", "from 1 to 3600000"),
        (&a("dscp = 64"), "line 2, column 8: class.a.dscp: ", "out of range", "from 0 to 63"),
        (&a("level = \"top\""), "line 2, column 9: class.a.level: ", "\"top\" does not fit", "\"high\" \"low\""),
        (&a("priorities = [9]"), "line 2, column 14: class.a.priorities: ", "does not fit", "[0, 159]"),
        (&a("priorities = [9, 8]"), "line 2, column 14: class.a.priorities: ", "does not fit", "[0, 159]"),
        (&a("priorities = [0, 256]"), "line 2, column 14: class.a.priorities: ", "does not fit", "[0, 159]"),
        (&a("priorities = [0, 100]"), "line 2, column 14: class.a.priorities: ", "not within", "widen priorities"),
        (
            &a("deadline_ms = 5\nshortest_deadline_ms = 6"),
            "line 3, column 24: class.a.shortest_deadline_ms: ",
            "shorter than the shortest",
            "raise deadline_ms",
        ),
        (&a("drop = \"sojourn\""), "line 2, column 8: class.a.drop: ", "missing", "add sojourn_ms ="),
        (&a("sojourn_ms = 5"), "line 2, column 14: class.a.sojourn_ms: ", "only drop", "write drop = \"sojourn\""),
        (&a("target_ms = 5"), "line 2, column 13: class.a.target_ms: ", "only drop", "write drop = \"codel\""),
        (&a("interval_ms = 5"), "line 2, column 15: class.a.interval_ms: ", "only drop", "write drop = \"codel\""),
        (
            &a("drop = \"codel\"\ninterval_ms = 5"),
            "line 3, column 15: class.a.interval_ms: ",
            "not below interval_ms",
            "lower target_ms",
        ),
        (&a("drop = \"newest\""), "line 2, column 8: class.a.drop: ", "does not fit", "\"oldest\" \"sojourn\""),
        (&a("rate_up = 5"), "line 2, column 11: class.a.rate_up: ", "5 does not fit", "\"5 Mbit/s\""),
        (&a("rate_down = \"5Mbit/s\""), "line 2, column 13: class.a.rate_down: ", "does not fit", "a space"),
        (&a("rate_down = \"5 MB/s\""), "line 2, column 13: class.a.rate_down: ", "does not fit", "Mbit/s"),
        (&a("rate_down = \"+5 Mbit/s\""), "line 2, column 13: class.a.rate_down: ", "does not fit", "whole number"),
        (&a("rate_down = \"7 kbit/s\""), "line 2, column 13: class.a.rate_down: ", "does not fit", "8 kbit/s"),
        (&a("rate_down = \"18446744073709551615 Gbit/s\""), "line 2, column 13: ", "does not fit", "1000 Gbit/s"),
        (&a("like = \"b\""), "line 2, column 8: class.a.like: ", "there is no \"b\"", "known here: default, a"),
        (&a("like = \"a\""), "line 2, column 8: class.a.like: ", "cycle: a, then a", "remove it"),
        (
            "[class.a]\nlike = \"b\"\n[class.b]\nlike = \"c\"\n[class.c]\nlike = \"a\"",
            "line 2, column 8: class.a.like: ",
            "cycle: a, then b, then c, then a",
            "remove it",
        ),
        ("[schedule]\nlow = \"abs\"", "line 2, column 7: schedule.low: ", "\"abs\" does not fit", "\"wfq\""),
        (
            "[schedule]\ndiscipline = \"rr\"\nlow = \"rr\"",
            "line 3, column 7: schedule.low: ",
            "only the discipline \"ml\"",
            "write discipline = \"ml\"",
        ),
        (
            "[schedule]\nexpiry = \"hard\"",
            "line 2, column 10: schedule.expiry: ",
            "only the discipline \"edf\"",
            "write discipline = \"edf\"",
        ),
        ("schedule.discipline = \"drr\"", "line 1, column 23: schedule.discipline: ", "does not fit", "\"lottery\""),
        ("schedule.low_mark_packets = 0", "line 1, column 29: schedule.low_mark_packets: ", "out of", "1 to 1024"),
        ("[[rule]]\nuser = \"u\"", "line 1, column 1: rule.class: ", "missing", "add class = the name of a class"),
        ("[[rule]]\nclass = 1", "line 2, column 9: rule.class: ", "1 does not fit", "the name of a class"),
        (
            "[class.bulk]\n[[rule]]\nclass = \"bluk\"",
            "line 3, column 9: rule.class: ",
            "there is no \"bluk\"",
            "did you mean bulk?",
        ),
        ("[[rule]]\nclass = \"default\"\nuser = []", "line 3, column 8: rule.user: ", "empty", "add user = [...]"),
        (
            "[[rule]]\nclass = \"default\"\nto = \"10.0.0.1/8\"",
            "line 3, column 6: rule.to: ",
            "set after its prefix",
            "10.0.0.0/8",
        ),
        ("[[rule]]\nclass = \"default\"\nports = [0]", "line 3, column 10: rule.ports: ", "0 does", "1 to 65535"),
        ("[[rule]]\nclass = \"default\"\nprotocol = \"ip\"", "line 3, column 12: rule.protocol: ", "does", "\"udp\""),
        ("[[rule]]\nclass = \"default\"\nlistener = 443", "line 3, column 12: rule.listener: ", "does", "a port"),
    ];
    for (text, position, cause, remedy) in rows {
        assert_refused(text, &refusals(text), [position, cause, remedy]);
    }
}

#[test]
fn a_cycle_is_reported_once_and_not_for_those_outside() {
    let text = "[class.a]\nlike = \"b\"\n[class.b]\nlike = \"c\"\n[class.c]\nlike = \"b\"\n";
    assert_eq!(refusals(text).lines().count(), 1);
    assert!(refusals(text).starts_with("line 4, column 8: class.b.like: "));
}

#[test]
fn a_message_lists_no_more_names_than_one_can_read() {
    let many: String = (0..100).map(|class| format!("[class.c{class}]\n")).collect();
    let refusals = refusals(&(many + "[[rule]]\nclass = \"zzz\"\n"));
    assert!(refusals.ends_with("known here: default, c0, c1, c2, c3, c4, c5, c6, ..."), "{refusals}");
}

#[test]
fn there_are_at_most_255_classes_with_the_default_one() {
    let classes = |count: usize| (0..count).map(|class| format!("[class.c{class}]\n")).collect::<String>();
    assert_eq!(valid(&classes(254)).classes.len(), MAX_CLASSES);
    assert_eq!(valid(&(classes(254) + "[class.default]\n")).classes.len(), MAX_CLASSES);
    assert!(refusals(&classes(255)).contains("more than 255 classes"));
}

const OFFICE: &str = r#"
[class.voice]
[class.web]
[class.lab]

[[rule]]
class = "voice"
protocol = "udp"
ports = [5060, "16384-16484"]

[[rule]]
class = "lab"
user = ["ann", "bob"]
to = ["10.0.0.0/8", "*.lab.example"]

[[rule]]
class = "web"
listener = "192.0.2.1:443"

[[rule]]
class = "default"
user = "ann"

[[rule]]
class = "lab"
to = "web.example"
ports = 443
"#;

#[test]
fn the_first_rule_that_matches_gives_the_class() {
    let policy = valid(OFFICE);
    let rows = [
        (None, None, "10.0.0.1:5060", Protocol::Udp, "192.0.2.1:443", "voice"),
        (Some("ann"), None, "10.0.0.1:16400", Protocol::Udp, "192.0.2.1:443", "voice"),
        (Some("ann"), None, "10.0.0.1:16485", Protocol::Udp, "192.0.2.1:443", "lab"),
        (Some("bob"), None, "10.0.0.1:5060", Protocol::Tcp, "192.0.2.1:443", "lab"),
        (Some("bob"), Some("a.LAB.example."), "[2001:db8::1]:80", Protocol::Tcp, "192.0.2.1:444", "lab"),
        (Some("bob"), None, "[::ffff:10.0.0.1]:80", Protocol::Tcp, "192.0.2.1:444", "lab"),
        (Some("Bob"), None, "10.0.0.1:80", Protocol::Tcp, "192.0.2.1:443", "web"),
        (None, None, "10.0.0.1:80", Protocol::Tcp, "192.0.2.1:444", "default"),
        (Some("ann"), Some("web.example"), "11.0.0.1:443", Protocol::Tcp, "192.0.2.1:444", "default"),
        (Some("bob"), Some("web.example"), "11.0.0.1:443", Protocol::Tcp, "192.0.2.1:444", "lab"),
        (Some("bob"), Some("web.example"), "11.0.0.1:80", Protocol::Tcp, "192.0.2.1:444", "default"),
        (None, Some("lab.example"), "11.0.0.1:443", Protocol::Tcp, "192.0.2.1:444", "default"),
    ];
    for (user, name, address, protocol, listener, class) in rows {
        let (address, listener) = (address.parse().unwrap(), listener.parse().unwrap());
        let subject = Subject { user, name, address, translated: None, protocol, listener };
        let id = policy.classify(&subject);
        assert_eq!(policy.class(id).name, class, "{subject:?}");
        assert_eq!(policy.id_of(class), Some(id));
    }
    assert_eq!(policy.id_of("voip"), None);
    assert_eq!(policy.class(ClassId(99)).name, DEFAULT);
}

#[test]
fn a_rule_about_ipv4_also_concerns_targets_behind_the_operators_own_nat64() {
    let policy = valid("[class.a]\n[[rule]]\nclass = \"a\"\nto = \"10.0.0.0/8\"\n");
    let (address, listener) = ("[2001:db8:64::a00:1]:443".parse().unwrap(), "192.0.2.1:443".parse().unwrap());
    let rows = [(Some([10, 0, 0, 1]), "a"), (Some([11, 0, 0, 1]), DEFAULT), (None, DEFAULT)];
    for (translated, class) in rows {
        let translated = translated.map(Into::into);
        let subject = Subject { user: None, name: None, address, translated, protocol: Protocol::Tcp, listener };
        assert_eq!(policy.class(policy.classify(&subject)).name, class, "{subject:?}");
    }
}

#[test]
fn default_values_are_not_written() {
    assert_eq!(Policy::default().to_toml(), "[schedule]\ndiscipline = \"ml\"\n");
    let text = "[schedule]\ndiscipline = \"wfq\"\n\n[class.a]\nweight = 3\nrate_up = \"5 Mbit/s\"\n\n[[rule]]\nclass = \"a\"\n";
    assert_eq!(valid(text).to_toml(), text);
    assert_eq!(valid(OFFICE).to_toml().parse::<toml::Table>().unwrap().len(), 3);
    assert_eq!(Policy::from_toml(&valid(OFFICE).to_toml()), Ok(valid(OFFICE)));
}

#[test]
fn a_hundred_of_thousands_of_errors_are_reported() {
    for text in [(0..5_000).map(|n| format!("k{n} = 1\n")).collect::<String>(), "a\n".repeat(5_000)] {
        let errors = Policy::from_toml(&text).unwrap_err();
        assert_eq!((errors.iter().count(), errors.iter().next().unwrap().line), (100, 1));
    }
}

#[test]
fn rules_behind_one_without_conditions_are_warned_of() {
    let unreached = |text: &str| valid(text).unreached_rules().collect::<Vec<_>>();
    let (any, some) = ("[[rule]]\nclass = \"default\"\n", "[[rule]]\nclass = \"default\"\nuser = \"u\"\n");
    assert_eq!(unreached(&[some, any].concat()), []);
    assert_eq!(unreached(&[some, any, some, any].concat()), [(3, 2), (4, 2)]);
    // A rule that gives only a schedule is without effect after one that always gives one.
    let schedules = "[schedule.s]\n[[rule]]\nschedule = \"s\"\nuser = \"u\"\n";
    assert_eq!(
        unreached(&[any, some, &schedules.replace("[[rule]]", "[[rule]]\nclass = \"default\"")].concat()),
        [(2, 1)]
    );
    let always = "[[rule]]\nschedule = \"s\"\n";
    assert_eq!(unreached(&[schedules, always, some, always].concat()), [(4, 2)]);
}

#[test]
fn a_client_that_signals_the_default_is_equal_to_one_that_signals_nothing() {
    assert_eq!(DEFAULT_PRIORITY, of_urgency(DEFAULT_URGENCY));
}
